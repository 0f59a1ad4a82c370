"""Columns of keys and of times as users have them: binary or text, instants or nanoseconds.

Invariants
1. A column of another type is refused before a row is read.
2. A null, a key that is too long and a time out of range are refused by column and row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from kvstore.base.clock import Clock
from kvstore.base.timestamp import (
    OTHER_UNITS_MAX,
    TIMESTAMP_MAX,
    Timestamp,
    is_no_due_time,
    is_other_unit,
)
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX

if TYPE_CHECKING:
    import numpy.typing as npt

    _Longs: TypeAlias = npt.NDArray[np.int64]


def key_column(column: pa.Array, name: str, first: int) -> pa.Array:
    """A column of keys as a binary array. `first` is the row of its first key. Raises `UsageError`
    for a null and for a key that is too long."""
    column = decoded(column)
    _require_no_null(column, name, first)
    keys = column.cast(pa.binary())
    _require_short(keys, name, first)
    return keys


def decoded(column: pa.Array) -> pa.Array:
    """The rows of a column without its dictionary. Views in a dictionary become plain bytes or
    text, because Arrow gathers no views."""
    if not pa.types.is_dictionary(column.type):
        return column
    values = column.dictionary
    plain = _gathered(values.type)
    return (values if plain is None else values.cast(plain)).take(column.indices)


def time_column(column: pa.Array, name: str, first: int, now: Callable[[], int]) -> _Longs:
    """A column of times as nanoseconds. `first` is the row of its first time. Raises `UsageError`
    for a null, for a time out of range, and for an integer that surely counts another unit than
    nanoseconds: see `kvstore.base.timestamp.is_other_unit`, which asks for `now`."""
    _require_no_null(column, name, first)
    try:
        times = _as_nanoseconds(column)
    except pa.ArrowInvalid:
        row = next(at for at in range(len(column)) if not _has_nanoseconds(column[at : at + 1]))
        number = column.cast(pa.int64(), safe=False)[row].as_py()
        unit = f" {column.type.unit}" if pa.types.is_timestamp(column.type) else ""
        raise UsageError(
            f"column {name!r} has {number}{unit} in row {first + row}", _times_are()
        ) from None
    if len(times) and times.min() < 0:
        at = int(np.argmax(times < 0))
        raise UsageError(f"column {name!r} has {times[at]} in row {first + at}", _times_are())
    if pa.types.is_integer(column.type):
        require_nanoseconds(times, name, first, now)
    return times


def _as_nanoseconds(column: pa.Array) -> _Longs:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns", column.type.tz))
    found: _Longs = column.cast(pa.int64()).to_numpy()
    return found


def _has_nanoseconds(column: pa.Array) -> bool:
    try:
        _as_nanoseconds(column)
    except pa.ArrowInvalid:
        return False
    return True


def expiry_column(
    column: pa.Array, name: str, first: int, now: Callable[[], int]
) -> tuple[pa.Array, _Longs]:
    """Which rows of a column of due times have one, and these times as nanoseconds. Raises as
    `time_column`, but takes nulls, and refuses times that are surely of another unit: see
    `kvstore.base.timestamp.is_no_due_time`."""
    column = decoded(column)
    require_time_type(pa.field(name, column.type))
    is_set = column.is_valid()
    if column.null_count == len(column):
        return is_set, np.empty(0, np.int64)
    if column.null_count:
        if pa.types.is_integer(column.type):
            column = column.cast(pa.int64())  # the fill does not fit into each type
        column = column.fill_null(_some_time(column.type))
    times = time_column(column, name, first, now)
    if is_no_due_time(int(times.min()), now()):
        row = int(np.argmax(times <= OTHER_UNITS_MAX))
        unit = is_other_unit(int(times[row]), now())
        looks = "" if unit is None else f", and looks like {unit}"
        raise UsageError(
            f"column {name!r} has {times[row]} in row {first + row}, which is "
            f"{Timestamp(times[row])} in nanoseconds{looks}",
            "pass timestamps with a time zone, or nanoseconds, and null for rows that stay",
        )
    return is_set, times[is_set.to_numpy(zero_copy_only=False)]


def due_column(column: pa.Array, name: str, first: int) -> pa.Array:
    """A column of due times as nanoseconds, null for rows that stay. Row `first` is the first one.
    Raises as `expiry_column`."""
    is_set, times = expiry_column(column, name, first, Clock().wall_ns)
    stays = ~is_set.to_numpy(zero_copy_only=False)
    dues = np.zeros(len(stays), np.int64)
    dues[~stays] = times
    return pa.array(dues, mask=stays)


def _some_time(kind: pa.DataType) -> pa.Scalar:
    """A time that `time_column` takes, whatever the time is now."""
    if pa.types.is_integer(kind):
        return pa.scalar(TIMESTAMP_MAX, kind)
    return pa.scalar(_YEAR_2100_S, pa.timestamp("s", kind.tz)).cast(kind)


_YEAR_2100_S: Final = 4_102_444_800


def require_nanoseconds(times: _Longs, name: str, first: int, now: Callable[[], int]) -> None:
    """Raise `UsageError` for the first integer of a column that surely counts another unit."""
    if not len(times) or times.min() > OTHER_UNITS_MAX:
        return
    newest = now()
    for time in np.unique(times[times <= OTHER_UNITS_MAX]).tolist():
        unit = is_other_unit(time, newest)
        if unit is not None:
            row = first + int(np.argmax(times == time))
            raise UsageError(
                f"column {name!r} has {time} in row {row}, which looks like {unit}",
                "pass timestamps with a time zone, or nanoseconds",
            )


def _times_are() -> str:
    return f"times are nanoseconds from 0 to {TIMESTAMP_MAX}, which is in April 2262"


def _require_no_null(column: pa.Array, name: str, first: int) -> None:
    if column.null_count:
        row = first + column.is_null().index(True).as_py()
        raise UsageError(f"column {name!r} has a null in row {row}", "drop such rows first")


def row_puts(rows: object) -> Iterator[tuple[Any, Any, int | None]]:
    """Keys and values one by one, each with the time at which it expires, if it has one of its own:
    of a mapping, of pairs, or of Arrow data with the columns `key`, `value` and, if need be,
    `expires`. Raises `UsageError`."""
    if isinstance(rows, Mapping):
        for key, value in rows.items():
            yield key, value, None
    elif hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__"):
        yield from _arrow_puts(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        for row in rows:
            if not isinstance(row, tuple | list) or len(row) != 2:
                raise UsageError(f"{row!r} is no pair", "pass a key and a value")
            yield row[0], row[1], None
    else:
        raise UsageError(f"rows of type {type(rows).__name__}", "pass pairs, or Arrow data")


def _arrow_puts(rows: Any) -> Iterator[tuple[bytes, bytes, int | None]]:
    if hasattr(rows, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(rows)
    else:
        batch = pa.record_batch(rows)
        reader = pa.RecordBatchReader.from_batches(batch.schema, [batch])
    for name in ("key", "value"):
        if name not in reader.schema.names:
            raise UsageError(f"no column {name!r}", "name the columns key and value")
        require_once(name, reader.schema.names)
        require_bytes_type(reader.schema.field(name), noun=f"{name}s")
    require_once("expires", reader.schema.names)
    first = 0
    for batch in reader:
        keys, values = batch.column("key"), batch.column("value")
        for column, name in ((keys, "key"), (values, "value")):
            _require_no_null(column, name, first)
        keys, values = keys.cast(pa.binary()), values.cast(pa.binary())
        dues: Iterable[int | None] = repeat(None, len(keys))
        if "expires" in batch.schema.names:
            dues = _dues(batch.column("expires"), first)
        yield from zip(keys.to_pylist(), values.to_pylist(), dues, strict=True)
        first += batch.num_rows


def _dues(column: pa.Array, first: int) -> list[int | None]:
    is_set, times = expiry_column(column, "expires", first, Clock().wall_ns)
    given = iter(times.tolist())
    return [next(given) if each else None for each in is_set.to_pylist()]


def require_once(name: str, names: Sequence[str]) -> None:
    """Raise `UsageError` if there are two columns `name`: Arrow finds neither of them."""
    count = list(names).count(name)
    if count > 1:
        raise UsageError(f"{count} columns {name!r}", "rename one")


def require_bytes_type(field: pa.Field, *, noun: str = "keys") -> None:
    """Raise `UsageError` unless a column has bytes or text. `noun` names its items in the error.

    A column without a type passes: an empty frame of pandas has such columns, and a null in it is
    refused by its row.
    """
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if kind not in _texts() and not pa.types.is_fixed_size_binary(kind):
        raise UsageError(
            f"column {field.name!r} has {noun} of type {field.type}",
            "pass binary or text, in UTF-8",
        )


def require_time_type(field: pa.Field) -> None:
    """Raise `UsageError` unless a column has instants, integers of nanoseconds, or no type: a null
    in it is refused by its row."""
    is_time = pa.types.is_timestamp(field.type)
    if is_time and field.type.tz is None:
        raise UsageError(
            f"column {field.name!r} has times without a time zone", "convert them to UTC first"
        )
    if not (is_time or pa.types.is_integer(field.type) or pa.types.is_null(field.type)):
        raise UsageError(
            f"column {field.name!r} has times of type {field.type}",
            "pass timestamps with a time zone, or integers of nanoseconds",
        )


@cache
def _texts() -> frozenset[pa.DataType]:
    """The types of text and bytes, and the type of a column of nulls."""
    short = (pa.null(), pa.binary(), pa.binary_view(), pa.string(), pa.string_view())
    return frozenset([*short, pa.large_binary(), pa.large_string()])


def _gathered(views: pa.DataType) -> pa.DataType | None:
    """The type that Arrow gathers, for a type of views."""
    return {pa.binary_view(): pa.large_binary(), pa.string_view(): pa.large_string()}.get(views)


def _require_short(keys: pa.Array, name: str, first: int) -> None:
    if len(keys) and keys.nbytes > KEY_BYTES_MAX:
        import pyarrow.compute as pc

        lengths = pc.binary_length(keys).to_numpy()
        if lengths.max() > KEY_BYTES_MAX:
            at = int(np.argmax(lengths > KEY_BYTES_MAX))
            raise UsageError(
                f"column {name!r} has a key of {lengths[at]} bytes in row {first + at}",
                f"at most {KEY_BYTES_MAX} are allowed",
            )
