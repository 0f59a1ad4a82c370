"""Frontiers alone: the calls that move them, and the waiters that they wake."""

from __future__ import annotations

import threading

import pytest

from kvstore.base.timestamp import Timestamp
from kvstore.errors import HistoryGoneError, NotYetWrittenError
from kvstore.timeline.frontiers import Frontiers, require_readable

WAIT_S = 120


def test_times_from_since_up_to_upper_are_readable() -> None:
    for at in (3, 5):
        require_readable(at, since=3, upper=6)
    with pytest.raises(HistoryGoneError):
        require_readable(2, since=3, upper=6)
    with pytest.raises(NotYetWrittenError):
        require_readable(6, since=3, upper=6)


def test_the_floor_only_rises_and_is_never_below_since() -> None:
    frontiers = Frontiers(since=2, upper=9)
    frontiers.raise_floor(5)
    frontiers.raise_floor(4)
    assert (frontiers.since, frontiers.floor) == (2, 5)
    frontiers.move_since(7)
    assert (frontiers.since, frontiers.floor) == (7, 7)


def test_a_wait_for_a_time_that_is_complete_returns_at_once() -> None:
    Frontiers(since=0, upper=9).wait(8, timeout=None, stop=lambda: False)


class Waiter:
    """A thread in `wait`; it releases `looked` each time it has evaluated the condition."""

    def __init__(self, frontiers: Frontiers, above: int) -> None:
        self.looked = threading.Semaphore(0)
        self.stop = False
        self.thread = threading.Thread(target=self._wait, args=(frontiers, above))
        self.thread.start()
        assert self.looked.acquire(timeout=WAIT_S)

    def _wait(self, frontiers: Frontiers, above: int) -> None:
        frontiers.wait(above, timeout=None, stop=self._look)

    def _look(self) -> bool:
        self.looked.release()
        return self.stop

    def has_ended(self) -> bool:
        self.thread.join(WAIT_S)
        return not self.thread.is_alive()


def test_a_move_of_upper_ends_the_waits_below_it() -> None:
    frontiers = Frontiers(since=0, upper=5)
    waiters = [Waiter(frontiers, above) for above in (5, 8)]
    frontiers.advance(Timestamp(9))
    assert all(waiter.has_ended() for waiter in waiters)


def test_a_move_that_does_not_suffice_and_a_wake_have_the_waiter_look_again() -> None:
    frontiers = Frontiers(since=0, upper=5)
    waiter = Waiter(frontiers, 8)
    frontiers.advance(Timestamp(6))
    assert waiter.looked.acquire(timeout=WAIT_S)
    waiter.stop = True
    frontiers.wake()
    assert waiter.has_ended()
