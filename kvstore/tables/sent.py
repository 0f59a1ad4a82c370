"""Rows that a client has encoded, and definitions that it has altered: both are checked beside the
store.

A client sends keys and values of rows. The store encodes them anew by its newest definition, so
that it can read each row that it stores, and makes the entries of indexes itself. To alter a table,
a client sends the definition that the table is to have. The store makes the alteration by itself,
and compares the result with the definition that was sent.

Invariants
1. A row that is stored was decoded before, and fits the columns of the table.
2. A client writes no entry of an index.
3. A definition that is stored was made by an alteration of the newest one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping

import pyarrow as pa

from kvstore.errors import CorruptionError, FormatVersionError, TableAlteredError, UsageError
from kvstore.tables.codec import TableCodec, UnknownLayoutError, default_value
from kvstore.tables.conform import conform
from kvstore.tables.definition import Definition
from kvstore.tables.evolve import Alteration, alter, named_parts, unique
from kvstore.tables.sources import RowChange, RowReader
from kvstore.tables.writing import delete_row, put_batches
from kvstore.timestamp import Timestamp


def digest_of(codec: TableCodec) -> str:
    """The SHA-256 of a definition, by which two processes tell whether they have the same one."""
    return hashlib.sha256(codec.stored).hexdigest()


def altered_as(definition: Definition, wanted: Definition) -> Definition:
    """`definition`, altered to the definition `wanted` that a client sent. Raises
    `TableAlteredError` if the client began with another definition, `UsageError` if no alteration
    leads to `wanted`."""
    if wanted.revision != definition.revision + 1:
        raise TableAlteredError(definition.name)
    found = alter(definition, _alteration(definition, wanted))
    if found != wanted:
        raise UsageError(
            f"{definition.where}: no alteration makes the definition that was sent",
            "alter the definition that the table has",
        )
    return found


def _alteration(before: Definition, after: Definition) -> Alteration:
    """The differences of two definitions as the arguments of `Table.alter`."""
    kept = [(one, after.by_id[one.id]) for one in before.columns if one.id in after.by_id]
    numbers = {index.number for index in after.indexes}
    indexes = {
        index.name: unique(*columns) if index.is_unique else columns
        for index in after.indexes
        if index.number > before.index_numbers
        for columns in [named_parts(after, index.parts)]
    }
    return Alteration(
        add={
            column.name: (column.field, default_value(column))
            for column in after.columns
            if column.id >= before.ids
        },
        drop=[column.name for column in before.columns if column.id not in after.by_id],
        widen={one.name: two.field for one, two in kept if one.field != two.field},
        add_index=indexes,
        drop_index=[index.name for index in before.indexes if index.number not in numbers],
    )


def sent_change(
    codec: TableCodec,
    reader: RowReader,
    rows: Mapping[bytes, bytes | None],
    due: int | None,
    replaced: Container[bytes],
) -> RowChange:
    """The change that sets the rows of keys and values until `due`, and deletes rows without a
    value. `replaced` is as in `put_batches`.

    Raises `UsageError` for bytes that are no rows of the table, `TableAlteredError` for rows of a
    layout that it does not have.
    """
    values = [value for value in rows.values() if value is not None]
    change = RowChange()
    try:
        if values:
            keys = [key for key, value in rows.items() if value is not None]
            batch = codec.decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
            batch = conform(codec.definition, batch)
            change = put_batches(codec, reader, [batch], replaced)
        for key, value in rows.items():
            if value is None:
                codec.key.require([key])
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
