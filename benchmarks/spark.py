"""Spark in and out: what takes rows into a store, and out of a collection or a checkpoint.

All jobs run in one local session, so figures are of one JVM that is warm. A noop sink takes what
is read. Processor time is not told: the work is done in the JVM and its workers.
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
from backup import Collection
from benchmarks.subject import Subject, Work
from kvstore.arrow import ROWS_SCHEMA
from spark_connector import register, run_import, session
from spark_connector.jobs import backup as backup_job

_FILES = 4


class Jobs(Subject):
    """Jobs of one session over Parquet files of all rows, in no order."""

    name = "Spark"

    @cached_property
    def _session(self) -> SparkSession:
        spark = session("benchmark", memory="2g")
        register(spark)
        return spark

    @cached_property
    def _rows(self) -> Path:
        """Parquet files of the rows, as the input of everything."""
        source = self.directory / "source"
        source.mkdir()
        keys, values = self.data.updates(self.data.rows, 0)
        for number in range(_FILES):
            columns = {"key": keys[number::_FILES], "value": values[number::_FILES]}
            file = source / f"{number}.parquet"
            pq.write_table(pa.table(columns, schema=ROWS_SCHEMA), file, compression="none")
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
            run_import(self._input(), store, "key", "value", partitions=_FILES)
            Collection(home / "collection").backup(store)
            store.checkpoint(home / "checkpoint")
        return home

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
                run_import(rows, store, "key", "value", partitions=_FILES)

        return self._doing(run)

    def import_by_delta(self) -> Work:
        """The same job as a user of delta-rs would write it."""
        from deltalake import write_deltalake

        source, target = self._rows, self.fresh("delta")
        return self._doing(
            lambda: write_deltalake(str(target), pq.read_table(source).sort_by("key"))
        )

    # -- backup ---------------------------------------------------------------------------

    def backup_alone(self) -> Work:
        """A full backup of the store, in one process."""
        target = self.fresh("alone")
        return self._doing(lambda: Collection(target).backup(self._store))

    def backup_by_tasks(self) -> Work:
        target = self.fresh("shared")
        return self._doing(lambda: backup_job.backup(self._session, self._store, str(target)))

    @cached_property
    def _store(self) -> kvstore.Store:
        return kvstore.open(self._imported / "store")

    # -- out ------------------------------------------------------------------------------

    def read_parquet(self) -> Work:
        return self._draining(self._session.read.parquet(str(self._sorted)))

    def read_collection(self) -> Work:
        return self._draining(self._ours("collection"))

    def read_checkpoint(self) -> Work:
        return self._draining(self._ours("checkpoint"))

    def read_changes(self) -> Work:
        """All changes of a collection since the beginning."""
        return self._draining(self._ours("collection", readChangeFeed="true", startingTimestamp=0))

    def _ours(self, name: str, **options: Any) -> DataFrame:
        home = self._imported
        return self._session.read.format("kvstore").options(**options).load(str(home / name))

    def _draining(self, rows: DataFrame) -> Work:
        return self._doing(lambda: rows.write.format("noop").mode("overwrite").save())

    def _doing(self, run: Callable[[], object]) -> Work:
        def work() -> int:
            run()
            return self.data.rows

        return work

    def close(self) -> None:
        self._session.stop()
        if "_store" in self.__dict__:
            self._store.close()
        shutil.rmtree(self.directory / "imported", ignore_errors=True)
