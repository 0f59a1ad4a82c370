"""Spark reads and loads stores: sessions, bulk loads, reads of state and changes, streams."""

import kvstore.spark.releases  # noqa: F401  # refuses an older PySpark before it is used
from kvstore.spark.joins import lookup_join, point_in_time_join
from kvstore.spark.load import (
    ImportReport,
    ImportRows,
    bulk_import,
    run_import,
    sorted_rows,
    stage_import,
    tuple_key,
)
from kvstore.spark.push import PushReport, push, shard_of
from kvstore.spark.read import history, read_collection, read_where
from kvstore.spark.seed import seed
from kvstore.spark.sessions import session
from kvstore.spark.source import register
from kvstore.spark.streaming import apply_changes, batch_importer

__all__ = [
    "ImportReport",
    "ImportRows",
    "PushReport",
    "apply_changes",
    "batch_importer",
    "bulk_import",
    "history",
    "lookup_join",
    "point_in_time_join",
    "push",
    "read_collection",
    "read_where",
    "register",
    "run_import",
    "seed",
    "session",
    "shard_of",
    "sorted_rows",
    "stage_import",
    "tuple_key",
]
