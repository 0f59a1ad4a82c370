"""One text is one time, whichever door it comes through, or every door refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.base.timestamp import to_timestamp
from kvstore.errors import UsageError
from kvstore.remote.client import calls
from kvstore.spark.options import read_options
from tests.test_timestamp import timestamps

NOW = 1_790_000_000 * 10**9 + 123_456_789
units = st.sampled_from(["us", "ms", "s", "m", "h", "d", "w", "M", "second", "Hours", "days", "y"])
counts = st.integers(0, 10**6).map(str) | st.sampled_from(["an", "a", "1.5", "-1", "٣"])
zones = st.sampled_from(["Z", "UTC", "+01", "-05:30", "+0100", "", " CET", "+24:00"])
texts = st.one_of(
    st.builds("-{}{}".format, counts, units),
    st.builds("{} {} ago".format, counts, units),
    st.sampled_from(["now", "Today", "yesterday", "tomorrow", "oldest", "", " ", "NaT", "+1h"]),
    st.builds(
        lambda t, digits, zone: str(t)[: 19 + digits] + zone, timestamps, st.integers(0, 10), zones
    ),
    st.builds(lambda t, zone: str(t)[:10] + zone, timestamps, zones),
    st.integers(-1, 2**64).map(str),
    st.integers(10**9, 2 * 10**9).flatmap(
        lambda s: st.sampled_from([s, s * 10**3, s * 10**6, s * 10**9]).map(str)
    ),
    st.text(max_size=12),
)


def told(door: Callable[[str], Any], text: str) -> int | None:
    """The time that a door makes of a text, None if it refuses it."""
    try:
        return int(door(text))
    except UsageError:
        return None


def of_server(text: str) -> int:
    """What a server makes of the time that a client sends."""
    sent = calls.ns(text, "as_of")
    assert sent is not None
    return to_timestamp(sent, name="as_of", now=lambda: NOW)


def of_spark(text: str) -> int:
    found = read_options({"path": "/s", "timestampAsOf": text}, "state").as_of
    assert found is not None
    return found


def check(text: str) -> None:
    expected = told(lambda each: to_timestamp(each, name="as_of", now=lambda: NOW), text)
    assert told(of_server, text) == expected
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvstore.base.clock.Clock.wall_ns", lambda _: NOW)
        assert told(of_spark, text) == expected


@settings(max_examples=300)
@given(texts)
def test_a_text_is_one_time_for_python_spark_a_client_and_its_server(text: str) -> None:
    check(text)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(texts)
def test_a_text_is_one_time_at_length(text: str) -> None:
    check(text)
