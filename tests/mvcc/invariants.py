"""The invariants that `kvstore.mvcc.fragments` and `kvstore.mvcc.fragments` state, as one check."""

from __future__ import annotations

from itertools import pairwise

from kvstore.codec.keys import UNLIMITED
from kvstore.limits import STRETCHES_MAX
from kvstore.mvcc import Fragments
from kvstore.mvcc.fragments import Branch, Leaf, Node, Stack, leaves, limit_of


def check_fragments(fragments: Fragments, *, most: int = STRETCHES_MAX) -> None:
    """Assert all invariants of a tree whose nodes have at most `most` stretches."""
    found = list(leaves(fragments.tree, b"", None))
    stacks = [stack for leaf, _ in found for stack in map(leaf.stack, range(len(leaf.keys)))]
    boundaries = [key for leaf, _ in found for key in leaf.keys]
    assert all(a < b for a, b in pairwise(boundaries))
    assert all(a != b for a, b in pairwise(stacks))
    assert not stacks or (stacks[0] and not stacks[-1])
    assert all(a > b for stack in stacks for a, b in pairwise(stack))
    assert len(fragments) == len(boundaries)
    root, depth = fragments.tree
    assert _checked(root, depth, most) == stacks
    assert root.keys or depth == 0


def _checked(node: Node, depth: int, most: int) -> list[Stack]:
    """The stacks below a node."""
    assert len(node.below) == len(node.keys) + 1
    if isinstance(node, Leaf):
        assert depth == 0
        assert len(node.keys) == len(node.stacks) <= most
        assert all({*node.over}.isdisjoint(stack) for stack in node.stacks)
        stacks = [node.stack(at) for at in range(len(node.keys))]
        assert node.below == [UNLIMITED, *(limit_of(stack[0] if stack else 0) for stack in stacks)]
    else:
        assert isinstance(node, Branch)
        assert len(node.below) <= most
        assert [node.start, *node.keys] == [below.start for below in node.below]
        stacks = [stack for below in node.below for stack in _checked(below, depth - 1, most)]
    assert all(node.oldest <= t <= node.newest for stack in stacks for t in stack)
    return stacks
