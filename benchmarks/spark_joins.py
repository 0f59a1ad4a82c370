"""Point-in-time joins in Spark: our join, Spark's own `ASOF JOIN`, and a window function.

Labels and the history lie in Parquet files, the history as a store and as a collection too; see
`benchmarks.joins`. All joins run in one session, so figures are of one JVM that is warm. A noop
sink takes the rows, and planning the join is timed. The answers of all ways are compared row by
row before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  # as every Spark program has it

from benchmarks.joins import COMPARED, Joins, labels_of
from benchmarks.subject import Work, processes_cpu_seconds
from kvstore.spark import point_in_time_join, session

_WAYS: Final = ("checkpoint", "collection", "asof", "window")
_US: Final = pa.timestamp("us", "UTC")
_FILES: Final = 4


class SparkJoins(Joins):
    """Joins of one session. An operation names its way."""

    name = "Spark"

    def cpu_seconds(self) -> float:
        return processes_cpu_seconds()

    @cached_property
    def _session(self) -> SparkSession:
        setting = {"spark.sql.join.asofJoin.enabled": "true"}
        return session("benchmark", memory="2g", **setting)

    @cached_property
    def _whole(self) -> Path:
        return self.place / "whole"

    @cached_property
    def _history(self) -> DataFrame:
        """The history in files whose times Spark can read: it has no nanoseconds."""
        source = self.directory / "history"
        if not source.exists():
            _write(pq.read_table(self._whole / "history.parquet"), "at", source)
        return self._session.read.parquet(str(source))

    def agree(self) -> Work:
        """Compare the answers of all ways."""

        def work() -> int:
            labels = self._labels(COMPARED, 0)
            answers = [self._answers(way, labels) for way in _WAYS]
            assert all(found == answers[0] for found in answers), "an answer differs"
            return COMPARED

        return work

    def join_by(self, way: str, share: float, step: int) -> Work:
        """Give a share of as many labels as there are versions their values."""
        count = max(int(self.versions * share), 1)
        labels, _ = self._labels(count, step), self._history

        def work() -> int:
            self._joined(way, labels).write.format("noop").mode("overwrite").save()
            return count

        return work

    def _labels(self, count: int, step: int) -> DataFrame:
        target = self.fresh("labels")
        _write(labels_of(count, self.versions, step), "ts", target)
        return self._session.read.parquet(str(target))

    def _answers(self, way: str, labels: DataFrame) -> list[tuple[object, ...]]:
        rows = self._joined(way, labels).select("row", "value", "at").collect()
        return sorted((row.row, row.value and str(row.value), row.at) for row in rows)

    def _joined(self, way: str, labels: DataFrame) -> DataFrame:
        ways: dict[str, Callable[[DataFrame], DataFrame]] = {
            "checkpoint": lambda asked: self._ours(asked, "store"),
            "collection": lambda asked: self._ours(asked, "collection"),
            "asof": self._asof,
            "window": self._window,
        }
        return ways[way](labels)

    def _ours(self, labels: DataFrame, name: str) -> DataFrame:
        joined = point_in_time_join(labels, self._whole / name, "id", prefix="")
        value = F.col("value").cast("string")
        return joined.withColumn("value", value).withColumnRenamed("value_timestamp", "at")

    def _asof(self, labels: DataFrame) -> DataFrame:
        return self._session.sql(
            """SELECT l.*, h.value, h.at FROM {labels} l LEFT ASOF JOIN {history} h
            MATCH_CONDITION (l.ts >= h.at) ON l.id = h.id""",
            labels=labels,
            history=self._history,
        )

    def _window(self, labels: DataFrame) -> DataFrame:
        """Labels behind the versions of their time, and the last version before each."""
        versions = self._history.select(
            "id", F.col("at").alias("ts"), F.lit(None).cast("long").alias("row"), "value", "at"
        )
        asked = labels.withColumn("value", F.lit(None).cast("string")).withColumn(
            "at", F.lit(None).cast("timestamp")
        )
        order = Window.partitionBy("id").orderBy("ts", F.col("row").asc_nulls_first())
        last = [F.last(name, ignorenulls=True).over(order).alias(name) for name in ("value", "at")]
        every = versions.unionByName(asked).select("id", "ts", "row", *last)
        return every.where(F.col("row").isNotNull())

    def close(self) -> None:
        self._session.stop()


def _write(rows: pa.Table, time: str, target: Path) -> None:
    """Write rows as a few files, with their times in microseconds."""
    target.mkdir()
    at = rows.schema.get_field_index(time)
    rows = rows.set_column(at, time, rows[time].cast(_US))
    size = -(-len(rows) // _FILES)
    for number in range(_FILES):
        file = target / f"{number}.parquet"
        pq.write_table(rows.slice(number * size, size), file, compression="zstd")
