"""Feeds that begin with the state: each row and each change comes once, whichever consumer stops at
any time."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import kvstore
from kvstore import Position
from kvstore.errors import FencedError, HoldLostError, UsageError
from kvstore.feeds import debezium_lines
from tests.harness.bounds import bounds
from tests.harness.seeds import seeded

pytestmark = pytest.mark.usefixtures("each_engine")


class Sink:
    """A consumer's copy: the newest value of each key, whichever worker brings it."""

    def __init__(self) -> None:
        self.newest: dict[bytes, tuple[int, bytes | None]] = {}
        self.rows: set[bytes] = set()
        self.changes: set[tuple[int, int, bytes]] = set()

    def apply(self, batch: kvstore.FeedBatch) -> None:
        for event in batch.events:
            if batch.is_state:
                assert event.key not in self.rows, "a row of the state came twice"
                self.rows.add(event.key)
            else:
                place = (event.timestamp, event.sequence, event.key)
                assert place not in self.changes, "a change came twice"
                self.changes.add(place)
            known = self.newest.get(event.key, (-1, None))
            if event.timestamp >= known[0]:
                self.newest[event.key] = (event.timestamp, event.value)

    @property
    def state(self) -> dict[bytes, bytes]:
        return {key: value for key, (_, value) in self.newest.items() if value is not None}


def test_the_state_comes_first_in_pieces_and_then_each_change(store: kvstore.Store) -> None:
    for number in range(7):
        store.put(b"a%d" % number, b"%d" % number)
    store.put(b"b", b"other")
    store.delete(b"a3")
    feed = store.feed("f", start="state", prefix=b"a", batch_rows=3)
    store.put(b"a0", b"later")
    store.put(b"b", b"later")
    at = feed.position.timestamp
    batches = list(feed)
    state = [batch for batch in batches if batch.is_state]
    assert [[event.key for event in batch.events] for batch in state] == [
        [b"a0", b"a1", b"a2"],
        [b"a4", b"a5", b"a6"],
        [],
    ]
    assert {event.timestamp for batch in state for event in batch.events} == {at}
    assert [batch.position for batch in state] == [
        Position(at, 0, b"a2\0"),
        Position(at, 0, b"a6\0"),
        Position(at),
    ]
    assert [e.value for b in batches if not b.is_state for e in b.events] == [b"later"]
    assert state[0].to_arrow().column("key").to_pylist() == [b"a0", b"a1", b"a2"]


def test_an_acked_piece_does_not_come_again_and_an_older_ack_changes_nothing(
    store: kvstore.Store,
) -> None:
    for number in range(6):
        store.put(b"%d" % number, b"v")
    feed = store.feed("f", start="state", batch_rows=2)
    batches = iter(feed)
    first, second = next(batches), next(batches)
    with pytest.raises(UsageError, match="not delivered"):
        feed.ack(Position(second.position.timestamp))
    feed.ack(second)
    feed.ack(first)
    store.put(b"0", b"changed")
    store.delete(b"5")
    again = store.feed("f", batch_rows=2)
    with pytest.raises(FencedError):
        feed.ack(second)
    found = list(again)
    assert [(e.key, b.is_state) for b in found for e in b.events] == [
        (b"4", True),
        (b"5", True),
        (b"0", False),
        (b"5", False),
    ]
    again.ack(found[-1])
    assert [batch.events for batch in store.feed("f")] in ([], [[]])


def test_a_stored_position_resumes_inside_the_state(store: kvstore.Store) -> None:
    for number in range(5):
        store.put(b"%d" % number, b"v")
    feed = store.feed("f", start="state", batch_rows=2)
    first = next(iter(feed))
    store.put(b"3", b"changed")
    rest = store.feed("f", start=first.position, batch_rows=2)
    assert [(e.key, e.value) for b in rest for e in b.events] == [
        (b"2", b"v"),
        (b"3", b"v"),
        (b"4", b"v"),
        (b"3", b"changed"),
    ]
    with pytest.raises(UsageError, match="state_from must be bytes"):
        store.feed("g", start=Position(first.position.timestamp, 0, "2"))  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 3])
def test_state_and_changes_make_the_store_under_writes_stops_and_new_generations(
    store: kvstore.Store, workers: int
) -> None:
    draw = seeded("KVSTORE_STATE")
    store.reshard(workers)
    for _ in range(200):
        store.put(b"%d" % draw.randrange(300), b"%d" % draw.randrange(99))
    sink = Sink()
    for number in range(workers):
        start = "state" if number == 0 else None  # the others share its time
        store.feed("f", start=start, streams=(number, workers))
    times = {store.holds.all()[number].timestamp for number in range(workers)}
    assert len(times) == 1
    for step in range(60):
        for _ in range(5):
            key = b"%d" % draw.randrange(300)
            if draw.random() < 0.3:
                store.delete(key)
            else:
                store.put(key, b"%d" % step)
        if step == 30:
            store.delete_range(b"1", b"15")
        if step == 40:
            store.reshard(workers + 1)
        number = draw.randrange(workers)
        feed = store.feed("f", streams=(number, workers), expand="all", batch_rows=7)
        for batch in feed:
            sink.apply(batch)
            feed.ack(batch)
            if draw.random() < 0.3 and (batch.is_state or not batch.position.taken):
                break
        if step % 20 == 0:
            store.gc(keep=timedelta(0))
    for number in range(workers):
        for batch in store.feed("f", streams=(number, workers), expand="all"):
            sink.apply(batch)
    assert sink.state == dict(store.scan())


def test_another_number_of_workers_takes_the_state_over(store: kvstore.Store) -> None:
    store.reshard(2)
    for number in range(20):
        store.put(b"%02d" % number, b"v")
    feed = store.feed("f", start="state", batch_rows=4)
    feed.ack(next(iter(feed)))
    keys = [
        event.key
        for worker in range(2)
        for batch in store.feed("f", streams=(worker, 2))
        for event in batch.events
    ]
    assert sorted(keys) == [b"%02d" % number for number in range(4, 20)]


def test_a_feed_in_its_state_keeps_history_within_its_budget(store: kvstore.Store) -> None:
    store.put(b"k", b"old")
    feed = store.feed("f", start="state")
    store.put(b"k", b"new")
    store.gc(keep=timedelta(0))
    assert [e.value for b in feed for e in b.events] == [b"old", b"new"]
    feed = store.feed("f", start="state", max_age=timedelta(0))
    store.put(b"k", b"newer")
    store.gc(keep=timedelta(0))
    with pytest.raises(HoldLostError):
        next(iter(feed))


def test_the_oldest_start_is_all_that_is_kept(store: kvstore.Store) -> None:
    store.put(b"a", b"1")
    kept = store.put(b"a", b"2")
    store.put(b"b", b"3")
    assert [change.value for change in store.changes("oldest")] == [b"1", b"2", b"3"]
    store.gc(before=kept)
    assert [change.value for change in store.changes("oldest")] == [b"3"]
    assert [event.value for event in store.events("oldest")] == [b"3"]
    assert [e.value for b in store.feed("f", start="oldest") for e in b.events] == [b"3"]


@pytest.mark.parametrize("images", ["none", "delta", "pre", "post", "pre+post"])
def test_images_of_the_state(store: kvstore.Store, images: str) -> None:
    store.put(b"k", b"v")
    (event,) = next(iter(store.feed("f", start="state", images=images))).events  # type: ignore[arg-type]
    assert event.value == (None if images == "none" else b"v")
    assert event.pre is None
    assert event.post == (b"v" if images.endswith("post") else None)


def test_tiny_limits_cut_the_state_anywhere(store: kvstore.Store) -> None:
    rows = {b"%03d" % number: bytes(number) for number in range(60)}
    store.put_many(rows)
    with bounds(SCAN_CHUNK=3, FEED_BATCH_ROWS=4, FEED_BATCH_BYTES=50):
        sink = Sink()
        for batch in store.feed("f", start="state"):
            sink.apply(batch)
    assert sink.state == rows


WORKER = """
import os, sys
import kvstore

with kvstore.open(sys.argv[1], engine=sys.argv[2]) as store:
    feed = store.feed("f", batch_rows=3)
    for batch in feed.batches(follow=True):
        for e in batch.events:
            value = (e.value or b"").decode()
            print(f"{batch.is_state:d} {int(e.timestamp)} {e.key.decode()} {value}")
        sys.stdout.flush()
        store.put(b"own", b"%d" % store.upper)
        feed.ack(batch)
"""


def test_a_killed_consumer_misses_nothing(tmp_path: Path, each_engine: str) -> None:
    draw, path = seeded("KVSTORE_STATE_KILLS"), tmp_path / "s"
    with kvstore.open(path, engine=each_engine) as store:
        store.put_many((b"%04d" % number, b"v%d" % number) for number in range(1000))
        at = store.feed("f", start="state").position.timestamp
    newest: dict[str, tuple[int, str]] = {}
    killed_in_state = 0
    for _ in range(8):
        command = [sys.executable, "-c", WORKER, str(path), each_engine]
        # The state does not fit into the pipe: the first consumer is killed while it reads it.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, bufsize=1, pipesize=4096
        ) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(draw.randrange(1, 40))]
            child.kill()
            lines += child.stdout  # reported before the kill, and perhaps acked
        for line in lines:
            if line.endswith("\n"):
                is_state, time, key, value = line.rstrip("\n").split(" ")
                newest[key] = max(newest.get(key, (-1, "")), (int(time), value))
        killed_in_state += is_state == "1"
    assert killed_in_state
    with kvstore.open(path, engine=each_engine) as store:
        for batch in store.feed("f"):
            for event in batch.events:
                pair = (int(event.timestamp), (event.value or b"").decode())
                newest[event.key.decode()] = max(newest.get(event.key.decode(), (-1, "")), pair)
        assert {k.encode(): v.encode() for k, (_, v) in newest.items()} == dict(store.scan())
        assert min(time for time, _ in newest.values()) == at


def test_envelopes_have_the_shape_that_debezium_gives(store: kvstore.Store) -> None:
    store.put(b"a", b"1")
    feed = store.feed("f", start="state", images="pre", expand="all")
    at = store.put(b"a", b"2")
    store.put(b"b", b"\xff")
    store.delete_range(b"a", b"b")
    lines = [
        json.loads(line)
        for batch in feed
        for line in debezium_lines(batch, name="s", has_before=True)
    ]
    assert [(line["op"], line["key"], line["before"], line["after"]) for line in lines] == [
        ("r", "a", None, "1"),
        ("u", "a", "1", "2"),
        ("c", "b", None, {"base64": "/w=="}),
        ("d", "a", "2", None),
    ]
    assert [line["source"]["snapshot"] for line in lines] == ["true", "false", "false", "false"]
    assert (lines[1]["ts_ms"], lines[1]["source"]["ts_ns"]) == (at // 10**6, at)
    (whole,) = store.feed("g", start="oldest")
    with pytest.raises(UsageError, match="expand"):
        list(debezium_lines(whole, name="s"))
