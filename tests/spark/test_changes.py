"""Applying a change feed: the target equals the source after each window, also if a window is
repeated."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bulk
import kvstore
from bulk.pushes.pull import Puller
from kvstore import Store
from kvstore.errors import UsageError
from spark_connector import apply_changes
from tests.pushes.made import drain
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
def test_windows_of_random_histories_make_the_targets_equal_to_the_source(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    """The targets are a store, and two stores that take a shard each of a push."""
    pick, pushes = random.Random(26), bulk.Pushes(tmp_path / "pushes")
    with ExitStack() as opened:
        source, target, *shards = (
            opened.enter_context(kvstore.open(tmp_path / name, durability="async"))
            for name in ("source", "target", "shard-0", "shard-1")
        )
        pullers = [Puller(each, pushes, name=f"s{n}", shard=n) for n, each in enumerate(shards)]
        write_history(source, tmp_path, pick, steps=40)
        times = sorted({change.timestamp for change in source.changes("oldest")})
        since = 0
        for upto in [*sorted(pick.sample(times, 2)), times[-1]]:
            window = feed(spark, tmp_path / "checkpoint", since, upto, **options)
            for _ in range(2):  # a repeated window leaves the same state
                apply_changes(window, target)
                apply_changes(window, pushes, shards=2)
                for puller in pullers:
                    drain(puller)
                wanted = list(source.scan(as_of=upto))
                assert list(target.scan()) == wanted
                assert sorted(row for each in shards for row in each.scan()) == wanted
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


def test_a_push_of_changes_is_one_commit_and_its_revert_takes_them_back(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    pushes = bulk.Pushes(tmp_path / "pushes")
    before = {b"a": b"old", b"b": b"old", b"c": b"kept", b"d": b"old"}
    store.put_many(before)
    rows = [
        (b"d", None, None, "delete", 5),
        (b"a", None, b"lost", "put", 6),
        (b"a", b"c", None, "delete_range", 7),
        (b"b", None, b"new", "put", 7),
    ]
    changes = spark.createDataFrame(rows, CHANGES)
    made = apply_changes(changes, pushes, position=b"feed", batch_id=3)
    assert made is not None
    assert (made.number, made.mode, made.rows) == (1, "change", 2)
    assert apply_changes(changes, pushes, position=b"feed", batch_id=3) is None
    with pytest.raises(UsageError, match="micro-batch 2 of b'feed' comes behind micro-batch 3"):
        apply_changes(changes, pushes, position=b"feed", batch_id=2)
    assert apply_changes(changes.limit(0), pushes) is None
    puller = Puller(store, pushes, name="s")
    drain(puller)
    assert dict(store.scan()) == {b"b": b"new", b"c": b"kept"}
    at = store.imports.all()[0].added
    assert at is not None
    assert dict(store.scan(as_of=at - 1)) == before
    assert apply_changes(changes, pushes, position=b"other", batch_id=3) is not None
    pushes.revert(1)
    pushes.revert(2)
    drain(puller)
    assert dict(store.scan()) == before


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
    # A stream with a new checkpoint location begins with number 0: its rows are not skipped.
    with pytest.raises(UsageError, match="micro-batch 0 of b'~feed' comes behind micro-batch 1"):
        apply_changes(batch, store, position=b"~feed", batch_id=0)


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
    with pytest.raises(UsageError, match="batch_id=-1; pass at least 0"):
        apply_changes(put, store, position=b"p", batch_id=-1)
    with pytest.raises(UsageError, match=r"pass shards with bulk\.Pushes"):
        apply_changes(put, store, shards=2)  # type: ignore[call-overload]
    store.put(b"mine", b"text")
    with pytest.raises(UsageError, match="holds b'text', and no number"):
        apply_changes(put, store, position=b"mine", batch_id=1)
    assert list(store.scan()) == [(b"mine", b"text")]
