"""Ordered, durable key-value storage behind one contract.

Floors, from the top:

    memory            ordered maps, made durable by a journal
    loose             sorted files that no store has taken
    rocks_secondary   RocksDB, as another process writes it
    rocks             RocksDB
    rocks_stalls      waiting while RocksDB takes no writes
    rocks_figures     the figures that RocksDB tells
    rocks_merges      fewer files than RocksDB leaves
    memory_opening passes rocks_opening small_files
    state
    edits editions file_ends homes moment rocks_errors rocks_knobs rocks_options sorted_file
    threads wal
    api               the contract
"""

from kvstore.engine.api import (
    CHANGES,
    DATA,
    FAMILIES,
    META,
    RANGES,
    Cursor,
    Engine,
    EntryReader,
    FileSpan,
    WriteBatch,
    chunks,
)

__all__ = [
    "CHANGES",
    "DATA",
    "FAMILIES",
    "META",
    "RANGES",
    "WriteBatch",
    "Cursor",
    "Engine",
    "FileSpan",
    "EntryReader",
    "chunks",
]
