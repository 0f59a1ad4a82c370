"""Eight defects that other journals over this framing have had, each with a case that shows its
absence."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

import pytest

from kvstore.errors import JournalDamagedError, LockedError
from kvstore.limits import JOURNAL_READ_BYTES
from kvstore.storage.journal import Sync, inspect, read
from kvstore.storage.journal.framing import RawRecords, encode
from tests.harness.disk import MemoryDisk
from tests.journal.folds import PATH, Payloads, live_file, open_journal, state_of
from tests.journal.test_reader import Trickle


def written(*payloads: bytes) -> MemoryDisk:
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.never()) as journal:
        journal.append_many(payloads)
    return disk


def damage(disk: MemoryDisk, old: bytes, new: bytes) -> None:
    inode = disk.inodes[live_file(disk)]
    assert old in inode.live
    inode.live = inode.live.replace(old, new)


def test_1_files_and_directory_are_fsynced_in_the_order_that_a_rename_needs() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=1) as journal:
        opened = len(disk.steps)
        journal.append(b"one")
        assert disk.steps[opened:] == [
            "write 0000000000000001-journal",
            "sync 0000000000000001-journal",
        ]
        opened = len(disk.steps)
        journal.append(b"two")
        assert [step.split()[0] for step in disk.steps[opened:]] == [
            *("write", "sync", "rename", "sync"),  # seal, file, name, directory
            *("create", "write", "sync", "rename", "sync"),  # the next live file, its directory
            *("write", "sync"),  # the record
        ]


def test_2_a_torn_tail_does_not_make_open_fail() -> None:
    disk = written(b"one", b"two")
    inode = disk.inodes[live_file(disk)]
    inode.live = inode.live[:-1]
    disk.notes.clear()  # the writer was not closed
    fold = Payloads()
    with open_journal(disk, fold) as journal:
        assert fold.items == [b"one"]
        assert journal.recovery.torn is not None
        assert journal.recovery.torn.size == 3 + 29 + 2


def test_3_empty_payloads_are_records_like_any_other() -> None:
    disk = written(b"", b"one", b"", b"")
    assert state_of(disk) == [b"", b"one", b"", b""]
    assert [record.ordinal for record in read(PATH, files=disk)] == [1, 2, 3, 4]


def test_4_damage_to_one_record_costs_that_record_only() -> None:
    disk = written(b"one", b"two", b"three", b"four")
    damage(disk, b"two", b"owt")
    (report,) = inspect(PATH, files=disk).files
    (lost,) = report.damages
    assert (lost.first, lost.last) == (2, 2)
    assert report.records == 3
    assert report.last == 4


@pytest.mark.parametrize("at", [1, 2, 3])
def test_5_a_record_written_twice_counts_once_also_as_the_very_last(at: int) -> None:
    disk = written(b"one", b"two", b"three")
    records = list(read(PATH, files=disk))
    twice = encode(records[at - 1].incarnation, at, 0, records[at - 1].payload)
    damage(disk, twice, twice * 2)
    fold = Payloads()
    with open_journal(disk, fold) as journal:
        assert fold.items == [b"one", b"two", b"three"]
        assert journal.recovery.repeated == 1
        assert journal.append(b"four") == 4
    assert [r.payload for r in read(PATH, files=disk)] == [b"one", b"two", b"three", b"four"]


def test_5_an_ordinal_repeated_with_other_contents_is_damage() -> None:
    disk = written(b"one", b"two")
    inode = disk.inodes[live_file(disk)]
    incarnation = next(read(PATH, files=disk)).incarnation
    inode.live += encode(incarnation, 2, 0, b"TWO")
    with pytest.raises(JournalDamagedError, match="ordinal 2 comes again"):
        state_of(disk)


def test_6_an_unfinished_snapshot_of_the_same_ordinal_is_not_continued() -> None:
    disk = written(b"one", b"two")
    path = f"{PATH}/0000000000000002-snapshot"
    fold = Payloads()
    with open_journal(disk, fold) as journal:
        disk.inodes[path] = MemoryDisk({path: b"left over by a crash" * 10}).inodes[path]
        journal.snapshot(fold.records())
    assert b"left over" not in disk.inodes[path + "-final"].live
    assert state_of(disk) == [b"one", b"two"]


def test_7_short_reads_and_pairs_across_pieces_lose_nothing() -> None:
    for length in range(JOURNAL_READ_BYTES - 120, JOURNAL_READ_BYTES):
        disk = written(bytes(length), b"behind")
        assert [len(record.payload) for record in read(PATH, files=disk)] == [length, 6]
    data = disk.inodes[live_file(disk)].live[-200:]
    (_, lead), (at, whole) = RawRecords(cast(BinaryIO, io.BytesIO(data)))
    assert (lead, whole) == (data[:at], data[at:])
    assert b"".join(run for _, run in RawRecords(cast(BinaryIO, Trickle(data)))) == data


def test_8_the_checksum_covers_ordinal_type_and_incarnation() -> None:
    one = encode(5, 1, 0, b"payload")
    assert len({encode(5, 2, 0, b"payload")[3:11], encode(5, 1, 1, b"payload")[3:11]}) == 2
    disk = written(b"payload")
    head = encode(next(read(PATH, files=disk)).incarnation, 1, 0, b"payload")[3 + 8 :][:21]
    for at in range(21):
        moved = written(b"payload")
        changed = head[:at] + bytes((head[at] ^ 1,)) + head[at + 1 :]
        inode = moved.inodes[live_file(moved)]
        where = inode.live.rindex(head[:21])
        inode.live = inode.live[:where] + changed + inode.live[where + 21 :]
        with pytest.raises(JournalDamagedError):
            state_of(moved)
    assert one != encode(6, 1, 0, b"payload")


def test_8_a_second_writer_is_locked_out() -> None:
    disk = MemoryDisk()
    with open_journal(disk), pytest.raises(LockedError):
        open_journal(disk)
