"""Rows in any order as a push: sorted, and written to the shards of their keys."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import pyarrow as pa

from bulk.pushes.log import Push
from bulk.pushes.pushes import BuildingPush
from bulk.pushes.rows import ShardedRows, sharded_batches
from bulk.sort import Duplicates
from kvstore.errors import KeyOrderError, UsageError, printable


def send_rows(
    building: BuildingPush, rows: Iterable[pa.RecordBatch], duplicates: Duplicates = "error"
) -> Push:
    """Push rows: batches of binary columns `key` and `value`, and perhaps `expires`.

    Sorts in bounded memory, and on the local disk beyond it. Raises `UsageError` for a key that
    comes twice, unless `duplicates` is `"last"`, and as `BuildingPush.seal`.
    """
    with closing(ShardedRows(duplicates)) as sharded:
        for batch in rows:
            for each in sharded_batches(iter([batch]), len(building.imports)):
                sharded.add(each)
        try:
            sharded.write(building.imports)
        except KeyOrderError as error:  # the rows are sorted, so a key came twice
            what = f"key {printable(error.key)} came twice"
            raise UsageError(what, "remove one row of it, or pass --duplicates last") from error
    return building.seal()
