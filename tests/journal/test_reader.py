"""Readers: over files, from an ordinal on, beside a writer, from a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import RetryableError, UsageError
from kvstore.storage.journal import Journal, Sync, read
from kvstore.storage.journal import framing as raw_module
from kvstore.storage.journal.framing import PAIR, RawRecords
from tests.harness.bounds import bounds
from tests.harness.disk import MemoryDisk
from tests.journal.folds import PATH, live_file, open_journal


class Trickle(io.BytesIO):
    """A stream that gives one to three bytes at a time, as a pipe may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(1 + self.tell() % 3)


def written(count: int = 20, **options: Any) -> MemoryDisk:
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.never(), **options) as journal:
        for number in range(1, count + 1):
            journal.append(b"item %d" % number)
    return disk


@pytest.mark.parametrize("least", [1, 2, 7, 8, 20, 21])
def test_reading_begins_at_an_ordinal_in_whatever_file(least: int) -> None:
    disk = written(file_records=7)
    found = read(PATH, from_ordinal=least, files=disk)
    assert [record.ordinal for record in found] == list(range(least, 21))


def test_records_under_a_snapshot_are_gone_for_readers_and_they_are_told() -> None:
    disk = written(5, file_records=2)
    with open_journal(disk) as journal:
        journal.snapshot([])
        journal.append(b"six")
    with pytest.raises(UsageError, match="begins at ordinal 6"):
        list(read(PATH, from_ordinal=3, files=disk))
    assert [record.payload for record in read(PATH, files=disk)] == [b"six"]


def test_a_reader_beside_the_writer_stops_at_the_record_being_written() -> None:
    disk = written(3)
    path = live_file(disk)
    disk.inodes[path].live = disk.inodes[path].live[:-2]
    disk.notes.clear()  # the writer was not closed
    assert [record.ordinal for record in read(PATH, files=disk)] == [1, 2]


def test_a_reader_goes_on_with_a_file_that_was_renamed_after_listing(tmp_path: Path) -> None:
    with Journal.open(tmp_path, file_records=2) as journal:
        journal.append_many([b"one", b"two"])
        records = read(tmp_path)
        assert next(records).payload == b"one"
        journal.append(b"three")
        assert [record.payload for record in records] == [b"two"]


def test_a_reader_overtaken_by_a_snapshot_is_told_to_read_again() -> None:
    disk = written(6, file_records=2)
    records = read(PATH, files=disk)
    next(records)
    with open_journal(disk) as journal:
        journal.snapshot([])
    with pytest.raises(RetryableError, match="superseded"):
        list(records)


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"", b"\xfe", b"\xfd", b"x" * 9]), max_size=30),
    st.integers(1, 7),
)
def test_cutting_at_pairs_does_not_depend_on_the_pieces(parts: list[bytes], size: int) -> None:
    data = PAIR.join(parts)
    lead, *expected = data.split(PAIR)
    offsets, at = [], len(lead)
    for raw in expected:
        offsets.append(at)
        at += 2 + len(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_module, "JOURNAL_READ_BYTES", size)
        raws = RawRecords(cast(BinaryIO, io.BytesIO(data)))
        got: list[tuple[int, bytes]] = []
        passed = b""
        for at, run in raws:
            front, *found = run.split(PAIR)
            passed += front
            for raw in found:
                got.append((at, raw))
                at += 2 + len(raw)
        assert passed == lead
        assert raws.ended
        assert raws.end == len(data)
        assert got == list(zip(offsets, expected, strict=True))


def test_a_long_record_that_comes_in_short_reads_is_read() -> None:
    """The head of a record tells its length, and may lie across any number of reads."""
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.never()) as journal:
        for size in (6000, 1, 70_000):
            journal.append(b"x" * size)
    data = disk.inodes[live_file(disk)].live
    with bounds(JOURNAL_READ_BYTES=16):
        runs = [run for _, run in RawRecords(cast(BinaryIO, Trickle(data)))]
        found = list(read(PATH, files=disk))
    assert b"".join(runs) == data
    assert all(run.startswith(PAIR) for run in runs)
    assert [len(record.payload) for record in found] == [6000, 1, 70_000]


def test_a_short_read_is_not_the_end() -> None:
    disk = written(5)
    data = disk.inodes[live_file(disk)].live
    runs = [run for _, run in RawRecords(cast(BinaryIO, Trickle(data)))]
    assert b"".join(runs) == data
    assert len(runs) > 3
