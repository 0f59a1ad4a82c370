"""A stream into a store or a table: each micro-batch is one import, which the store adds once.

    stream.writeStream.foreachBatch(batch_importer(store, "orders", "key", "value")).start()
    stream.writeStream.foreachBatch(batch_importer(store.table("trips"), "trips")).start()

Spark repeats a micro-batch if it crashed before it recorded the end of the batch. The id of an
import follows from the name of the stream and the number of the batch, and a store adds an id once.
So the store skips the repetition, even if its rows come in another order.

The record of the import keeps the id of the stream and a digest of the offsets of its micro-batch.
Invariant: a micro-batch that is skipped has the number, the stream and the offsets of one that was
added. Another micro-batch of a known number is refused: its rows would be lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NoReturn

from pyspark.sql import Column, DataFrame

from bulk.micro_batches import Origin
from bulk.remote import OnConflict
from bulk.sort import Duplicates
from kvstore.codec.keys import IMPORT_ID_MAX
from kvstore.control.scripts import StoreOrClient, as_store
from kvstore.errors import UsageError
from kvstore.tables import Table
from spark_connector.loading.columns import Columns
from spark_connector.loading.load import OfBatch, load
from spark_connector.loading.planned import planned_origin


def batch_importer(
    store: StoreOrClient | Table,
    name: str,
    key: Columns | None = None,
    value: Column | str | None = None,
    *,
    op: Column | str | None = None,
    on_conflict: OnConflict = "overwrite",
    duplicates: Duplicates = "error",
    order_by: Column | str | None = None,
    expires: Column | str | None = None,
    partitions: int | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `writeStream.foreachBatch` that imports each micro-batch into `store`, or into
    a table of it.

    `name` belongs to one stream for ever. With a new checkpoint location a stream is another one,
    which numbers its batches anew; with a checkpoint location that was put back to an older state
    it plans known numbers with other rows. Such a batch would be skipped under an id that the store
    knows, so the function raises `UsageError` for it, and for a batch if the store has the next
    one. A store that was restored from a backup lacks batches, which Spark does not repeat. In all
    these cases start a stream with another name and a new checkpoint location, from a time before.
    The other parameters are as in `bulk_import`.
    """
    if not name:
        raise UsageError("the stream has no name", "pass one that no other stream has")

    def add(batch: DataFrame, batch_id: int) -> None:
        origin = planned_origin(batch, batch_id)
        _require_last(store, name, batch_id, origin)
        load(
            batch,
            store,
            key,
            value,
            partitions=partitions,
            on_conflict=on_conflict,
            op=op,
            duplicates=duplicates,
            order_by=order_by,
            expires=expires,
            import_id=import_id_of(name, batch_id),
            of_batch=OfBatch(name, batch_id, origin),
        )

    return _OfThisProcess(add)


def _require_last(store: StoreOrClient | Table, name: str, batch_id: int, origin: Origin) -> None:
    """Raise `UsageError` if the store has the batch behind this one, because Spark repeats the last
    one alone, or if the batch before this one came from another stream."""
    target = store.import_target().store if isinstance(store, Table) else store
    with as_store(target) as into:
        before = into.imports.get(import_id_of(name, batch_id - 1))
        is_last = into.imports.get(import_id_of(name, batch_id + 1)) is None
    if before is not None:
        known = Origin.of_text(before.origin)
        origin.require_same_query(repr(name), batch_id, known, batch_id - 1)
    if is_last:
        return
    raise UsageError(
        f"micro-batch {batch_id} of {name!r} comes behind micro-batch {batch_id + 1}",
        "pass another name: a new checkpoint location makes another stream",
    )


class _OfThisProcess:
    """A function that runs in the process of the store. Spark Connect would send it elsewhere."""

    def __init__(self, add: Callable[[DataFrame, int], None]) -> None:
        self._add = add

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self._add(batch, batch_id)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Spark Connect runs foreachBatch on its server, and the store is open in this process",
            "run the stream in a classic session",
        )


def import_id_of(name: str, batch_id: int) -> int:
    """The import id of one micro-batch of a stream: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{name}\0{batch_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % IMPORT_ID_MAX + 1
