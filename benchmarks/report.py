"""The tables and the picture of one or more runs: `python -m benchmarks.report [FILE...]`.

Every number is a ratio to the baseline of its row, in the same run: above 1 is faster than raw
rocksdict (or smaller, for disk). A figure that could not be taken is a dash, with its reason below.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.workloads import PEERS, Size, Workload, section, workloads

Line: TypeAlias = dict[str, Any]

_PEERS = {where.rpartition(":")[2]: name for name, where in PEERS.items()}
_MET, _MISSED, _PLAIN = "#2a7f4f", "#c0392b", "#333333"


def write(files: Sequence[Path], target: Path) -> None:
    """Write `table.md` and `picture.png` below `target`."""
    facts, lines = read(files)
    (target / "table.md").write_text(tables(facts, lines))
    if any(line["role"] == "ours" and line["median"] for line in lines):
        picture(lines, target / "picture.png")


def read(files: Sequence[Path]) -> tuple[list[Line], list[Line]]:
    """Facts of the runs, and their lines. Later files win where two have the same figure."""
    facts: list[Line] = []
    lines: dict[tuple[int, str, str], Line] = {}
    for file in files:
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if "facts" in line:
                facts.append(line["facts"])
            else:
                lines[line["rows"], line["workload"], line["subject"]] = line
    return facts, list(lines.values())


class _Run:
    """The lines of one number of rows."""

    def __init__(self, lines: Sequence[Line], rows: int) -> None:
        self.rows = rows
        self.lines = [line for line in lines if line["rows"] == rows]
        self._ours = {ln["workload"]: ln for ln in self.lines if ln["role"] == "ours"}
        self._peers = {(ln["workload"], ln["subject"]): ln for ln in self.lines}
        self.workloads = [w for w in _known() if w.name in self._ours]

    def ours(self, workload: Workload) -> Line:
        return self._ours[workload.name]

    def peer(self, workload: Workload, kind: str) -> Line | None:
        line = self._peers.get((workload.name, kind))
        return line if line is not None and line["role"] == "peer" else None

    @property
    def is_whole(self) -> bool:
        """Whether more than the growth run was measured."""
        return not all(w.grows for w in self.workloads)


def _known() -> list[Workload]:
    return workloads(Size.of(1_000_000, rounds=3))


def _runs(lines: Sequence[Line]) -> list[_Run]:
    return [_Run(lines, rows) for rows in sorted({line["rows"] for line in lines})]


# -- tables -------------------------------------------------------------------------------------


def tables(facts: Sequence[Line], lines: Sequence[Line]) -> str:
    """The figures as Markdown: a table for each number of rows, and one of what grows."""
    runs = _runs(lines)
    out: list[str] = []
    for run in runs:
        if run.is_whole or len(runs) == 1:
            out += [f"## {run.rows:,} rows", "", *_table(run), ""]
    if len(runs) > 1:
        out += ["## Growth", "", *_growth(runs), ""]
    unsynced = {_PEERS[ln["subject"]] for ln in lines if _is_unsynced(ln)}
    if unsynced:
        out += [f"(1) does not sync its commits: {', '.join(sorted(unsynced))}.", ""]
    out += dict.fromkeys(_problems(lines))
    out += [f"\n{line}" for line in _machines(facts)]
    return "\n".join(out) + "\n"


def _machines(facts: Sequence[Line]) -> Iterator[str]:
    """What ran where, once for all runs that only differ in how busy the machine was."""
    loads: dict[tuple[str, str], list[float]] = {}
    for fact in facts:
        packages = ", ".join(f"{name} {version}" for name, version in fact["packages"].items())
        machine = (
            f"Commit {fact['commit']}, {fact['processor']}, {fact['cores']} cores,"
            f" {fact['memory_bytes'] / 2**30:.0f} GiB"
        )
        loops = fact.get("loops", "plain")
        software = f"Python {fact['python']}, {loops} loops, {packages}."
        loads.setdefault((machine, software), []).append(fact["load"][0])
    for (machine, software), found in loads.items():
        yield f"{machine}, load at the start {min(found)} to {max(found)}, {software}"


def _table(run: _Run) -> Iterator[str]:
    """One row a workload, one column a subject; memory is the peak, and the work's own part."""
    peers = [kind for kind in _PEERS if any(run.peer(w, kind) for w in run.workloads)]
    unsynced = {line["subject"] for line in run.lines if _is_unsynced(line)}
    names = "".join(f" {_PEERS[kind]}{' (1)' if kind in unsynced else ''} |" for kind in peers)
    yield (
        "| workload | kvstore | least..most | processor time | reach | per second | peak MB"
        f" (own) |{names}"
    )
    yield f"|---|--:|---|--:|--:|--:|--:|{'--:|' * len(peers)}"
    heading = ""
    for workload in run.workloads:
        if section(workload.name) != heading:
            heading = section(workload.name)
            yield f"| *{heading}* |{' |' * (6 + len(peers))}"
        mine = run.ours(workload)
        cells = [
            _ratio(mine, workload.reach),
            _spread(mine),
            _cpu(mine),
            "-" if workload.reach is None else f"{workload.reach:g}",
            _rate(workload, mine),
            f"{mine['peak_bytes'] / 1e6:.0f} ({mine['grown_bytes'] / 1e6:.0f})",
        ]
        for kind in peers:
            line = run.peer(workload, kind)
            cells.append("-" if line is None else _ratio(line, None))
        yield f"| {workload.name} | {' | '.join(cells)} |"


def _growth(runs: Sequence[_Run]) -> Iterator[str]:
    """Ratio, and in brackets the rate as a multiple of that in the smallest store."""
    yield "The rate as a multiple of that in the smallest store stands in brackets."
    yield ""
    yield f"| workload |{''.join(f' {run.rows:,} |' for run in runs)} reach |"
    yield f"|---|{'--:|' * len(runs)}--:|"
    for workload, found in _grown(runs):
        first = statistics.median(found[0][1]["per_second"])
        by_rows = {
            run.rows: f"{_ratio(line, workload.reach)}"
            f" ({statistics.median(line['per_second']) / first:.2f})"
            for run, line in found
        }
        cells = [by_rows.get(run.rows, "-") for run in runs]
        reach = "-" if workload.reach is None else f"{workload.reach:g}"
        yield f"| {workload.name} | {' | '.join(cells)} | {reach} |"


def _grown(runs: Sequence[_Run]) -> Iterator[tuple[Workload, list[tuple[_Run, Line]]]]:
    """Workloads measured at several sizes, with their lines, smallest first."""
    for workload in _known():
        found = [(run, run.ours(workload)) for run in runs if workload in run.workloads]
        found = [(run, line) for run, line in found if line["median"] is not None]
        if workload.grows and len(found) > 1:
            yield workload, found


def _problems(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line["problem"] not in ("", "not there"):
            yield f"* {line['workload']}, {line['subject']}: {line['problem']}"


def _is_unsynced(line: Line) -> bool:
    return line["role"] == "peer" and line["durability"] not in ("fsync", "")


def _ratio(line: Line, reach: float | None) -> str:
    if line["median"] is None:
        return "-"
    text = f"{line['median']:.2f}" if line["median"] >= 0.1 else f"{line['median']:.2g}"
    return f"**{text}**" if reach is not None and line["median"] >= reach else text


def _spread(line: Line) -> str:
    ratios = line["ratios"]
    return f"{min(ratios):.2f}..{max(ratios):.2f}" if ratios else "-"


def _cpu(line: Line) -> str:
    ratios = line["cpu_ratios"]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _rate(workload: Workload, line: Line) -> str:
    if workload.per == "bytes" or not line["per_second"]:
        return "-"
    rate = statistics.median(line["per_second"])
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


# -- picture ------------------------------------------------------------------------------------


def picture(lines: Sequence[Line], target: Path) -> None:
    """The largest whole run on a logarithmic scale, in two columns of workloads; and how what must
    not grow does as the store grows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = _runs(lines)
    run = max(runs, key=lambda run: (run.is_whole, run.rows))
    grown = list(_grown(runs))
    columns = _columns(run)
    height = 0.25 * max(map(_height, columns)) + 1.6
    widths = [1.0] * len(columns) + [0.8] * bool(grown)
    figure, (panels,) = plt.subplots(
        ncols=len(widths), figsize=(8 * sum(widths), height), width_ratios=widths, squeeze=False
    )
    shown = [mine for w in run.workloads if (mine := run.ours(w))["median"] is not None]
    far = [ratio for mine in shown for ratio in mine["ratios"]]
    for axes, column in zip(panels, columns, strict=False):
        _draw_ratios(axes, run, column)
        axes.set_xlim(min(0.04, min(far) / 1.5), max(12.0, max(far) * 1.5))
    if grown:
        _draw_growth(panels[-1], grown)
    for axes in panels:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    handles: dict[str, Any] = {}
    for axes in panels[: len(columns)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(
        f"Times the speed of the baseline in the same run, {run.rows:,} rows: right is better",
        y=1 - 0.08 / height,
        fontsize=12,
    )
    figure.legend(
        handles.values(),
        handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.35 / height),
        ncol=12,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.65 / height))
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _columns(run: _Run) -> list[list[Workload]]:
    """The workloads in two columns of about one height, cut between sections."""
    found: dict[str, list[Workload]] = {}
    for workload in run.workloads:
        if run.ours(workload)["median"] is not None:
            found.setdefault(section(workload.name), []).append(workload)
    parts = list(found.values())
    if len(parts) < 2:
        return parts
    cuts = ([list(chain(*parts[:cut])), list(chain(*parts[cut:]))] for cut in range(1, len(parts)))
    return min(cuts, key=lambda both: max(map(_height, both)))


def _height(column: Sequence[Workload]) -> float:
    """Lines that a column takes, headings included."""
    return len(column) + 1.5 * len({section(workload.name) for workload in column})


def _draw_ratios(axes: Any, run: _Run, column: Sequence[Workload]) -> None:
    """A line a workload: ours in green where it is as far as it is to reach, red where not."""
    import matplotlib.pyplot as plt

    colours = dict(zip(_PEERS, plt.get_cmap("tab10").colors, strict=False))
    place, heading, places = 0.0, "", []
    for workload in column:
        mine, reach = run.ours(workload), workload.reach
        if section(workload.name) != heading:
            heading = section(workload.name)
            place += 0.5
            axes.text(0, place, heading, transform=axes.get_yaxis_transform(), weight="bold")
            place += 1
        axes.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
        for kind, name in _PEERS.items():
            line = run.peer(workload, kind)
            if line is not None and line["median"]:
                ratio = line["median"]
                axes.plot(ratio, place, "o", color=colours[kind], ms=5, alpha=0.8, label=name)
        colour, what = _PLAIN, "kvstore, no target"
        if reach is not None:
            axes.plot(reach, place, "|", color="#999999", ms=13, mew=2, label="to reach")
            met = mine["median"] >= reach
            colour = _MET if met else _MISSED
            what = f"kvstore, {'reached' if met else 'not reached'}"
        axes.plot([min(mine["ratios"]), max(mine["ratios"])], [place] * 2, color=colour, lw=1.4)
        axes.plot(mine["median"], place, "D", color=colour, ms=7, label=what)
        places.append(place)
        place += 1
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [workload.name for workload in column], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place, -0.3)


def _draw_growth(axes: Any, grown: Sequence[tuple[Workload, list[tuple[_Run, Line]]]]) -> None:
    """Rates over the rate in the smallest store; flat is what is wanted."""
    for workload, found in grown:
        rates = [statistics.median(line["per_second"]) for _, line in found]
        rows = [run.rows for run, _ in found]
        axes.plot(rows, [rate / rates[0] for rate in rates], "o-", ms=4, label=workload.name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.1, low), max(10, high))  # so that what is flat looks flat
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("Rate, as the store grows: level is what is wanted", fontsize=10)
    axes.set_xlabel("rows in the store; the rate in the smallest is 1")
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    directory = Path(__file__).parent / "out"
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(directory.glob("*.jsonl"))[-1:]
    write(chosen, directory)
    print((directory / "table.md").read_text())
