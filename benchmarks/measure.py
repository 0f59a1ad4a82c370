"""Measuring: subjects take turns in rounds, and each round gives each subject one ratio.

The machine's speed drifts by tens of percent within a minute, for all subjects alike. So a ratio
compares two runs of the same round only, and the order of the subjects rotates from round to round.
A figure is the median of its rounds; the least and the largest ratio are kept beside it. Workloads
of one group share their rounds: a call that several of them compare runs once a round.

The ratio of processor times is taken too. It leaves out waiting for the disk and for
neighbours, so it is the steadier one for work that waits for nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.subject import Process, Result
from benchmarks.workloads import Contender, Workload

GROUP_SECONDS = 40.0
"""Work of minutes warms what it needs, and takes the same time again."""


@dataclass(slots=True)
class Figure:
    """The rounds of one subject at one workload."""

    workload: str
    subject: str
    role: str
    """`baseline`, `ours` or `peer`."""
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """The most resident memory of the process while it worked."""
    grown_bytes: int = 0
    """The part of `peak_bytes` that the work itself took; the rest was resident before it."""
    problem: str = ""
    durability: str = ""
    """The wait that ends a commit of the subject: `fsync`, or `none`."""

    @property
    def median(self) -> float | None:
        """The figure. It is None where nothing was measured, and `problem` says why."""
        return statistics.median(self.ratios) if self.ratios else None


def measure(
    together: Sequence[Workload],
    subjects: Mapping[str, Process],
    peers: Sequence[str],
    *,
    rounds: int,
    first_step: int = 0,
) -> list[Figure]:
    """Run workloads that are measured together: a call that several of them have runs once a
    round. No round begins after `GROUP_SECONDS`; a warm round that takes longer counts."""
    rows = [_Row.of(workload, subjects, peers) for workload in together]
    line: list[Contender] = []
    for contender in (each for row in rows for each in row.contenders):
        if _place(line, contender) == len(line):
            line.append(contender)
    problems: dict[int, str] = {}
    began = time.monotonic()
    for number in range(-together[0].warm, rounds):
        places = list(range(len(line)))
        turn = number % len(line)
        results: dict[int, Result] = {}
        for place in places[turn:] + places[:turn]:
            if place in problems:
                continue
            contender = line[place]
            process = subjects[contender.subject]
            result = _run(together[0], process, contender, first_step + number)
            if result.problem:
                problems[place] = result.problem
            else:
                results[place] = result
        is_long = time.monotonic() - began > GROUP_SECONDS
        for row in rows if number >= 0 or is_long else ():
            row.note([results.get(_place(line, each)) for each in row.contenders])
        if is_long:
            break
    for row in rows:
        row.end([problems.get(_place(line, each), "") for each in row.contenders])
    return [figure for row in rows for figure in row.figures]


class _Row(NamedTuple):
    """A workload with its contenders, the baseline first, and a figure for each."""

    workload: Workload
    contenders: Sequence[Contender]
    figures: Sequence[Figure]

    @classmethod
    def of(cls, workload: Workload, subjects: Mapping[str, Process], peers: Sequence[str]) -> _Row:
        line = [workload.baseline, workload.ours]
        if workload.peers_call is not None:
            line += [Contender(peer, workload.peers_call) for peer in peers]
        roles = ["baseline", "ours", *["peer"] * (len(line) - 2)]
        durability = [subjects[each.subject].facts.get("durability", "") for each in line]
        figures = [
            Figure(workload.name, each.name, role, durability=waits)
            for each, role, waits in zip(line, roles, durability, strict=True)
        ]
        return cls(workload, line, figures)

    def note(self, results: Sequence[Result | None]) -> None:
        """Note one round: each contender's result against the baseline's, which is the first."""
        base = results[0]
        for figure, result in zip(self.figures, results, strict=True):
            if result is None:
                continue
            figure.peak_bytes = max(figure.peak_bytes, result.peak_bytes)
            figure.grown_bytes = max(figure.grown_bytes, result.grown_bytes)
            figure.per_second.append(1 / _cost(self.workload, result))
            if base is None:
                continue
            figure.ratios.append(_cost(self.workload, base) / _cost(self.workload, result))
            if self.workload.has_cpu and self.workload.per != "bytes":
                costs = [each.cpu_seconds / max(each.items, 1) for each in (base, result)]
                figure.cpu_ratios.append(costs[0] / max(costs[1], 1e-12))

    def end(self, problems: Sequence[str]) -> None:
        """Tell the reason of each figure that is missing."""
        for figure, problem in zip(self.figures, problems, strict=True):
            figure.problem = problem
            if not figure.ratios and not problem:
                figure.problem = f"no baseline: {problems[0]}"


def _place(line: Sequence[Contender], wanted: Contender) -> int:
    """The place in `line` of the same call of the same subject, or the length of `line`."""
    same = ((each.subject, each.call) == (wanted.subject, wanted.call) for each in line)
    return next((place for place, is_same in enumerate(same) if is_same), len(line))


def _run(workload: Workload, process: Process, contender: Contender, number: int) -> Result:
    """One turn of one subject. Short operations are repeated, and the least time counts."""
    call = contender.call
    arguments = dict(call.arguments)
    items, repeats = call.items or workload.items, workload.repeats
    if call.operation in process.facts.get("slow", ()):
        arguments |= workload.slow_arguments
        items, repeats = items and workload.slow_arguments.get("count", items), 1
    best: Result | None = None
    for repeat in range(repeats):
        step = 1 + number * workload.repeats + repeat
        result = process.call(call.operation, step=step, **arguments)
        if result.problem:
            return result
        if items is not None and result.items != items:
            return Result(problem=f"handled {result.items} items of {items}")
        if best is None or result.seconds < best.seconds:
            best = result
    assert best is not None
    return best


def _cost(workload: Workload, result: Result) -> float:
    if workload.per == "bytes":
        return float(result.items)
    return result.seconds / max(result.items, 1)
