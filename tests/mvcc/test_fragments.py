"""The fragment map against brute force: at every key, the set of timestamps over it."""

from __future__ import annotations

import bisect
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.mvcc import Cover, Fragments, RangeTombstone
from kvstore.span import Span
from kvstore.testing.strategies import KEYS, bounds, spans

tombstones = st.builds(
    lambda span, timestamp: RangeTombstone(span[0], span[1], timestamp), spans, st.integers(1, 6)
)
tombstone_lists = st.lists(tombstones, max_size=8)
times = st.integers(0, 7)


def over(found: list[RangeTombstone], key: bytes) -> tuple[int, ...]:
    return tuple(sorted({t for start, end, t in found if start <= key < end}, reverse=True))


def probes() -> list[bytes]:
    return sorted({*KEYS, *(key + b"\x00" for key in KEYS)})


@given(tombstone_lists)
def test_stacks_are_what_covers_each_key(found: list[RangeTombstone]) -> None:
    fragments = Fragments.of(found)
    fragments._check()
    for key in probes():
        assert fragments.stack(key) == over(found, key)


@given(tombstone_lists, st.randoms())
def test_any_order_and_any_way_of_building_gives_the_same_map(
    found: list[RangeTombstone], pick: Random
) -> None:
    whole = Fragments.of(found)
    pick.shuffle(found)
    assert Fragments.of(found) == whole
    grown = Fragments()
    for tombstone in found:
        grown = grown.adding(tombstone)
        grown._check()
    assert grown == whole


@given(tombstone_lists, tombstones)
def test_a_write_leaves_the_map_it_began_with_alone(
    found: list[RangeTombstone], more: RangeTombstone
) -> None:
    fragments = Fragments.of(found)
    fragments.adding(more)
    assert fragments == Fragments.of(found)
    assert fragments.adding(more).adding(more) == fragments.adding(more)


def covering(cover: Cover, key: bytes) -> int:
    """The timestamp of the newest tombstone over `key`, 0 where there is none."""
    index = bisect.bisect_right(cover.starts, key) - 1
    return cover.newest[index] if index >= 0 else 0


@given(tombstone_lists, times)
def test_newest_and_cover_see_the_newest_at_or_below(
    found: list[RangeTombstone], as_of: int
) -> None:
    fragments = Fragments.of(found)
    cover = fragments.cover(Span(), as_of)
    assert all(a < b for a, b in pairwise(cover.starts))
    for key in probes():
        newest = next((t for t in over(found, key) if t <= as_of), 0)
        assert fragments.newest(key, as_of) == covering(cover, key) == newest


@given(tombstone_lists, bounds, times)
def test_cover_of_a_span_answers_for_its_keys(
    found: list[RangeTombstone], bound: tuple[bytes, bytes | None], as_of: int
) -> None:
    span, fragments = Span(*bound), Fragments.of(found)
    cover = fragments.cover(span, as_of)
    for key in probes():
        if key in span:
            assert covering(cover, key) == fragments.newest(key, as_of)


@given(tombstone_lists, bounds, times, times, st.booleans())
def test_tombstones_of_a_window_are_cut_to_the_span_and_as_long_as_they_can_be(
    found: list[RangeTombstone],
    bound: tuple[bytes, bytes | None],
    since: int,
    upto: int,
    latest: bool,
) -> None:
    span = Span(*bound)
    given_out = Fragments.of(found).tombstones(span, since=since, upto=upto, latest=latest)
    assert given_out == sorted(given_out, key=lambda t: (t.start, t.timestamp))
    for key in probes():
        window = [t for t in over(found, key) if since < t <= upto] if key in span else []
        assert over(given_out, key) == tuple(window[:1] if latest else window)
    for timestamp in {t.timestamp for t in given_out}:
        same = sorted(t for t in given_out if t.timestamp == timestamp)
        assert all(a.end < b.start for a, b in pairwise(same))
