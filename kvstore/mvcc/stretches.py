"""A B-tree whose nodes never change: the stretches of the key space and the tombstones over each.

A node has `keys` and `below`: the key at hand belongs to `below[bisect_right(keys, key)]`. In a
branch `below` holds nodes; in a leaf it holds limits, in bytes as look-ups compare them. So a
look-up takes the same step at each level, and a compiled one needs to know the depth alone.

    branch   keys       m              below   (leaf)       (leaf)
    leaf     keys    c      f          below   limit  limit  limit     stacks   over c, over f

A write copies the nodes between the root and the stretches it changes, and shares all others.

Invariants
1. Keys ascend strictly in a node. `below` has one more than `keys`, `stacks` as many.
2. The keys of a branch are the `start` of each of its nodes but the first.
3. All leaves are at one depth. No node is empty but the leaf of an empty tree.
4. `oldest` and `newest` enclose the timestamps in a node's stacks; they may enclose more.
5. A leaf has at most `STRETCHES_MAX` keys and a branch as many nodes.

Source: the copied paths of LMDB's B-tree; aggregates in nodes as in any interval tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import neg
from typing import Final, NamedTuple, TypeAlias, cast

from kvstore.codec.keys import UNLIMITED, encode_suffix
from kvstore.codec.ordered import TERMINATOR
from kvstore.limits import STRETCHES_MAX
from kvstore.timestamp import TIMESTAMP_MAX

Stack: TypeAlias = "tuple[int, ...]"
"""Timestamps of the range tombstones over one stretch, newest first."""


def limit_of(stack: Stack) -> bytes:
    """The bytes behind an escaped key below which exactly its versions at or above the newest
    tombstone of `stack` sort; under no tombstone, all its versions."""
    return TERMINATOR + encode_suffix(stack[0]) + b"\xff" if stack else UNLIMITED


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
    """Neighbouring stretches: `stacks[i]` and `below[i + 1]` hold from `keys[i]` on."""

    keys: list[bytes]
    below: list[bytes]
    stacks: list[Stack]
    oldest: int
    newest: int

    @property
    def start(self) -> bytes:
        """The first boundary."""
        return self.keys[0]


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


EMPTY: Final = Tree(Leaf([], [UNLIMITED], [], TIMESTAMP_MAX, 0), 0)


def build(keys: list[bytes], stacks: list[Stack]) -> Tree:
    """The tree of these stretches. O(stretches)."""
    return _rooted(_leaves(keys, list(map(limit_of, stacks)), stacks), 0)


def splice(tree: Tree, low: bytes, high: bytes, keys: list[bytes], stacks: list[Stack]) -> Tree:
    """The tree with these stretches in place of all stretches that begin in `low <= key <= high`.

    O(log n) beside the stretches that go and come.
    """
    limits = list(map(limit_of, stacks))
    nodes = _spliced(tree.root, tree.depth, low, high, _Stretches(keys, limits, stacks))
    return _rooted(nodes, tree.depth)


def stack_at(tree: Tree, key: bytes) -> Stack:
    """The stack over `key`. O(log n)."""
    node = tree.root
    for _ in range(tree.depth):
        node = cast("Node", node.below[bisect_right(node.keys, key)])
    leaf = cast("Leaf", node)
    at = bisect_right(leaf.keys, key)
    return leaf.stacks[at - 1] if at else ()


def surroundings(
    tree: Tree, start: bytes, end: bytes
) -> tuple[Stack, list[tuple[bytes, Stack]], Stack]:
    """The stack below `start`, the boundaries in `start <= key < end` with the stack from each on,
    and the stack over `end`. O(log n) beside the boundaries given."""
    node, beyond = tree.root, None
    for _ in range(tree.depth):
        at = bisect_left(node.keys, start)
        if at < len(node.keys):
            beyond = node.keys[at]
        node = cast("Node", node.below[at])
    keys, _, stacks, _, _ = cast("Leaf", node)
    first = bisect_left(keys, start)
    before = stacks[first - 1] if first else ()
    if beyond is None or end < beyond:  # one leaf, as mostly
        last, behind = bisect_left(keys, end), bisect_right(keys, end)
        found = list(zip(keys[first:last], stacks[first:last], strict=True))
        return before, found, stacks[behind - 1] if behind else ()
    found = []
    for leaf, _ in leaves(tree, start, end):
        first, last = bisect_left(leaf.keys, start), bisect_left(leaf.keys, end)
        found += zip(leaf.keys[first:last], leaf.stacks[first:last], strict=True)
    return before, found, stack_at(tree, end)


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


class _Stretches(NamedTuple):
    keys: list[bytes]
    limits: list[bytes]
    stacks: list[Stack]


_NONE: Final = _Stretches([], [], [])


def _spliced(node: Node, depth: int, low: bytes, high: bytes, coming: _Stretches) -> list[Node]:
    """The nodes that take the place of `node`."""
    if depth == 0:
        return _spliced_leaf(cast("Leaf", node), low, high, coming)
    nodes = cast("list[Node]", node.below)
    first, last = bisect_right(node.keys, low), bisect_right(node.keys, high)
    changed = _spliced(nodes[first], depth - 1, low, high, coming)
    if first < last:
        changed += _spliced(nodes[last], depth - 1, low, high, _NONE)
    # One neighbour on each side takes part, so that nodes that became small join.
    before, behind = max(first - 1, 0), last + 2
    joined = _joined(nodes[before:first] + changed + nodes[last + 1 : behind])
    starts = [node.start, *node.keys]  # asking the nodes would bring each into the cache
    return _branches(
        starts[:before] + [found.start for found in joined] + starts[behind:],
        nodes[:before] + joined + nodes[behind:],
        *_enclosing([node, *joined]),
    )


def _spliced_leaf(leaf: Leaf, low: bytes, high: bytes, coming: _Stretches) -> list[Node]:
    left, right = bisect_left(leaf.keys, low), bisect_right(leaf.keys, high)
    keys = leaf.keys[:left] + coming.keys + leaf.keys[right:]
    limits = leaf.below[1 : left + 1] + coming.limits + leaf.below[right + 1 :]
    stacks = leaf.stacks[:left] + coming.stacks + leaf.stacks[right:]
    if (left == 0 and right == len(leaf.keys)) or len(keys) > STRETCHES_MAX:
        return _leaves(keys, limits, stacks)
    oldest, newest = _times(coming.stacks)
    oldest, newest = min(oldest, leaf.oldest), max(newest, leaf.newest)
    return [Leaf(keys, [UNLIMITED, *limits], stacks, oldest, newest)]


def _leaves(keys: list[bytes], limits: list[bytes], stacks: list[Stack]) -> list[Node]:
    if 0 < len(keys) <= STRETCHES_MAX:  # a tenth of a small map's change
        return [Leaf(keys, [UNLIMITED, *limits], stacks, *_times(stacks))]
    return [
        Leaf(
            keys[low:high],
            [UNLIMITED, *limits[low:high]],
            stacks[low:high],
            *_times(stacks[low:high]),
        )
        for low, high in _cuts(len(keys))
    ]


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
    oldest, newest = min(left.oldest, right.oldest), max(left.newest, right.newest)
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        limits = left.below + right.below[1:]
        return Leaf(left.keys + right.keys, limits, left.stacks + right.stacks, oldest, newest)
    below = cast("list[Leaf]", [*left.below, *right.below])
    return Branch([*left.keys, right.start, *right.keys], below, left.start, oldest, newest)


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


def _times(stacks: Sequence[Stack]) -> tuple[int, int]:
    """The oldest and the newest timestamp in these stacks."""
    over = [stack for stack in stacks if stack]
    if not over:
        return EMPTY.root.oldest, EMPTY.root.newest
    return min(stack[-1] for stack in over), max(stack[0] for stack in over)


def _enclosing(nodes: Sequence[Node]) -> tuple[int, int]:
    return min(node.oldest for node in nodes), max(node.newest for node in nodes)


def _cuts(count: int) -> Iterator[tuple[int, int]]:
    """Where to cut `count` items into the fewest pieces of about one size."""
    pieces = -(-count // STRETCHES_MAX)
    for piece in range(pieces):
        yield count * piece // pieces, count * (piece + 1) // pieces
