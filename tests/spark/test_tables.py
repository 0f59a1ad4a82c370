"""DataFrames into tables: typed rows and their index entries, or one clear refusal and nothing."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from kvstore import Store
from kvstore.errors import NotUniqueError, TableAlteredError, UsageError
from kvstore.tables import unique
from spark_connector import bulk_import

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("zone", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("price", pa.decimal128(9, 2)),
        ("raw", pa.binary()),
        ("ok", pa.bool_()),
        ("fare", pa.float64()),
    ]
)
QUERY = """
    SELECT id, IF(id % 10 = 0, NULL, CONCAT('z', CAST(id % 7 AS STRING))) AS zone,
        TIMESTAMP '2026-01-31 12:00:00Z' AS at, DATE '2026-01-31' AS day,
        CAST(id AS DECIMAL(9, 2)) AS price, X'00ff' AS raw, id % 2 = 0 AS ok, id / 4 AS fare
    FROM range(0, 3000, 1, 4)
"""


def test_rows_and_entries_come_typed_at_one_time(spark: SparkSession, store: Store) -> None:
    trips = store.table("trips", SCHEMA, "id", indexes={"by_zone": ["zone", "fare"]})
    old = trips.put({"id": 3, "zone": "old"})
    stamp = bulk_import(spark.sql(QUERY), trips, partitions=3)
    assert store.upper == stamp + 1
    assert trips.scan().read_all().num_rows == 3000
    noon = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    assert trips.get(3) == {
        **{"id": 3, "zone": "z3", "at": noon, "day": date(2026, 1, 31)},
        **{"price": Decimal("3.00"), "raw": b"\x00\xff", "ok": False, "fare": 0.75},
    }
    assert [row["id"] for row in trips.find("by_zone", "old")] == []
    assert [row["id"] for row in trips.find("by_zone", "old", as_of=old)] == [3]
    expected = [n for n in range(3000) if n % 7 == 5 and n % 10]
    assert [row["id"] for row in trips.find("by_zone", "z5")] == expected
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]
    bulk_import(spark.sql("SELECT 7 AS id, 'later' AS zone"), trips, import_id=5)
    again = bulk_import(spark.sql("SELECT 7 AS id, 'never' AS zone"), trips, import_id=5)
    assert trips.get(7, as_of=again)["zone"] == "later"  # type: ignore[index]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("SELECT 1 AS id, 2 AS cost", "has no column 'cost'"),
        ("SELECT 'x' AS zone", "column 'id' is missing"),
        ("SELECT 'x' AS id", "column 'id' is int32, not string"),
        ("SELECT ARRAY(1) AS zone, 1 AS id", "column 'zone' is string, not list"),
        ("SELECT IF(id = 2, NULL, id) AS id FROM range(0, 4, 1, 1)", "'id' is null in row 2 of "),
        ("SELECT id + 2147483646 AS id FROM range(0, 4, 1, 1)", "does not hold 2147483648 of row"),
        ("SELECT 1 AS id FROM range(2)", "the row id=1 of table 'trips' came twice"),
    ],
)
def test_a_refusal_is_one_line_and_adds_nothing(
    spark: SparkSession, store: Store, query: str, told: str
) -> None:
    trips = store.table("trips", SCHEMA, "id", indexes={"by_zone": "zone"})
    before = store.upper
    with pytest.raises(UsageError) as refusal:
        bulk_import(spark.sql(query), trips)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert store.upper == before
    assert store.imports.all() == []
    assert not any((store.path / "ingest").glob("*"))  # type: ignore[operator]


def test_a_load_into_a_table_takes_no_key_and_checks_unique_indexes(
    spark: SparkSession, store: Store
) -> None:
    frame = spark.sql("SELECT 1 AS id")
    trips = store.table("trips", SCHEMA, "id")
    with pytest.raises(UsageError, match="the table has a key"):
        bulk_import(frame, trips, "id", "zone")
    with pytest.raises(UsageError, match="pass both, or load into a table"):
        bulk_import(frame, store)
    mails = store.table("mails", SCHEMA, "id", {"one": unique("zone")})
    bulk_import(spark.sql("SELECT 1 AS id, 'a' AS zone"), mails)
    with pytest.raises(NotUniqueError, match="zone='a' is taken by the row id="):
        bulk_import(spark.sql("SELECT 2 AS id, 'a' AS zone"), mails)
    assert [record.reverted for record in store.imports.all()] == [None]
    bulk_import(spark.sql("SELECT id, concat('a', id) AS zone FROM range(1, 9)"), mails)
    assert [row["id"] for row in mails.find("one", "a1")] == [1]


def test_an_alteration_during_a_load_calls_it_off(spark: SparkSession, store: Store) -> None:
    trips = store.table("trips", SCHEMA, "id")
    altered = []

    def alter(done: int, known: int) -> None:
        if not altered:
            altered.append(trips.alter(add_index={"by_zone": "zone"}))

    with pytest.raises(TableAlteredError):
        bulk_import(spark.sql(QUERY), trips, progress=alter)
    assert altered
    assert trips.get(3) is None
    assert store.imports.all() == []
    bulk_import(spark.sql(QUERY), trips)
    assert trips.get(3) is not None
