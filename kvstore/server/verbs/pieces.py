"""Answers to many keys, in pieces as small as the batches of a scan.

Invariants
1. A piece has the answer to one key, or answers of `ARROW_BYTES_MAX` bytes at most. So streams of
   answers take no more of a server's memory than as many scans.
2. Each key is answered once, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pyarrow as pa

from kvstore.limits import ARROW_BYTES_MAX

Answering: TypeAlias = "Callable[[int, int], pa.RecordBatch | None]"
"""Answers the keys from a first place to below a second one. None where the answers to several keys
have more than `ARROW_BYTES_MAX` bytes."""


def in_pieces(
    answer: Answering, count: int, *, rows_first: int, rows_max: int
) -> Iterator[pa.RecordBatch]:
    """The answers to `count` keys. The first piece has at most `rows_first` keys. A later one has
    at most `rows_max`, at most twice as many as the one before, and so few that it takes about half
    of the bytes that fit."""
    start, rows = 0, min(rows_first, rows_max)
    while start < count:
        end = min(start + rows, count)
        found = answer(start, end)
        answered = end - start
        if found is None:
            assert answered > 1, "the answer to one key always fits"
            rows = answered // 2
            continue
        fitting = answered * ARROW_BYTES_MAX // (2 * max(found.nbytes, 1))
        start, rows = end, max(min(fitting, 2 * answered, rows_max), 1)
        yield found
        del found  # it would stay in memory beside the next piece
