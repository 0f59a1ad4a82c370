"""The types that callers see: mypy compares them, in `test_classes.py`. Nothing here runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import pyarrow as pa
from typing_extensions import assert_type

import kvstore
from kvstore.backup import Collection
from kvstore.tables import FoundRows, Table


@dataclass
class Trip:
    vendor: str
    fare: float | None = None


@dataclass
class Document:
    name: str
    vector: list[float]
    tags: dict[str, int] | None = None


class Ride(TypedDict):
    vendor: str
    fare: float | None


def of_a_store(store: kvstore.Store) -> None:
    trips = store.table("trips", Trip, "vendor")
    assert_type(trips, Table[Trip])
    assert_type(trips.get("A"), Trip | None)
    assert_type(trips.get("A", columns=["fare"]), dict[str, Any] | None)
    assert_type(trips.get_many([("A",)]), list[Trip | None])
    assert_type(trips.rows(), Iterator[Trip])
    assert_type(trips.find("by_fare", 1.5), FoundRows[Trip])
    for trip in trips.find("by_fare"):
        assert_type(trip, Trip)
    rides = store.table("trips", row=Ride)
    assert_type(rides, Table[Ride])
    assert_type(rides.get("A"), Ride | None)
    plain = store.table("trips")
    assert_type(plain, Table[dict[str, Any]])
    assert_type(plain.get("A"), dict[str, Any] | None)
    made: Table = store.table("trips", pa.schema([]), "vendor")
    assert_type(next(made.rows()), dict[str, Any])


def of_other_handles(
    store: kvstore.Store,
    client: kvstore.Client,
    live: kvstore.LiveReader,
    collection: Collection,
    transaction: kvstore.Transaction,
) -> None:
    assert_type(kvstore.connect("store.db"), kvstore.Client)
    assert_type(client.get(b"k"), bytes | None)
    assert_type(client.get(b"k", default=b""), bytes)
    assert_type(client.table("trips", row=Trip).get("A"), Trip | None)
    assert_type(client.table("trips", Trip, "vendor").rows(), Iterator[Trip])
    assert_type(client.snapshot().table("trips", row=Trip).get("A"), Trip | None)
    assert_type(live.table("trips", row=Trip).get("A"), Trip | None)
    assert_type(store.snapshot().table("trips", row=Trip).find("by_fare"), FoundRows[Trip])
    assert_type(transaction.table("trips", row=Trip).get("A"), Trip | None)
    assert_type(collection.open().table("trips", row=Trip).get("A"), Trip | None)
