"""Columns of tables for systems that have fewer types: Spark, Delta, and programs that read them.

    uint8, uint16, uint32     the next wider integer
    uint64                    decimal(20,0)
    UUID, fixed binary        binary
    timestamps                of microseconds, in UTC or without a zone
    time of day, and every type of nanoseconds      int64 of nanoseconds
    all other types           as they are

Invariants
1. No value is changed. A value that the other type does not hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from kvstore.errors import UsageError

PRECISION_MAX: Final = 38
"""Digits of a decimal in Spark and Delta."""

_WIDER: Final = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}


def outside_type(kind: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of a column elsewhere. None if none does."""
    if kind == pa.large_string():
        return pa.string()
    if is_binary(kind):
        return pa.binary()
    if getattr(kind, "unit", "") == "ns" or pa.types.is_time(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_decimal(kind):
        is_held = 0 <= kind.scale <= kind.precision <= PRECISION_MAX
        return pa.decimal128(kind.precision, kind.scale) if is_held else None
    return _WIDER.get(kind, kind)


def is_binary(kind: pa.DataType) -> bool:
    """Whether values of the type are bytes."""
    return isinstance(kind, pa.UuidType) or bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def outside_values(array: pa.Array, wanted: pa.DataType, named: Callable[[int], str]) -> pa.Array:
    """A column of a table in another type. Raises `UsageError` for the first value that the type
    does not hold; `named` names the value by its number."""
    try:
        return _converted(array, wanted)
    except pa.ArrowInvalid:
        row = next(at for at in range(len(array)) if not _converts(array[at : at + 1], wanted))
        raise UsageError(
            f"{named(row)}: the value fits {array.type}, and not {wanted}",
            "leave the column out: name the other columns in columns",
        ) from None


def _converted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    kind = array.type
    if kind == wanted:
        return array
    if isinstance(kind, pa.UuidType):
        return array.storage.cast(pa.binary()).cast(wanted)
    if pa.types.is_time(kind):
        return array.cast(pa.time64("ns")).cast(pa.int64())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary()).cast(wanted)
    return array.cast(wanted)


def _converts(array: pa.Array, wanted: pa.DataType) -> bool:
    try:
        _converted(array, wanted)
    except pa.ArrowInvalid:
        return False
    return True
