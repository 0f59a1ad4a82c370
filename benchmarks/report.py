"""The table and the picture of one or more runs: `python -m benchmarks.report [FILE...]`.

Every number is a ratio to the baseline of its row, in the same run: above 1 is faster than raw
rocksdict (or smaller, for disk). A figure that could not be taken is a dash, with its reason below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import PEERS, Size, ending, reading, writing

_PEER_CLASSES = {where.rpartition(":")[2]: name for name, where in PEERS.items()}


def write(files: Sequence[Path], target: Path) -> None:
    """Write `table.md` below `target`."""
    facts, lines = read(files)
    (target / "table.md").write_text(table(facts, lines))


def read(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Facts of the runs, and their lines. Later files win where two have the same figure."""
    facts: list[dict[str, Any]] = []
    lines: dict[tuple[int, str, str], dict[str, Any]] = {}
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


def ours(lines: Sequence[dict[str, Any]], workload: str, rows: int) -> dict[str, Any] | None:
    """The line of the store itself (in whatever state the workload asks for)."""
    found = [
        line
        for line in lines
        if line["workload"] == workload
        and line["rows"] == rows
        and line["subject"] not in {"Raw", *_PEER_CLASSES}
    ]
    # Where the baseline is the store itself, the other state of it is the one that counts.
    return found[-1] if found else None


def table(facts: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown: one row a workload and size, one column a subject."""
    peers = [p for c, p in _PEER_CLASSES.items() if any(line["subject"] == c for line in lines)]
    classes = {name: kind for kind, name in _PEER_CLASSES.items()}
    by_place = {(ln["rows"], ln["workload"], ln["subject"]): ln for ln in lines}
    out = [
        f"| workload | rows | kvstore | spread | reach | {' | '.join(peers)} |",
        f"|---|--:|--:|---|--:|{'--:|' * len(peers)}",
    ]
    problems: list[str] = []
    for rows in sorted({line["rows"] for line in lines}):
        for workload, reach in workload_order().items():
            mine = ours(lines, workload, rows)
            if mine is None:
                continue
            cells = [_ratio(mine, reach), _spread(mine), "-" if reach is None else f"{reach:g}"]
            for peer in peers:
                line = by_place.get((rows, workload, classes[peer]))
                cells.append("-" if line is None else _ratio(line, None))
                if line is not None and line["problem"] not in ("", "not there"):
                    problems.append(f"* {workload}, {peer}: {line['problem']}")
            out.append(f"| {workload} | {rows:,} | {' | '.join(cells)} |")
    out += ["", *dict.fromkeys(problems)]
    for fact in facts:
        out.append(f"\nRun at {fact['commit']}: {fact['processor']}, {fact['cores']} cores, ")
        out.append(f"Python {fact['python']}, load {fact['load']}, {fact['packages']}.")
    return "\n".join(out) + "\n"


def _ratio(line: dict[str, Any], reach: float | None) -> str:
    if line["median"] is None:
        return "-"
    text = f"{line['median']:.2f}" if line["median"] >= 0.1 else f"{line['median']:.2g}"
    return f"**{text}**" if reach is not None and line["median"] >= reach else text


def _spread(line: dict[str, Any]) -> str:
    ratios = line["ratios"]
    return f"{min(ratios):.2f}..{max(ratios):.2f}" if ratios else "-"


if __name__ == "__main__":
    directory = Path(__file__).parent / "out"
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(directory.glob("*.jsonl"))[-1:]
    write(chosen, directory)
    print((directory / "table.md").read_text())
