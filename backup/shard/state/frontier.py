"""Frontiers: how far a shard is complete (`upper`) or has forgotten (`since`).

A frontier is one integer. Timestamps reach from 0 to 2**63 - 1; the *empty* frontier, which no
timestamp is at or above, is 2**63. So every comparison of frontiers is one of integers: an empty
`upper` is above all times (no more will be written), an empty `since` too (all is forgotten), and
the meet of frontiers is their least. Bounds are half-open: `[lower, upper)`.
"""

from __future__ import annotations

from typing import Final

from kvstore.errors import UsageError
from kvstore.timestamp import TIMESTAMP_MAX

EMPTY: Final = TIMESTAMP_MAX + 1
"""The empty frontier: finished. Above every timestamp."""


def require_frontier(value: int, *, name: str) -> int:
    """Return `value` if it is a timestamp or `EMPTY`; raises `UsageError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= EMPTY:
        raise UsageError(f"{name} {value!r} is not a frontier", "pass 0..2**63 - 1, or EMPTY")
    return int(value)


def frontier_text(value: int) -> str:
    """Render a frontier for a message."""
    return "[]" if value == EMPTY else str(value)
