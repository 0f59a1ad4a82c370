"""Ctrl-C at a random moment of a call (`tests.harness.interrupts`): the call is done or not done,
the handle works or says that it is poisoned, and nothing stays locked or pinned.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Store, backup, bulk
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.errors import PoisonedError
from kvstore.timeline.recent import RecentCommits
from kvstore.transaction import Transactions
from tests.harness.bounds import bounds
from tests.harness.interrupts import Outcome, interrupted, measured
from tests.harness.parts import parts_of
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")

SEED = "KVSTORE_INTERRUPTS_SEED"
STUCK_S = 120
"""A lock that nobody holds is taken at once, a lock that stays held never is."""


class Subject:
    """A store with data of every kind, and the arguments of its calls."""

    def __init__(self, place: Path, engine: str = "") -> None:
        place.mkdir()
        self.place = place
        self.store = store = kvstore.open(place / "db", engine=engine)
        for number in range(6):
            store.put(b"k%d" % number, b"v%d" % number)
        store.delete_range(b"k4", b"k5")
        self.imported = self.stage("in", b"i")
        bulk.ingest(store, self.imported.staging)
        self.then = store.upper - 1
        store.put(b"k0", b"new")
        self.waiting = self.stage("waiting", b"j")

    def stage(self, name: str, key: bytes) -> bulk.Import:
        made = bulk.Import.create(self.place / name)
        with made.writer() as writer:
            writer.put(key, b"row")
        made.seal()
        return made


def batch(s: Subject) -> None:
    with s.store.batch() as made:
        made.delete_range(b"k1", b"k3")
        made.put(b"k2", b"z")


def transaction(s: Subject) -> None:
    with s.store.transaction() as txn:
        txn.put(b"k1", (txn.get(b"k0") or b"") + b"!")


def snapshot(s: Subject) -> None:
    with s.store.snapshot() as held:
        list(held.scan())


def hold(s: Subject) -> None:
    held = s.store.hold("h")
    held.move(s.store.upper - 1)
    held.release()


def feed(s: Subject) -> None:
    with s.store.feed("f", start=s.store.since) as consumer:
        for found in consumer:
            consumer.ack(found)


def changeset(s: Subject) -> None:
    with s.store.changeset():
        s.store.put(b"k1", b"in a changeset")


CALLS: Mapping[str, Callable[[Subject], object]] = {
    "put": lambda s: s.store.put(b"k1", b"w"),
    "put sync": lambda s: s.store.put(b"k1", b"w", durability="sync"),
    "delete": lambda s: s.store.delete(b"k1"),
    "delete_range": lambda s: s.store.delete_range(b"k0", b"k3"),
    "delete_range idempotent": lambda s: s.store.delete_range(b"k0", b"k3", idempotent=True),
    "put_if": lambda s: s.store.put_if(b"k1", b"w", b"v1"),
    "pop": lambda s: s.store.pop(b"k1"),
    "batch": batch,
    "transaction": transaction,
    "get": lambda s: s.store.get(b"k1", s.then),
    "get_many": lambda s: s.store.get_many([b"k1", b"k2"], s.then),
    "get_many at times": lambda s: s.store.get_many([b"k1", b"k2"], [s.then, s.then]),
    "floor": lambda s: s.store.floor(b"k9", s.then),
    "join": lambda s: s.store.join(pa.table({"id": ["k1"], "ts": [int(s.then)]})).read_all(),
    "history": lambda s: s.store.history(b"k0"),
    "scan": lambda s: list(s.store.scan()),
    "scan_batches": lambda s: s.store.scan_batches().read_all(),
    "changes": lambda s: list(s.store.changes(s.store.since)),
    "events": lambda s: list(s.store.events(s.store.since)),
    "snapshot": snapshot,
    "hold": hold,
    "feed": feed,
    "gc": lambda s: s.store.gc(before=s.store.upper - 1),
    "clear_range": lambda s: s.store.clear_range(b"k0", b"k3", compact=False),
    "revert_range": lambda s: s.store.revert_range(b"k0", b"k9", to=s.then),
    "revert_import": lambda s: s.store.revert_import(s.imported.import_id),
    "ingest": lambda s: bulk.ingest(s.store, s.waiting.staging),
    "reshard": lambda s: s.store.reshard(2),
    "checkpoint": lambda s: s.store.checkpoint(s.place / "copy"),
    "sync": lambda s: s.store.sync(),
    "changeset": changeset,
    "force_quiescence": lambda s: s.store.force_quiescence(timedelta(0)),
    "verify": lambda s: s.store.verify(),
    "stats": lambda s: s.store.stats(),
}


def elsewhere(call: Callable[[], Any]) -> Any:
    """Make the call in another thread, which waits for each lock that this thread has not
    released."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(STUCK_S)
    assert found, "a lock stays held"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def state(store: Store) -> dict[bytes, bytes]:
    return dict(store.scan())


def one_interrupt(
    place: Path, call: Callable[[Subject], object], after_s: float, expected: dict[bytes, bytes]
) -> Outcome:
    s = Subject(place)
    store, before = s.store, state(s.store)
    outcome, error = interrupted(lambda: call(s), after_s=after_s)
    assert outcome is not Outcome.OTHER, error
    del error  # its traceback keeps the objects of the call alive
    gc.collect()
    try:
        found = elsewhere(lambda: state(store))
        assert not store.holds.pins
        elsewhere(lambda: store.put(b"later", b"v"))
        elsewhere(lambda: store.gc(before=0))
        if found == before:  # otherwise a clear may have been done
            store.get(b"k1", as_of=store.since)
    except PoisonedError:
        found = None
    elsewhere(store.close)
    with kvstore.open(place / "db") as again:
        rows = state(again)
        rows.pop(b"later", None)
        assert rows in (before, expected)
        assert found is None or found == rows
    return outcome


@pytest.mark.parametrize(
    "count", [2, pytest.param(100, marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_is_done_or_not_and_holds_no_lock(
    tmp_path: Path, name: str, count: int
) -> None:
    pick, call = seeded(SEED), CALLS[name]
    s = Subject(tmp_path / "measured")
    duration_s = measured(lambda: call(s))
    expected = state(s.store)
    s.store.close()
    for number in range(count):
        after_s = pick.random() * duration_s
        one_interrupt(tmp_path / f"{number}", call, after_s, expected)


def test_an_event_that_nobody_logs_takes_no_lock_of_logging(store: Store) -> None:
    """An interrupt in `logging.getLogger` may leave this lock held."""
    is_held, is_over = threading.Event(), threading.Event()

    class Slow(logging.Logger):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            is_held.set()
            is_over.wait()

    def hold() -> None:
        before = logging.getLoggerClass()
        logging.setLoggerClass(Slow)
        logging.getLogger(f"held for {store!r}")
        logging.setLoggerClass(before)

    store.gc(before=0)
    holding = threading.Thread(target=hold)
    holding.start()
    is_held.wait()
    try:
        elsewhere(lambda: store.gc(before=0))
    finally:
        is_over.set()
        holding.join()


@pytest.mark.parametrize(
    "count", [3, pytest.param(100, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_a_join_with_a_collection_that_is_interrupted_leaves_it_usable(
    store: Store, tmp_path: Path, count: int
) -> None:
    pick = seeded(SEED)
    collection = backup.Collection(tmp_path / "collection")
    times = []
    for number in range(30):
        times.append(int(store.put(b"k%d" % (number % 3), b"%d" % number)))
        if number % 10 == 9:
            collection.backup(store)
    labels = pa.table({"id": ["k0"] * 30, "ts": times})

    def call() -> pa.Table:
        return collection.join(labels).read_all()

    with bounds(JOIN_COLUMNS_ROWS_MAX=4):
        duration_s, expected = measured(call), call()
        for _ in range(count):
            outcome, error = interrupted(call, after_s=pick.random() * duration_s)
            assert outcome is not Outcome.OTHER, error
            del error
            gc.collect()
            assert elsewhere(call).equals(expected)
    elsewhere(lambda: collection.backup(store))
    elsewhere(collection.compact)
    assert elsewhere(call).equals(expected)


def test_interrupts_come_in_the_middle_of_calls(tmp_path: Path) -> None:
    """A harness whose signals always come too late would find nothing."""
    pick, outcomes = random.Random(1), []
    with kvstore.open(tmp_path / "db") as store:
        for number in range(300):
            store.put(b"%d" % number, b"v")

        def call() -> None:
            for _ in range(3):
                list(store.changes(0))

        duration_s = measured(call)
        outcomes = [interrupted(call, after_s=pick.random() * duration_s)[0] for _ in range(12)]
        assert Outcome.RAISED in outcomes
        assert not store.holds.pins


# -- each case that was found, not at random -------------------------------------------------


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_a_clear_that_was_interrupted_before_its_write_is_called_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span was once refused until the next commit, and reads of the newest time spun."""
    at = store.put(b"k", b"v")
    store.put(b"z", b"v")
    with monkeypatch.context() as patch:
        patch.setattr(parts_of(store).committer.frontiers, "raise_floor", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.clear_range(b"a", b"m")
    assert store.get(b"k", as_of=at) == b"v"
    assert elsewhere(lambda: store.get(b"k")) == b"v"
    assert [change.key for change in store.changes(0)] == [b"k", b"z"]
    assert store.stats()["clears"] == 0
    store.clear_range(b"a", b"m")
    assert store.get(b"k") is None


def test_no_lock_is_taken_by_entering_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entering a condition runs code in Python, where a signal may come between the lock and the
    block. The lock then stayed held, and every call of every thread waited for ever. Only this
    thread is interrupted, because the threads of pytest-xdist enter conditions too."""
    here, enter = threading.current_thread(), threading.Condition.__enter__

    def interrupted_here(condition: threading.Condition) -> bool:
        if threading.current_thread() is here:
            raise KeyboardInterrupt
        return enter(condition)

    with kvstore.open(tmp_path / "db") as store:
        monkeypatch.setattr(threading.Condition, "__enter__", interrupted_here)
        store.put(b"k", b"v", durability="group")
        store.sync()
        store.wait_beyond(0, timeout=0.0)
        made = bulk.Import.create(tmp_path / "in")
        with made.writer() as writer:
            writer.put(b"i", b"v")
        made.seal()
        bulk.ingest(store, made.staging)
        with store.changeset():
            store.put(b"k", b"w")
        store.force_quiescence()
        task = store.tasks.insert("q")
        assert store.tasks.claim(["q"]) is not None
        assert store.tasks.get(task.id) is not None
        monkeypatch.undo()


def test_a_snapshot_that_was_interrupted_in_the_making_keeps_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.store.Snapshot", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.snapshot()
    assert not store.holds.pins


def test_a_transaction_that_was_interrupted_in_the_making_keeps_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RecentCommits, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.transaction()
    assert not store.holds.pins
    with store.transaction() as txn:
        txn.put(b"k", b"v")
    assert parts_of(store).committer.recent.watchers == 0


def test_a_rollback_that_was_interrupted_is_finished_by_the_finalizer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    txn = store.transaction()
    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            txn.rollback()
    del txn
    gc.collect()
    assert not store.holds.pins
    store.transaction().rollback()
    assert parts_of(store).committer.recent.watchers == 0


def hold_a_time(s: Subject) -> None:
    s.store.hold("report")


def import_rows(s: Subject) -> None:
    bulk.ingest(s.store, s.waiting.staging)


@pytest.mark.parametrize(
    ("patch_one", "call", "expected"),
    [
        (lambda patch: patch.setattr(MemoryEngine, "_show", interrupt), hold_a_time, {}),
        (
            lambda patch: patch.setattr(MemoryEngine, "_take", interrupt),
            import_rows,
            {b"j": b"row"},
        ),
    ],
    ids=["hold", "ingest"],
)
def test_a_call_that_is_interrupted_between_journal_and_memory_leaves_a_store_that_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patch_one: Callable[[pytest.MonkeyPatch], None],
    call: Callable[[Subject], object],
    expected: dict[bytes, bytes],
) -> None:
    """The journal has the record, and memory lacks it: the store was poisoned, reads included."""
    s = Subject(tmp_path / "subject", engine="memory")
    before = state(s.store)
    with monkeypatch.context() as patch:
        patch_one(patch)
        with pytest.raises(KeyboardInterrupt):
            call(s)
    assert state(s.store) == before
    call(s)
    assert state(s.store) == before | expected
    holds = s.store.holds.all()
    s.store.close()
    with kvstore.open(s.place / "db", engine="memory") as again:
        assert state(again) == before | expected
        assert again.holds.all() == holds
        assert again.verify().problems == ()
