"""The nightly load: `python nightly.py 20261129 flights.parquet`.

Spark builds sorted files, and the owner checks and adds them: all rows and their index entries show
at one time, while the service reads and writes. The date is the id of the load, and a store adds an
id once: a night that runs twice, or was killed, is run again. `kvstore revert flights.db --import`
takes a bad night back.

FLIGHTS_STORE is a path, or the URL of a server that takes imports from `--imports-from`; then
KVSTORE_TOKEN is a token with the right `admin`.
"""

from __future__ import annotations

import os
import sys

from tables import STORE

import kvstore
from kvstore.spark import bulk_import, session


def main(night: str, source: str) -> None:
    """Load the rows of a Parquet file."""
    spark = session()  # on a cluster: SparkSession.builder.getOrCreate()
    with kvstore.connect(STORE, os.environ.get("KVSTORE_TOKEN"), patience=15) as client:
        table = client.table("flights")
        stamp = bulk_import(spark.read.parquet(source), table, import_id=int(night))
        print(f"night {night}: {table.count()} rows, as of {stamp}")


if __name__ == "__main__":
    main(*sys.argv[1:])
