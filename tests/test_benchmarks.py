"""The benchmark's table is complete. Nothing is timed here."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import data, document, history, machine, report
from benchmarks import measure as measuring
from benchmarks.data import Data
from benchmarks.history import Ratio, Run
from benchmarks.measure import measure
from benchmarks.subject import Process, Subject, Timed, Work
from benchmarks.workloads import (
    PEERS,
    Call,
    Contender,
    Size,
    Stage,
    Workload,
    scenes,
    section,
    workloads,
)

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


def test_rows_made_in_pieces_are_the_rows_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Data(70_000)
    assert held.keys == sorted(set(held.keys))
    assert len(held.values) == len(held.keys)
    monkeypatch.setattr(data, "HELD_ROWS", 0)
    made = Data(70_000)
    assert list(made.keys) == held.keys
    assert list(made.values) == held.values
    assert made.keys[65_000:66_000] == held.keys[65_000:66_000]
    assert made.values[69_990:80_000] == held.values[69_990:]
    assert (made.keys[-1], made.middle(10)) == (held.keys[-1], held.middle(10))
    assert held.middle(10) == (held.keys[34_995], held.keys[35_005])
    assert set(made.lookups(100, 1)) | set(made.updates(100, 1)[0]) <= set(held.keys)


class Counting(Subject):
    """Each call of a side handles as many items as it was called before, in a second."""

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self._calls = Counter[str]()

    def handle(self, side: str) -> Work:
        self._calls[side] += 1
        return lambda: Timed(self._calls[side], 1.0, 1.0)


def test_a_call_of_several_rows_of_a_group_runs_once_a_round(tmp_path: Path) -> None:
    where = f"{__name__}:{Counting.__name__}"
    sides = {side: Contender(where, Call("handle", {"side": side}), side) for side in "abc"}
    group = [
        Workload(base, sides[base], sides["c"], warm=True, group="together") for base in ("a", "b")
    ]
    process = Process(where, tmp_path, 1)
    figures = measure(group, {where: process}, [], rounds=3)
    process.close()
    assert [figure.subject for figure in figures] == ["a", "c", "b", "c"]
    assert [figure.per_second for figure in figures] == [[2, 3, 4]] * 4
    assert all(figure.ratios == [1.0] * 3 for figure in figures)
    stage = Stage((), [*group, Workload("alone", sides["a"], sides["c"])])
    assert stage.groups == [group, [stage.workloads[-1]]]


def test_a_group_has_one_round_where_work_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "GROUP_SECONDS", 0)
    where = f"{__name__}:{Counting.__name__}"
    process = Process(where, tmp_path, 1)
    a, b = (Contender(where, Call("handle", {"side": side}), side) for side in "ab")
    figures = measure([Workload("long", a, b, warm=True)], {where: process}, [], rounds=3)
    process.close()
    assert [figure.per_second for figure in figures] == [[1]] * 2


def test_the_workloads_of_a_group_are_neighbours_that_are_measured_alike() -> None:
    for scene in scenes(SIZES[1]):
        for stage in scene.stages:
            names = [group[0].group for group in stage.groups if group[0].group]
            assert len(set(names)) == len(names)
            for group in stage.groups:
                assert len({(each.items, each.repeats, each.warm) for each in group}) == 1


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
        {**machine.facts(), "seconds": 90},
        [line("scan", "Ours", "ours", [1.0] * 3)],
        {"Reading": "reading.png"},
    )
    assert "![Reading](benchmarks/pictures/reading.png)" in text
    assert "{" not in text
    assert "This run took 2 minutes" in text
    assert "RocksDB | unknown" not in text


def test_pictures_have_few_rows_of_workloads_and_only_what_was_measured(tmp_path: Path) -> None:
    from benchmarks.picture import PICTURES, draw

    known = {workload.name for workload in workloads(SIZES[1])}
    for picture in PICTURES:
        assert set(picture.workloads) <= known
        assert len(picture.rows) <= 8
    figures = [
        line("scan", "Ours", "ours", [0.5, 0.8, 0.7]),
        line("scan", "Lmdb", "peer", [1.2, 1.3, 1.1]),
        line("ycsb-c", "kvstore", "ours", [2.0] * 3),
        line("ycsb-c-lmdb", "kvstore", "ours", [1.0] * 3),
    ]
    drawn = draw(report.scales(figures), tmp_path)
    assert [picture.file for picture in drawn] == ["reading.png", "ycsb.png"]
    assert {file.name for file in tmp_path.iterdir()} == {"reading.png", "ycsb.png"}


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


def test_the_history_has_the_rows_of_each_page(tmp_path: Path) -> None:
    run = history.run_of(history.PAGE.read_text())
    assert run is not None
    assert list(run.rows) == [name for name in history.ROWS if name in run.rows]
    assert len(run.rows) >= 20
    assert all(ratio.least <= ratio.median <= ratio.most for ratio in run.rows.values())
    history.write(tmp_path / "h", history.added(history.added([], run), run))
    assert history.read(tmp_path / "h") == [run]
    assert history.read(history.FILE)[-1] == run, "make bench-history adds the run of the page"


@pytest.mark.parametrize(
    ("last", "has_regressed"),
    [
        (Ratio(0.7, 0.6, 0.75), True),
        (Ratio(0.7, 0.6, 0.95), False),  # a good round: noise
        (Ratio(0.85, 0.8, 0.86), False),  # within a fifth
        (Ratio(1.4, 1.3, 1.5), False),
    ],
)
def test_a_regression_is_below_noise_and_below_each_round(last: Ratio, has_regressed: bool) -> None:
    before = [Run(str(n), "2026-01-01", {"get": Ratio(1.0, 0.9, 1.1)}) for n in range(6)]
    found = history.regressions([*before, Run("x", "2026-01-02", {"get": last})])
    assert found == (["get: 0.7, usually 1"] if has_regressed else [])
    assert history.regressions([Run("x", "2026-01-02", {"get": last})]) == []
