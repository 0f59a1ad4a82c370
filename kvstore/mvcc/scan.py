"""Scans: the live keys of a span as of a time, in chunks, both ways, as rows or as columns.

The engine gives entries in key order, and `kvstore.loops.live` picks the live ones. A few rows come
from a reader that look-ups keep (`few_rows`), more of them from a pass. Its first chunk is small,
or as large as the caller's limit. Later chunks grow up to a number of entries and of bytes.

A pass that goes on behind `COLUMNS_ENTRIES_MIN` entries leaves RocksDB's iterator: it holds the
sorted files open and reads them itself (`kvstore.loops.files`), several times as fast and without
the interpreter lock. It begins anew at the key that it has reached, whose rows are not decided yet.
The two see one state: a version never changes, and the caller tells (`Onward`) that no history has
gone since the pass began. Else, and where the files have something that is not read so, the
iterator goes on.

This is the hottest path of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvstore.codec.keys import TAIL_BYTES
from kvstore.engine.api import Cursor, Engine, HeldFiles
from kvstore.limits import (
    ARROW_BYTES_MAX,
    COLUMNS_ENTRIES_MIN,
    KEY_BYTES_MAX,
    SCAN_CHUNK,
    SCAN_CHUNK_BYTES,
    STEP_ENTRIES,
)
from kvstore.loops.files import Pass
from kvstore.loops.live import Entries, Live, LiveColumns, LiveRows
from kvstore.loops.shapes import Nearby
from kvstore.mvcc.arrow import arrays_of
from kvstore.mvcc.key_history import Stamps

if TYPE_CHECKING:
    import pyarrow as pa

RowChunk: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""User keys and values of some rows, in scan order."""

_FIRST_CHUNK = 64
"""Entries of the first chunk: a scan with a small limit should not read thousands."""

FIRST_ROWS: Final = 32
"""Rows that a scan without a small limit reads by a kept reader: a span that has fewer takes no
pass. Another one loses 2 us."""

_VERSIONS_EACH: Final = 12
_DEAD_PASSED: Final = 120
"""Entries that `few_rows` reads at most: so many for each row, and so many in all. A pass takes as
long for an entry, and more for its beginning."""


class Read(NamedTuple):
    """The view of one read: its time, the stamps of imports, and how it learns of range tombstones.
    `nearby` is None where there are none."""

    as_of: int
    stamps: Stamps
    nearby: Callable[[bytes], Nearby] | None


Onward: TypeAlias = "Callable[[bytes], FilePass | None]"
"""The rest of a pass from a stored key on, read from the files; None where the iterator goes on."""


class RowArrays(NamedTuple):
    """Rows of a scan as Arrow binary arrays."""

    keys: pa.Array
    values: pa.Array


class FirstRows(NamedTuple):
    """The first rows of a scan. Unless the span `is_passed`, it has more entries behind them."""

    keys: list[bytes]
    values: list[bytes]
    is_passed: bool


def few_rows(
    engine: Engine, span: tuple[bytes, bytes | None], read: Read, limit: int, *, reverse: bool
) -> FirstRows:
    """The first `limit` live keys and values of a span of stored keys, by a reader that look-ups
    keep, because making a pass takes longer. Fewer where the rows lie behind many other entries, or
    are large: the caller makes a pass for the rest."""
    begin, end = span
    ticket, reader = engine.borrow()
    if reverse:  # no entry has the key `end`, which is only the beginning of a stored key
        reader.seek_for_prev(b"\xff" * (KEY_BYTES_MAX + 1) if end is None else end)
    else:
        reader.seek(begin)
    source = Entries(reader, reverse=reverse, bound=begin if reverse else end)
    live = LiveRows(*read)
    has_more = live.pass_rows(
        source, limit * _VERSIONS_EACH + _DEAD_PASSED, SCAN_CHUNK_BYTES, limit
    )
    if not has_more:
        if reader.key() is None:
            engine.check(reader)
        live.end()
    keys, values = live.found()
    engine.give_back(ticket, reader)
    return FirstRows(keys, values, not has_more)


def live_rows(
    cursor: Cursor, read: Read, *, limit: int | None = None, onward: Onward | None = None
) -> Iterator[RowChunk]:
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

    for rest in _passes(cursor, live, first, count_max, onward):
        found = live.found()
        if found[0]:
            if limit is not None:
                missing -= len(found[0])
            yield found
        if rest is not None:
            yield from rest.rows(missing)


def live_columns(
    cursor: Cursor, read: Read, *, chunk: int, onward: Onward | None = None
) -> Iterator[RowArrays]:
    """As `live_rows`, in Arrow arrays of at most `chunk` rows.

    An array has more than half as many rows, unless the pass ends, values are large or `chunk` is
    small.
    """
    live = LiveColumns(*read)
    # Read at least this many entries at a time; otherwise a long run of deleted keys is read one by
    # one.
    first = min(_FIRST_CHUNK, SCAN_CHUNK)
    full = False
    for rest in _passes(cursor, live, first, lambda: max(chunk - live.rows, _FIRST_CHUNK), onward):
        full = live.rows * 2 > chunk or live.size * 2 > ARROW_BYTES_MAX
        if full or rest is not None:
            yield from _arrays(live, chunk)
        if rest is not None:
            yield from rest.columns(chunk)
    yield from _arrays(live, chunk)


def _arrays(live: LiveColumns, chunk: int) -> Iterator[RowArrays]:
    for found in live.found():
        keys, values = arrays_of(found)
        for first in range(0, len(keys), chunk):
            yield RowArrays(keys.slice(first, chunk), values.slice(first, chunk))


class FilePass:
    """A pass, or the rest of one, read from files that are held open."""

    def __init__(
        self,
        held: HeldFiles,
        begin: bytes,
        end: bytes | None,
        read: Read,
        *,
        keys_only: bool,
        lets_go: bool = True,
    ) -> None:
        """`lets_go` says whether the end of the pass closes `held`, which others may use."""
        self._held, self._lets_go = held, lets_go
        self._pass = held.begin(begin, end, read, keys_only=keys_only)

    def rows(self, limit: int) -> Iterator[RowChunk]:
        """The rows in chunks of at most `limit`."""
        for _ in self._steps(limit):
            if self._pass.rows:
                yield self._pass.found_rows()

    def columns(self, chunk: int) -> Iterator[RowArrays]:
        """The rows in arrays of at most `chunk`."""
        found = self._pass
        for has_more in self._steps(chunk):
            full = found.rows * 2 > chunk or found.size * 2 > ARROW_BYTES_MAX
            if found.rows and (full or not has_more):
                yield RowArrays(*arrays_of(found.found()))

    def _steps(self, rows: int) -> Iterator[bool]:
        """Read on until `rows` rows are found, or some entries were passed. Yields whether there
        are more."""
        try:
            has_more = True
            while has_more:
                has_more = self._held.take(self._pass, rows, SCAN_CHUNK_BYTES, STEP_ENTRIES)
                yield has_more
        finally:
            if self._lets_go:
                self._held.close()


class EntryPass:
    """A pass over all entries of a span, alive or not, as a cursor: behind `COLUMNS_ENTRIES_MIN`
    entries it reads the files itself, if `hold` gives them from a stored key on."""

    def __init__(
        self, cursor: Cursor, end: bytes | None, hold: Callable[[bytes], HeldFiles | None]
    ) -> None:
        self._cursor, self._end = cursor, end
        self._hold: Callable[[bytes], HeldFiles | None] | None = hold
        self._rest: tuple[HeldFiles, Pass] | None = None
        self._passed = 0

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        if self._rest is not None:
            held, found = self._rest
            while held.take(found, count, SCAN_CHUNK_BYTES, STEP_ENTRIES) and not found.rows:
                pass
            return found.found_rows()
        keys, values = self._cursor.take(count)
        self._passed += len(keys)
        if keys and self._hold is not None and self._passed >= COLUMNS_ENTRIES_MIN:
            begin = keys[-1] + b"\x00"
            files, self._hold = self._hold(begin), None
            if files is not None:
                self._rest = files, files.begin(begin, self._end, (0, {}, None), whole=True)
                self._cursor.close()
        return keys, values

    def feed(self, live: Live, count: int) -> bool:
        keys, values = self.take(count)
        live.pass_over(zip(keys, values, strict=True), len(keys))
        return bool(keys)

    def close(self) -> None:
        self._hold = None
        self._cursor.close()
        if self._rest is not None:
            self._rest[0].close()


def first_rows(chunks: Iterator[RowArrays], limit: int) -> Iterator[RowArrays]:
    """The first `limit` rows of a scan."""
    for keys, values in chunks if limit else ():
        yield RowArrays(keys.slice(0, limit), values.slice(0, limit))
        limit -= len(keys)
        if limit <= 0:
            return


def _passes(
    cursor: Cursor, live: Live, first: int, count_max: Callable[[], int], onward: Onward | None
) -> Iterator[FilePass | None]:
    """Feed `live` the entries of `cursor`, `first` ones and then at most `count_max()` at once.
    Yields after each of these steps, and ends with the last entry; or the last thing that it yields
    is the rest of the pass, which the caller reads."""
    count, passed = first, 0
    try:
        has_more = True
        while has_more:
            step = min(count, count_max())
            has_more = cursor.feed(live, step)
            passed += step
            count = min(max(count, _FIRST_CHUNK) * 4, SCAN_CHUNK)
            if not has_more:
                live.end()
            elif onward is not None and passed >= COLUMNS_ENTRIES_MIN and live.last is not None:
                # The row that `live` holds is of this key, and is read again.
                rest = onward(live.last[:-TAIL_BYTES])
                if rest is not None:
                    cursor.close()
                    yield rest
                    return
                onward = None
            yield None
    finally:
        cursor.close()
