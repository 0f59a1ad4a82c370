"""One text is one time, whichever door it comes through, or every door refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.base.timestamp import counts_from_now, to_timestamp
from kvstore.errors import KVStoreError, UsageError
from kvstore.remote.client import Client, connect
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark.format_options import read_options
from tests.test_timestamp import timestamps

NOW = 1_790_000_000 * 10**9 + 123_456_789
units = st.sampled_from(["us", "ms", "s", "m", "h", "d", "w", "M", "second", "Hours", "days", "y"])
counts = st.integers(0, 10**6).map(str) | st.sampled_from(["an", "a", "1.5", "-1", "٣"])
zones = st.sampled_from(["Z", "UTC", "+01", "-05:30", "+0100", "", " CET", "+24:00"])
edges = st.sampled_from(
    ["", "", "", " ", "\n", "\t ", "\x1c", "\x1f", "\x85", "\xa0", "\u3000", "\0"]
)
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
    st.sampled_from(["0" * 5000 + "7", "9" * 5000, "²", "७", "1_000", "+5", "0x10", "1970-01-01"]),
    st.integers(10**9, 2 * 10**9).map(lambda ns: str(kvstore.Timestamp(ns))),
    st.text(max_size=12),
)
padded = st.builds("{}{}{}".format, edges, texts, edges)


class Doors(NamedTuple):
    """A store whose clock stands still, and a client and a plain HTTP client of its server."""

    store: kvstore.Store
    client: Client
    http: HTTPConnection

    def of_store(self, text: str) -> int:
        with self.store.snapshot(text) as snapshot:
            return int(snapshot.as_of)

    def of_client(self, text: str) -> int:
        with self.client.snapshot(text) as snapshot:
            return int(snapshot.as_of)

    def of_json(self, text: str) -> int:
        """What a server makes of the time that any program sends."""
        return self._ask("POST", "/v1/resolve", json.dumps({"as_of": text}))

    def of_query(self, text: str) -> int:
        return self._ask("GET", f"/v1/resolve?as_of={quote(text, safe='')}", None)

    def _ask(self, method: str, path: str, body: str | None) -> int:
        self.http.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = self.http.getresponse()
        found = answer.read().decode()
        assert answer.status < 500, found
        if answer.status >= 400:
            raise UsageError(found, "")
        return int(json.loads(found)["as_of"])


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvstore.base.clock.Clock.wall_ns", lambda _: NOW)
        place = tmp_path_factory.mktemp("doors") / "s"
        with kvstore.open(place, engine="memory") as store:
            store.put(b"k", b"v")
            with (
                serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
                connect(running.url) as client,
                closing(HTTPConnection(urlsplit(running.url).netloc)) as http,
            ):
                yield Doors(store, client, http)


def told(door: Callable[[str], Any], text: str) -> Any:
    """What a door makes of a time as text, None if it refuses it."""
    try:
        return door(text)
    except KVStoreError:
        return None


def of_spark(text: str) -> int:
    found = read_options({"path": "/s", "timestampAsOf": text}, "state")
    assert found.as_of is not None
    assert all(number == found.as_of for _, number in found.numbers)
    return found.as_of


def check(doors: Doors, text: str) -> None:
    read = told(lambda each: int(to_timestamp(each, name="as_of", now=lambda: NOW)), text)
    assert told(of_spark, text) == read
    for to_time in (doors.store.to_time, doors.client.to_time):
        time = told(lambda each, to_time=to_time: int(to_time(each)), text)  # type: ignore[misc]
        assert same(text, time, read)
    of_store = told(doors.of_store, text)
    for door in (doors.of_client, doors.of_json, doors.of_query):
        assert same(text, told(door, text), of_store), door
    value = told(lambda each: doors.store.get_many([b"k"], as_of=[each]), text)
    assert told(lambda each: doors.client.get_many([b"k"], as_of=[each]), text) == value
    assert (value is None) is (of_store is None)


def same(text: str, one: int | None, other: int | None) -> bool:
    """Whether two times of a text are one. The time of a store may go on by a nanosecond where its
    clock stands still."""
    if one is None or other is None or not counts_from_now(text):
        return one == other
    return abs(one - other) < 10**6


@settings(max_examples=300)
@given(text=padded)
@example(text="\x1f0")
@example(text=" 1600000000 ")
@example(text="0" * 5000 + "7")
@example(text="1970-01-01T00:00:02Z")
def test_a_text_is_one_time_by_every_door(doors: Doors, text: str) -> None:
    check(doors, text)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(text=padded)
def test_a_text_is_one_time_at_length(doors: Doors, text: str) -> None:
    check(doors, text)
