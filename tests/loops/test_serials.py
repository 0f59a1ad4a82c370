"""Serials: the epochs that wait are the ones that were closed, and a commit is counted once."""

from __future__ import annotations

from contextvars import ContextVar
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.loops.serials import QuietEpochs, Serials

U64 = (1 << 64) - 1
numbers = st.integers(0, U64)
epochs = st.tuples(numbers, numbers, st.integers(0, 1 << 40), st.integers(0, 3))


def quiet_epochs() -> QuietEpochs:
    scope: ContextVar[None] = ContextVar("scope", default=None)
    return QuietEpochs(scope, Serials(), 7, 0)


@given(st.integers(0, U64), numbers, st.integers(1, 5))
def test_serials_are_seconds_in_fixed_point_with_a_count_in_the_low_bits(
    now_ns: int, last: int, taken: int
) -> None:
    serials = Serials(last=last)
    expected = (now_ns << 32) // 10**9 & (U64 ^ 127)
    if not (expected and 0 < (expected - last & U64) < 1 << 63):
        expected = (last + 1 & U64) or 1
    assert serials.next(now_ns, taken=taken) == expected
    assert serials.step() == ((expected + taken & U64) or 1)


@given(st.lists(epochs, max_size=9), st.integers(0, 9))
def test_epochs_wait_until_they_are_dropped(
    closed: list[tuple[int, int, int, int]], kept: int
) -> None:
    waiting = quiet_epochs()
    for each in closed:
        waiting.close_epoch(*each)
    assert list(waiting.waiting()) == [*chain(*closed)]
    assert (waiting.waiting_count, waiting.events) == (len(closed), sum(each[2] for each in closed))
    if kept > len(closed):
        with pytest.raises(ValueError, match="do not wait"):
            waiting.drop_waiting(kept)
        kept = len(closed)
    waiting.drop_waiting(kept)
    assert list(waiting.waiting()) == [*chain(*closed[:kept])]
    assert waiting.events == sum(each[2] for each in closed[:kept])


def test_a_commit_closes_its_epoch_and_an_empty_one() -> None:
    counted = quiet_epochs()
    begun = counted.begin_commit(5_000_000_000)
    (domain, serial), changeset = begun
    assert (domain, serial, changeset) == (7, 5 << 32, None)
    counted.finish_commit(begun, 3, 5_000_000_001)
    assert list(counted.waiting()) == [
        *(serial + 1, 5_000_000_001, 3, 0),
        *(serial + 2, 5_000_000_001, 0, 1),
    ]
    assert (counted.next_begin, counted.quiet) == (serial + 2, 5_000_000_001)
    assert counted.begin_commit(5_000_000_001)[0][1] == serial + 2


def test_a_commit_without_events_closes_nothing() -> None:
    counted = quiet_epochs()
    counted.finish_commit(counted.begin_commit(5), 0, 6)
    assert counted.waiting_count == 0
