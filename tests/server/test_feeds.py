"""Feeds through a server: each durable change comes once, in order, over fencing and restarts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import FencedError, UsageError
from kvstore.remote.client import connect
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from tests.harness.bounds import bounds

LOCAL = ListenAddress("127.0.0.1", 0)


@pytest.mark.tiny_limits
def test_a_feed_delivers_what_a_feed_of_the_store_delivers(store: kvstore.Store) -> None:
    with serving(app(store), LOCAL) as running, connect(running.url) as client:
        for number in range(20):
            with store.batch() as batch:
                for key in range(number % 5 + 1):
                    batch.put(b"%d" % key, b"%d" % number)
        store.delete_range(b"1", b"3")
        feed = client.feed("remote", start=0, batch_rows=7)
        found = [event for batch in feed.batches() for event in batch.events]
        local = store.feed("local", start=0)
        assert found == [event for batch in local.batches() for event in batch.events]
        assert feed.position.taken == 0
        assert list(client.feed("remote", start="now").batches())[-1].events == []


def test_a_consumer_resumes_after_its_ack_and_fences_the_one_before(store: kvstore.Store) -> None:
    with serving(app(store), LOCAL) as running, connect(running.url) as client:
        for number in range(9):
            store.put(b"k", b"%d" % number)
        first = client.feed("feed", start=0, batch_rows=4)
        batches = first.batches()
        batch = next(batches)
        first.ack(batch)
        with pytest.raises(UsageError, match="not delivered yet"):
            first.ack(kvstore.Position(kvstore.Timestamp(1 << 62)))
        second = client.feed("feed")
        with pytest.raises(FencedError):
            next(batches)
        with pytest.raises(FencedError):
            first.ack(batch)
        values = [event.value for each in second.batches() for event in each.events]
        assert values == [b"%d" % number for number in range(4, 9)]
        second.ack(second.position)
        second.ack(batch)  # a late ack does not move the position back
        assert list(client.feed("feed"))[-1].events == []
        second = client.feed("feed")
        client.drop_feed("feed")
        with pytest.raises(FencedError):
            next(second.batches())
        with pytest.raises(UsageError, match="no feed 'feed'"):
            client.feed("feed")


def test_a_token_with_a_prefix_takes_over_no_feed_of_others(store: kvstore.Store) -> None:
    whole, mine = "w" * 32, "m" * 32
    tokens = [Token(whole, ["write"]), Token(mine, ["write"], prefix=b"a/")]
    with (
        serving(app(store, tokens), LOCAL) as running,
        connect(running.url, whole) as theirs,
        connect(running.url, mine) as tenant,
    ):
        first, own = theirs.feed("feed", start="now"), tenant.feed("feed", start="now")
        store.put(b"a/1", b"1")
        store.put(b"b/1", b"2")
        [batch, _] = own.batches()
        assert [event.key for event in batch.events] == [b"a/1"]
        own.ack(batch)
        assert tenant.feed("feed").position == batch.position
        with pytest.raises(UsageError, match="name"):
            tenant.feed("", start="now")
        [batch, _] = first.batches()  # nobody has fenced it, or acknowledged its events
        assert [event.key for event in batch.events] == [b"a/1", b"b/1"]
        assert {hold.name for hold in store.holds.all()} == {"feed/feed", "feed/a%2F:feed"}


def test_a_consumer_goes_ahead_with_the_next_server(tmp_path: Path) -> None:
    address = ListenAddress(path=str(tmp_path / "socket"))
    seen: list[bytes | None] = []
    with kvstore.open(tmp_path / "store") as store:
        with serving(app(store), address) as running, connect(running.url, patience=120) as client:
            store.put(b"k", b"1")
            feed = client.feed("feed", start=0)
            batches = feed.batches(follow=True)
            seen += [event.value for event in next(batches).events]
        store.put(b"k", b"2")
    with (
        kvstore.open(tmp_path / "store") as store,
        serving(app(store), address),
        connect(running.url) as client,
    ):
        again = client.feed("feed", start=feed.position)
        seen += [event.value for event in next(again.batches(follow=True)).events]
    assert seen == [b"1", b"2"]


def test_following_waits_for_the_next_change(store: kvstore.Store) -> None:
    with serving(app(store), LOCAL) as running, connect(running.url) as client:
        feed = client.feed("feed", start="now")
        found: list[bytes | None] = []

        def follow() -> None:
            for batch in feed.batches(follow=True):
                found.extend(event.value for event in batch.events)
                if len(found) == 3:
                    return

        with bounds(FEED_POLL_S_MAX=0.2):
            follower = threading.Thread(target=follow)
            follower.start()
            for number in range(3):
                store.put(b"k", b"%d" % number, durability="sync")
            follower.join()
        assert found == [b"0", b"1", b"2"]
        beats = feed.batches(follow=True, heartbeat=0.01)
        assert [next(beats).events for _ in range(2)] == [[], []]


def test_a_feed_through_a_server_begins_with_the_state(store: kvstore.Store) -> None:
    store.put_many({b"a": b"1", b"b\xff": b"2", b"c": b"3"})
    with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
        with kvstore.connect(running.url) as client:
            feed = client.feed("f", start="state", batch_rows=2)
            batches = iter(feed)
            first = next(batches)
            assert (first.is_state, [e.key for e in first.events]) == (True, [b"a", b"b\xff"])
            feed.ack(first)
        store.put(b"a", b"later")
        with kvstore.connect(running.url) as client:
            found = [(b.is_state, e.key) for b in client.feed("f") for e in b.events]
            assert found == [(True, b"c"), (False, b"a")]
            again = client.feed("f", start=first.position)
            assert [e.key for b in again for e in b.events] == [b"c", b"a"]


@pytest.mark.parametrize("follow", [False, True])
def test_changes_behind_an_empty_last_piece_of_the_state_are_no_rows_of_it(
    store: kvstore.Store, follow: bool
) -> None:
    store.put_many([(b"a", b"v"), (b"b", b"v")])
    with serving(app(store), LOCAL) as running, connect(running.url) as client:
        feed = client.feed("f", start="state", batch_rows=2)
        store.put(b"a", b"changed")
        found = []
        for batch in feed.batches(follow=follow):
            found += [(event.key, event.value, batch.is_state) for event in batch.events]
            if len(found) == 3:
                break
        assert found == [(b"a", b"v", True), (b"b", b"v", True), (b"a", b"changed", False)]
