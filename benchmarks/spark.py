"""Spark in and out: rows go into a store, and come out of a collection or a checkpoint.

All jobs run in one local session, so figures are of one JVM that is warm. A noop sink takes the
rows of a read, and planning the read is timed. Processor time counts the JVM and its workers too.
delta-rs is used as by someone without Delta's JVM: the package `deltalake`
writes and lists a table's files, and Spark reads them as Parquet.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import kvstore
from benchmarks.subject import Subject, Work, processes_cpu_seconds
from kvstore.backup import Collection
from kvstore.mvcc.arrow import rows_schema
from kvstore.spark import ImportRows, apply_changes, read_collection, register, run_import, session
from kvstore.spark.jobs import backup as backup_job

_FILES = 4

_TINY_ROWS = 40_000
"""Rows of a load in tiny partitions."""

_BATCHES = 40
_BATCH_ROWS = 100
"""The micro-batches of a stream, and their rows."""


class Jobs(Subject):
    """Jobs of one session over Parquet files of all rows, in no order."""

    name = "Spark"

    def cpu_seconds(self) -> float:
        return processes_cpu_seconds()

    @cached_property
    def _session(self) -> SparkSession:
        spark = session("benchmark", memory="2g")
        register(spark)
        return spark

    @cached_property
    def _rows(self) -> Path:
        """Parquet files of the rows: the input of every job."""
        source = self.directory / "source"
        source.mkdir()
        keys, values = self.data.updates(self.data.rows, 0)
        for number in range(_FILES):
            columns = {"key": keys[number::_FILES], "value": values[number::_FILES]}
            file = source / f"{number}.parquet"
            pq.write_table(pa.table(columns, schema=rows_schema()), file, compression="none")
        return source

    @cached_property
    def _sorted(self) -> Path:
        """The same rows by key, as Spark itself writes them."""
        target = self.directory / "native"
        self._in_order(self._input()).write.parquet(str(target), compression="zstd")
        return target

    @cached_property
    def _imported(self) -> Path:
        """A collection and a checkpoint of a store with the rows."""
        home = self.directory / "imported"
        with kvstore.open(home / "store") as store:
            run_import(ImportRows(self._input(), "key", "value", partitions=_FILES), store)
            Collection(home / "collection").backup(store)
            store.checkpoint(home / "checkpoint")
        return home

    @cached_property
    def _incremented(self) -> Path:
        """A collection with five increments, of a thousandth of the rows each."""
        home = self.directory / "incremented"
        with kvstore.open(home / "store") as store:
            run_import(ImportRows(self._input(), "key", "value", partitions=_FILES), store)
            Collection(home / "collection").backup(store)
            for step in range(1, 6):
                with store.batch() as batch:
                    for row in zip(*self.data.updates(self.data.rows // 1000, step), strict=True):
                        batch.put(*row)
                Collection(home / "collection").backup(store)
        return home / "collection"

    @cached_property
    def _delta(self) -> Path:
        """A Delta table of the rows by key, made by delta-rs."""
        from deltalake import write_deltalake

        target = self.directory / "table"
        write_deltalake(str(target), pq.read_table(self._rows).sort_by("key"))
        return target

    def _input(self) -> DataFrame:
        return self._session.read.parquet(str(self._rows))

    def _in_order(self, rows: DataFrame) -> DataFrame:
        return rows.repartitionByRange(_FILES, "key").sortWithinPartitions("key")

    # -- in -------------------------------------------------------------------------------

    def sort(self) -> Work:
        """Spark's own part of the job: read, range-partition, sort."""
        rows = self._in_order(self._input())
        return self._doing(lambda: rows.write.format("noop").mode("overwrite").save())

    def bulk_import(self) -> Work:
        rows, target = self._input(), self.fresh("store")

        def run() -> None:
            with kvstore.open(target) as store:
                run_import(ImportRows(rows, "key", "value", partitions=_FILES), store)

        return self._doing(run)

    def import_by_delta(self) -> Work:
        """The same job as a user of delta-rs would write it."""
        from deltalake import write_deltalake

        source, target = self._rows, self.fresh("delta")
        return self._doing(
            lambda: write_deltalake(str(target), pq.read_table(source).sort_by("key"))
        )

    def import_hundred(self) -> Work:
        return self._import_tiny(100)

    def import_ten_thousand(self) -> Work:
        return self._import_tiny(10_000)

    def _import_tiny(self, partitions: int) -> Work:
        """Import a few rows that lie in this many partitions."""
        target = self.fresh(f"tiny-{partitions}")
        ids = self._session.range(0, _TINY_ROWS, 1, partitions)
        rows = ids.selectExpr("printf('k%08d', id) AS key", "printf('v%08d', id) AS value")

        def run() -> int:
            with kvstore.open(target) as store:
                run_import(ImportRows(rows, "key", "value", partitions=_FILES), store)
            return _TINY_ROWS

        return run

    # -- micro-batches --------------------------------------------------------------------

    @cached_property
    def _feed(self) -> Path:
        """Commits as a checkpoint, and as Parquet files with the same rows."""
        home = self.directory / "feed"
        (home / "files").mkdir(parents=True)
        with kvstore.open(home / "store") as store:
            for step in range(_BATCHES):
                keys, values = self.data.updates(_BATCH_ROWS, step)
                store.put_many(zip(keys, values, strict=True))
                table = pa.table({"key": keys, "value": values}, schema=rows_schema())
                pq.write_table(table, home / "files" / f"{step:03}.parquet")
            store.checkpoint(home / "checkpoint")
        return home

    def follow_parquet(self, step: int) -> Work:
        """Collect micro-batches of one file each."""
        reader = self._session.readStream.schema("key binary, value binary")
        frame = reader.option("maxFilesPerTrigger", 1).parquet(str(self._feed / "files"))
        return self._following(frame, lambda batch, _: batch.toArrow(), step)

    def apply_changes(self, step: int) -> Work:
        """Apply micro-batches of one commit each to another store."""
        reader = self._session.readStream.format("kvstore")
        options = {"readChangeFeed": "true", "startingTimestamp": "0"}
        bound = {"maxRowsPerTrigger": str(_BATCH_ROWS)}
        frame = reader.options(**options, **bound).load(str(self._feed / "checkpoint"))
        target = self.fresh(f"applied-{step}")

        def run() -> int:
            with kvstore.open(target) as store:

                def apply(batch: DataFrame, number: int) -> None:
                    apply_changes(batch, store, position=b"position", batch_id=number)

                return self._following(frame, apply, step)()

        return run

    def _following(
        self, frame: DataFrame, take: Callable[[DataFrame, int], object], step: int
    ) -> Work:
        offsets = self.fresh(f"offsets-{step}")

        def run() -> int:
            seen: list[int] = []

            def note(batch: DataFrame, number: int) -> None:
                take(batch, number)
                seen.append(number)

            writer = frame.writeStream.foreachBatch(note).trigger(availableNow=True)
            writer.option("checkpointLocation", str(offsets)).start().awaitTermination()
            assert len(seen) == _BATCHES
            return _BATCHES

        return run

    # -- backup ---------------------------------------------------------------------------

    # A place of its own each time: the store refuses a known place whose backups are gone.

    def backup_alone(self, step: int) -> Work:
        """A full backup of the store, in one process."""
        target = self.fresh(f"alone-{step}")
        return self._doing(lambda: Collection(target).backup(self._store))

    def backup_by_tasks(self, step: int) -> Work:
        target = self.fresh(f"shared-{step}")
        return self._doing(lambda: backup_job.backup(self._session, self._store, str(target)))

    def copy_by_delta(self) -> Work:
        """Copy the table's rows into another table: delta-rs has no other backup."""
        from deltalake import DeltaTable, write_deltalake

        source, target = self._delta, self.fresh("delta-copy")

        def run() -> None:
            rows = DeltaTable(str(source)).to_pyarrow_dataset().scanner().to_reader()
            write_deltalake(str(target), rows)

        return self._doing(run)

    @cached_property
    def _store(self) -> kvstore.Store:
        return kvstore.open(self._imported / "store")

    # -- out ------------------------------------------------------------------------------

    def read_parquet(self) -> Work:
        source = str(self._sorted)
        return self._draining(lambda: self._session.read.parquet(source))

    def read_by_delta(self) -> Work:
        """Spark reads the files that delta-rs names for the table."""
        from deltalake import DeltaTable

        source = str(self._delta)
        return self._draining(lambda: self._session.read.parquet(*DeltaTable(source).file_uris()))

    def read_collection(self) -> Work:
        """Read a collection by Spark's own scan of the parts."""
        source = str(self._imported / "collection")
        return self._draining(lambda: read_collection(self._session, source, native=True))

    def read_increments(self) -> Work:
        """Read a collection with increments behind the full backup, likewise."""
        source = str(self._incremented)
        return self._draining(lambda: read_collection(self._session, source, native=True))

    def read_source(self) -> Work:
        """Read a collection by `format("kvstore")`."""
        return self._ours("collection")

    def read_checkpoint(self) -> Work:
        return self._ours("checkpoint")

    def read_changes(self) -> Work:
        """Read all changes of a collection."""
        return self._ours("collection", readChangeFeed="true", startingTimestamp=0)

    def _ours(self, name: str, **options: Any) -> Work:
        source = str(self._imported / name)
        reader = self._session.read.format("kvstore").options(**options)
        return self._draining(lambda: reader.load(source))

    def _draining(self, frame: Callable[[], DataFrame]) -> Work:
        return self._doing(lambda: frame().write.format("noop").mode("overwrite").save())

    def _doing(self, run: Callable[[], object]) -> Work:
        def work() -> int:
            run()
            return self.data.rows

        return work

    def close(self) -> None:
        self._session.stop()
        if "_store" in self.__dict__:
            self._store.close()
        for name in ("imported", "incremented"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
