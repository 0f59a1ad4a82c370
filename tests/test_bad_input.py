"""Bad input gets an error of the tree with its facts, and no data is lost or half written.

Bad paths are in `tests/test_bad_paths.py`, bad imports in `tests/bulk`, bad collections in
`tests/backup`, full disks in `tests/crash`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk, opening
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.errors import (
    ClosedError,
    HistoryGoneError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.limits import KEY_BYTES_MAX
from kvstore.store import Store
from tests.harness.parts import parts_of

pytestmark = pytest.mark.usefixtures("each_engine")

NOW = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    clock = kvstore.ManualClock(NOW)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        store.put(b"k", b"v")
        yield store


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all calls that must change nothing."""
    path = tmp_path_factory.mktemp("unmoved") / "store"
    with kvstore.open(path, durability="async", clock=kvstore.ManualClock(NOW)) as store:
        store.put(b"k", b"v")
        yield store


def whole(store: Store) -> Any:
    return dict(store.scan()), store.history(b"k"), list(store.changes(0)), store.upper


def batch_with(op: str, *arguments: Any) -> Callable[[Store], None]:
    def run(store: Store) -> None:
        with store.batch() as batch:
            batch.put(b"lost", b"1")
            getattr(batch, op)(*arguments)

    return run


WRONG_TYPES: dict[str, Callable[[Store], Any]] = {
    "put key text": lambda s: s.put("k", b"v"),
    "put key none": lambda s: s.put(None, b"v"),
    "put key of numbers": lambda s: s.put([1, 2], b"v"),
    "get in words": lambda s: s.get(b"k", "an hour ago"),
    "get in seconds": lambda s: s.get(b"k", 5.0),
    "put value text": lambda s: s.put(b"k", "v"),
    "put value none": lambda s: s.put(b"k", None),
    "put durability": lambda s: s.put(b"k", b"v", durability="maybe"),
    "delete key": lambda s: s.delete(7),
    "delete_range start": lambda s: s.delete_range("a", b"z"),
    "delete_range end": lambda s: s.delete_range(b"a", "z"),
    "delete_range open": lambda s: s.delete_range(b"a", None),
    "get key": lambda s: s.get("k"),
    "get as_of float": lambda s: s.get(b"k", 1.5),
    "get as_of bool": lambda s: s.get(b"k", True),
    "get as_of text": lambda s: s.get(b"k", "yesterday"),
    "get as_of without a zone": lambda s: s.get(b"k", datetime(2020, 1, 1)),  # noqa: DTZ001
    "get_many of bytes": lambda s: s.get_many(b"keys"),
    "get_many of text": lambda s: s.get_many(["k"]),
    "get_many at too few times": lambda s: s.get_many([b"k", b"l"], [1]),
    "get_many at a float": lambda s: s.get_many([b"k"], [1.5]),
    "get_many at a bool": lambda s: s.get_many([b"k"], [True]),
    "get_many at text": lambda s: s.get_many([b"k"], ["yesterday"]),
    "get_many below zero": lambda s: s.get_many([b"k"], [-1]),
    "get_many past the end": lambda s: s.get_many([b"k"], [TIMESTAMP_MAX + 1]),
    "get_many at times without a zone": lambda s: s.get_many([b"k"], np.array([1], "M8[ns]")),
    "get_many at a set": lambda s: s.get_many([b"k"], {}),
    "floor key": lambda s: s.floor("k"),
    "floor prefix": lambda s: s.floor(b"k", prefix="k"),
    "floor as_of": lambda s: s.floor(b"k", "yesterday"),
    "join of nothing": lambda s: s.join(None),
    "join of a list": lambda s: s.join([b"k"]),
    "floor_many of bytes": lambda s: s.floor_many(b"keys"),
    "floor_many of nothing": lambda s: s.floor_many(None),
    "floor_many at too many times": lambda s: s.floor_many([b"k"], [1, 2]),
    "scan start": lambda s: s.scan("a"),
    "scan prefix": lambda s: s.scan(prefix="a"),
    "scan prefix and start": lambda s: s.scan(b"a", prefix=b"a"),
    "scan limit negative": lambda s: s.scan(limit=-1),
    "scan limit too large": lambda s: s.scan(limit=1 << 63),
    "scan limit text": lambda s: s.scan(limit="1"),
    "scan limit float": lambda s: s.scan(limit=1.0),
    "scan reverse text": lambda s: s.scan(reverse="no"),
    "scan reverse none": lambda s: s.scan(reverse=None, limit=1),
    "keys reverse": lambda s: s.keys(reverse=1),
    "scan_batches reverse": lambda s: s.scan_batches(reverse="no"),
    "scan_batches rows too many": lambda s: s.scan_batches(batch_rows=1 << 64),
    "transact of nothing": lambda s: s.transact(None),
    "transaction scan reverse": lambda s: s.transact(lambda t: t.scan(reverse="no")),
    "wait_beyond none": lambda s: s.wait_beyond(None, timeout=0),
    "wait_beyond text": lambda s: s.wait_beyond("now", timeout=0),
    "hold address": lambda s: s.hold("h", address=None),
    "table without a name": lambda s: s.snapshot().table([]),
    "join key of no text": lambda s: s.join(pa.table({"id": ["k"], "ts": [1]}), key="\ud800"),
    "scan_batches limit": lambda s: s.scan_batches(limit=-1),
    "scan_batches rows": lambda s: s.scan_batches(batch_rows=0),
    "scan_batches rows text": lambda s: s.scan_batches(batch_rows="many"),
    "scan_batches no workers": lambda s: s.scan_batches(workers=0),
    "scan_batches too many workers": lambda s: s.scan_batches(workers=65),
    "scan_batches workers text": lambda s: s.scan_batches(workers="2"),
    "history key": lambda s: s.history("k"),
    "changes since none": lambda s: s.changes(None),
    "changes revisions": lambda s: s.changes(0, revisions="some"),
    "changes order": lambda s: s.changes(0, order="size"),
    "changes upside down": lambda s: s.changes(NOW, NOW - 1),
    "changes prefix": lambda s: s.changes(0, prefix="k"),
    "snapshot": lambda s: s.snapshot("never"),
    "hold name": lambda s: s.hold(7),
    "hold empty name": lambda s: s.hold(""),
    "hold name with a newline": lambda s: s.hold("a\nb"),
    "hold at": lambda s: s.hold("h", at="never"),
    "hold max_age": lambda s: s.hold("h", max_age=60),
    "revert_import unknown": lambda s: s.revert_import(7),
    "revert_import text": lambda s: s.revert_import("7"),
    "imports.abort text": lambda s: s.imports.abort("7"),
    "checkpoint where something is": lambda s: s.checkpoint(s.path),
    "batch put": batch_with("put", b"a", None),
    "batch put text": batch_with("put", "a", b""),
    "batch delete": batch_with("delete", None),
    "batch empty range": batch_with("delete_range", b"b", b"a"),
    "empty span": lambda s: s.delete_range(b"b", b"b"),
    "inverted span": lambda s: s.delete_range(b"b", b"a"),
    "inverted scan": lambda s: s.scan(b"b", b"a"),
    "inverted changes": lambda s: s.changes(0, start=b"b", end=b"a"),
    "clear_range inverted": lambda s: s.clear_range(b"b", b"a"),
    "clear_range text": lambda s: s.clear_range("a", "b"),
    "revert_range inverted": lambda s: s.revert_range(b"b", b"a", to=NOW),
    "revert_range text": lambda s: s.revert_range(b"a", b"b", to="then"),
    "gc of nothing": lambda s: s.gc(),
    "gc of both": lambda s: s.gc(before=NOW, keep=timedelta(1)),
    "gc keep text": lambda s: s.gc(keep="a while"),
    "gc keep negative": lambda s: s.gc(keep=timedelta(-1)),
    "gc before text": lambda s: s.gc(before="then"),
    "put_if value": lambda s: s.put_if(b"k", "v", expected=b"v"),
    "put_if expected": lambda s: s.put_if(b"k", b"w", expected="v"),
    "hold max_age negative": lambda s: s.hold("h", max_age=timedelta(-1)),
    "hold move text": lambda s: s.hold("h").move("yesterday"),
    "hold move float": lambda s: s.hold("h").move(1.5),
    "hold move bool": lambda s: s.hold("h").move(True),
    "get_many of nothing": lambda s: s.get_many(None),
    "get_many of some text": lambda s: s.get_many(key for key in [b"k", "k"]),
    "events span": lambda s: s.events(0, span=(b"a", b"z")),
    "changes_batches span": lambda s: s.changes_batches(0, span=b"a"),
    "feeds.follow span": lambda s: s.feeds.follow(0, span=(b"a", b"z")),
    "upkeep.compact span": lambda s: s.upkeep.compact((b"a", b"z")),
    "layout.splits text": lambda s: s.layout.splits("2"),
    "layout.splits bool": lambda s: s.layout.splits(True),
    "layout.splits too many": lambda s: s.layout.splits(1 << 70),
    "force_quiescence after": lambda s: s.force_quiescence(after=5),
    "force_quiescence timeout": lambda s: s.force_quiescence(timeout="long"),
    "feed span": lambda s: s.feed("f", start=0, span=(b"a", b"z")),
    "feed max_age": lambda s: s.feed("f", start=0, max_age=60),
    "feed batch_rows": lambda s: s.feed("f", start=0, batch_rows=1.5),
    "feed batch_bytes": lambda s: s.feed("f", start=0, batch_bytes=b"1"),
    "feed position": lambda s: s.feed("f", start=kvstore.Position(kvstore.Timestamp(0), -1)),
    "feed ack": lambda s: s.feed("f", start=0).ack(0),
    "feed heartbeat": lambda s: s.feed("f", start=0).batches(heartbeat="often"),
    "feeds.drop": lambda s: s.feeds.drop(7),
    "transaction limit": lambda s: s.transaction().scan(limit="1"),
    "transaction limit bool": lambda s: s.transaction().scan(limit=True),
    "transaction get_many": lambda s: s.transaction().get_many(None),
    "transact attempts": lambda s: s.transact(lambda txn: None, attempts="many"),
    "upkeep.start_gc": lambda s: s.upkeep.start_gc(timedelta(1)),
    "gc policy": lambda s: kvstore.GcPolicy(keep=5),
    "gc policy every": lambda s: kvstore.GcPolicy(keep=timedelta(1), every=timedelta(0)),
    "checkpoint nowhere": lambda s: s.checkpoint(None),
    "ingest nothing": lambda s: bulk.ingest(s, None),
    "import nowhere": lambda s: bulk.Import.create(None),
    "open a number": lambda s: opening.open(5),
    "open bytes": lambda s: opening.open(b"store"),
    "open clock": lambda s: kvstore.open("store", clock=5),
    "open_read_only a number": lambda s: kvstore.open_read_only(5),
    "parse a number": lambda s: kvstore.Timestamp.parse(5),
    "datetime of text": lambda s: kvstore.Timestamp.from_datetime("now"),
    "reshard none": lambda s: s.reshard(0),
    "reshard text": lambda s: s.reshard("two"),
    "feed name": lambda s: s.feed(7),
    "transaction durability": lambda s: s.transaction(durability="maybe"),
    "manual clock": lambda s: kvstore.ManualClock("noon"),
    "manual clock set": lambda s: kvstore.ManualClock(NOW).set(None),
    "manual clock advance": lambda s: kvstore.ManualClock(NOW).advance(timedelta(1)),
    "manual clock of no number": lambda s: kvstore.ManualClock(float("nan")),
    "mapping key of no text": lambda s: s.mapping("text").get("\ud800"),
    "mapping value of no text": lambda s: s.mapping("json").update(a="\ud800"),
    "key too long": lambda s: s.put(b"k" * (KEY_BYTES_MAX + 1), b""),
    "time below zero": lambda s: s.get(b"k", -1),
    "time past the end": lambda s: s.get(b"k", TIMESTAMP_MAX + 1),
    "batch durability": lambda s: s.batch(durability="maybe"),
    "ingest on_conflict": lambda s: bulk.ingest(s, "nowhere", on_conflict="sometimes"),
}


@pytest.mark.parametrize("call", WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_wrong_calls_are_usage_errors_and_change_nothing(
    unmoved: Store, call: Callable[[Store], Any]
) -> None:
    before = whole(unmoved)
    with pytest.raises(UsageError) as refused:
        call(unmoved)
    assert str(refused.value)
    assert whole(unmoved) == before


# -- times ------------------------------------------------------------------------------------

READS: dict[str, Callable[[Store, int], Any]] = {
    "get": lambda s, t: s.get(b"k", t),
    "get_many": lambda s, t: s.get_many([b"k"], t),
    "get_many at times": lambda s, t: s.get_many([b"k", b"k"], [s.upper - 1, t]),
    "floor": lambda s, t: s.floor(b"k", t),
    "floor_many at times": lambda s, t: s.floor_many([b"k", b"k"], [s.upper - 1, t]),
    "join": lambda s, t: s.join(pa.table({"id": ["k"], "ts": [int(t)]})).read_all(),
    "scan": lambda s, t: s.scan(as_of=t),
    "scan_batches": lambda s, t: s.scan_batches(as_of=t),
    "snapshot": lambda s, t: s.snapshot(t),
    "changes upto": lambda s, t: s.changes(0, t, revisions="latest"),
    "changes since": lambda s, t: s.changes(t),
    "events": lambda s, t: s.events(t),
    "changes_batches": lambda s, t: s.changes_batches(t),
    "feed": lambda s, t: s.feed("f", start=t),
    "hold": lambda s, t: s.hold("h", at=t),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_the_future_is_not_yet_written(store: Store, read: Callable[[Store, int], Any]) -> None:
    with pytest.raises(NotYetWrittenError) as refused:
        read(store, NOW + 1000)
    assert refused.value.as_of == NOW + 1000
    assert refused.value.upper == store.upper <= NOW + 1000
    read(store, store.upper - 1)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_below_since_history_is_gone(store: Store, read: Callable[[Store, int], Any]) -> None:
    since = store.put(b"k", b"w")
    parts_of(store).committer.move_since(since)
    with pytest.raises(HistoryGoneError) as refused:
        read(store, since - 1)
    assert (refused.value.as_of, refused.value.since) == (since - 1, since)
    read(store, since)


# -- closed and locked ------------------------------------------------------------------------

CALLS: dict[str, Callable[[Store], Any]] = {
    "put": lambda s: s.put(b"k", b""),
    "delete": lambda s: s.delete(b"k"),
    "delete_range": lambda s: s.delete_range(b"a", b"b"),
    "batch": lambda s: s.batch(),
    "get": lambda s: s.get(b"k"),
    "get_many": lambda s: s.get_many([]),
    "get_many at times": lambda s: s.get_many([], []),
    "floor": lambda s: s.floor(b"k"),
    "join": lambda s: s.join(pa.table({"id": ["k"], "ts": [1]})),
    "floor_many at times": lambda s: s.floor_many([], []),
    "scan": lambda s: s.scan(),
    "scan_batches": lambda s: s.scan_batches(),
    "history": lambda s: s.history(b"k"),
    "changes": lambda s: s.changes(0),
    "snapshot": lambda s: s.snapshot(),
    "hold": lambda s: s.hold("h"),
    "sync": lambda s: s.sync(),
    "with": lambda s: s.__enter__(),
    "checkpoint": lambda s: s.checkpoint("elsewhere"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_closed_store_refuses_every_call(tmp_path: Path, call: Callable[[Store], Any]) -> None:
    store = kvstore.open(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        call(store)


def test_what_was_open_when_the_store_closed_raises_and_never_ends_early(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        with store.batch() as batch:
            for number in range(1000):
                batch.put(b"%06d" % number, b"v")
        scan, changes = store.scan(), store.changes(0, order="time")
        snapshot, later = store.snapshot(), store.batch()
        next(scan)
    with pytest.raises(ClosedError):
        list(scan)
    with pytest.raises(ClosedError):
        list(changes)
    with pytest.raises(ClosedError):
        snapshot.get(b"000001")
    with pytest.raises(ClosedError), later:
        later.put(b"k", b"v")
    snapshot.close()
    with pytest.raises(ClosedError):
        snapshot.get(b"000001")
    with pytest.raises(ClosedError):
        later.put(b"k", b"v")


def test_a_clock_at_the_end_of_time_writes_nothing(tmp_path: Path) -> None:
    clock = kvstore.ManualClock(TIMESTAMP_MAX)
    with kvstore.open(tmp_path / "store", clock=clock) as store:
        with pytest.raises(UsageError):
            store.put(b"k", b"v")
        assert store.get(b"k") is None
        clock.set(NOW)
        assert store.put(b"k", b"v") == NOW
