"""Spark reads and loads stores: sessions, bulk loads, reads of state and changes, streams."""

import kvstore.backup  # noqa: F401  # refuses a stranger before it is imported from
import spark_connector.releases  # noqa: F401  # refuses an older PySpark in the same way
from spark_connector.joins.join import lookup_join, point_in_time_join
from spark_connector.loading.changes import apply_changes
from spark_connector.loading.keys import tuple_key
from spark_connector.loading.load import ImportReport, bulk_import, run_import, stage_import
from spark_connector.loading.push import PushReport, push, shard_of
from spark_connector.loading.rows import ImportRows, sorted_rows
from spark_connector.loading.sink import batch_importer
from spark_connector.reading.history import history
from spark_connector.reading.native import read_collection
from spark_connector.reading.where import read_where
from spark_connector.seeding.seed import seed
from spark_connector.session import session
from spark_connector.source import register

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
