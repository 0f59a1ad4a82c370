"""Holds that name their owners, and failures of background work that are reported."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import GcPolicy, ManualClock, Store
from kvstore.base.background import Failures
from kvstore.codec.json import read_object
from kvstore.errors import (
    FencedError,
    HistoryHeldError,
    OutOfSpaceError,
    PoisonedError,
    UsageError,
)
from kvstore.limits import HOLD_TEXT_CHARS_MAX
from kvstore.timeline.holds import FEED, HoldRecord, from_fields, to_fields
from tests.gc.garbage import collecting
from tests.harness.parts import parts_of

pytestmark = pytest.mark.usefixtures("each_engine")

WAIT_S_MAX = 120
HOUR = timedelta(hours=1)


# -- owners of holds --------------------------------------------------------------------------


def test_a_hold_says_whose_it_is_also_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        at = store.put(b"k", b"v")
        hold = store.hold("mine", at=at, kind="audit", address="s3://bucket/path")
        clock.advance(500)
        moved = store.put(b"k", b"w")
        hold.move(moved)
    with kvstore.open(tmp_path / "db", clock=clock) as store:
        (record,) = store.holds.all()
        assert (record.kind, record.address) == ("audit", "s3://bucket/path")
        assert "process" in record.owner
        assert record.created_at is not None
        assert record.moved_at is not None
        assert record.created_at < 1_500 <= record.moved_at
        store.hold("mine")
        (taken,) = store.holds.all()
        assert taken.created_at == record.created_at
        assert (taken.kind, taken.timestamp) == ("user", moved)


def test_fields_of_a_record_come_back_as_they_were() -> None:
    time = kvstore.Timestamp(7)
    whole = HoldRecord("h", time, "t", 5, True, "feed", "f", "me", time, time)
    for record in (whole, HoldRecord("h", time, "t", None)):
        assert (
            from_fields("h", read_object(json.dumps(to_fields(record)).encode(), where="r"))
            == record
        )


def test_texts_of_a_hold_are_one_bounded_line(store: Store) -> None:
    store.hold("h", address="a\nb" + "x" * 10_000)
    (record,) = store.holds.all()
    assert record.address.isprintable()
    assert len(record.address) == HOLD_TEXT_CHARS_MAX
    with pytest.raises(UsageError):
        store.hold("h", kind="two\nlines")
    for name in ("", "two\nlines", 5, ["h"]):
        with pytest.raises(UsageError, match="for the hold"):
            store.hold(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["feed/x", "feed/x/0of2", "feed/", "reader/r"])
def test_no_hold_fences_a_feed_by_its_name(store: Store, name: str) -> None:
    """`store.hold("feed/x")` took the hold of the feed `x`, whose consumer then failed."""
    store.put(b"k", b"v")
    feed = store.feed("x", start="oldest")
    with pytest.raises(UsageError, match="one of a feed or of a reader"):
        store.hold(name)
    for batch in feed:
        assert [event.value for event in batch.events] == [b"v"]
        feed.ack(batch)
    assert {record.name for record in store.holds.all()} == {"feed/x"}
    with store.hold("feeds/x"):
        pass


# -- claims that hold GC back
# -----------------------------------------------------------------------


def test_a_hold_of_any_age_leaves_a_store_that_opens(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db") as store:
        store.put(b"k", b"v")
        store.hold("mine", max_age=timedelta.max)
        store.feed("news", start=0, max_age=timedelta.max)
    with kvstore.open(tmp_path / "db") as store:
        assert [hold.lost for hold in store.holds.all()] == [False, False]
        store.gc(keep=timedelta(0))
        assert len(store.history(b"k")) == 1


def test_gc_names_all_that_hold_it_back_oldest_first(store: Store) -> None:
    first = store.put(b"k", b"1")
    store.feed("billing", start=first, max_age=HOUR)
    store.hold("audit", at=store.put(b"k", b"2"))
    newer = store.hold("newer", at=store.put(b"k", b"3"))
    snapshot, transaction = store.snapshot(), store.transaction()
    follower = store.feeds.follow(store.upper - 1, heartbeat=0.001)
    next(follower)
    target = store.put(b"k", b"4")
    report = store.gc(before=target)
    assert report.held_back
    assert report.since == first
    assert [claim.name for claim in report.held_by[:3]] == ["feed/billing", "audit", "newer"]
    pins = report.held_by[3:]
    assert {claim.kind for claim in pins} == {"snapshot", "transaction", "follower"}
    assert all(claim.is_pin for claim in pins)
    assert [claim.timestamp for claim in report.held_by] == sorted(
        claim.timestamp for claim in report.held_by
    )
    feed = report.held_by[0]
    assert (feed.kind, feed.address) == (FEED, "billing")
    told = feed.describe(store.now())
    assert "feed hold 'feed/billing'" in told
    assert "kept for 60 minutes" in told
    assert "acks" in feed.remedy
    assert "kept for ever" in report.held_by[1].describe(store.now())
    assert store.stats()["held_by"][0].startswith("feed hold")
    store.feeds.drop("billing")
    store.drop_hold("audit")
    assert store.gc(before=newer.timestamp).held_by == ()
    newer.release()
    snapshot.close()
    transaction.rollback()
    follower.close()  # type: ignore[attr-defined]
    done = store.gc(before=target)
    assert (done.held_back, done.held_by) == (False, ())


def test_a_clear_that_is_refused_names_the_hold(store: Store) -> None:
    store.put(b"k", b"v")
    store.hold("audit", kind="backup", address="/backups/flights")
    with pytest.raises(HistoryHeldError, match=r"backup hold 'audit' .*of /backups/flights"):
        store.clear_range(b"a", b"z")


def test_a_hold_that_was_abandoned_can_be_dropped(store: Store) -> None:
    hold = store.hold("backup-1", kind="backup", address="/gone")
    dropped = store.drop_hold("backup-1")
    assert (dropped.name, dropped.address) == ("backup-1", "/gone")
    assert "full=True" in dropped.cost_of_dropping
    assert store.holds.all() == []
    with pytest.raises(FencedError):
        hold.move(store.upper - 1)
    with pytest.raises(UsageError, match=r"store\.holds\.all\(\) names all holds"):
        store.drop_hold("backup-1")
    with pytest.raises(UsageError):
        store.drop_hold(7)  # type: ignore[arg-type]


# -- failures undo their holds ----------------------------------------------------------------


@contextmanager
def failing(store: Store, call: str, at: int) -> Iterator[None]:
    """Let call number `at` of the engine fail with a full disk before it does anything."""
    inner, calls = getattr(parts_of(store).engine, call), [0]

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] > at:
            raise OutOfSpaceError("the disk")
        return inner(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_of(store).engine, call, counted)
        yield


@pytest.mark.parametrize("at", range(4))
def test_a_feed_that_cannot_be_opened_holds_nothing(tmp_path: Path, at: int) -> None:
    """The holds of its workers were once written one by one, and a failure left the first of
    them."""
    with kvstore.open(tmp_path / "db") as store:
        store.reshard(streams=3)
        time = store.put(b"k", b"v")
        with failing(store, "write", at):
            try:
                store.feed("f", start=time, streams=(0, 3))
                opened = True
            except OutOfSpaceError:
                opened = False
    with kvstore.open(tmp_path / "db") as store:
        assert len(store.holds.all()) == (3 if opened else 0)


def test_a_feed_that_is_taken_over_is_whole_or_as_it_was(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "db") as store:
        store.reshard(streams=2)
        store.feed("f", start=store.put(b"k", b"v"), streams=(0, 2))
        before = store.holds.all()
        with failing(store, "write", 0), pytest.raises(OutOfSpaceError):
            store.feed("f")
    with kvstore.open(tmp_path / "db") as store:
        assert store.holds.all() == before
        store.feed("f")
        assert [record.name for record in store.holds.all()] == ["feed/f"]


def test_wrong_calls_of_a_feed_hold_nothing(store: Store) -> None:
    time = store.put(b"k", b"v")
    wrong: list[Callable[[], object]] = [
        lambda: store.feed("f"),
        lambda: store.feed("f", start=time + 10**15),
        lambda: store.feed("f", start=time, streams=(0, 9)),
        lambda: store.feed("f", start=kvstore.Position(time, -1)),
        lambda: store.feed("a/b", start=time),
        lambda: store.hold("h", at=time + 10**15),
    ]
    for call in wrong:
        with pytest.raises(kvstore.errors.KVStoreError):
            call()
        assert store.holds.all() == []


# -- background work that fails ---------------------------------------------------------------


class Rounds:
    """Counts the calls of `after_run` or of a step of GC, and waits for a number of them."""

    def __init__(self, *does: BaseException | None) -> None:
        self._does = list(does)
        self._done = threading.Semaphore(0)

    def __call__(self, _: object) -> None:
        does = self._does.pop(0) if self._does else None
        self._done.release()
        if does is not None:
            raise does

    def wait(self) -> None:
        assert self._done.acquire(timeout=WAIT_S_MAX)


@pytest.mark.parametrize("error", [RuntimeError("of my own"), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_raises_is_told_and_collecting_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """The thread once died in silence, and the error showed only when the store was closed."""
    rounds = Rounds(error)
    with kvstore.open(tmp_path / "db", durability="async") as store:
        worker = store.upkeep.start_gc(GcPolicy(keep=timedelta(0), every=HOUR), after_run=rounds)
        for _ in range(2):
            worker.wake()
            rounds.wait()
        assert store.stats()["gc_failures"] == 1
        assert type(error).__name__ in store.stats()["gc_last_error"]
        assert store.stats()["gc_failed_at_ns"] > 0
        assert worker.error is None
        (told,) = [record for record in caplog.records if record.name == "kvstore.retention.gc"]
        assert told.levelno == logging.ERROR
        assert "after_run" in told.getMessage()
    assert worker.runs >= 2


def test_a_run_that_fails_is_told_and_the_next_one_collects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = Rounds()
    with kvstore.open(tmp_path / "db", clock=ManualClock()) as store:
        steps = Rounds(RuntimeError("of a step"))
        parts_of(store).collector.at_step = steps
        worker = store.upkeep.start_gc(GcPolicy(keep=timedelta(0), every=HOUR), after_run=rounds)
        store.put(b"k", b"1")
        store.put(b"k", b"2")
        worker.wake()
        steps.wait()
        worker.wake()
        rounds.wait()
        assert len(store.history(b"k")) == 1
        assert store.stats()["gc_failures"] == 1
        assert "of a step" in store.stats()["gc_last_error"]
        assert "of a step" in caplog.text
        assert worker.error is None


def test_a_poisoned_store_ends_its_collecting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = kvstore.open(tmp_path / "db")
    with failing(store, "write", 0), pytest.raises(OutOfSpaceError):
        store.put(b"k", b"v")
    worker = store.upkeep.start_gc(GcPolicy(keep=timedelta(0), every=HOUR))
    worker.wake()
    for thread in collecting():
        thread.join(WAIT_S_MAX)
    assert collecting() == []
    assert isinstance(worker.error, PoisonedError)
    assert "PoisonedError" in caplog.text
    store.close()


def test_the_delay_after_failures_grows_and_is_bounded() -> None:
    failures = Failures("kvstore.tests", ManualClock(7))
    delays = []
    for _ in range(100):
        delays.append(failures.delay_s(1.0, 8.0))
        failures.note("a test", ValueError("again"))
    assert delays[:6] == [1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert delays[-1] == 8.0
    failures.succeeded()
    assert failures.delay_s(1.0, 8.0) == 1.0
    assert failures.figures("x") == {
        "x_failures": 100,
        "x_last_error": "ValueError: again",
        "x_failed_at_ns": 7,
    }
    failures.note("a callback", ValueError(), delays=False)
    assert failures.delay_s(1.0, 8.0) == 1.0
