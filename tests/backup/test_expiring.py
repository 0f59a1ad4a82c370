"""Keys that expire, in backups: their expiry is backed up with them, and no restore loses it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import ManualClock, Store, Timestamp, backup, bulk
from kvstore.backup import Collection
from kvstore.backup.reading import CollectionReader
from kvstore.testing.model import state_after
from tests.harness.seeds import seeded

pytestmark = pytest.mark.tiny_limits

START = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9
LIFE = timedelta(hours=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as opened:
        for key in (b"a1", b"a2", b"b1", b"b2"):
            opened.put(key, b"v", expires=LIFE)
            clock.advance(HOUR // 4)
        opened.put(b"b1", b"stays")
        yield opened


@pytest.fixture
def collection(store: Store, tmp_path: Path, clock: ManualClock) -> Collection:
    """A first backup before the first key has expired, and another one after it."""
    made = Collection(tmp_path / "backups", clock=clock)
    clock.set(START + HOUR - 1000)
    made.backup(store)
    clock.set(START + HOUR)
    made.backup(store)
    return made


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize(
    ("span", "keys"),
    [
        ({}, [b"a2", b"b1", b"b2"]),
        ({"prefix": b"a"}, [b"a2"]),
        ({"prefix": b"b"}, [b"b1", b"b2"]),
        ({"start": b"a2", "end": b"b2"}, [b"a2", b"b1"]),
        ({"start": b"b"}, [b"b1", b"b2"]),
    ],
)
def test_a_restore_schedules_what_is_ahead(
    collection: Collection,
    tmp_path: Path,
    clock: ManualClock,
    span: dict[str, bytes],
    keys: list[bytes],
    history: bool,
) -> None:
    collection.restore(tmp_path / "restored", history=history, **span)  # type: ignore[arg-type]
    with kvstore.open(tmp_path / "restored", durability="async", clock=clock) as restored:
        assert list(restored.keys()) == keys
        if history and b"a2" in keys and "start" not in span:
            assert restored.history(b"a1")[0].timestamp == START + HOUR
            assert restored.get(b"a1", START + HOUR - 1) == b"v"
        clock.advance(10 * HOUR)
        assert list(restored.keys()) == [key for key in keys if key == b"b1"]
        if b"a2" in keys:
            assert restored.history(b"a2")[0].timestamp == START + HOUR * 5 // 4


def test_a_restore_as_of_a_time_before_an_expiry_deletes_it_again_at_its_time(
    collection: Collection, tmp_path: Path, clock: ManualClock
) -> None:
    collection.restore(tmp_path / "restored", as_of=START + HOUR - 1)
    with kvstore.open(tmp_path / "restored", durability="async", clock=clock) as restored:
        assert restored.get(b"a1", START + HOUR - 1) == b"v"
        assert restored.get(b"a1") is None
        assert restored.history(b"a1")[0].timestamp == START + HOUR


def test_the_rows_of_a_collection_leave_the_records_out(
    collection: Collection, store: Store
) -> None:
    rows = collection.scan_batches().read_all()["key"].to_pylist()
    assert rows == [b"a2", b"b1", b"b2"]
    collection.compact()
    assert collection.verify("contents", store).rows


def test_rows_that_are_restored_into_a_live_store_bring_their_times(
    collection: Collection, tmp_path: Path, clock: ManualClock
) -> None:
    with kvstore.open(tmp_path / "other", durability="async", clock=clock) as other:
        other.put(b"b2", b"replaced", expires=10 * LIFE)
        other.put(b"c1", b"stays")
        collection.restore_into(other, start=b"a2")
        assert dict(other.scan()) == dict.fromkeys((b"a2", b"b2"), b"v") | dict.fromkeys(
            (b"b1", b"c1"), b"stays"
        )
        assert other.ttl(b"b1") is None
        clock.set(START + HOUR * 5 // 4)
        assert list(other.keys()) == [b"b1", b"b2", b"c1"]
        assert other.history(b"a2")[0].timestamp == START + HOUR * 5 // 4
        clock.advance(20 * HOUR)
        assert list(other.keys()) == [b"b1", b"c1"]
        assert other.history(b"b2")[0].timestamp == START + HOUR * 7 // 4


def test_a_time_that_has_passed_deletes_a_restored_row_right_after_it(
    collection: Collection, tmp_path: Path, clock: ManualClock
) -> None:
    clock.advance(HOUR)
    with kvstore.open(tmp_path / "other", durability="async", clock=clock) as other:
        at = collection.restore_into(other, START + HOUR - 1)
        assert sorted(dict(other.scan(as_of=at))) == [b"a1", b"a2", b"b1", b"b2"]
        assert list(other.keys()) == []
        assert all(at < other.history(key)[0].timestamp <= at + 4 for key in (b"a1", b"b2"))
        assert other.verify().problems == ()


def due_times(reader: Store | CollectionReader, marks: list[int]) -> list[tuple[Any, ...]]:
    """The changes between the first and the last mark, and the latest ones up to each mark, with
    their due times."""
    found = list(reader.changes(marks[0], marks[-1]))
    for mark in marks:
        found += reader.changes(marks[0], mark, revisions="latest")
    return [(*change, change.expires) for change in found]


def test_every_copy_agrees_on_keys_of_puts_and_of_imports_that_expire(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Puts, imports, reverts and GC at random, while keys are due: a replica, a live reader, a
    checkpoint and a restore have the states of the store, and its changes lead from each to the
    next."""
    pick, keys = seeded(), [b"%02d" % number for number in range(20)]
    made = Collection(tmp_path / "backups", clock=clock)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        store.put_many(dict.fromkeys(keys, b"first"), expires=20 * LIFE)
        marks, added = [store.sync() - 1], []
        replica, live = tmp_path / "replica", kvstore.follow(tmp_path / "store")
        for step in range(6):
            for key in pick.sample(keys, 4):
                store.put(key, b"%d" % step, expires=pick.choice([None, LIFE, 3 * LIFE]))
            store.persist(pick.choice(keys))
            load = bulk.Import.create(tmp_path / f"staged-{step}")
            with load.writer() as writer:
                for key in sorted(pick.sample(keys, 6)):
                    due = pick.choice([None, clock.wall_ns() + pick.randrange(4 * HOUR)])
                    writer.put(key, b"i", expires=None if due is None else Timestamp(due))
            load.seal()
            bulk.ingest(store, load.staging)
            added.append(load.import_id)
            clock.advance(pick.randrange(HOUR))
            if step % 2:
                store.revert_import(added.pop(0))
            marks.append(store.sync() - 1)
            backup.replicate(store, replica)
            made.backup(store)
        clock.advance(2 * HOUR)
        marks.append(store.sync() - 1)
        backup.replicate(store, replica)
        made.backup(store)
        states = {at: dict(store.scan(as_of=at)) for at in marks}
        for before, after in pairwise(marks):
            assert state_after(states[before], store.changes(before, after)) == states[after]
        due = due_times(store, marks)
        assert 0 < sum(expires is not None for *_, expires in due) < len(due)
        with made.open() as reader:
            assert due_times(reader, marks) == due
        store.checkpoint(tmp_path / "checkpoint")
        made.restore(tmp_path / "restored")
        with live:
            live.wait_beyond(marks[-1], timeout=60)
            assert {at: dict(live.scan(as_of=at)) for at in marks} == states
            assert due_times(live, marks) == due
        store.gc(before=marks[3])
        kept = {at: state for at, state in states.items() if at >= store.since}
        assert {at: dict(store.scan(as_of=at)) for at in kept} == kept
        left = {key: store.ttl(key) for key in keys}
        assert store.verify().problems == ()
    for name in ("replica", "checkpoint", "restored"):
        with kvstore.open_read_only(tmp_path / name) as copy:
            assert {at: dict(copy.scan(as_of=at)) for at in marks} == states, name
            assert due_times(copy, marks) == due
            for before, after in pairwise(marks):
                assert state_after(states[before], copy.changes(before, after)) == states[after]
    with kvstore.open(tmp_path / "restored", durability="async", clock=clock) as restored:
        assert {key: restored.ttl(key) is None for key in keys} == {
            key: ttl is None for key, ttl in left.items()
        }
        clock.advance(30 * HOUR)
        assert list(restored.keys()) == [key for key in states[marks[-1]] if left[key] is None]
