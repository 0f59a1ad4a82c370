"""Labels of a DataFrame ask a table with an event time: two axes, answered as by `Table.join`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.errors import UsageError
from kvstore.remote.server import ListenAddress, serving
from kvstore.remote.server.app import app
from kvstore.spark import joins, lookup_join, point_in_time_join
from tests.harness.seeds import seed_of
from tests.spark.test_typed import expected, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = pa.schema(
    [
        ("device", pa.string()),
        ("line", pa.int32()),
        ("at", pa.timestamp("us", "UTC")),
        ("value", pa.float64()),
    ]
)
KEY = ["device", "line"]


def moment(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(minutes=minute)


class Place(NamedTuple):
    """A table of readings that were restated and deleted, the times of its commits, and the places
    where Spark reads it."""

    readings: kvstore.Table
    commits: list[int]
    paths: dict[str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    pick = random.Random(seed_of("KVSTORE_SPARK_EVENT_SEED"))
    directory = tmp_path_factory.mktemp("events")
    with kvstore.open(directory / "store", durability="async") as store, ExitStack() as held:
        readings = store.table("readings", SCHEMA, key=KEY, event_time="at")
        commits = []
        collection = Collection(directory / "collection")
        for step in range(120):
            device, line, at = pick.choice("abé"), pick.randrange(3), moment(pick.randrange(40))
            if pick.random() < 0.2:
                readings.delete(device, line, at)
            else:
                row = {"device": device, "line": line, "at": at, "value": float(step)}
                commits.append(int(readings.put(row)))
            if step == 60:
                collection.backup(store)
        collection.backup(store)
        store.checkpoint(directory / "checkpoint")
        server = held.enter_context(serving(app(store), ListenAddress("127.0.0.1", 0)))
        paths = {name: str(directory / name) for name in ("checkpoint", "collection")}
        yield Place(readings, commits, {**paths, "server": server.url})


def labels_of(place: Place) -> pa.Table:
    pick = random.Random(seed_of("KVSTORE_SPARK_EVENT_SEED") + 1)
    count = 300
    return pa.table(
        {
            "name": [pick.choice("abéz") for _ in range(count)],
            "line": pa.array([pick.randrange(4) for _ in range(count)], pa.int64()),
            "ts": pa.array([moment(pick.randrange(-1, 41)) for _ in range(count)]).cast(
                pa.timestamp("us", "UTC")
            ),
            "known": pa.array([pick.choice(place.commits) for _ in range(count)], pa.int64()),
        }
    )


@pytest.mark.parametrize("origin", ["checkpoint", "collection", "server"])
def test_labels_get_the_newest_event_among_the_rows_that_were_known(
    spark: SparkSession, place: Place, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joins, "BYTES_PER_SPLIT", 200)
    labels, on = labels_of(place), ["name", "line"]
    frame = spark.createDataFrame(labels).repartition(3)
    middle = kvstore.Timestamp(place.commits[len(place.commits) // 2])
    questions: list[dict[str, Any]] = [
        {"known_at": "known"},
        {"known_at": middle, "max_age": timedelta(minutes=5)},
        {"direction": "forward", "allow_exact": False},
        {"direction": "nearest", "tolerance": timedelta(minutes=2), "known_at": "known"},
    ]
    for question in questions:
        joined = point_in_time_join(
            frame, place.paths[origin], on, table="readings", columns=["value", "at"], **question
        )
        assert joined.columns == [*labels.schema.names, "f_value", "f_at"]
        ours = place.readings.join(labels, on, columns=["value", "at"], prefix="f_", **question)
        table = ours.read_all().drop_columns(["f_row_timestamp"])
        assert table["f_value"].null_count < len(labels)
        assert rows(joined) == expected(table.to_pylist())


def test_labels_with_nulls_and_with_times_to_come_have_null_and_the_newest_rows(
    spark: SparkSession, place: Place
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    labels, on = labels_of(place).slice(0, 40), ["name", "line"]
    frame = spark.createDataFrame(labels).withColumns(
        {
            "line": F.expr("CASE WHEN line > 0 THEN line END"),
            "known": F.expr(f"CASE WHEN line = 3 THEN known + {10**15} ELSE known END"),
        }
    )
    given = pa.Table.from_pylist(
        [
            {
                **row,
                "line": row["line"] or None,
                "known": row["known"] + (10**15 if row["line"] == 3 else 0),
            }
            for row in labels.to_pylist()
        ],
        labels.schema,
    )
    question: dict[str, Any] = {"known_at": "known", "on_null": "null", "on_future": "newest"}
    path = place.paths["checkpoint"]
    joined = point_in_time_join(
        frame, path, on, table="readings", columns=["value"], prefix="", **question
    )
    assert joined.columns[-2:] == ["value", "as_of"]
    ours = place.readings.join(given, on, columns=["value"], **question).read_all()
    wanted = ours.drop_columns(["row_timestamp", "as_of"]).to_pylist()
    assert rows(joined.drop("as_of")) == expected(wanted)
    assert joined.filter("as_of IS NULL").count() == ours["as_of"].null_count > 0


def test_all_columns_beside_the_named_key_are_added_and_versions_are_exact(
    spark: SparkSession, place: Place
) -> None:
    labels = labels_of(place).slice(0, 20)
    frame = spark.createDataFrame(labels).withColumnRenamed("ts", "f_ts")
    path = place.paths["checkpoint"]
    asked: dict[str, Any] = {"key": ["name", "line"], "at": "f_ts", "table": "readings"}
    joined = point_in_time_join(frame, path, **asked)
    assert joined.columns == [*frame.columns, "f_at", "f_value", "f_row_timestamp"]
    exact = point_in_time_join(frame, path, columns=["row_version"], **asked)
    ours = place.readings.join(labels, ["name", "line"], columns=["at"]).read_all()
    known = ours["row_timestamp"].cast(pa.int64()).to_pylist()
    assert sorted(row.f_row_version or 0 for row in exact.collect()) == sorted(
        each or 0 for each in known
    )
    whole = frame.selectExpr("name", "line", "f_ts AS at")
    looked = lookup_join(whole, path, ["name", "line", "at"], table="readings", columns=["value"])
    assert looked.count() == 20


def test_labels_that_no_event_can_answer_are_refused(spark: SparkSession, place: Place) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    frame = spark.createDataFrame(labels_of(place).slice(0, 3))
    path = place.paths["checkpoint"]

    def joined(df: DataFrame = frame, **more: Any) -> DataFrame:
        asked: dict[str, Any] = {"key": ["name", "line"], "table": "readings", **more}
        return point_in_time_join(df, path, **asked)

    refused: list[tuple[dict[str, Any], str]] = [
        ({"key": ["name", "line", "ts"]}, "name the labels' columns of device, line"),
        ({"key": ["name", "name"]}, "column 'line' of the key .* is int32, not string"),
        ({"known_at": "tomorrow"}, "known_at='tomorrow' is no time"),
        ({"known_at": "name"}, "column known_at is string, and no time"),
        ({"known_at": 1_700_000_000}, "known_at=1700000000 is 1970.* looks like seconds"),
        ({"known_at": 5}, "known_at=5 is 1970.* versions are nanoseconds"),
        ({"on_gone": "null"}, "leave on_gone out"),
        ({"columns": ["cost"]}, "has no column 'cost'"),
    ]
    for given, told in refused:
        with pytest.raises(UsageError, match=told):
            joined(**given)
    unknown = frame.withColumn("known", F.lit(None).cast("long"))
    failing: list[tuple[DataFrame, dict[str, Any], str]] = [
        (unknown, {"known_at": "known"}, "a label has no known_at: it is null"),
        (frame, {"known_at": kvstore.Timestamp(2**62)}, "NotYetWrittenError"),
    ]
    for df, given, told in failing:
        with pytest.raises(Exception, match=told):
            joined(df, **given).collect()
