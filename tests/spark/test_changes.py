"""Applying a change feed: the target equals the source after each window, also if a window is
repeated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore import Store
from kvstore.errors import UsageError
from spark_connector import apply_changes
from tests.spark.test_origins import write_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_S = 120
CHANGES = "key binary, end_key binary, value binary, _change_type string, _commit_version long"


def feed(spark: SparkSession, path: Path, since: int, upto: int, **options: str) -> DataFrame:
    return (
        spark.read.format("kvstore")
        .options(readChangeFeed="true", startingTimestamp=since, endingTimestamp=upto, **options)
        .load(str(path))
    )


@pytest.mark.parametrize("options", [{}, {"includePreimage": "true"}, {"revisions": "latest"}])
def test_windows_of_random_histories_make_the_target_equal_to_the_source(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    pick = random.Random(26)
    with (
        kvstore.open(tmp_path / "source", durability="async") as source,
        kvstore.open(tmp_path / "target", durability="async") as target,
    ):
        write_history(source, tmp_path, pick, steps=40)
        times = sorted({change.timestamp for change in source.changes("oldest")})
        since = 0
        for upto in [*sorted(pick.sample(times, 2)), times[-1]]:
            window = feed(spark, tmp_path / "checkpoint", since, upto, **options)
            for _ in range(2):  # a repeated window leaves the same state
                apply_changes(window, target)
                assert list(target.scan()) == list(source.scan(as_of=upto))
            since = upto


def test_changes_of_one_commit_take_effect_in_their_order(
    spark: SparkSession, store: Store
) -> None:
    store.put(b"b", b"before")
    rows = [
        (b"b", None, b"after", "put", 7),
        (b"a", b"c", None, "delete_range", 7),
        (b"a", None, b"older", "put", 6),
        (b"d", None, b"image", "update_preimage", 7),
        (b"e", None, b"inserted", "insert", 7),
        (b"e", None, b"old", "delete", 7),
    ]
    stamp = apply_changes(spark.createDataFrame(rows, CHANGES), store)
    assert list(store.scan()) == [(b"b", b"after"), (b"e", b"inserted")]
    assert {change.timestamp for change in store.changes(int(stamp or 0) - 1)} == {stamp}


def test_a_repeated_micro_batch_makes_no_second_commit(spark: SparkSession, store: Store) -> None:
    batch = spark.createDataFrame([(b"a", None, b"1", "put", 5)], CHANGES)
    assert apply_changes(batch, store, position=b"~feed", batch_id=0) is not None
    store.put(b"a", b"newer")
    assert apply_changes(batch, store, position=b"~feed", batch_id=0) is None
    assert store.get(b"a") == b"newer"
    # The first state comes in batches of keys, whose versions do not ascend from batch to batch.
    older = spark.createDataFrame([(b"b", None, b"2", "put", 4)], CHANGES)
    assert apply_changes(older, store, position=b"~feed", batch_id=1) is not None
    assert store.get(b"b") == b"2"
    assert apply_changes(batch.limit(0), store, position=b"~feed", batch_id=2) is None


def test_a_stream_that_stops_and_starts_keeps_a_second_store_equal(
    spark: SparkSession, tmp_path: Path
) -> None:
    with (
        kvstore.open(tmp_path / "source", durability="async") as source,
        kvstore.open(tmp_path / "target", durability="async") as target,
    ):
        (tmp_path / "copies").mkdir()
        for number in range(6):
            source.put(b"k%d" % number, b"v")
        for number in range(2):
            source.checkpoint(tmp_path / "copies" / str(number))
            follow(spark, tmp_path, target)
            assert [row for row in target.scan() if row[0] != b"~feed"] == list(source.scan())
            source.delete_range(b"k1", b"k4")
            source.put(b"k2", b"again")
        position = target.get(b"~feed")
        follow(spark, tmp_path, target)
        assert target.get(b"~feed") == position


def follow(spark: SparkSession, directory: Path, target: Store) -> None:
    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", maxRowsPerTrigger="4")
        .load(str(directory / "copies"))
        .writeStream.foreachBatch(
            lambda df, n: apply_changes(df, target, position=b"~feed", batch_id=n) and None
        )
        .option("checkpointLocation", str(directory / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)


def test_what_is_no_change_feed_is_refused_and_changes_nothing(
    spark: SparkSession, store: Store
) -> None:
    put = spark.createDataFrame([(b"a", None, b"1", "put", 5)], CHANGES)
    cleared = spark.createDataFrame([(b"a", b"b", None, "delete_range", 5)], CHANGES)
    odd = spark.createDataFrame([(b"a", None, b"1", "upsert", 5)], CHANGES)
    with pytest.raises(UsageError, match="no column _change_type"):
        apply_changes(put.drop("_change_type"), store)
    with pytest.raises(UsageError, match="no column end_key"):
        apply_changes(cleared.drop("end_key"), store)
    with pytest.raises(UsageError, match="_change_type 'upsert' is no change"):
        apply_changes(odd, store)
    with pytest.raises(UsageError, match="one of position and batch_id"):
        apply_changes(put, store, batch_id=1)
    store.put(b"mine", b"text")
    with pytest.raises(UsageError, match="holds b'text', and no number"):
        apply_changes(put, store, position=b"mine", batch_id=1)
    assert list(store.scan()) == [(b"mine", b"text")]
