"""Tuples as keys: bytes sort as the values do, and decode to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.tuples import decode_tuple, desc, encode_tuple
from kvstore.errors import CorruptionError, UsageError

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
INSTANTS = st.datetimes(timezones=st.just(timezone.utc))
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "boolean": (pa.bool_(), st.booleans()),
    "integer": (pa.int64(), INTEGERS),
    "small integer": (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "binary": (pa.binary(), st.binary(max_size=6)),
    "text": (pa.string(), TEXT),
    "day": (pa.date32(), st.dates()),
    "instant": (pa.timestamp("us", tz="UTC"), INSTANTS),
}
ALONE: dict[str, st.SearchStrategy[Any]] = {
    "large integer": st.integers(-(1 << 63), (1 << 64) - 1),
    "decimal": st.decimals(allow_nan=False, allow_infinity=False)
    | st.sampled_from([Decimal(0), Decimal("-0.0"), Decimal("1.50"), Decimal("15e-1")]),
    "unique id": st.uuids(),
    "tuple of decimals": st.decimals(-2, 2, places=2),
}
"""Values that `tuple_key` does not take in Spark."""


def rank(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((value is not None, 0 if value is None else value) for value in values)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[pa.DataType], list[tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3))
    values = st.tuples(*(st.none() | COLUMNS[name][1] for name in names))
    rows = draw(st.lists(values, min_size=1, max_size=12))
    return [COLUMNS[name][0] for name in names], rows


@given(tables())
def test_keys_sort_as_their_rows_and_decode_to_them(
    table: tuple[list[pa.DataType], list[tuple[Any, ...]]],
) -> None:
    _, rows = table
    by_bytes = sorted(rows, key=encode_tuple)
    assert [rank(row) for row in by_bytes] == sorted(map(rank, rows))
    for row in rows:
        assert decode_tuple(encode_tuple(row)) == row


@given(tables())
def test_whole_columns_are_encoded_as_rows_are(
    table: tuple[list[pa.DataType], list[tuple[Any, ...]]],
) -> None:
    from kvstore.spark.load import encode_columns

    types, rows = table
    columns = zip(*rows, strict=True)
    arrays = tuple(pa.array(list(c), kind) for c, kind in zip(columns, types, strict=True))
    assert encode_columns(arrays).to_pylist() == [encode_tuple(row) for row in rows]


@given(st.lists(INTEGERS | TEXT, max_size=3), st.lists(INTEGERS | TEXT, min_size=1, max_size=2))
def test_tuple_is_a_prefix_of_those_that_begin_with_it(head: list[Any], tail: list[Any]) -> None:
    assert encode_tuple([*head, *tail]).startswith(encode_tuple(head))


@given(st.sampled_from(sorted(ALONE)).flatmap(lambda name: st.lists(ALONE[name], min_size=2)))
def test_values_sort_both_ways_and_decode(values: list[Any]) -> None:
    assert sorted(values, key=lambda value: encode_tuple([value])) == sorted(values)
    falling = sorted(values, key=lambda value: encode_tuple([desc(value)]))
    assert falling == sorted(values, reverse=True)
    for value in values:
        assert decode_tuple(encode_tuple([value, desc(value), 1])) == (value, desc(value), 1)


@given(tables())
def test_a_flipped_tuple_sorts_the_other_way_round(
    table: tuple[list[pa.DataType], list[tuple[Any, ...]]],
) -> None:
    def falling(row: tuple[Any, ...]) -> bytes:
        return encode_tuple([desc(value) for value in row])

    _, rows = table
    by_bytes = sorted(rows, key=falling)
    assert [rank(row) for row in by_bytes] == sorted(map(rank, rows), reverse=True)
    for row in rows:
        assert decode_tuple(falling(row)) == tuple(map(desc, row))


def test_zeros_are_one_and_nan_sorts_above_all_numbers() -> None:
    assert encode_tuple([-0.0]) == encode_tuple([0.0])
    assert encode_tuple([math.nan]) > encode_tuple([math.inf])
    assert encode_tuple([math.nan]) == encode_tuple([-math.nan])


def test_bytes_are_these() -> None:
    values = [None, False, True, -1, 1.5, b"a\x00", "é", date(1970, 1, 2)]
    assert encode_tuple(values).hex() == (
        "01" "02" "03" "107fffffffffffffff" "20bff8000000000000" "306100ff0001" "40c3a90001"
        "508000000000000001"
    )  # fmt: skip
    wide = [(1 << 64) - 1, Decimal("-12.5"), Decimal(0), Decimal("120"), UUID(int=1), desc("a")]
    assert encode_tuple(wide).hex() == (
        "18ffffffffffffffff" "28407ffdf2ccff" "2880" "28c080030d00"
        "7000000000000000000000000000000001" "bf9efffe"
    )  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        1 << 64,
        -(1 << 63) - 1,
        Decimal("NaN"),
        Decimal("1e99999"),
        datetime(2026, 1, 1),  # noqa: DTZ001  # the zone is missing on purpose
        [1],
        object(),
    ],
)
def test_what_has_no_order_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        encode_tuple([value])


@pytest.mark.parametrize(
    "damage", [lambda k: k[:-1], lambda k: k + b"\x99", lambda k: b"\x30abc" + b"\x00"]
)
def test_bytes_that_are_no_tuple_are_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CorruptionError):
        decode_tuple(damage(encode_tuple([1])))
