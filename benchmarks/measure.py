"""Measuring: subjects take turns in rounds, and each round gives each subject one ratio.

The machine's speed drifts by tens of percent within a minute, for all subjects alike. So a ratio
compares two runs of the same round only, and the order of the subjects rotates from round to round.
A figure is the median of its rounds; the least and the largest ratio are kept beside it.

The ratio of processor times is taken too. It leaves out waiting for the disk and for
neighbours, so it is the steadier one for work that waits for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.subject import Process, Result
from benchmarks.workloads import Contender, Workload


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
    workload: Workload,
    subjects: Mapping[str, Process],
    peers: Sequence[str],
    *,
    rounds: int,
    first_step: int = 0,
) -> list[Figure]:
    """Run `workload` for all its contenders in turn."""
    line = [workload.baseline, workload.ours]
    if workload.peers_call is not None:
        line += [Contender(peer, workload.peers_call) for peer in peers]
    roles = ["baseline", "ours", *["peer"] * (len(line) - 2)]
    durability = [subjects[each.subject].facts.get("durability", "") for each in line]
    figures = [
        Figure(workload.name, each.name, role, durability=waits)
        for each, role, waits in zip(line, roles, durability, strict=True)
    ]
    for number in range(-workload.warm, rounds):
        places = list(range(len(line)))
        turn = number % len(line)
        results = {}
        for place in places[turn:] + places[:turn]:
            figure, contender = figures[place], line[place]
            if figure.problem:
                continue
            result = _run(workload, subjects[contender.subject], contender, first_step + number)
            if result.problem:
                figure.problem = result.problem
            elif number >= 0:
                results[place] = result
        _note(workload, figures, results)
    for figure in figures[1:]:
        if not figure.ratios and not figure.problem:
            figure.problem = f"no baseline: {figures[0].problem}"
    return figures


def _note(workload: Workload, figures: list[Figure], results: Mapping[int, Result]) -> None:
    """Note one round: each subject's result against the baseline's, which is the first."""
    for place, result in results.items():
        figure = figures[place]
        figure.peak_bytes = max(figure.peak_bytes, result.peak_bytes)
        figure.grown_bytes = max(figure.grown_bytes, result.grown_bytes)
        figure.per_second.append(1 / _cost(workload, result))
        if 0 not in results:
            continue
        figure.ratios.append(_cost(workload, results[0]) / _cost(workload, result))
        if workload.has_cpu and workload.per != "bytes":
            costs = [each.cpu_seconds / max(each.items, 1) for each in (results[0], result)]
            figure.cpu_ratios.append(costs[0] / max(costs[1], 1e-12))


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
