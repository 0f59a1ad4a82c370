"""Joins of DataFrames with the history of a store: each label gets the value known at its time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pytest

import kvstore
from kvstore import Store, Timestamp
from kvstore.backup import Collection
from kvstore.codec.tuples import encode_tuple
from kvstore.errors import (
    HistoryGoneError,
    LockedError,
    NotAStoreError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.spark import joins, lookup_join, point_in_time_join
from kvstore.spark.origins import JoinChoice, find
from tests.harness.seeds import seed_of
from tests.harness.soak import soaked
from tests.joins.histories import pairs, table
from tests.joins.test_join import known
from tests.spark.test_origins import KEYS, write_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = "KVSTORE_SPARK_JOIN_SEED"
ADDED = ["value", "value_timestamp", "value_version"]

Label = tuple[bytes, int]
Answer = tuple[bytes | None, int | None]


def frame(spark: SparkSession, labels: list[Label], partitions: int = 3) -> DataFrame:
    table = pa.table(
        {
            "id": pa.array([key for key, _ in labels], pa.binary()),
            "ts": pa.array([at for _, at in labels], pa.int64()),
            "row": pa.array(range(len(labels)), pa.int64()),
        }
    )
    return spark.createDataFrame(table).repartition(partitions)


def answers(joined: DataFrame, count: int) -> list[Answer]:
    """The answer to each label. Each label comes out once, with its own columns."""
    rows = sorted(joined.collect(), key=lambda row: int(row.row))
    assert [row.row for row in rows] == list(range(count))
    return [
        (None if row.f_value is None else bytes(row.f_value), row.f_value_version) for row in rows
    ]


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in values}
    try:
        for name, value in values.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, known_value in before.items():
            assert known_value is not None
            spark.conf.set(name, known_value)


@pytest.mark.spark
@pytest.mark.parametrize("case", [0, *soaked(1, 2)])
def test_joins_with_checkpoints_and_collections_equal_a_model(
    spark: SparkSession, tmp_path: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joins, "BYTES_PER_SPLIT", 200)
    pick = random.Random(seed_of(SEED) + case)
    with kvstore.open(tmp_path / "store", durability="async") as store:
        write_history(store, tmp_path, pick, 40)
        times = sorted({int(change.timestamp) for change in store.changes(0, order="time")})
        labels = [
            (pick.choice(KEYS), pick.choice(times) + pick.choice([-1, 0, 0, 1, 1000]))
            for _ in range(300)
        ]
        labels = [(key, min(at, int(times[-1]))) for key, at in labels]
        age = timedelta(microseconds=pick.choice([0, 10, 1_000_000]))
        age_ns = age // timedelta(microseconds=1) * 1000
        expected = [known(store, key, at) for key, at in labels]
        young = [known(store, key, at, age_ns) for key, at in labels]
        Collection(tmp_path / "collection").restore(tmp_path / "restored")
        floor = times[len(times) // 2]
        store.gc(before=floor)
        store.checkpoint(tmp_path / "short")
        since = int(store.since)
        assert since > times[0]
    kept = [
        answer if at >= since else (None, None)
        for answer, (_, at) in zip(expected, labels, strict=True)
    ]
    for name in ("checkpoint", "collection", "restored"):
        df = frame(spark, labels)
        joined = point_in_time_join(df, tmp_path / name, key="id", columns=ADDED)
        assert answers(joined, len(labels)) == expected, name
    with settings(spark, {"spark.sql.adaptive.enabled": "false"}):
        joined = point_in_time_join(
            frame(spark, labels), tmp_path / "checkpoint", "id", max_age=age, columns=ADDED
        )
        assert answers(joined, len(labels)) == young
    short = point_in_time_join(
        frame(spark, labels), tmp_path / "short", "id", columns=ADDED, on_gone="null"
    )
    assert answers(short, len(labels)) == kept


@pytest.mark.spark
def test_a_label_looks_in_each_direction_and_may_have_nulls_and_times_to_come(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    pick = random.Random(seed_of(SEED))
    with kvstore.open(tmp_path / "store", durability="async") as store:
        write_history(store, tmp_path, pick, 30)
        times = sorted({int(change.timestamp) for change in store.changes(0, order="time")})
        labels = [(pick.choice(KEYS), pick.choice(times) + pick.choice([-1, 0])) for _ in range(80)]
        ours = [
            store.join(table(labels), direction="forward", allow_exact=False).read_all(),
            store.join(table(labels), direction="nearest").read_all(),
        ]
    for name in ("checkpoint", "collection"):
        df = frame(spark, labels)
        how: dict[str, Any] = {"key": "id", "columns": ADDED}
        path = tmp_path / name
        ahead = point_in_time_join(df, path, direction="forward", allow_exact=False, **how)
        near = point_in_time_join(df, path, direction="nearest", **how)
        for joined, own in zip((ahead, near), ours, strict=True):
            assert answers(joined, len(labels)) == pairs(own.to_reader()), name
    odd = frame(spark, [(KEYS[0], times[-1] + 10**15), (KEYS[0], times[-1]), (KEYS[1], times[0])])
    odd = odd.withColumn("id", F.expr("CASE WHEN row < 2 THEN id END"))
    joined = point_in_time_join(
        odd, tmp_path / "checkpoint", "id", on_future="newest", on_null="null"
    )
    assert joined.columns == ["id", "ts", "row", "f_value", "f_value_timestamp", "f_as_of"]
    late, newest, null = sorted(joined.collect(), key=lambda row: int(row.row))
    assert late.f_value == newest.f_value
    assert late.f_as_of >= newest.f_as_of
    assert late.f_as_of.timestamp() * 1e9 < times[-1] + 10**15
    assert null.f_value is null.f_as_of is None


class Place(NamedTuple):
    store: Store
    path: Path
    first: Timestamp
    second: Timestamp


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An open store, whose checkpoint has two versions of one key."""
    with kvstore.open(tmp_path / "store", durability="async") as store:
        first = store.put(b"a", b"1")
        second = store.put(b"a", b"2")
        store.checkpoint(tmp_path / "checkpoint")
        yield Place(store, tmp_path / "checkpoint", first, second)


@pytest.mark.spark
def test_a_look_up_reads_all_keys_at_one_time(spark: SparkSession, place: Place) -> None:
    labels = [(b"a", 0), (b"b", 0), (b"a", 0)]
    for as_of, value, version in ((None, b"2", place.second), (place.first, b"1", place.first)):
        joined = lookup_join(frame(spark, labels), place.path, "id", as_of, ADDED)
        assert answers(joined, 3) == [(value, version), (None, None), (value, version)]
    with pytest.raises(NotYetWrittenError):
        lookup_join(frame(spark, labels), place.path, "id", place.store.now() + 10**12)
    with pytest.raises(UsageError, match=r"as_of=5 is 1970-.*nanoseconds since 1970"):
        lookup_join(frame(spark, labels), place.path, "id", 5)
    with pytest.raises(UsageError, match="labels are a list, and no DataFrame"):
        lookup_join(labels, place.path, "id")  # type: ignore[arg-type]


@pytest.mark.spark
def test_times_are_instants_and_the_exact_version_is_told(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = datetime.fromtimestamp((int(place.second) // 1000 + 1) / 1e6, timezone.utc)
    df = spark.createDataFrame([("a", at)], "id string, `at time` timestamp")
    monkeypatch.chdir(place.path.parent)
    joined = point_in_time_join(df, place.path.name, key=df.id, at="`at time`", prefix="known ")
    assert joined.columns == ["id", "at time", "known value", "known value_timestamp"]
    monkeypatch.chdir("/")  # a relative path was made absolute when the join was planned
    [row] = joined.collect()
    assert bytes(row["known value"]) == b"2"
    moment = row["known value_timestamp"].astimezone(timezone.utc)
    assert moment == place.second.to_datetime()
    # The time comes back as a time of the version, and of no former one.
    back = spark.createDataFrame([("a", moment)], "id string, ts timestamp")
    [again] = point_in_time_join(back, str(place.path), "id").collect()
    assert bytes(again.f_value) == b"2"


@pytest.mark.spark
def test_labels_may_have_columns_that_are_called_as_the_answers(
    spark: SparkSession, place: Place
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    df = frame(spark, [(b"a", int(place.first))], 1)
    names = ["value", "value_version", joins.KEY, joins.AT.upper(), *joins.ANSWER, "kvstore_split"]
    for number, name in enumerate(names):
        df = df.withColumn(name, F.lit(number))
    [row] = point_in_time_join(df, place.path, "id").collect()
    assert [row[name] for name in names] == list(range(len(names)))
    assert bytes(row["f_value"]) == b"1"


@pytest.mark.spark
def test_names_of_columns_have_dots_and_quotes(spark: SparkSession, place: Place) -> None:
    """Spark reads a dot as a field of a structure, unless the name is quoted."""
    table = {"user.id": [b"a"], "seen`at.": [int(place.first)], "more.x": [1], "row": [0]}
    df = spark.createDataFrame(pa.table(table))
    joined = point_in_time_join(df, place.path, "user.id", "seen`at.", columns=ADDED)
    assert answers(joined, 1) == [(b"1", place.first)]
    assert joined.columns == [*table, "f_value", "f_value_timestamp", "f_value_version"]
    joined = lookup_join(df, place.path, ["user.id", "more.x"])
    assert [(row["more.x"], row["f_value"]) for row in joined.collect()] == [(1, None)]
    nested = df.selectExpr("struct(`user.id` AS id) AS user", "`seen``at.` AS ts", "row")
    joined = point_in_time_join(nested, place.path, "user.id", columns=ADDED)
    assert answers(joined, 1) == [(b"1", place.first)]
    with pytest.raises(UsageError, match="`name`"):
        point_in_time_join(nested, place.path, "user.name")


@pytest.mark.spark
def test_several_columns_are_one_key(spark: SparkSession, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store", durability="async") as store:
        store.put(encode_tuple(("de", 7)), b"yes")
        store.checkpoint(tmp_path / "checkpoint")
    df = spark.createDataFrame([("de", 7, 0), ("de", 8, 1)], "country string, day int, row int")
    joined = lookup_join(df, tmp_path / "checkpoint", ["country", "day"], columns=ADDED)
    assert [value for value, _ in answers(joined, 2)] == [b"yes", None]


@pytest.mark.spark
def test_a_hot_key_is_joined_by_several_tasks(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    monkeypatch.setattr(joins, "BYTES_PER_SPLIT", 200)
    labels = [(b"a", int(place.first)), (b"b", int(place.first))] * 20_000
    tiny = {
        "spark.sql.adaptive.advisoryPartitionSizeInBytes": "16kb",
        "spark.sql.adaptive.coalescePartitions.minPartitionSize": "16kb",
    }
    with settings(spark, tiny):
        joined = point_in_time_join(frame(spark, labels, 8), place.path, "id", columns=ADDED)
        counted = joined.groupBy("id", "f_value", F.spark_partition_id().alias("task")).count()
        rows = counted.collect()
    sums = {bytes(row.id): 0 for row in rows}
    for row in rows:
        assert (row.f_value is None) == (bytes(row.id) == b"b")
        sums[bytes(row.id)] += row["count"]
    assert sums == {b"a": 20_000, b"b": 20_000}
    assert len({row.task for row in rows if bytes(row.id) == b"a"}) > 1


@pytest.mark.spark
def test_no_labels_give_no_rows(spark: SparkSession, place: Place) -> None:
    joined = point_in_time_join(frame(spark, []), place.path, "id")
    assert joined.columns == ["id", "ts", "row", "f_value", "f_value_timestamp"]
    assert joined.collect() == []


def asked(path: Path, labels: list[tuple[bytes | None, int | None]]) -> pa.Table:
    """The answers of a task to labels, without a session."""
    words = ("backward", True, "error", "error", "error")
    choice = JoinChoice(None, *words, 2**63 - 1)
    question = joins.Question(find(str(path)), "id", "ts", ADDED, ADDED, choice)
    keys, times = zip(*labels, strict=True)
    columns = {joins.KEY: pa.array(keys, pa.binary()), joins.AT: pa.array(times, pa.int64())}
    return pa.Table.from_batches(joins.joiner(question)([pa.record_batch(columns)]))


def test_a_label_that_cannot_be_answered_is_an_error_of_its_task(place: Place) -> None:
    first, second = int(place.first), int(place.second)
    assert asked(place.path, [(b"a", first)])["value"].to_pylist() == [b"1"]
    cases: list[tuple[tuple[bytes | None, int | None], type[Exception], str]] = [
        ((b"a", 2**62), NotYetWrittenError, "key b'a', asks for it"),
        ((b"a", None), UsageError, "a label has no ts"),
        ((None, first), UsageError, "a label has no id"),
        ((b"a", -5), UsageError, "column 'ts' .* times are nanoseconds from 0"),
        ((b"a", 1_700_000_000), UsageError, "column 'ts' .* looks like seconds"),
        ((b"k" * 70_000, first), UsageError, "column 'id' "),
    ]
    for label, error, text in cases:
        with pytest.raises(error, match=text):
            asked(place.path, [(b"a", first), label])
    place.store.gc(before=place.second)
    short = place.path.parent / "short"
    place.store.checkpoint(short)
    assert asked(short, [(b"a", second)])["value"].to_pylist() == [b"2"]
    with pytest.raises(HistoryGoneError, match="key b'a', asks for it"):
        asked(short, [(b"a", second), (b"a", first)])


@pytest.mark.spark
def test_the_error_of_a_task_fails_the_query_with_its_text(
    spark: SparkSession, place: Place
) -> None:
    from pyspark.errors import PythonException

    df = frame(spark, [(b"a", 2**62)])
    with pytest.raises(PythonException, match=r"NotYetWrittenError: .*key b'a', asks for it"):
        point_in_time_join(df, place.path, "id").collect()
    with pytest.raises(PythonException, match="a label has no id: it is null") as found:
        point_in_time_join(df.selectExpr("NULLIF(id, id) AS id", "ts"), place.path, "id").collect()
    assert "Traceback" not in str(found.value)


@pytest.mark.spark
def test_bad_calls_are_refused_before_a_query(spark: SparkSession, place: Place) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    df = frame(spark, [(b"a", int(place.first))])
    naive = df.withColumn("ts", F.lit("2026-01-01").cast("timestamp_ntz"))
    path = place.path
    cases: list[tuple[DataFrame, dict[str, Any], str]] = [
        (df, {"key": "user"}, "the columns of a label: .*`user`"),
        (df, {"at": "when"}, "the columns of a label: .*when"),
        (df, {"key": "row"}, "key row is bigint, not binary or string"),
        (df, {"key": []}, "a key of no columns"),
        (df, {"at": "id"}, "column id is binary, and no time"),
        (naive, {}, "column ts has times without a time zone"),
        (naive.select("id", F.col("ts").alias("ID2"), "row"), {"at": "ID2"}, "time zone"),
        (df.select("*", F.lit(1).alias("row")), {}, "several columns 'row'"),
        (df.withColumn("F_Value", F.lit(1)), {}, "labels have a column 'f_value' already"),
        (df, {"columns": ["price"]}, "pass some of value, value_timestamp, value_version"),
        (df, {"columns": ["value", "value"]}, "each once"),
        (df, {"columns": "value"}, "pass some of"),
        (df, {"on_gone": "drop"}, "pass 'error' or 'null'"),
        (df, {"max_age": timedelta(-1)}, "max_age"),
        (df, {"table": "scores"}, "there is no table 'scores' in"),
        (df, {"known_at": "ts"}, "leave known_at out"),
        (df, {"source": place.store}, "pass a path, a URL or an Access"),
    ]
    for labels, given, text in cases:
        arguments = {"source": path, "key": "id", **given}
        with pytest.raises(UsageError, match=text):
            point_in_time_join(labels, **arguments)
    with pytest.raises(NotAStoreError):
        point_in_time_join(df, path.parent / "nothing", "id")
    with pytest.raises(LockedError, match="read a checkpoint"):
        point_in_time_join(df, path.parent / "store", "id")
    place.store.put(b"b", b"the store has kept its own lock")
