"""A year of some seconds: each answer equals the model's, and no count grows. Nothing is timed
here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from benchmarks.year import calendar, document
from benchmarks.year.levels import UNITS, Line, amount, lines, table
from benchmarks.year.model import Model
from benchmarks.year.plan import SECONDS, YEAR
from benchmarks.year.service import WrongStateError

FACTS = {
    "seconds": 2_400, "commit": "0123456", "date": "2026-11-23", "processor": "a processor",
    "cores": 2, "load": 0.1, "fsync_ms": 0.2,
}  # fmt: skip


def test_a_year_ends_in_the_state_of_its_model_and_no_count_grows(tmp_path: Path) -> None:
    found = lines(list(calendar.play(tmp_path, SECONDS)))
    assert {line.name for line in found} == set(UNITS)
    counts = [line for line in found if UNITS[line.name] == "count"]
    assert [line.name for line in counts if not line.is_level] == []


def test_a_store_that_forgets_a_write_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(store: kvstore.Store, *_: object, **__: object) -> Iterator[tuple[bytes, bytes]]:
        return iter([(b"user/000000/0000", b"not this")])

    monkeypatch.setattr(kvstore.Store, "scan", forget)
    with pytest.raises(WrongStateError, match="differ: a scan"):
        list(calendar.play(tmp_path, SECONDS))


def test_an_import_that_is_reverted_shows_the_values_below_it() -> None:
    model = Model()
    model.put(b"u/1", b"old")
    model.add(7, {b"u/1": b"seven", b"u/2": b"seven"})
    model.add(8, {b"u/1": None, b"u/3": b"eight"})
    assert model.state() == {b"u/2": b"seven", b"u/3": b"eight"}
    model.revert(8)
    assert model.state() == {b"u/1": b"seven", b"u/2": b"seven"}
    model.revert(7)
    assert model.state() == {b"u/1": b"old"}


def test_an_import_below_a_later_write_changes_nothing_when_it_is_reverted() -> None:
    model = Model()
    model.add(7, {b"u/1": b"seven", b"u/2": b"seven", b"u/3": b"seven"})
    model.put(b"u/1", b"new")
    model.add(8, {b"u/2": b"eight"})
    model.keep(7)
    model.revert(8)
    assert model.state() == {b"u/1": b"new", b"u/2": b"seven", b"u/3": b"seven"}
    model.delete_user(b"u/")
    assert model.state() == {}


@pytest.mark.parametrize(
    ("months", "processor", "is_level"),
    [
        ((0.010, 0.012, 0.015), (), True),
        ((0.010, 0.016, 0.010), (), False),
        ((0.010, 0.090, 0.010), (0.010, 0.014, 0.010), True),
        ((0.010, 0.090, 0.010), (0.010, 0.016, 0.010), False),
        ((1e-6, 20e-6), (), True),
        ((1e-6, 40e-6), (), False),
    ],
)
def test_a_line_is_level_within_half_of_its_first_month(
    months: tuple[float, ...], processor: tuple[float, ...], is_level: bool
) -> None:
    assert Line("commit", months, processor).is_level is is_level


def test_a_month_is_the_least_of_its_weeks() -> None:
    weeks = [{"files": float(count)} for count in (70, 60, 80, 90, 200, 210, 190, 220)]
    (line,) = lines(weeks)
    assert line.months == (60, 190)
    assert "| files | 60 | 190 | 3.17 x (month 2) |  | **no** |" in table([line])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12_345, "count", "12,345"),
        (0.0000012, "time", "1.2 us"),
        (0.25, "time", "250 ms"),
        (2.5, "time", "2.5 s"),
        (512, "bytes", "0.5 KiB"),
        (3 << 30, "bytes", "3 GiB"),
    ],
)
def test_amounts_have_units(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_the_page_fills_each_gap_and_names_the_lines_that_grow() -> None:
    found = [Line("opening", (0.01, 0.01)), Line("files", (100, 300))]
    text = document.page(found, YEAR, FACTS)
    assert "{" not in text
    assert "played in 40 minutes" in text
    assert "Not level: files." in text
