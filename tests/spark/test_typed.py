"""Typed reads of tables: columns, filters, changes and streams, from each kind of origin.

Spark's part is small, and a query costs a second. So most tests drive the source as Spark does.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.base.span import Span, prefix_end
from kvstore.bulk.pushes.pull import Puller
from kvstore.errors import UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark import (
    bulk_import,
    lookup_join,
    point_in_time_join,
    push,
    read_collection,
    read_where,
)
from kvstore.spark.pushdown import ROWS_MAX, checked, row_spans, to_text
from kvstore.spark.source import KVStoreSource
from kvstore.tables import Table, catalogue, desc
from tests.pushes.made import drain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [
        ("vendor", pa.string()),
        ("trip", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("zone", pa.string()),
        ("fare", pa.decimal128(9, 2)),
    ]
)
NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
VENDOR, TRIP, AT, FARE = "vendor", "trip", "at", "fare"


def _comparison(operator: str) -> Any:
    return lambda column, value: (column, operator, value)


EqualTo, In, GreaterThan, LessThan, LessThanOrEqual = map(_comparison, ("=", "in", ">", "<", "<="))


class History(NamedTuple):
    """A store with tables and plain keys, which stays open, and its readable forms."""

    store: kvstore.Store
    trips: Table
    first: int
    altered: int
    last: int
    checkpoint: str
    collection: str
    server: str


def trip(number: int, **more: Any) -> dict[str, Any]:
    vendor, at = "ABC"[number % 3], NOON + timedelta(hours=number)
    return {"vendor": vendor, "trip": number, "at": at, "zone": f"z{number % 5}", **more}


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    directory = tmp_path_factory.mktemp("typed")
    with kvstore.open(directory / "store") as store:
        store.put(b"plain", b"value")
        events = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
        store.table("events", events, "id", event_time="at")
        store.table("others", pa.schema([("id", pa.int64())]), "id").put({"id": 1})
        keys = ["vendor", desc("trip"), "at"]
        trips = store.table("trips", SCHEMA, keys, {"by_zone": "zone"})
        first = trips.put_batch([trip(n, fare=Decimal(n) / 4) for n in range(90)])
        collection = Collection(directory / "collection")
        collection.backup(store)
        trips.delete("A", 0, NOON)
        trips.put(trip(4, fare=None))
        trips.alter(add={"tip": (pa.int32(), 2)})
        altered = store.upper - 1
        last = trips.put({**trip(90), "tip": 7})
        collection.backup(store)
        store.checkpoint(directory / "checkpoint")
        with serving(app(store), ListenAddress("127.0.0.1", 0)) as server:
            assert first is not None
            places = map(str, (directory / "checkpoint", directory / "collection", server.url))
            yield History(store, trips, first, altered, last or 0, *places)


@pytest.fixture(params=["checkpoint", "collection", "server"])
def path(request: pytest.FixtureRequest, history: History) -> str:
    found: str = getattr(history, request.param)
    return found


def planned(path: str, filters: Sequence[Any] = (), **options: str) -> tuple[Any, list[Any]]:
    """The reader and the partitions of a read, as Spark gets them."""
    if filters:
        options["filters"] = to_text(checked(filters))
    source = KVStoreSource({"path": path, "table": "trips", **options})
    reader: Any = source.reader(source.schema())
    return reader, pickle.loads(pickle.dumps(reader.partitions()))


def read(path: str, filters: Sequence[Any] = (), **options: str) -> list[tuple[Any, ...]]:
    reader, partitions = planned(path, filters, **options)
    return sorted(
        (
            tuple(row.values())
            for part in partitions
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ),
        key=repr,
    )


def expected(found: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in found), key=repr)


def load(spark: SparkSession, path: str, table: str = "trips", **options: str) -> DataFrame:
    return spark.read.format("kvstore").option("table", table).options(**options).load(path)


def rows(df: DataFrame) -> list[tuple[Any, ...]]:
    """The rows with instants that compare with UTC."""
    return sorted(
        (
            tuple(v.astimezone(timezone.utc) if isinstance(v, datetime) else v for v in row)
            for row in df.collect()
        ),
        key=repr,
    )


def test_a_read_has_the_columns_of_its_time(history: History, path: str) -> None:
    assert read(path, numPartitions="3") == expected(history.trips.rows())
    at = kvstore.Timestamp(history.first)
    found = read(path, versionAsOf=str(at), columns="fare,vendor")
    assert found == expected(history.trips.rows(as_of=at, columns=["fare", "vendor"]))
    assert read(path, versionAsOf=str(at)) == expected(history.trips.rows(as_of=at))
    assert read(path, columns="trip") == expected(history.trips.rows(columns=["trip"]))
    _, parts = planned(path)
    assert parts[0].table.stored_columns(["trip", "vendor"], changes=False) == ["key"]


def test_plain_reads_leave_tables_out(history: History, path: str) -> None:
    for more in ({"numPartitions": "4"}, {"readChangeFeed": "true", "startingTimestamp": "0"}):
        source = KVStoreSource({"path": path, **more})
        reader: Any = source.reader(source.schema())
        found = [batch for part in reader.partitions() for batch in reader.read(part)]
        keys = [key for batch in found for key in batch.column("key").to_pylist()]
        assert keys == [b"plain"]


@pytest.mark.parametrize(
    ("filters", "start", "end"),
    [
        ([EqualTo(VENDOR, "B")], ["B"], ["B"]),
        ([EqualTo(VENDOR, "B"), EqualTo(TRIP, 4)], ["B", 4], ["B", 4]),
        # The second column of the key is descending.
        (
            [EqualTo(VENDOR, "B"), GreaterThan(TRIP, 40), LessThanOrEqual(TRIP, 61)],
            ["B", 61],
            ["B", 40],
        ),
        ([EqualTo(VENDOR, "C"), EqualTo(TRIP, 5), GreaterThan(AT, NOON)], ["C", 5, NOON], ["C", 5]),
        ([GreaterThan(VENDOR, "A"), EqualTo(TRIP, 4)], ["A"], []),
        ([In(VENDOR, ("B",)), LessThan(FARE, 3)], ["B"], ["B"]),
        ([In(VENDOR, ())], None, None),
        ([In(VENDOR, ("A", "B")), EqualTo(VENDOR, "C")], None, None),
        ([EqualTo(VENDOR, 5)], [], []),
        ([EqualTo(VENDOR, "B"), EqualTo(TRIP, 4.0)], ["B"], ["B"]),
        ([EqualTo(VENDOR, "B"), EqualTo(TRIP, True)], ["B"], ["B"]),
        ([EqualTo(TRIP, 4)], [], []),
        ([EqualTo(VENDOR, "x" * 10**6)], [], []),
        ([EqualTo(VENDOR, "B"), EqualTo(TRIP, 2**70)], ["B"], ["B"]),
        ([GreaterThan(VENDOR, "C"), LessThan(VENDOR, "A")], None, None),
        ([EqualTo(VENDOR, "B"), GreaterThan(TRIP, 9), LessThan(TRIP, 3)], None, None),
    ],
)
def test_filters_on_the_first_columns_of_the_key_are_a_span(
    history: History, filters: list[Any], start: list[Any] | None, end: list[Any] | None
) -> None:
    codec = history.trips.codec()
    found = row_spans(None, codec, checked(filters), 0)
    if start is None or end is None:
        assert found == []
        assert read(history.checkpoint, filters) == []
        return
    assert found == [Span(codec.key.key(start), prefix_end(codec.key.key(end)))]


def test_in_on_the_first_columns_reads_a_span_for_each_value(history: History, path: str) -> None:
    codec = history.trips.codec()

    def spans(*pairs: tuple[list[Any], list[Any]]) -> list[Span]:
        return [Span(codec.key.key(a), prefix_end(codec.key.key(b))) for a, b in pairs]

    filters: list[Any] = [In(VENDOR, ("C", "A")), In(TRIP, (3, 80)), LessThan(AT, NOON)]
    assert row_spans(None, codec, checked(filters), 0) == [
        Span(codec.key.key([vendor, number]), prefix_end(codec.key.key([vendor, number, NOON])))
        for vendor, number in (("A", 80), ("A", 3), ("C", 80), ("C", 3))
    ]
    # The second column falls.
    filters = [In(VENDOR, ("A", "C")), GreaterThan(TRIP, 79), LessThanOrEqual(TRIP, 85)]
    assert row_spans(None, codec, checked(filters), 0) == spans(
        (["A", 85], ["A", 79]), (["C", 85], ["C", 79])
    )
    found = read(path, filters, columns="trip,vendor")
    kept = [row for row in found if row[1] in "AC" and 79 < row[0] <= 85]
    assert sorted(kept) == [(80, "C"), (81, "A"), (83, "C"), (84, "A")]
    # A store's directory is seeked; of a collection the row groups of both spans are read whole.
    assert len(found) == len(kept) or path == history.collection
    many = [In(VENDOR, ("A", "B")), In(TRIP, tuple(range(9_000)))]
    assert row_spans(None, codec, checked(many), 0) == spans(
        (["A", 8_999], ["A", 0]), (["B", 8_999], ["B", 0])
    )


def test_the_beginning_of_a_text_is_a_span_of_keys(tmp_path: Path) -> None:
    names = ["", "a", "a\0", "a\0b", "ab", "aé", "aéz", "b", "\U0010ffff", "\U0010ffffz"]
    pick = ["", "a", "a\0", "aé", "b", "c", "\U0010ffff"]
    schema = pa.schema([("name", pa.string()), ("id", pa.int64())])
    with kvstore.open(tmp_path / "store") as store:
        for table, keys in (("rising", ["name"]), ("falling", ["id", desc("name")])):
            rows_of = [{"name": name, "id": 1} for name in names]
            store.table(table, schema, keys).put_batch(rows_of)
    for table in ("rising", "falling"):
        for text in pick:
            filters: list[Any] = [("name", "startswith", text), ("id", "=", 1)]
            found = read(str(tmp_path / "store"), filters, table=table, columns="name")
            assert sorted(each for (each,) in found) == [n for n in names if n.startswith(text)]


ZONE = "zone"


def test_filters_on_an_index_read_its_rows_alone(history: History, path: str) -> None:
    some: list[tuple[list[Any], list[int]]] = [
        ([EqualTo(ZONE, "z4"), LessThan(TRIP, 20)], [4, 9, 14, 19]),
        ([EqualTo(ZONE, "z4"), EqualTo(VENDOR, "A"), LessThan(TRIP, 20)], [9]),
        ([(ZONE, "startswith", "z4"), EqualTo(TRIP, 14)], [14]),
        ([In(ZONE, ("z1", "none")), GreaterThan(TRIP, 80)], [81, 86]),
        ([EqualTo(ZONE, "none")], []),
        (
            [[EqualTo(ZONE, "z0"), EqualTo(TRIP, 90)], [EqualTo(VENDOR, "B"), EqualTo(TRIP, 7)]],
            [7, 90],
        ),
    ]
    for filters, wanted in some:
        found = {row[1] for row in read(path, filters)}
        assert found >= set(wanted)
        # A read of a collection takes row groups whole.
        assert path == history.collection or len(found) <= 19


def test_an_index_shows_the_rows_of_the_time_of_the_read(history: History, path: str) -> None:
    at = kvstore.Timestamp(history.first)
    zone = [EqualTo(ZONE, "z0")]
    wanted = [row for row in history.trips.rows(as_of=at) if row["zone"] == "z0"]
    found = read(path, zone, versionAsOf=str(at))
    assert {row[1] for row in found if row[3] == "z0"} == {row["trip"] for row in wanted}
    changed = {"readChangeFeed": "true", "startingTimestamp": str(history.first)}
    every = [row for row in read(path, **changed) if row[3] == "z0"]
    assert [row for row in read(path, zone, **changed) if row[3] == "z0"] == every
    assert any("delete" in row for row in every)


def test_an_index_that_cannot_serve_is_left_aside(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        table = store.table("trips", SCHEMA, ["vendor", "trip"], {"by_zone": "zone"})
        rows_of = [trip(number) for number in range(ROWS_MAX + 1)]
        table.put_batch([{**row, "zone": "z"} for row in rows_of[:-1]])
        codec = table.codec()
        every = [Span.of_prefix(codec.key.prefix)]
        place = str(tmp_path / "copy")
        store.checkpoint(place)
        _, parts = planned(place, [EqualTo(ZONE, "z")])
        assert sum(len(part.spans) for part in parts) == ROWS_MAX
        table.put({**rows_of[-1], "zone": "z"})
        table.alter(add_index={"by_fare": "fare"})
        many = str(tmp_path / "many")
        store.checkpoint(many)
    for filters in ([EqualTo(ZONE, "z")], [EqualTo(FARE, Decimal(1))], [("zone", "<", 5)]):
        _, parts = planned(many, filters)
        assert [span for part in parts for span in part.spans] == every


def test_filters_give_the_same_rows_pushed_or_not(spark: SparkSession, history: History) -> None:
    some: list[tuple[str, list[Any], int]] = [
        (
            "vendor = 'B' AND trip > 40 AND trip <= 61",
            [EqualTo(VENDOR, "B"), GreaterThan(TRIP, 40), LessThanOrEqual(TRIP, 61)],
            7,
        ),
        (
            "vendor = 'C' AND trip = 5 AND at >= TIMESTAMP '2026-01-31 12:00:00Z'",
            [EqualTo(VENDOR, "C"), EqualTo(TRIP, 5), ("at", ">=", NOON)],
            1,
        ),
        (
            "vendor IN ('A', 'B') AND fare < 3",
            [In(VENDOR, ("A", "B")), LessThan(FARE, Decimal(3))],
            60,
        ),
        ("zone = 'z3' AND fare < 3", [EqualTo(ZONE, "z3"), LessThan(FARE, Decimal(3))], 2),
        (
            "startswith(vendor, 'A') OR trip = 4",
            [[("vendor", "startswith", "A")], [EqualTo(TRIP, 4)]],
            31,
        ),
    ]
    for where, filters, most in some:
        pushed = read_where(spark, history.checkpoint, filters, table="trips")
        plain = load(spark, history.checkpoint).where(where)
        assert rows(pushed) == rows(plain)
        assert 0 < len(rows(plain)) <= most
    plain = read_collection(spark, history.collection)
    assert [bytes(row.key) for row in plain.collect()] == [b"plain"]
    assert load(spark, history.checkpoint).dtypes == [
        *(("vendor", "string"), ("trip", "bigint"), ("at", "timestamp"), ("zone", "string")),
        *(("fare", "decimal(9,2)"), ("tip", "int")),
    ]


def test_changes_have_images_and_the_columns_of_their_end(history: History, path: str) -> None:
    window = {"readChangeFeed": "true", "startingTimestamp": str(history.first)}
    reader = history.trips.changes(kvstore.Timestamp(history.first))
    source = KVStoreSource({"path": path, "table": "trips", **window})
    assert source.schema().names == reader.schema.names
    assert read(path, **window) == expected(reader.read_all().to_pylist())
    slim = read(path, **window, includePreimage="false", columns="trip,_change_type")
    assert slim == [(0, "delete"), (4, "update_postimage"), (90, "insert")]
    window["endingTimestamp"] = str(history.altered - 1)
    source = KVStoreSource({"path": path, "table": "trips", **window})
    assert "tip" not in source.schema().names


def test_a_stream_begins_with_the_rows_and_follows(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    stream = (
        spark.readStream.format("kvstore")
        .options(table="trips", readChangeFeed="true", maxRowsPerTrigger="60")
        .load(history.collection)
    )
    query = (
        stream.writeStream.format("memory")
        .queryName("typed")
        .option("checkpointLocation", str(tmp_path / "offsets"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600)
    assert len([each for each in query.recentProgress if each.numInputRows]) == 2
    seen = spark.table("typed").drop("_commit_version", "_commit_timestamp", "_change_type")
    assert rows(seen) == expected(history.trips.rows())


def test_a_stream_ends_at_an_alteration_that_takes_a_column_away(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    options = {"path": path, "table": "trips", "readChangeFeed": "true"}
    with kvstore.open(path) as store:
        trips = store.table("trips", SCHEMA, ["vendor", "trip"])
        trips.put(trip(1))
    source = KVStoreSource(options)
    stream = source.streamReader(source.schema())
    start: Any = stream.initialOffset()
    middle: Any = stream.latestOffset(start, stream.getDefaultReadLimit())
    with kvstore.open(path) as store:
        store.table("trips").alter(add={"tip": (pa.int32(), 2)})
        store.table("trips").put(trip(2))
    end: Any = stream.latestOffset(middle, stream.getDefaultReadLimit())
    seen = [
        (row["trip"], row["_change_type"])
        for first, last in ((start, middle), (middle, end))
        for part in stream.partitions(first, last)
        for batch in stream.read(part)
        for row in batch.to_pylist()
    ]
    assert seen == [(1, "insert"), (2, "insert")]
    with kvstore.open(path) as store:
        store.table("trips").alter(drop=["zone"])
        store.table("trips").put({"vendor": "A", "trip": 3})
    last = stream.latestOffset(end, stream.getDefaultReadLimit())
    with pytest.raises(UsageError, match="table 'trips' has no column 'zone'; it has vendor"):
        stream.partitions(end, last)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"table": "trip"}, "there is no table 'trip' in .*; there are events, others, trips"),
        ({"columns": "trip,cost"}, "table 'trips' has no column 'cost'; it has vendor, "),
        ({"columns": "trip,trip"}, "columns=trip,trip; name each column once"),
        ({"prefix": "a"}, "table and prefix are both given; filter on the first columns"),
        (
            {"versionAsOf": "1500000000000000000"},
            "there is no table 'trips' in .*; it has no table at that time",
        ),
    ],
)
def test_a_refusal_names_the_table(history: History, options: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as refusal:
        read(history.checkpoint, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["collection", "server"], indirect=True)
def test_labels_get_typed_rows_as_they_were_known(
    spark: SparkSession, history: History, path: str
) -> None:
    numbers = [0, 4, 7, 90, 1000]
    labels = pa.table(
        {
            "seller": ["ABC"[number % 3] for number in numbers] * 2,
            "number": pa.array(numbers * 2, pa.int32()),
            "at": [NOON + timedelta(hours=number) for number in numbers] * 2,
            "ts": [history.first] * 5 + [history.last] * 5,
        }
    )
    frame = spark.createDataFrame(labels)
    keys: list[Any] = ["seller", "number", "at"]
    asked: dict[str, Any] = {"table": "trips", "columns": ["fare", "tip", "row_version"]}
    joined = point_in_time_join(frame, path, keys, **asked)
    assert joined.columns == [*labels.schema.names, "f_fare", "f_tip", "f_row_version"]
    ours = history.trips.join(labels, keys, columns=["fare", "tip"], prefix="f_")
    table = ours.read_all()
    exact = table.set_column(6, "f_row_version", table["f_row_timestamp"].cast(pa.int64()))
    assert rows(joined) == expected(exact.to_pylist())
    now = lookup_join(frame, path, keys, table="trips", prefix="now_", columns=["zone"])
    zones = {row.number: row.now_zone for row in now.collect()}
    assert zones == {0: None, 4: "z4", 7: "z2", 90: "z0", 1000: None}
    with pytest.raises(Exception, match="column 'trip' of the key of a label is null"):
        point_in_time_join(
            frame.selectExpr("seller", "NULLIF(number, 4L) AS number", "at", "ts"),
            path,
            keys,
            table="trips",
        ).collect()


def test_changes_streams_and_labels_have_lists_structs_and_maps(
    spark: SparkSession, tmp_path: Path
) -> None:
    struct = pa.struct([pa.field("a", pa.int8(), False), ("b", pa.list_(pa.string()))])
    fields = [("tags", pa.list_(pa.uint8(), 2)), ("s", struct), ("m", pa.map_(pa.string(), struct))]
    with kvstore.open(tmp_path / "store") as store:
        table = store.table("docs", pa.schema([("id", pa.int64()), *fields]), "id")
        value = {"a": 1, "b": ["x", None]}
        first = table.put({"id": 1, "tags": [255, None], "s": value, "m": {"k": value, "": None}})
        last = table.update(1, tags=None, s={"a": 2, "b": []})
        path = str(tmp_path / "copy")
        store.checkpoint(path)
        wanted = table.changes(0).read_all()
    window = {"readChangeFeed": "true", "startingTimestamp": str(first - 1)}
    found = read(path, table="docs", **window)
    assert found == expected(wanted.to_pylist())
    frame = spark.createDataFrame(pa.table({"id": [1, 2, 1], "ts": [first, last, last]}))
    joined = point_in_time_join(frame, path, "id", table="docs", prefix="f_")
    told = [
        (
            row.f_tags,
            row.f_s and row.f_s.asDict(),
            row.f_m and {k: v and v.a for k, v in row.f_m.items()},
        )
        for row in joined.orderBy("id", "ts").collect()
    ]
    m = {"k": 1, "": None}
    assert told == [([255, None], value, m), (None, {"a": 2, "b": []}, m), (None, None, None)]


def test_labels_that_no_table_can_answer_are_refused(spark: SparkSession, history: History) -> None:
    frame = spark.sql("SELECT 'A' AS vendor, 4 AS trip, TIMESTAMP_MICROS(0) AS at, 1L AS ts")
    for more, told in (
        ({"key": ["vendor", "trip"]}, "name the labels' columns of vendor, trip, at"),
        (
            {"key": ["vendor", "vendor", "at"]},
            "column 'trip' of the key .* is int64, not string",
        ),
        ({"columns": ["cost"]}, "table 'trips' has no column 'cost'"),
        ({"known_at": "ts"}, "leave known_at out"),
    ):
        asked: dict[str, Any] = {"key": ["vendor", "trip", "at"], "table": "trips", **more}
        with pytest.raises(UsageError, match=told):
            point_in_time_join(frame, history.checkpoint, **asked)


def test_types_of_which_spark_has_no_own_are_exact(spark: SparkSession, tmp_path: Path) -> None:
    kinds = {
        "id": (pa.uint64(), 2**64 - 1, Decimal(2**64 - 1)),
        "small": (pa.uint8(), 255, 255),
        "uuid": (pa.uuid(), UUID(int=7), UUID(int=7).bytes),
        "fixed": (pa.binary(2), b"ab", b"ab"),
        "day": (pa.date32(), date(1969, 7, 20), date(1969, 7, 20)),
        "nanos": (pa.timestamp("ns", "UTC"), 1234567891, 1234567891),
        "second": (pa.timestamp("s"), datetime(2026, 1, 2), datetime(2026, 1, 2)),  # noqa: DTZ001
        "clock": (pa.time64("us"), time(1, 0, 0, 1), 3_600_000_001_000),
        "took": (pa.duration("ms"), timedelta(seconds=2), timedelta(seconds=2)),
        "single": (pa.float32(), 0.5, 0.5),
    }
    schema = pa.schema([(name, kind) for name, (kind, _, _) in kinds.items()])
    with kvstore.open(tmp_path / "store") as store:
        keys = ["id", "uuid", "second", "nanos"]
        store.table("kinds", schema, keys).put({n: value for n, (_, value, _) in kinds.items()})
        wide = pa.schema([("id", pa.int64()), ("wide", pa.decimal256(50, 2))])
        store.table("wide", wide, "id").put({"id": 1, "wide": Decimal("1.5")})
    path = str(tmp_path / "store")
    equal: list[Any] = [("id", "=", Decimal(2**64 - 1)), ("uuid", "=", UUID(int=7))]
    [row] = read_where(spark, path, equal, table="kinds").collect()
    assert tuple(row) == tuple(found for _, _, found in kinds.values())
    with pytest.raises(UsageError, match=r"column 'wide': Spark has no type for decimal256"):
        read(path, table="wide")
    assert read(path, table="wide", columns="id") == [(1,)]


FIRST: Final = {None: datetime.min, "UTC": datetime.min.replace(tzinfo=timezone.utc)}  # noqa: DTZ901
LAST: Final = {
    zone: (datetime.max - timedelta(microseconds=999_999)).replace(tzinfo=first.tzinfo)  # noqa: DTZ901
    for zone, first in FIRST.items()
}
EDGES: Final[dict[str, tuple[pa.DataType, list[Any]]]] = {
    "bool": (pa.bool_(), [False, True]),
    "int8": (pa.int8(), [-(2**7), 2**7 - 1]),
    "uint8": (pa.uint8(), [0, 2**8 - 1]),
    "uint32": (pa.uint32(), [0, 2**32 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "uint64": (pa.uint64(), [0, 2**64 - 1]),
    "float32": (pa.float32(), [-0.0, 2.0**-149]),
    "float64": (pa.float64(), [float("-inf"), 5e-324]),
    "decimal": (pa.decimal128(38, 10), [Decimal(-(10**28)) + 1, Decimal(1).scaleb(-10)]),
    "small decimal": (pa.decimal128(3, 2), [Decimal("-9.99"), Decimal("9.99")]),
    "text": (pa.string(), ["", "a\0\U0010ffff\r\n"]),
    "large": (pa.large_string(), ["", "x"]),
    "binary": (pa.binary(), [b"", b"\0\xff"]),
    "fixed": (pa.binary(2), [b"\0\0", b"\xff\xff"]),
    "uuid": (pa.uuid(), [UUID(int=0), UUID(int=2**128 - 1)]),
    "date": (pa.date32(), [date.min, date.max]),
    **{
        f"{unit} {zone}": (pa.timestamp(unit, zone), [FIRST[zone], LAST[zone]])
        for unit in ("s", "ms", "us")
        for zone in (None, "UTC")
    },
    "ns": (pa.timestamp("ns"), [-(2**63) + 1, 2**63 - 1]),
    "ns UTC": (pa.timestamp("ns", "UTC"), [-1, 2**63 - 1]),
    "time s": (pa.time32("s"), [time.min, time(23, 59, 59)]),
    "time ms": (pa.time32("ms"), [time.min, time(23, 59, 59, 999_000)]),
    "time us": (pa.time64("us"), [time.min, time.max]),
    "time ns": (pa.time64("ns"), [1, 86_400 * 10**9 - 1]),
    "lasts s": (pa.duration("s"), [timedelta(seconds=-1), timedelta(days=100_000)]),
    "lasts us": (pa.duration("us"), [timedelta(microseconds=-1), timedelta(days=100_000_000)]),
    "lasts ns": (pa.duration("ns"), [-1, 2**63 - 1]),
    "list": (pa.list_(pa.int8()), [[], [None, -128]]),
    "large list": (pa.large_list(pa.large_string()), [["", None], []]),
    "vector": (pa.list_(pa.field("item", pa.float32(), False), 2), [[0.5, -0.0], [2.0**-149, 2.0]]),
    "struct": (
        pa.struct(
            [
                pa.field("small", pa.uint64(), False),
                pa.field("clock", pa.time64("us")),
                pa.field("uuid", pa.uuid()),
                pa.field("nanos", pa.timestamp("ns", "UTC")),
                pa.field("took", pa.duration("s")),
                pa.field("at", pa.list_(pa.timestamp("ms", "UTC"))),
            ]
        ),
        [
            {
                "small": 2**64 - 1,
                "clock": time.max,
                "uuid": UUID(int=1),
                "nanos": -1,
                "took": timedelta(seconds=-1),
                "at": [FIRST["UTC"], None, LAST["UTC"]],
            },
            {"small": 0, **dict.fromkeys(["clock", "uuid", "nanos", "took"]), "at": []},
        ],
    ),
    "map": (
        pa.map_(pa.string(), pa.list_(pa.struct([("d", pa.date32()), ("t", pa.time32("s"))]))),
        [{}, {"": None, "x": [None, {"d": date.min, "t": time.min}]}],
    ),
    "dates": (pa.map_(pa.date32(), pa.decimal128(9, 2)), [{date.max: Decimal("0.01")}, {}]),
    "a.b": (pa.string(), ["a dot", "x"]),
    "c`d": (pa.string(), ["a backquote", "x"]),
    "_change_type": (pa.string(), ["ours", "x"]),
}
"""Types with their least and greatest values, and names that Spark reads as more than a name."""


def test_what_spark_reads_of_a_table_it_loads_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No new table has a column of ours; one that somebody has is still read.
    monkeypatch.setattr(catalogue, "require_free_names", lambda *names: None)
    fields = [("id", pa.int64()), *((name, kind) for name, (kind, _) in EDGES.items())]
    rows = [
        {"id": number, **{name: values[number] for name, (_, values) in EDGES.items()}}
        for number in range(2)
    ]
    rows.append({"id": 2, **dict.fromkeys(EDGES)})
    with kvstore.open(tmp_path / "store") as store:
        store.table("kinds", pa.schema(fields), "id").put_batch(rows)
        store.checkpoint(tmp_path / "copy")
        wanted = store.table("kinds").scan().read_all()
    frame = spark.read.format("kvstore").option("table", "kinds").load(str(tmp_path / "copy"))
    with kvstore.open(tmp_path / "other") as other:
        table = other.table("kinds", pa.schema(fields), "id")
        bulk_import(frame, table)
        assert table.scan().read_all().equals(wanted)
        expiring = frame.where("id = 1").withColumn("e.`x", F.expr("now() + INTERVAL 1 DAY"))
        bulk_import(expiring, table, expires="e.`x")
        assert table.ttl(1) is not None
        pushes = bulk.Pushes(tmp_path / "pushes")
        pushed = push(frame, str(tmp_path / "pushes"), table=table)
        other.table("kinds").delete(0)
        drain(Puller(other, pushes, name="other"))
        assert (pushed.rows, table.scan().read_all().equals(wanted)) == (3, True)
    where = [("a.b", "=", "a dot"), ("c`d", "startswith", "a back"), ("_change_type", "=", "ours")]
    [row] = read_where(
        spark, tmp_path / "copy", where, table="kinds", columns="id,a.b,c`d,_change_type"
    ).collect()
    assert row.id == 0
    with pytest.raises(Exception, match="has a column '_change_type', and so have its changes"):
        read(str(tmp_path / "copy"), table="kinds", readChangeFeed="true", startingTimestamp="0")
