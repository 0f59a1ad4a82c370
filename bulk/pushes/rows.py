"""Rows in a push, sorted by shard and key: rows of keys, or rows of a table with their index
entries.

Invariants
1. An index entry has the shard of its row, whatever the shard of its own key would be. So each
   store has the entries of its rows, and no others.
2. Memory is bounded by `RUN_BYTES_MAX` and `SORT_BYTES_MAX`, and one part is open at a time,
   whatever the number of shards.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from bulk.encoded import key_text, stored_batches
from bulk.pushes.sharding import shard_column
from bulk.sort import Duplicates, Sorter
from bulk.staged import Import
from bulk.uploading import scratch_directory
from kvstore.columns import due_column
from kvstore.errors import KeyOrderError, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.tables import TableCodec
from kvstore.tables.conform import conform, record_batches

SHARD: Final = "kvstore_shard"
"""The column of the shards of stored rows."""

_SHARD_BYTES: Final = struct.Struct(">H")


def sharded_schema(stored: pa.Schema) -> pa.Schema:
    """The columns of stored rows, and their shard."""
    return stored.append(pa.field(SHARD, pa.int32()))


def sharded_batches(stored: Iterator[pa.RecordBatch], shards: int) -> Iterator[pa.RecordBatch]:
    """Stored batches, with the shard of each row in one more column. The first one has the rows,
    and further ones their index entries: see `bulk.encoded.stored_batches`."""
    found: pa.Array | None = None
    for batch in stored:
        if found is None:  # the rows come first
            found = shard_column(batch.column("key"), shards)
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, found], schema=sharded_schema(batch.schema)
        )


class ShardedRows:
    """Stored rows in any order, each with its shard."""

    def __init__(self, duplicates: Duplicates = "error") -> None:
        self._duplicates = duplicates
        self._scratch = scratch_directory()
        self._sorter = Sorter(self._scratch)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch of `sharded_batches`."""
        self._sorter.add(_by_shard(batch))

    def write(self, imports: Sequence[Import]) -> None:
        """Write the rows of each shard into its import. Raises `KeyOrderError` for a key that came
        twice."""
        batches = self._sorter.sorted(self._duplicates)
        pieces = (piece for batch in batches for piece in _pieces(batch))
        for shard, found in groupby(pieces, key=itemgetter(0)):
            imports[shard].write_sorted(rows for _, rows in found)

    def close(self) -> None:
        """Remove the files of the sort. Repeatable."""
        shutil.rmtree(self._scratch, ignore_errors=True)


class PushedRows:
    """The rows of a table in a push that is being built."""

    def __init__(self, codec: TableCodec, shards: int) -> None:
        self.codec, self._shards = codec, shards
        self._rows = ShardedRows()

    def add(self, rows: object, expires: str | None) -> None:
        """Add rows; see `BuildingPush.add`."""
        definition, first = self.codec.definition, 0
        for batch in record_batches(rows):
            dues = pa.nulls(batch.num_rows, pa.int64())
            given = batch
            if expires is not None:
                if expires not in batch.schema.names:
                    named = ", ".join(batch.schema.names)
                    raise UsageError(f"the rows have no column {expires!r}", f"they have {named}")
                dues = due_column(batch.column(expires), expires, first)
                given = batch.drop_columns([expires])
            stored = stored_batches(self.codec, conform(definition, given, first), dues)
            for each in sharded_batches(stored, self._shards):
                self._rows.add(each)
            first += batch.num_rows

    def write(self, imports: Sequence[Import]) -> None:
        """Write the rows of each shard into its import. Raises `UsageError` for a row that came
        twice."""
        try:
            self._rows.write(imports)
        except KeyOrderError as error:
            what = f"the row {key_text(self.codec, error.key)} came twice"
            raise UsageError(what, "remove one of the two") from error

    def close(self) -> None:
        """Remove the files of the sort. Repeatable."""
        self._rows.close()


def _by_shard(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows whose keys begin with the bytes of their shard, for the sort."""
    shards = [_SHARD_BYTES.pack(shard) for shard in batch.column(SHARD).to_pylist()]
    keys = pc.binary_join_element_wise(pa.array(shards, pa.binary()), batch.column("key"), b"")
    stored = batch.drop_columns([SHARD])
    return pa.RecordBatch.from_arrays([keys, *stored.columns[1:]], schema=stored.schema)


def _pieces(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each shard in a sorted batch, with the keys that they had."""
    keys = batch.column("key")
    ends = pc.run_end_encode(pc.binary_slice(keys, 0, _SHARD_BYTES.size))
    # Arrow fails for slices without an end of some arrays.
    plain = pc.binary_slice(keys, _SHARD_BYTES.size, _SHARD_BYTES.size + KEY_BYTES_MAX)
    rows = pa.RecordBatch.from_arrays([plain, *batch.columns[1:]], schema=batch.schema)
    first = 0
    for shard, end in zip(ends.values.to_pylist(), ends.run_ends.to_pylist(), strict=True):
        yield _SHARD_BYTES.unpack(shard)[0], rows.slice(first, end - first)
        first = end
