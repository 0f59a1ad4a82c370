"""Classes as schemas: rows go in and come out as instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
import pytest
from mypy.api import run as mypy_run
from typing_extensions import NotRequired, TypedDict

import kvstore
from kvstore import backup
from kvstore.errors import UsageError
from kvstore.server import ListenAddress, app, serving


@dataclass
class Trip:
    kind: ClassVar[str] = "trip"
    vendor: str
    number: Annotated[int, pa.int32()]
    at: datetime
    fare: Decimal | None = None


@dataclass
class Wrong:
    id: int
    tags: set[str]


class Bare:
    pass


@pytest.fixture
def store() -> Iterator[kvstore.Store]:
    with kvstore.open(None, engine="memory") as opened:
        yield opened


def test_rows_are_instances(store: kvstore.Store) -> None:
    trips = store.table("trips", Trip, key=["vendor", "number"])
    assert trips.schema == pa.schema(
        [
            pa.field("vendor", pa.string(), nullable=False),
            pa.field("number", pa.int32(), nullable=False),
            pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
            pa.field("fare", pa.decimal128(38, 9)),
        ]
    )
    noon = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    first, second = Trip("A", 1, noon), Trip("A", 2, noon, Decimal("1.5"))
    trips.put(first)
    trips.put_batch([second])
    assert trips.get("A", 1) == first
    assert trips.get_many([("A", 2), ("A", 3)]) == [second, None]
    assert list(trips.rows("A")) == [first, second]
    assert trips.get("A", 1, columns=["number"]) == {"number": 1}
    assert store.table("trips").get("A", 2)["fare"] == Decimal("1.5")


class Flight(TypedDict):
    number: int
    gate: NotRequired[str | None]


@dataclass
class Gate:
    number: int
    gate: str | None


FLIGHTS = pa.schema([("number", pa.int32()), ("gate", pa.string()), ("fare", pa.float64())])


def test_a_class_chooses_columns_of_a_table_that_is_there(tmp_path: Path) -> None:
    """By each handle; other columns of the table may come and go."""
    with (
        kvstore.open(tmp_path / "store", control=True) as store,
        serving(app(store), ListenAddress("127.0.0.1", 0)) as running,
        kvstore.connect(running.url) as client,
    ):
        made = store.table("flights", FLIGHTS, "number", indexes={"by_gate": "gate"})
        made.put({"number": 7, "gate": "B7", "fare": 1.5})
        made.put(Gate(8, "B7"))
        made.alter(add={"more": pa.string()}, drop="fare")
        collection = backup.Collection(tmp_path / "backups")
        collection.backup(store)
        with (
            kvstore.follow(tmp_path / "store") as live,
            store.snapshot() as snapshot,
            client.snapshot() as far,
            store.transaction() as transaction,
            collection.open() as reader,
        ):
            for source in (store, client, live, snapshot, far, transaction, reader):
                gates = source.table("flights", row=Gate)
                assert gates.get(7) == Gate(7, "B7")
                assert gates.get_many([8, 9]) == [Gate(8, "B7"), None]
                assert list(gates.rows()) == [Gate(7, "B7"), Gate(8, "B7")]
                assert list(gates.find("by_gate", "B7", reverse=True)) == [*gates.rows()][::-1]
                assert gates.find("by_gate").read_all().schema.names == ["number", "gate"]
                assert list(gates.rows(columns=["more"])) == [{"more": None}] * 2
                flights = source.table("flights", row=Flight)
                assert flights.get(7) == {"number": 7, "gate": "B7"}
        with store.batch() as batch:
            batch.table("flights", row=Gate).put(Gate(7, None))
        assert store.table("flights", row=Gate).get(7) == Gate(7, None)


def test_a_class_that_does_not_fit_a_table_is_refused(store: kvstore.Store) -> None:
    store.table("flights", FLIGHTS, "number")
    refused: list[tuple[Any, str]] = [
        (Trip, "has no column 'vendor'"),
        (dataclass(type("A", (), {"__annotations__": {"number": str}})), "A.number is str, and"),
        (dataclass(type("B", (), {"__annotations__": {"gate": str}})), "B.gate is never None"),
        (Bare, "no annotated fields"),
        ("Gate", "pass a class with annotated fields"),
    ]
    for given, says in refused:
        with pytest.raises(UsageError, match=says):
            store.table("flights", row=given)


def test_type_checkers_know_the_rows() -> None:
    """`typed_rows.py` has the types; mypy compares them."""
    told, errors, code = mypy_run([str(Path(__file__).parent / "typed_rows.py")])
    assert code == 0, told + errors


@pytest.mark.parametrize(
    ("given", "says"), [(Wrong, "Wrong.tags is set"), (Bare, "Bare has no annotated fields")]
)
def test_a_class_without_columns_is_refused(store: kvstore.Store, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        store.table("t", given, key=["id"])
