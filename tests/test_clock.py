"""A store's timeline only rises, whatever the wall clock does."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from kvstore.base.clock import Clock, ManualClock, Timeline
from kvstore.base.timestamp import Timestamp

START = 1_000_000_000_000

steps = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.just(0)),
        st.tuples(st.just("now"), st.just(0)),
        st.tuples(st.just("advance"), st.integers(0, 100)),
        st.tuples(st.just("set"), st.integers(START - 100, START + 100)),
    ),
    max_size=30,
)


@given(steps, st.integers(START - 50, START + 50))
def test_every_timestamp_is_above_all_before_it(
    steps: list[tuple[str, int]], opened_at: int
) -> None:
    clock = ManualClock(START)
    timeline = Timeline(clock, last=opened_at)
    highest = opened_at
    for step, amount in steps:
        if step == "next":
            given_out = timeline.next()
            assert given_out == max(clock.wall_ns(), highest + 1)
            highest = given_out
        elif step == "now":
            assert timeline.now() == max(clock.wall_ns(), highest)
        else:
            getattr(clock, step)(amount)


def test_clock_that_stands_still_gives_steps_of_one_nanosecond() -> None:
    timeline = Timeline(ManualClock(START))
    assert [timeline.next() - START for _ in range(3)] == [0, 1, 2]
    assert isinstance(timeline.next(), Timestamp)


def test_looking_at_the_time_does_not_use_it_up() -> None:
    timeline = Timeline(ManualClock(START))
    assert timeline.now() == timeline.now() == timeline.next()


def test_the_machines_clock_counts_nanoseconds_since_the_epoch() -> None:
    before = time.time_ns()
    assert before <= Clock().wall_ns() <= time.time_ns()
