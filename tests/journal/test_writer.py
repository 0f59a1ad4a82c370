"""The writer: order, rotation, sync policies, locking, failure."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import (
    ClosedError,
    LockedError,
    NotAStoreError,
    OutOfSpaceError,
    PoisonedError,
    StorageError,
    UsageError,
)
from kvstore.storage.journal import Journal, Record, Sync, read
from kvstore.storage.journal.framing import encode, encode_many
from tests.harness.disk import MemoryDisk
from tests.journal.folds import PATH, Payloads, live_file, open_journal, state_of


def syncs(disk: MemoryDisk) -> int:
    return sum(step.startswith("sync 0") for step in disk.steps)


def test_ordinals_count_from_one_over_appends_files_and_reopening() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        assert journal.append(b"a") == 1
        assert journal.append_many([b"b", b"c"]) == range(2, 4)
        assert journal.append_many([]) == range(4, 4)
    with open_journal(disk) as journal:
        assert journal.last == journal.durable == 3
        assert journal.append(b"d", 7) == 4
    types = [(record.ordinal, record.type) for record in read(PATH, files=disk)]
    assert types == [(1, 0), (2, 0), (3, 0), (4, 7)]


def test_each_opening_is_another_incarnation_of_the_same_identity() -> None:
    disk = MemoryDisk()
    for number in (1, 2, 3):
        with open_journal(disk) as journal:
            assert journal.incarnation == (0x01020304 << 32) + number
            journal.append(b"x")


def test_files_rotate_by_count() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_records=2) as journal:
        for number in range(5):
            journal.append(b"%d" % number)
    assert sorted(os.path.basename(path) for path in disk.inodes) == [
        "0000000000000001-journal-final",
        "0000000000000003-journal-final",
        "0000000000000005-journal",
    ]


def test_files_rotate_by_size() -> None:
    disk = MemoryDisk()
    with open_journal(disk, file_bytes=1000) as journal:
        for _ in range(30):
            journal.append(bytes(100))
    sizes = [len(inode.live) for inode in disk.inodes.values()]
    assert len(sizes) == 5
    assert max(sizes) <= 1000 + 40 + 100 + 100


def test_finalize_leaves_no_live_file_and_the_next_open_goes_on() -> None:
    disk = MemoryDisk()
    open_journal(disk).finalize()  # nothing to seal
    journal = open_journal(disk)
    journal.append(b"one")
    journal.finalize()
    assert [path for path in disk.inodes if not path.endswith("-final")] == []
    with open_journal(disk) as journal:
        assert journal.append(b"two") == 2
    assert state_of(disk) == [b"one", b"two"]


def test_sync_always_syncs_every_append() -> None:
    disk = MemoryDisk()
    with open_journal(disk) as journal:
        before = syncs(disk)
        for number in range(1, 4):
            journal.append(b"x")
            assert syncs(disk) - before == number
            assert journal.durable == journal.last
        journal.append_many([b"y"] * 10)
        assert syncs(disk) - before == 4


def test_sync_every_n_bounds_the_unsynced_records() -> None:
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.every(3)) as journal:
        for _ in range(10):
            journal.append(b"x")
            assert journal.last - journal.durable < 3


def test_sync_never_syncs_only_on_demand_and_at_close() -> None:
    disk = MemoryDisk()
    with open_journal(disk, sync=Sync.never()) as journal:
        before = syncs(disk)
        journal.append(b"x")
        assert syncs(disk) == before
        assert journal.sync() == 1
        assert journal.sync(upto=1) == 1
        assert syncs(disk) == before + 1
        journal.append(b"y")
    assert syncs(disk) == before + 2


def test_sync_interval_makes_an_idle_tail_durable_by_itself() -> None:
    disk = MemoryDisk()
    synced = threading.Event()
    journal = open_journal(disk, sync=Sync.interval(0.001))

    def note(step: str) -> None:
        if step.startswith("sync 0"):
            synced.set()

    disk.fail = note
    journal.append(b"x")
    assert synced.wait(120)
    journal.close()
    assert journal.durable == 1


def test_a_failed_background_sync_poisons_the_journal() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk, sync=Sync.interval(0.001))
    failed = threading.Event()

    def fail(step: str) -> OSError | None:
        if not step.startswith("sync 0"):
            return None
        failed.set()
        return OSError(errno.EIO, "bad sector")

    disk.fail = fail
    journal.append(b"x")
    assert failed.wait(120)
    journal.close()  # waits for the thread
    with pytest.raises(ClosedError):
        journal.append(b"y")


@pytest.mark.parametrize("step", ["write", "sync 0"])
def test_after_a_failed_write_or_fsync_every_call_raises_until_reopened(step: str) -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    journal.append(b"kept")
    disk.fail = lambda name: OSError(errno.EIO, "bad") if name.startswith(step) else None
    with pytest.raises(StorageError):
        journal.append(b"unknown")
    disk.fail = lambda name: None
    for call in (lambda: journal.append(b"x"), journal.sync, lambda: journal.snapshot([])):
        with pytest.raises(PoisonedError):
            call()
    journal.close()
    assert state_of(disk)[:1] == [b"kept"]


def test_a_full_disk_is_named() -> None:
    disk = MemoryDisk()
    with open_journal(disk) as journal:
        disk.fail = lambda name: OSError(errno.ENOSPC, "full")
        with pytest.raises(OutOfSpaceError):
            journal.append(b"x")
        disk.fail = lambda name: None


def test_short_writes_are_carried_on() -> None:
    disk = MemoryDisk()
    disk.short_writes = True
    with open_journal(disk) as journal:
        journal.append(b"a long enough payload to be cut")
    assert state_of(disk) == [b"a long enough payload to be cut"]


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = Journal.open(tmp_path)
    with pytest.raises(LockedError):
        Journal.open(tmp_path)
    first.close()
    Journal.open(tmp_path).close()


def test_a_failed_open_lets_go_of_the_lock(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(b"x")
    with pytest.raises(UsageError, match="pass apply"):
        Journal.open(tmp_path)
    Journal.open(tmp_path, apply=lambda record: None).close()


def test_records_for_which_no_function_was_given_are_not_passed_over(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(b"x")
        journal.snapshot([(0, b"x")])
    with pytest.raises(UsageError, match="pass restore"):
        Journal.open(tmp_path, apply=lambda record: None)


def test_a_journal_of_other_content_is_refused(tmp_path: Path) -> None:
    Journal.open(tmp_path, content="tasks").close()
    with pytest.raises(NotAStoreError, match="tasks"):
        Journal.open(tmp_path, content="memory")


def test_files_of_unknown_kinds_are_refused_and_other_names_reported(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    (tmp_path / "notes.txt").write_text("mine")
    with Journal.open(tmp_path) as journal:
        assert journal.recovery.ignored == ("notes.txt",)
    (tmp_path / "0000000000000001-index-final").write_text("")
    with pytest.raises(NotAStoreError, match="unknown kind"):
        Journal.open(tmp_path)


@pytest.mark.parametrize(
    ("payload", "kind"), [("text", 0), (b"x", -1), (b"x", 0xF0), (bytearray(b"x"), 0)]
)
def test_what_cannot_be_recorded_is_refused_and_nothing_written(payload: bytes, kind: int) -> None:
    disk = MemoryDisk()
    with open_journal(disk) as journal:
        before = disk.inodes[live_file(disk)].live
        with pytest.raises(UsageError):
            journal.append(payload, kind)
        with pytest.raises(UsageError):
            journal.append_many([b"fine", payload], kind)
        assert disk.inodes[live_file(disk)].live == before


def test_a_closed_journal_refuses_and_closes_twice() -> None:
    journal = open_journal(MemoryDisk())
    journal.close()
    journal.close()
    with pytest.raises(ClosedError):
        journal.append(b"x")


def test_threads_append_without_losing_or_repeating_an_ordinal(tmp_path: Path) -> None:
    with Journal.open(tmp_path, file_records=40) as journal:
        ordinals: list[int] = []

        def work(worker: int) -> None:
            ordinals.extend(journal.append(b"%d:%d" % (worker, n)) for n in range(25))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.durable == 100
    assert sorted(ordinals) == list(range(1, 101))
    payloads = [record.payload for record in read(tmp_path)]
    for worker in range(4):
        mine = [payload for payload in payloads if payload.startswith(b"%d:" % worker)]
        assert mine == [b"%d:%d" % (worker, number) for number in range(25)]


def test_replay_gives_back_what_no_append_would_take_today() -> None:
    """Limits are for writers: a journal whose record breaks today's limits still opens."""
    disk, got = MemoryDisk(), list[Record]()
    with open_journal(disk) as journal:
        journal.append(b"x" * 1000)
    limits = pytest.MonkeyPatch()
    with limits.context() as patch:
        for module in ("framing", "journal"):
            patch.setattr(f"kvstore.storage.journal.{module}.JOURNAL_RECORD_BYTES_MAX", 10)
        with open_journal(disk) as journal, pytest.raises(UsageError):
            journal.append(b"x" * 1000)
        got.extend(read(PATH, files=disk))
    assert [record.payload for record in got] == [b"x" * 1000]


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.lists(st.binary(max_size=300), max_size=6)),
            st.tuples(st.sampled_from(["reopen", "snapshot", "finalize", "compact"]), st.none()),
        ),
        max_size=25,
    ),
    st.integers(1, 5),
)
def test_any_history_is_found_again(
    commands: list[tuple[str, list[bytes] | None]], file_records: int
) -> None:
    disk, model = MemoryDisk(), Payloads()
    options = {"file_records": file_records, "sync": Sync.never(), "compact_bytes": 1}
    journal = open_journal(disk, Payloads(), **options)
    for command, payloads in commands:
        if command == "append":
            assert payloads is not None
            journal.append_many(payloads)
            model.items += payloads
            continue
        if command == "snapshot":
            journal.snapshot(model.records())
        elif command == "finalize":
            journal.finalize()
        journal.close()
        fold = Payloads()
        snapshot = fold.records if command == "compact" else None
        journal = open_journal(disk, fold, **options | {"snapshot": snapshot})
        assert fold.items == model.items
    journal.close()
    tail = [record.payload for record in read(PATH, files=disk)]
    assert tail == model.items[len(model.items) - len(tail) :]


def test_an_interrupt_in_the_middle_of_a_write_poisons_instead_of_repeating_an_ordinal() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    journal.append(b"kept")

    def interrupt(step: str) -> OSError | None:
        raise KeyboardInterrupt

    disk.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        journal.append(b"unknown")
    disk.fail = lambda name: None
    with pytest.raises(PoisonedError, match="interrupted"):
        journal.append(b"x")
    journal.close()
    assert state_of(disk) == [b"kept"]


lengths = st.sampled_from([0, 1, 50, 222, 223, 224, 225, 252, 253, 1000, 4096, 64_231, 64_232])
payloads = st.builds(
    lambda length, fill, pairs: b"".join([fill * length, *pairs])[-length:] if length else b"",
    lengths,
    st.sampled_from([b"a", b"\xfe", b"\xfd", b"\xfe\xfd", b"\0"]),
    st.lists(st.sampled_from([b"\xfe\xfd", b"\xfe", b"text"]), max_size=3),
)


@given(st.lists(payloads, max_size=40))
def test_records_written_together_are_as_those_written_one_by_one(items: list[bytes]) -> None:
    alone = b"".join(encode(1 << 33, 7 + place, 3, item) for place, item in enumerate(items))
    assert encode_many(1 << 33, 7, 3, items) == alone


def test_a_journal_reopened_as_it_was_left_goes_on_without_replay_or_sync() -> None:
    disk = MemoryDisk()
    journal = open_journal(disk)
    journal.append(b"one")
    journal.close()
    before = list(disk.steps)
    assert journal.reopen()
    assert disk.steps == before
    assert journal.append(b"two") == 2
    journal.close()
    with open_journal(disk) as again:
        assert again.last == 2


@pytest.mark.parametrize("change", ["append", "rotate", "snapshot", "finalize", "torn"])
def test_a_journal_is_not_reopened_once_another_has_written(change: str) -> None:
    disk = MemoryDisk()
    left = open_journal(disk)
    left.append(b"one")
    left.close()
    if change == "torn":
        (inode,) = [inode for path, inode in disk.inodes.items() if path.endswith("-journal")]
        inode.live += inode.live[-9:-4]
    else:
        with open_journal(disk, file_records=1 if change == "rotate" else 100) as other:
            if change in ("append", "rotate"):
                other.append(b"two")
            elif change == "snapshot":
                other.snapshot([(0, b"all")])
            else:
                other.finalize()
    assert not left.reopen()
    assert not disk.locked
    with pytest.raises(ClosedError):
        left.append(b"lost")


def test_a_journal_that_another_holds_is_not_reopened_but_locked() -> None:
    disk = MemoryDisk()
    left = open_journal(disk)
    left.append(b"one")
    left.close()
    with open_journal(disk), pytest.raises(LockedError):
        left.reopen()
    assert left.reopen()
    left.close()
