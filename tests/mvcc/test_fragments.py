"""The fragment map against brute force: at every key, the set of timestamps over it."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.codec.keys import TAIL_BYTES, TERMINATOR, VALUE, encode_suffix, frame
from kvstore.mvcc import Cover, Fragments, RangeTombstone
from kvstore.mvcc.fragments import between, build, leaves, newest_in
from kvstore.mvcc.passes import choose
from kvstore.testing.strategies import KEYS, bounds, spans
from tests.harness.bounds import bounds as limits
from tests.mvcc.invariants import check_fragments

tombstones = st.builds(
    lambda span, timestamp: RangeTombstone(span[0], span[1], timestamp), spans, st.integers(1, 6)
)

tombstone_lists = st.lists(tombstones, max_size=8)
times = st.integers(0, 7)


small = st.integers(2, 5)
"""Stretches of a node; so few that a handful of tombstones makes a deep tree."""

cells = st.integers(0, 30)
edits = st.one_of(
    st.tuples(st.just("add"), cells, st.integers(1, 9)),
    st.tuples(st.just("clear"), cells, st.integers(1, 9)),
    st.tuples(st.just("forget"), st.integers(0, 60), st.just(0)),
)


def over(found: list[RangeTombstone], key: bytes) -> tuple[int, ...]:
    return tuple(sorted({t for start, end, t in found if start <= key < end}, reverse=True))


def probes() -> list[bytes]:
    return sorted({*KEYS, *(key + b"\x00" for key in KEYS)})


@given(tombstone_lists)
def test_stacks_are_what_covers_each_key(found: list[RangeTombstone]) -> None:
    fragments = Fragments.of(found)
    check_fragments(fragments)
    for key in probes():
        assert fragments.stack(key) == over(found, key)


@given(st.sets(st.integers(1, 20)), st.integers(0, 21), st.integers(0, 21))
def test_a_stack_is_searched_by_time(found: set[int], since: int, upto: int) -> None:
    stack = tuple(sorted(found, reverse=True))
    assert newest_in(stack, upto) == max((t for t in stack if t <= upto), default=0)
    assert between(stack, since, upto) == tuple(t for t in stack if since < t <= upto)


class Counted(int):
    """A timestamp that counts how often a search compares it."""

    compared = 0

    def _count(self) -> None:
        Counted.compared += 1

    def __le__(self, other: int) -> bool:
        self._count()
        return super().__le__(other)

    def __eq__(self, other: object) -> bool:
        self._count()
        return super().__eq__(other)

    def __neg__(self) -> Counted:  # as a search of descending times compares
        self._count()
        return Counted(super().__neg__())

    __hash__ = int.__hash__


def test_a_read_below_a_year_of_range_tombstones_searches_them() -> None:
    """It walked over all newer ones: a window of large values under them took minutes."""
    many = 1 << 12
    stack = tuple(Counted(at) for at in range(2 * many, 0, -2))
    fragments = Fragments(build([(b"a", stack), (b"m", ())]))
    near = fragments.nearby(7)
    assert near is not None
    reads: list[Callable[[], object]] = [
        lambda: fragments.newest(b"k", 7),
        lambda: fragments.cover(Span(), 7),
        lambda: near(b"k" + TERMINATOR + bytes(TAIL_BYTES)),
        lambda: fragments.tombstones(Span(), since=5, upto=9),
    ]
    for read in reads:
        Counted.compared = 0
        read()
        assert Counted.compared <= 100
    Counted.compared = 0
    revisions = [(at, None) for at in stack]
    assert choose(revisions, stack, since=0, upto=3 * many, latest=False) == []
    assert Counted.compared <= 10 * many


@given(small, st.lists(tombstones, max_size=20), st.randoms())
def test_any_order_and_any_way_of_building_gives_the_same_map(
    most: int, found: list[RangeTombstone], pick: Random
) -> None:
    with limits(STRETCHES_MAX=most):
        whole = Fragments.of(found)
        check_fragments(whole, most=most)
        pick.shuffle(found)
        assert Fragments.of(found) == whole
        grown = Fragments()
        for tombstone in found:
            grown = grown.adding(tombstone)
            check_fragments(grown, most=most)
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


@given(small, st.lists(edits, max_size=60))
def test_a_deep_tree_is_what_its_edits_say_and_older_ones_stay(
    most: int, drawn: list[tuple[str, int, int]]
) -> None:
    def key(cell: int) -> bytes:
        return b"%03d" % cell

    stacks: list[tuple[int, ...]] = [()] * 40
    with limits(STRETCHES_MAX=most):
        fragments, before = Fragments(), Fragments()
        for timestamp, (edit, first, count) in enumerate(drawn, 1):
            kept, before = before, fragments
            kept_pieces = list(kept.pieces(Span()))
            for cell in range(len(stacks)):
                if edit == "forget":
                    stacks[cell] = tuple(t for t in stacks[cell] if t > first)
                elif first <= cell < first + count:
                    stacks[cell] = (timestamp, *stacks[cell]) if edit == "add" else ()
            if edit == "add":
                tombstone = RangeTombstone(key(first), key(first + count), timestamp)
                fragments = fragments.adding(tombstone)
            elif edit == "clear":
                fragments = fragments.clearing(key(first), key(first + count))
            else:
                fragments = fragments.forgetting(first)
            check_fragments(fragments, most=most)
            assert [fragments.stack(key(cell)) for cell in range(len(stacks))] == stacks
            assert list(kept.pieces(Span())) == kept_pieces
        assert Fragments.of(fragments.tombstones(Span(), since=0, upto=99)) == fragments


@given(small, tombstone_lists, times, st.booleans())
def test_a_pass_learns_of_the_tombstones_near_each_key(
    most: int, found: list[RangeTombstone], as_of: int, reverse: bool
) -> None:
    with limits(STRETCHES_MAX=most):
        fragments = Fragments.of(found)
    nearby = fragments.nearby(as_of)
    assert (nearby is None) == (not fragments)
    for key in sorted(probes(), reverse=reverse) if nearby else ():
        stored = frame(key) + encode_suffix(3) + VALUE
        low, high, bounds, newest = nearby(stored)
        assert low <= stored
        assert high is None or stored < high
        assert newest[bisect.bisect_right(bounds, stored)] == fragments.newest(key, as_of)


@given(small, tombstone_lists, times, st.randoms())
def test_stretches_hold_old_tombstones_whole_and_may_be_forgotten_in_any_order(
    most: int, found: list[RangeTombstone], upto: int, pick: Random
) -> None:
    with limits(STRETCHES_MAX=most, GC_LEAVES_PER_STEP=1):
        fragments = Fragments.of(found)
        spans = list(fragments.stretches(upto))
        old = fragments.tombstones(Span(), since=0, upto=upto)
        assert all(a.end is not None and a.end <= b.start for a, b in pairwise(spans))
        assert all(
            any(t.start in span and t.end <= (span.end or b"") for span in spans) for t in old
        )
        pick.shuffle(spans)
        kept = fragments
        for span in spans:
            kept = kept.forgetting(upto, [span])
        assert kept == fragments.forgetting(upto)


@given(tombstone_lists)
def test_a_tombstone_lies_across_a_key_that_is_not_its_first(found: list[RangeTombstone]) -> None:
    fragments = Fragments.of(found)
    joined = fragments.tombstones(Span(), since=0, upto=TIMESTAMP_MAX)
    for key in probes():
        assert fragments.across(key) == {t for start, end, t in joined if start < key < end}


def test_a_write_shares_the_nodes_that_it_does_not_touch() -> None:
    many = [
        RangeTombstone(b"%06d" % row, b"%06d" % (row + 1), row + 1) for row in range(0, 9999, 2)
    ]
    fragments = Fragments.of(many)
    known = {id(leaf) for leaf, _ in leaves(fragments.tree, b"", None)}
    more = fragments.adding(RangeTombstone(b"004001", b"004001x", 99_999))
    new = [leaf for leaf, _ in leaves(more.tree, b"", None) if id(leaf) not in known]
    assert 1 <= len(new) <= 2
    assert list(fragments.pieces(Span())) == [(*piece[:2], (piece[2],)) for piece in many]


def test_deletes_up_to_a_moving_end_do_not_copy_a_stack_for_each_stretch() -> None:
    """Two thousand of them took 22 s: each copied the stack of each stretch before it."""
    many = 2000
    nested = [RangeTombstone(b"log/", b"log/%06d" % row, row) for row in range(1, many + 1)]
    grown = Fragments()
    for tombstone in nested:
        grown = grown.adding(tombstone)
    for fragments in (grown, Fragments.of(nested)):
        check_fragments(fragments)
        held = sum(
            len(leaf.over) + sum(map(len, leaf.stacks))
            for leaf, _ in leaves(fragments.tree, b"", None)
        )
        assert held <= many**2 // 16
        assert fragments.newest(b"log/000500", many - 7) == many - 7
        assert fragments.newest(b"log/000500", 500) == 0
        assert fragments.tombstones(Span(), since=0, upto=many) == nested
        assert not fragments.forgetting(many)


def test_a_window_of_tombstones_looks_at_no_leaf_without_any() -> None:
    many = [
        RangeTombstone(b"%06d" % row, b"%06d" % (row + 1), row + 1) for row in range(0, 9999, 2)
    ]
    grown = Fragments()
    for tombstone in many:
        grown = grown.adding(tombstone)
    for tree in (Fragments.of(many).tree, grown.tree):
        assert len(list(leaves(tree, b"", None))) > 100
        assert len(list(leaves(tree, b"", None, since=9000, upto=9001))) == 1
        assert len(list(leaves(tree, b"", None, upto=9))) == 1
        assert not list(leaves(tree, b"", None, since=9999))
