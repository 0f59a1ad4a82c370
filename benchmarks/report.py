"""The figures of a run as Markdown: one table for each scale.

A figure is the rate of a subject over the rate of its baseline in the same round, so above 1 is
faster than the baseline (or smaller, for disk).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.workloads import PEERS, Size, Workload, section, workloads

Line: TypeAlias = dict[str, Any]

PEER_NAMES = {where.rpartition(":")[2]: name for name, where in PEERS.items()}
"""The name of each peer, by the class that measures it."""


def read(file: Path) -> tuple[Line, list[Line]]:
    """The facts of the run that wrote `file`, and its figures."""
    first, *lines = map(json.loads, file.read_text().splitlines())
    took = lines.pop() if lines and "seconds" in lines[-1] else {}
    return first["facts"] | took, lines


class Scale:
    """The figures of one run at one number of rows."""

    def __init__(self, lines: Sequence[Line], rows: int) -> None:
        self.rows = rows
        self.lines = [line for line in lines if line["rows"] == rows]
        self._by_subject = {(line["workload"], line["subject"]): line for line in self.lines}
        self._ours = {line["workload"]: line for line in self.lines if line["role"] == "ours"}
        known = workloads(Size.of(1_000_000, rounds=3))
        self.workloads = [workload for workload in known if workload.name in self._ours]

    def ours(self, workload: Workload) -> Line:
        return self._ours[workload.name]

    def peer(self, workload: Workload, kind: str) -> Line | None:
        line = self._by_subject.get((workload.name, kind))
        return line if line is not None and line["role"] == "peer" else None

    def rate(self, workload: Workload) -> float | None:
        """Items per second of ours; None where nothing was measured, or where items are bytes."""
        line = self._ours.get(workload.name)
        if line is None or workload.per == "bytes" or not line["per_second"]:
            return None
        return statistics.median(line["per_second"])


def scales(lines: Sequence[Line]) -> list[Scale]:
    """The scales of a run, smallest first."""
    return [Scale(lines, rows) for rows in sorted({line["rows"] for line in lines})]


def widest(found: Sequence[Scale]) -> Scale:
    """The scale at which most workloads were measured."""
    return max(found, key=lambda scale: len(scale.workloads))


def tables(lines: Sequence[Line]) -> str:
    """A heading and a table for each scale, then the reasons for missing figures."""
    found = scales(lines)
    out: list[str] = []
    for scale in found:
        out += [f"## {scale.rows:,} rows", "", *_table(scale, found[0]), ""]
    missing = list(_missing(lines))
    if missing:
        out += ["Not measured:", "", *missing, ""]
    return "\n".join(out).rstrip()


def _table(scale: Scale, smallest: Scale) -> Iterator[str]:
    """One row a workload. Peers have a column each, larger scales one that compares the rates."""
    peers = [kind for kind in PEER_NAMES if any(scale.peer(w, kind) for w in scale.workloads)]
    unsynced = {line["subject"] for line in scale.lines if _is_unsynced(line)}
    headings = ["workload", "kvstore", "target", "per second"]
    if scale is not smallest:
        headings.append(f"against {smallest.rows:,} rows")
    headings += [f"{PEER_NAMES[kind]}{' (1)' if kind in unsynced else ''}" for kind in peers]
    yield f"| {' | '.join(headings)} |"
    yield f"|---|{'--:|' * (len(headings) - 1)}"
    heading = ""
    for workload in scale.workloads:
        if section(workload.name) != heading:
            heading = section(workload.name)
            yield f"| *{heading}* |{' |' * (len(headings) - 1)}"
        mine, rate = scale.ours(workload), scale.rate(workload)
        cells = [workload.name, figure(mine, workload.reach)]
        cells.append("" if workload.reach is None else f"{workload.reach:g}")
        cells.append("" if rate is None else _short(rate))
        if scale is not smallest:
            base = smallest.rate(workload)
            cells.append(f"{rate / base:.2f}" if rate and base else "")
        for kind in peers:
            line = scale.peer(workload, kind)
            cells.append("" if line is None else _median(line))
        yield f"| {' | '.join(cells)} |"


def figure(line: Line, target: float | None = None) -> str:
    """`median (least..most)`, the median bold where it reaches the target; or a dash."""
    if line["median"] is None:
        return "-"
    median = _median(line)
    if target is not None and line["median"] >= target:
        median = f"**{median}**"
    return f"{median} ({_ratio(min(line['ratios']))}..{_ratio(max(line['ratios']))})"


def _median(line: Line) -> str:
    return "-" if line["median"] is None else _ratio(line["median"])


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _short(rate: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


def _is_unsynced(line: Line) -> bool:
    return line["role"] == "peer" and line["durability"] not in ("fsync", "")


def _missing(lines: Sequence[Line]) -> Iterator[str]:
    """A line for each reason why a subject has no figures, with the workloads that lack them."""
    missing: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line["problem"] not in ("", "not there"):
            subject = PEER_NAMES.get(line["subject"], line["subject"])
            missing.setdefault((subject, line["problem"]), []).append(f"`{line['workload']}`")
    for (subject, problem), names in missing.items():
        yield f"* {subject}: {problem} ({', '.join(dict.fromkeys(names))})"
