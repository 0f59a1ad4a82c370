"""Import what a collection held at a time into a store, built by Spark in parallel.

    python -m spark_connector.jobs.restore COLLECTION STORE [--as-of TIME] [--prefix P] [--cores N]

As `Collection.restore_into` does in one process: the rows alive then become visible at once, at the
time they are added. The store is made if nothing is there; nobody else may have it open. To
build a store with its history, use `Collection.restore`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

import kvstore
from kvstore import Store
from spark_connector.load import ImportReport, run_import
from spark_connector.session import session
from spark_connector.source import FORMAT


def restore_into(
    spark: SparkSession,
    url: str,
    store: Store,
    *,
    as_of: str | None = None,
    prefix: str | None = None,
) -> ImportReport:
    """Import the state of the collection at `url` into `store`. `as_of` and `prefix` (text) are
    those of `spark.read.format("kvstore")`, and raise as they do."""
    reader = spark.read.format(FORMAT)
    if as_of is not None:
        reader = reader.option("timestampAsOf", as_of)
    if prefix is not None:
        reader = reader.option("prefix", prefix)
    return run_import(reader.load(url), store, "key", "value")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spark_connector.jobs.restore",
        description="Import the state of a backup collection into a store with Spark.",
    )
    parser.add_argument("collection", help="path or URL, as all of Spark's machines see it")
    parser.add_argument("store", help="directory, on a file system that Spark's workers share")
    parser.add_argument("--as-of", help="ISO-8601 with a zone, or nanoseconds (default: newest)")
    parser.add_argument("--prefix", help="only keys that begin with this text")
    parser.add_argument("--cores", type=int, default=2, help="of a local session (default: 2)")
    given = parser.parse_args(arguments)
    spark = session("restore", cores=given.cores)
    with kvstore.open(given.store) as store:
        report = restore_into(
            spark, given.collection, store, as_of=given.as_of, prefix=given.prefix
        )
    sys.stdout.write(f"{report.rows:,} rows in {report.files} files, visible at {report.stamp}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
