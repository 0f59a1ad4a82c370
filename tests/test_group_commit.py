"""Commits that wait for the disk share an fsync: none returns too early, and none is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import Store
from kvstore.errors import PoisonedError, StorageError
from kvstore.timeline import durability
from tests.harness.parts import parts_of

WAITERS = 6

pytestmark = pytest.mark.usefixtures("each_engine")


class HeldSync:
    """An fsync that waits until the test opens it, and counts its calls."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sync = parts_of(store).engine.sync
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.fails = False
        self.count = 0
        monkeypatch.setattr(parts_of(store).engine, "sync", self.sync)

    def sync(self) -> None:
        self.count += 1
        self.begun.release()
        assert self.allowed.acquire(timeout=120)
        if self.fails:
            raise StorageError("storage failed", "look at the disk")
        self._sync()

    def open_up(self) -> None:
        """Open the fsync for all calls from now on."""
        self.allowed.release(1_000_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(tmp_path / "s", durability="group") as opened:
        yield opened


@pytest.fixture
def disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldSync]:
    disk = HeldSync(store, monkeypatch)
    yield disk
    disk.open_up()


class Crew:
    """Threads that commit once each; `outcome` has their timestamps and errors."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.outcome: list[int | Exception] = []
        self.threads: list[threading.Thread] = []

    def commit(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._one, args=(len(self.threads),))
            self.threads.append(thread)
            thread.start()

    def _one(self, number: int) -> None:
        try:
            stamp = self.store.put(b"%d" % number, b"v")
            assert stamp < parts_of(self.store).committer.durable
            self.outcome.append(stamp)
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.outcome.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()


def spin(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no call announces."""
    give_up = threading.Event()
    timer = threading.Timer(60, give_up.set)
    timer.start()
    while not condition():
        assert not give_up.is_set()
    timer.cancel()


def waiting(store: Store) -> int:
    return len(parts_of(store).committer.syncs._synced._waiters)  # type: ignore[attr-defined]


def test_commits_that_came_during_an_fsync_share_the_next(store: Store, disk: HeldSync) -> None:
    crew = Crew(store)
    crew.commit(1)
    assert disk.begun.acquire(timeout=120)
    crew.commit(WAITERS)
    spin(lambda: waiting(store) == WAITERS)
    assert crew.outcome == [], "nobody is told before the disk is"
    disk.allowed.release(2)
    crew.join()
    assert sorted(crew.outcome) == sorted(stamp for stamp in crew.outcome if stamp)  # type: ignore[type-var]
    assert len(crew.outcome) == 1 + WAITERS
    assert disk.count == 2
    assert waiting(store) == 0


def test_a_failed_fsync_is_told_to_all_that_wait(store: Store, disk: HeldSync) -> None:
    crew = Crew(store)
    crew.commit(1)
    assert disk.begun.acquire(timeout=120)
    crew.commit(WAITERS)
    spin(lambda: waiting(store) == WAITERS)
    disk.fails = True
    disk.allowed.release()
    crew.join()
    assert disk.count == 1, "after a failed fsync nothing is known: there is no other"
    kinds = sorted(type(found).__name__ for found in crew.outcome)
    assert kinds == [PoisonedError.__name__] * WAITERS + [StorageError.__name__]


def test_who_waits_too_long_looks_again_and_stands_in_nobodys_way(
    store: Store, disk: HeldSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "GROUP_COMMIT_WAIT_S_MAX", 0.0001)
    crew = Crew(store)
    for _ in range(3):
        crew.commit(WAITERS)
        assert disk.begun.acquire(timeout=120)
        disk.allowed.release()
    disk.open_up()
    crew.join()
    assert len(crew.outcome) == 3 * WAITERS
    assert not [found for found in crew.outcome if isinstance(found, Exception)]
    assert waiting(store) == 0


# -- interrupts: a signal's exception may come out of any line ----------------------------------


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("line", ["before the fsync", "at the fsync"])
def test_a_leader_that_is_interrupted_promises_nothing_and_lets_another_lead(
    store: Store, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    before = store.durable
    where, name = (
        (parts_of(store).committer.syncs, "sync")
        if line == "before the fsync"
        else (parts_of(store).engine, "sync")
    )
    with monkeypatch.context() as patched:
        patched.setattr(where, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put(b"a", b"1")
    assert store.durable == before
    crew = Crew(store)
    crew.commit(WAITERS)
    crew.join()
    assert not [found for found in crew.outcome if isinstance(found, Exception)]
    assert store.durable > before


def test_a_leader_that_never_speaks_again_is_passed_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "GROUP_COMMIT_WAIT_S_MAX", 0.01)
    parts_of(store).committer.syncs.is_syncing = True
    crew = Crew(store)
    crew.commit(1)
    crew.join()
    assert not [found for found in crew.outcome if isinstance(found, Exception)]


COUNTED: dict[str, Callable[[Store], object]] = {
    "commit": lambda store: store.put(b"k", b"1", durability="async"),
    "sync": lambda store: store.sync(),
    "changeset": lambda store: store.changeset().__enter__(),
}


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("commit", "finish_commit"),
        ("commit", "stage"),
        ("sync", "stage"),
        ("changeset", "begin_changeset"),
    ],
)
def test_an_interrupt_between_a_commit_and_its_count_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, place: str
) -> None:
    """The epochs in memory must fit the stored entries, or a reader reports damage."""
    with kvstore.open(tmp_path / "s") as store:
        monkeypatch.setattr("kvstore.changes.epochs.EPOCHS_PENDING_MAX", 2)
        store.put(b"k", b"0")
        store.put(b"k", b"0")
        capture = parts_of(store).committer.capture
        done = getattr(capture, place)

        def late(*arguments: object) -> None:
            if place == "stage":
                done(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(capture, place, late)
            with pytest.raises(KeyboardInterrupt):
                COUNTED[call](store)
        if parts_of(store).committer.health.poison:
            for call in (lambda: store.put(b"k", b"2"), store.verify, lambda: store.get(b"k")):
                with pytest.raises(PoisonedError, match="interrupted"):
                    call()
        else:  # the engine told what is stored, and a domain of its own counts what follows
            store.put(b"k", b"2")
            store.verify().require_ok()
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"3")
        store.verify().require_ok()
        assert [point.timestamp for point in store.feeds.quiescent_points()]


def test_streams_that_were_written_down_are_used_or_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reader would see changes that are written to the old streams afterwards."""
    with kvstore.open(tmp_path / "s") as store:
        store.reshard(3)
        with monkeypatch.context() as patched:
            patched.setattr(parts_of(store).committer.syncs, "sync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.reshard(2)
        if parts_of(store).committer.health.poison:
            with pytest.raises(PoisonedError, match="interrupted"):
                store.put(b"k", b"1")
        else:  # the engine told which streams are stored
            at = store.put(b"k", b"1")
            assert [change.key for change in store.changes(at - 1, order="time")] == [b"k"]
            store.verify().require_ok()
    with kvstore.open(tmp_path / "s") as store:
        at = store.put(b"k", b"2")
        assert [change.key for change in store.changes(at - 1, order="time")] == [b"k"]
        store.verify().require_ok()


# -- closing ------------------------------------------------------------------------------------


def test_a_commit_that_closing_made_durable_is_done_and_not_refused(
    store: Store, disk: HeldSync
) -> None:
    crew = Crew(store)
    crew.commit(1)
    assert disk.begun.acquire(timeout=120)  # this thread leads
    crew.commit(WAITERS)
    spin(lambda: waiting(store) == WAITERS)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert disk.begun.acquire(timeout=120)
    disk.open_up()
    closing.join(120)
    crew.join()
    assert not [found for found in crew.outcome if isinstance(found, Exception)], crew.outcome


def test_an_fsync_that_ends_behind_the_closing_is_no_failure(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader comes back from the disk when the file of the mark is closed."""
    sync, begun, closed = parts_of(store).engine.sync, threading.Event(), threading.Event()

    def late() -> None:
        sync()
        if threading.current_thread() in crew.threads:
            begun.set()
            assert closed.wait(120)

    monkeypatch.setattr(parts_of(store).engine, "sync", late)
    crew = Crew(store)
    crew.commit(1)
    assert begun.wait(120)
    store.close()
    closed.set()
    crew.join()
    assert isinstance(crew.outcome[0], int), crew.outcome
