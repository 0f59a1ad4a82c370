"""Applying a change feed: the target equals the source after each window, also if a window is
repeated."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore import Store, bulk
from kvstore.bulk.pushes.pull import Puller
from kvstore.errors import UsageError
from kvstore.spark import apply_changes, batch_importer
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
    with pytest.raises(UsageError, match="3 of b'feed' was written before with other rows"):
        apply_changes(changes.where("key <> X'62'"), pushes, position=b"feed", batch_id=3)
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
    other = spark.createDataFrame([(b"a", None, b"2", "put", 5)], CHANGES)
    with pytest.raises(UsageError, match="0 of b'~feed' was written before with other rows"):
        apply_changes(other, store, position=b"~feed", batch_id=0)
    # The first state comes in batches of keys, whose versions do not ascend from batch to batch.
    older = spark.createDataFrame([(b"b", None, b"2", "put", 4)], CHANGES)
    assert apply_changes(older, store, position=b"~feed", batch_id=1) is not None
    assert store.get(b"b") == b"2"
    assert apply_changes(batch.limit(0), store, position=b"~feed", batch_id=2) is None
    # A stream with a new checkpoint location begins with number 0: its rows are not skipped.
    with pytest.raises(UsageError, match="micro-batch 0 of b'~feed' comes behind micro-batch 1"):
        apply_changes(batch, store, position=b"~feed", batch_id=0)


def test_a_micro_batch_is_added_once_and_another_one_of_its_number_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One stream into three targets: a store that applies changes, a push, and imports. It stops
    and starts, is repeated, begins anew, and gets an older checkpoint location."""
    pushes, state = bulk.Pushes(tmp_path / "pushes"), tmp_path / "state"
    with (
        kvstore.open(tmp_path / "source", durability="async") as source,
        kvstore.open(tmp_path / "target", durability="async") as target,
        kvstore.open(tmp_path / "pulls", durability="async") as pulls,
        kvstore.open(tmp_path / "imports", durability="async") as imports,
    ):
        puller = Puller(pulls, pushes, name="s")
        add = batch_importer(imports, "orders", "key", "value", duplicates="last", order_by="n")
        named: Any = {"position": b"~feed"}
        doors: dict[str, Callable[[DataFrame, int], object]] = {
            "apply": lambda df, n: apply_changes(df, target, **named, batch_id=n),
            "push": lambda df, n: apply_changes(df, pushes, **named, batch_id=n),
            "import": lambda df, n: add(puts(df), n),
        }
        (tmp_path / "copies").mkdir()

        def run(checkpoint: Path, copy: str | None) -> dict[str, str]:
            """Let the stream read up to a new copy, and return what the targets refused."""
            if copy is not None:
                source.checkpoint(tmp_path / "copies" / copy)
            return follow(spark, tmp_path / "copies", checkpoint, doors)

        def commits() -> tuple[bytes | None, int, int]:
            drain(puller)
            return target.get(b"~feed"), len(pushes.list()), len(imports.imports.all())

        def require_equal() -> None:
            drain(puller)
            rows = dict(source.scan())
            assert {key: value for key, value in target.scan() if key != b"~feed"} == rows
            assert dict(pulls.scan()) == rows
            assert {key: value for key, value in imports.scan() if key in rows} == rows

        source.put_many({b"k1": b"v", b"k2": b"v"})
        assert run(state, "0") == {}
        require_equal()
        assert commits()[1:] == (1, 1)
        shutil.copytree(state, tmp_path / "older")

        source.delete_range(b"k1", b"k2")
        source.put(b"k2", b"again")
        before = commits()
        refused = run(tmp_path / "lost", "1")  # its micro-batch 0 has a row that nobody has yet
        assert refused.keys() == doors.keys()
        assert all(
            "micro-batch 0 of " in each and "from the stream" in each for each in refused.values()
        )
        assert commits() == before

        assert run(state, None) == {}  # the first stream goes on
        require_equal()
        before = commits()
        assert before[1:] == (2, 2)
        for name in ("1", ".1.crc"):  # as after a crash before Spark recorded the end of the batch
            (state / "commits" / name).unlink(missing_ok=True)
        assert run(state, None) == {}
        assert commits() == before

        source.put(b"k3", b"new")
        refused = run(tmp_path / "older", "2")  # plans micro-batch 1 with a row more
        assert refused.keys() == doors.keys()
        assert all("written before with other offsets" in each for each in refused.values())
        assert commits() == before
        with pytest.raises(
            UsageError, match="micro-batch 0 of 'orders' comes behind micro-batch 1"
        ):
            add(spark.sql("SELECT 'k2' AS key, 'v2' AS value, 0 AS n"), 0)


def puts(changes: DataFrame) -> DataFrame:
    return changes.where("value IS NOT NULL").withColumn("n", changes["_commit_version"])


def follow(
    spark: SparkSession,
    copies: Path,
    checkpoint: Path,
    doors: dict[str, Callable[[DataFrame, int], object]],
) -> dict[str, str]:
    """Let a stream run to its end, and return the refusals of its targets."""
    refused: dict[str, str] = {}

    def through(batch: DataFrame, number: int) -> None:
        for name, door in doors.items():
            try:
                door(batch, number)
            except UsageError as error:  # noqa: PERF203  # the other doors are tried too
                refused[name] = str(error)

    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", maxRowsPerTrigger="4")
        .load(str(copies))
        .writeStream.foreachBatch(through)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    return refused


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
