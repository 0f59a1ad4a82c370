"""Power cuts: of all unsynced changes, the disk keeps any sectors and any names.

Sectors are small here, so that records span several, and every combination of them can be tried.
After each cut a new process can open the journal, and finds a prefix of the appended records with
all synced ones. Damage to synced bytes is refused wherever a mark or the note in `LOCK` shows it.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvstore.errors import JournalDamagedError, PoisonedError, StorageError
from kvstore.storage.journal import Journal, Sync, inspect, read
from kvstore.storage.journal import recovery as tail_module
from tests.harness.disk import MemoryDisk, ProcessDied
from tests.harness.seeds import seeded
from tests.journal.folds import PATH, Payloads, live_file, open_journal, outcome_of, state_of
from tests.journal.test_crash import POLICIES, WORKLOADS, History, Workload

SECTOR = 32
SEED = "KVSTORE_JOURNAL_CUT_SEED"
NAMES = ["always", "every 2", "never"]


@pytest.fixture(autouse=True)
def small_sectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "JOURNAL_SECTOR_BYTES", SECTOR)


def spanning(disk: MemoryDisk, history: History, sync: Sync) -> None:
    """Records of many sizes, some of them alone, some together, some synced on demand."""
    with open_journal(disk, sync=sync, file_bytes=900) as journal:
        for size in (0, 1, 3, 20, 33, 64, 65, 100):
            history.append(journal, b"%03d" % size + b"\xfe\xfd\0x" * size)
        history.append(journal, b"a" * 40, b"", bytes(70), b"z" * 33)
        journal.sync()
        history.note(journal)
        history.append(journal, bytes(3 * SECTOR))


def grouped(disk: MemoryDisk, history: History, sync: Sync) -> None:
    """Appends that wait for one fsync together, and appends beside it."""
    with open_journal(disk, sync=sync) as journal:
        for number in range(4):
            for part in (b"a", b"b", b"c"):
                history.appended.append(part * (10 * number + 1))
                journal.append(history.appended[-1], settle=False)
            history.kept = len(history.appended)
            journal.settle(journal.last)
            history.note(journal)


def beside(disk: MemoryDisk, history: History, sync: Sync) -> None:
    """Appends while an fsync runs, which does not cover them."""
    with open_journal(disk, sync=sync) as journal:

        def append(step: str) -> OSError | None:
            if step.startswith("sync 0") and journal.durable < journal.last <= 7:
                history.appended.append(b"%d" % journal.last * 9)
                journal.append(history.appended[-1], settle=False)
            return None

        disk.fail = append
        for number in range(4):
            history.append(journal, b"z" * 20 * number)
            journal.sync()
            history.note(journal)
        disk.fail = lambda step: None


ALL = [*WORKLOADS, spanning, grouped, beside]


def crashes(workload: Workload, sync: Sync) -> Iterator[tuple[MemoryDisk, History]]:
    whole = MemoryDisk(sector=SECTOR)
    workload(whole, History(), sync)
    for step in range(1, len(whole.steps) + 2):
        disk, history = MemoryDisk(sector=SECTOR), History()
        disk.die_before = step
        with suppress(ProcessDied):
            workload(disk, history, sync)
        yield disk, history


def require_kept(image: MemoryDisk, history: History, *, at_least: int) -> list[bytes]:
    found = state_of(image)
    assert found == history.appended[: len(found)]
    assert len(found) >= at_least
    return found


def some(images: Iterator[MemoryDisk], rng: random.Random, count: int) -> list[MemoryDisk]:
    """The first image, and a few of the others."""
    first, *others = images
    return [first, *(rng.sample(others, count) if len(others) > count else others)]


@pytest.mark.parametrize("sync", POLICIES, ids=NAMES)
@pytest.mark.parametrize("workload", ALL)
def test_any_part_of_what_was_not_synced_may_be_there(workload: Workload, sync: Sync) -> None:
    rng = seeded(SEED)
    for disk, history in crashes(workload, sync):
        for image in disk.power_cuts(rng):
            require_kept(image, history, at_least=history.durable)


@pytest.mark.parametrize("sync", POLICIES, ids=NAMES)
@pytest.mark.parametrize("workload", ALL)
def test_what_is_acknowledged_after_a_recovery_stands_too(workload: Workload, sync: Sync) -> None:
    """A kill at any step, a second process that continues and dies anywhere, then the power cut."""
    rng = seeded(SEED)
    for first, history in crashes(workload, sync):
        for step in rng.sample(range(1, 16), 2):
            disk = first.killed()
            disk.die_before = step
            after = History()
            with suppress(ProcessDied):
                fold = Payloads()
                with open_journal(disk, fold) as journal:
                    after.appended = list(fold.items)
                    assert len(fold.items) >= history.kept
                    for number in range(3):
                        after.append(journal, b"after the crash %d" % number)
                after.note(journal)
            after.appended = after.appended or history.appended
            for image in some(disk.power_cuts(rng), rng, 6):
                require_kept(image, after, at_least=max(after.durable, history.durable))


def random_workload(rng: random.Random) -> Callable[[MemoryDisk, History, Sync], None]:
    """Payloads with long runs of zeros and of pairs, synced now and then, over some openings."""
    shapes = [b"\0", b"x", b"\xfe\xfd", b"\xfe", bytes(40) + b"y"]
    payloads = [rng.choice(shapes) * rng.choice([0, 1, 7, 50, 300]) for _ in range(12)]

    def work(disk: MemoryDisk, history: History, sync: Sync) -> None:
        for at in range(0, len(payloads), 4):
            with open_journal(disk, Payloads(), sync=sync, file_bytes=2000) as journal:
                for payload in payloads[at : at + 4]:
                    history.append(journal, payload)
                    if len(payload) % 3 == 1:
                        journal.sync()
                        history.note(journal)
            history.note(journal)

    return work


@pytest.mark.parametrize(
    "rounds", [4, pytest.param(400, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_random_records_keep_what_was_synced(rounds: int) -> None:
    rng = seeded(SEED)
    for _ in range(rounds):
        workload, sync = random_workload(rng), rng.choice(POLICIES)
        for disk, history in crashes(workload, sync):
            for image in some(disk.power_cuts(rng), rng, 4):
                require_kept(image, history, at_least=history.durable)


def test_a_record_whose_first_pages_arrived_is_cut_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_module, "JOURNAL_SECTOR_BYTES", 512)
    for policy in (Sync.always(), Sync.never()):
        disk = MemoryDisk()
        journal = open_journal(disk, sync=policy)
        journal.append(b"synced")
        journal.sync()
        path = live_file(disk)
        journal.append(bytes(range(1, 251)) * 100, settle=False)
        journal.append(b"behind it", settle=False)
        image = disk.inodes[path].live
        for kept in range(1, len(image) // 4096):
            pages = image[: 4096 * kept]
            for rest in (bytes(len(image) - len(pages)), bytes(4096) + image[len(pages) + 4096 :]):
                torn = MemoryDisk({path: pages + rest})
                assert state_of(torn) == [b"synced"]
                assert [r.payload for r in read(PATH, files=torn)] == [b"synced"]


# -- failed fsyncs ----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["sync 0", "sync directory"])
def test_after_a_failed_fsync_the_next_process_writes_again_what_it_found(failing: str) -> None:
    """The failed fsync dropped the pages: the cache has them, the disk lacks them, and the next
    fsync succeeds without writing them."""
    for nth in itertools.count():
        disk = MemoryDisk(sector=SECTOR)
        disk.drops_on_failed_sync = True
        history, left = History(), nth

        def fail(step: str) -> OSError | None:
            nonlocal left
            left -= step.startswith(failing)
            return OSError(errno.EIO, "lost") if left < 0 and step.startswith(failing) else None

        disk.fail = fail
        try:
            spanning(disk, history, Sync.always())
        except PoisonedError as error:
            raise AssertionError("the first error is the disk's") from error
        except StorageError:
            disk.fail = lambda step: None
        else:
            break
        disk.locked.clear()
        again = disk.killed()
        fold = Payloads()
        with open_journal(again, fold) as journal:
            assert fold.items[: history.durable] == history.appended[: history.durable]
            journal.append(b"x")
            for image in again.power_cuts():
                assert state_of(image) == [*fold.items, b"x"]
    assert nth > 3


# -- detectable losses -------------------------------------------------------------------------


def closed_journal(sync: Sync) -> tuple[MemoryDisk, list[bytes]]:
    disk, history = MemoryDisk(sector=SECTOR), History()
    with open_journal(disk, sync=sync) as journal:
        for size in (1, 40, 100, 70):
            history.append(journal, bytes((65 + size % 26,)) * size)
            history.append(journal, bytes(3 * SECTOR))  # a record of zeros, which is no loss
    return disk, history.appended


@pytest.mark.parametrize("sync", POLICIES, ids=NAMES)
def test_after_an_orderly_close_every_lost_sector_and_every_cut_is_told(sync: Sync) -> None:
    disk, items = closed_journal(sync)
    path = live_file(disk)
    data = disk.inodes[path].live
    damaged = [data[:size] for size in range(len(data))]
    for start in range(0, len(data), SECTOR):
        lost = data[:start] + bytes(len(data[start : start + SECTOR])) + data[start + SECTOR :]
        damaged += [lost] if lost != data else []
    for bytes_left in damaged:
        disk.inodes[path].live = bytes_left
        assert not inspect(PATH, files=disk).sound
        for looking in (lambda: state_of(disk), lambda: list(read(PATH, files=disk))):
            with pytest.raises(JournalDamagedError):
                looking()
        assert disk.inodes[path].live == bytes_left
    disk.inodes[path].live = data
    assert state_of(disk) == items


def test_without_the_note_marks_tell_of_what_was_synced_before_the_last_record() -> None:
    disk, items = closed_journal(Sync.always())
    path = live_file(disk)
    data = disk.inodes[path].live
    last = data.rindex(b"\xfe\xfd")
    mark = data.rindex(b"\xfe\xfd", 0, last)
    for start in range(0, mark, SECTOR):
        lost = data[:start] + bytes(min(SECTOR, mark - start)) + data[min(start + SECTOR, mark) :]
        if lost != data:
            error = outcome_of(MemoryDisk({path: lost}))
            assert isinstance(error, JournalDamagedError), start
    assert state_of(MemoryDisk({path: data[:mark]})) == items[:-1]


def test_a_live_file_that_is_gone_or_of_an_older_copy_is_told_by_the_note() -> None:
    for finals in (0, 1):
        disk, copies = MemoryDisk(), list[dict[str, bytes]]()
        for number in range(3):
            few = 1 if finals and number == 1 else 100
            with open_journal(disk, file_records=few) as journal:
                journal.append_many([b"one", b"two"])
            copies.append({path: inode.live for path, inode in disk.inodes.items()})
        live = live_file(disk)
        for image in (copies[0], copies[1], {p: d for p, d in copies[2].items() if p != live}, {}):
            old = MemoryDisk(image)
            old.notes = disk.notes
            with pytest.raises(JournalDamagedError, match="were synced"):
                state_of(old)
            old.notes = {}
            assert len(state_of(old)) in (0, 2, 4)


def test_a_note_that_is_cut_or_of_a_crash_says_nothing(tmp_path: object) -> None:
    disk, items = closed_journal(Sync.always())
    (notes,) = disk.notes.values()
    whole = notes[-1]
    for size in range(len(whole)):
        notes[-1] = whole[:size]
        assert state_of(disk) == items
        notes[-1] = whole[:size] + b"\xff" * 20
        assert state_of(disk) == items


def test_creation_cut_off_at_any_step_leaves_no_store_and_never_a_damaged_one() -> None:
    for step in range(1, 6):
        disk = MemoryDisk(sector=SECTOR)
        disk.die_before = step
        with suppress(ProcessDied):
            Journal.open(PATH, files=disk, content="test")
        assert not disk.notes
        for image in (disk.killed(), *disk.power_cuts()):
            assert state_of(image) == []
            assert not [path for path in image.inodes if path.endswith("-new")]
