"""The one runner: `python -m benchmarks [--write | --quick | --growth] [--rows N,N] [--only NAME]`.

Each run leaves one file of JSON lines in benchmarks/out: the facts of the machine, one line for
each figure, and how long the run took. `--write` makes BENCHMARKS.md, its pictures and README's
table of that file (`benchmarks.document`); without it the tables are printed. `--quick` also plays
a year of a minute (`benchmarks.year`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import document, machine, report
from benchmarks.measure import Figure, measure
from benchmarks.subject import Process
from benchmarks.workloads import PEERS, Call, Size, Stage, Workload, scenes
from benchmarks.year.levels import table
from benchmarks.year.run import minute

OUT = Path(__file__).parent / "out"


class Part(NamedTuple):
    """The wanted workloads at one number of rows."""

    rows: int
    wants: Callable[[Workload], bool]
    has_peers: bool = False
    is_quick: bool = False


def _everything(_workload: Workload) -> bool:
    return True


def _growing(workload: Workload) -> bool:
    return workload.grows


def _by_spark(workload: Workload) -> bool:
    return workload.name.startswith("spark-")


def _joins(workload: Workload) -> bool:
    return workload.name.startswith("join-")


WRITTEN = (
    Part(100_000, lambda workload: _growing(workload) and not _joins(workload)),
    Part(1_000_000, lambda workload: not _by_spark(workload), has_peers=True),
    Part(
        3_000_000,
        lambda workload: _by_spark(workload) or (_growing(workload) and not _joins(workload)),
    ),
    Part(10_000_000, lambda workload: _growing(workload) and _joins(workload)),
)
"""The parts of BENCHMARKS.md. Spark's jobs are too short to compare below some million rows; joins
have histories of two versions for each row."""


def main() -> None:
    """Parse, run, report."""
    options = _parsed()
    OUT.mkdir(exist_ok=True)
    facts = machine.facts()
    target = OUT / f"{facts['commit']}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.jsonl"
    broken: list[str] = []
    with target.open("w") as lines:
        print(json.dumps({"facts": facts}), file=lines, flush=True)
        for part in options.parts:
            size = Size.of(part.rows, rounds=options.rounds)
            for figure in _run(size, part, options):
                line = _line(figure, part.rows)
                print(json.dumps(line), file=lines, flush=True)
                print(_text(line), flush=True)
                if figure.problem and figure.role != "peer":
                    broken.append(_text(line))
        print(json.dumps({"seconds": round(time.monotonic() - _STARTED)}), file=lines)
    if options.write:
        document.write(target)
        print(f"figures: {target}; written: BENCHMARKS.md, its pictures, README's table")
    else:
        print(report.tables(report.read(target)[1]))
        print(f"figures: {target}")
    failures = ["not measured, by a failure:", *broken] if broken else []
    if any(part.is_quick for part in options.parts):
        _say("a year")
        lines = minute(options.scratch)
        print(f"\n## A year\n\n{table(lines)}\n")
        failures += [f"not level over the year: {line.name}" for line in lines if not line.is_level]
    if failures:
        sys.exit("\n".join(failures))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--write", action="store_true", help="write BENCHMARKS.md: some 40 minutes")
    kind.add_argument("--quick", action="store_true", help="150,000 rows, under five minutes")
    kind.add_argument(
        "--growth", action="store_true", help="what must not grow, at 100,000 to 10,000,000 rows"
    )
    parser.add_argument("--rows", help="how many rows; several sizes with commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload, >= 3")
    parser.add_argument("--only", action="append", default=[], help="a workload, or its beginning")
    parser.add_argument("--peers", help="which peers, with commas; none: an empty string")
    parser.add_argument("--scratch", help="where the stores lie; the system's place by default")
    options = parser.parse_args()
    if options.rounds < 3:
        parser.error("a median needs at least 3 rounds")
    options.peers = (
        list(PEERS) if options.peers is None else [p for p in options.peers.split(",") if p]
    )
    options.parts = _parts(options)
    return options


def _parts(options: argparse.Namespace) -> Sequence[Part]:
    """The parts of the run that was asked for."""
    if options.write and not options.rows:
        return WRITTEN
    usual = "100000,1000000,10000000" if options.growth else "1000000"
    rows = options.rows or ("150000" if options.quick else usual)
    wants = _growing if options.growth else _everything
    return [
        Part(
            int(number.replace("_", "")),
            wants,
            has_peers=not options.growth,
            is_quick=options.quick and not options.only,
        )
        for number in rows.split(",")
    ]


def _run(size: Size, part: Part, options: argparse.Namespace) -> Iterator[Figure]:
    """Every wanted workload at one size, scene by scene."""

    def is_wanted(workload: Workload) -> bool:
        is_named = any(workload.name.startswith(name) for name in options.only)
        return part.wants(workload) and (is_named or not options.only)

    for scene in scenes(size):
        if part.is_quick and not scene.is_quick:
            continue
        stages = [
            Stage(stage.prepare, list(filter(is_wanted, stage.workloads))) for stage in scene.stages
        ]
        if any(stage.workloads for stage in stages):
            peers = options.peers if scene.has_peers and part.has_peers else []
            yield from _play(size, stages, peers, options.scratch)


def _play(
    size: Size, stages: Sequence[Stage], peers: Sequence[str], scratch: str | None
) -> Iterator[Figure]:
    """One scene: its subjects are started, prepared, measured, and ended."""
    contenders = [c for stage in stages for w in stage.workloads for c in (w.baseline, w.ours)]
    named = [PEERS[name] for name in peers]
    with ExitStack() as stack:
        place = stack.enter_context(
            tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True)
        )
        subjects: dict[str, Process] = {}
        for where in dict.fromkeys([*(c.subject for c in contenders), *named]):
            directory = Path(place) / where.rpartition(":")[2].lower()
            subjects[where] = process = Process(where, directory, size.rows)
            stack.callback(process.close)
        last = max(number for number, stage in enumerate(stages) if stage.workloads)
        for number, stage in enumerate(stages[: last + 1]):
            for call in stage.prepare:
                _prepare(subjects, call)
            for place_in_stage, group in enumerate(stage.groups, 1):
                first = 1000 * number + 30 * place_in_stage
                _say(", ".join(workload.name for workload in group))
                yield from measure(group, subjects, named, rounds=size.rounds, first_step=first)


def _prepare(subjects: Mapping[str, Process], call: Call) -> None:
    _say(call.operation)
    for process in subjects.values():
        result = process.call(call.operation, **call.arguments)
        if result.problem and result.problem != "not there":
            process.broken = process.broken or f"{call.operation}: {result.problem}"


_STARTED = time.monotonic()


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {what}", file=sys.stderr, flush=True)


def _line(figure: Figure, rows: int) -> dict[str, Any]:
    return {
        "workload": figure.workload,
        "subject": figure.subject,
        "role": figure.role,
        "rows": rows,
        "median": figure.median,
        "ratios": figure.ratios,
        "cpu_ratios": figure.cpu_ratios,
        "per_second": figure.per_second,
        "peak_bytes": figure.peak_bytes,
        "grown_bytes": figure.grown_bytes,
        "problem": figure.problem,
        "durability": figure.durability,
    }


def _text(line: dict[str, Any]) -> str:
    head = f"{line['rows']:>9} {line['workload']:<18} {line['subject']:<18}"
    if line["median"] is None:
        return f"{head} - {line['problem']}"
    ratios = line["ratios"]
    spread = f"({min(ratios):.3f} .. {max(ratios):.3f})"
    cpu = line["cpu_ratios"]
    beside = f"  cpu {statistics.median(cpu):.3f}" if cpu else ""
    return f"{head} {line['median']:8.3f}  {spread}{beside}"


if __name__ == "__main__":
    main()
