"""Rows in any order as a push: sorted, and written to the shards of their keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
import pyarrow as pa

from bulk.part import PartWriter
from bulk.pushes.log import Push
from bulk.pushes.pushes import BuildingPush
from bulk.sort import Duplicates, sorted_batches
from kvstore.errors import KeyOrderError, UsageError, printable


def send_rows(
    building: BuildingPush, rows: Iterable[pa.RecordBatch], duplicates: Duplicates = "error"
) -> Push:
    """Push rows: batches of binary columns `key` and `value`, and perhaps `expires`.

    Sorts in bounded memory, and on the local disk beyond it. Raises `UsageError` for a key that
    comes twice, unless `duplicates` is `"last"`, and as `BuildingPush.seal`.
    """
    writers: dict[int, PartWriter] = {}
    shards = len(building.imports)
    try:
        with TemporaryDirectory(prefix="kvstore-push-") as scratch:
            for batch in sorted_batches(rows, Path(scratch) / "sorting", duplicates=duplicates):
                of_key = np.array([crc32(key) % shards for key in batch.column("key").to_pylist()])
                for shard in np.unique(of_key).tolist():
                    if shard not in writers:
                        writers[shard] = building.writer(shard)
                    writers[shard].write(batch.filter(pa.array(of_key == shard)))
        for writer in writers.values():
            writer.finish()
    except KeyOrderError as error:  # the rows are sorted, so a key came twice
        what = f"key {printable(error.key)} came twice"
        raise UsageError(what, "remove one row of it, or pass --duplicates last") from error
    finally:
        for writer in writers.values():
            if not writer.is_closed:
                writer.abandon()
    return building.seal()
