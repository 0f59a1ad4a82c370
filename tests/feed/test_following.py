"""Followers: they wake for each commit, hand out durable commits only, and end with an error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kvstore
from kvstore import ManualClock, Store
from kvstore.errors import ClosedError, FencedError, PoisonedError, StorageError
from tests.feed.follower import WAIT_S, Follower, keys
from tests.harness.parts import parts_of

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_a_feed_never_hands_out_what_is_not_durable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower gets nothing until the disk has answered the fsync; the write alone is not
    enough."""
    sync, answer, asked = parts_of(store).engine.sync, threading.Event(), threading.Event()
    feed = store.feed("f", start="now")

    def slow() -> None:
        asked.set()
        assert answer.wait(WAIT_S)
        sync()

    monkeypatch.setattr(parts_of(store).engine, "sync", slow)
    stamp = store.put(b"a", b"1", durability="async")
    follower = Follower(feed)
    assert asked.wait(WAIT_S)
    assert store.get(b"a") == b"1"
    assert keys(follower.batches) == []
    assert store.durable <= stamp
    answer.set()
    follower.wait(lambda f: keys(f.batches) == [b"a"])
    assert store.durable > stamp


def test_a_waiting_consumer_hears_at_once_that_it_was_fenced(store: Store) -> None:
    older = Follower(store.feed("f", start=0))
    store.put(b"a", b"1")
    older.wait(lambda follower: keys(follower.batches) == [b"a"])
    store.feed("f")
    assert isinstance(older.wait_error(), FencedError)


def test_following_catches_up_and_goes_live_without_a_seam(store: Store) -> None:
    for number in range(50):
        store.put(b"%d" % number, b"1")
    follower = Follower(store.feed("f", start=0, batch_rows=7))
    for number in range(50, 120):
        store.put(b"%d" % number, b"1")
    follower.wait(lambda f: len(keys(f.batches)) == 120)
    assert keys(follower.batches) == [b"%d" % number for number in range(120)]
    resolved = [batch.resolved for batch in follower.batches]
    assert resolved == sorted(resolved)


def test_one_commit_wakes_a_waiting_follower(store: Store) -> None:
    follower = Follower(store.feed("f", start="now"))
    for number in range(20):
        store.put(b"%d" % number, b"1")
        follower.wait(lambda f, number=number: len(keys(f.batches)) == number + 1)  # type: ignore[misc]


def test_an_idle_store_moves_resolved_on_with_each_heartbeat(
    store: Store, clock: ManualClock
) -> None:
    follower = Follower(store.feed("f", start="now"), heartbeat=0.001)
    clock.advance(5 * 10**9)
    at = clock.wall_ns()
    follower.wait(lambda f: any(batch.resolved >= at for batch in f.batches))
    assert keys(follower.batches) == []


def test_followers_do_not_wake_for_nothing(store: Store) -> None:
    """No polling: without a commit, a record or a heartbeat the wait is entered once."""
    waits: list[int] = []
    waiting = threading.Event()
    frontiers = parts_of(store).committer.frontiers
    wait = frontiers.wait

    def counted(above: int, **how: object) -> None:
        waits.append(above)
        waiting.set()
        wait(above, **how)  # type: ignore[arg-type]

    frontiers.wait = counted  # type: ignore[method-assign]
    follower = Follower(store.feed("f", start="now"))
    assert waiting.wait(WAIT_S)
    store.put(b"a", b"1")
    follower.wait(lambda f: keys(f.batches) == [b"a"])
    assert len(waits) <= 2


def test_a_follower_ends_with_an_error_when_the_store_closes(tmp_path: Path) -> None:
    store = kvstore.open(tmp_path / "s", durability="async")
    follower = Follower(store.feed("f", start=0))
    store.put(b"a", b"1")
    follower.wait(lambda f: keys(f.batches) == [b"a"])
    store.close()
    assert isinstance(follower.wait_error(), ClosedError)


def test_a_follower_ends_with_an_error_when_a_write_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(store.feed("f", start=0))
    store.put(b"a", b"1")
    follower.wait(lambda f: keys(f.batches) == [b"a"])

    def fail(*_: object) -> None:
        raise StorageError("the disk went away")

    monkeypatch.setattr(parts_of(store).engine, "write", fail)
    with pytest.raises(StorageError):
        store.put(b"b", b"1")
    assert isinstance(follower.wait_error(), PoisonedError)


def test_a_follower_ends_with_an_error_when_a_commit_is_interrupted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(store.feed("f", start=0))
    store.put(b"a", b"1")
    follower.wait(lambda f: keys(f.batches) == [b"a"])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts_of(store).committer.capture, "finish_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(b"b", b"1")
    monkeypatch.undo()
    if not parts_of(store).committer.health.poison:
        store.put(b"c", b"1")  # the commit is mended, and the feed goes on behind it
        follower.wait(lambda f: keys(f.batches)[-1] == b"c")
    else:
        assert isinstance(follower.wait_error(), PoisonedError)


def test_who_waits_for_upper_is_woken_when_it_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that is completed without a commit wakes the waiter too, again and again."""
    with kvstore.open(tmp_path / "s", durability="async") as store:
        looks = threading.Semaphore(0)
        upper = store.upper

        def look() -> bool:
            looks.release()
            return False

        waiting = threading.Thread(target=lambda: store.wait_beyond(upper, stop=look))
        waiting.start()
        assert looks.acquire(timeout=120)
        wake = parts_of(store).committer.frontiers.wake

        def wake_and_let_look() -> None:
            wake()
            while waiting.is_alive() and not looks.acquire(timeout=0.01):
                """The waiter has neither looked nor ended."""

        monkeypatch.setattr(parts_of(store).committer.frontiers, "wake", wake_and_let_look)
        store.sync()
        waiting.join(120)
        is_waiting = waiting.is_alive()
        wake()
        assert not is_waiting
