"""Columns: Arrow's two buffers joined and cut, change entries checked, rows made and ordered."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, repeat
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from typing_extensions import Buffer

from kvstore.errors import CorruptionError
from kvstore.loops.contract import (
    ARRAY_BYTES_MAX,
    ENTRY_HEAD,
    RULE_ANY,
    RULE_ID,
    RULE_NO_VALUE,
    RULE_SPAN,
)

T = TypeVar("T")


def join(items: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """The two buffers of an Arrow binary array: the offsets, and the bytes of all items in a row.
    None where one array cannot hold the bytes."""
    offsets = list(accumulate(map(len, items), initial=0))
    if offsets[-1] > ARRAY_BYTES_MAX:
        return None
    return array("i", offsets).tobytes(), b"".join(items)


def join_writes(
    points: Mapping[bytes, bytes | None],
    ranges: Sequence[tuple[bytes, bytes]],
    longest: int,
    places: bytes,
    ops: bytes,
    word: int,
    changeset: tuple[int, int],
) -> bytes | None:
    """The uncompressed change entry of range deletes and `points`, as `kvstore.changes.entry` has
    it: `word` is its first four bytes, `places` is its sequence, and `ops` has the operations of a
    range delete, a put and a delete. None where the value of a point has more than `longest` bytes.
    The keys and values must have less than 2 GiB together."""
    if any(value is not None and len(value) > longest for value in points.values()):
        return None
    delete_range, put, delete = ops
    keys = [*(start for start, _ in ranges), *points]
    values = [*(end for _, end in ranges), *(value or b"" for value in points.values())]
    offsets = [array("i", accumulate(map(len, each), initial=0)) for each in (keys, values)]
    made = bytes(delete if value is None else put for value in points.values())
    rows = (*keys, *values, bytes([delete_range]) * len(ranges), made)
    body = b"".join((*offsets, places, *rows))
    return ENTRY_HEAD.pack(word, len(keys), len(body), *changeset) + body


def cut(offsets: memoryview, data: Buffer) -> list[bytes]:
    """The items that `join` has joined. Raises `CorruptionError` where `offsets` do not ascend
    within `data`."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    try:
        column = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        what = "its offsets do not ascend within its bytes"
        raise CorruptionError("a column of an entry", what) from error
    items: list[bytes] = column.to_pylist()  # 40 ns an item; slicing costs 90
    return items


def arrange(items: Sequence[T], keys: Sequence[bytes]) -> list[T]:
    """`items` in the order of their `keys`. Items of equal keys keep their order."""
    return [items[at] for at in sorted(range(len(items)), key=keys.__getitem__)]


def gather(
    source: Iterator[tuple[Any, ...]],
    rows: list[Any],
    count: int,
    bytes_max: int,
    first: int,
    last: int,
) -> int:
    """Append rows of `source` to `rows`: `count` rows, or fewer once their fields from `first` to
    before `last` have `bytes_max` bytes. Returns the bytes of these fields, each of which is bytes
    or None."""
    size = 0
    for row in islice(source, count):
        rows.append(row)
        size += sum(map(len, filter(None, row[first:last])))
        if size >= bytes_max:
            break
    return size


def tuples(kind: type[T], count: int, fields: Sequence[Any]) -> Iterator[T]:
    """Make `count` instances of the named tuple `kind`. A field that is a list has an item for each
    instance; any other field is the same in all.

    Items must not refer back to the tuple: the compiled loop untracks it from the garbage
    collector, so a cycle would leak.
    """
    columns = [field if type(field) is list else repeat(field, count) for field in fields]
    # `_make` without its Python frame.
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=True))  # type: ignore[arg-type]


def survey(
    body: Buffer, count: int, is_sequenced: bool, rules: bytes, where: str
) -> tuple[int, int, int, int]:
    """Check the `body` of a change entry of `count` rows (`kvstore.changes.entry`). Returns where
    its keys and its values end, the number of rows with `RULE_ANY`, and the number with `RULE_ANY`
    or `RULE_NO_VALUE`.

    Raises `CorruptionError` where the numbers of the body contradict each other, and where a row
    breaks the rule that `rules`, of 256 bytes, has for its operation. After this check every
    reader may use the offsets as they are.
    """
    data = memoryview(body)
    offsets = 4 * (count + 1)
    keys_at = 2 * offsets + (4 * count if is_sequenced else 0)
    if count < 0 or len(data) < keys_at + count:
        raise CorruptionError(where, f"{len(data)} bytes for {count} rows")
    keys = np.frombuffer(data, "<i4", count + 1)
    values = np.frombuffer(data, "<i4", count + 1, offsets)
    keys_end = keys_at + int(keys[-1])
    values_end = keys_end + int(values[-1])
    if keys[0] or values[0] or keys[-1] < 0 or values[-1] < 0 or values_end + count != len(data):
        raise CorruptionError(where, "its offsets do not add up")
    if (keys[1:] < keys[:-1]).any() or (values[1:] < values[:-1]).any():
        raise CorruptionError(where, "its offsets do not ascend")
    if is_sequenced:
        places = np.frombuffer(data, "<i4", count, 2 * offsets)
        if (places < 0).any() or (places[1:] <= places[:-1]).any():
            raise CorruptionError(where, "the places of its rows do not ascend")
    ops = np.frombuffer(data, np.uint8, count, values_end)
    asked = np.frombuffer(rules, np.uint8)[ops]
    plain = int(np.count_nonzero(asked == RULE_ANY))
    if plain < count:
        wrong = _breaks_rule(asked, keys, values, data[keys_at:keys_end], data[keys_end:values_end])
        if wrong.any():
            first = int(np.argmax(wrong))
            problem = "does not fit" if asked[first] else "has the unknown"
            raise CorruptionError(where, f"row {first} {problem} operation {ops[first]}")
    return keys_end, values_end, plain, plain + int(np.count_nonzero(asked == RULE_NO_VALUE))


def _breaks_rule(
    asked: Any, keys: Any, values: Any, key_bytes: memoryview, value_bytes: memoryview
) -> Any:
    """For each row, whether its key and value break the rule `asked` of it."""
    empty = values[1:] == values[:-1]
    wrong = (asked == 0) | (asked > RULE_SPAN) | ((asked == RULE_NO_VALUE) & ~empty)
    wrong |= (asked == RULE_ID) & ~(empty & (keys[1:] - keys[:-1] == 8))
    for row in np.flatnonzero(asked == RULE_SPAN).tolist():
        start = key_bytes[keys[row] : keys[row + 1]]
        end = value_bytes[values[row] : values[row + 1]]
        wrong[row] = bytes(start) >= bytes(end)
    return wrong
