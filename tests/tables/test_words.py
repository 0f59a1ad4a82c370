"""Values as JSON and as words of a shell: what goes out comes in again as the same value, and a
value that a column does not hold is refused."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.tables.definition import kind_of
from kvstore.tables.words import NumberText, json_row, read_value, to_value
from tests.tables.drawn import TYPES

_LONG = st.integers(-(1 << 63), (1 << 63) - 1)
MORE: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    **TYPES,
    "any double": (pa.float64(), st.floats()),
    "any float": (pa.float32(), st.floats(width=32)),
    "large binary": (pa.large_binary(), st.binary(max_size=9)),
    "time of nanoseconds": (pa.time64("ns"), st.integers(0, 86_400 * 10**9 - 1)),
    "long duration": (pa.duration("us"), st.timedeltas(-timedelta(10**8), timedelta(10**8))),
    "duration of nanoseconds": (pa.duration("ns"), _LONG),
    "duration of seconds": (
        pa.duration("s"),
        st.integers(-(10**9), 10**9).map(lambda s: timedelta(seconds=s)),
    ),
    "old nanoseconds": (pa.timestamp("ns"), st.integers(-(1 << 62), (1 << 62))),
    "another zone": (pa.timestamp("ns", "Europe/Berlin"), st.integers(0, 1 << 62)),
    "all years": (
        pa.timestamp("us"),
        st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)),  # noqa: DTZ001  # naive
    ),
    "falling decimal": (pa.decimal128(5, -2), st.integers(-999, 999).map(lambda n: n * 100)),
}
cases = st.sampled_from(sorted(MORE)).flatmap(
    lambda name: st.tuples(st.just(MORE[name][0]), MORE[name][1])
)


def from_json(text: str) -> Any:
    return json.loads(text, parse_float=NumberText, parse_constant=NumberText)


def same(kind: pa.DataType, one: Any, other: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    stored = kind_of(kind).stored
    return repr(stored(one)) == repr(stored(other))  # -0.0 is not 0.0


@example(case=(pa.float64(), 2.0**-24))  # repr rounds its last digit up, and format down
@settings(max_examples=500)
@given(case=cases)
def test_a_value_is_the_same_behind_json_and_behind_a_word(case: tuple[pa.DataType, Any]) -> None:
    kind, value = case
    shown = json_row(pa.schema([("c", kind)]), {"c": value})["c"]
    assert same(kind, read_value(kind, from_json(json.dumps(shown)), "c"), value)
    if isinstance(value, bytes):
        shown = value.hex()
    word = shown if isinstance(shown, str) else json.dumps(shown)
    assert same(kind, to_value(kind, word, "c"), value)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (pa.int64(), "9223372036854775808"),
        (pa.int64(), "7.5"),
        (pa.int8(), '"0x7F"'),
        (pa.int64(), "true"),
        (pa.float64(), "9007199254740993"),
        (pa.float64(), "9007199254740993.0"),
        (pa.float64(), "1e400"),
        (pa.decimal128(9, 2), "1.005"),
        (pa.decimal128(9, 2), '"NaN"'),
        (pa.bool_(), "1"),
        (pa.string(), "7"),
        (pa.string(), "7.5"),
        (pa.string(), '{"base64": "AA=="}'),
        (pa.string(), "[1]"),
        (pa.string(), r'"\ud800"'),
        (pa.binary(), '{"base64": "A"}'),
        (pa.binary(), '{"base64": 7}'),
        (pa.binary(2), '"abc"'),
        (pa.uuid(), '"abc"'),
        (pa.date32(), '"2026-02-30"'),
        (pa.date32(), "20000"),
        (pa.time64("us"), '"24:00:00"'),
        (pa.timestamp("us", "UTC"), '"2026-01-31T12:00:00"'),
        (pa.timestamp("us"), '"2026-01-31T12:00:00Z"'),
        (pa.timestamp("us", "UTC"), '"2026-01-31T12:00:00.0000001Z"'),
        (pa.timestamp("us", "UTC"), "1769860800000000"),
        (pa.duration("s"), '"7 s"'),
        (pa.duration("s"), "100000000000000"),
    ],
    ids=str,
)
def test_a_value_that_a_column_does_not_hold_is_refused(kind: pa.DataType, given: str) -> None:
    with pytest.raises(UsageError, match=r"^here: .* is no "):
        read_value(kind, from_json(given), "here")
