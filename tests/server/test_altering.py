"""Clients alter tables and build their indexes, by the rules of the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import kvstore
from kvstore import desc, unique
from kvstore.errors import AccessDeniedError, NotUniqueError, TableAlteredError, UsageError
from kvstore.remote.client import Client, connect
from kvstore.remote.control import as_store
from kvstore.remote.server import ListenAddress, Token, serving
from kvstore.remote.server.app import app
from kvstore.tables.definition import Definition
from tests.harness.bounds import bounds

pytestmark = pytest.mark.usefixtures("each_engine")

SCHEMA = pa.schema([("id", pa.int64()), ("zone", pa.string()), ("fare", pa.float32())])
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
DEFAULTS: dict[str, tuple[pa.DataType, Any]] = {
    "tip": (pa.float64(), 0.5),
    "count": (pa.uint64(), (1 << 64) - 1),
    "at": (pa.timestamp("us", "UTC"), NOON),
    "exact": (pa.timestamp("ns"), 1_769_860_800_000_000_001),
    "price": (pa.decimal128(9, 2), Decimal("1.50")),
    "raw": (pa.binary(), b"\xff\x00"),
    "ok": (pa.bool_(), False),
    "who": (pa.uuid(), UUID(int=7)),
    "word": (pa.large_string(), ""),
    "day": (pa.date32(), NOON.date()),
}


@pytest.fixture
def client(store: kvstore.Store) -> Iterator[Client]:
    listening = serving(app(store), ListenAddress("127.0.0.1", 0))
    with listening as running, connect(running.url) as connected:
        yield connected


@pytest.fixture
def trips(store: kvstore.Store) -> kvstore.Table:
    made = store.table("trips", SCHEMA, "id", indexes={"by_fare": "fare"})
    made.put_batch([{"id": n, "zone": f"z{n % 3}", "fare": n} for n in range(20)])
    return made


def test_a_client_alters_as_the_store_does(
    client: Client, store: kvstore.Store, trips: kvstore.Table
) -> None:
    twin = store.table("twin", SCHEMA, "id", indexes={"by_fare": "fare"})
    mine, seen = client.table("trips"), trips.schema
    assert mine.schema == seen  # and it is known here from now on
    steps: list[dict[str, Any]] = [
        {"add": DEFAULTS, "drop": "zone", "drop_index": ["by_fare"]},
        {"add": {"zone": pa.int8()}, "widen": {"fare": pa.float64()}},
        {"add": {"must": (pa.field("must", pa.int32(), nullable=False), 7)}},
        {"widen": {"must": pa.field("must", pa.int64())}, "drop": ["zone", "raw"]},
        {"add_index": {"by_fare": [desc("fare"), "must"], "who": unique("who", "id")}},
        {"drop_index": "by_fare", "add_index": {"by_fare": "at"}},
    ]
    for step in steps:
        mine.alter(**step)
        twin.alter(**step)
        found, wanted = trips.codec().definition, twin.codec().definition
        assert found.schema == wanted.schema == mine.schema
        assert (found.columns, found.layouts, found.ids) == (
            (wanted.columns, wanted.layouts, wanted.ids)
        )
        assert (found.indexes, found.revision) == (wanted.indexes, wanted.revision)
    assert mine.get(3) == trips.get(3)
    assert mine.get(3)["price"] == Decimal("1.50")


def test_a_client_builds_an_index_in_chunks_and_is_told_how_far_it_is(
    client: Client, trips: kvstore.Table
) -> None:
    mine = client.table("trips")
    mine.alter(add_index={"by_zone": "zone"})
    with pytest.raises(UsageError, match="not whole"):
        mine.find("by_zone", "z1")

    told: list[int] = []
    with bounds(INDEX_CHUNK_ROWS=2):
        assert mine.build_index("by_zone", progress=told.append) is not None
    assert told == sorted(told)
    assert mine.build_index("by_zone") is None
    assert [row["id"] for row in mine.find("by_zone", "z1")] == [*range(1, 20, 3)]
    mine.alter(add_index={"falling": desc("id")})

    def call_off(count: int) -> None:
        raise InterruptedError

    with bounds(INDEX_CHUNK_ROWS=2), pytest.raises(InterruptedError):
        mine.build_index("falling", progress=call_off)
    mine.build_index("falling")
    assert [row["id"] for row in mine.find("falling")] == [*range(19, -1, -1)]
    mine.alter(add_index={"one": unique("zone")})
    with pytest.raises(NotUniqueError, match="'one'"):
        mine.build_index("one")
    with pytest.raises(UsageError, match="no index 'gone'"):
        mine.build_index("gone")


def test_a_client_finds_by_an_index_as_of_a_time_before_it_was_dropped(
    client: Client, store: kvstore.Store, trips: kvstore.Table
) -> None:
    remote, then = client.table("trips"), store.upper - 1
    for change in ({"drop_index": "by_fare"}, {"add_index": {"by_fare": "zone"}}):
        trips.alter(**change)  # type: ignore[arg-type]
        for table in (trips, remote, client.table("trips")):
            (found,) = table.find("by_fare", 7.0, as_of=then)
            assert found["id"] == 7
            with pytest.raises(UsageError):
                table.find("by_fare", 7.0)


def test_a_batch_of_a_client_takes_a_column_that_another_process_has_added(
    client: Client, trips: kvstore.Table
) -> None:
    client.table("trips")
    trips.alter(add={"tip": pa.int64()})
    with client.batch() as batch:
        batch.table("trips").put({"id": 1, "fare": 1.0, "tip": 7})
        batch.table("trips").put({"id": 2, "fare": 2.0})
        with pytest.raises(UsageError, match="has no column 'top'"):
            batch.table("trips").put({"id": 3, "top": 7})
    assert [row["tip"] for row in trips.get_many([(1,), (2,), (3,)])] == [7, None, None]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ({"add": {"id": pa.int8()}}, "there already"),
        ({"add": {"x": pa.month_day_nano_interval()}}, "no columns of type"),
        ({"add": {"x": pa.field("x", pa.int8(), nullable=False)}}, "give a default"),
        ({"add": {"x": (pa.int8(), 300)}}, "its default"),
        ({"drop": ["id"]}, "in the key"),
        ({"drop": ["fare"]}, "in the index 'by_fare'"),
        ({"drop": ["gone"]}, "no column 'gone'"),
        ({"widen": {"fare": pa.int64()}}, "does not widen"),
        ({"widen": {"fare": pa.float64(), "id": pa.float64()}}, "does not widen|other bytes"),
        ({"add_index": {"x": "gone"}}, "no column 'gone'"),
        ({"add_index": {"by_fare": "zone"}}, "there already"),
        ({"drop_index": "gone"}, "no index 'gone'"),
        ({}, "nothing to alter"),
    ],
)
def test_an_alteration_that_cannot_be_is_refused_as_by_the_store(
    client: Client, store: kvstore.Store, trips: kvstore.Table, step: dict[str, Any], told: str
) -> None:
    mine, upper = client.table("trips"), store.upper
    for table in (mine, trips):
        with pytest.raises(UsageError, match=told):
            table.alter(**step)
    assert store.upper == upper


def test_of_two_alterations_at_once_one_is_refused(
    client: Client, store: kvstore.Store, trips: kvstore.Table
) -> None:
    before = trips.codec().definition
    mine = client.table("trips")
    mine.alter(add={"tip": pa.float64()})
    sent = trips.codec().stored.decode()
    for definition in (sent, before.to_bytes().decode()):
        with pytest.raises(TableAlteredError):
            client.call("alter_table", table="trips", definition=definition)
    trips.alter(add={"tax": pa.float64()})  # the client has not seen it
    mine.alter(drop=["tip"])
    assert trips.schema.names == mine.schema.names == ["id", "zone", "fare", "tax"]


def test_a_definition_that_no_alteration_makes_is_refused(
    client: Client, store: kvstore.Store, trips: kvstore.Table
) -> None:
    upper = store.upper
    sound = json.loads(trips.codec().stored)
    sound["revision"] += 1

    def sent(change: Callable[[dict[str, Any]], object]) -> str:
        fields = json.loads(json.dumps(sound))
        change(fields)
        return json.dumps(fields, sort_keys=True)

    forged = [
        sent(lambda fields: None),
        sent(lambda fields: fields.update(number=2)),
        sent(lambda fields: fields.update(key=[{"id": 1, "is_falling": False}])),
        sent(lambda fields: fields["columns"][1].update(name="other")),
        sent(lambda fields: fields["columns"][1].update(type="int64")),
        sent(lambda fields: fields["columns"].pop(1)),
        sent(lambda fields: fields["indexes"][0].update(is_unique=True)),
        sent(lambda fields: fields["indexes"].append({**fields["indexes"][0], "number": 9})),
        sent(lambda fields: fields.update(event_time=True)),
        sent(lambda fields: fields.update(v=2)),
        "",
        "[]",
    ]
    for definition in forged:
        with pytest.raises(UsageError):
            client.call("alter_table", table="trips", definition=definition)
    with pytest.raises(UsageError):
        client.call("alter_table", table="trips")
    with pytest.raises(UsageError, match="no index"):
        client.work("build_index", None, table="trips")
    assert store.upper == upper
    assert Definition.from_bytes("trips", trips.codec().stored) == trips.codec().definition


def test_altering_takes_the_right_admin(store: kvstore.Store, trips: kvstore.Table) -> None:
    tokens = [Token("w" * 32, ("write",)), Token("a" * 32, ("admin",))]
    with serving(app(store, tokens=tokens), ListenAddress("127.0.0.1", 0)) as running:
        with connect(running.url, token="w" * 32) as writer:
            for call in (
                lambda: writer.table("trips").alter(add={"tip": pa.float64()}),
                lambda: writer.table("trips").build_index("by_fare"),
            ):
                with pytest.raises(AccessDeniedError, match="admin"):
                    call()
        with connect(running.url, token="a" * 32) as admin:
            admin.table("trips").alter(add={"tip": pa.float64()})
    assert trips.schema.names[-1] == "tip"


def test_scripts_beside_an_owner_alter_its_tables(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "owned", control=True) as owner:
        its = owner.table("trips", SCHEMA, "id")
        its.put({"id": 1, "zone": "JFK"})
        with kvstore.connect(tmp_path / "owned") as client:
            client.table("trips").alter(add_index={"by_zone": "zone"})
            client.table("trips").build_index("by_zone")
            with as_store(client) as beside:
                table = beside.table("trips")
                client.table("trips").alter(add={"tip": (pa.float64(), 1.0)})
                assert "tip" not in table.schema.names, "this handle shows its own moment"
        assert [row["tip"] for row in its.find("by_zone", "JFK")] == [1.0]
