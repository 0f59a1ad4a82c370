"""A stream into a store: each micro-batch is one import, added once however often it is tried.

    stream.writeStream.foreachBatch(batch_importer(store, "orders", "key", "value")).start()

Spark repeats a micro-batch whose end it could not write down. The import's id is made of the
stream's name and the batch's number, and a store adds an id once: the repetition is left out, even
where its rows would come in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from pyspark.sql import Column, DataFrame

from bulk.ingest import OnConflict
from bulk.sort import Duplicates
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.errors import UsageError
from kvstore.store import Store
from spark_connector.loading.load import run_import
from spark_connector.loading.rows import Columns


def batch_importer(
    store: Store,
    name: str,
    key: Columns,
    value: Column | str,
    *,
    op: Column | str | None = None,
    on_conflict: OnConflict = "overwrite",
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    partitions: int | None = None,
) -> Callable[[DataFrame, int], None]:
    """What `writeStream.foreachBatch` takes. `name` names the stream for good: the same name with
    a new checkpoint location would have its first batches taken for known ones.

    The rest is as in `bulk_import`.
    """
    if not name:
        raise UsageError("the stream has no name", "pass one that no other stream has")

    def add(batch: DataFrame, batch_id: int) -> None:
        run_import(
            batch,
            store,
            key,
            value,
            op=op,
            partitions=partitions,
            on_conflict=on_conflict,
            duplicates=duplicates,
            order_by=order_by,
            import_id=import_id_of(name, batch_id),
        )

    return add


def import_id_of(name: str, batch_id: int) -> int:
    """The import id of one micro-batch of a stream: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{name}\0{batch_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % IMPORT_ID_MAX + 1
