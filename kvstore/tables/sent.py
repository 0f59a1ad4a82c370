"""Rows that a client has encoded: they are decoded, checked and completed beside the store.

A client sends keys and values of rows. The store encodes them anew by its newest definition, so
that it can read each row that it stores, and makes the entries of indexes itself.

Invariants
1. A row that is stored was decoded before, and fits the columns of the table.
2. A client writes no entry of an index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa

from kvstore.errors import CorruptionError, FormatVersionError, TableAlteredError, UsageError
from kvstore.tables.codec import TableCodec, UnknownLayoutError
from kvstore.tables.sources import RowChange, RowReader
from kvstore.tables.writing import delete_row, put_batches
from kvstore.timestamp import Timestamp


def digest_of(codec: TableCodec) -> str:
    """The SHA-256 of a definition, by which two processes tell whether they have the same one."""
    return hashlib.sha256(codec.stored).hexdigest()


def sent_change(
    codec: TableCodec, reader: RowReader, rows: Mapping[bytes, bytes | None], due: int | None
) -> RowChange:
    """The change that sets the rows of keys and values until `due`, and deletes rows without a
    value.

    Raises `UsageError` for bytes that are no rows of the table, `TableAlteredError` for rows of a
    layout that it does not have.
    """
    values = [value for value in rows.values() if value is not None]
    change = RowChange()
    try:
        if values:
            keys = [key for key, value in rows.items() if value is not None]
            batch = codec.decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
            _require_values(codec, batch)
            change = put_batches(codec, reader, [batch])
        for key, value in rows.items():
            if value is None:
                codec.key.values(key)
                change.gone += delete_row(codec, reader, key).gone
    except UnknownLayoutError:
        raise TableAlteredError(codec.definition.name) from None
    except CorruptionError as error:
        raise UsageError(
            f"a row that was sent: {error.problem}", "encode it by the table"
        ) from error
    except FormatVersionError as error:
        raise UsageError(f"a row that was sent: {error.what}", "use an older release") from error
    change.expires = None if due is None else Timestamp(due)
    return change


def _require_values(codec: TableCodec, batch: pa.RecordBatch) -> None:
    """Raise `UsageError` for a null in a column that takes none."""
    for column in codec.definition.columns:
        if not column.is_nullable and batch.column(column.name).null_count:
            where = f"{codec.definition.where}, column {column.name!r}"
            raise UsageError(f"{where} is null", "it takes no null")
