"""Rows by an index. An entry is a hint, and the row decides.

An entry leads to the row of its key at the same time. The row is found only if its own entry has
the same bytes. So entries that were left behind find nothing at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol

import pyarrow as pa

from kvstore.errors import UsageError
from kvstore.limits import ARROW_BYTES_MAX, SCAN_CHUNK
from kvstore.span import Span
from kvstore.tables.codec import TableCodec
from kvstore.tables.definition import Index
from kvstore.tables.sources import RowReader

_FIRST_ENTRIES: Final = 128
"""Entries of the first piece: many look-ups by an index find fewer rows."""

_FIRST_ROWS: Final = 16
"""Rows of the first batch: nothing tells yet how large they are."""


def whole_index(codec: TableCodec, name: object) -> Index:
    """The index `name`. Raises `UsageError` where there is none, or its entries are not all
    there."""
    index = codec.definition.index(name)
    if not index.is_whole:
        raise UsageError(
            f"{codec.definition.where}: index {index.name!r} is not whole at that time",
            "run table.build_index, or scan",
        )
    return index


def index_span(codec: TableCodec, index: Index, values: Sequence[Any]) -> Span:
    """The entries of an index that begin with these values."""
    if len(values) > len(index.parts):
        names = ", ".join(codec.definition.parts_named(index.parts))
        raise UsageError(
            f"{codec.definition.where}, index {index.name!r}: {len(values)} values",
            f"its columns are {names}",
        )
    return Span.of_prefix(codec.index_codec(index).key(values))


def found_batches(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    span: Span,
    *,
    columns: Sequence[str] | None,
    reverse: bool,
    limit: int | None,
) -> Iterator[pa.RecordBatch]:
    """The rows with entries in a span of an index, in the order of the index. A batch has at most
    `SCAN_CHUNK` rows, at most twice as many as the one before, and so few that rows as large as
    those before take half of `ARROW_BYTES_MAX`."""
    missing, count = limit, _FIRST_ROWS
    for batch in reader.batches(span, None, reverse=reverse, limit=None):
        taken = 0
        while taken < batch.num_rows:
            entries = batch.column(0).slice(taken, count)
            taken += len(entries)
            found, fits = fitting(codec, reader, index, entries)
            count = _next_count(count, len(entries), found.nbytes)
            rows = _fit(found, fits)
            if columns is not None:
                rows = rows.select(list(columns))
            codec.require_texts(rows)
            if missing is not None:
                rows = rows.slice(0, missing)
                missing -= rows.num_rows
            if rows.num_rows:
                yield rows
            if missing == 0:
                return


def found_dicts(
    codec: TableCodec,
    reader: RowReader,
    index: Index,
    span: Span,
    *,
    columns: Sequence[str] | None,
    reverse: bool,
    limit: int | None,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of `found_batches` as dicts, in pieces. Costs a look-up and 1 us a row."""
    indexed = codec.definition.parts_named(index.parts)
    wanted = None if columns is None else tuple(dict.fromkeys((*columns, *indexed)))
    extra = () if columns is None else [name for name in indexed if name not in columns]
    entries = (key for key, _ in reader.pairs(span, reverse=reverse))
    count = _FIRST_ENTRIES
    while limit != 0 and (
        found := list(islice(entries, count if limit is None else min(count, limit)))
    ):
        keys = codec.row_keys(index, found)
        values = reader.get_many(keys)
        count = _next_count(count, len(keys), sum(len(value or b"") for value in values))
        rows = codec.to_dicts(keys, values, wanted)
        fits = codec.fits(index, found, rows)
        whole = [row for row, fit in zip(rows, fits, strict=True) if fit]
        for name in extra:
            for row in whole:
                del row[name]
        yield whole
        if limit is not None:
            limit -= len(whole)


def _next_count(count: int, taken: int, size: int) -> int:
    """How many entries to take behind `taken` ones that led to `size` bytes of rows: so many that
    their rows have about half of `ARROW_BYTES_MAX`, and at most twice as many as `count`, because
    the next rows may be larger."""
    fitting = taken * ARROW_BYTES_MAX // (2 * max(size, 1))
    return max(min(fitting, 2 * count, SCAN_CHUNK), 1)


class ReadsMany(Protocol):
    """Reads the rows that entries lead to."""

    def get_many(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of keys."""
        ...


def _fit(batch: pa.RecordBatch, fits: list[bool | None]) -> pa.RecordBatch:
    if len(fits) == batch.num_rows and all(fits):
        return batch
    return batch.filter(pa.array((found for found in fits if found is not None), pa.bool_()))


def fitting(
    codec: TableCodec, reader: ReadsMany, index: Index, entries: pa.Array
) -> tuple[pa.RecordBatch, list[bool | None]]:
    """The rows that entries lead to, and of each entry whether its row fits it; None where there is
    no row. A row may hold what its columns do not: see `TableCodec.decode`."""
    found = entries.to_pylist()
    ends = codec.index_codec(index).part_ends(entries, len(index.parts))
    keys = [codec.key.prefix + entry[end:] for entry, end in zip(found, ends, strict=True)]
    values = reader.get_many(keys)
    alive = [at for at, value in enumerate(values) if value is not None]
    batch = codec.decode(
        pa.array([keys[at] for at in alive], pa.binary()),
        pa.array([values[at] for at in alive], pa.binary()),
        is_checked=False,
    )
    again = codec.entries(index, batch).to_pylist()
    fits: list[bool | None] = [None] * len(found)
    for at, entry in zip(alive, again, strict=True):
        fits[at] = found[at] == entry
    return batch, fits
