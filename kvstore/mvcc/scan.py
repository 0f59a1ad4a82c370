"""Scans: the live keys of a span as of a time, in chunks, both ways, as rows or as columns.

The engine gives entries in key order, and `kvstore.loops.live` picks the live ones. A few rows come
from a reader that look-ups keep (`few_rows`), more of them from a pass. Its first chunk is small,
or as large as the caller's limit. Later chunks grow up to a number of entries and of bytes.

This is the hottest path of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvstore.engine.api import Cursor, Engine
from kvstore.limits import ARROW_BYTES_MAX, KEY_BYTES_MAX, SCAN_CHUNK, SCAN_CHUNK_BYTES
from kvstore.loops.contract import Nearby
from kvstore.loops.live import Entries, Live, LiveColumns, LiveRows
from kvstore.mvcc.arrow import array_of
from kvstore.mvcc.key_history import Stamps

if TYPE_CHECKING:
    import pyarrow as pa

RowChunk: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""User keys and values of some rows, in scan order."""

_FIRST_CHUNK = 64
"""Entries of the first chunk: a scan with a small limit should not read thousands."""

_DEAD_PASSED: Final = 40
"""Entries that `few_rows` reads in a turn beside the rows: more than `VERSIONS_PASSED_MAX`, so a
turn comes to the end of a run of old versions that the loop passes one by one."""


class Read(NamedTuple):
    """The view of one read: its time, the stamps of imports, and how it learns of range tombstones.
    `nearby` is None where there are none."""

    as_of: int
    stamps: Stamps
    nearby: Callable[[bytes], Nearby] | None


class RowArrays(NamedTuple):
    """Rows of a scan as Arrow binary arrays."""

    keys: pa.Array
    values: pa.Array


def few_rows(
    engine: Engine, span: tuple[bytes, bytes | None], read: Read, limit: int, *, reverse: bool
) -> RowChunk | None:
    """The first `limit` live keys and values of a span of stored keys, by a reader that look-ups
    keep, because making a pass takes longer. None where the rows lie behind many other entries, or
    are large: the caller makes a pass then."""
    begin, end = span
    ticket, reader = engine.borrow()
    if reverse:  # no entry has the key `end`, which is only the beginning of a stored key
        reader.seek_for_prev(b"\xff" * (KEY_BYTES_MAX + 1) if end is None else end)
    else:
        reader.seek(begin)
    source = Entries(reader, reverse=reverse, bound=begin if reverse else end)
    live = LiveRows(*read)
    keys: list[bytes] = []
    values: list[bytes] = []
    passed = 0
    # One entry more than rows: the entry behind the last row shows that the row is decided.
    for count in (limit + 1, limit + _DEAD_PASSED, limit + _DEAD_PASSED):
        passed += count
        has_more = live.pass_over(source, count, SCAN_CHUNK_BYTES)
        if live.ahead is not None:
            target, is_floor = live.ahead
            reader.seek_for_prev(target) if is_floor else reader.seek(target)
        if not has_more:
            if reader.key() is None:
                engine.check(reader)
            live.end()
        found = live.found()
        keys += found[0]
        values += found[1]
        if len(keys) >= limit or not has_more:
            engine.give_back(ticket, reader)
            return keys[:limit], values[:limit]
        if (limit - len(keys)) * passed > 2 * (limit + _DEAD_PASSED) * max(len(keys), 1):
            break  # at this rate further turns do not reach the last row
    engine.give_back(ticket, reader)
    return None


def live_rows(cursor: Cursor, read: Read, *, limit: int | None = None) -> Iterator[RowChunk]:
    """The live keys and values that `read` sees, chunk by chunk, in the order of `cursor`.

    A caller that takes `limit` rows has few entries read behind them. The end of the iteration
    closes `cursor`, and so does closing the iterator.
    """
    live = LiveRows(*read)
    first = min(_FIRST_CHUNK, SCAN_CHUNK) if limit is None else min(limit + 1, SCAN_CHUNK)
    missing = SCAN_CHUNK if limit is None else limit

    def count_max() -> int:
        # One entry more than rows, because the entry behind a row shows that the row is decided. At
        # least `_FIRST_CHUNK`; otherwise a long run of deleted keys is read one by one.
        return max(missing + 1, _FIRST_CHUNK)

    for _ in _passes(cursor, live, first, count_max):
        found = live.found()
        if found[0]:
            if limit is not None:
                missing -= len(found[0])
            yield found


def live_columns(cursor: Cursor, read: Read, *, chunk: int) -> Iterator[RowArrays]:
    """As `live_rows`, in Arrow arrays of at most `chunk` rows.

    An array has more than half as many rows, unless the pass ends, values are large or `chunk` is
    small.
    """
    live = LiveColumns(*read)
    # Read at least this many entries at a time; otherwise a long run of deleted keys is read one by
    # one.
    first = min(_FIRST_CHUNK, SCAN_CHUNK)
    for has_more in _passes(cursor, live, first, lambda: max(chunk - live.rows, _FIRST_CHUNK)):
        if not has_more or live.rows * 2 > chunk or live.size * 2 > ARROW_BYTES_MAX:
            for count, key_offsets, joined_keys, value_offsets, joined_values in live.found():
                keys = array_of(count, key_offsets, joined_keys)
                values = array_of(count, value_offsets, joined_values)
                for first in range(0, count, chunk):
                    yield RowArrays(keys.slice(first, chunk), values.slice(first, chunk))


def first_rows(chunks: Iterator[RowArrays], limit: int) -> Iterator[RowArrays]:
    """The first `limit` rows of a scan."""
    for keys, values in chunks if limit else ():
        yield RowArrays(keys.slice(0, limit), values.slice(0, limit))
        limit -= len(keys)
        if limit <= 0:
            return


def _passes(cursor: Cursor, live: Live, first: int, count_max: Callable[[], int]) -> Iterator[bool]:
    """Feed `live` all entries of `cursor`, `first` ones and then at most `count_max()` at once.
    Yields whether more come."""
    count = first
    try:
        has_more = True
        while has_more:
            has_more = cursor.feed(live, min(count, count_max()))
            count = min(max(count, _FIRST_CHUNK) * 4, SCAN_CHUNK)
            if not has_more:
                live.end()
            yield has_more
    finally:
        cursor.close()
