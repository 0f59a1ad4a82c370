"""The one runner: `python -m benchmarks [--quick | --growth] [--rows N,N] [--only NAME]`.

Writes one JSON line a figure to benchmarks/out/<commit>-<time>.jsonl, after a first line with the
facts of the machine, and then the table and the picture (`benchmarks.report`). What was measured
of the same commit before, at other sizes or of other workloads, is in them as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import Figure, measure
from benchmarks.subject import Process
from benchmarks.workloads import PEERS, Call, Size, Stage, Workload, scenes
from kvstore.loops import COMPILED

OUT = Path(__file__).parent / "out"
_PACKAGES = (
    "rocksdict", "pyarrow", "numpy", "lmdb", "plyvel", "duckdb", "deltalake", "pylance",
    "pyiceberg", "arcticdb", "pyspark",
)  # fmt: skip


def main() -> None:
    """Parse, run, report."""
    options = _parsed()
    OUT.mkdir(exist_ok=True)
    facts = machine_facts()
    target = OUT / f"{facts['commit']}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.jsonl"
    with target.open("w") as lines:
        print(json.dumps({"facts": facts, "command": sys.argv[1:]}), file=lines, flush=True)
        for rows in options.rows:
            size = Size.of(rows, rounds=options.rounds)
            for figure in _run(size, options):
                line = _line(figure, rows)
                print(json.dumps(line), file=lines, flush=True)
                print(_text(line), flush=True)
    report.write(sorted(OUT.glob(f"{facts['commit']}-*.jsonl")), OUT)
    print(f"figures: {target}; table and picture beside it; {time.monotonic() - _STARTED:.0f} s")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    kind = parser.add_mutually_exclusive_group()
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
    usual = "100000,1000000,10000000" if options.growth else "1000000"
    rows = options.rows or ("150000" if options.quick else usual)
    options.rows = [int(n.replace("_", "")) for n in rows.split(",")]
    options.peers = (
        list(PEERS) if options.peers is None else [p for p in options.peers.split(",") if p]
    )
    return options


def _run(size: Size, options: argparse.Namespace) -> Iterator[Figure]:
    """Every wanted workload at one size, scene by scene."""

    def is_wanted(workload: Workload) -> bool:
        return (workload.grows or not options.growth) and (
            not options.only or any(workload.name.startswith(name) for name in options.only)
        )

    for scene in scenes(size):
        if options.quick and not (scene.is_quick or options.only):
            continue
        stages = [
            Stage(stage.prepare, list(filter(is_wanted, stage.workloads))) for stage in scene.stages
        ]
        if any(stage.workloads for stage in stages):
            peers = scene.has_peers and not options.growth
            yield from _play(size, stages, options.peers if peers else [], options.scratch)


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
            for place_in_stage, workload in enumerate(stage.workloads, 1):
                first = 1000 * number + 30 * place_in_stage
                _say(workload.name)
                yield from measure(workload, subjects, named, rounds=size.rounds, first_step=first)


def _prepare(subjects: Mapping[str, Process], call: Call) -> None:
    _say(call.operation)
    for process in subjects.values():
        result = process.call(call.operation, **call.arguments)
        if result.problem and result.problem != "not there":
            process.broken = process.broken or f"{call.operation}: {result.problem}"


_STARTED = time.monotonic()


def _say(what: str) -> None:
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {what}", file=sys.stderr, flush=True)


def machine_facts() -> dict[str, Any]:
    """What a reader has to know of the machine and the versions."""
    installed = {
        found.metadata["Name"].lower(): found.version for found in metadata.distributions()
    }
    versions = {package: installed.get(package, "missing") for package in _PACKAGES}
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "loops": "compiled" if COMPILED else "plain",
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(part, 2) for part in os.getloadavg()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": versions,
    }


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


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
