"""Every call that takes a time, at the edges of the readable times: since - 1, since, since + 1 and
upper - 1, upper, upper + 1. The tests check class and fields of the error, and follow its advice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvstore
from kvstore import ManualClock, Position, Store, Timestamp, backup, bulk
from kvstore.errors import HistoryGoneError, HoldLostError, KVStoreError, NotYetWrittenError

pytestmark = pytest.mark.usefixtures("each_engine")

WALL_NS = 1_000
NUMBERS = itertools.count()
EDGES = ("since - 1", "since", "since + 1", "upper - 1", "upper", "upper + 1")


class Edges(NamedTuple):
    """A store whose frontiers stay in place, because its clock does."""

    store: Store
    collection: backup.Collection
    place: Path


@pytest.fixture
def edges(tmp_path: Path) -> Iterator[Edges]:
    """A store and a collection of it that begin and end at the same times."""
    with kvstore.open(tmp_path / "db", durability="async", clock=ManualClock(WALL_NS)) as store:
        for number in range(20):
            store.put(b"k%d" % (number % 3), b"%d" % number)
        collection = backup.Collection(tmp_path / "collection", clock=ManualClock(WALL_NS))
        since = store.upper - 10
        store.gc(before=since)
        collection.backup(store)
        for record in store.holds.all():
            store.drop_hold(record.name)
        assert store.since == collection.since == since
        assert collection.upper == store.upper
        yield Edges(store, collection, tmp_path)


def times(since: int, upper: int) -> dict[str, int]:
    edges = (*range(since - 1, since + 2), *range(upper - 1, upper + 2))
    return dict(zip(EDGES, edges, strict=True))


def moved(e: Edges, t: int) -> None:
    e.store.hold("mover").move(t)


STORE_CALLS: dict[str, Callable[[Edges, Any], object]] = {
    "get": lambda e, t: e.store.get(b"k0", t),
    "get_many": lambda e, t: e.store.get_many([b"k0", b"k1"], t),
    "scan": lambda e, t: list(e.store.scan(as_of=t)),
    "scan reverse": lambda e, t: list(e.store.scan(as_of=t, reverse=True, limit=1)),
    "scan_batches": lambda e, t: e.store.scan_batches(as_of=t).read_all(),
    "changes since": lambda e, t: list(e.store.changes(t)),
    "changes upto": lambda e, t: list(e.store.changes(0, t, revisions="latest")),
    "events since": lambda e, t: list(e.store.events(t)),
    "changes_batches since": lambda e, t: e.store.changes_batches(t).read_all(),
    "export since": lambda e, t: e.store.replication.export(since=t, upto=e.store.upper - 1),
    "follow": lambda e, t: next(e.store.feeds.follow(t, heartbeat=0.001)),
    "quiescent_points": lambda e, t: list(e.store.feeds.quiescent_points(t)),
    "snapshot": lambda e, t: e.store.snapshot(t).close(),
    "snapshot get": lambda e, t: e.store.snapshot(t).get(b"k0"),
    "hold": lambda e, t: e.store.hold(f"hold {next(NUMBERS)}", at=t),
    "hold move": moved,
    "feed start": lambda e, t: e.store.feed(f"feed{next(NUMBERS)}", start=t),
    "feed position": lambda e, t: list(
        e.store.feed(f"feed{next(NUMBERS)}", start=Position(Timestamp(t)))
    ),
    "revert_range": lambda e, t: e.store.revert_range(b"a", b"b", to=t),
    "put_if": lambda e, t: e.store.put_if(b"new%d" % next(NUMBERS), b"", unchanged_since=t),
}
COLLECTION_CALLS: dict[str, Callable[[Edges, Any], object]] = {
    "restore": lambda e, t: e.collection.restore(e.place / f"new-{next(NUMBERS)}", t),
    "restore_into": lambda e, t: e.collection.restore_into(e.store, t),
    "scan_batches": lambda e, t: e.collection.scan_batches(t).read_all(),
}


def check(call: Callable[[Any], object], edge: str, since: int, upper: int) -> None:
    at = times(since, upper)[edge]
    if since <= at < upper:
        call(at)
        return
    with pytest.raises(KVStoreError) as caught:
        call(at)
    error = caught.value
    if at < since:
        assert isinstance(error, HistoryGoneError)
        assert (error.as_of, error.since, error.span) == (at, since, None)
        assert f"at {Timestamp(at)}" in error.what
        assert f"from {Timestamp(since)} on" in error.what
        call(error.since)  # as the advice says: read at `since` or later
    else:
        assert isinstance(error, NotYetWrittenError)
        assert (error.as_of, error.upper) == (at, upper)
        assert f"complete below {Timestamp(upper)}" in error.what
        call(error.upper - 1)  # as the advice says: read below `upper`


@pytest.mark.parametrize("name", STORE_CALLS)
def test_a_call_at_the_edges_of_what_is_readable(edges: Edges, name: str) -> None:
    call, store = STORE_CALLS[name], edges.store
    for edge in EDGES:
        check(lambda at: call(edges, at), edge, store.since, store.upper)


@pytest.mark.parametrize("name", COLLECTION_CALLS)
def test_a_restore_at_the_edges_of_what_is_restorable(edges: Edges, name: str) -> None:
    call, collection = COLLECTION_CALLS[name], edges.collection
    for edge in EDGES:
        check(lambda at: call(edges, at), edge, collection.since, collection.upper)


@pytest.mark.parametrize("edge", EDGES)
def test_gc_goes_as_far_as_there_is_complete_time_and_never_back(edges: Edges, edge: str) -> None:
    store = edges.store
    since, upper = store.since, store.upper
    at = times(since, upper)[edge]
    report = store.gc(before=at)
    assert report.since == store.since == min(max(at, since), upper - 1)
    assert report.previous == since
    assert store.get(b"k0", as_of=store.since) is not None


@pytest.mark.parametrize("edge", EDGES)
def test_expiry_goes_as_far_as_there_are_backups_and_never_back(edges: Edges, edge: str) -> None:
    collection = edges.collection
    since, upper = collection.since, collection.upper
    at = times(since, upper)[edge]
    assert collection.expire(before=at) == min(max(at, since), upper - 1)
    collection.scan_batches(collection.since).read_all()


@pytest.mark.parametrize("behind", [-1, 0, 1])
def test_a_hold_is_lost_once_it_is_further_behind_than_its_budget(
    edges: Edges, behind: int
) -> None:
    store = edges.store
    hold = store.hold("h", at=store.since, max_age=timedelta(microseconds=1))
    newest = hold.timestamp + 1_000 + behind
    while store.upper - 1 < newest:
        store.put(b"k", b"v")
    assert store.upper - 1 == newest
    report = store.gc(before=newest)
    if behind > 0:
        assert [record.name for record in report.lost_holds] == ["h"]
        with pytest.raises(HoldLostError) as lost:
            hold.move(newest)
        assert lost.value.held == store.holds.all()[0].timestamp
        assert store.since == newest
    else:
        assert report.lost_holds == ()
        assert [claim.name for claim in report.held_by] == ["h"]
        assert store.since == hold.timestamp


@pytest.mark.parametrize("edge", EDGES[:4])
def test_reads_of_a_cleared_span_name_the_time_of_the_clear(edges: Edges, edge: str) -> None:
    """The clear's time takes the place of `since` for the span it destroyed."""
    store = edges.store
    cleared = store.clear_range(b"k0", b"k1")
    since, upper = int(cleared), store.upper
    store.put(b"k2", b"later")
    at = times(since, upper)[edge]
    if at >= since:
        assert store.get(b"k0", at) is None
        return
    assert store.get(b"k1", at) is not None
    calls = (lambda t: store.get(b"k0", t), lambda t: list(store.changes(t)))
    for call in calls:
        with pytest.raises(HistoryGoneError) as gone:
            call(at)
        assert (gone.value.as_of, gone.value.since) == (at, since)
        assert gone.value.span == (b"k0", b"k1")
        call(gone.value.since)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_backup_needs_the_history_from_its_collection_s_upper_on(
    edges: Edges, offset: int
) -> None:
    store, collection = edges.store, edges.collection
    needed = collection.upper - 1
    for _ in range(3):
        store.put(b"k0", b"later")
    assert store.gc(before=needed + offset).since == needed + offset
    if offset <= 0:
        collection.backup(store)
        return
    with pytest.raises(HistoryGoneError) as broken:
        collection.backup(store)
    assert (broken.value.as_of, broken.value.since) == (needed, needed + 1)
    collection.backup(store, full=True)  # as the advice says
    assert len(collection.chains()) == 2


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_restored_store_begins_where_its_collection_does(edges: Edges, offset: int) -> None:
    at = edges.collection.since + 1
    edges.collection.restore(edges.place / "restored", at, history=False)
    with kvstore.open(edges.place / "restored", clock=ManualClock(WALL_NS)) as store:
        assert (store.since, store.upper) == (at, at + 1)
        if offset < 0:
            with pytest.raises(HistoryGoneError) as gone:
                store.get(b"k0", at + offset)
            assert (gone.value.as_of, gone.value.since) == (at - 1, at)
        elif offset > 0:
            with pytest.raises(NotYetWrittenError) as early:
                store.get(b"k0", at + offset)
            assert (early.value.as_of, early.value.upper) == (at + 1, at + 1)
        else:
            assert store.get(b"k0", at) is not None


@pytest.mark.parametrize("moved_by", [-1, 0, 1])
def test_an_import_can_be_reverted_above_since(edges: Edges, moved_by: int) -> None:
    store = edges.store
    made = bulk.Import.create(edges.place / "staged")
    with made.writer() as writer:
        writer.put(b"k0", b"row")
    made.seal()
    below = store.get(b"k0")
    added = bulk.ingest(store, made.staging)
    store.put(b"later", b"v")
    store.gc(before=added + moved_by)
    if moved_by < 0:
        store.revert_import(made.import_id)
        assert store.get(b"k0") == below
        return
    with pytest.raises(HistoryGoneError) as gone:
        store.revert_import(made.import_id)
    assert (gone.value.as_of, gone.value.since) == (added - 1, store.since)
