"""The table and the picture of one or more runs: `python -m benchmarks.report [FILE...]`.

Every number is a ratio to the baseline of its row, in the same run: above 1 is faster than raw
rocksdict (or smaller, for disk). A figure that could not be taken is a dash, with its reason below.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.workloads import PEERS, Size, ending, reading, writing

Line: TypeAlias = dict[str, Any]

_PEERS = {where.rpartition(":")[2]: name for name, where in PEERS.items()}


def write(files: Sequence[Path], target: Path) -> None:
    """Write `table.md` and `picture.png` below `target`."""
    facts, lines = read(files)
    (target / "table.md").write_text(table(facts, lines))
    largest = max((line["rows"] for line in lines if line["median"] is not None), default=None)
    if largest is not None:
        picture([line for line in lines if line["rows"] == largest], target / "picture.png")


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


def workload_order() -> dict[str, float | None]:
    """Names of all workloads in table order, with what each is to reach."""
    size = Size.of(1_000_000, rounds=3)
    return {w.name: w.reach for w in (*writing(size), *reading(size), *ending(size))}


def ours(lines: Sequence[Line], workload: str, rows: int) -> Line | None:
    """The line of the store itself, in whatever state the workload asks for."""
    found = [
        line
        for line in lines
        if line["workload"] == workload
        and line["rows"] == rows
        and line["subject"] not in {"Raw", *_PEERS}
    ]
    # Where the baseline is the store itself, its other state is the one that counts.
    return found[-1] if found else None


def table(facts: Sequence[Line], lines: Sequence[Line]) -> str:
    """The figures as Markdown: one row a workload and size, one column a subject."""
    peers = [(kind, p) for kind, p in _PEERS.items() if any(ln["subject"] == kind for ln in lines)]
    by_place = {(line["rows"], line["workload"], line["subject"]): line for line in lines}
    unsynced = {ln["subject"] for ln in lines if ln.get("durability", "fsync") not in ("fsync", "")}
    names = "".join(f" {name}{' (1)' if kind in unsynced else ''} |" for kind, name in peers)
    out = [
        f"| workload | rows | kvstore | least..most | processor time | reach | peak MB |{names}",
        f"|---|--:|--:|---|--:|--:|--:|{'--:|' * len(peers)}",
    ]
    problems: list[str] = []
    for rows in sorted({line["rows"] for line in lines}):
        for workload, reach in workload_order().items():
            mine = ours(lines, workload, rows)
            if mine is None:
                continue
            cells = [
                _ratio(mine, reach),
                _spread(mine),
                _cpu(mine),
                "-" if reach is None else f"{reach:g}",
                f"{mine['peak_bytes'] / 1e6:.0f}",
            ]
            for kind, name in peers:
                line = by_place.get((rows, workload, kind))
                cells.append("-" if line is None else _ratio(line, None))
                if line is not None and line["problem"] not in ("", "not there"):
                    problems.append(f"* {workload}, {name}: {line['problem']}")
            out.append(f"| {workload} | {rows:,} | {' | '.join(cells)} |")
    out += ["", "(1) does not sync its commits."] if unsynced else [""]
    out += dict.fromkeys(problems)
    for fact in facts:
        packages = ", ".join(f"{name} {version}" for name, version in fact["packages"].items())
        out.append(
            f"\nCommit {fact['commit']}, {fact['processor']}, {fact['cores']} cores, load at the"
            f" start {fact['load'][0]}, Python {fact['python']}, {packages}."
        )
    return "\n".join(out) + "\n"


def _ratio(line: Line, reach: float | None) -> str:
    if line["median"] is None:
        return "-"
    text = f"{line['median']:.2f}" if line["median"] >= 0.1 else f"{line['median']:.2g}"
    return f"**{text}**" if reach is not None and line["median"] >= reach else text


def _spread(line: Line) -> str:
    ratios = line["ratios"]
    return f"{min(ratios):.2f}..{max(ratios):.2f}" if ratios else "-"


def _cpu(line: Line) -> str:
    ratios = line.get("cpu_ratios")
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def picture(lines: Sequence[Line], target: Path) -> None:
    """One line a workload on a logarithmic scale: ours, what it is to reach, the peers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = lines[0]["rows"]
    shown = [
        (name, reach, mine)
        for name, reach in workload_order().items()
        if (mine := ours(lines, name, rows)) is not None and mine["median"] is not None
    ]
    figure, axes = plt.subplots(figsize=(10, 0.36 * len(shown) + 1.8))
    colours = dict(zip(_PEERS, plt.get_cmap("tab10").colors, strict=False))
    for place, (name, reach, mine) in enumerate(shown):
        axes.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
        if reach is not None:
            axes.plot(reach, place, "|", color="#999999", markersize=16, markeredgewidth=2)
        for line in lines:
            if line["workload"] == name and line["subject"] in _PEERS and line["median"]:
                colour = colours[line["subject"]]
                axes.plot(line["median"], place, "o", color=colour, markersize=5, alpha=0.75)
        axes.plot([min(mine["ratios"]), max(mine["ratios"])], [place] * 2, color="black", lw=1.2)
        axes.plot(mine["median"], place, "D", color="black", markersize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(f"times the speed of raw rocksdict, same run ({rows:,} rows); right is better")
    handles = [
        axes.plot([], [], "D", color="black", label="kvstore, least to most")[0],
        axes.plot([], [], "|", color="#999999", markersize=14, label="to reach")[0],
        *(
            axes.plot([], [], "o", color=colours[kind], label=name)[0]
            for kind, name in _PEERS.items()
            if any(line["subject"] == kind and line["median"] for line in lines)
        ),
    ]
    figure.legend(handles=handles, loc="upper center", ncol=5, frameon=False, fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.8 / figure.get_figheight()))
    figure.savefig(target, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    directory = Path(__file__).parent / "out"
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(directory.glob("*.jsonl"))[-1:]
    write(chosen, directory)
    print((directory / "table.md").read_text())
