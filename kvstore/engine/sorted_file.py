"""RocksDB's sorted files, read where they lie, without a database: their figures and their keys.

    file    := block* | metaindex block | index block | footer
    footer  := checksum type u8 | handles, padded to 40 | format u32 | magic u64
    handles := handle of the metaindex | handle of the index
    handle  := offset varint | size varint

    block   := contents, perhaps compressed | codec u8 | checksum u32
    packed  := size of the contents varint | LZ4 or zstd          where there is a codec
    entries := entry* | restart u32* | count of restarts u32      the contents of each block
    entry   := shared varint | fresh varint | size varint | key, without `shared` bytes | value
    indexed := shared varint | fresh varint | key | handle, or the change of its size if `shared`

    key     := stored key | 1 u8 | 0 u56      a put; files built outside a database have no other

This is the block-based table of RocksDB 6 to 10 with `format_version=5`, as `bulk.sst` writes it.
Reading the figures takes 0.1 ms beside the index, which RocksDB reads as well when it takes a file.

Invariants
1. Each block that is read has the checksum that it tells. The footer has none, so a handle is
   compared with the file before its bytes are read.
2. A length is compared with the block before it is used. Bytes of a stranger may raise
   `CorruptionError`, and no other error.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa
from xxhash import xxh3_64_intdigest

from kvstore.codec.varint import read_varint
from kvstore.errors import CorruptionError
from kvstore.errors.system import storage_errors
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.loops import lz4_size

_Item = TypeVar("_Item")
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
_BLOCK_SLACK_BYTES: Final = 1 << 20
_PACKED_RATIO_MAX: Final = 256
"""A packed block has a value of the largest size and this many bytes at most. A larger one is an
index, which packs little."""

_FRAME_BYTES: Final = 64
"""More than frame, suffix and kind of a stored key take. A zero in a key takes two bytes."""

_PUT: Final = (1).to_bytes(8, "little")
_ENTRIES: Final = b"rocksdb.num.entries"
_OTHER_KINDS: Final = (
    b"rocksdb.deleted.keys",
    b"rocksdb.num.range-deletions",
    b"rocksdb.merge.operands",
)
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
        index = table.contents(table.index)
        first = table.contents(next(_handles(index)))
        last = table.contents(_last(_handles(index, _last_restart(index))))
        largest = _last(_keys(last, _last_restart(last)))
        return Figures(next(_keys(first)), largest, _number(told, _ENTRIES))


def keys_of(file: Path | str) -> Iterator[bytes]:
    """The stored keys of a sorted file, ascending. Raises as `figures_of`. A pass, 0.7 us a key."""
    with _opened(file) as table:
        before: bytes | None = None
        for handle in _handles(table.contents(table.index)):
            for key in _keys(table.contents(handle)):
                if before is not None and key <= before:
                    raise ValueError("its keys do not ascend")
                before = key
                yield key


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
        footer = os.pread(descriptor, _FOOTER.size, self._end)
        checksums, handles, found, magic = _FOOTER.unpack(footer)
        if (magic, found, checksums) != (_MAGIC, _FORMAT, _XXH3):
            raise ValueError("it does not end as a sorted file does")
        self._metaindex, at = self._required(*_handle(handles, 0))
        self.index, _ = self._required(*_handle(handles, at))

    def properties(self) -> dict[bytes, bytes]:
        """The properties of the file."""
        blocks = _pairs(self.contents(self._metaindex))
        if {*blocks} != {_PROPERTIES}:  # no range deletes, filters or dictionaries
            raise ValueError(f"its blocks of metadata are {[*blocks][:9]!r}")
        handle, _ = _handle(blocks[_PROPERTIES], 0)
        told = _pairs(self.contents(handle))
        for name, expected in _EXPECTED.items():
            if told.get(name) != expected:
                raise ValueError(f"its property {name.decode()} is {told.get(name)!r}")
        others = sum(_number(told, name) for name in _OTHER_KINDS)
        if others:
            raise ValueError(
                f"{others} of its entries delete or merge, and no part has such entries"
            )
        return told

    def contents(self, handle: _Handle) -> bytes:
        """The contents of a block."""
        (offset, size), _ = self._required(handle, 0)
        data = os.pread(self._descriptor, size + _TRAILER.size, offset)
        stored = memoryview(data)[:size]
        codec, checksum = _TRAILER.unpack_from(data, size)
        if (xxh3_64_intdigest(stored) ^ codec * _CODEC_PRIME) & 0xFFFFFFFF != checksum:
            raise ValueError(f"the checksum of the block at {offset} differs")
        return _unpacked(data[:size], codec) if codec else data[:size]

    def _required(self, handle: _Handle, at: int) -> tuple[_Handle, int]:
        offset, size = handle
        if offset + size + _TRAILER.size > self._end:
            raise ValueError(f"a block of {size} bytes at {offset} lies outside of it")
        return handle, at


def _unpacked(packed: bytes, codec: int) -> bytes:
    size, at = read_varint(packed, 0)
    if codec not in _CODECS:
        raise ValueError(f"a block has the unknown codec {codec}")
    if size > max(VALUE_BYTES_MAX + _BLOCK_SLACK_BYTES, _PACKED_RATIO_MAX * len(packed)):
        raise ValueError(f"a packed block of {len(packed)} bytes tells {size} bytes")
    block = memoryview(packed)[at:]
    try:
        # Arrow compares the size of zstd. It would leave the rest of an LZ4 block as memory was.
        if codec == _LZ4 and lz4_size(block) != size:
            raise ValueError(f"a packed block has not the {size} bytes that it tells")
        name = _CODECS[codec]
        unpacked: bytes = pa.decompress(block, decompressed_size=size, codec=name, asbytes=True)
    except OSError as error:  # Arrow's, not the disk's
        raise ValueError(f"a block does not unpack: {error}") from error
    return unpacked


def _pairs(contents: bytes) -> dict[bytes, bytes]:
    """The entries of a block of metadata."""
    return {key: contents[start:end] for key, start, end in _entries(contents, 0)}


def _keys(contents: bytes, at: int = 0) -> Iterator[bytes]:
    """The stored keys of a block of data from the restart `at` on."""
    for key, _, _ in _entries(contents, at):
        if key[-len(_PUT) :] != _PUT or len(key) > 2 * KEY_BYTES_MAX + _FRAME_BYTES:
            raise ValueError("an entry is no put of a file from outside a database")
        yield key[: -len(_PUT)]


def _entries(contents: bytes, at: int) -> Iterator[tuple[bytes, int, int]]:
    """The entries from the restart `at` on: the key, and where the value begins and ends."""
    key, end = b"", _entries_end(contents)
    while at < end:
        shared, fresh, size = contents[at : at + 3]
        if (shared | fresh | size) < 128:  # hot: three calls take as long as all else
            at += 3
        else:
            shared, at = read_varint(contents, at)
            fresh, at = read_varint(contents, at)
            size, at = read_varint(contents, at)
        start = at + fresh
        if shared > len(key) or start + size > end:
            raise ValueError("an entry does not fit its block")
        key = key[:shared] + contents[at:start]
        at = start + size
        yield key, start, at


def _handles(contents: bytes, at: int = 0) -> Iterator[_Handle]:
    """The blocks of data that an index names from the restart `at` on."""
    offset, size, end = 0, 0, _entries_end(contents)
    while at < end:
        shared, at = read_varint(contents, at)
        fresh, at = read_varint(contents, at)
        if shared:
            change, at = read_varint(contents, at + fresh)
            offset += size + _TRAILER.size
            size += change >> 1 ^ -(change & 1)
        else:
            (offset, size), at = _handle(contents, at + fresh)
        if at > end or size < 0:
            raise ValueError("an entry of the index does not fit")
        yield offset, size


def _handle(data: bytes, at: int) -> tuple[_Handle, int]:
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _entries_end(contents: bytes) -> int:
    """Where the entries of a block end, and its restarts begin."""
    end = len(contents) - 4 * (int.from_bytes(contents[-4:], "little") + 1)
    if end <= 0:
        raise ValueError("a block has no entries")
    return end


def _last_restart(contents: bytes) -> int:
    """Where the last entry with a whole key begins."""
    return int.from_bytes(contents[-8:-4], "little")


def _last(items: Iterator[_Item]) -> _Item:
    found = deque(items, maxlen=1)
    if not found:
        raise ValueError("a block has no entry at its last restart")
    return found.pop()


def _number(told: dict[bytes, bytes], name: bytes) -> int:
    if name not in told:
        raise ValueError(f"it has no property {name.decode()}")
    found, _ = read_varint(told[name], 0)
    return found
