"""Frames and arguments that a load refuses; a refused load leaves neither rows nor files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import Store
from kvstore.errors import KeyConflictError, KeyOrderError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.spark import bulk_import, stage_import

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from tests.spark.frames import ROWS, frame
from tests.spark.test_load import dying


def test_key_too_long_is_refused_and_nothing_is_added(spark: SparkSession, store: Store) -> None:
    with pytest.raises(UsageError, match="a key has 65537 bytes"):
        bulk_import(frame(spark, {b"k" * (KEY_BYTES_MAX + 1): b""}), store, "key", "value")
    assert store.imports.all() == []


@pytest.mark.parametrize(
    ("select", "found"),
    [
        ("id AS key, X'00' AS value", "key key is bigint, not binary or string"),
        ("X'00' AS key, current_date() AS value", "value value is date, not binary or string"),
        ("X'00' AS key, CAST(null AS BINARY) AS value", "column value has nulls"),
        ("CAST(null AS STRING) AS key, X'00' AS value", "column key has nulls"),
    ],
)
def test_wrong_types_and_nulls_are_refused_and_leave_nothing(
    spark: SparkSession, store: Store, tmp_path: Path, select: str, found: str
) -> None:
    df = spark.sql(f"SELECT {select} FROM range(1)")
    with pytest.raises(UsageError, match=found):
        bulk_import(df, store, "key", "value", staging=tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert store.imports.all() == []


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"key": "other", "value": "value"}, "`other`"),
        ({"key": ["key", "other"], "value": "value"}, "`other`"),
        ({"key": "key", "value": None}, "None is no column"),
        ({"key": 5, "value": "value"}, "5 is no column"),
        ({"key": "key", "value": "value", "partitions": "3"}, "partitions='3'"),
        ({"key": "key", "value": "value", "partitions": 0}, "partitions=0"),
        ({"key": "key", "value": "value", "op": "other"}, "`other`"),
        ({"key": "key", "value": "value", "duplicates": "last", "order_by": "other"}, "`other`"),
    ],
)
def test_arguments_that_name_nothing_are_refused_and_leave_nothing(
    spark: SparkSession, store: Store, tmp_path: Path, columns: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        bulk_import(frame(spark, {b"a": b"1"}), store, staging=tmp_path / "s", **columns)
    assert not (tmp_path / "s").exists()
    assert store.imports.all() == []


@pytest.mark.parametrize(
    "part", ["CAST(1.5 AS DECIMAL(9, 2))", "TIMESTAMP_NTZ'2026-01-01 00:00:00'", "array(1)", "null"]
)
def test_key_columns_without_an_order_are_refused(
    spark: SparkSession, store: Store, part: str
) -> None:
    df = spark.sql(f"SELECT {part} AS part, id, X'00' AS value FROM range(1)")
    with pytest.raises(UsageError, match="key column part "):
        bulk_import(df, store, ["id", "part"], "value")


def test_what_adding_would_refuse_is_refused_before_any_row_is_read(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    df = frame(spark, {b"a": b"1"}).mapInArrow(dying, ROWS)
    with pytest.raises(UsageError, match="on_conflict='replace'"):
        bulk_import(df, store, "key", "value", tmp_path / "s", on_conflict="replace")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_key_that_comes_twice_is_named_and_nothing_is_added(
    spark: SparkSession, store: Store
) -> None:
    df = frame(spark, {b"a": b"1", b"b": b"2"}).union(frame(spark, {b"b": b"3"}))
    with pytest.raises(KeyOrderError, match="came twice") as caught:
        bulk_import(df, store, "key", "value")
    assert caught.value.key == b"b"
    assert store.imports.all() == []
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]


def test_last_without_an_order_and_an_order_without_last_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = frame(spark, {b"a": b"1"})
    with pytest.raises(UsageError, match="order_by=None"):
        stage_import(df, tmp_path / "s", "key", "value", duplicates="last")
    with pytest.raises(UsageError, match="duplicates='error'"):
        stage_import(df, tmp_path / "s", "key", "value", order_by="value")


def test_live_key_in_the_way_refuses_the_import_and_leaves_no_files(
    spark: SparkSession, store: Store
) -> None:
    store.put(b"b", b"live")
    df = frame(spark, {b"a": b"1", b"b": b"2"})
    with pytest.raises(KeyConflictError) as caught:
        bulk_import(df, store, "key", "value", on_conflict="error")
    assert caught.value.keys == (b"b",)
    assert dict(store.scan()) == {b"b": b"live"}
    assert not any((store.path / "ingest").iterdir())  # type: ignore[operator]
    bulk_import(df, store, "key", "value")
    assert store.get(b"b") == b"2"


def test_directory_in_use_is_refused_and_left_as_it_is(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        bulk_import(frame(spark, {b"a": b""}), store, "key", "value", staging=tmp_path)
    assert (tmp_path / "mine").exists()


def test_unknown_op_is_refused(spark: SparkSession, store: Store) -> None:
    for op in ("'upsert'", "null", "1"):
        df = spark.sql(f"SELECT 'a' AS key, {op} AS op, 'v' AS value")
        found = {"null": "None", "1": "'1'"}.get(op, op)
        with pytest.raises(UsageError, match=f"column op holds something else: {found}"):
            bulk_import(df, store, "key", "value", op="op")
