"""Feeds: positions, batches, workers that share a feed, and calls that are refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Position, Store, Timestamp
from kvstore.changes.batches import changes_schema
from kvstore.errors import (
    ClosedError,
    FencedError,
    HistoryGoneError,
    HoldLostError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.feeds.feed import Share, hold_name
from tests.feed.follower import keys

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_a_feed_goes_on_where_it_last_acked(store: Store, tmp_path: Path) -> None:
    store.put(b"a", b"1")
    feed = store.feed("f", start=0)
    for batch in feed:
        feed.ack(batch)
    store.put(b"b", b"1")
    assert keys(store.feed("f")) == [b"b"], "what was not acked comes again"
    assert keys(store.feed("f")) == [b"b"]
    store.close()
    with kvstore.open(tmp_path / "s", durability="async") as store:
        assert keys(store.feed("f")) == [b"b"]


def test_now_begins_after_all_that_is_there(store: Store) -> None:
    store.put(b"a", b"1")
    feed = store.feed("f", start="now")
    store.put(b"b", b"1")
    assert keys(feed) == [b"b"]


def test_start_takes_times_as_every_other_call_does(store: Store) -> None:
    stamp = store.put(b"a", b"1")
    store.put(b"b", b"1")
    assert keys(store.feed("f", start=stamp)) == [b"b"]
    assert keys(store.feed("f", start=str(Timestamp(stamp - 1)))) == [b"a", b"b"]


def test_the_last_batch_of_a_window_is_resolved_up_to_now(store: Store) -> None:
    stamp = store.put(b"a", b"1")
    feed = store.feed("f", start=0)
    *_, last = feed
    assert stamp <= last.resolved < store.durable
    assert list(feed) == [] or keys(list(feed)) == []


def test_an_abandoned_pass_goes_on_after_the_last_batch_delivered(store: Store) -> None:
    for number in range(5):
        store.put(b"%d" % number, b"1")
    feed = store.feed("f", start=0, batch_rows=2)
    first = next(iter(feed.batches()))
    assert keys([first]) == [b"0", b"1"]
    assert keys(list(feed)) == [b"2", b"3", b"4"]


def test_acking_ahead_of_delivery_is_refused_and_behind_is_nothing(store: Store) -> None:
    store.put(b"a", b"1")
    feed = store.feed("f", start=0)
    with pytest.raises(UsageError):
        feed.ack(Position(Timestamp(store.upper + 5)))
    first, *_ = list(feed)
    feed.ack(first)
    held = feed.acked
    feed.ack(Position(Timestamp(0)))
    assert feed.acked == held


def test_a_feed_keeps_history_for_its_consumer(store: Store) -> None:
    first = store.put(b"a", b"1")
    feed = store.feed("f", start=first)
    store.put(b"a", b"2")
    last = store.put(b"a", b"3")
    store.gc(before=last)
    assert store.since <= first
    assert [event.value for batch in feed for event in batch.events] == [b"2", b"3"]
    feed.ack(feed.position)
    store.gc(before=last)
    assert store.since == last


@pytest.mark.usual_limits
def test_batches_are_bounded_in_rows_and_bytes(store: Store) -> None:
    for number in range(10):
        store.put(b"%d" % number, b"x" * 100)
    rows = list(store.feed("rows", start=0, batch_rows=3))
    assert max(len(batch.events) for batch in rows) == 3
    size = list(store.feed("bytes", start=0, batch_bytes=150))
    assert max(len(batch.events) for batch in size) == 2
    assert keys(rows) == keys(size)


def test_a_batch_has_no_bound_above_which_it_fails(store: Store) -> None:
    store.put(b"k", b"v")
    (batch,) = store.feed("f", start=0, batch_rows=10**30, batch_bytes=10**30)
    assert [event.key for event in batch.events] == [b"k"]


@pytest.mark.usual_limits
def test_a_batch_of_a_feed_is_a_record_batch_too(store: Store) -> None:
    stamp = store.put(b"a", b"1")
    store.delete_range(b"a", b"b")
    (batch,) = store.feed("f", start=0, images="pre")
    found = batch.to_arrow()
    assert found.schema == changes_schema()
    assert found.column("op").to_pylist() == [1, 5]
    assert found.column("end_key").to_pylist() == [None, b"b"]
    assert found.column("timestamp").to_pylist()[0] == stamp


def test_the_newer_of_two_consumers_fences_the_older(store: Store) -> None:
    older = store.feed("f", start=0)
    store.put(b"a", b"1")
    passing = older.batches()
    newer = store.feed("f")
    with pytest.raises(FencedError):
        next(passing)
    with pytest.raises(FencedError):
        older.ack(Position(Timestamp(0)))
    assert keys(newer) == [b"a"]


def test_a_consumer_over_its_budget_gets_a_definite_error(store: Store, clock: ManualClock) -> None:
    feed = store.feed("slow", start=0, max_age=timedelta(seconds=10))
    store.put(b"a", b"1")
    clock.advance(60 * 10**9)
    store.put(b"a", b"2")
    store.gc(before=store.upper - 1)
    with pytest.raises(HoldLostError):
        list(feed)
    with pytest.raises(HoldLostError):
        store.feed("slow")
    assert keys(store.feed("slow", start="now")) == []


def test_a_budget_outlives_a_restart_of_the_consumer(store: Store) -> None:
    store.feed("f", start=0, max_age=timedelta(seconds=10))
    store.feed("f")
    (record,) = store.holds.all()
    assert record.max_age_ns == 10 * 10**9


def test_a_closed_feed_stops_and_keeps_its_position(store: Store) -> None:
    with store.feed("f", start=0) as feed:
        store.put(b"a", b"1")
    with pytest.raises(ClosedError):
        list(feed)
    assert keys(store.feed("f")) == [b"a"]


def test_workers_share_a_feed_and_each_has_its_position(store: Store) -> None:
    store.reshard(4)
    for number in range(40):
        store.put(b"%d" % number, b"1")
    first = store.feed("g", start=0, streams=(0, 2))
    second = store.feed("g", streams=(1, 2))  # the first worker began it for all
    mine = keys(first)
    first.ack(first.position)
    assert sorted(mine + keys(second)) == sorted(b"%d" % number for number in range(40))
    assert keys(store.feed("g", streams=(0, 2))) == []
    assert len(keys(store.feed("g", streams=(1, 2)))) == 40 - len(mine)
    assert len(store.holds.all()) == 2


class Counted(str):
    """The name of a hold, which counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_worker_among_many_compares_each_hold_of_the_feed_a_few_times(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 64
    store.reshard(many)
    store.feed("g", start=0, streams=(0, many))

    def counted(name: str, share: Share) -> Counted:
        return Counted(hold_name(name, share))

    monkeypatch.setattr("kvstore.feeds.feed.hold_name", counted)
    monkeypatch.setattr(Counted, "compared", 0)
    assert keys(store.feed("g", streams=(1, many))) == []
    assert Counted.compared <= 4 * many
    assert len(store.holds.all()) == many


def test_history_waits_for_workers_that_have_not_come_yet(store: Store) -> None:
    store.reshard(2)
    first = store.feed("g", start=0, streams=(0, 2))
    store.put(b"a", b"1")
    last = store.put(b"a", b"2")
    list(first)
    first.ack(first.position)
    store.gc(before=last)
    assert store.since == 0
    assert set(keys(store.feed("g", streams=(1, 2))) + keys(store.feed("x", start=0))) == {b"a"}


@pytest.mark.usual_limits
def test_another_number_of_workers_takes_over_from_the_least_position(store: Store) -> None:
    store.reshard(3)
    stamps = [store.put(b"%d" % number, b"1") for number in range(30)]
    former = [store.feed("g", start=0, streams=(worker, 2)) for worker in range(2)]
    list(former[0])
    former[0].ack(former[0].position)
    assert keys([next(iter(former[1].batches()))])
    former[1].ack(Position(stamps[9]))
    fresh = [store.feed("g", streams=(worker, 3)) for worker in range(3)]
    assert sorted(key for feed in fresh for key in keys(feed)) == sorted(
        b"%d" % number for number in range(10, 30)
    )
    for feed in former:
        with pytest.raises(FencedError):
            feed.ack(feed.position)
    assert len(store.holds.all()) == 3


def test_bad_calls_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="no feed 'unknown'"):
        store.feed("unknown")
    with pytest.raises(UsageError, match="no feed 'unknown'"):
        store.feeds.drop("unknown")
    for name in ("", "a/b", "a\n", 5):
        with pytest.raises(UsageError):
            store.feed(name, start=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 workers for 1 stream"):
        store.feed("f", start=0, streams=(0, 2))
    for streams in ((2, 2), (-1, 1), (0, 0), 3, (1,), ("0", 1), (True, 2), "01"):
        with pytest.raises(UsageError):
            store.feed("f", start=0, streams=streams)  # type: ignore[arg-type]
    for wrong in ({"images": "all"}, {"expand": "x"}, {"batch_rows": 0}, {"batch_bytes": 0}):
        with pytest.raises(UsageError):
            store.feed("f", start=0, **wrong)  # type: ignore[arg-type]
    with pytest.raises(NotYetWrittenError):
        store.feed("f", start=store.upper + 10**15)
    feed = store.feed("f", start=0)
    with pytest.raises(UsageError):
        feed.batches(heartbeat=0)
    assert [record.name for record in store.holds.all()] == ["feed/f"], "nothing was left behind"


def test_a_position_below_since_is_refused(store: Store) -> None:
    first = store.put(b"a", b"1")
    last = store.put(b"a", b"2")
    store.gc(before=last)
    for start in (first, Position(first, 3)):
        with pytest.raises(HistoryGoneError):
            store.feed("f", start=start)
    assert store.holds.all() == []


def test_a_dropped_feed_lets_history_go_and_fences(store: Store) -> None:
    feed = store.feed("f", start=0)
    store.feeds.drop("f")
    assert store.holds.all() == []
    with pytest.raises(FencedError):
        list(feed)
    with pytest.raises(UsageError):
        store.feed("f")


def test_a_start_that_is_no_time_is_answered_with_the_words_that_a_start_may_be(
    store: Store,
) -> None:
    with pytest.raises(UsageError, match=r"start='begin' is no time; pass \"now\", \"oldest\""):
        store.feed("f", start="begin")
