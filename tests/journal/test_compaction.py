"""Compaction at replay and beside a running writer, and the commands' functions."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import JournalDamagedError, LockedError, NotAStoreError
from kvstore.storage.journal import Journal, compact, inspect
from kvstore.storage.journal.names import COMPACTING_NAME
from kvstore.storage.journal.repair import compact_by_content
from tests.harness.disk import MemoryDisk
from tests.journal.folds import PATH, Payloads, open_journal, state_of


def bases(disk: MemoryDisk) -> list[str]:
    return sorted(os.path.basename(path) for path in disk.inodes)


def test_opening_compacts_when_the_journal_has_outgrown_its_snapshot() -> None:
    disk = MemoryDisk()
    with open_journal(disk) as journal:
        journal.append_many([b"x" * 50] * 10)
    fold = Payloads()
    with open_journal(disk, fold, snapshot=fold.records, compact_bytes=10_000) as journal:
        assert bases(disk) == ["0000000000000001-journal"]
    fold = Payloads()
    with open_journal(disk, fold, snapshot=fold.records, compact_bytes=500):
        assert bases(disk) == ["000000000000000a-snapshot-final", "000000000000000b-journal"]
    fold = Payloads()
    with open_journal(disk, fold, snapshot=fold.records, compact_bytes=1) as journal:
        assert journal.recovery.snapshot == 10
        assert journal.recovery.records == 0
    assert state_of(disk) == [b"x" * 50] * 10


def test_compaction_beside_a_writer_leaves_the_removing_to_it() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        for number in range(5):
            journal.append(b"%d" % number)
        result = compact(PATH, Payloads(), files=disk)
        assert result.snapshot is not None
        assert (result.snapshot.ordinal, result.replayed, result.removed) == (4, 4, ())
        assert len(bases(disk)) == 4
        journal.append(b"5")
        journal.append(b"6")  # rotates, and removes
        assert bases(disk) == [
            "0000000000000004-snapshot-final",
            "0000000000000005-journal-final",
            "0000000000000007-journal",
        ]
    assert state_of(disk) == [b"%d" % number for number in range(7)]


def test_compaction_without_a_writer_removes_the_files_itself() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        for number in range(5):
            journal.append(b"%d" % number)
    result = compact(PATH, Payloads(), files=disk)
    assert result.removed == ("0000000000000001-journal-final", "0000000000000003-journal-final")
    assert compact(PATH, Payloads(), files=disk).snapshot is None
    assert state_of(disk) == [b"0", b"1", b"2", b"3", b"4"]


def test_two_compactions_exclude_each_other() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=1) as journal:
        journal.append(b"one")
        journal.append(b"two")
        with closing(disk.lock(f"{PATH}/{COMPACTING_NAME}")):
            with pytest.raises(LockedError):
                compact(PATH, Payloads(), files=disk)
            with pytest.raises(LockedError):
                journal.snapshot([])
        journal.append(b"three")
    assert state_of(disk) == [b"one", b"two", b"three"]


def test_a_damaged_journal_is_not_compacted() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        for number in range(5):
            journal.append(b"item %d" % number)
    inode = disk.inodes[sorted(disk.inodes)[1]]
    inode.live = inode.live.replace(b"item 3", b"item 8")
    before = bases(disk)
    with pytest.raises(JournalDamagedError):
        compact(PATH, Payloads(), files=disk)
    assert bases(disk) == before


def test_the_command_finds_the_fold_by_the_journals_content(tmp_path: Path) -> None:
    with Journal.open(tmp_path, content="test", file_records=2) as journal:
        for number in range(5):
            journal.append(b"%d" % number)
    with pytest.raises(NotAStoreError, match="'test'"):
        compact_by_content(tmp_path, {"other": Payloads})
    result = compact_by_content(tmp_path, {"test": Payloads})
    assert result.snapshot is not None
    report = inspect(tmp_path)
    assert report.sound
    assert report.content == "test"
    assert [(str(file.name), file.records) for file in report.files] == [
        ("0000000000000004-snapshot-final", 4),
        ("0000000000000005-journal", 1),
    ]
