"""Feeds of tables: the rows of the state and each change of a row once, typed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kvstore
from kvstore import Store
from kvstore.errors import FencedError, UsageError
from kvstore.tables import Table, TableFeed
from tests.harness.seeds import seeded

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("fare", pa.float64())])


@pytest.fixture
def store(tmp_path: Path, each_engine: str) -> Any:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def trips(store: Store) -> Table:
    return store.table("trips", schema=SCHEMA, key=["id"], indexes={"by_zone": ["zone"]})


def row(number: int, zone: str | None = "JFK", fare: float = 1.0) -> dict[str, Any]:
    return {"id": number, "zone": zone, "fare": fare}


def told(feed: TableFeed, *columns: str) -> list[tuple[Any, ...]]:
    """The chosen columns of the rest of a feed, each row with whether it is of the state."""
    found = []
    for batch in feed:
        names = [*columns, "_change_type"]
        rows = zip(*(batch.rows.column(name).to_pylist() for name in names), strict=True)
        found += [(batch.is_state, *each) for each in rows]
        feed.ack(batch)
    return found


def test_a_feed_begins_with_the_rows_and_then_has_each_change(store: Store, trips: Table) -> None:
    other = store.table("zones", schema=SCHEMA, key=["id"])
    store.put(b"plain", b"")
    trips.put_batch([row(1), row(2), row(3)])
    other.put(row(1))
    feed = trips.feed("f", start="state", batch_rows=2)
    trips.put(row(2, "LGA"))
    trips.put(row(4))
    trips.delete(1)
    other.put(row(9))
    store.put(b"plain", b"again")
    assert told(feed, "id", "zone") == [
        (True, 1, "JFK", "insert"),
        (True, 2, "JFK", "insert"),
        (True, 3, "JFK", "insert"),
        (False, 2, "JFK", "update_preimage"),
        (False, 2, "LGA", "update_postimage"),
        (False, 4, "JFK", "insert"),
        (False, 1, "JFK", "delete"),
    ]
    trips.feed("f")
    with pytest.raises(FencedError):
        feed.ack(feed.position)


def test_a_consumer_chooses_columns_and_images(store: Store, trips: Table) -> None:
    trips.put(row(1, fare=5.0))
    feed = trips.feed("f", start="oldest", columns=["fare"], images="post")
    trips.put(row(1, fare=6.0))
    trips.delete(1)
    batches = [batch.rows for batch in feed]
    names = {tuple(batch.schema.names) for batch in batches}
    assert names == {("fare", "_change_type", "_commit_version", "_commit_timestamp")}
    rows = pa.Table.from_batches(batches).to_pylist()
    assert [(each["fare"], each["_change_type"]) for each in rows] == [
        (5.0, "insert"),
        (6.0, "update_postimage"),
        (6.0, "delete"),
    ]
    for bad in ({"columns": ["fee"]}, {"images": "both"}):
        with pytest.raises(UsageError):
            trips.feed("g", start="now", **bad)
    assert [hold.name for hold in store.holds.all()] == ["feed/f"]


def test_rows_have_the_columns_of_their_time(trips: Table) -> None:
    feed = trips.feed("f", start="now")
    trips.put(row(1))
    first = [batch.rows.schema.names for batch in feed if batch.rows.num_rows]
    trips.alter(add={"note": pa.string()})
    trips.put({**row(2), "note": "x"})
    second = [batch.rows for batch in feed if batch.rows.num_rows]
    assert "note" not in first[0]
    assert second[0].column("note").to_pylist() == ["x"]


def test_a_feed_agrees_with_the_changes_of_the_table_over_imports_and_stops(
    store: Store, trips: Table
) -> None:
    """Random changes; the consumer stops after any batch, and three workers share the streams."""
    draw = seeded("KVSTORE_SEED")
    store.reshard(3)
    for number in range(3):
        trips.feed("f", "now" if number == 0 else None, streams=(number, 3))
    since = store.upper - 1
    found: list[dict[str, Any]] = []
    for _ in range(20):
        for _ in range(6):
            number = draw.randrange(9)
            if draw.random() < 0.3:
                trips.delete(number)
            else:
                trips.put(row(number, draw.choice(["JFK", "LGA", None])))
        feed = trips.feed("f", streams=(draw.randrange(3), 3), batch_rows=3)
        for batch in feed:
            found += batch.rows.to_pylist()
            feed.ack(batch)
            if draw.random() < 0.3:
                break
    for number in range(3):
        for batch in trips.feed("f", streams=(number, 3)):
            found += batch.rows.to_pylist()
    expected = trips.changes(since).read_all().to_pylist()
    assert counted(found) == counted(expected)


def counted(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(each.values()) for each in rows)
