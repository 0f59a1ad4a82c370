"""Classes as schemas: rows go in and come out as instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import pyarrow as pa
import pytest

import kvstore
from kvstore.errors import UsageError


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
    tags: list[str]


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


@pytest.mark.parametrize(
    ("given", "says"), [(Wrong, "Wrong.tags is list"), (Bare, "Bare has no annotated fields")]
)
def test_a_class_without_columns_is_refused(store: kvstore.Store, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        store.table("t", given, key=["id"])
