"""The benchmark's table is complete. Nothing is timed here."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import document, machine, report
from benchmarks.subject import Process
from benchmarks.workloads import PEERS, Contender, Size, section, workloads

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
    lines = [
        line("scan", "Raw", "baseline", [1.0] * 3),
        line("scan", "Ours", "ours", [0.5, 0.8, 0.7]),
        line("scan", "Lmdb", "peer", [1.2, 1.3, 1.1]),
        line("scan", "Plyvel", "peer", [], problem="missing: no such module"),
    ]
    text = report.tables(lines)
    assert "| scan | **0.70** (0.50..0.80) | 0.7 | 2 | 1.20 | - |" in text
    assert "* plyvel: missing: no such module (`scan`)" in text


def test_a_larger_scale_compares_its_rates_with_the_smallest() -> None:
    lines = [
        line("scan", "Ours", "ours", [0.5] * 3),
        line("scan", "Ours", "ours", [0.25] * 3, rows=1_000_000, per_second=1.5),
    ]
    text = report.tables(lines)
    assert "## 100,000 rows" in text
    assert "| scan | 0.25 (0.25..0.25) | 0.7 | 1.5 | 0.75 |" in text


def test_readme_shows_the_figures_of_benchmarks_and_the_worst_of_them() -> None:
    table = document.README.read_text().split(document.MARKS[0])[1].split(document.MARKS[1])[0]
    shown = dict(re.findall(r"\(`([\w-]+)`\) \|.*?\| ([^|]*\(.*?\)) \|", table))
    assert 7 <= len(shown) <= 8
    scales = [
        {name: figure.replace("*", "") for name, figure in _FIGURE.findall(scale)}
        for scale in document.PAGE.read_text().split("\n## ")
    ]
    widest = max(scales, key=len)
    assert {name: widest[name] for name in shown} == shown
    medians = {
        name: float(figure.split()[0])
        for name, figure in widest.items()
        if not name.startswith("spark-")  # compared with peers too
    }
    assert min(medians, key=lambda name: medians[name]) in shown


_FIGURE = re.compile(r"^\| ([\w-]+) \| ([\d.*]+ \([^)]*\)) \|", re.MULTILINE)


def test_the_page_fills_each_gap_of_its_template() -> None:
    text = document.page(
        {**machine.facts(), "seconds": 90}, [line("scan", "Ours", "ours", [1.0] * 3)]
    )
    assert "{" not in text
    assert "This run took 2 minutes" in text
    assert "RocksDB | unknown" not in text


def line(
    workload: str,
    subject: str,
    role: str,
    ratios: list[float],
    *,
    rows: int = 100_000,
    per_second: float = 2.0,
    problem: str = "",
) -> report.Line:
    return {
        "workload": workload,
        "subject": subject,
        "role": role,
        "rows": rows,
        "median": sorted(ratios)[1] if ratios else None,
        "ratios": ratios,
        "per_second": [per_second] * len(ratios),
        "problem": problem,
        "durability": "fsync",
    }
