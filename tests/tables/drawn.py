"""Random schemas and rows of tables."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
from hypothesis import strategies as st

from kvstore import Timestamp
from kvstore.tables import desc
from kvstore.tables.catalogue import define
from kvstore.tables.definition import Definition

_MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1))  # noqa: DTZ001  # naive
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_INT64 = st.integers(-(1 << 63), (1 << 63) - 1)

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(0, 3) | _INT64),
    "uint32": (pa.uint32(), st.integers(0, (1 << 32) - 1)),
    "uint64": (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False).map(lambda x: x + 0.0)),
    "float64": (pa.float64(), st.floats(allow_nan=False).map(lambda x: x + 0.0)),
    "decimal": (pa.decimal128(9, 2), st.decimals(-9999, 9999, places=2)),
    "wide decimal": (pa.decimal256(40, 3), st.decimals(-(10**30), 10**30, places=3)),
    "string": (pa.string(), _TEXT),
    "large_string": (pa.large_string(), _TEXT),
    "binary": (pa.binary(), st.binary(max_size=4)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "uuid": (pa.uuid(), st.uuids()),
    "date": (pa.date32(), st.dates()),
    "time": (pa.time64("us"), st.times()),
    "seconds": (pa.time32("s"), st.integers(0, 86_399).map(lambda s: (_ZERO + s * _SECOND).time())),
    "instant": (pa.timestamp("us", "UTC"), _MOMENTS.map(lambda t: t.replace(tzinfo=timezone.utc))),
    "moment": (pa.timestamp("us"), _MOMENTS),
    "nanoseconds": (pa.timestamp("ns", "UTC"), st.integers(0, (1 << 63) - 1).map(Timestamp)),
    "millis": (
        pa.timestamp("ms", "UTC"),
        _MOMENTS.map(lambda t: t.replace(microsecond=5000, tzinfo=timezone.utc)),
    ),
    "duration": (pa.duration("us"), st.timedeltas(-timedelta(9**6), timedelta(9**6))),
}
_SMALL = st.integers(-128, 127)
NESTED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "floats": (
        pa.list_(pa.float32()),
        st.lists(st.none() | TYPES["float32"][1], max_size=4),
    ),
    "vector": (
        pa.list_(pa.field("item", pa.float64(), nullable=False), 3),
        st.lists(TYPES["float64"][1], min_size=3, max_size=3),
    ),
    "texts": (
        pa.large_list(pa.field("item", pa.string(), nullable=False)),
        st.lists(_TEXT, max_size=3),
    ),
    "struct": (
        pa.struct(
            [
                pa.field("a", pa.int8(), nullable=False),
                pa.field("b", pa.list_(pa.date32())),
                pa.field("c", pa.list_(pa.bool_(), 2)),
            ]
        ),
        st.fixed_dictionaries(
            {
                "a": _SMALL,
                "b": st.none() | st.lists(st.none() | st.dates(), max_size=3),
                "c": st.none() | st.lists(st.booleans(), min_size=2, max_size=2),
            }
        ),
    ),
    "map": (
        pa.map_(pa.string(), pa.decimal128(9, 2)),
        st.dictionaries(_TEXT, st.none() | TYPES["decimal"][1], max_size=3),
    ),
    "deep": (
        pa.list_(
            pa.struct(
                [
                    pa.field("at", pa.timestamp("us", "UTC")),
                    pa.field("tags", pa.map_(pa.int16(), pa.list_(pa.binary()))),
                ]
            )
        ),
        st.lists(
            st.none()
            | st.fixed_dictionaries(
                {
                    "at": st.none() | TYPES["instant"][1],
                    "tags": st.none()
                    | st.dictionaries(
                        _SMALL, st.none() | st.lists(st.none() | st.binary(max_size=3), max_size=2)
                    ),
                }
            ),
            max_size=2,
        ),
    ),
}
"""Lists, structs and maps, which are in no key and no index."""
_ZERO, _SECOND = datetime(2000, 1, 1), timedelta(seconds=1)  # noqa: DTZ001  # its day is dropped


@st.composite
def definitions(draw: st.DrawFn) -> Definition:
    """The definition of a new table."""
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=6))
    fields = [pa.field(f"c{at}", TYPES[kind][0]) for at, kind in enumerate(kinds)]
    nested = draw(st.lists(st.sampled_from(sorted(NESTED)), max_size=2))
    fields += [pa.field(f"n{at}", NESTED[kind][0]) for at, kind in enumerate(nested)]
    key = draw(st.permutations(range(len(kinds))).map(lambda order: order[: 1 + len(order) // 3]))
    parts = [draw(st.sampled_from([f"c{at}", desc(f"c{at}")])) for at in key]
    indexes = {}
    for name in draw(st.lists(st.sampled_from(["one", "two"]), unique=True)):
        columns = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, unique=True))
        indexes[name] = [draw(st.sampled_from([f"c{at}", desc(f"c{at}")])) for at in columns]
    return define(
        "t", draw(st.sampled_from([1, 239, 240, 70000])), pa.schema(fields), parts, indexes
    )


def rows_of(definition: Definition) -> st.SearchStrategy[dict[str, Any]]:
    """Rows of a table, of all its columns."""
    by_type = dict([*TYPES.values(), *NESTED.values()])
    columns = {
        column.name: by_type[column.type]
        if not column.is_nullable
        else st.none() | by_type[column.type]
        for column in definition.columns
    }
    return st.fixed_dictionaries(columns)


def rank(value: Any) -> Any:
    """A value that sorts as the values of a column do, nulls first."""
    return (value is not None, 0 if value is None else value)


EXAMPLES: dict[str, Any] = {
    "bool": True,
    "int8": -3,
    "int64": 7,
    "uint32": 8,
    "uint64": 1 << 63,
    "float32": 0.5,
    "float64": math.pi,
    "decimal": Decimal("12.50"),
    "wide decimal": Decimal("-1.125"),
    "string": "é",
    "large_string": "b",
    "binary": b"\x00",
    "fixed": b"abc",
    "uuid": UUID(int=5),
    "date": date(2026, 1, 31),
    "time": time(12, 30, 1, 5),
    "seconds": time(12, 30, 1),
    "instant": datetime(2026, 1, 31, 12, tzinfo=timezone.utc),
    "moment": datetime(2026, 1, 31, 12),  # noqa: DTZ001  # the type has no zone
    "nanoseconds": Timestamp(1_700_000_000_000_000_001),
    "millis": datetime(2026, 1, 31, 12, 0, 0, 7000, tzinfo=timezone.utc),
    "duration": timedelta(seconds=-1),
}
"""A value of each type."""

NESTED_EXAMPLES: dict[str, Any] = {
    "floats": [0.5, None, -0.0],
    "vector": [1.0, 2.0, 3.0],
    "texts": ["", "é"],
    "struct": {"a": -3, "b": [date(2026, 1, 31), None], "c": None},
    "map": {"x": Decimal("12.50"), "y": None},
    "deep": [None, {"at": EXAMPLES["instant"], "tags": {7: [b"\x00", None], -1: None}}],
}
"""A value of each nested type."""
