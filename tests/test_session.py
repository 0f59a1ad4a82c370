"""The local session: its settings, its workers, and a session that runs already."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from kvstore.errors import UsageError
from kvstore.spark import session
from kvstore.spark.sessions import default_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = "spark.sql.shuffle.partitions"
ADAPTIVE = "spark.sql.adaptive.enabled"


def _name_the_span(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import kvstore.base.span

    for batch in batches:
        names = [repr(kvstore.base.span.Span.of_prefix(b"%d" % n)) for n in batch["id"].to_pylist()]
        yield pa.RecordBatch.from_pydict({"span": names})


def test_workers_find_our_packages_and_the_callers_module(spark: SparkSession) -> None:
    rows = spark.range(2).mapInArrow(_name_the_span, "span string").collect()
    assert sorted(row.span for row in rows) == [
        "Span(start=b'0', end=b'1')",
        "Span(start=b'1', end=b'2')",
    ]


def test_times_are_utc_whatever_the_machine_says(spark: SparkSession) -> None:
    assert spark.sql("SELECT string(timestamp_seconds(0)) AS t").collect()[0].t == (
        "1970-01-01 00:00:00"
    )


def test_files_of_spark_stay_out_of_the_callers_folder(spark: SparkSession) -> None:
    before = set(os.listdir())
    spark.range(3).write.saveAsTable("three")
    try:
        warehouse = spark.conf.get("spark.sql.warehouse.dir")
        assert warehouse is not None
        assert (Path(warehouse.removeprefix("file:")) / "three").is_dir()
        assert set(os.listdir()) == before
    finally:
        spark.sql("DROP TABLE three")


def test_workers_are_spoken_to_by_sockets_in_the_sessions_folder(spark: SparkSession) -> None:
    enabled, folder = (
        "spark.python.unix.domain.socket.enabled",
        "spark.python.unix.domain.socket.dir",
    )
    conf = spark.sparkContext.getConf()
    scratch = Path(conf.get("spark.local.dir") or "").parent
    # The path of the scratch directory is too long for sockets if the system's directory for
    # temporary files is.
    wanted = default_settings(scratch, cores=1, memory="1g")
    assert (conf.get(enabled), conf.get(folder)) == (wanted.get(enabled), wanted.get(folder))
    if enabled in wanted:
        spark.range(2).mapInArrow(_name_the_span, "span string").collect()
        assert list(scratch.glob(".*.sock"))
    assert not set(default_settings(Path("/" + "far/" * 20), cores=1, memory="1g")) & {
        enabled,
        folder,
    }


def test_running_session_is_returned_in_every_thread(spark: SparkSession) -> None:
    assert session("another name") is spark
    found = []
    thread = threading.Thread(target=lambda: found.append(session()))
    thread.start()
    thread.join()
    assert found[0].sparkContext is spark.sparkContext


def test_running_session_takes_settings_that_can_change(spark: SparkSession) -> None:
    before = spark.conf.get(PARTITIONS)
    try:
        session(**{PARTITIONS: 7})
        assert spark.conf.get(PARTITIONS) == "7"
        assert session(**{ADAPTIVE: False}).conf.get(ADAPTIVE) == "false"
    finally:
        spark.conf.set(PARTITIONS, str(before))
        spark.conf.set(ADAPTIVE, "true")


def test_setting_of_the_jvm_is_refused_by_a_running_session_and_nothing_changes(
    spark: SparkSession,
) -> None:
    before = spark.conf.get(PARTITIONS)
    with pytest.raises(UsageError, match=r"spark\.driver\.memory is '1g'"):
        session(**{PARTITIONS: 9, "spark.driver.memory": "9g"})
    assert spark.conf.get(PARTITIONS) == before
    # the setting is the same, so nothing is refused
    assert session(**{"spark.driver.memory": "1g"}) is spark
    with pytest.raises(UsageError, match=r"spark\.driver\.memory is '1g'"):
        session(memory="9g")
    with pytest.raises(UsageError, match=r"spark\.master is 'local\[2\]'"):
        session(cores=9)
    assert session(cores=2, memory="1g") is spark


@pytest.mark.usefixtures("spark")
def test_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(UsageError, match="'shuffle_partitions' is no Spark setting"):
        session(shuffle_partitions=4)


@pytest.mark.usefixtures("spark")
def test_environment_of_the_caller_is_left_as_it_was() -> None:
    assert "SPARK_LOCAL_IP" not in os.environ
    assert "PYSPARK_PYTHON" not in os.environ
