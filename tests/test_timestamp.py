"""Timestamps: text and datetimes convert without loss, and ambiguous values are refused."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.base.timestamp import (
    TIMESTAMP_MAX,
    Timestamp,
    microseconds_of,
    reached,
    to_instant,
    to_timestamp,
)
from kvstore.errors import UsageError
from kvstore.mvcc.arrow import to_microseconds

timestamps = st.integers(0, TIMESTAMP_MAX).map(Timestamp)
zones = st.builds(
    timezone,
    st.integers(-86_399_999_999, 86_399_999_999).map(lambda us: timedelta(microseconds=us)),
)
# Aware datetimes within 0..2**63 - 1 in every zone.
moments = st.datetimes(
    datetime(1970, 1, 3),  # noqa: DTZ001  # hypothesis adds the zones
    datetime(2262, 4, 8),  # noqa: DTZ001
    timezones=zones,
)


@given(timestamps)
@example(Timestamp(0))
@example(Timestamp(TIMESTAMP_MAX))
def test_text_goes_back_without_loss(timestamp: Timestamp) -> None:
    assert Timestamp.parse(str(timestamp)) == timestamp
    assert len(str(timestamp)) == len("2013-01-31T23:59:59.123456789Z")


@given(timestamps, timestamps)
def test_text_sorts_as_time_does(one: Timestamp, other: Timestamp) -> None:
    assert (str(one) < str(other)) == (one < other)


@given(timestamps, st.integers(-23 * 60 - 59, 23 * 60 + 59), st.booleans())
def test_every_zone_names_the_same_instant(timestamp: Timestamp, minutes: int, colon: bool) -> None:
    local = int(timestamp) + minutes * 60 * 1_000_000_000
    if not 0 <= local <= TIMESTAMP_MAX:
        return
    hour, minute = divmod(abs(minutes), 60)
    zone = f"{'-' if minutes < 0 else '+'}{hour:02d}{':' if colon else ''}{minute:02d}"
    assert Timestamp.parse(str(Timestamp(local))[:-1] + zone) == timestamp


@given(moments)
def test_datetimes_go_back_to_the_microsecond(moment: datetime) -> None:
    timestamp = Timestamp.from_datetime(moment)
    assert timestamp.to_datetime() == moment
    assert timestamp % 1000 == 0


@given(timestamps)
@example(Timestamp(TIMESTAMP_MAX))
@example(Timestamp(TIMESTAMP_MAX - 1000))
def test_microseconds_that_go_out_are_rounded_up(timestamp: Timestamp) -> None:
    """A read as of the time has the commit. The last 807 ns of all have no microsecond above."""
    out = Timestamp.from_datetime(timestamp.to_datetime())
    assert out % 1000 == 0
    assert abs(out - timestamp) < 1000
    assert out >= timestamp or timestamp > TIMESTAMP_MAX - 1000
    assert out == microseconds_of(timestamp) * 1000
    column = to_microseconds(pa.array([None, int(timestamp)], pa.int64()))
    assert column.type == pa.timestamp("us", "UTC")
    assert column.cast(pa.int64()).to_pylist() == [None, out // 1000]
    assert reached(out, timestamp) == timestamp
    assert reached(out + 1000, timestamp) == out + 1000


@given(timestamps)
def test_nanoseconds_of_pandas_are_kept(timestamp: Timestamp) -> None:
    assert to_timestamp(pd.Timestamp(int(timestamp), unit="ns", tz="UTC")) == timestamp


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2013-01-31Z", "2013-01-31T00:00:00.000000000Z"),
        ("2013-01-31T10:20Z", "2013-01-31T10:20:00.000000000Z"),
        ("2013-01-31 10:20:30 Z", "2013-01-31T10:20:30.000000000Z"),
        ("2013-01-31T10:20:30,5Z", "2013-01-31T10:20:30.500000000Z"),
        ("  2013-01-31T00:20:30+01:00\n", "2013-01-30T23:20:30.000000000Z"),
        ("2013-01-31T00:20:30+0100", "2013-01-30T23:20:30.000000000Z"),
        ("2013-01-31 00:20:30+01", "2013-01-30T23:20:30.000000000Z"),  # as databases print it
    ],
)
def test_shorter_forms_mean_their_beginning(text: str, same: str) -> None:
    assert str(Timestamp.parse(text)) == same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2013-01-31T23:59:59",  # a local time of which zone?
        "2013-01-31",
        "2013-02-30T00:00:00Z",
        "2013-01-31T25:00:00Z",
        "2013-01-31T23:59:60Z",
        "2013-01-31T10:20.5Z",  # half a minute, or half a second?
        "2013-01-31-05",  # five in the morning, or a zone?
        "2013-01-31T10:20:30.Z",
        "2013-01-31T10:20:30.1234567890Z",
        "2013-01-31T10:20:30+24:00",
        "2013-01-31T10:20:30Z and more",
        "٢٠١٣-01-31T10:20:30Z",
        "1969-12-31T23:59:59Z",
        "1970-01-01T00:00:00+00:01",
        "2262-04-11T23:47:16.854775808Z",
        "9999-12-31T23:59:59Z",
        "0000-01-01T00:00:00Z",
    ],
)
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Timestamp.parse(text)


def test_last_timestamp_parses() -> None:
    assert Timestamp.parse("2262-04-11T23:47:16.854775807Z") == TIMESTAMP_MAX


class _Vague(tzinfo):
    """A zone that does not know its offset, which makes a datetime naive."""

    def utcoffset(self, _moment: datetime | None) -> None:
        return None


@pytest.mark.parametrize("zone", [None, _Vague()])
def test_naive_datetime_is_refused(zone: tzinfo | None) -> None:
    with pytest.raises(UsageError, match="no time zone"):
        Timestamp.from_datetime(datetime(2013, 1, 1, tzinfo=zone))


@pytest.mark.parametrize("value", [-1, TIMESTAMP_MAX + 1, Timestamp(-1), Timestamp(1 << 63)])
def test_number_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(UsageError, match="outside"):
        to_timestamp(value)


@pytest.mark.parametrize("value", [None, True, 1.5, b"2013-01-31Z"])
def test_other_type_is_refused_by_the_name_of_its_argument(value: object) -> None:
    with pytest.raises(UsageError, match=f"as_of must be .* not .*{type(value).__name__}"):
        to_timestamp(value, name="as_of")  # type: ignore[arg-type]


@given(timestamps)
def test_it_is_the_integer_everywhere_but_in_text(timestamp: Timestamp) -> None:
    assert hash(timestamp) == hash(int(timestamp))
    assert f"{timestamp:d}" == str(int(timestamp))
    assert f"{timestamp}" == str(timestamp)
    assert type(timestamp + 1) is int
    assert eval(repr(timestamp)) == timestamp
    again = pickle.loads(pickle.dumps(timestamp))
    assert (type(again), again) == (Timestamp, timestamp)
    assert to_timestamp(timestamp) is timestamp


@pytest.mark.parametrize("unit", ["ns", "s"])
def test_a_duration_of_numpy_is_no_time(unit: str) -> None:
    duration: Any = np.timedelta64(5, unit)  # type: ignore[call-overload]  # a unit is a literal
    with pytest.raises(UsageError, match="not timedelta64"):
        to_timestamp(duration, name="as_of")
    with pytest.raises(UsageError, match="not timedelta64"):
        to_instant(duration, name="due", now=lambda: 0)
