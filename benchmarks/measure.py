"""Measuring: subjects take turns, round by round, and each round gives each a ratio.

The machine's speed drifts by tens of percent within a minute, and it drifts for all: so a ratio is
only ever taken between two runs of the same round, and the order of the subjects turns by one
from round to round. Of the rounds the median counts; the least and the largest are kept.

Beside the ratio of times stands that of processor time. It leaves out waiting, for the disk and for
neighbours on the machine: for work that waits for nothing it is the steadier of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.subject import Process, Result
from benchmarks.workloads import STEPPED, Call, Workload


@dataclass(slots=True)
class Figure:
    """What came of one subject at one workload."""

    workload: str
    subject: str
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    problem: str = ""
    durability: str = ""
    """What a commit of the subject waits for."""

    @property
    def median(self) -> float | None:
        """The figure; None where there is none, and `problem` says why."""
        return statistics.median(self.ratios) if self.ratios else None


def measure(
    workload: Workload,
    subjects: dict[str, Process],
    peers: Sequence[str],
    *,
    rounds: int,
    first_step: int = 0,
) -> list[Figure]:
    """Run `workload` for all its contenders, interleaved."""
    line: list[tuple[str, Call]] = [c for c in workload.contenders if c[0] in subjects]
    baseline = line[0][0]
    if workload.peers_call is not None:
        line += [(peer, workload.peers_call) for peer in peers]
    figures = {
        subject: Figure(
            workload.name, subject, durability=subjects[subject].facts.get("durability", "")
        )
        for subject, _ in line
    }
    for number in range(rounds):
        turned = line[number % len(line) :] + line[: number % len(line)]
        costs: dict[str, float] = {}
        cpu_costs: dict[str, float] = {}
        for subject, call in turned:
            figure = figures[subject]
            if figure.problem:
                continue
            best = _run(workload, subjects[subject], call, first_step + number)
            if best.problem:
                figure.problem = best.problem
                continue
            costs[subject] = cost = _cost(workload, best)
            cpu_costs[subject] = best.cpu_seconds / max(best.items, 1)
            figure.peak_bytes = max(figure.peak_bytes, best.peak_bytes)
            figure.per_second.append(1 / cost)
        for subject, cost in costs.items():
            if baseline in costs:
                figures[subject].ratios.append(costs[baseline] / cost)
                cpu = cpu_costs[baseline] / max(cpu_costs[subject], 1e-12)
                figures[subject].cpu_ratios.append(cpu)
    return list(figures.values())


def _run(workload: Workload, process: Process, call: Call, step: int) -> Result:
    """One turn of one subject; short operations are repeated and the least time counts."""
    arguments = dict(call.arguments)
    items = workload.items
    if call.operation in process.facts.get("slow", ()):
        arguments |= workload.slow_arguments
        items = items and workload.slow_arguments.get("count", items)
    best: Result | None = None
    for repeat in range(workload.repeats):
        if call.operation in STEPPED:
            arguments["step"] = 1 + step * workload.repeats + repeat
        result = process.call(call.operation, **arguments)
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
