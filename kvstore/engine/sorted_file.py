"""RocksDB's sorted files, read where they lie: figures and keys without a database, rows merged by
RocksDB.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import rocksdict as rocks
from xxhash import xxh3_64_intdigest

from kvstore.base.forks import own
from kvstore.codec.varint import read_varint
from kvstore.engine.api import chunks
from kvstore.engine.rocks import THREADS, RocksCursor, translated
from kvstore.errors import CorruptionError, StorageError, storage_errors
from kvstore.limits import BESIDE_OPEN_FILES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.loops.blocks import block_handles, block_keys, lz4_size
from kvstore.loops.contract import BLOCK_KEYS_BYTES_MAX

# --------------------------------------------------------------------------------------------------
# RocksDB's sorted files, read where they lie, without a database: their figures and their keys.
#
#     file    := block* | metaindex block | index block | footer
#     footer  := checksum type u8 | handles, padded to 40 | format u32 | magic u64
#     handles := handle of the metaindex | handle of the index
#     handle  := offset varint | size varint
#
#     block   := contents, perhaps compressed | codec u8 | checksum u32
#     packed  := size of the contents varint | LZ4 or zstd          where there is a codec
#     entries := entry* | restart u32* | count of restarts u32      the contents of each block
#     entry   := shared varint | fresh varint | size varint | key, without `shared` bytes | value
#     indexed := 0 varint | fresh varint | key | handle             an entry of the index
#
#     key     := stored key | 1 u8 | 0 u56      a put; files built outside a database have no other
#
# This is the block-based table of RocksDB 6 to 10 with `format_version=5`, as
# `kvstore.bulk.part` writes it.
# Reading the figures takes 0.1 ms, and the time of reading the index. RocksDB reads both again when
# it takes the file.
#
# Invariants
# 1. The checksum of each block is verified before the block is used. The footer has no checksum, so
#    a handle is compared with the size of the file before its bytes are read.
# 2. A length is compared with the block before it is used. Bytes of a stranger may raise
#    `CorruptionError`, and no other error.

_Handle: TypeAlias = "tuple[int, int]"
"""Offset and size of a block."""


_FOOTER: Final = struct.Struct("<B40sIQ")
_MAGIC: Final = 0x88E241B785F4CFF7
_FORMAT: Final = 5
_XXH3: Final = 4
_TRAILER: Final = struct.Struct("<BI")
_CODEC_PRIME: Final = 0x6B9083D9
"""The codec of a block enters its checksum by this factor, so that the contents are hashed as they
lie."""

_LZ4: Final = 4
_CODECS: Final = {_LZ4: "lz4_raw", 7: "zstd"}
_INDEX_RATIO_MAX: Final = 256
"""An index of more bytes than a block of data may have packs little: its keys differ."""

_METADATA_BYTES_MAX: Final = 1 << 20
_METADATA_KEY_BYTES_MAX: Final = 256
_CUT_KEYS_MAX: Final = 16
"""Keys from one whole key to the next. A cut key is short in the file, and may be long."""

_FRAME_BYTES: Final = 64
"""More than frame, suffix and kind of a stored key take. A zero in a key takes two bytes."""

_SHOWN_BYTES: Final = 64
_HANDLES_AT_ONCE: Final = 1024
_PUT: Final = (1).to_bytes(8, "little")
_ENTRIES: Final = b"rocksdb.num.entries"
_OTHER_KINDS: Final = (
    b"rocksdb.deleted.keys",
    b"rocksdb.num.range-deletions",
    b"rocksdb.merge.operands",
)
_LARGEST: Final = b"rocksdb.key.largest.seqno"
_SIZES: Final = (b"rocksdb.raw.key.size", b"rocksdb.raw.value.size")
_PROPERTIES: Final = b"rocksdb.properties"
_EXPECTED: Final = {
    b"rocksdb.external_sst_file.version": (2).to_bytes(4, "little"),
    b"rocksdb.comparator": b"leveldb.BytewiseComparator",
    b"rocksdb.column.family.id": b"\xff\xff\xff\xff\x07",
    b"rocksdb.external_sst_file.global_seqno": bytes(8),
    b"rocksdb.block.based.table.index.type": bytes(4),
    b"rocksdb.index.key.is.user.key": b"\x01",
    b"rocksdb.index.value.is.delta.encoded": b"\x01",
}
"""Properties of a file that was built outside a database for any family, with an index of one
level. RocksDB would refuse another one when it is asked to take it."""


class Figures(NamedTuple):
    """The figures that a file tells without a pass."""

    first: bytes
    last: bytes
    entries: int


def figures_of(file: Path | str) -> Figures:
    """The figures of a sorted file. Raises `CorruptionError` if it is none that was built outside a
    database, or if a block that is read is damaged."""
    with _opened(file) as table:
        told = table.properties()
        index = table.index()
        first, last = map(table.keys, _ends(index))
        return Figures(first[0], last[-1], _number(told, _ENTRIES))


def key_blocks_of(file: Path | str) -> Generator[list[bytes], None, None]:
    """The stored keys of a sorted file, ascending, a list for each block of data. Raises as
    `figures_of`. A pass, 0.1 us a key and 6 us a block."""
    with _opened(file) as table:
        index, before = table.index(), None
        for handle in _handles(index):
            keys = table.keys(handle, before)
            before = keys[-1]
            yield keys


def require_footer(file: Path | str) -> None:
    """Raise `CorruptionError` unless the blocks that the footer names lie in the file. RocksDB
    allocates the sizes in it, and a failed allocation ends the process."""
    with _opened(file):
        pass


@contextmanager
def _opened(file: Path | str) -> Iterator[_Table]:
    where = str(file)
    with storage_errors(where), open(file, "rb") as opened:
        try:
            yield _Table(opened.fileno())
        except IndexError as error:
            raise CorruptionError(where, "a block ends within an entry") from error
        except ValueError as error:
            raise CorruptionError(where, str(error)) from error


class _Table:
    """An open file whose footer is sound. Its methods raise `ValueError` at damage."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = os.fstat(descriptor).st_size - _FOOTER.size
        if self._end < 0:
            raise ValueError(f"{self._end + _FOOTER.size} bytes are no sorted file")
        footer = self._read(_FOOTER.size, self._end)
        checksums, handles, found, magic = _FOOTER.unpack(footer)
        if (magic, found, checksums) != (_MAGIC, _FORMAT, _XXH3):
            raise ValueError("it does not end as a sorted file does")
        self._metaindex, at = _handle(handles, 0)
        self._index, _ = _handle(handles, at)
        for handle in (self._metaindex, self._index):
            self._require(handle)

    def properties(self) -> dict[bytes, bytes]:
        """The properties of the file."""
        blocks = _pairs(self._contents(self._metaindex, _METADATA_BYTES_MAX))
        if {*blocks} != {_PROPERTIES}:  # no range deletes, filters or dictionaries
            raise ValueError(f"its blocks of metadata are {[*blocks][:9]!r}")
        handle, _ = _handle(blocks[_PROPERTIES], 0)
        told = _pairs(self._contents(handle, _METADATA_BYTES_MAX))
        for name, expected in _EXPECTED.items():
            if told.get(name) != expected:
                shown = told.get(name, b"")[:_SHOWN_BYTES]
                raise ValueError(f"its property {name.decode()} is {shown!r}")
        if told.get(_LARGEST, b"\x00") != b"\x00":
            raise ValueError("it has entries of a database")
        others = sum(_number(told, name) for name in _OTHER_KINDS)
        if others:
            raise ValueError(
                f"{others} of its entries delete or merge, and no part has such entries"
            )
        if not sum(_number(told, name) for name in _SIZES):  # RocksDB divides by it
            raise ValueError("its properties tell no byte")
        return told

    def index(self) -> bytes:
        """The index: an entry for each block of data. Each entry has a restart."""
        most = max(VALUE_BYTES_MAX + BLOCK_KEYS_BYTES_MAX, _INDEX_RATIO_MAX * self._index[1])
        return self._contents(self._index, most)

    def keys(self, handle: _Handle, before: bytes | None = None) -> list[bytes]:
        """The stored keys of a block of data, ascending and above `before`. At least one."""
        contents = self._contents(handle, VALUE_BYTES_MAX + BLOCK_KEYS_BYTES_MAX)
        keys = block_keys(contents, _PUT, 2 * KEY_BYTES_MAX + _FRAME_BYTES, _CUT_KEYS_MAX)
        if before is not None and keys[0] <= before:
            raise ValueError("its keys do not ascend")
        return keys

    def _contents(self, handle: _Handle, most: int) -> bytes:
        """The contents of a block, at most `most` bytes."""
        self._require(handle)
        offset, size = handle
        if size > most:
            raise ValueError(f"a block has {size} bytes, {most} are the most")
        data = self._read(size + _TRAILER.size, offset)
        stored = memoryview(data)[:size]
        codec, checksum = _TRAILER.unpack_from(data, size)
        if (xxh3_64_intdigest(stored) ^ codec * _CODEC_PRIME) & 0xFFFFFFFF != checksum:
            raise ValueError(f"the checksum of the block at {offset} differs")
        return _unpacked(data[:size], codec, most) if codec else data[:size]

    def _require(self, handle: _Handle) -> None:
        offset, size = handle
        if offset + size + _TRAILER.size > self._end:
            raise ValueError(f"a block of {size} bytes at {offset} lies outside of it")

    def _read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise ValueError("it became shorter while it was read")
        return data


def _unpacked(packed: bytes, codec: int, most: int) -> bytes:
    size, at = read_varint(packed, 0)
    if codec not in _CODECS:
        raise ValueError(f"a block has the unknown codec {codec}")
    if size > most:
        raise ValueError(f"a packed block of {len(packed)} bytes tells {size} bytes")
    block, name = memoryview(packed)[at:], _CODECS[codec]
    try:
        # Arrow compares the size of zstd. It would leave the rest of an LZ4 block as memory was.
        if codec == _LZ4 and lz4_size(block) != size:
            raise ValueError(f"a packed block has not the {size} bytes that it tells")
        unpacked: bytes = pa.decompress(block, decompressed_size=size, codec=name, asbytes=True)
    except (OSError, MemoryError) as error:  # Arrow's, not the disk's
        raise ValueError(f"a block does not unpack: {error}") from error
    return unpacked


def _pairs(contents: bytes) -> dict[bytes, bytes]:
    """The entries of a block of metadata."""
    values = list[bytes]()
    keys = block_keys(contents, b"", _METADATA_KEY_BYTES_MAX, len(contents), values)
    return dict(zip(keys, values, strict=True))


def _handles(index: bytes) -> Iterator[_Handle]:
    """The blocks of data that an index names. A forged index may have millions of entries."""
    places = _places(index)
    for first in range(0, len(places), _HANDLES_AT_ONCE):
        some = places[first : first + _HANDLES_AT_ONCE].tolist()
        yield from ((offset, size) for offset, size, _ in block_handles(index, some))


def _ends(index: bytes) -> list[_Handle]:
    """The blocks of data that the first and the last entry of an index name. The last entry ends
    where the restarts begin."""
    first, (offset, size, end) = block_handles(index, [0, int(_places(index)[-1])])
    if end != _entries_end(index):
        raise ValueError("the last entry of the index does not end it")
    return [first[:2], (offset, size)]


def _handle(data: bytes, at: int) -> tuple[_Handle, int]:
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _places(index: bytes) -> npt.NDArray[np.uint32]:
    """Where the entries of an index begin: at 0 first, ascending."""
    end = _entries_end(index)
    places = np.frombuffer(index, "<u4", offset=end)[:-1]
    if places[0] or places[-1] >= end or not (places[:-1] < places[1:]).all():
        raise ValueError("the entries of the index do not ascend")
    return places


def _entries_end(contents: bytes) -> int:
    """Where the entries of a block end, and its restarts begin."""
    count = int.from_bytes(contents[-4:], "little")
    end = len(contents) - 4 * (count + 1)
    if end <= 0 or not count:
        raise ValueError("a block has no entries")
    return end


def _number(told: dict[bytes, bytes], name: bytes) -> int:
    if name not in told:
        raise ValueError(f"it has no property {name.decode()}")
    found, _ = read_varint(told[name], 0)
    return found


# --------------------------------------------------------------------------------------------------
# The rows of sorted files that no store has taken, merged.
#
# rocksdict has no reader of single SST files, and `sorted_file` reads no values. So a throw-away
# database takes links to the files. RocksDB checks their form as a store would, and merges them.
# The links are symbolic: the files may lie on any file system, and nothing is written beside them.
#
# Opening costs 2 ms, and 0.2 ms for each file of any size. Entries are read on demand.

IN_MEMORY: Final = "/dev/shm"
"""Making a throw-away database takes 1 ms there, and 5 ms on disk."""

_MANIFEST_BYTES: Final = 64 << 10
"""Preallocated for its MANIFEST. RocksDB's default of 4 MB is much for the 64 MB of `/dev/shm` that
a container has."""

_UNBORN_S: Final = 3600.0
"""Age of a throw-away directory without a lock file from which on no process makes a database in
it: a killed process left it."""

_PREFIX: Final = "kvstore-loose-"


class LooseFiles:
    """Sorted files opened for reading. Use it as a context manager.

    Raises `CorruptionError` if a file is no sorted file built outside a database, or if a block
    that is read is damaged.
    """

    def __init__(self, files: Sequence[Path | str]) -> None:
        self._where = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        THREADS.require_own(self._where)
        for file in files:
            require_footer(file)
        linked = _may_be_linked(files)
        self._database: rocks.Rdict | None = None
        in_memory = linked and os.access(IN_MEMORY, os.W_OK | os.X_OK)
        if in_memory:
            _remove_left()
        try:
            self._take(files, IN_MEMORY if in_memory else None, move=linked)
        except StorageError:  # `/dev/shm` may be full
            if not in_memory:
                raise
            self._take(files, None, move=linked)
        own(self, self._where)

    def rows(
        self, start: bytes = b"", last: bytes | None = None
    ) -> Generator[tuple[list[bytes], list[bytes]], None, None]:
        """Keys and values of all files from `start` to `last`, merged, in chunks. A key that comes
        twice is given once."""
        options = rocks.ReadOptions()
        if last is not None:
            options.set_iterate_upper_bound(last + b"\x00")
        cursor = RocksCursor(self._open(), options, start, reverse=False, where=self._where)
        yield from chunks(cursor)

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, None if no file has it."""
        with translated(self._where):
            found: bytes | None = self._open().get(key)
        return found

    def close(self) -> None:
        """Release the files. Repeatable."""
        if self._database is not None:
            self._database.close()
            self._database = None
        THREADS.close(self)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> LooseFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, files: Sequence[Path | str], place: str | None, *, move: bool) -> None:
        with storage_errors(self._where):
            self._scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        THREADS.open(self)
        try:
            self._link(files, move=move)
        except BaseException:
            self.close()
            raise

    def _link(self, files: Sequence[Path | str], *, move: bool) -> None:
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_max_background_jobs(1)
        options.set_max_file_opening_threads(1)
        options.set_max_open_files(BESIDE_OPEN_FILES_MAX)
        options.set_disable_auto_compactions(True)
        options.set_manifest_preallocation_size(_MANIFEST_BYTES)
        links = []
        with storage_errors(self._where):
            for number, file in enumerate(files):
                link = self._scratch / f"{number:06d}.sst"
                link.symlink_to(os.path.abspath(file))
                links.append(str(link))
        ingestion = rocks.IngestExternalFileOptions()
        ingestion.set_move_files(move)
        with translated(self._where):
            self._database = rocks.Rdict(str(self._scratch / "db"), options)
            if links:
                self._database.ingest_external_file(links, ingestion)

    def _open(self) -> rocks.Rdict:
        assert self._database is not None, "used after close"
        return self._database


def _may_be_linked(files: Sequence[Path | str]) -> bool:
    """Whether RocksDB may take links to the files: it opens a linked file for writing, to sync it.
    It copies a file that may only be read, which needs space."""
    return all(os.access(file, os.W_OK) for file in files)


def _remove_left() -> None:
    """Remove the databases of killed processes: no process holds their locks."""
    own, oldest = f"{_PREFIX}{os.getpid()}-", time.time() - _UNBORN_S
    with suppress(OSError):
        for left in Path(IN_MEMORY).glob(f"{_PREFIX}*"):
            if left.name.startswith(own):
                continue  # closing our own lock file would drop the lock
            lock = left / "db" / "LOCK"
            with suppress(OSError):
                is_old = left.stat().st_mtime < oldest
                if not is_old and _runs(left.name.removeprefix(_PREFIX).partition("-")[0]):
                    continue  # RocksDB makes its lock file, and locks it a moment later
                if not lock.exists() and is_old:
                    shutil.rmtree(left, ignore_errors=True)
                with lock.open("r+b") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)


def _runs(process: str) -> bool:
    """Whether a process of this id runs here; a container may show another one under the id."""
    return process.isdecimal() and os.path.exists(f"/proc/{process}")
