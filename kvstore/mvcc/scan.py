"""Scans: the live keys of a span as of a time, in chunks, both ways, as rows or as columns.

Entries come from the engine in key order and are decided a chunk at a time (`mvcc.decide`). A scan
starts with a small chunk, since many scans want a few rows, and takes larger ones as it goes on,
up to a number of entries and of bytes.

This is the hottest path of the store. On 1.2 M versions of 1 M keys of 16 bytes, in units of raw
iteration over 1 M rows: taking the entries 1.0, deciding them 0.3, keys and values to lists 0.3,
to Arrow arrays 0.35; entry by entry, deciding took 1.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvstore.arrow import binary_array
from kvstore.codec.keys import TAIL_BYTES
from kvstore.codec.ordered import unframe
from kvstore.engine.api import Cursor
from kvstore.limits import SCAN_CHUNK, SCAN_CHUNK_BYTES
from kvstore.mvcc.columns import Columns
from kvstore.mvcc.decide import Read, decide_columns, decide_each

if TYPE_CHECKING:
    import pyarrow as pa

Chunk: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""User keys and values of some rows, in scan order."""

_FIRST_CHUNK = 64
"""Entries of the first chunk: a scan with a small limit should not read thousands."""

_COLUMNS_FROM = 192
"""Chunks below this are decided entry by entry: columns cost 80 us before the first one."""


class KeyColumn(NamedTuple):
    """Rows of an ascending scan, their keys as an Arrow binary array."""

    keys: pa.Array
    values: list[bytes]


def live_rows(cursor: Cursor, read: Read, *, reverse: bool = False) -> Iterator[Chunk]:
    """Keys and values alive to `read`, chunk by chunk. Closes `cursor` when done or closed."""
    taken = _Chunks(cursor, SCAN_CHUNK, reverse=reverse)
    for keys, values in taken:
        if len(keys) < _COLUMNS_FROM:
            rows = _decided_each(taken, keys, values, read)
        else:
            column = _decided_columns(taken, keys, values, read)
            rows = column.keys.to_pylist(), column.values
        if reverse:
            rows[0].reverse()
            rows[1].reverse()
        if rows[0]:
            yield rows


def live_columns(cursor: Cursor, read: Read, *, chunk: int) -> Iterator[KeyColumn]:
    """As ascending `live_rows`, keys in Arrow; at most `chunk` rows at once."""
    taken = _Chunks(cursor, chunk)
    for keys, values in taken:
        if len(keys) < _COLUMNS_FROM:
            rows = _decided_each(taken, keys, values, read)
            column = KeyColumn(binary_array(rows[0]), rows[1])
        else:
            column = _decided_columns(taken, keys, values, read)
        if column.values:
            yield column


def _decided_each(taken: _Chunks, keys: list[bytes], values: list[bytes], read: Read) -> Chunk:
    alive, held = decide_each(keys, read, hold_first=taken.reverse, hold=not taken.is_last)
    taken.hold(held)
    return [unframe(keys[at][:-TAIL_BYTES]) for at in alive], [values[at] for at in alive]


def _decided_columns(
    taken: _Chunks, keys: list[bytes], values: list[bytes], read: Read
) -> KeyColumn:
    columns = Columns(keys)
    alive, held = decide_columns(
        keys, columns, read, hold_first=taken.reverse, hold=not taken.is_last
    )
    taken.hold(held)
    return KeyColumn(columns.user_keys(alive), list(compress(values, alive.tobytes())))


class _Chunks:
    """Chunks of a cursor in ascending order within themselves, each with what the last one held."""

    def __init__(self, cursor: Cursor, count_max: int, *, reverse: bool = False) -> None:
        self._cursor = cursor
        self._count_max = count_max
        self._held: tuple[bytes, bytes] | None = None
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        self.reverse = reverse
        self.is_last = False

    def __iter__(self) -> Iterator[Chunk]:
        count = min(_FIRST_CHUNK, self._count_max)
        try:
            while not self.is_last:
                keys, values = self._cursor.take(count)
                self.is_last = not keys
                count = self._next_count(values)
                if self.reverse:
                    keys.reverse()
                    values.reverse()
                if self._held is not None:
                    at = len(keys) if self.reverse else 0
                    keys.insert(at, self._held[0])
                    values.insert(at, self._held[1])
                    self._held = None
                if keys:
                    self._keys, self._values = keys, values
                    yield keys, values
        finally:
            self._cursor.close()

    def hold(self, position: int | None) -> None:
        """Let the entry at `position` of the present chunk take part in the next one."""
        if position is not None:
            self._held = self._keys[position], self._values[position]

    def _next_count(self, values: list[bytes]) -> int:
        """Four times as many entries, as far as values of this size leave room for them."""
        sample = values[:: len(values) // 16 + 1]
        size = sum(map(len, sample)) // (len(sample) or 1) + 1
        return max(min(len(values) * 4, self._count_max, SCAN_CHUNK_BYTES // size), 1)
