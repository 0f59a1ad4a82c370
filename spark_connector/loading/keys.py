"""Several columns as one key, in Spark: `tuple_key("country", "day")`.

The bytes have the form of `kvstore.codec.tuples`, and are encoded column by column in Arrow.
`decode_tuple` reads them back, and `encode_tuple` makes bounds and prefixes for scans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DateType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kvstore.codec import tuples
from kvstore.codec.ordered import TERMINATOR
from kvstore.errors import UsageError
from kvstore.tables.exact import require_held
from spark_connector.interfaces import arrow_function


def tuple_key(*columns: Column | str) -> Column:
    """A binary column that sorts as `columns` do, one after the other, nulls first.

    The columns may be booleans, integers, floats, strings, binary, dates and timestamps. Encoding
    runs in Python, and costs some 0.3 us per row and column.
    """
    if not columns:
        raise UsageError("a key of no columns", "name at least one")
    encode = arrow_function(_named, "a key of several columns")
    made: Column = encode(*(F.col(c) if isinstance(c, str) else c for c in columns))
    return made


def _named(*columns: pa.Array) -> pa.Array:
    return encode_columns(columns)


_named.__name__ = "tuple_key"  # Spark calls the column by it: tuple_key(carrier, flight)


def require_ordered(columns: StructType) -> None:
    """Raise `UsageError` unless `tuple_key` takes all these columns, before any task runs."""
    for column in columns:
        if isinstance(column.dataType, TimestampNTZType):
            raise UsageError(
                f"key column {column.name} is a timestamp without a zone",
                "cast it to timestamp",
            )
        if not isinstance(column.dataType, _ORDERED):
            raise UsageError(
                f"key column {column.name} {column.dataType.simpleString()} has no "
                "order-preserving form",
                "cast it to a boolean, integer, float, string, binary, date or timestamp",
            )


def encode_columns(columns: tuple[pa.Array, ...]) -> pa.Array:
    """The rows of these columns as encoded tuples. A type without an order is a `UsageError`."""
    return pc.binary_join_element_wise(*map(_encode, columns), b"")


def _encode(column: pa.Array) -> pa.Array:
    kind = column.type
    encode = next((encode for fits, encode in _ENCODERS if fits(kind)), None)
    if encode is None:
        raise UsageError(f"a key column of {kind} has no order-preserving form", "convert it")
    null = pa.scalar(tuples.NULL, pa.binary())
    return pc.if_else(pc.is_null(column), null, encode(column))


_ORDERED = (
    *(BooleanType, IntegralType, FloatType, DoubleType),
    *(StringType, BinaryType, DateType, TimestampType),
)


def _booleans(column: pa.Array) -> pa.Array:
    true, false = (pa.scalar(tag, pa.binary()) for tag in (tuples.TRUE, tuples.FALSE))
    return pc.if_else(column, true, false)


def _integers(tag: bytes) -> Callable[[pa.Array], pa.Array]:
    def encode(column: pa.Array) -> pa.Array:
        numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return _tagged(tag, numbers.view(np.uint64) ^ np.uint64(tuples.SIGN))

    return encode


def _doubles(column: pa.Array) -> pa.Array:
    numbers = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
    numbers = np.where(np.isnan(numbers), np.nan, numbers + 0.0)
    bits = numbers.view(np.uint64)
    flips = np.where(bits >> np.uint64(63), np.uint64((1 << 64) - 1), np.uint64(tuples.SIGN))
    return _tagged(tuples.DOUBLE, bits ^ flips)


def _texts(column: pa.Array) -> pa.Array:
    # A key with another text could not be decoded.
    require_held(column, column.type, "a key column", 0)
    return _framed(tuples.TEXT)(column)


def _framed(tag: bytes) -> Callable[[pa.Array], pa.Array]:
    def encode(column: pa.Array) -> pa.Array:
        escaped = pc.replace_substring(column.cast(pa.binary()), b"\x00", b"\x00\xff")
        start, end = (pa.scalar(part, pa.binary()) for part in (tag, TERMINATOR))
        return pc.binary_join_element_wise(start, escaped, end, b"")

    return encode


def _instants(column: pa.Array) -> pa.Array:
    if column.type.tz is None:
        raise UsageError("a key column is a timestamp without a zone", "cast it to timestamp")
    return _integers(tuples.INSTANT)(column.cast(pa.timestamp("us", tz="UTC")))


def _days(column: pa.Array) -> pa.Array:
    return _integers(tuples.DAY)(column.cast(pa.int32()))


def _tagged(tag: bytes, numbers: Any) -> pa.Array:
    """The numbers as binary: a tag and eight big-endian bytes each."""
    rows = np.empty((len(numbers), 9), dtype=np.uint8)
    rows[:, 0] = tag[0]
    rows[:, 1:] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    data = pa.py_buffer(rows.tobytes())
    return pa.Array.from_buffers(pa.binary(9), len(numbers), [None, data]).cast(pa.binary())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


_ENCODERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...] = (
    (pa.types.is_boolean, _booleans),
    (pa.types.is_signed_integer, _integers(tuples.INTEGER)),
    (pa.types.is_floating, _doubles),
    (_is_binary, _framed(tuples.BYTES)),
    (_is_text, _texts),
    (pa.types.is_date32, _days),
    (pa.types.is_timestamp, _instants),
)
