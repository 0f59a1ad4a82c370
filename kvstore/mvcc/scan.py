"""Scans: the live keys of a span as of a time, in chunks, both ways, as rows or as columns.

Entries come from the engine in key order, and `kvstore.loops.Live` picks those that are alive. A
scan starts with a small chunk, since many scans want a few rows, and takes larger ones as it goes
on, up to a number of entries and of bytes.

This is the hottest path of the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvstore.arrow import binary_arrays, user_key_array
from kvstore.codec.ordered import escape
from kvstore.engine.api import Cursor, next_count
from kvstore.limits import SCAN_CHUNK, SCAN_CHUNK_ROWS
from kvstore.loops import Live, user_keys
from kvstore.mvcc.fragments import Cover
from kvstore.mvcc.version import Stamps

if TYPE_CHECKING:
    import pyarrow as pa

Chunk: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""User keys and values of some rows, in scan order."""

_FIRST_CHUNK = 64
"""Entries of the first chunk: a scan with a small limit should not read thousands."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a read sees by: its time, the imports it knows, the range tombstones of its span.

    `starts` are the bounds of `cover` as they compare with stored keys: escaping keeps the order,
    and the rest of a stored key sorts after its escaped part alone.
    """

    as_of: int
    stamps: Stamps
    starts: list[bytes]
    newest: list[int]

    @classmethod
    def of(cls, as_of: int, stamps: Stamps, cover: Cover) -> Read:
        """A read at `as_of` of a span with this cover. O(fragments)."""
        return cls(as_of, stamps, [escape(start) for start in cover.starts], [0, *cover.newest])


class Rows(NamedTuple):
    """Rows of a scan as Arrow binary arrays."""

    keys: pa.Array
    values: pa.Array


def live_rows(cursor: Cursor, read: Read) -> Iterator[Chunk]:
    """Keys and values alive to `read`, chunk by chunk, in the order of `cursor`, which is closed
    when done or closed."""
    for stored, values in _alive(cursor, read, SCAN_CHUNK_ROWS):
        yield user_keys(stored), values


def live_columns(cursor: Cursor, read: Read, *, chunk: int) -> Iterator[Rows]:
    """As `live_rows`, in Arrow; at most `chunk` rows at once."""
    for stored, values in _alive(cursor, read, min(chunk, SCAN_CHUNK)):
        keys = user_key_array(stored)
        first = 0
        for part in binary_arrays(values):
            yield Rows(keys.slice(first, len(part)), part)
            first += len(part)


def first_rows(chunks: Iterator[Rows], limit: int) -> Iterator[Rows]:
    """The first `limit` rows of a scan."""
    for keys, values in chunks:
        yield Rows(keys.slice(0, limit), values.slice(0, limit))
        limit -= len(keys)
        if limit <= 0:
            return


def _alive(cursor: Cursor, read: Read, count_max: int) -> Iterator[Chunk]:
    """Stored keys and values of what is alive, at most `count_max` at once, never none."""
    live = Live(read.as_of, read.stamps, read.starts, read.newest)
    count = min(_FIRST_CHUNK, count_max)
    try:
        is_last = False
        while not is_last:
            keys, values = cursor.take(count)
            is_last = not keys
            count = next_count(values, count_max)
            alive = live.take(keys, values, is_last=is_last)
            if alive[0]:
                yield alive
    finally:
        cursor.close()
