"""Keys that expire: each is deleted at exactly its time, by whichever call comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, Store, Timestamp, backup, bulk
from kvstore.base.span import RESERVED
from kvstore.errors import ConflictError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.testing.model import state_after
from tests.harness.bounds import bounds

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

START = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9
LIFE = timedelta(hours=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as opened:
        yield opened


FIRST_CALLS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get(b"k"),
    "get_many": lambda store: store.get_many([b"k"]),
    "scan": lambda store: list(store.scan()),
    "read of now": lambda store: store.get(b"k", "now"),
    "put": lambda store: store.put(b"other", b""),
    "put_if": lambda store: store.put_if(b"k", b"again", expected=None),
    "transaction": lambda store: store.transaction().rollback(),
    "sync": lambda store: store.sync(),
    "reshard": lambda store: store.reshard(2),
    "feed": lambda store: [batch.events for batch in store.feed("f", start="oldest")],
    "ttl": lambda store: store.ttl(b"k"),
    "gc": lambda store: store.gc(keep=timedelta(days=1)),
}


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_a_key_is_deleted_at_exactly_its_time_by_whoever_comes_first(
    store: Store, clock: ManualClock, first: str
) -> None:
    at = store.put(b"k", b"v", expires=LIFE)
    clock.advance(HOUR - 1)
    assert store.get(b"k") == b"v"
    clock.advance(10)
    FIRST_CALLS[first](store)
    deleted = [version for version in store.history(b"k") if version.value is None]
    assert [version.timestamp for version in deleted] == [at + HOUR]
    assert store.get(b"k", at + HOUR - 1) == b"v"
    assert store.get(b"k", at + HOUR) is None
    assert [(c.timestamp, c.op, c.value) for c in store.changes(at - 1, at + HOUR)] == [
        (at, "put", b"v"),
        (at + HOUR, "delete", None),
    ]


def test_a_later_write_cancels_the_expiry(store: Store, clock: ManualClock) -> None:
    for key in (b"put", b"same", b"update", b"deleted", b"range", b"touched"):
        store.put(key, b"v", expires=LIFE)
    store.put(b"put", b"w")
    store.put(b"same", b"v")
    store.update(b"update", lambda old: old)
    store.delete(b"deleted")
    store.delete_range(b"range", b"range\xff")
    store.put_if(b"touched", b"v", expected=b"v", expires=2 * LIFE)
    clock.advance(HOUR)
    state = dict.fromkeys((b"same", b"update", b"touched"), b"v") | {b"put": b"w"}
    assert dict(store.scan()) == state
    assert len(store.history(b"deleted")) == len(store.history(b"range")) == 2
    assert store.ttl(b"put") is None
    clock.advance(HOUR + 100)
    assert b"touched" not in dict(store.scan())


def test_the_last_put_of_a_batch_decides(store: Store, clock: ManualClock) -> None:
    value = b"v"
    with store.batch() as batch:
        batch.put(b"stays", value, expires=LIFE)
        batch.put(b"stays", value)
        batch.put(b"goes", value)
        batch.put(b"goes", value, expires=2 * LIFE)
        batch.put(b"goes", value, expires=LIFE)
        batch.put(b"never", value, expires=LIFE)
        batch.delete(b"never")
    with store.transaction() as txn:
        txn.put(b"in a transaction", value, expires=Timestamp(START + HOUR))
        assert txn.get(b"in a transaction") == value
        assert list(txn.scan(prefix=b"in")) == [(b"in a transaction", value)]
    clock.advance(HOUR + 100)
    assert dict(store.scan()) == {b"stays": value}
    assert store.history(b"goes")[0].timestamp == START + HOUR


def test_ttl_and_persist(store: Store, clock: ManualClock) -> None:
    assert store.ttl(b"k") is None
    at = store.put(b"k", b"v", expires=LIFE)
    clock.advance(HOUR // 4)
    assert store.ttl(b"k") == LIFE * 3 / 4
    assert store.persist(b"absent") is None
    assert store.persist(b"k") is not None
    assert store.ttl(b"k") is None
    assert store.persist(b"k") is None
    clock.advance(HOUR)
    assert store.get(b"k") == b"v"
    assert [version.timestamp for version in store.history(b"k")] == [at]


def test_times_that_cannot_be_are_refused(store: Store, clock: ManualClock) -> None:
    past = datetime(2001, 1, 1, tzinfo=UTC)
    for expires in (past, timedelta(0), -LIFE, "-1h", "now", START, 1.5, True):
        with pytest.raises(UsageError, match="expires"):
            store.put(b"k", b"v", expires=expires)  # type: ignore[arg-type]
    for expires in (2**63 - 1, timedelta.max, "+999999w"):
        with pytest.raises(UsageError, match=r"behind the last time, 2262-.*an earlier time"):
            store.put(b"k", b"v", expires=expires)
    with pytest.raises(UsageError, match="one that expires"):
        store.put(b"k" * KEY_BYTES_MAX, b"v", expires=LIFE)
    assert list(store.scan()) == []
    store.put(b"k", b"v", expires="2100-01-01T00:00:00Z")
    store.put(b"l", bytearray(b"v"), expires=datetime(2100, 1, 1, tzinfo=UTC))
    assert store.ttl(b"k") == store.ttl(b"l")


def test_a_step_back_of_the_clock_loses_no_expiry(store: Store, clock: ManualClock) -> None:
    store.put(b"early", b"v", expires=LIFE)
    clock.advance(100 * HOUR)
    assert store.get(b"early") is None  # every key due by the clock is deleted
    clock.advance(-50 * HOUR)
    at = store.put(b"late", b"v", expires=timedelta(hours=1))
    assert store.verify().ok
    clock.advance(2 * HOUR)
    assert store.get(b"late") is None
    assert [version.timestamp for version in store.history(b"late")] == [at + HOUR, at]


def test_a_store_catches_up_after_downtime(tmp_path: Path, clock: ManualClock) -> None:
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        due_at = [Timestamp(START + n * HOUR) for n in range(1, 9)]
        at = [store.put(b"k%d" % n, b"v", expires=due) for n, due in enumerate(due_at, 1)]
    clock.advance(100 * HOUR)
    with kvstore.open_read_only(tmp_path / "store") as read:
        assert len(list(read.scan())) == 8  # the state at its `upper`, which does not move
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        assert list(store.scan()) == []
        for number in range(1, 9):
            due = START + number * HOUR
            found = [(v.timestamp, v.value) for v in store.history(b"k%d" % number)]
            assert found == [(due, None), (at[number - 1], b"v")]
            state = dict(store.scan(as_of=due))
            assert sorted(state) == [b"k%d" % n for n in range(number + 1, 9)]


def test_plain_reads_do_not_meet_the_records(store: Store, clock: ManualClock) -> None:
    feed = store.feed("f", start="now")
    store.put(b"k", b"v", expires=LIFE)
    with store.snapshot() as snapshot:
        assert list(snapshot.scan()) == [(b"k", b"v")]
    assert store.count() == 1
    assert list(store.keys(reverse=True)) == [b"k"]
    assert store.scan_batches().read_all().num_rows == 1
    assert store.floor(b"\xff" * 8) == (b"k", b"v")
    clock.advance(HOUR)
    events = [(event.key, event.value) for batch in feed for event in batch.events]
    assert events == [(b"k", b"v"), (b"k", None)]
    with pytest.raises(UsageError, match="belongs to tables"):
        store.put(RESERVED + b"\x00x", b"")


def test_a_transaction_conflicts_with_the_expiry_of_what_it_read(
    store: Store, clock: ManualClock
) -> None:
    store.put(b"k", b"v", expires=LIFE)
    txn = store.transaction()
    assert txn.get(b"k") == b"v"
    txn.put(b"seen", b"v")
    clock.advance(2 * HOUR)
    with pytest.raises(ConflictError):
        txn.commit()
    assert store.get(b"seen") is None


def test_due_deletes_belong_to_no_changeset_of_their_finder(
    store: Store, clock: ManualClock
) -> None:
    store.put(b"k", b"v", expires=LIFE)
    clock.advance(HOUR)
    with store.changeset() as changeset:
        store.put(b"other", b"v")
    found = {event.key: event.changeset for event in store.events(START)}
    assert found[b"other"] == changeset.id
    assert found[b"k"] not in (None, changeset.id)


def test_a_time_that_passes_before_the_commit_is_due_right_after_it(
    store: Store, clock: ManualClock
) -> None:
    with store.batch() as batch:
        batch.put(b"k", b"v", expires=LIFE)
        clock.advance(2 * HOUR)
    assert batch.timestamp == START + 2 * HOUR
    assert store.get(b"k", batch.timestamp) == b"v"
    clock.advance(1)
    assert store.get(b"k") is None
    assert store.history(b"k")[0].timestamp == batch.timestamp + 1


def test_values_of_any_size_expire_in_bounded_steps(store: Store, clock: ManualClock) -> None:
    with bounds(EXPIRY_STEP_KEYS=3, EXPIRY_READ_BYTES=10):
        for number in range(20):
            store.put(b"%02d" % number, b"v" * number, expires=LIFE)
        together = {b"m%02d" % number: b"v" * 9 for number in range(10)}
        store.put_many(together, expires=Timestamp(START + 2 * HOUR))
        store.put(b"07", b"kept")
        store.put(b"m07", b"kept")
        clock.advance(2 * HOUR)
        assert dict(store.scan()) == {b"07": b"kept", b"m07": b"kept"}
    deleted = {store.history(b"m%02d" % n)[0].timestamp for n in range(10) if n != 7}
    assert deleted == {START + 2 * HOUR}


def test_a_point_read_writes_one_step_of_a_burst(store: Store, clock: ManualClock) -> None:
    """The others stay due, and no read shows them."""
    for number in range(20):
        store.put(b"%02d" % number, b"v", expires=Timestamp(START + HOUR + number))
    store.put(b"stays", b"v", expires=2 * LIFE)
    store.put(b"07", b"again", expires=3 * LIFE)
    with bounds(EXPIRY_STEP_KEYS=3):
        clock.advance(HOUR + 100)
        assert store.get(b"19") is None
        assert store.upper == START + HOUR + 3
        assert store.get_many([b"18", b"stays", b"07", b"none"]) == [None, b"v", b"again", None]
        assert store.get(b"stays") == b"v"
        assert store.upper < START + HOUR + 19
        assert dict(store.scan()) == {b"stays": b"v", b"07": b"again"}
    assert [store.history(b"%02d" % n)[0].timestamp for n in (0, 19)] == [
        START + HOUR,
        START + HOUR + 19,
    ]


@pytest.mark.usual_limits
@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)], ids=["many", "a million"]
)
def test_many_keys_that_are_due_in_one_second_expire_in_bounded_steps(
    store: Store, clock: ManualClock, count: int
) -> None:
    for first in range(0, count, 20_000):
        with store.batch() as batch:
            for number in range(first, first + 20_000):
                due = START + HOUR + number * 10**9 // count
                batch.put(b"%07d" % number, b"v", expires=Timestamp(due))
    written = store.upper - 1
    clock.advance(HOUR + 10**9)
    assert store.get(b"%07d" % (count - 1)) is None
    assert store.count() == 0
    assert store.count(as_of=START + HOUR + 10**9 // 2 - 1) == count // 2
    deletes = store.changes(written, order="time")
    assert sum(change.op == "delete" for change in deletes) == count


def test_gc_removes_the_records_of_the_past(store: Store, clock: ManualClock) -> None:
    for number in range(50):
        store.put(b"%d" % number, b"v", expires=LIFE)
        store.put(b"touched", b"v", expires=LIFE)
    clock.advance(HOUR + 1000)
    assert store.count() == 0
    store.gc(before=store.sync() - 1)
    assert store.verify().versions == 0


def test_a_replica_takes_the_deletes_of_its_source_and_schedules_once_promoted(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        store.put(b"%d" % number, b"v", expires=Timestamp(START + number * HOUR))
    standby = tmp_path / "standby"
    backup.replicate(store, standby)
    clock.advance(HOUR)
    backup.replicate(store, standby)
    store.close()
    with kvstore.open(standby, "rocksdb", clock=clock, durability="async") as replica:
        assert [key for key, _ in replica.scan()] == [b"2", b"3"]
        clock.advance(HOUR)
        assert [key for key, _ in replica.scan()] == [b"2", b"3"]
        assert replica.ttl(b"3") == LIFE
        replica.replication.promote()
        assert [key for key, _ in replica.scan()] == [b"3"]
        assert replica.history(b"2")[0].timestamp == START + 2 * HOUR
        clock.advance(HOUR)
        assert replica.count() == 0
        states = {at: dict(replica.scan(as_of=at)) for at in (START, START + 2 * HOUR)}
        changes = replica.changes(START, START + 2 * HOUR)
        assert state_after(states[START], changes) == states[START + 2 * HOUR]


def test_a_transaction_reads_its_own_expiring_values_as_plain_bytes() -> None:
    with kvstore.open(None, engine="memory") as store, store.transaction() as transaction:
        transaction.put(b"k", b"v", expires=timedelta(hours=1))
        found = transaction.get(b"k")
        rows = list(transaction.scan())
        assert (found, rows) == (b"v", [(b"k", b"v")])
        assert {type(found), type(rows[0][1])} == {bytes}


def test_a_check_of_a_commit_writes_no_delete_above_the_time_of_the_commit(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    """The time of the commit is taken before its check, and the clock moves during the check."""
    due = store.put(b"k", b"v", expires=LIFE) + HOUR
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"imported", b"row")
    staged.seal()
    seen: list[bytes | None] = []

    def check() -> None:
        if seen:  # the second call is under the lock
            clock.advance(2 * HOUR)
        seen.append(store.get(b"k"))
        assert list(store.changes(store.upper - 1)) == []

    stamp = bulk.ingest(store, tmp_path / "staged", check=check)
    assert stamp < due
    assert seen == [b"v", b"v"]
    assert dict(store.scan()) == {b"imported": b"row"}
    assert [change.timestamp for change in store.changes(stamp - 1)] == [stamp, due]
