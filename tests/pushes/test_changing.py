"""A push of changes clears ranges and writes rows at one stamp, and each micro-batch is pushed
once."""

from __future__ import annotations

import threading

import pytest

import kvstore
from kvstore import bulk
from kvstore.base.span import RESERVED
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.push_log import SPANS_MAX, MicroBatch
from kvstore.errors import CorruptionError, UsageError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.storage.patience import Patience
from tests.harness.seeds import seed_of
from tests.harness.storage_faults import FaultRates, FaultyBlob, Weather
from tests.pushes.made import CountingBlob, drain


def change(
    pushes: Pushes, value: bytes, *cleared: tuple[bytes, bytes], feed: MicroBatch | None = None
) -> bulk.Push:
    """Push `value` under the key `m`, and clear ranges."""
    with pushes.begin_changes(cleared=cleared, feed=feed) as building:
        with building.writer() as writer:
            writer.put(b"m", value)
        return building.seal()


def test_ranges_are_cleared_at_the_stamp_of_the_rows(pushes: Pushes) -> None:
    rows = {bytes([letter]): b"old" for letter in b"abcmxyz"}
    with kvstore.open(None, engine="memory") as store:
        store.put_many(rows)
        puller = Puller(store, pushes, name="s")
        made = change(pushes, b"new", (b"x", b"z"), (b"b", b"d"), (b"c", b"n"), (b"q", b"q"))
        assert made.how.spans == (kvstore.Span(b"b", b"n"), kvstore.Span(b"x", b"z"))
        drain(puller)
        [record] = store.imports.all()
        assert record.added is not None
        assert dict(store.scan()) == {b"a": b"old", b"m": b"new", b"z": b"old"}
        assert dict(store.scan(as_of=record.added - 1)) == rows
        with pushes.begin_changes(cleared=[(b"a", b"n")]) as building:  # no rows at all
            building.seal()
        drain(puller)
        assert dict(store.scan()) == {b"z": b"old"}
        for number in (2, 1):
            pushes.revert(number)
        drain(puller)
        assert dict(store.scan()) == rows


def test_a_micro_batch_is_pushed_once_whoever_comes_first(pushes: Pushes) -> None:
    first = change(pushes, b"1", feed=MicroBatch(b"orders", 7))
    with pushes.begin_changes(feed=MicroBatch(b"orders", 7)) as late:
        with late.writer() as writer:
            writer.put(b"m", b"twin")
        assert late.seal() == first
    assert change(pushes, b"older", feed=MicroBatch(b"orders", 6)) == first
    assert change(pushes, b"2", feed=MicroBatch(b"other", 7)).number == 2
    assert change(pushes, b"3", feed=MicroBatch(b"orders", 8)).number == 3
    assert pushes.of_feed(MicroBatch(b"orders", 9)) is None
    assert [push.feed for push in pushes.list()] == [
        MicroBatch(b"orders", 7),
        MicroBatch(b"other", 7),
        MicroBatch(b"orders", 8),
    ]
    assert pushes.bucket(late.job, 0).begun_ns() is None


def test_ranges_that_no_push_can_clear_are_refused(pushes: Pushes) -> None:
    many = [(b"%06d" % number, b"%06d0" % number) for number in range(SPANS_MAX + 1)]
    with pytest.raises(UsageError, match="clear 1,001 ranges of keys, and a push at most 1,000"):
        change(pushes, b"v", *many)
    with pytest.raises(UsageError, match="a push cannot replace keys"):
        change(pushes, b"v", (b"a", RESERVED + b"z"))
    assert pushes.list() == []


def test_a_job_reads_the_end_of_a_long_log_alone() -> None:
    blob = CountingBlob()
    pushes = Pushes.over(blob, "counted")
    for number in range(60):
        change(pushes, b"v", feed=MicroBatch(b"orders", number))
    blob.reads = 0
    assert change(pushes, b"w", feed=MicroBatch(b"orders", 60)).number == 61
    pushes.revert(60)
    assert pushes.status(60).push.state == "reverted"
    assert pushes.status(61).push.state == "sealed"
    assert pushes.of_feed(MicroBatch(b"orders", 60)) is not None
    assert blob.reads < 5 * 2 * 8
    for number in (0, 62):
        with pytest.raises(UsageError, match="there is no push"):
            pushes.revert(number)


def test_jobs_on_a_bucket_that_fails_and_loses_answers_push_each_batch_once() -> None:
    seed = seed_of("KVSTORE_CHANGING_SEED", None)
    patience = Patience(600, pause=lambda _: None)
    blob = FaultyBlob(MemoryBlob(patience=patience), Weather(seed, FaultRates()))

    def stream(position: bytes) -> None:
        pushes = Pushes.over(blob, "faulty")
        for number in range(12):
            for _ in range(2):  # a repeated micro-batch
                change(pushes, b"v", feed=MicroBatch(position, number))

    streams = [threading.Thread(target=stream, args=(name,)) for name in (b"a", b"b")]
    for each in streams:
        each.start()
    for each in streams:
        each.join()
    made = Pushes.over(blob, "faulty").list()
    assert [push.number for push in made] == [*range(1, 25)]
    feeds = [push.feed for push in made]
    for name in (b"a", b"b"):
        wanted = [MicroBatch(name, number) for number in range(12)]
        assert [feed for feed in feeds if feed and feed.position == name] == wanted


def test_a_log_with_a_gap_is_damaged() -> None:
    blob = MemoryBlob()
    pushes = Pushes.over(blob, "gapped")
    for _ in range(6):
        change(pushes, b"v")
    blob.delete("log/00000000000000000004.json")
    with pytest.raises(CorruptionError, match="it is gone, and later events are there"):
        pushes.status(2)
