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

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from kvstore.codec.keys import KEY_BYTES_LEAST
from kvstore.codec.ordered import escape, unescape
from kvstore.limits import GC_LEAVES_PER_STEP
from kvstore.loops.contract import Nearby
from kvstore.mvcc.stretches import (
    EMPTY,
    Stack,
    Tree,
    between,
    build,
    leaves,
    newest_in,
    splice,
    stack_at,
    surroundings,
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
        boundaries: list[bytes] = []
        stacks: list[Stack] = []
        found = sorted(tombstones)
        starts = [start for start, _, _ in found]
        at, count = 0, len(found)
        while at < count:
            start, end, timestamp = found[at]
            at += 1
            if at < count and starts[at] < end:  # rare: some overlap
                first = at - 1
                while at < count and starts[at] < end:
                    end = max(end, found[at][1])
                    at += 1
                fragments = _fragmented(found[first:at])
            else:
                fragments = [(start, (timestamp,)), (end, ())]
            if boundaries and boundaries[-1] == start:
                boundaries.pop()
                stacks.pop()
                if stacks[-1] == fragments[0][1]:
                    del fragments[0]
            for key, stack in fragments:
                boundaries.append(key)
                stacks.append(stack)
        return cls(build(boundaries, stacks))

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
        """Timestamps of all range tombstones over `key`, newest first. O(log n)."""
        return stack_at(self.tree, key)

    def newest(self, key: bytes, as_of: int) -> int:
        """Timestamp of the newest range tombstone over `key` at or below `as_of`, else 0.
        O(log n)."""
        return newest_in(self.stack(key), as_of)

    def across(self, key: bytes) -> set[int]:
        """Timestamps of the range tombstones that lie over `key` and over the keys just below it.
        O(log n)."""
        below, _, _ = surroundings(self.tree, key, key + b"\x00")
        return {*below} & {*self.stack(key)}

    def pieces(
        self, span: Span, *, since: int = 0, upto: int = TIMESTAMP_MAX
    ) -> Iterator[tuple[bytes, bytes, Stack]]:
        """Non-empty fragments `(start, end, stack)` that meet `span`, cut to it, ascending.

        Fragments without a timestamp in `since < t <= upto` may be left out: most of them are,
        and cost nothing.
        """
        for leaf, beyond in leaves(self.tree, span.start, span.end, since=since, upto=upto):
            keys = leaf.keys
            first = max(bisect_right(keys, span.start) - 1, 0)
            ends = keys[first + 1 :] if beyond is None else [*keys[first + 1 :], beyond]
            for start, end, stack in zip(keys[first:], ends, leaf.stacks[first:], strict=False):
                if span.end is not None and start >= span.end:
                    return
                if stack and end > span.start:
                    yield (
                        max(start, span.start),
                        end if span.end is None else min(end, span.end),
                        stack,
                    )

    def nearby(self, as_of: int) -> Callable[[bytes], Nearby] | None:
        """How a pass over `data` that reads at `as_of` learns of the tombstones near a stored key;
        None where there are none. A call costs one leaf, however many tombstones there are."""
        if not self:
            return None

        def near(stored: bytes) -> Nearby:
            key = unescape(stored[:-KEY_BYTES_LEAST])
            leaf, beyond = next(leaves(self.tree, key, None))
            bounds = list(map(escape, leaf.keys))
            newest = [newest_in(stack, as_of) for stack in leaf.stacks]
            low = bounds[0] if key >= leaf.keys[0] else b""
            return low, None if beyond is None else escape(beyond), bounds, [0, *newest]

        return near

    def cover(self, span: Span, as_of: int) -> Cover:
        """The tombstones that a scan of `span` at `as_of` sees. O(fragments in the span)."""
        starts: list[bytes] = []
        newest: list[int] = []
        for start, end, stack in self.pieces(span, upto=as_of):
            timestamp = newest_in(stack, as_of)
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
        for start, end, stack in self.pieces(span, since=since, upto=upto):
            window = between(stack, since, upto)
            for timestamp in window[:1] if latest else window:
                index = growing.get(timestamp)
                if index is not None and longest[index].end == start:
                    longest[index] = longest[index]._replace(end=end)
                else:
                    growing[timestamp] = len(longest)
                    longest.append(RangeTombstone(start, end, timestamp))
        longest.sort(key=lambda t: (t.start, t.timestamp))
        return longest

    # -- writing ----------------------------------------------------------------------------

    def adding(self, tombstone: RangeTombstone) -> Fragments:
        """This map with one more tombstone."""
        start, end, timestamp = tombstone

        def push(stack: Stack) -> Stack:
            if not stack or timestamp > stack[0]:
                return (timestamp, *stack)
            return tuple(sorted({timestamp, *stack}, reverse=True))

        return self._changing(start, end, push)

    def clearing(self, start: bytes, end: bytes) -> Fragments:
        """This map with nothing in `[start, end)`."""
        return self._changing(start, end, lambda stack: ())

    def stretches(self, upto: int) -> Iterator[Span]:
        """Spans, ascending and disjoint, that hold all range tombstones at or below `upto`, each
        whole. A span has `GC_LEAVES_PER_STEP` leaves of the tree, and more where a tombstone lies
        across them. Costs the leaves near those tombstones."""
        start, end, count = b"", b"", 0
        last: Stack = ()
        for leaf, beyond in leaves(self.tree, b"", None, upto=upto):
            is_across = not {t for t in last if t <= upto}.isdisjoint(leaf.stacks[0])
            if count and (leaf.keys[0] != end or (count >= GC_LEAVES_PER_STEP and not is_across)):
                yield Span(start, end)
                count = 0
            if not count:
                start = leaf.keys[0]
            end = leaf.keys[-1] if beyond is None else beyond
            last = leaf.stacks[-1]
            count += 1
        if start < end:
            yield Span(start, end)

    def forgetting(self, upto: int, spans: Iterable[Span] | None = None) -> Fragments:
        """This map without the timestamps at or below `upto`, or without the ones in `spans` only.
        Costs in proportion to the stretches near those timestamps, or in the spans."""
        kept = self
        for span in self.stretches(upto) if spans is None else spans:
            assert span.end is not None
            kept = kept._changing(
                span.start, span.end, lambda stack: tuple(t for t in stack if t > upto)
            )
        return kept

    # -- inside -----------------------------------------------------------------------------

    def _changing(self, start: bytes, end: bytes, change: Callable[[Stack], Stack]) -> Fragments:
        assert start < end
        before, found, last = surroundings(self.tree, start, end)
        changed = [(key, change(stack)) for key, stack in found]
        if not changed or changed[0][0] != start:
            changed.insert(0, (start, change(before)))
        changed.append((end, last))
        kept = list(_distinct(changed, leading=before))
        keys, stacks = [key for key, _ in kept], [stack for _, stack in kept]
        return Fragments(splice(self.tree, start, end, keys, stacks))

    def _items(self) -> Iterator[tuple[bytes, Stack]]:
        """The boundaries, each with the stack from there on."""
        for leaf, _ in leaves(self.tree, b"", None):
            yield from zip(leaf.keys, leaf.stacks, strict=True)


def _fragmented(tombstones: list[tuple[bytes, bytes, int]]) -> list[tuple[bytes, Stack]]:
    """The fragments of tombstones in any order: a sweep over their ends."""
    opens: dict[bytes, list[int]] = {}
    closes: dict[bytes, list[int]] = {}
    for start, end, timestamp in tombstones:
        opens.setdefault(start, []).append(timestamp)
        closes.setdefault(end, []).append(timestamp)
    found: list[tuple[bytes, Stack]] = []
    live: dict[int, int] = {}
    for key in sorted(opens.keys() | closes.keys()):
        for timestamp in closes.get(key, ()):
            live[timestamp] -= 1
            if not live[timestamp]:
                del live[timestamp]
        for timestamp in opens.get(key, ()):
            live[timestamp] = live.get(timestamp, 0) + 1
        found.append((key, tuple(sorted(live, reverse=True))))
    return list(_distinct(found, leading=()))


def _distinct(
    fragments: Iterable[tuple[bytes, Stack]], *, leading: Stack
) -> Iterator[tuple[bytes, Stack]]:
    """Without each boundary at which the stack does not change. `leading` lies before the first."""
    for key, stack in fragments:
        if stack != leading:
            yield key, stack
            leading = stack
