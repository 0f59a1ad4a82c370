"""Changes tell when a value expires, in every form and by every reader."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import Change, ManualClock, Store, Timestamp, bulk
from kvstore.feeds.lines import changes_json_lines, debezium_lines
from tests.harness.seeds import seeded

pytestmark = pytest.mark.tiny_limits

HOUR = 3600 * 10**9
LIFE = timedelta(hours=1)

Dues = dict[tuple[bytes, int], int]
"""The due times of the versions that expire, by key and timestamp."""


def told(changes: Any) -> Dues:
    """The due times that changes or events tell, each of them of a value."""
    found = [change for change in changes if change.expires is not None]
    assert all(change.value is not None for change in found)
    return {(change.key, change.timestamp): change.expires for change in found}


def told_by_batches(batches: Any) -> Dues:
    rows = batches.read_all().to_pylist()
    return {
        (row["key"], row["timestamp"]): row["expires"] for row in rows if row["expires"] is not None
    }


def history(store: Store, clock: ManualClock, place: Path) -> Dues:
    """Write keys that expire and keys that do not, one by one, together, and by imports of which
    one is reverted. Returns the due times that were asked for."""
    pick, keys = seeded(), [b"%02d" % number for number in range(12)]
    clock.set(1_700_000_000 * 10**9)  # a writer of parts refuses due times before 1979
    dues: Dues = {}
    for step in range(12):
        some = pick.sample(keys, 4)
        due = pick.choice([None, clock.wall_ns() + pick.randrange(1, 4) * HOUR])
        expires = None if due is None else Timestamp(due)
        if step % 4 == 3:
            made = bulk.Import.create(place / f"staged-{step}")
            with made.writer() as writer:
                for key in sorted(some):
                    writer.put(key, b"i" * step, expires=expires)
            made.seal()
            at = bulk.ingest(store, made.staging)
        elif step % 4 == 2:
            with store.batch() as batch:
                batch.delete_range(some[0], some[0] + b"\xff")
                batch.delete(some[1])
                for key in some[2:]:
                    batch.put(key, b"b" * step, expires=expires)
            at, some = batch.timestamp, some[2:]  # type: ignore[assignment]
        else:
            at = store.put_many(dict.fromkeys(some, b"v" * step), expires=expires)
        if due is not None:
            dues |= {(key, int(at)): due for key in some}
        if step == 8:
            store.revert_import(made.import_id)
        clock.advance(HOUR // 3)
    return dues


def test_each_reader_tells_the_due_time_that_a_put_asked_for(
    each_engine: str, store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    streams = 3 if each_engine == "rocksdb" else 1
    first = store.reshard(streams).opened_at if streams > 1 else Timestamp(0)
    dues = history(store, clock, tmp_path)
    upto = store.sync() - 1
    assert len(dues) > 4
    assert told(store.changes(first, upto)) == dues
    assert told(store.changes(first, upto, order="time")) == dues
    assert told(store.changes(0, upto)) == dues  # maybe by a pass over the versions
    assert told(store.events(first, upto)) == dues
    assert told(store.events(first, upto, images="pre+post", expand="all")) == dues
    assert told_by_batches(store.changes_batches(first, upto)) == dues
    some = {at: due for at, due in dues.items() if at[0] < b"06"}
    assert told(store.changes(first, upto, end=b"06")) == some
    fed = {}
    for worker in range(streams):
        with store.feed("f", first, (worker, streams)) as feed:
            for batch in feed:
                fed |= told(batch.events)
    assert fed == dues


def test_the_latest_changes_and_the_state_of_a_feed_tell_what_is_due_now(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    history(store, clock, tmp_path)
    store.put(b"kept", b"v", expires=LIFE)
    store.put(b"due", b"v", expires=LIFE)
    store.persist(b"kept")
    at = store.sync() - 1
    latest = {change.key: change.expires for change in store.changes(0, at, revisions="latest")}
    left = {key: store.ttl(key) for key, _ in store.scan()}
    assert latest[b"kept"] is None
    assert latest[b"due"] is not None
    assert latest.keys() == left.keys()
    for key, time in latest.items():
        ttl = left[key]
        assert (time is None) == (ttl is None)
        if time is not None and ttl is not None:
            assert abs(time - clock.wall_ns() - ttl // timedelta(microseconds=1) * 1000) < 2000
    with store.feed("f", start="state") as feed:
        state = {e.key: e.expires for batch in feed if batch.is_state for e in batch.events}
    assert state == latest


def test_lines_envelopes_and_copies_of_a_change_tell_it(store: Store, clock: ManualClock) -> None:
    at = store.put(b"k", b"v", expires=LIFE)
    store.put(b"l", b"v")
    due = Timestamp(at + HOUR)
    expiring, plain = store.changes(0)
    assert (expiring.expires, plain.expires) == (due, None)
    assert expiring == Change(at, "put", b"k", None, b"v")
    assert "expires=" in repr(expiring)
    assert pickle.loads(pickle.dumps(expiring)).expires == due
    lines = [json.loads(line) for line in changes_json_lines(store, 0)]
    assert [line.get("expires") for line in lines] == [str(due), None]
    with store.feed("f", start="oldest") as feed:
        rows = [json.loads(line) for batch in feed for line in debezium_lines(batch, name="s")]
    assert [row["source"].get("expires_ns") for row in rows] == [int(due), None]


def test_a_span_without_expiries_costs_one_look(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"a", b"v", expires=LIFE)
    store.put_many({b"b%d" % number: b"v" for number in range(50)})
    read = kvstore.mvcc.Versions.get_timed
    asked: list[bytes] = []

    def counted(self: Any, keys: list[bytes], *rest: Any) -> Any:
        asked.extend(keys)
        return read(self, keys, *rest)

    monkeypatch.setattr(kvstore.mvcc.Versions, "get_timed", counted)
    assert len(list(store.changes(0, prefix=b"b"))) == 50
    assert asked == []
    assert len(list(store.changes(0, prefix=b"a"))) == 1
    assert asked
