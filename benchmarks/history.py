"""The rows that matter, commit by commit: `benchmarks/history.jsonl`, a picture of it, and the rule
that tells a regression from noise.

    make bench-history                      add the run that BENCHMARKS.md tells of, and judge it
    python -m benchmarks.history --from-git [N]   make the file anew from N versions of that page

A line has one run: the commit that was measured, its day, and for each row the median ratio with
the least and the greatest of its rounds. Ratios are of one run on one machine, so runs of different
machines compare, where times would not.

A row has regressed if neither the usual noise of a machine nor one bad round explains its fall: its
median lies below `NOISE` of the middle of the last `COMPARED` runs, and its best round lies below
the worst round of each of them. A change that explains a fall says so in BENCHMARKS.md, "Limits of
the slow rows"; from then on the lower figure is the usual one.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

ROOT: Final = Path(__file__).parents[1]
FILE: Final = ROOT / "benchmarks" / "history.jsonl"
PAGE: Final = ROOT / "BENCHMARKS.md"
PICTURE: Final = ROOT / "benchmarks" / "pictures" / "history.png"

NOISE: Final = 0.8
"""Neighbours on a machine move a ratio by a fifth, as BENCHMARKS.md tells."""

COMPARED: Final = 5

ROWS: Final = (
    "commit-100",
    "commit-100-8",
    "commit-10k",
    "transact",
    "delete-range-all",
    "bulk-load",
    "import-1mb",
    "get",
    "get-many",
    "scan",
    "scan-arrow",
    "ycsb-a",
    "ycsb-e-lmdb",
    "rows-load",
    "rows-find-sqlite",
    "join-store-1",
    "join-store-100",
    "changes-arrow",
    "backup",
    "backup-full",
    "restore",
    "spark-import",
    "serve-put-redis",
    "disk",
)

_ROW: Final = re.compile(r"\| ([a-z0-9.-]+) \| \**([\d.]+)\** \(([\d.]+)\.\.([\d.]+)\) \|")
_COMMIT: Final = re.compile(r"\| commit \| ([0-9a-f]{7,}), measured on (\d{4}-\d\d-\d\d) \|")


class Ratio(NamedTuple):
    """The ratio of a row: the median of its rounds, the least and the greatest."""

    median: float
    least: float
    most: float


class Run(NamedTuple):
    """One run of the benchmark."""

    commit: str
    day: str
    rows: dict[str, Ratio]

    def to_json(self) -> str:
        """The line of the file."""
        rows = {name: list(ratio) for name, ratio in self.rows.items()}
        return json.dumps({"commit": self.commit, "day": self.day, "rows": rows})

    @classmethod
    def from_json(cls, line: str) -> Run:
        """The run of a line. Raises `ValueError` or `KeyError` for one that is none."""
        found = json.loads(line)
        rows = {name: Ratio(*map(float, ratio)) for name, ratio in found["rows"].items()}
        return cls(found["commit"], found["day"], rows)


Runs: TypeAlias = Sequence[Run]


def run_of(page: str) -> Run | None:
    """The run that a version of BENCHMARKS.md tells of; None for a page without a commit. Of a row
    that is measured at several scales this takes the ratio at a million rows."""
    fact = _COMMIT.search(page)
    if fact is None:
        return None
    rows: dict[str, Ratio] = {}
    for scale in re.split(r"^## ", page, flags=re.MULTILINE):
        is_usual = scale.startswith("1,000,000 rows")
        for name, *figures in _ROW.findall(scale):
            if name in ROWS and (is_usual or name not in rows):
                rows[name] = Ratio(*map(float, figures))
    return Run(fact[1], fact[2], {name: rows[name] for name in ROWS if name in rows})


def regressions(runs: Runs) -> list[str]:
    """A sentence for each row of the last run that has regressed."""
    *before, last = runs
    found = []
    for name, now in last.rows.items():
        past = [run.rows[name] for run in before[-COMPARED:] if name in run.rows]
        if len(past) < 2:
            continue
        usual = statistics.median(ratio.median for ratio in past)
        if now.median < NOISE * usual and now.most < min(ratio.least for ratio in past):
            found.append(f"{name}: {now.median:g}, usually {usual:g}")
    return found


def added(runs: Runs, run: Run) -> list[Run]:
    """The runs with one more; another run of the same commit takes the place of the last."""
    kept = runs[:-1] if runs and runs[-1].commit == run.commit else runs
    return [*kept, run]


def read(file: Path) -> list[Run]:
    """The runs of a file, oldest first."""
    return [Run.from_json(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, runs: Iterable[Run]) -> None:
    """Write the file."""
    file.write_text("".join(f"{run.to_json()}\n" for run in runs))


def from_git(count: int) -> list[Run]:
    """The runs of the last `count` versions of the page in git, oldest first."""
    git = ["git", "-C", str(ROOT)]
    named = subprocess.check_output(
        [*git, "log", f"-{count}", "--format=%H", "--", PAGE.name], text=True
    )
    runs: list[Run] = []
    for commit in reversed(named.split()):
        page = subprocess.check_output([*git, "show", f"{commit}:{PAGE.name}"], text=True)
        run = run_of(page)
        if run is not None and run.rows:
            runs = added(runs, run)
    return runs


def draw(runs: Runs, picture: Path) -> None:
    """A small chart for each row: its median by run, between the least and the greatest."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    across = 4
    figure, charts = plt.subplots(
        -(-len(ROWS) // across), across, figsize=(10, 10), sharex=True, constrained_layout=True
    )
    for chart, name in zip(charts.flat, ROWS, strict=True):
        at = [number for number, run in enumerate(runs) if name in run.rows]
        ratios = [runs[number].rows[name] for number in at]
        least, most = [each.least for each in ratios], [each.most for each in ratios]
        chart.fill_between(at, least, most, color="#2a7f4f", alpha=0.25, linewidth=0)
        chart.plot(at, [each.median for each in ratios], color="#2a7f4f", marker=".", markersize=3)
        chart.set_title(name, fontsize=8, loc="left")
        chart.set_ylim(bottom=0)
        chart.set_xticks([])
        chart.tick_params(labelsize=7)
        for side in ("top", "right"):
            chart.spines[side].set_visible(False)
    figure.suptitle(
        f"{runs[0].day} to {runs[-1].day}: kvstore's rate over its baseline's", fontsize=9
    )
    figure.savefig(picture, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Add a run, draw, judge. Returns 1 if a row has regressed."""
    if arguments[:1] == ["--from-git"]:
        runs = from_git(int(arguments[1]) if arguments[1:] else 100)
    else:
        run = run_of(PAGE.read_text())
        assert run is not None, f"{PAGE.name} tells of no commit"
        runs = added(read(FILE), run)
    write(FILE, runs)
    draw(runs, PICTURE)
    found = regressions(runs)
    print(f"{len(runs)} runs, the last of {runs[-1].commit}, {runs[-1].day}")
    print("\n".join(f"regressed: {each}" for each in found) or "no row has regressed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
