"""The cache of newest values: always exact, within its bound, and the same in both halves."""

from __future__ import annotations

import gc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.loops.plain.newest import ENTRY_BYTES, SPANS_MAX
from tests.loops import both

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


@both
@given(history=steps, most=st.sampled_from([0, ROOM // 4, ROOM, 100 * ROOM]))
def test_each_kept_value_is_the_newest_of_its_key(loops: Any, history: Any, most: int) -> None:
    newest = loops.NewestValues(most)
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


@both
def test_nothing_is_kept_before_the_first_commit_is_known(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    warm(newest, {b"k": b"old"}, 8)
    assert len(newest) == 0
    newest.note(8, {}, ())
    warm(newest, {b"k": b"older"}, 7)
    assert len(newest) == 0
    warm(newest, {b"k": b"new"}, 8)
    assert newest.get(b"k", 8) == newest.get(b"k", 9) == b"new"
    assert newest.get(b"k", 7) is None


@both
def test_a_full_cache_lets_a_key_in_when_it_is_asked_for_again(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    newest.note(0, {}, ())
    for row in range(100):
        newest.keep(b"%04d" % row, b"1", 0)
    assert len(newest) == ROOM // (ENTRY_BYTES + 5)
    newest.keep(b"k", b"1", 0)
    assert newest.get(b"k", 0) is None
    newest.keep(b"k", b"1", 0)
    assert newest.get(b"k", 0) == b"1"


@both
def test_values_in_use_outlive_a_pass_over_many_keys(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"hot": b"1"}, 0)
    for row in range(1000):
        assert newest.get(b"hot", 0) == b"1"
        warm(newest, {b"%04d" % row: b"1"}, 0)
    assert newest.size <= ROOM
    assert len(newest) > 10


@both
def test_a_value_that_missed_too_many_range_deletes_is_dropped(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"kept": b"1", b"idle": b"1"}, 0)
    for time in range(1, SPANS_MAX + 2):
        newest.note(time, {}, [(b"x", b"y")])
        assert newest.get(b"kept", time) == b"1"
    assert newest.get(b"idle", SPANS_MAX + 1) is None
    assert len(newest) == 1


@both
def test_keys_that_come_and_go_leave_nothing(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    newest.note(0, {}, ())
    objects = len(gc.get_objects())
    for time in range(1, 20_000, 2):
        newest.note(time, {b"k": b"1"}, ())
        warm(newest, {b"k": b"1"}, time)
        newest.note(time + 1, {b"k": None}, [(b"a", b"b")])
    assert (len(newest), newest.size) == (0, 0)
    assert len(gc.get_objects()) - objects < 500


@both
def test_a_value_larger_than_a_part_of_the_cache_is_not_kept(loops: Any) -> None:
    newest = loops.NewestValues(ROOM)
    newest.note(0, {}, ())
    warm(newest, {b"large": bytes(ROOM // 16), b"small": b"1"}, 0)
    assert newest.get(b"large", 0) is None
    assert newest.get(b"small", 0) == b"1"
    newest.note(1, {b"small": bytes(ROOM)}, ())  # a later value may be larger
    assert newest.size <= ROOM
    assert newest.get(b"small", 1) in (None, bytes(ROOM))
