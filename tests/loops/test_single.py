"""Single rows: the loops make the keys and the dicts of whole batches, and of their oracle."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import CorruptionError, UsageError
from kvstore.loops.shapes import INSTANT_LEAST, INSTANT_MOST
from kvstore.mvcc.arrow import binary_array
from kvstore.tables import TableCodec, desc
from kvstore.tables import row_codec as codec_module
from kvstore.tables import row_codec as keys_module
from kvstore.tables.catalogue import define
from kvstore.tables.definition import Definition
from kvstore.tables.row_codec import batches_of, dicts
from tests.loops import rows_oracle
from tests.tables.drawn import definitions, rows_of

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROS = st.integers(INSTANT_LEAST, INSTANT_MOST)


def table_of(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table. Arrow itself takes instances of UUID from release 24 on."""
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if field.type == pa.uuid():
            raw = pa.array([each and each.bytes for each in values], field.type.storage_type)
            columns.append(pa.ExtensionArray.from_storage(field.type, raw))
        else:
            columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


@given(definitions(), st.data())
def test_single_rows_are_those_of_batches(definition: Definition, data: st.DataObject) -> None:
    rows = data.draw(st.lists(rows_of(definition), max_size=4))
    batch = pa.Table.from_batches(
        batches_of(definition, table_of(rows, definition.schema)), definition.schema
    ).combine_chunks()
    codec = TableCodec(definition)
    for piece in batch.to_batches():
        keys, values = (column.to_pylist() for column in codec.encode(piece))
        assert [codec.row(row) for row in rows] == list(zip(keys, values, strict=True))
        assert codec.to_dicts(keys, values) == rows == dicts(piece)
        wanted = tuple(data.draw(st.lists(st.sampled_from(definition.schema.names))))
        columns = tuple(dict.fromkeys(wanted))
        some = [{name: row[name] for name in columns} for row in rows]
        assert codec.to_dicts(keys, values, columns) == some
        assert codec.to_dicts(keys, [None] * len(keys), columns) == [None] * len(keys)
        for index in definition.indexes:
            entries = codec.entries(index, piece).to_pylist()
            assert codec.row_keys(index, entries) == keys
            assert all(codec.fits(index, entries, list(rows)))
            names = definition.parts_named(index.parts)
            parts = [codec.index_codec(index).key([row[n] for n in names]) for row in rows]
            assert codec.fits(index, entries, [*rows[1:], None][: len(rows)]) == [
                *(one == other for one, other in pairwise(parts)),
                *[False] * bool(rows),
            ]


@given(definitions(), st.data())
def test_damage_is_read_as_the_oracle_reads_it(definition: Definition, data: st.DataObject) -> None:
    row = data.draw(rows_of(definition))
    key, value = TableCodec(definition).row(row)
    key, value = data.draw(
        st.sampled_from([(damaged(key, data), value), (key, damaged(value, data))])
    )

    def outcome() -> Any:
        codec = TableCodec(definition)
        try:
            found: Any = codec.to_dict(key, value)
        except (CorruptionError, UsageError) as error:
            found = type(error)
        try:
            return repr(found), [codec.row_keys(index, [key]) for index in definition.indexes]
        except CorruptionError as error:
            return repr(found), str(error)

    found = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "row_keys", rows_oracle.row_keys)
        patch.setattr(codec_module, "RowDicts", rows_oracle.RowDicts)
        assert outcome() == found


@pytest.mark.parametrize("part", ["a", desc("a")], ids=["rising", "falling"])
@pytest.mark.parametrize(
    "kind", [pa.decimal128(9, 2), pa.decimal256(40, 3), pa.decimal128(3, -2)], ids=str
)
def test_a_damaged_decimal_of_a_key_is_corruption_wherever_it_is_read(
    kind: pa.DataType, part: Any
) -> None:
    """-2.54 whose exponent fell is -0.0254, and -2.5440 is another form of -2.544: no value of the
    column. The search for the reason raised a bare `ValueError` in place of the corruption."""
    schema = pa.schema([("a", kind), ("b", pa.int8())])
    codec = TableCodec(define("t", 1, schema, [part], {"by_a": ["a"]}))
    key, value = codec.row({"a": Decimal("-200"), "b": 1})
    start, found = len(codec.key.prefix), 0
    for at, byte in itertools.product(range(start, len(key)), range(256)):
        stored = key[:at] + bytes([byte]) + key[at + 1 :]
        try:
            row = codec.to_dict(stored, value)
        except CorruptionError:
            found += 1
            keys, values = binary_array([stored]), binary_array([value])
            assert [place for place, _ in codec.faults(keys, values)] == [0]
            with pytest.raises(CorruptionError):
                codec.decode(keys, values)
            assert codec.key.named(stored) == f"key {stored.hex()}"
        else:
            assert codec.row(row) == (stored, value)
    assert found > 500


def damaged(stored: bytes, data: st.DataObject) -> bytes:
    """`stored` with one byte changed, with a byte more, or without its end."""
    at = data.draw(st.integers(0, max(len(stored) - 1, 0)))
    byte = bytes([data.draw(st.integers(0, 255))])
    return data.draw(
        st.sampled_from([stored[:at], stored + byte, stored[:at] + byte + stored[at + 1 :]])
    )


@given(MICROS)
@example(INSTANT_LEAST)
@example(INSTANT_MOST)
@example(-1)
@example(951_782_400_000_000)
@example(-2_203_891_200_000_001)
def test_instants_are_those_of_the_calendar(micros: int) -> None:
    at = EPOCH + timedelta(microseconds=micros)
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us"))])
    codec = TableCodec(define("t", 1, schema, ["at"]))
    row = {"at": at, "local": at.replace(tzinfo=None)}
    batch = pa.RecordBatch.from_pylist([{"at": micros, "local": micros}], schema)
    keys, values = (column[0].as_py() for column in codec.encode(batch))
    assert (keys, values) == codec.row(row)
    assert codec.to_dict(keys, values) == row


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 128),
        ("n", -129),
        ("n", 1 << 70),
        ("n", "1"),
        ("s", b"a"),
        ("s", "\ud800"),
        ("n", True),
    ],
)
def test_values_that_make_no_key_are_refused_by_column(name: str, value: Any) -> None:
    schema = pa.schema([("n", pa.int8()), ("s", pa.string())])
    codec = TableCodec(define("t", 1, schema, ["n", desc("s")]))
    row = {"n": 1, "s": "a", name: value}
    with pytest.raises(UsageError, match=f"column '{name}'"):
        codec.key.whole_key([row["n"], row["s"]])


def test_offsets_of_nulls_are_checked_too() -> None:
    schema = pa.schema([("id", pa.int64()), ("a", pa.binary()), ("b", pa.binary())])
    codec = TableCodec(define("t", 1, schema, ["id"]))
    key, value = codec.row({"id": 1, "a": None, "b": None})
    assert value == bytes.fromhex("110000030000")
    with pytest.raises(CorruptionError):
        codec.to_dict(key, bytes.fromhex("110000030100"))
