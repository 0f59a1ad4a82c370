"""The declarations of verbs: what a client sends by them is what a server reads by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvstore.base.timestamp import Timestamp, is_oldest, to_timestamp
from kvstore.errors import UsageError
from kvstore.remote.client.calls import request, rows_request
from kvstore.remote.parameters import (
    BOUND,
    EXPIRY,
    FLAG,
    KEY,
    START,
    TEXT,
    TIME,
    VALUE,
    Parameter,
    age,
    count,
    integer,
    list_of,
    seconds,
    word,
)
from kvstore.remote.protocol import LABELS_SCHEMA
from kvstore.remote.server.http import fields_of
from kvstore.remote.verbs import GET, JOIN, PUT, PUT_IF, VERBS
from kvstore.timeline.expiries import sent_expiry
from kvstore.transaction import UNCHECKED

NOW = 1_790_000_000 * 10**9


def instant(time: Any) -> int:
    return int(to_timestamp(time, name="time", now=lambda: NOW))


def same(value: Any) -> Any:
    return value


def beginning(time: Any) -> int | str:
    return "oldest" if is_oldest(time) else instant(time)


def in_seconds(value: Any) -> float:
    return round(value.total_seconds() if isinstance(value, timedelta) else value, 6)


_ages = st.timedeltas(timedelta(0), timedelta(days=9999))
_later = st.integers(253_402_300_800 * 10**6, 2**63 - 1)
_times = st.one_of(
    st.integers(0, 10**9 - 1),
    _later,
    _later.map(Timestamp),
    st.integers(10**9, 10**12).map(Timestamp),
    st.timedeltas(timedelta(0), timedelta(days=9999)),
    st.sampled_from(["now", "-5m", "2 hours ago", "2026-01-02T03:04:05.000000006Z"]),
)
_ahead = st.timedeltas(timedelta(microseconds=1), timedelta(days=9999))
KINDS: dict[str, tuple[Parameter, st.SearchStrategy[Any], Callable[[Any], Any]]] = {
    "key": (KEY, st.binary(max_size=20), same),
    "bound": (BOUND, st.binary(max_size=20).map(bytearray), bytes),
    "value": (VALUE, st.binary(max_size=20), same),
    "value or null": (VALUE.or_null, st.binary(max_size=20) | st.none(), same),
    "text": (TEXT, st.text(st.characters(codec="utf-8"), max_size=20), same),
    "word": (word(("all", "latest")), st.sampled_from(["all", "latest"]), same),
    "flag": (FLAG, st.booleans(), same),
    "count": (count(), st.integers(0, 2**63 - 1), same),
    "integer": (integer(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), same),
    "seconds": (seconds(), _ages.map(timedelta.total_seconds), in_seconds),
    "age": (age(), _ages, in_seconds),
    "time": (TIME, _times, instant),
    "start": (
        START,
        _times | st.just(" Oldest "),
        lambda t: "oldest" if "ldest" in str(t) else instant(t),
    ),
    "expiry": (EXPIRY, _ahead | _later, sent_expiry),
    "list": (list_of(KEY), st.lists(st.binary(max_size=9), max_size=4).map(tuple), list),
}


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_a_server_reads_what_a_client_was_given(name: str, data: st.DataObject) -> None:
    kind, values, meaning = KINDS[name]
    value = data.draw(values)
    sent = kind.sent(value, "x")
    assert meaning(kind.read(json.loads(json.dumps(sent)), "x")) == meaning(value)


@example(age=timedelta(microseconds=20), first=0, null=True)
@given(age=_ages, first=st.integers(0, 2**40), null=st.booleans())
def test_arguments_beside_rows_are_in_the_query(age: timedelta, first: int, null: bool) -> None:
    """Also an age of a few microseconds, which Python prints with an exponent."""
    asked = {"max_age": age.total_seconds(), "first": first, "null_if_gone": null}
    sent = rows_request(JOIN, LABELS_SCHEMA.empty_table(), asked, same)
    query = sent.target.partition("?")[2].encode()
    read = JOIN.read(fields_of(query), has_rows=True)
    assert {**read, "max_age": in_seconds(read["max_age"])} == {
        **asked,
        "max_age": in_seconds(age),
    }


def test_an_argument_is_left_out_or_null() -> None:
    condition = {"expected": None, "unchanged_since": None}
    put_if = {"key": b"k", "value": b"v", "expires": None, **condition}
    assert json.loads(request(PUT_IF, put_if).body) == {"key": "k", "value": "v", "expected": None}
    unchecked = json.loads(request(PUT_IF, {**put_if, "expected": UNCHECKED}).body)
    assert unchecked == {"key": "k", "value": "v"}
    with pytest.raises(UsageError, match="value must be bytes, not NoneType"):
        request(PUT_IF, {**put_if, "value": None})


def test_a_key_is_in_the_path_and_a_long_one_in_the_body() -> None:
    assert request(GET, {"key": b"a/b", "as_of": None}).target == "/v1/keys/a%2Fb"
    put = request(PUT, {"key": b"k", "value": b"v", "durability": "sync"})
    assert (put.method, put.target, put.body) == ("PUT", "/v1/keys/k?durability=sync", b"v")
    long = request(GET, {"key": b"k" * 60_000})
    assert (long.method, long.target) == ("POST", "/v1/get")


def test_a_request_that_may_change_something_is_not_sent_again_without_a_token() -> None:
    for verb in VERBS.values():
        assert verb.is_read + verb.once + verb.is_repeatable <= 1, verb.name
        if verb.right == "read":
            assert verb.is_read or verb.is_repeatable, verb.name
