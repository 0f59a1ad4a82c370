"""The line that a long command shows: a count, its rate, and the time that is left. The columns of
a table in a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import Span
from kvstore.base.meters import WorkCount
from kvstore.bulk.exports import export_rows
from kvstore.bulk.progress import Reading
from kvstore.bulk.row_files import FileReads, file_rows
from kvstore.cli.output import counting, print_table


def shown(counts: list[int], total: int | None = None) -> list[str]:
    """The lines for counts that come a second apart."""
    lines: list[str] = []
    seconds = iter(map(float, range(100)))
    show = counting(lines.append, "rows", total, seconds=lambda: next(seconds))
    for count in counts:
        show(count)
    return lines


def test_a_table_in_a_pipe_has_a_line_for_each_record(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [["\u6771\u4eac", "up", "1"], ["e\u0301", "it broke\n[red]\x1b[31m", ""]]
    print_table(["name", "error", "n"], rows)
    sys.stdout.flush()
    assert capfd.readouterr().out.splitlines() == [
        "name  error                    n",
        "\u6771\u4eac  up                       1",
        "e\u0301     it broke\\n[red]\\x1b[31m",
    ]


def test_a_count_is_shown_with_its_rate() -> None:
    assert shown([10, 1010, 2010]) == ["10 rows", "1,010 rows, 1,000/s", "2,010 rows, 1,000/s"]


def test_a_known_total_gives_the_time_that_is_left() -> None:
    assert shown([0, 100], 7300) == ["0 of 7,300 rows", "100 of 7,300 rows, 100/s, 0:01:12 left"]


def test_a_total_that_is_passed_was_an_estimate() -> None:
    assert shown([5, 15], 10) == ["5 of 10 rows", "15 rows, 10/s"]


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    lines: list[str] = []
    show = counting(lines.append, "rows", seconds=lambda: 0.0)
    show(0)
    show(10)
    assert lines == ["0 rows", "10 rows"]


def test_an_estimated_total_is_told_as_one() -> None:
    lines: list[str] = []
    seconds = iter(map(float, range(100)))
    show = counting(lines.append, "rows", 100, is_about=True, seconds=lambda: next(seconds))
    show(0)
    show(50)
    show(WorkCount.of(60, 80))
    show(WorkCount.at(70, 0.5))
    show(WorkCount.at(70, 0.0))
    assert lines == [
        "0 of about 100 rows",
        "50 of about 100 rows, 50/s, 0:00:01 left",
        "60 of 80 rows, 30/s, 0:00:01 left",
        "70 of about 140 rows, 23/s, 0:00:03 left",
        "70 of about 100 rows, 18/s, 0:00:02 left",
    ]


@pytest.mark.parametrize(
    "kind", ["csv", "csv.gz", "jsonl", "jsonl.zst", "parquet", "arrow", "feather"]
)
def test_the_share_of_files_that_was_read_is_told_by_their_bytes(tmp_path: Path, kind: str) -> None:
    value = os.urandom(300).hex().encode()
    with kvstore.open(None, engine="memory") as store:
        store.put_many((b"%06d" % number, value) for number in range(9000))
        paths = [tmp_path / f"{number}.{kind}" for number in range(2)]
        for path in paths:
            with store.snapshot() as snapshot:
                export_rows(store, snapshot, path, Span())
    reading = Reading(paths)
    shares = [
        reading.share for _ in file_rows(paths, key="key", value="value", reads=FileReads(reading))
    ]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1.0
    assert any(0.4 < share < 0.6 for share in shares)  # the first file is read
    assert reading.share == 1.0


def test_a_rate_counts_the_reading_of_the_first_batch() -> None:
    lines: list[str] = []
    seconds = iter([0.0, 10.0, 10.001])
    show = counting(lines.append, "rows", seconds=lambda: next(seconds))
    batches = [pa.record_batch({"n": range(1000)})] * 2
    assert len(list(Reading().over(batches, show))) == 2
    assert lines == ["0 rows", "1,000 rows, 100/s", "2,000 rows, 200/s"]
