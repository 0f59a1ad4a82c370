"""The cache of newest values: always exact, and within its bound."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.loops.lookup import (
    ENTRY_BYTES,
    REPLACED_MAX,
    ROUND,
    SAMPLE,
    SPANS_MAX,
    WRITES_JUDGED,
    NewestValues,
)

KEYS = [b"", b"\x00", b"a", b"a\x00", b"b", b"\xff"]
ROOM = 16 * (ENTRY_BYTES + 40)  # for some sixteen values

keys = st.sampled_from(KEYS)
values = st.none() | st.sampled_from([b"", b"1", b"large" * 8, b"too large" * 8])
spans = st.tuples(keys, st.none() | keys)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), keys, st.integers(0, 3)),
        st.tuples(
            st.just("commit"),
            st.dictionaries(keys, values, max_size=3),
            st.lists(spans, max_size=2),
        ),
    ),
    max_size=60,
)


class Timeline:
    """The state at each time, and the cache that reads go through."""

    def __init__(self, newest: Any) -> None:
        self.states: list[dict[bytes, bytes]] = [{}]
        self.newest = newest
        newest.note(0, {}, ())

    def read(self, key: bytes, back: int) -> None:
        """Read as a look-up does: at the newest time, or `back` before it."""
        at = max(0, len(self.states) - 1 - back)
        expected = self.states[at].get(key)
        found = self.newest.get(key, at)
        assert found is None or found == expected
        if found is None and expected is not None:
            self.newest.keep(key, expected, at)

    def commit(
        self, points: dict[bytes, bytes | None], spans: list[tuple[bytes, bytes | None]]
    ) -> None:
        state = {
            key: value
            for key, value in self.states[-1].items()
            if not any(start <= key and (end is None or key < end) for start, end in spans)
        }
        for key, value in points.items():
            state.pop(key, None)
            if value is not None:
                state[key] = value
        self.newest.note(len(self.states), points, spans)
        self.states.append(state)


@given(history=steps, most=st.sampled_from([0, ROOM // 4, ROOM, 100 * ROOM]))
def test_each_kept_value_is_the_newest_of_its_key(history: Any, most: int) -> None:
    newest = NewestValues(most)
    timeline = Timeline(newest)
    for name, *arguments in history:
        getattr(timeline, name)(*arguments)
        assert 0 <= newest.size <= most
        assert len(newest) * ENTRY_BYTES <= newest.size
        assert (newest.size == 0) == (len(newest) == 0)
    gets = sum(name == "read" for name, *_ in history)
    assert newest.hits + newest.misses == gets


def warm(newest: Any, rows: dict[bytes, bytes], at: int) -> None:
    """Keep `rows`: a full cache takes the second offer of a key."""
    for key, value in rows.items():
        newest.keep(key, value, at)
        newest.keep(key, value, at)


def test_nothing_is_kept_before_the_first_commit_is_known() -> None:
    newest = NewestValues(ROOM)
    warm(newest, {b"k": b"old"}, 8)
    assert len(newest) == 0
    newest.note(8, {}, ())
    warm(newest, {b"k": b"older"}, 7)
    assert len(newest) == 0
    warm(newest, {b"k": b"new"}, 8)
    assert newest.get(b"k", 8) == newest.get(b"k", 9) == b"new"
    assert newest.get(b"k", 7) is None


def test_a_full_cache_lets_a_key_in_when_it_is_asked_for_again() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    for row in range(100):
        newest.keep(b"%04d" % row, b"1", 0)
    assert len(newest) == ROOM // (ENTRY_BYTES + 5)
    newest.keep(b"k", b"1", 0)
    assert newest.get(b"k", 0) is None
    newest.keep(b"k", b"1", 0)
    assert newest.get(b"k", 0) == b"1"


def test_a_full_cache_lets_a_key_in_when_it_is_read_after_its_write() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"%04d" % row: b"1" for row in range(100)}, 0)
    newest.note(1, {b"k": b"1", b"gone": None}, ())
    assert (newest.get(b"k", 1), newest.get(b"gone", 1)) == (None, None)
    newest.keep(b"k", b"1", 1)
    assert newest.get(b"k", 1) == b"1"


def test_a_write_lets_its_key_in_while_such_keys_are_read() -> None:
    newest = NewestValues(ROOM)
    timeline = Timeline(newest)
    names = (b"%06d" % row for row in itertools.count())
    warm(newest, {next(names): b"1" for _ in range(100)}, 0)

    def is_let_in() -> bool:
        key = next(name for name in names if hash(name) & SAMPLE)
        timeline.commit({key: b"2"}, [])
        found: bytes | None = newest.get(key, len(timeline.states) - 1)
        return found == b"2"

    def write(is_read: Callable[[int], bool]) -> None:
        sampled = (name for name in names if not hash(name) & SAMPLE)
        for number, key in enumerate(itertools.islice(sampled, 2 * WRITES_JUDGED)):
            timeline.commit({key: b"1"}, [])
            if is_read(number):
                timeline.read(key, 0)

    assert not is_let_in()
    write(lambda number: number % 4 == 0)
    assert is_let_in()
    write(lambda number: number % 5 == 0)
    assert not is_let_in()
    assert newest.size <= ROOM


def test_a_search_passes_over_few_keys_when_keys_come_and_go() -> None:
    newest = NewestValues(4000 * (ENTRY_BYTES + 10))
    newest.note(0, {}, ())
    count = 40_000
    for row in range(count):
        key = b"%09d" % row
        assert newest.get(key, 0) is None
        warm(newest, {key: b"1"}, 0)
        assert newest.get(key, 0) == b"1"
    assert len(newest) == 4000
    assert newest.passed < 20 * count


def test_values_in_use_outlive_a_pass_over_many_keys() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"hot": b"1"}, 0)
    for row in range(1000):
        assert newest.get(b"hot", 0) == b"1"
        warm(newest, {b"%04d" % row: b"1"}, 0)
    assert newest.size <= ROOM
    assert len(newest) > 10


def test_a_value_that_missed_too_many_range_deletes_is_dropped() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"kept": b"1", b"idle": b"1"}, 0)
    for time in range(1, SPANS_MAX + 2):
        newest.note(time, {}, [(b"x", b"y")])
        assert newest.get(b"kept", time) == b"1"
    assert newest.get(b"idle", SPANS_MAX + 1) is None
    assert len(newest) == 1


def test_keys_that_come_and_go_leave_nothing() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    objects = len(gc.get_objects())
    for time in range(1, 20_000, 2):
        newest.note(time, {b"k": b"1"}, ())
        warm(newest, {b"k": b"1"}, time)
        newest.note(time + 1, {b"k": None}, [(b"a", b"b")])
    assert (len(newest), newest.size) == (0, 0)
    assert len(gc.get_objects()) - objects < 500


def test_a_value_larger_than_a_part_of_the_cache_is_not_kept() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"large": bytes(ROOM // 16), b"small": b"1"}, 0)
    assert newest.get(b"large", 0) is None
    assert newest.get(b"small", 0) == b"1"
    newest.note(1, {b"small": bytes(ROOM)}, ())  # a later value may be larger
    assert newest.size <= ROOM
    assert newest.get(b"small", 1) in (None, bytes(ROOM))


@given(seed=st.integers(0, 2**32))
def test_a_table_of_many_keys_grows_and_shrinks_and_stays_exact(seed: int) -> None:
    pick = random.Random(seed)
    newest = NewestValues(200 * (ENTRY_BYTES + 60))
    timeline = Timeline(newest)
    names = [pick.randbytes(pick.choice((3, 16, 32, 33, 70))) for _ in range(400)]
    for _ in range(30):
        for key in pick.choices(names, k=pick.choice((5, 100))):
            timeline.read(key, 0)
            timeline.read(key, pick.choice((0, 1)))
        written = pick.choices(names, k=pick.choice((1, 20, REPLACED_MAX + 1, 300)))
        size = pick.choice((0, 10, 10, 500))
        deleted = pick.random() < 0.3
        timeline.commit({key: None if deleted else pick.randbytes(size) for key in written}, [])
        assert 0 <= newest.size <= newest.most
    for key in names:
        timeline.read(key, 0)


def test_a_full_cache_without_hits_rests_and_wakes_by_its_sample() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"%04d" % row: b"1" for row in range(20)}, 0)
    asked = (b"%d" % row for row in itertools.count())
    for key in itertools.islice(asked, 2 * ROUND):
        assert newest.get(key, 0) is None
    sampled = next(key for key in asked if not hash(key) & SAMPLE)
    other = next(key for key in asked if hash(key) & SAMPLE)
    warm(newest, {other: b"1", sampled: b"1"}, 0)
    assert (newest.get(other, 0), newest.get(sampled, 0)) == (None, b"1")
    newest.note(1, {sampled: b"2"}, ())
    for _ in range(ROUND):
        assert newest.get(sampled, 1) == b"2"  # commits are heard in any case
    warm(newest, {other: b"1"}, 1)
    assert newest.get(other, 1) == b"1"
    assert newest.hits + newest.misses == 3 * ROUND + 3


def test_a_commit_of_many_keys_removes_their_values() -> None:
    newest = NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"a": b"1", b"b": b"1"}, 0)
    written = {b"%04d" % row: b"2" for row in range(REPLACED_MAX)}
    newest.note(1, written | {b"a": b"2"}, ())
    assert newest.get(b"a", 1) is None
    warm(newest, {b"a": b"2"}, 1)
    assert newest.get(b"a", 1) == b"2"
