"""Spark reads, streams and backs up a store while its imports settle, and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import Store, bulk
from kvstore.backup import Collection
from kvstore.spark.jobs import backup
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of
from tests.spark.test_stream import Seen, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def add(store: Store, number: int) -> None:
    staged = bulk.Import.create(f"{store.path}-staging-{number}", import_id=number)
    with staged.writer() as writer:
        for key in range(number, 12, number):
            writer.delete(b"%02d" % key) if key == 6 else writer.put(b"%02d" % key, b"%d" % number)
    staged.seal()
    bulk.ingest(store, staged.staging, move=True)


def ends_at(step: str) -> Any:
    """Ends a run of GC at the third such step."""
    seen: list[str] = []

    def look(name: str) -> None:
        seen.append(name)
        if seen.count(step) == 3:
            raise InterruptedError

    return look


def test_reads_changes_a_stream_and_a_backup_agree_while_imports_settle_and_afterwards(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    url, collection = str(tmp_path / "c"), Collection(tmp_path / "c")
    for number in range(1, 4):
        store.put(b"%02d" % (4 * number), b"put")
        add(store, number)
    since = collection.backup(store).upper - 1
    store.delete_range(b"04", b"07")
    add(store, 5)
    store.put(b"10", b"last")
    state = list(store.scan(as_of=since))
    changes = sorted((c.timestamp, c.op, c.key, c.value) for c in store.changes(since))
    collector = parts_of(store).collector
    collector.at_step = ends_at("settled")
    with bounds(SETTLE_STEP_ROWS=1), pytest.raises(InterruptedError):
        store.gc(before=since)
    collector.at_step = lambda step: None
    store.checkpoint(tmp_path / "in")
    assert store.gc(before=since).settled >= 1
    assert [record.import_id for record in store.imports.all()] == [5]
    store.checkpoint(tmp_path / "behind")
    assert backup.backup(spark, store, url, tasks=2).lower == since + 1
    collection.verify("contents", store)
    seen: Seen = []
    run(spark, tmp_path / "c", tmp_path / "state", seen, startingTimestamp=str(since))
    assert sorted(row for batch in seen for row in batch) == changes
    for path in (str(tmp_path / "in"), str(tmp_path / "behind")):
        found = spark.read.format("kvstore").option("timestampAsOf", str(since)).load(path)
        assert sorted((bytes(r.key), bytes(r.value)) for r in found.collect()) == state
        window = {"readChangeFeed": "true", "startingTimestamp": str(since)}
        fed = spark.read.format("kvstore").options(**window).load(path).collect()
        assert changes == sorted(
            (r._commit_version, r._change_type, bytes(r.key), r.value) for r in fed
        )
