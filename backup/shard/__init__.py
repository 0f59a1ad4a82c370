"""Shards: durable collections of updates over time, on any storage. See `shard.py`.

Floors, from the top:

    shard                    the handle of a shard
    read_lease               leased snapshots, and listening
    compact scrub snapshot writer
    critical gc
    rows                     batches of sorted rows, as Parquet parts
    state                    the facts of a shard, as a value, and the log of its commands
    remedies                 the steps after damage
"""

from backup.shard.compact import Merge, merge_here
from backup.shard.critical import Critical
from backup.shard.read_lease import Listen, ReadLease
from backup.shard.rows.batch_reader import read_batches
from backup.shard.rows.batch_writer import (
    BatchDesc,
    concat_batches,
    delete_batch,
    part_names,
    write_batch,
)
from backup.shard.rows.part_format import UNTIL
from backup.shard.rows.rules import (
    DIFFS,
    DIFFS_SCHEMA,
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_PUT,
    VERSIONS,
    VERSIONS_SCHEMA,
    AsOf,
    Compact,
    Rule,
    View,
    Window,
)
from backup.shard.rows.tally import OnProgress, Tally
from backup.shard.shard import Shard
from backup.shard.snapshot import ListenBatch, ShardSnapshot, Split, split_batches
from backup.shard.state.state import EMPTY, ShardBatch, ShardPart, ShardState
from backup.shard.writer import Writer
from kvstore.storage.address import open_storage
from kvstore.storage.contract import Blob, BlobInfo, Cas, Consensus, Storage, Versioned
from kvstore.storage.file_blob import FileBlob
from kvstore.storage.file_consensus import FileConsensus
from kvstore.storage.memory import MemoryBlob, MemoryConsensus

__all__ = [
    "Shard",
    "Writer",
    "ReadLease",
    "Listen",
    "Critical",
    "ShardSnapshot",
    "Split",
    "split_batches",
    "ListenBatch",
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
    "Rule",
    "VERSIONS",
    "VERSIONS_SCHEMA",
    "DIFFS",
    "DIFFS_SCHEMA",
    "OP_DELETE",
    "OP_PUT",
    "OP_DELETE_RANGE",
    "AsOf",
    "Compact",
    "Window",
    "View",
    "Merge",
    "merge_here",
    "OnProgress",
    "Tally",
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
