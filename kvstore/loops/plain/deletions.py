"""The range tombstones over a key: labels and floors ask for them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import neg
from typing import Any, TypeAlias

from kvstore.loops.contract import LimitNode

Deletions: TypeAlias = "tuple[Sequence[int], Sequence[int]]"
"""The times of the range tombstones over a key, in two stacks, each newest first."""


def deletions_of(limits: LimitNode, depth: int, key: bytes) -> Deletions:
    """The range tombstones over `key`. O(log n)."""
    node: Any = limits
    for _ in range(depth):
        node = node[1][bisect_right(node[0], key)]
    at = bisect_right(node[0], key)
    return (node[2][at - 1], node[3]) if at else ((), ())


def deleted_at(deletions: Deletions, as_of: int) -> int:
    """The newest of these times that is at or below `as_of`, else -1. O(log n)."""
    return max(_newest(stack, as_of) for stack in deletions)


def _newest(stack: Sequence[int], as_of: int) -> int:
    at = bisect_left(stack, -as_of, key=neg)
    return stack[at] if at < len(stack) else -1
