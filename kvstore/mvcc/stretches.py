"""A B-tree whose nodes never change: the stretches of the key space and the tombstones over each.

A node has `keys` and `below`: the key at hand belongs to `below[bisect_right(keys, key)]`. In a
branch `below` holds nodes; in a leaf it holds limits, in bytes as look-ups compare them. So a
look-up takes the same step at each level, and a compiled one needs to know the depth alone.

    branch   keys       m              below   (leaf)       (leaf)
    leaf     keys    c      f          below   limit  limit  limit     stacks   over c, over f

A tombstone over a whole leaf lies in the leaf's `over` and not in its stacks, so that it costs one
copy of a stack for each leaf, not for each stretch.

A write copies the nodes between the root and the leaves it changes, and shares all others.

Invariants
1. Keys ascend strictly in a node. `below` has one more than `keys`, `stacks` as many.
2. The keys of a branch are the `start` of each of its nodes but the first.
3. All leaves are at one depth. No node is empty but the leaf of an empty tree.
4. `oldest` and `newest` enclose the timestamps in a node; they may enclose more.
5. A leaf has at most `STRETCHES_MAX` keys and a branch as many nodes.
6. No timestamp of a leaf's `over` is in one of its stacks too.

Source: the copied paths of LMDB's B-tree; aggregates in nodes, and what covers a whole node kept
in the node, as in any interval tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice, pairwise
from operator import neg
from typing import Final, NamedTuple, TypeAlias, cast

from kvstore.codec.keys import UNLIMITED, encode_suffix
from kvstore.codec.ordered import TERMINATOR
from kvstore.limits import STRETCHES_MAX
from kvstore.timestamp import TIMESTAMP_MAX

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
