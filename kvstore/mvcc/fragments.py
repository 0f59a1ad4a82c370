"""Range tombstones in memory: which timestamps deleted each stretch of the key space.

With keys on X and time on Y a range tombstone is a horizontal line. The ends of all lines cut
them into fragments: between two neighbouring boundaries the same timestamps cover every key. So a
look-up is one search, whatever order the tombstones were written in.

    keys     a       c       f       k
    t=9              |-------|                    boundaries  a    c      f    k
    t=5      |---------------|-------|            stacks     (5) (9,5)   (5)   ()

The boundaries lie in the leaves of the B-tree, whose nodes never change.

Invariants
1. Boundaries ascend strictly; below the first one nothing is deleted.
2. Each stack is strictly descending. The last stack is empty, the first is not.
3. Neighbouring stacks differ: state is a function of content, not of the order of writes.
4. The leaves hold the newest tombstone of each stack in the form of a stored key, so that a
   look-up compares bytes and decodes nothing.
5. An instance never changes: a writer makes a new one that shares all nodes it does not touch,
   and a reader keeps its own without a lock. A write costs O(log n) beside the stretches it
   covers.

Source: Pebble's fragmented range keys and CockroachDB's MVCC range tombstones; the tree copies
the path from its root to what changes, as LMDB and other B-trees without locks do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice, pairwise, repeat, zip_longest
from operator import neg
from typing import Final, NamedTuple, TypeAlias, cast

from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.codec.keys import (
    KEY_BYTES_LEAST,
    TERMINATOR,
    UNLIMITED,
    encode_suffix,
    escape,
    unescape,
)
from kvstore.limits import GC_LEAVES_PER_STEP, STRETCHES_MAX
from kvstore.loops.shapes import Nearby

# --------------------------------------------------------------------------------------------------
# A B-tree whose nodes never change: the stretches of the key space and the tombstones over each.
#
# A node has `keys` and `below`: the key at hand belongs to `below[bisect_right(keys, key)]`. In a
# branch `below` holds nodes; in a leaf it holds limits, in bytes as look-ups compare them. So a
# look-up takes the same step at each level, and a compiled one needs to know the depth alone.
#
#     branch   keys       m              below   (leaf)       (leaf)
#     leaf     keys    c      f          below   limit  limit  limit     stacks   over c, over f
#
# A tombstone over a whole leaf lies in the leaf's `over` and not in its stacks, so that it costs
# one copy of a stack for each leaf, not for each stretch.
#
# A write copies the nodes between the root and the leaves it changes, and shares all others.
#
# Invariants
# 1. Keys ascend strictly in a node. `below` has one more than `keys`, `stacks` as many.
# 2. The keys of a branch are the `start` of each of its nodes but the first.
# 3. All leaves are at one depth. No node is empty but the leaf of an empty tree.
# 4. `oldest` and `newest` enclose the timestamps in a node; they may enclose more.
# 5. A leaf has at most `STRETCHES_MAX` keys and a branch as many nodes.
# 6. No timestamp of a leaf's `over` is in one of its stacks too.
#
# Source: the copied paths of LMDB's B-tree; aggregates in nodes, and what covers a whole node kept
# in the node, as in any interval tree.

Stack: TypeAlias = "tuple[int, ...]"
"""Timestamps of the range tombstones over one stretch, newest first."""


def limit_of(newest: int) -> bytes:
    """The bytes behind an escaped key below which exactly its versions at or above the newest
    tombstone sort; under no tombstone, 0, all its versions."""
    return TERMINATOR + encode_suffix(newest) + b"\xff" if newest else UNLIMITED


def newest_in(stack: Stack, as_of: int) -> int:
    """The newest timestamp of `stack` at or below `as_of`, else 0. O(log n)."""
    if stack and stack[0] <= as_of:  # as a read of the present finds it
        return stack[0]
    at = bisect_left(stack, -as_of, key=neg)
    return stack[at] if at < len(stack) else 0


def between(stack: Stack, since: int, upto: int) -> Stack:
    """The timestamps of `stack` in `(since, upto]`. O(log n) beside them."""
    return stack[bisect_left(stack, -upto, key=neg) : bisect_left(stack, -since, key=neg)]


class Leaf(NamedTuple):
    """Neighbouring stretches: the tombstones of `stacks[i]` and of `over` lie over the keys from
    `keys[i]` on, and `below[i + 1]` is their limit."""

    keys: list[bytes]
    below: list[bytes]
    stacks: list[Stack]
    over: Stack
    oldest: int
    newest: int

    @property
    def start(self) -> bytes:
        """The first boundary."""
        return self.keys[0]

    def stack(self, at: int) -> Stack:
        """All tombstones from `keys[at]` on. O(n)."""
        return _merged(self.over, self.stacks[at])

    def newest_at(self, at: int, as_of: int) -> int:
        """The newest timestamp from `keys[at]` on, at or below `as_of`, else 0. O(log n)."""
        newest = newest_in(self.stacks[at], as_of)
        return max(newest, newest_in(self.over, as_of)) if self.over else newest


class Branch(NamedTuple):
    """Neighbouring nodes, all of one depth."""

    keys: list[bytes]
    below: list[Leaf] | list[Branch]
    start: bytes
    oldest: int
    newest: int


Node: TypeAlias = "Leaf | Branch"


class Tree(NamedTuple):
    """A root, and the number of steps from it to each leaf."""

    root: Node
    depth: int


EMPTY: Final = Tree(Leaf([], [UNLIMITED], [], (), TIMESTAMP_MAX, 0), 0)


LeafChange: TypeAlias = "Callable[[Leaf, bool], Leaf]"
"""The same keys of a leaf, or of a part of it, with other tombstones; and whether it is whole."""


def build(fragments: Iterable[tuple[bytes, Stack]]) -> Tree:
    """The tree of these boundaries, ascending, with the stack from each on. O(n) beside them."""
    found = iter(fragments)
    built: list[Node] = []
    while some := list(islice(found, STRETCHES_MAX)):
        stacks = [stack for _, stack in some]
        over: Stack = ()
        if all(stacks):
            common = set(stacks[0]).intersection(*stacks)
            over = tuple(t for t in stacks[0] if t in common)
            stacks = [_without(stack, common) for stack in stacks]
        built.append(leaf_of([key for key, _ in some], stacks, over))
    return _rooted(built, 0)


def leaf_of(keys: list[bytes], stacks: list[Stack], over: Stack) -> Leaf:
    """The leaf of these stretches. O(stretches)."""
    above = over[0] if over else 0
    limits = [limit_of(max(above, stack[0]) if stack else above) for stack in stacks]
    return Leaf(keys, [UNLIMITED, *limits], stacks, over, *_times(stacks, over))


def rewrite(
    tree: Tree, start: bytes, end: bytes, change: LeafChange, *, joins: bool = True
) -> Tree:
    """The tree with other tombstones over `start <= key < end`: `change` is asked once for each
    leaf that lies there, and for the part of a leaf. Boundaries at which nothing changes any more
    go, unless `joins` is false: a change may know that it leaves none. O(log n) beside the
    leaves."""
    assert start < end
    runs: list[Leaf] = []
    for leaf, beyond in _meeting(tree, start, end):
        rest, right = leaf, None
        if leaf.keys[0] < start:
            left, rest = _cut(leaf, start)
            runs.append(left)
        if beyond is None or end < beyond:
            if end <= rest.keys[0]:
                runs.append(rest)
                continue
            rest, right = _cut(rest, end)
        changed = change(rest, rest is leaf)
        runs.append(_distinct(changed) if joins else changed)
        if right:
            runs.append(right)
    if joins:
        runs = _bordered(runs, stack_below(tree, runs[0].start))
    return _rooted(_spliced(tree.root, tree.depth, start, end, _evened(runs)), tree.depth)


def stack_at(tree: Tree, key: bytes) -> Stack:
    """The stack over `key`. O(log n) beside it."""
    leaf, at = _found(tree, key)
    return leaf.stack(at) if at >= 0 else ()


def stretch_at(tree: Tree, key: bytes) -> tuple[bytes, bytes | None, Stack]:
    """The boundary at or below `key`, the next one, and the stack between them. O(log n) beside
    it."""
    leaf, beyond = next(leaves(tree, key, None))
    at = bisect_right(leaf.keys, key) - 1
    stack = leaf.stack(at) if at >= 0 else ()
    return leaf.keys[at] if at >= 0 else b"", [*leaf.keys, beyond][at + 1], stack


def newest_at(tree: Tree, key: bytes, as_of: int) -> int:
    """The newest timestamp over `key`, at or below `as_of`, else 0. O(log n)."""
    leaf, at = _found(tree, key)
    return leaf.newest_at(at, as_of) if at >= 0 else 0


def stack_below(tree: Tree, key: bytes) -> Stack:
    """The stack over the keys just below `key`. O(log n) beside it."""
    node = tree.root
    for _ in range(tree.depth):
        node = cast("Node", node.below[bisect_left(node.keys, key)])
    leaf = cast("Leaf", node)
    at = bisect_left(leaf.keys, key)
    return leaf.stack(at - 1) if at else ()


def leaves(
    tree: Tree, start: bytes, end: bytes | None, *, since: int = -1, upto: int = TIMESTAMP_MAX
) -> Iterator[tuple[Leaf, bytes | None]]:
    """The leaves that meet `start <= key < end`, each with the first key beyond it, in key order.

    Leaves without a timestamp in `since < t <= upto` may be left out. O(log n) beside the returned
    ones.
    """

    def below(node: Node, depth: int, beyond: bytes | None) -> Iterator[tuple[Leaf, bytes | None]]:
        if node.newest <= since or node.oldest > upto:
            return
        if depth == 0:
            yield cast("Leaf", node), beyond
            return
        first = bisect_right(node.keys, start)
        last = len(node.keys) if end is None else bisect_left(node.keys, end)
        for at in range(first, last + 1):
            bound = node.keys[at] if at < len(node.keys) else beyond
            yield from below(cast("Node", node.below[at]), depth - 1, bound)

    return below(tree.root, tree.depth, None)


# -- inside -----------------------------------------------------------------------------------


def _found(tree: Tree, key: bytes) -> tuple[Leaf, int]:
    """The leaf of `key`, and its boundary at or before `key`, -1 where there is none."""
    node = tree.root
    for _ in range(tree.depth):
        node = cast("Node", node.below[bisect_right(node.keys, key)])
    return cast("Leaf", node), bisect_right(node.keys, key) - 1


def _meeting(tree: Tree, start: bytes, end: bytes) -> list[tuple[Leaf, bytes | None]]:
    """The leaves of `start <= key <= end`, each with the first key beyond it; before them an empty
    stretch where `start` lies before all boundaries."""
    node, beyond = tree.root, None
    for _ in range(tree.depth):
        at = bisect_right(node.keys, start)
        if at < len(node.keys):
            beyond = node.keys[at]
        node = cast("Node", node.below[at])
    first = cast("Leaf", node)
    if beyond is None or end < beyond:  # one leaf, as mostly
        found = [(first, beyond)]
    else:
        found = list(leaves(tree, start, end + b"\x00"))
    if not first.keys or start < first.keys[0]:
        bare = Leaf([start], [UNLIMITED, UNLIMITED], [()], (), TIMESTAMP_MAX, 0)
        if not first.keys:
            return [(bare, None)]
        found.insert(0, (bare, first.keys[0]))
    return found


def _cut(leaf: Leaf, key: bytes) -> tuple[Leaf, Leaf]:
    """The parts of a leaf before and from `key`, which lies behind its first boundary."""
    keys, below, stacks, over, oldest, newest = leaf
    at = bisect_left(keys, key)
    left = Leaf(keys[:at], below[: at + 1], stacks[:at], over, oldest, newest)
    if at < len(keys) and keys[at] == key:
        right, limits, last = keys[at:], below[at + 1 :], stacks[at:]
    else:
        right, limits, last = [key, *keys[at:]], below[at:], stacks[at - 1 :]
    return left, Leaf(right, [UNLIMITED, *limits], last, over, oldest, newest)


def _distinct(leaf: Leaf) -> Leaf:
    """Without each boundary but the first at which the stack does not change."""
    keys, below, stacks, over, oldest, newest = leaf
    stays = [True, *(left != right for left, right in pairwise(stacks))]
    if all(stays):
        return leaf
    below = [UNLIMITED, *compress(below[1:], stays)]
    kept = list(compress(keys, stays)), below, list(compress(stacks, stays))
    return Leaf(*kept, over, oldest, newest)


def _bordered(runs: list[Leaf], before: Stack) -> list[Leaf]:
    """Without each first boundary at which the stack does not change. `before` lies before all."""
    kept: list[Leaf] = []
    for run in runs:
        rest: Leaf | None = run
        if len(before) == len(run.over) + len(run.stacks[0]) and before == run.stack(0):
            rest = _cut(run, run.keys[1])[1] if len(run.keys) > 1 else None
        if rest:
            kept.append(rest)
        before = run.stack(-1)
    return kept


def _evened(runs: list[Leaf]) -> list[Node]:
    """The same stretches in leaves of about one size, where neighbours have one `over`."""
    kept: list[Leaf] = []
    for run in runs:
        if kept and kept[-1].over is run.over:
            kept[-1] = _joined_leaf(kept[-1], run)
        else:
            kept.append(run)
    evened: list[Node] = []
    for run in kept:
        if len(run.keys) <= STRETCHES_MAX:
            evened.append(run)
            continue
        keys, below, stacks, over, _, _ = run
        for low, high in _cuts(len(keys)):
            limits, some = [UNLIMITED, *below[low + 1 : high + 1]], stacks[low:high]
            evened.append(Leaf(keys[low:high], limits, some, over, *_times(some, over)))
    return evened


def _spliced(node: Node, depth: int, low: bytes, high: bytes, coming: list[Node]) -> list[Node]:
    """The nodes that take the place of `node`, with the leaves `coming` in place of all leaves of
    the keys from `low` to `high`."""
    if depth == 0:
        return coming
    nodes = cast("list[Node]", node.below)
    first, last = bisect_right(node.keys, low), bisect_right(node.keys, high)
    changed = _spliced(nodes[first], depth - 1, low, high, coming)
    if first < last:
        changed += _spliced(nodes[last], depth - 1, low, high, [])
    # One neighbour on each side takes part, so that nodes that became small join.
    before, behind = max(first - 1, 0), last + 2
    joined = _joined(nodes[before:first] + changed + nodes[last + 1 : behind])
    starts = [node.start, *node.keys]  # asking the nodes would bring each into the cache
    return _branches(
        starts[:before] + [found.start for found in joined] + starts[behind:],
        nodes[:before] + joined + nodes[behind:],
        *_enclosing([node, *joined]),
    )


def _branches(starts: list[bytes], nodes: list[Node], oldest: int, newest: int) -> list[Node]:
    """The branches over these nodes, whose timestamps `oldest` and `newest` enclose."""
    below = cast("list[Leaf]", nodes)
    if len(nodes) <= STRETCHES_MAX:
        return [Branch(starts[1:], below, starts[0], oldest, newest)] if nodes else []
    return [
        Branch(starts[low + 1 : high], below[low:high], starts[low], *_enclosing(nodes[low:high]))
        for low, high in _cuts(len(nodes))
    ]


def _joined(nodes: list[Node]) -> list[Node]:
    """The same nodes, with each pair of neighbours in one that are small together."""
    kept: list[Node] = []
    for node in nodes:
        if kept and len(kept[-1].below) + len(node.below) <= STRETCHES_MAX // 2:
            node = _join(kept.pop(), node)
        kept.append(node)
    return kept


def _join(left: Node, right: Node) -> Node:
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        return _joined_leaf(left, right)
    below = cast("list[Leaf]", [*left.below, *right.below])
    keys = [*left.keys, right.start, *right.keys]
    return Branch(keys, below, left.start, *_enclosing([left, right]))


def _joined_leaf(left: Leaf, right: Leaf) -> Leaf:
    over, lefts, rights = left.over, left.stacks, right.stacks
    if over is not right.over:
        common = {*over} & {*right.over}
        over = tuple(t for t in over if t in common)
        lefts, rights = _pushed_down(left, common), _pushed_down(right, common)
    limits = left.below + right.below[1:]
    oldest, newest = min(left.oldest, right.oldest), max(left.newest, right.newest)
    return Leaf(left.keys + right.keys, limits, lefts + rights, over, oldest, newest)


def _pushed_down(leaf: Leaf, kept: set[int]) -> list[Stack]:
    """The stacks of a leaf that keeps these timestamps over all of them."""
    down = _without(leaf.over, kept)
    return [_merged(down, stack) for stack in leaf.stacks]


def _without(stack: Stack, timestamps: set[int]) -> Stack:
    return tuple(t for t in stack if t not in timestamps)


def _merged(left: Stack, right: Stack) -> Stack:
    """The timestamps of two stacks that share none."""
    if not left or not right or left[-1] > right[0]:
        return left + right
    return tuple(sorted(left + right, reverse=True))


def _rooted(nodes: list[Node], depth: int) -> Tree:
    """The tree over these nodes of one depth."""
    if not nodes:
        return EMPTY
    while len(nodes) > 1:
        nodes = _branches([node.start for node in nodes], nodes, *_enclosing(nodes))
        depth += 1
    root = nodes[0]
    while depth and not root.keys:
        root, depth = cast("Node", root.below[0]), depth - 1
    return Tree(root, depth)


def _times(stacks: list[Stack], over: Stack) -> tuple[int, int]:
    """The oldest and the newest timestamp of a leaf."""
    covering = [stack for stack in (over, *stacks) if stack]
    if not covering:
        return TIMESTAMP_MAX, 0
    return min(stack[-1] for stack in covering), max(stack[0] for stack in covering)


def _enclosing(nodes: Sequence[Node]) -> tuple[int, int]:
    return min(node.oldest for node in nodes), max(node.newest for node in nodes)


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    """Where to cut `count` items into the fewest pieces of about one size."""
    pieces = -(-count // STRETCHES_MAX)
    for piece in range(pieces):
        yield count * piece // pieces, count * (piece + 1) // pieces


# --------------------------------------------------------------------------------------------------
# The map of range tombstones.


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
        """All of it, whichever stored key was asked for: see `kvstore.loops.shapes.Nearby`."""
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

    def stretch(self, escaped: bytes) -> tuple[bytes, bytes | None, Stack]:
        """The escaped boundary at or below an escaped key, the next one, and the timestamps of all
        range tombstones between them, newest first. O(log n) beside them."""
        low, high, stack = stretch_at(self.tree, unescape(escaped))
        return escape(low), None if high is None else escape(high), stack

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
