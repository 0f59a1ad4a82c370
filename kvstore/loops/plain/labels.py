"""Labels in order, as columns: distinct keys that ascend, and the labels of each key."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

from typing_extensions import Buffer

Keys: TypeAlias = "tuple[int, Buffer, Buffer]"
"""The number of keys, their offsets as integers of 32 bits, and their joined bytes."""


def listed(keys: Keys) -> list[bytes]:
    """The keys of a column. Raises `ValueError` where its offsets do not fit its bytes."""
    count, offsets, joined = keys
    bounds, data = memoryview(offsets).tolist(), memoryview(joined)
    if len(bounds) != count + 1 or not 0 <= bounds[0] <= bounds[-1] <= len(data):
        raise ValueError("the offsets of keys do not fit their bytes")
    return [bytes(data[bounds[at] : bounds[at + 1]]) for at in range(count)]


def require_starts(starts: list[int], groups: int, labels: int) -> None:
    """Raise `ValueError` unless `starts` cut so many labels into the labels of each key."""
    ascends = all(one <= other for one, other in pairwise(starts))
    if len(starts) != groups + 1 or not ascends or starts[0] < 0 or starts[-1] > labels:
        raise ValueError("the labels of a key are no part of the labels")
