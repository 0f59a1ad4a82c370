"""RocksDB as the judge of sorted files: its own writer, and what it says of a file of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import rocksdict as rocks

from kvstore.engine.rocks import table_options

_CODECS: Final = {
    "lz4": rocks.DBCompressionType.lz4,
    "zstd": rocks.DBCompressionType.zstd,
    "none": rocks.DBCompressionType.none,
}


def writer_options(codec: str) -> rocks.Options:
    """The options of RocksDB's writer for files as ours."""
    options = rocks.Options(raw_mode=True)
    options.set_compression_type(_CODECS[codec]())
    options.set_block_based_table_factory(table_options())
    return options


def write_by_rocksdb(path: Path, rows: Iterable[tuple[bytes, bytes]], codec: str) -> None:
    """Write a sorted file by RocksDB's writer."""
    writer = rocks.SstFileWriter(writer_options(codec))
    writer.open(str(path))
    for key, value in rows:
        writer[key] = value
    writer.finish()


def read_by_rocksdb(directory: Path, files: Sequence[Path]) -> list[tuple[bytes, bytes]]:
    """The rows of files as RocksDB reads them: it takes them into a new database, compares all
    checksums, reads them, and merges them into files of its own, which it reads again."""
    options = writer_options("lz4")
    options.create_if_missing(True)
    options.set_disable_auto_compactions(True)
    database = rocks.Rdict(str(directory), options)
    try:
        taking = rocks.IngestExternalFileOptions()
        database.ingest_external_file(list(map(str, files)), taking)
        reading = rocks.ReadOptions()
        reading.set_verify_checksums(True)
        found = list(database.items(read_opt=reading))
        assert list(database.items(backwards=True, read_opt=reading)) == found[::-1]
        assert [database[key] for key, _ in found[:50]] == [value for _, value in found[:50]]
        forced = rocks.CompactOptions()
        forced.set_bottommost_level_compaction(rocks.BottommostLevelCompaction.force())
        database.compact_range(None, None, forced)
        assert list(database.items(read_opt=reading)) == found
        return found
    finally:
        database.close()
