"""Range tombstones in memory: which timestamps deleted each stretch of the key space.

With keys on X and time on Y a range tombstone is a horizontal line. The ends of all lines cut
them into fragments: between two neighbouring boundaries the same timestamps cover every key. So a
look-up is one search, whatever order the tombstones were written in.

    keys     a       c       f       k
    t=9              |-------|                    boundaries  a    c      f    k
    t=5      |---------------|-------|            stacks     (5) (9,5)   (5)   ()

The boundaries lie in the leaves of a B-tree (`kvstore.mvcc.stretches`) whose nodes never change.

Invariants
1. Boundaries ascend strictly; below the first one nothing is deleted.
2. Each stack is strictly descending. The last stack is empty, the first is not.
3. Neighbouring stacks differ: state is a function of content, not of the order of writes.
4. The leaves hold the newest tombstone of each stack in the form of a stored key, so that a look-up
   compares bytes and decodes nothing.
5. An instance never changes: a writer makes a new one that shares all nodes it does not touch, and
   a reader keeps its own without a lock. A write costs O(log n) beside the stretches it covers.

Source: Pebble's fragmented range keys and CockroachDB's MVCC range tombstones; the tree copies the
path from its root to what changes, as LMDB and other B-trees without locks do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, repeat, zip_longest
from typing import NamedTuple

from kvstore.codec.keys import KEY_BYTES_LEAST, UNLIMITED
from kvstore.codec.ordered import escape, unescape
from kvstore.limits import GC_LEAVES_PER_STEP
from kvstore.loops.contract import Nearby
from kvstore.mvcc.stretches import (
    EMPTY,
    Leaf,
    LeafChange,
    Stack,
    Tree,
    between,
    build,
    leaf_of,
    leaves,
    limit_of,
    newest_at,
    rewrite,
    stack_at,
    stack_below,
)
from kvstore.span import Span
from kvstore.timestamp import TIMESTAMP_MAX


class RangeTombstone(NamedTuple):
    """The keys `start <= key < end` were deleted at `timestamp`."""

    start: bytes
    end: bytes
    timestamp: int


class Cover(NamedTuple):
    """The newest range tombstones that a read sees: `newest[i]` from the key `starts[i]` on."""

    starts: list[bytes]
    newest: list[int]

    def nearby(self, stored: bytes) -> Nearby:
        """All of it, whichever stored key was asked for: see `kvstore.loops.contract.Nearby`."""
        return b"", None, list(map(escape, self.starts)), [0, *self.newest]


class Fragments:
    """An immutable map from keys to the stack of range tombstones over them.

    `tree` is for reading.
    """

    __slots__ = ("tree",)

    def __init__(self, tree: Tree = EMPTY) -> None:
        self.tree = tree

    @classmethod
    def of(cls, tombstones: Iterable[tuple[bytes, bytes, int]]) -> Fragments:
        """Build from range tombstones, or such tuples, in any order. O(n log n + n * depth); 1 us
        each where they are ordered by start and few overlap."""
        return cls(build(_fragmented(sorted(tombstones))))

    def __bool__(self) -> bool:
        return bool(self.tree.root.keys)

    def __len__(self) -> int:
        """The number of boundaries. O(n / 64)."""
        return sum(len(leaf.keys) for leaf, _ in leaves(self.tree, b"", None))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fragments):
            return NotImplemented
        return all(mine == theirs for mine, theirs in zip_longest(self._items(), other._items()))

    __hash__ = None  # type: ignore[assignment]

    # -- reading ----------------------------------------------------------------------------

    def stack(self, key: bytes) -> Stack:
        """Timestamps of all range tombstones over `key`, newest first. O(log n) beside them."""
        return stack_at(self.tree, key)

    def newest(self, key: bytes, as_of: int) -> int:
        """Timestamp of the newest range tombstone over `key` at or below `as_of`, else 0.
        O(log n)."""
        return newest_at(self.tree, key, as_of)

    def across(self, key: bytes) -> set[int]:
        """Timestamps of the range tombstones that lie over `key` and over the keys just below it.
        O(log n) beside them."""
        return {*stack_below(self.tree, key)} & {*self.stack(key)}

    def pieces(
        self, span: Span, *, since: int = 0, upto: int = TIMESTAMP_MAX
    ) -> Iterator[tuple[bytes, bytes, Stack]]:
        """Non-empty fragments `(start, end, stack)` that meet `span`, cut to it, ascending.

        Fragments without a timestamp in `since < t <= upto` may be left out: most of them are,
        and cost nothing.
        """
        for leaf, bounds, first in self._within(span, since=since, upto=upto):
            for at, (start, end) in enumerate(pairwise(bounds), first):
                if stack := leaf.stack(at):
                    yield start, end, stack

    def nearby(self, as_of: int) -> Callable[[bytes], Nearby] | None:
        """How a pass over `data` that reads at `as_of` learns of the tombstones near a stored key;
        None where there are none. A call costs one leaf, however many tombstones there are."""
        if not self:
            return None

        def near(stored: bytes) -> Nearby:
            key = unescape(stored[:-KEY_BYTES_LEAST])
            leaf, beyond = next(leaves(self.tree, key, None))
            bounds = list(map(escape, leaf.keys))
            newest = [leaf.newest_at(at, as_of) for at in range(len(bounds))]
            low = bounds[0] if key >= leaf.keys[0] else b""
            return low, None if beyond is None else escape(beyond), bounds, [0, *newest]

        return near

    def cover(self, span: Span, as_of: int) -> Cover:
        """The tombstones that a scan of `span` at `as_of` sees. O(fragments in the span)."""
        starts: list[bytes] = []
        newest: list[int] = []
        for leaf, bounds, first in self._within(span, upto=as_of):
            for at, (start, end) in enumerate(pairwise(bounds), first):
                timestamp = leaf.newest_at(at, as_of)
                if not timestamp:
                    continue
                if starts and starts[-1] == start:
                    newest[-1] = timestamp
                else:
                    starts.append(start)
                    newest.append(timestamp)
                starts.append(end)
                newest.append(0)
        return Cover(starts, newest)

    def tombstones(
        self, span: Span, *, since: int, upto: int, latest: bool = False
    ) -> list[RangeTombstone]:
        """Range tombstones in `(since, upto]`, cut to `span` and joined where they abut.

        With `latest` only the newest of each fragment. Ordered by start, then oldest first.
        """
        longest: list[RangeTombstone] = []
        growing: dict[int, int] = {}

        def lies(timestamp: int, start: bytes, end: bytes) -> None:
            index = growing.get(timestamp)
            if index is not None and longest[index].end == start:
                longest[index] = longest[index]._replace(end=end)
            else:
                growing[timestamp] = len(longest)
                longest.append(RangeTombstone(start, end, timestamp))

        for leaf, bounds, first in self._within(span, since=since, upto=upto):
            if not latest:
                for timestamp in between(leaf.over, since, upto):
                    lies(timestamp, bounds[0], bounds[-1])
            for at, (start, end) in enumerate(pairwise(bounds), first):
                if latest:
                    newest = leaf.newest_at(at, upto)
                    found: Stack = (newest,) if newest > since else ()
                else:
                    found = between(leaf.stacks[at], since, upto)
                for timestamp in found:
                    lies(timestamp, start, end)
        longest.sort(key=lambda t: (t.start, t.timestamp))
        return longest

    # -- writing ----------------------------------------------------------------------------

    def adding(self, tombstone: RangeTombstone) -> Fragments:
        """This map with one more tombstone. Beside O(log n) it costs a copy of a stack for each
        leaf that it covers if it is the newest there, else one for each stretch."""
        start, end, timestamp = tombstone
        joins = timestamp <= self.tree.root.newest
        return Fragments(rewrite(self.tree, start, end, _laid(timestamp), joins=joins))

    def clearing(self, start: bytes, end: bytes) -> Fragments:
        """This map with nothing in `[start, end)`."""

        def bared(leaf: Leaf, is_whole: bool) -> Leaf:
            return leaf_of(leaf.keys, [()] * len(leaf.keys), ())

        return Fragments(rewrite(self.tree, start, end, bared))

    def stretches(self, upto: int) -> Iterator[Span]:
        """Spans, ascending and disjoint, that hold all range tombstones at or below `upto`, each
        whole. A span has `GC_LEAVES_PER_STEP` leaves of the tree, and more where a tombstone lies
        across them. Costs the leaves near those tombstones."""
        start, end, count = b"", b"", 0
        last: Stack = ()
        for leaf, beyond in leaves(self.tree, b"", None, upto=upto):
            is_across = not {*between(last, 0, upto)}.isdisjoint(leaf.stack(0))
            if count and (leaf.keys[0] != end or (count >= GC_LEAVES_PER_STEP and not is_across)):
                yield Span(start, end)
                count = 0
            if not count:
                start = leaf.keys[0]
            end = leaf.keys[-1] if beyond is None else beyond
            last = leaf.stack(-1)
            count += 1
        if start < end:
            yield Span(start, end)

    def forgetting(self, upto: int, spans: Iterable[Span] | None = None) -> Fragments:
        """This map without the timestamps at or below `upto`, or without the ones in `spans` only.
        Costs in proportion to the stretches near those timestamps, or in the spans."""

        def kept(leaf: Leaf, is_whole: bool) -> Leaf:
            newer = [between(stack, upto, TIMESTAMP_MAX) for stack in leaf.stacks]
            return leaf_of(leaf.keys, newer, between(leaf.over, upto, TIMESTAMP_MAX))

        tree = self.tree
        for span in self.stretches(upto) if spans is None else spans:
            assert span.end is not None
            tree = rewrite(tree, span.start, span.end, kept)
        return Fragments(tree)

    # -- inside -----------------------------------------------------------------------------

    def _within(
        self, span: Span, *, since: int = -1, upto: int = TIMESTAMP_MAX
    ) -> Iterator[tuple[Leaf, list[bytes], int]]:
        """The leaves that meet `span`, each with the bounds of its stretches there, ascending and
        cut to the span, and the place of the first of these stretches in the leaf."""
        for leaf, beyond in leaves(self.tree, span.start, span.end, since=since, upto=upto):
            keys = leaf.keys
            first = max(bisect_right(keys, span.start) - 1, 0)
            last = len(keys) if span.end is None else bisect_left(keys, span.end)
            if first >= last:
                continue
            bounds = keys[first:last]
            bounds[0] = max(bounds[0], span.start)
            end = keys[last] if last < len(keys) else beyond
            if end is not None:
                bounds.append(end if span.end is None else min(end, span.end))
            yield leaf, bounds, first

    def _items(self) -> Iterator[tuple[bytes, Stack]]:
        """The boundaries, each with the stack from there on."""
        for leaf, _ in leaves(self.tree, b"", None):
            yield from zip(leaf.keys, map(leaf.stack, range(len(leaf.keys))), strict=True)


def _laid(timestamp: int) -> LeafChange:
    """The change by one more tombstone."""
    limit = limit_of(timestamp)

    def laid(leaf: Leaf, is_whole: bool) -> Leaf:
        keys, _, stacks, over, oldest, newest = leaf
        if timestamp > newest:
            if is_whole:
                over = (timestamp, *over)
            else:
                stacks = [(timestamp, *stack) for stack in stacks]
            below = [UNLIMITED, *repeat(limit, len(keys))]
            return Leaf(keys, below, stacks, over, min(oldest, timestamp), timestamp)
        if timestamp in over:
            return leaf
        stacks = [
            (timestamp, *stack)
            if not stack or timestamp > stack[0]
            else tuple(sorted({timestamp, *stack}, reverse=True))
            for stack in stacks
        ]
        return leaf_of(keys, stacks, over)

    return laid


def _fragmented(found: list[tuple[bytes, bytes, int]]) -> Iterator[tuple[bytes, Stack]]:
    """The boundaries of sorted tombstones, each with the stack from there on."""
    starts = [start for start, _, _ in found]
    at, count = 0, len(found)
    held: bytes | None = None
    before: Stack = ()
    while at < count:
        start, end, timestamp = found[at]
        first = at
        at += 1
        while at < count and starts[at] < end:  # rare: some overlap
            end = max(end, found[at][1])
            at += 1
        if held is not None and held != start:
            yield held, ()
            before = ()
        if at == first + 1:
            fragments: Iterable[tuple[bytes, Stack]] = [(start, (timestamp,))]
        else:
            fragments = _swept(found[first:at])
        for key, stack in fragments:
            if stack != before:
                yield key, stack
                before = stack
        held = end
    if held is not None:
        yield held, ()


def _swept(tombstones: list[tuple[bytes, bytes, int]]) -> Iterator[tuple[bytes, Stack]]:
    """The ends of tombstones that overlap, but the last, each with the stack from there on."""
    opens: dict[bytes, list[int]] = {}
    closes: dict[bytes, list[int]] = {}
    for start, end, timestamp in tombstones:
        opens.setdefault(start, []).append(timestamp)
        closes.setdefault(end, []).append(timestamp)
    live: dict[int, int] = {}
    for key in sorted(opens.keys() | closes.keys())[:-1]:
        for timestamp in closes.get(key, ()):
            live[timestamp] -= 1
            if not live[timestamp]:
                del live[timestamp]
        for timestamp in opens.get(key, ()):
            live[timestamp] = live.get(timestamp, 0) + 1
        yield key, tuple(sorted(live, reverse=True))
