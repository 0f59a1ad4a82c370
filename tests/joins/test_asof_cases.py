"""The cases of pandas' `merge_asof` and of DuckDB's ASOF joins, told again as data.

pandas keeps its cases in `pandas/tests/reshape/merge/test_merge_asof.py`, DuckDB in
`test/sql/join/asof`. A case is a table of events, labels, and the values that the labels get. Left
out are the cases about what kvstore does not have: indexes and suffixes of pandas' frames, floats
as times, other comparisons beside the one of time, right joins, infinite times; and equal events of
one key, of which a table keeps the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import date, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore import backup
from kvstore.errors import UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app

UTC_US = pa.timestamp("us", "UTC")
NAIVE_US = pa.timestamp("us")


class Case(NamedTuple):
    """Events and labels are times, or pairs of a key and a time; an event's value is `values`, or
    its time."""

    name: str
    events: list[Any]
    labels: list[Any]
    expected: list[Any]
    how: Mapping[str, Any] = MappingProxyType({})
    time: pa.DataType = pa.int64()
    key: pa.DataType = pa.string()
    values: list[Any] | None = None


FORWARD: dict[str, Any] = {"direction": "forward"}
NEAREST: dict[str, Any] = {"direction": "nearest"}
STRICT: dict[str, Any] = {"allow_exact": False}
FIVE, ODD = [1, 2, 3, 6, 7], [1, 2, 3, 7, 11]
ASKED = [1, 5, 10]
BY = [("X", 1), ("Y", 6), ("Z", 11), ("Y", 15), ("Z", 16)]


def ms(*parts: int) -> list[datetime]:
    start = datetime(2016, 5, 25, 13, 30, tzinfo=timezone.utc)
    return [start + timedelta(milliseconds=part) for part in parts]


def hours(*parts: int) -> list[datetime]:
    return [datetime(2023, 3, 21, part) for part in parts]  # noqa: DTZ001  # as DuckDB's


QUOTES = [
    *zip(["GOOG", "MSFT", "MSFT", "MSFT", "GOOG"], ms(23, 23, 30, 41, 48), strict=True),
    *zip(["AAPL", "GOOG", "MSFT"], ms(49, 72, 75), strict=True),
]
BIDS = [720.50, 51.95, 51.97, 51.99, 720.50, 97.99, 720.50, 52.01]
TRADES = list(zip(["MSFT", "MSFT", "GOOG", "GOOG", "AAPL"], ms(23, 38, 48, 48, 48), strict=True))
PRICES = [("A", 13), ("A", 14), ("B", 13), ("B", 15)]

CASES = [
    Case("examples1", FIVE, ASKED, [1, 3, 7]),
    Case("examples3", FIVE, ASKED, [1, 6, None], FORWARD),
    Case("examples4", FIVE, ASKED, [1, 6, 7], NEAREST),
    Case(
        "examples2", QUOTES, TRADES, [51.95, 51.97, 720.50, 720.50, None], {}, UTC_US, values=BIDS
    ),
    Case(
        "examples2, near",
        *(QUOTES, TRADES, [51.95, None, 720.50, 720.50, None]),
        *({"tolerance": timedelta(milliseconds=2)}, UTC_US),
        values=BIDS,
    ),
    Case(
        "examples2, near and strict",
        *(QUOTES, TRADES, [None, 51.97, None, None, None]),
        *({"tolerance": timedelta(milliseconds=10), **STRICT}, UTC_US),
        values=BIDS,
    ),
    Case("tolerance_forward", ODD, ASKED, [1, None, 11], {"tolerance": 1, **FORWARD}),
    Case("tolerance_nearest", ODD, ASKED, [1, None, 11], {"tolerance": 1, **NEAREST}),
    Case("allow_exact_matches_forward", ODD, ASKED, [2, 7, 11], {**FORWARD, **STRICT}),
    Case("allow_exact_matches_nearest", ODD, ASKED, [2, 3, 11], {**NEAREST, **STRICT}),
    Case("allow_exact_matches_and_tolerance2", ms(0, 30), ms(30), ms(30), {}, UTC_US),
    Case("the same, strict", ms(0, 30), ms(30), ms(0), STRICT, UTC_US),
    Case(
        "the same, strict and near",
        *(ms(0, 30), ms(30), [None]),
        *({"tolerance": timedelta(milliseconds=10), **STRICT}, UTC_US),
    ),
    Case(
        "allow_exact_matches_and_tolerance3",
        *(ms(0, 30), ms(30, 30), [None, None]),
        *({"tolerance": timedelta(milliseconds=10), **STRICT}, UTC_US),
    ),
    Case(
        "allow_exact_matches_and_tolerance_forward",
        *([1, 3, 4, 6, 11], ASKED, [None, 6, 11]),
        {"tolerance": 1, **FORWARD, **STRICT},
    ),
    Case(
        "allow_exact_matches_and_tolerance_nearest",
        *([1, 3, 4, 6, 11], ASKED, [None, 4, 11]),
        {"tolerance": 1, **NEAREST, **STRICT},
    ),
    Case(
        "forward_by",
        *(BY, [("X", 1), ("X", 5), ("Y", 10), ("Z", 12), ("Y", 15)], [1, None, 15, 16, 15]),
        FORWARD,
    ),
    Case(
        "nearest_by",
        *(BY, [("X", 1), ("X", 5), ("Z", 10), ("Z", 12), ("Y", 15)], [1, 1, 11, 11, 15]),
        NEAREST,
    ),
    Case(
        "by_int",
        *([(1, 1), (0, 2), (0, 3), (2, 7)], [(0, 2), (1, 2), (2, 5), (3, 9)], [2, 1, None, None]),
        key=pa.int64(),
    ),
    Case(
        "timedelta_tolerance_nearest",
        *(ms(0, 3, 9, 12, 15, 18), ms(0, 5, 10, 15, 20, 25)),
        [*ms(0), None, *ms(9, 15), None, None],
        *({"tolerance": timedelta(milliseconds=1), **NEAREST}, UTC_US),
    ),
    Case(
        "tolerance_tz",
        [datetime(2016, 1, day, tzinfo=timezone.utc) for day in (2, 3, 4, 5, 6)],
        [datetime(2016, 1, day, 23, tzinfo=timezone.utc) for day in (1, 2, 6, 7)],
        [None, *(datetime(2016, 1, day, tzinfo=timezone.utc) for day in (2, 6)), None],
        *({"tolerance": timedelta(days=1)}, UTC_US),
    ),
    Case(
        "dates", [date(2018, 1, 1), date(2018, 1, 3)], [date(2018, 1, 2)], [date(2018, 1, 3)]
    )._replace(time=pa.date32(), how={**FORWARD}),
    Case("missing_right_by", [("GOOG", 1)], [("MSFT", 2)], [None]),
    # DuckDB
    Case(
        "integers",
        *([1, 3, 6, 8, 999_999], [*range(10)], [None, 1, 1, 3, 3, 3, 6, 6, 8, 8]),
    ),
    Case("nulls of time", [1, 3], [None, 2, None], [None, 1, None]),
    Case("nulls of keys", [("A", 3)], [(None, 5), ("A", 5), ("A", None)], [None, 3, None]),
    Case(
        "timestamps", hours(13, 14, 15, 16), hours(12, 13, 17, 21), [None, *hours(13, 16, 16)]
    )._replace(time=NAIVE_US),
    Case(">", hours(13, 14, 15, 16), hours(13, 14, 17), [None, *hours(13, 16)], STRICT, NAIVE_US),
    Case("<=", hours(13, 14, 15, 16), hours(12, 16, 17), [*hours(13, 16), None], FORWARD, NAIVE_US),
    Case(
        "<",
        *(hours(13, 14, 15, 16), hours(12, 15, 16), [*hours(13, 16), None]),
        *({**FORWARD, **STRICT}, NAIVE_US),
    ),
    Case("varchar", PRICES, [("A", 13), ("B", 14), ("C", 20)], [13, 13, None]),
    Case("empty_right", [], [1, 2], [None, None]),
    Case("no labels", [1], [], []),
]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A store that has a table for each case, a collection of it, and a client of its server."""
    place = tmp_path_factory.mktemp("asof")
    with kvstore.open(None, engine="memory") as store, ExitStack() as opened:
        for number, case in enumerate(CASES):
            kind = case.time if case.values is None else pa.float64()
            schema = pa.schema([("k", case.key), ("e", case.time), ("value", kind)])
            table = store.table(f"case {number}", schema, key=["k"], event_time="e")
            keys, times = keyed(case.events, case.key)
            rows = {"k": keys, "e": times, "value": case.values or times}
            table.put_batch(pa.table(rows, schema=schema))
        collection = backup.Collection(place / "collection")
        collection.backup(store)
        running = opened.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0)))
        client = opened.enter_context(kvstore.connect(running.url))
        reader = opened.enter_context(collection.open())
        yield {"store": store, "collection": reader, "client": client}


def keyed(given: list[Any], kind: pa.DataType) -> tuple[list[Any], list[Any]]:
    one = "x" if kind == pa.string() else 0
    every = [each if isinstance(each, tuple) else (one, each) for each in given]
    return [key for key, _ in every], [time for _, time in every]


@pytest.mark.parametrize("door", ["store", "collection", "client"])
def test_cases_of_pandas_and_duckdb(doors: dict[str, Any], door: str) -> None:
    for number, case in enumerate(CASES):
        keys, times = keyed(case.labels, case.key)
        labels = pa.table({"k": pa.array(keys, case.key), "t": pa.array(times, case.time)})
        table = doors[door].table(f"case {number}")
        how: dict[str, Any] = {"columns": ["value"], "on_null": "null", **case.how}
        found = table.join(labels, "k", "t", **how).read_all()
        assert found["value"].to_pylist() == case.expected, case.name
        assert found.select(["k", "t"]).equals(labels), case.name


@pytest.mark.parametrize("wrong", ["soon", 1.5, timedelta(-1), -1, True], ids=str)
def test_a_tolerance_of_another_kind_is_refused(doors: dict[str, Any], wrong: Any) -> None:
    labels = pa.table({"k": ["x"], "t": [1]})
    for door in doors.values():
        with pytest.raises(UsageError, match="tolerance"):
            door.table("case 0").join(labels, "k", "t", tolerance=wrong)
