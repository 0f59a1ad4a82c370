"""DataFrames into tables: typed rows and their index entries, or one clear refusal and nothing."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import kvstore
from kvstore import ManualClock, Span, Store
from kvstore.errors import NotUniqueError, TableAlteredError, UsageError
from kvstore.spark import batch_importer, bulk_import
from kvstore.tables import unique
from kvstore.tables.definition import table_prefix

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        (
            "SELECT id, IF(id = 3, CAST(X'636166e9' AS STRING), 'é') AS zone"
            " FROM range(0, 5, 1, 1)",
            "column 'zone' is string, which does not hold b'caf\\xe9' of row 3 of partition 0",
        ),
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


def test_a_type_that_no_column_has_is_refused_by_column_before_a_task(
    spark: SparkSession, store: Store
) -> None:
    trips = store.table("trips", SCHEMA, "id")
    before = store.upper
    for of_spark in (
        "MAP('a', 1)",
        "NAMED_STRUCT('a', 1)",
        "ARRAY(ARRAY('a'))",
        "INTERVAL '1' DAY",
        "INTERVAL '1' YEAR",
        "MAKE_INTERVAL(1)",
        "PARSE_JSON('1')",
        "DATE '2026-01-31'",
        "TIMESTAMP_NTZ '2026-01-31 12:00:00'",
        "CAST(1 AS DECIMAL(38, 2))",
        "1.5D",
    ):
        with pytest.raises(UsageError, match="column 'zone'") as refusal:
            bulk_import(spark.sql(f"SELECT 1 AS id, {of_spark} AS zone"), trips)
        assert "\n" not in str(refusal.value)
    assert store.upper == before


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


def test_rows_are_deleted_by_their_keys_beside_rows_that_are_put(
    spark: SparkSession, store: Store
) -> None:
    schema = pa.schema(
        [
            ("vendor", pa.string()),
            pa.field("trip", pa.int64()),
            pa.field("mail", pa.string(), nullable=False),
            ("until", pa.timestamp("us", "UTC")),
        ]
    )
    key, indexes = ["vendor", "trip"], {"by_mail": unique("mail")}
    trips = store.table("trips", schema, key, indexes, expires="until")
    trips.put_batch([{"vendor": "A", "trip": n, "mail": f"m{n}"} for n in range(6)])
    frame = spark.sql(
        "SELECT 'A' AS vendor, id AS trip, IF(id < 3, NULL, CONCAT('m', id - 3)) AS mail,"
        " IF(id < 3, 'delete', 'put') AS done FROM range(0, 7, 1, 2)"
    )
    before = store.upper - 1
    stamp = bulk_import(frame, trips, op="done")
    found = {row["trip"]: row["mail"] for row in trips.rows()}
    assert found == {3: "m0", 4: "m1", 5: "m2", 6: "m3"}  # mails of rows that are deleted are free
    assert [row["trip"] for row in trips.find("by_mail", "m1")] == [4]
    assert trips.get("A", 0, as_of=before) is not None
    assert trips.history("A", 0)[0].row is None
    keys = spark.sql("SELECT 'A' AS vendor, id AS trip, 9 AS mail FROM range(4, 9)").drop("mail")
    bulk_import(keys, trips, op=F.lit("delete"))
    assert [row["trip"] for row in trips.rows()] == [3]
    assert trips.count(as_of=stamp) == 4

    # a refusal names the row of the frame, and nothing is added
    upper = store.upper
    told = [
        (frame.selectExpr("vendor", "trip", "mail", "IF(trip = 1, 'drop', 'put') AS done"), "drop"),
        (frame.selectExpr("vendor", "trip", "done"), "'mail' is missing"),
        (
            frame.selectExpr("vendor", "trip", "IF(trip = 2, NULL, mail) AS mail", "'put' AS done"),
            "'mail' is null in row 0 of partition 0",
        ),
        (frame.selectExpr("vendor", "trip AS trip_id", "done"), "no column 'trip_id'"),
        (frame.selectExpr("vendor", "done"), "'trip' is missing"),
        (
            frame.selectExpr("IF(trip = 1, NULL, vendor) AS vendor", "trip", "mail", "done"),
            "a key is never null",
        ),
    ]
    for rows, message in told:
        with pytest.raises(UsageError, match=message):
            bulk_import(rows, trips, op="done")
    assert store.upper == upper


def test_rows_expire_with_their_entries(spark: SparkSession, tmp_path: Path) -> None:
    clock = ManualClock(1_800_000_000 * 10**9)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        trips = store.table("trips", SCHEMA, "id", indexes={"by_zone": "zone"})
        hour = "TIMESTAMP_SECONDS(1800000000 + 3600 * (id % 5))"
        frame = spark.sql(
            f"SELECT id, 'z' AS zone, IF(id % 5 = 0, NULL, {hour}) AS until FROM range(100)"
        )
        stamp = bulk_import(frame, trips, expires="until", partitions=3)
        bulk_import(spark.sql("SELECT 1 AS id, 'kept' AS zone"), trips)
        for hours in range(6):
            clock.set((1_800_000_000 + 3600 * hours) * 10**9)
            left = {n for n in range(100) if n % 5 == 0 or n % 5 > hours or n == 1}
            assert {row["id"] for row in trips.rows()} == left
            assert {row["id"] for row in trips.find("by_zone", "z")} == left - {1}
        assert len(list(trips.find("by_zone", as_of=stamp))) == 100
        span = Span.of_prefix(table_prefix(1))
        # The entry of the row that was replaced stays behind, as a hint.
        assert sum(1 for _ in store.keys(span.start, span.end)) == 2 * len(left) + 1
        assert not store.verify().problems

        at = spark.sql("SELECT 7 AS id, TIMESTAMP '2027-02-01 00:00:00Z' AS at")
        bulk_import(at, trips, expires=at["at"] + F.expr("INTERVAL 1 DAY"))
        due = trips.ttl(7)
        assert due is not None
        assert clock.wall_ns() + due // timedelta(microseconds=1) * 1000 == 1_801_526_400 * 10**9
        codes = pa.schema([("id", pa.int64()), ("until", pa.timestamp("us", "UTC"))])
        typed = store.table("codes", codes, "id", {"by_until": "until"}, expires="until")
        now = clock.wall_ns() // 10**9
        each = f"IF(id % 2 = 0, NULL, TIMESTAMP_SECONDS({now} + 3600 * id))"
        bulk_import(spark.sql(f"SELECT id, {each} AS until FROM range(6)"), typed, partitions=2)
        clock.advance(2 * 3600 * 10**9)
        assert [row["id"] for row in typed.rows()] == [0, 2, 3, 4, 5]
        with pytest.raises(UsageError, match="leave out expires; set until in the rows"):
            bulk_import(frame, typed, expires="until")
        before = store.upper
        for expires, told in (("then", "then"), ("zone", "is string, and no time")):
            with pytest.raises(UsageError, match=told):
                bulk_import(frame, trips, expires=expires)
        for due in (1_700_000_000, 253_402_214_400):  # 9999 in seconds is 1970 in nanoseconds
            frame = spark.sql(f"SELECT {due}L AS id")
            with pytest.raises(UsageError, match=f"'id' has {due} in row 0, which"):
                bulk_import(frame, trips, expires="id")
            with pytest.raises(UsageError, match=f"'expires' has {due} in row 0, which"):
                bulk_import(frame.selectExpr("'k' AS k", "id"), store, "k", "k", expires="id")
        assert store.upper == before


def test_each_micro_batch_of_a_stream_comes_typed_once(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    schema = pa.schema([("id", pa.int64()), ("zone", pa.string())])
    trips = store.table("trips", schema, "id", indexes={"by_zone": "zone"})
    add = batch_importer(trips, "trips")

    def add_twice(batch: DataFrame, batch_id: int) -> None:
        add(batch, batch_id)
        add(batch, batch_id)  # as after a crash before Spark recorded the end of the batch

    for number in range(2):
        rows = spark.sql(f"SELECT {number} + id AS id, 'z{number}' AS zone FROM range(2)")
        rows.coalesce(1).write.mode("append").json(str(tmp_path / "source"))
        query = (
            spark.readStream.schema("id long, zone string")
            .json(str(tmp_path / "source"))
            .writeStream.foreachBatch(add_twice)
            .option("checkpointLocation", str(tmp_path / "state"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None
    assert [(row["id"], row["zone"]) for row in trips.rows()] == [(0, "z0"), (1, "z1"), (2, "z1")]
    assert [row["id"] for row in trips.find("by_zone", "z1")] == [1, 2]
    assert len(store.imports.all()) == 2
    with pytest.raises(UsageError, match="the table has a key"):
        batch_importer(trips, "trips", "id")(spark.range(1), 9)


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
