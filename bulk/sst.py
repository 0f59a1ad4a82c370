"""SST files: RocksDB's sorted tables, written without a database.

Writing costs 0.3 us per row, if a row costs one call.

Invariants
1. Keys ascend strictly. RocksDB's own writer checks it.
2. A file gets its name when it is whole and on disk (temporary name, fsync, rename).
3. The directory is never created here. A directory that is gone was discarded, and a task that
   still runs must not bring it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import length_hint
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import pyarrow as pa
import rocksdict as rocks

from kvstore.codec.keys import SUFFIX_BYTES
from kvstore.digest import RunningDigest, file_digest
from kvstore.engine.rocks_options import table_options
from kvstore.errors import KVStoreError, OutOfSpaceError, StorageError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.forks import own
from kvstore.loops.contract import Column
from kvstore.loops.writes import set_rows

UNFINISHED_SUFFIX: Final = ".tmp"
_PIECE_BYTES: Final = 1 << 20
"""Bytes of rows that are added before the digest takes the written bytes: RocksDB, which writes
1 MB at once, has not dropped them yet."""

_READ_BYTES: Final = 128 << 10
"""Bytes that the digest takes at once: they stay in the processor's caches in between."""

_CODECS: Final = {
    "lz4": rocks.DBCompressionType.lz4,
    "zstd": rocks.DBCompressionType.zstd,
    "none": rocks.DBCompressionType.none,
}


class OutOfOrder(Exception):  # noqa: N818  # a signal to the caller, who knows the user's keys
    """The key at `index` of an `add` is not above the one before it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Written(NamedTuple):
    """A finished file: its size, its digest, and what identifies it to the file system."""

    size_bytes: int
    digest: str
    mtime_ns: int
    inode: int


class SstFile:
    """Writes one SST. The first row opens the file, because RocksDB refuses an empty one."""

    def __init__(self, path: Path, *, compression: str = "lz4") -> None:
        self._path = path
        self._unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        self._options = writer_options(compression)
        self._opened: _Opened | None = None
        # In a forked child the destructor would write its buffer into the parent's file.
        own(self, str(path), endings=("abandon",))

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Add encoded rows. Raises `OutOfOrder` at a key that is not above its predecessor."""
        opened = self._open()
        left = iter(keys)
        try:
            for key, value in zip(left, values, strict=True):  # counting takes 20 of 400 ns a row
                opened.writer[key] = value
        except Exception as error:
            raise self._refused(error, len(keys) - length_hint(left) - 1) from error
        opened.followed.follow()

    def add_rows(
        self, keys: pa.Array, values: pa.Array, suffixes: bytes, kinds: bytes | None
    ) -> None:
        """Add versions of binary columns: the user keys, and the suffix of all versions, or one for
        each. `kinds` has the kind of each, None where all have values; a delete and a null have an
        empty value. Raises as `add`."""
        added = 0
        for piece in _pieces(keys, values, suffixes, kinds):
            opened = self._open()
            done, error = set_rows(opened.writer, *piece)
            added += done
            if error is not None:
                raise self._refused(error, added) from error
            opened.followed.follow()

    def finish(self) -> Written | None:
        """Write the file to disk under its name. None if it has no rows. Costs one fsync."""
        if self._opened is None:
            return None
        writer, followed = self._opened
        self._guarded(writer.finish)
        digest = followed.finish()
        self._opened = None
        with storage_errors(str(self._unfinished)):
            os.replace(self._unfinished, self._path)
            found = self._path.stat()
        return Written(found.st_size, digest, found.st_mtime_ns, found.st_ino)

    def abandon(self) -> None:
        """Remove the unfinished file. Repeatable."""
        if self._opened is not None:
            self._opened.followed.close()
            self._opened = None
        with storage_errors(str(self._unfinished)):
            self._unfinished.unlink(missing_ok=True)

    @property
    def size_bytes(self) -> int:
        """Bytes written so far, 0 before the first row."""
        return 0 if self._opened is None else self._opened.writer.file_size()

    def _open(self) -> _Opened:
        if self._opened is None:
            writer = rocks.SstFileWriter(self._options)
            self._guarded(lambda: writer.open(str(self._unfinished)))
            self._opened = _Opened(writer, _Followed(self._unfinished))
        return self._opened

    def _refused(self, error: Exception, at: int) -> Exception:
        if "ascending order" in str(error):
            return OutOfOrder(at)
        return _translated(self._unfinished, error)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            raise _translated(self._unfinished, error) from error


class _Opened(NamedTuple):
    """A file to which RocksDB writes, and a reader behind it."""

    writer: rocks.SstFileWriter
    followed: _Followed


class _Followed:
    """Takes the digest of a file from the bytes that RocksDB has written so far.

    RocksDB writes 1 MB at once, only behind the last byte, and soon drops written bytes from the
    page cache. A pass over the finished file would read it from the disk: see decision 23.
    """

    def __init__(self, path: Path) -> None:
        self._where = str(path)
        self._digest = RunningDigest()
        self._piece = memoryview(bytearray(_READ_BYTES))
        with storage_errors(self._where):
            self._file = path.open("rb", buffering=0)

    def follow(self) -> None:
        """Take the bytes that have come since the last call."""
        with storage_errors(self._where):
            while size := self._file.readinto(self._piece):
                self._digest.update(self._piece[:size])

    def finish(self) -> str:
        """The digest of the finished file, which is on disk then."""
        self.follow()
        with storage_errors(self._where):
            os.fsync(self._file.fileno())
            prefetch(self._file.fileno())
        self.close()
        return self._digest.text()

    def close(self) -> None:
        """Stop. Repeatable."""
        with storage_errors(self._where):
            self._file.close()


def prefetch(file: int) -> None:
    """Have the system read a file into memory, and do not wait for it: the first gets from a cold
    file are 15 times as slow. Costs 2.5 us for each MB that is there already."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # failing advice does no harm
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)


def fsync_and_digest(file: BinaryIO) -> str:
    """The digest of a whole file. The file is on disk then."""
    found = file_digest(file)
    os.fsync(file.fileno())
    return found


def require_compression(name: str) -> None:
    """Raise `UsageError` unless SST files can have `compression`."""
    if name not in _CODECS:
        raise UsageError(f"compression={name!r}", f"pass one of {', '.join(_CODECS)}")


def writer_options(compression: str) -> rocks.Options:
    """The options of the files of an import. Raises as `require_compression`."""
    require_compression(compression)
    options = rocks.Options(raw_mode=True)
    options.set_compression_type(_CODECS[compression]())
    options.set_block_based_table_factory(table_options())
    return options


def _pieces(
    keys: pa.Array, values: pa.Array, suffixes: bytes, kinds: bytes | None
) -> Iterator[tuple[Column, Column, int, bytes, bytes | None]]:
    """Rows in pieces of `_PIECE_BYTES`, as `set_rows` takes them."""
    count = len(keys)
    step = max(1, count * _PIECE_BYTES // max(1, keys.nbytes + values.nbytes))
    each = SUFFIX_BYTES if len(suffixes) == SUFFIX_BYTES * count else 0
    for first in range(0, count, step):
        last = min(first + step, count)
        yield (
            _buffers(keys[first:last]),
            _buffers(values[first:last]),
            last - first,
            suffixes[first * each : last * each] if each else suffixes,
            None if kinds is None else kinds[first:last],
        )


def _buffers(column: pa.Array) -> Column:
    """A binary column as the loops take it."""
    valid, offsets, data = column.buffers()
    return 0, valid if column.null_count else None, column.offset, data, offsets


def _translated(path: Path, error: Exception) -> KVStoreError:
    text = str(error)
    if "No space left" in text or "Disk quota" in text:
        return OutOfSpaceError(str(path))
    return StorageError(f"writing {path} failed: {text}", "look at the disk, and write it again")
