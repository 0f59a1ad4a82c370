"""The benchmark's table is whole: nothing is timed here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.subject import Process
from benchmarks.workloads import PEERS, Contender, Size, Workload, section, workloads

SIZES = [Size.of(rows, rounds=3) for rows in (100_000, 1_000_000, 10_000_000)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size.rows))
def test_every_workload_has_one_line_and_a_subject_that_can_do_it(size: Size) -> None:
    found = workloads(size)
    assert len({workload.name for workload in found}) == len(found)
    for workload in found:
        assert section(workload.name)
        for contender in (workload.baseline, workload.ours):
            if contender.subject not in PEERS.values():
                assert can(contender), f"{workload.name}: {contender}"


def can(contender: Contender) -> bool:
    module, _, kind = contender.subject.partition(":")
    return callable(getattr(getattr(import_module(module), kind), contender.call.operation))


def test_a_peer_that_is_not_installed_is_missing_and_not_measured(tmp_path: Path) -> None:
    process = Process("benchmarks.peers.nobody:Nobody", tmp_path / "nobody", 1)
    result = process.call("fill")
    process.close()
    assert result.problem.startswith("missing: ")
    assert result.items == 0


def test_the_table_tells_what_was_measured_and_why_the_rest_was_not() -> None:
    (workload,) = [w for w in workloads(SIZES[0]) if w.name == "scan"]
    lines = [
        line(workload, "Raw", "baseline", [1.0] * 3),
        line(workload, "Ours", "ours", [0.5, 0.8, 0.7]),
        line(workload, "Lmdb", "peer", [1.2, 1.3, 1.1]),
        line(workload, "Plyvel", "peer", [], problem="missing: no such module"),
    ]
    text = report.tables([], lines)
    assert "| scan | **0.70** | 0.50..0.80 | 0.70 | 0.7 | 2 | 3 (1) | 1.20 | - |" in text
    assert "* scan, Plyvel: missing: no such module" in text


def line(
    workload: Workload, subject: str, role: str, ratios: list[float], *, problem: str = ""
) -> report.Line:
    return {
        "workload": workload.name,
        "subject": subject,
        "role": role,
        "rows": 100_000,
        "median": sorted(ratios)[1] if ratios else None,
        "ratios": ratios,
        "cpu_ratios": ratios,
        "per_second": [2.0] * len(ratios),
        "peak_bytes": 3_000_000,
        "grown_bytes": 1_000_000,
        "problem": problem,
        "durability": "fsync",
    }
