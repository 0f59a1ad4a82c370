"""Streams: every change once, in order of micro-batches, over restarts; imports once per batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore import Store
from kvstore.backup import Collection
from kvstore.errors import UsageError
from kvstore.spark.read import STATE
from pyspark_kvstore import DefaultSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Seen = list[list[tuple[int, str, bytes, bytes | None]]]


def run(spark: SparkSession, path: Path, state: Path, seen: Seen, **options: Any) -> None:
    """Read everything that is available, micro-batch by micro-batch, from the position in
    `state`."""

    def collect(batch: DataFrame, _batch_id: int) -> None:
        found = [
            (row._commit_version, row._change_type, bytes(row.key), row.value)
            for row in batch.collect()
        ]
        seen.append(sorted(found, key=lambda row: row[0]))

    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", **options)
        .load(str(path))
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(state))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def expected(store: Store, since: int = 0) -> list[tuple[int, str, bytes, bytes | None]]:
    changes = store.changes(since, order="time")
    return [(c.timestamp, c.op, c.key, c.value) for c in changes]


def test_collection_is_followed_over_restarts_and_reshards_each_change_once(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    collection, state = Collection(tmp_path / "c"), tmp_path / "state"
    seen: Seen = []
    for number in range(10):
        store.put(b"%02d" % number, b"1")
    collection.backup(store)
    start = {"startingTimestamp": "0", "maxRowsPerTrigger": "4"}
    run(spark, tmp_path / "c", state, seen, **start)
    assert [len(batch) for batch in seen] == [4, 4, 2]
    store.reshard(streams=4)
    with store.batch() as batch:
        for number in range(6):
            batch.delete(b"%02d" % number)
    store.delete_range(b"08", b"09")
    collection.backup(store)
    run(spark, tmp_path / "c", state, seen, **start)
    assert [len(batch) for batch in seen] == [4, 4, 2, 6, 1]  # a commit is never cut
    run(spark, tmp_path / "c", state, seen, **start)
    assert [row for batch in seen for row in batch] == expected(store)


def test_progress_of_a_stream_tells_how_far_behind_it_is(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    for number in range(3):
        store.put(b"%d" % number, b"")
    store.checkpoint(tmp_path / "copy")
    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", startingTimestamp="0", maxRowsPerTrigger="1")
        .load(str(tmp_path / "copy"))
        .writeStream.foreachBatch(lambda batch, number: None)
        .option("checkpointLocation", str(tmp_path / "state"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    times = [change.timestamp for change in store.changes("oldest", order="time")]
    sources = [progress["sources"][0] for progress in query.recentProgress]
    read = [json.loads(source["endOffset"])["timestamp"] for source in sources]
    told = [json.loads(source["latestOffset"]) for source in sources]
    [newest] = {each["timestamp"] for each in told}
    assert read[:3] == [times[0], times[1], newest]
    assert newest >= times[-1]
    assert [each["lag_rows"] for each in told[:3]] == [2, 1, 0]
    assert all(each["lag_is_exact"] for each in told)
    assert [each["lag_seconds"] * 1e9 for each in told] == pytest.approx(
        [newest - at for at in read]
    )


def test_stream_without_a_start_begins_with_the_state(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    checkpoints, state = tmp_path / "checkpoints", tmp_path / "state"
    checkpoints.mkdir()
    store.put(b"a", b"1")
    store.put(b"a", b"2")
    store.delete(b"b")
    store.gc(before=store.upper - 1)  # the state can be read all the same
    at = store.checkpoint(checkpoints / "1")
    seen: Seen = []
    run(spark, checkpoints, state, seen)
    assert [row[1:] for row in seen.pop()] == [("put", b"a", b"2")]
    store.put(b"c", b"3")
    store.delete(b"a")
    store.checkpoint(checkpoints / "2")
    run(spark, checkpoints, state, seen)
    assert [row for batch in seen for row in batch] == expected(store, at)


@pytest.mark.parametrize("origin", ["collection", "checkpoints"])
def test_the_first_state_comes_in_micro_batches_each_row_once_over_restarts(
    spark: SparkSession, store: Store, tmp_path: Path, origin: str
) -> None:
    """The state is cut between keys at one pinned time, although the store changes between two
    micro-batches."""
    path, state = tmp_path / "origin", tmp_path / "state"
    copies = iter(range(100))

    def publish() -> None:
        if origin == "collection":
            Collection(path).backup(store)
        else:
            path.mkdir(exist_ok=True)
            store.checkpoint(path / str(next(copies)))

    with store.batch() as batch:
        for number in range(25):
            batch.put(b"%02d" % number, b"1")
    store.delete_range(b"03", b"06")
    publish()
    at = store.upper - 1
    seen: Seen = []

    def stop_in(batch: DataFrame, batch_id: int) -> None:
        found = [
            (r._commit_version, r._change_type, bytes(r.key), r.value) for r in batch.collect()
        ]
        seen.append(sorted(found, key=lambda row: row[2]))
        if batch_id == 1:
            # The process dies after it took its second batch and before it recorded that; time
            # passes.
            store.put(b"00", b"2")
            store.delete(b"24")
            publish()
            raise RuntimeError("killed")

    reader = spark.readStream.format("kvstore").options(
        readChangeFeed="true", maxRowsPerTrigger="10"
    )
    query = (
        reader.load(str(path))
        .writeStream.foreachBatch(stop_in)
        .option("checkpointLocation", str(state))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match="killed"):
        query.awaitTermination()
    taken = seen.pop()
    run(spark, path, state, seen, maxRowsPerTrigger="10")
    assert sorted(seen[1], key=lambda row: row[2]) == taken  # the same two offsets, the same rows
    assert [len(batch) for batch in seen[:3]] == [10, 10, 2]
    rows = [row for batch in seen for row in batch]
    first, later = rows[:22], rows[22:]
    assert [(key, value) for _, _, key, value in sorted(first, key=lambda row: row[2])] == list(
        store.scan(as_of=at)
    )
    run(spark, path, state, seen, maxRowsPerTrigger="10")
    later = [row for batch in seen for row in batch][22:]
    assert later == expected(store, at)


def test_the_first_state_is_cut_by_bytes_as_well(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    with store.batch() as batch:
        for number in range(10):
            batch.put(b"%02d" % number, b"x" * 98)
        batch.put(b"05", b"x" * 5000)  # a commit larger than the bound is alone in a batch
    store.checkpoint(tmp_path / "copy")
    seen: Seen = []
    run(spark, tmp_path / "copy", tmp_path / "state", seen, maxBytesPerTrigger="300")
    assert [len(batch) for batch in seen] == [3, 2, 1, 3, 1]


def test_a_stream_goes_on_from_an_older_chain_to_the_newest(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    collection, state = Collection(tmp_path / "c"), tmp_path / "state"
    store.put(b"a", b"1")
    collection.backup(store)
    seen: Seen = []
    run(spark, tmp_path / "c", state, seen, startingTimestamp="0")
    store.put(b"b", b"2")
    collection.backup(store)
    store.gc(before=store.upper - 1)
    store.put(b"c", b"3")
    since = collection.upper - 1
    collection.backup(store, full=True)  # the chain begins above the position of the stream
    assert collection.since > seen[0][0][0]
    assert collection.since <= since
    run(spark, tmp_path / "c", state, seen, startingTimestamp="0")
    assert [row[2] for batch in seen for row in batch] == [b"a", b"b", b"c"]


def test_lost_history_stops_the_stream_unless_it_may_be_skipped(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    checkpoints, state = tmp_path / "checkpoints", tmp_path / "state"
    checkpoints.mkdir()
    store.put(b"a", b"1")
    store.checkpoint(checkpoints / "1")
    seen: Seen = []
    run(spark, checkpoints, state, seen, startingTimestamp="0")
    store.put(b"lost", b"2")
    store.gc(before=store.upper - 1)
    store.put(b"kept", b"3")
    store.checkpoint(checkpoints / "2")
    with pytest.raises(Exception, match="changes are lost"):
        run(spark, checkpoints, state, seen)
    run(spark, checkpoints, state, seen, failOnDataLoss="false")
    assert [row[2] for row in seen[-1]] == [b"kept"]


def test_a_first_state_whose_time_is_gone_goes_on_at_a_later_one_if_it_may(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    collection, state = Collection(tmp_path / "c"), tmp_path / "state"
    for number in range(8):
        store.put(b"%d" % number, b"1")
    collection.backup(store)
    options = {"maxRowsPerTrigger": "3"}
    seen: Seen = []

    def lose(batch: DataFrame, batch_id: int) -> None:
        if batch_id == 1:  # the batch was taken, and not recorded
            store.delete(b"4")
            kept = store.put(b"7", b"2")
            collection.backup(store)
            collection.expire(before=kept)
            raise RuntimeError("killed")
        seen.append([(0, "", bytes(row.key), row.value) for row in batch.collect()])

    query = (
        spark.readStream.format("kvstore")
        .options(readChangeFeed="true", **options)
        .load(str(tmp_path / "c"))
        .writeStream.foreachBatch(lose)
        .option("checkpointLocation", str(state))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match="killed"):
        query.awaitTermination()
    with pytest.raises(Exception, match="changes are lost"):
        run(spark, tmp_path / "c", state, [], **options)
    run(spark, tmp_path / "c", state, seen, failOnDataLoss="false", **options)
    rows = sorted((key, value) for batch in seen for _, _, key, value in batch)
    assert rows == list(store.scan())


def test_another_store_in_its_place_stops_the_stream(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    store.put(b"a", b"1")
    store.checkpoint(tmp_path / "copy")
    run(spark, tmp_path / "copy", state, [], startingTimestamp="0")
    (tmp_path / "copy").rename(tmp_path / "gone")
    with kvstore.open(tmp_path / "copy") as other:
        other.put(b"b", b"2")
    with pytest.raises(Exception, match="the stream has read store"):
        run(spark, tmp_path / "copy", state, [], startingTimestamp="0")


def test_options_of_a_stream_are_refused_in_our_words_last(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    store.put(b"a", b"1")
    store.checkpoint(tmp_path / "copy")
    with pytest.raises(Exception, match="startingAfterTimestamp are both given") as caught:
        run(
            spark,
            tmp_path / "copy",
            tmp_path / "state",
            [],
            startingTimestamp="0",
            startingAfterTimestamp="0",
        )
    assert "UnboundLocalError" not in str(caught.value)
    with pytest.raises(UsageError, match=r"import: writeStream\.foreachBatch"):
        DefaultSource({}).streamWriter(STATE, overwrite=False)
