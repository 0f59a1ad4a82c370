"""Crashes between every write, fsync and rename, and in the middle of every write.

After each crash, a new process must find a prefix of the appended records that includes all records
acknowledged as durable, never a wrong record, and must be able to continue. For disks that keep any
part of unsynced bytes see `test_power_cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvstore.storage.journal import Journal, Sync, compact
from tests.harness.disk import MemoryDisk, ProcessDied
from tests.journal.folds import PATH, Payloads, open_journal, state_of


class History:
    """The payloads that a workload appended, and how many were acknowledged as durable."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.durable = 0
        self.kept = 0  # handed to the operating system: survives a kill

    def append(self, journal: Journal, *payloads: bytes) -> None:
        self.appended += payloads
        if len(payloads) == 1:
            journal.append(payloads[0])
        else:
            journal.append_many(payloads)
        self.kept = len(self.appended)
        self.note(journal)

    def note(self, journal: Journal) -> None:
        self.durable = journal.durable


def rotating(disk: MemoryDisk, history: History, sync: Sync) -> None:
    with open_journal(disk, sync=sync, file_records=3) as journal:
        for number in range(8):
            history.append(journal, b"item %d" % number)
        history.append(journal, b"\xfe\xfd", b"", b"together")
    history.note(journal)


def reopening(disk: MemoryDisk, history: History, sync: Sync) -> None:
    for number in range(3):
        fold = Payloads()
        with open_journal(disk, fold, sync=sync, file_bytes=150) as journal:
            assert fold.items == history.appended
            for part in b"ab":
                history.append(journal, bytes((part,)) * (number + 1))
        history.note(journal)
    open_journal(disk).finalize()
    open_journal(disk).close()


def snapshotting(disk: MemoryDisk, history: History, sync: Sync) -> None:
    with open_journal(disk, sync=sync, file_records=2) as journal:
        for number in range(5):
            history.append(journal, b"item %d" % number)
        journal.snapshot([(0, item) for item in history.appended])
        history.note(journal)
        history.append(journal, b"behind the snapshot")
    fold = Payloads()
    with open_journal(disk, fold, snapshot=fold.records, compact_bytes=1, sync=sync) as journal:
        history.note(journal)
        history.append(journal, b"behind the second")


def compacting(disk: MemoryDisk, history: History, sync: Sync) -> None:
    with open_journal(disk, sync=sync, file_records=2) as journal:
        for number in range(5):
            history.append(journal, b"item %d" % number)
        compact(PATH, Payloads(), files=disk)
        for number in range(3):
            history.append(journal, b"later %d" % number)
        history.note(journal)
    compact(PATH, Payloads(), files=disk)


Workload = Callable[[MemoryDisk, History, Sync], None]
WORKLOADS = [rotating, reopening, snapshotting, compacting]
POLICIES = [Sync.always(), Sync.every(2), Sync.never()]


def steps_of(workload: Workload, sync: Sync) -> int:
    disk = MemoryDisk()
    workload(disk, History(), sync)
    return len(disk.steps)


def crashes(
    workload: Workload, sync: Sync, written: int | None
) -> Iterator[tuple[MemoryDisk, History]]:
    """The workload, killed before each of its steps (or with `written` bytes of a write out)."""
    for step in range(1, steps_of(workload, sync) + 1):
        disk, history = MemoryDisk(), History()
        disk.die_before = step
        disk.die_after_bytes = written
        with suppress(ProcessDied):
            workload(disk, history, sync)
        yield disk, history


def check(image: MemoryDisk, history: History, *, at_least: int) -> None:
    found = state_of(image)
    assert found == history.appended[: len(found)]
    assert len(found) >= at_least
    fold = Payloads()
    with open_journal(image, fold) as journal:  # nothing is left to repair, and it works
        assert journal.recovery.torn is None
        assert fold.items == found
        journal.append(b"next")
    assert state_of(image) == [*found, b"next"]


@pytest.mark.parametrize("sync", POLICIES, ids=["always", "every 2", "never"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_kill_at_any_step_loses_nothing_that_was_appended(workload: Workload, sync: Sync) -> None:
    for written in (None, 1, 20, 45):
        for disk, history in crashes(workload, sync, written):
            check(disk.killed(), history, at_least=history.kept)


@pytest.mark.parametrize("sync", POLICIES, ids=["always", "every 2", "never"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_power_cut_at_any_step_keeps_what_was_synced(workload: Workload, sync: Sync) -> None:
    for disk, history in crashes(workload, sync, None):
        for image in disk.power_cuts():
            check(image, history, at_least=history.durable)


def test_a_crash_while_recovering_is_recoverable() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=3) as journal:
        journal.append_many([b"one", b"two"])
    (path,) = [path for path in disk.inodes if path.endswith("-journal")]
    torn = {path: inode.live for path, inode in disk.inodes.items()}
    torn[path] = torn[path][:-4]
    for step in range(1, 20):
        again = MemoryDisk(dict(torn))
        again.die_before = step
        try:
            open_journal(again).close()
        except ProcessDied:
            for image in (again.killed(), *again.power_cuts()):
                assert state_of(image) == [b"one"]
        else:
            break
    assert [name.split()[0] for name in again.steps] == ["truncate", "rewrite", "sync", "sync"]
