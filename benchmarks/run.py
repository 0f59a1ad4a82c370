"""The one runner: `python -m benchmarks.run [--quick] [--rows N,N] [--only NAME] [--no-peers]`.

Writes one JSON line a figure to benchmarks/out/<commit>-<time>.jsonl, after a first line with the
facts of the machine, and then the table and the picture (`benchmarks.report`).
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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import Figure, measure
from benchmarks.subject import Process
from benchmarks.workloads import (
    HUNDRED_RANGES,
    IMPORTED,
    ONE_RANGE,
    OURS,
    PEERS,
    RAW,
    UNTESTED,
    Size,
    Workload,
    ending,
    reading,
    writing,
)

OUT = Path(__file__).parent / "out"
_PACKAGES = (
    "rocksdict", "pyarrow", "numpy", "lmdb", "plyvel", "duckdb", "deltalake", "pylance",
    "pyiceberg", "arcticdb",
)  # fmt: skip


def main() -> None:
    """Parse, run, report."""
    options = _parsed()
    OUT.mkdir(exist_ok=True)
    facts = machine_facts()
    target = OUT / f"{facts['commit']}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.jsonl"
    with target.open("w") as lines:
        print(json.dumps({"facts": facts, "command": sys.argv[1:]}), file=lines)
        for rows in options.rows:
            size = Size.of(rows, rounds=options.rounds)
            for figure in _run(size, options, growth=len(options.rows) > 1):
                line = _line(figure, rows)
                print(json.dumps(line), file=lines, flush=True)
                print(_text(line), flush=True)
    report.write([target], OUT)
    print(f"figures: {target}; table and picture beside it")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200,000 rows, under five minutes")
    parser.add_argument("--rows", help="how many rows; several, with commas: growth rows only")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload, >= 3")
    parser.add_argument("--only", action="append", default=[], help="a workload, or its beginning")
    parser.add_argument("--peers", help="which peers, with commas; none: an empty string")
    parser.add_argument("--scratch", help="where the stores lie; the system's place by default")
    options = parser.parse_args()
    rows = options.rows or ("200000" if options.quick else "1000000")
    options.rows = [int(n.replace("_", "")) for n in rows.split(",")]
    options.peers = (
        [p for p in (options.peers or "").split(",") if p]
        if (options.peers is not None)
        else list(PEERS)
    )
    return options


def _run(size: Size, options: argparse.Namespace, *, growth: bool) -> Iterator[Figure]:
    """Every wanted workload at one size."""

    def wanted(workloads: Iterable[Workload]) -> list[Workload]:
        return [
            w
            for w in workloads
            if (w.grows or not growth)
            and (not options.only or any(w.name.startswith(o) for o in options.only))
        ]

    before, after, last = wanted(writing(size)), wanted(reading(size)), wanted(ending(size))
    needed = {subject for w in (*before, *after, *last) for subject, _ in w.contenders}
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True)
            )
        )
        subjects: dict[str, Process] = {}
        peers = [] if growth else [PEERS[name] for name in options.peers]
        for where in [
            s for s in (RAW, OURS, UNTESTED, ONE_RANGE, HUNDRED_RANGES, IMPORTED) if s in needed
        ] + peers:
            place = scratch / where.rpartition(":")[2].lower()
            subjects[where] = process = Process(where, place, size.rows)
            stack.callback(process.close)
        yield from _phases(size, subjects, peers, before, after, last)


def _phases(
    size: Size,
    subjects: dict[str, Process],
    peers: list[str],
    before: list[Workload],
    after: list[Workload],
    last: list[Workload],
) -> Iterator[Figure]:
    """Fill, mark, write, mark, settle, read, delete."""
    started = time.monotonic()

    def everyone(operation: str, **arguments: Any) -> None:
        for process in subjects.values():
            if process.broken:
                continue
            result = process.call(operation, **arguments)
            if result.problem and result.problem != "not there":
                process.broken = f"{operation}: {result.problem}"
        print(f"[{time.monotonic() - started:5.0f} s] {operation}", file=sys.stderr, flush=True)

    def measured(workloads: list[Workload]) -> Iterator[Figure]:
        for number, workload in enumerate(workloads):
            yield from measure(
                workload, subjects, peers, rounds=size.rounds, first_step=100 * (number + 1)
            )
            print(
                f"[{time.monotonic() - started:5.0f} s] {workload.name}",
                file=sys.stderr,
                flush=True,
            )

    loads = [w for w in before if w.name == "bulk-load"]
    yield from measured(loads)
    everyone("fill")
    everyone("mark", name="loaded")
    # The first commits of a process pay for its imports and its first memtable.
    everyone("commit", rows=100, count=1, step=9_000)
    yield from measured([w for w in before if w not in loads])
    everyone("mark", name="window")
    everyone("commit", rows=size.update_rows, count=1, step=10_000)
    everyone("settle")
    # Reads are measured with everything in the caches, as a service at work has it.
    everyone("scan")
    everyone("scan_arrow")
    yield from measured(after)
    yield from measured(last)


def machine_facts() -> dict[str, Any]:
    """What a reader has to know of the machine and the versions."""
    installed = {
        found.metadata["Name"].lower(): found.version for found in metadata.distributions()
    }
    versions = {package: installed.get(package, "missing") for package in _PACKAGES}
    return {
        "commit": _commit(),
        "python": platform.python_version(),
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
        "subject": figure.subject.rpartition(":")[2],
        "rows": rows,
        "median": figure.median,
        "ratios": figure.ratios,
        "cpu_ratios": figure.cpu_ratios,
        "per_second": figure.per_second,
        "peak_bytes": figure.peak_bytes,
        "problem": figure.problem,
        "durability": figure.durability,
    }


def _text(line: dict[str, Any]) -> str:
    head = f"{line['rows']:>9} {line['workload']:<18} {line['subject']:<18}"
    if line["median"] is None:
        return f"{head} - {line['problem']}"
    ratios = line["ratios"]
    spread = f"({min(ratios):.3f} .. {max(ratios):.3f})"
    return (
        f"{head} {line['median']:8.3f}  {spread}  cpu {statistics.median(line['cpu_ratios']):.3f}"
    )


if __name__ == "__main__":
    main()
