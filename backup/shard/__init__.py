"""Shards: durable collections of updates over time, on any storage. See `shard.py`."""

from kvstore.backup.shard.rows.batch_reader import read_batches
from kvstore.backup.shard.rows.batch_writer import (
    BatchDesc,
    concat_batches,
    delete_batch,
    part_names,
    write_batch,
)
from kvstore.backup.shard.rows.part_format import UNTIL
from kvstore.backup.shard.rows.rules import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_PUT,
    VERSIONS_SCHEMA,
    AsOf,
    Compact,
    View,
    Window,
)
from kvstore.backup.shard.shard import Critical, Shard, Writer
from kvstore.backup.shard.shard_snapshot import ReadLease, ShardSnapshot, Split, split_batches
from kvstore.backup.shard.slot_compaction import Merge, merge_here
from kvstore.backup.shard.state.state import EMPTY, ShardState
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.storage.address import open_storage
from kvstore.storage.contract import Blob, BlobInfo, Cas, Consensus, Storage, Versioned
from kvstore.storage.local_files import FileBlob, FileConsensus
from kvstore.storage.memory_storage import MemoryBlob, MemoryConsensus

__all__ = [
    "Shard",
    "Writer",
    "ReadLease",
    "Critical",
    "ShardSnapshot",
    "Split",
    "split_batches",
    "BatchDesc",
    "write_batch",
    "read_batches",
    "concat_batches",
    "delete_batch",
    "part_names",
    "ShardBatch",
    "ShardPart",
    "ShardState",
    "EMPTY",
    "UNTIL",
    "VERSIONS_SCHEMA",
    "OP_DELETE",
    "OP_PUT",
    "OP_DELETE_RANGE",
    "AsOf",
    "Compact",
    "Window",
    "View",
    "Merge",
    "merge_here",
    "open_storage",
    "Storage",
    "Blob",
    "BlobInfo",
    "MemoryBlob",
    "FileBlob",
    "Consensus",
    "MemoryConsensus",
    "FileConsensus",
    "Cas",
    "Versioned",
]
