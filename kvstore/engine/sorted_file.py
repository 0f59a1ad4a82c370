"""RocksDB's sorted files, read and written without a database.

    file    := block* | metaindex block | index block | footer
    footer  := checksum type u8 | handles, padded to 40 | format u32 | magic u64
    handles := handle of the metaindex | handle of the index
    handle  := offset varint | size varint

    block   := contents, perhaps compressed | codec u8 | checksum u32
    packed  := size of the contents varint | LZ4 or zstd          where there is a codec
    entries := entry* | restart u32* | count of restarts u32      the contents of each block
    entry   := shared varint | fresh varint | size varint | key, without `shared` bytes | value
    indexed := 0 varint | fresh varint | key | handle             an entry of the index

    key     := stored key | 1 u8 | 0 u56      a put; files built outside a database have no other

This is the block-based table of RocksDB 6 to 10 with `format_version=5`. The last part of this file
writes it.
Reading the figures takes 0.1 ms, and the time of reading the index. RocksDB reads both again when
it takes the file.

Invariants
1. The checksum of each block is verified before the block is used. The footer has no checksum, so
   a handle is compared with the size of the file before its bytes are read.
2. A length is compared with the block before it is used. Bytes of a stranger may raise
   `CorruptionError`, and no other error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvstore.codec.varint import read_varint, write_varint
from kvstore.errors import CorruptionError, storage_errors
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.loops.blocks import block_handles, block_keys, unpack_lz4, xxh3
from kvstore.loops.packing import Packer, Stretch
from kvstore.loops.shapes import BLOCK_KEYS_BYTES_MAX

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
_ZSTD: Final = 7
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


_PLAIN_INDEX: Final = b"rocksdb.index.key.is.user.key"
_EXPECTED_ANYWHERE: Final = (
    b"rocksdb.comparator",
    b"rocksdb.block.based.table.index.type",
    b"rocksdb.index.value.is.delta.encoded",
)
"""The properties that every file has which RocksDB writes for a store."""

_UNREAD: Final = (b"rocksdb.num.range-deletions", b"rocksdb.merge.operands")
_FILTERS: Final = (b"fullfilter.", b"filter.")
"""Blocks of metadata that a pass does not need. Stores write none."""


class Figures(NamedTuple):
    """The figures that a file tells without a pass."""

    first: bytes
    last: bytes
    entries: int


class TableFooter(NamedTuple):
    """What a pass must know of a file: where its blocks end, offset and size of its index, and
    whether the keys of the index are stored keys, without kind and number behind them."""

    end: int
    index_at: int
    index_size: int
    has_plain_index: bool


def table_footer(descriptor: int) -> TableFooter:
    """The footer of an open file of a database. Raises `ValueError` unless its blocks are those of
    `kvstore.loops.files`, without range deletes of RocksDB, merges and blobs."""
    table = _Table(descriptor)
    told = table.told({_PROPERTIES}, _FILTERS)
    for name in _EXPECTED_ANYWHERE:
        if told.get(name) != _EXPECTED[name]:
            raise ValueError(f"its property {name.decode()} is {told.get(name)!r}")
    if any(_number(told, name) for name in _UNREAD):
        raise ValueError("it has range deletes or merges")
    return table.footer(has_plain_index=told.get(_PLAIN_INDEX) == b"\x01")


def figures_of(file: Path | str) -> Figures:
    """The figures of a sorted file. Raises `CorruptionError` if it is none that was built outside a
    database, or if a block that is read is damaged."""
    with _opened(file) as table:
        return table.figures()


def ends_of(file: Path | str) -> tuple[TableFooter, Figures]:
    """What a pass must know of a sorted file that was built outside a database. Raises as
    `figures_of`."""
    with _opened(file) as table:
        return table.footer(has_plain_index=True), table.figures()


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

    def footer(self, *, has_plain_index: bool) -> TableFooter:
        """What a pass must know of the file."""
        return TableFooter(self._end, *self._index, has_plain_index)

    def told(self, names: set[bytes], further: tuple[bytes, ...] = ()) -> dict[bytes, bytes]:
        """The properties of the file. Raises `ValueError` unless its blocks of metadata have these
        `names`; others may begin with one of `further`."""
        blocks = _pairs(self._contents(self._metaindex, _METADATA_BYTES_MAX))
        if {name for name in blocks if not name.startswith(further)} != names:
            raise ValueError(f"its blocks of metadata are {[*blocks][:9]!r}")
        handle, _ = _handle(blocks[_PROPERTIES], 0)
        return _pairs(self._contents(handle, _METADATA_BYTES_MAX))

    def properties(self) -> dict[bytes, bytes]:
        """The properties of the file."""
        told = self.told({_PROPERTIES})  # no range deletes, filters or dictionaries
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

    def figures(self) -> Figures:
        """The figures of the file."""
        told = self.properties()
        first, last = map(self.keys, _ends(self.index()))
        return Figures(first[0], last[-1], _number(told, _ENTRIES))

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
        if (xxh3(stored) ^ codec * _CODEC_PRIME) & 0xFFFFFFFF != checksum:
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
    if codec not in (_LZ4, _ZSTD):
        raise ValueError(f"a block has the unknown codec {codec}")
    if size > most:
        raise ValueError(f"a packed block of {len(packed)} bytes tells {size} bytes")
    block = memoryview(packed)[at:]
    if codec == _LZ4:
        return unpack_lz4(block, size)
    try:
        unpacked: bytes = pa.decompress(block, decompressed_size=size, codec="zstd", asbytes=True)
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
# Sorted files, written. `kvstore.loops.packing` makes the blocks of data and the index, and here
# stands what comes behind them.
#
# Blocks of data and index are those of RocksDB's writer, but for the bytes of LZ4. Properties are
# sorted by name, and their keys are cut without a restart. They differ from those of RocksDB's
# writer in three: the name of the machine and the options of the compression are left out, and the
# identity of a file, 20 letters and digits by which RocksDB tells files apart, is made of the
# checksums of its blocks. So the same rows make the same bytes.
#
# Not written, though the format has it: filters, dictionaries of compression, an index of two
# levels or of hashes, range deletes, deletes, merges, blobs, sequence numbers other than 0, blocks
# of aligned size, timestamps of RocksDB, checksums other than XXH3, versions other than 5.

CODECS: Final = {"lz4": _LZ4, "zstd": _ZSTD, "none": 0}
"""The compressions of blocks, by their numbers in a file."""

_ZSTD_LEVEL: Final = 3
"""The level that RocksDB takes if no other one is set."""

_NAMES: Final = {"lz4": b"LZ4", "zstd": b"ZSTD", "none": b"NoCompression"}
_IDENTITY_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IDENTITY_SIZE: Final = 20


def pack_zstd(block: bytes) -> bytes:
    """The bytes of a block, packed by zstd."""
    packed: bytes = _packing().compress(block, asbytes=True)
    return packed


@cache
def _packing() -> pa.Codec:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def seal(stretch: Stretch, compression: str) -> None:
    """Pack the blocks of a stretch. Several threads may do so at once, each with its stretch."""
    stretch.seal(CODECS[compression], pack_zstd)


def ending(packer: Packer, compression: str) -> bytes:
    """What stands behind the blocks of data, all of which `packer` has taken: index, properties and
    footer."""
    contents, digest = packer.index()
    tail = bytearray()

    def put(contents: bytes, compression: str = "none") -> bytes:
        block, offset = Stretch(), packer.size + len(tail)
        block.put(contents)
        seal(block, compression)
        tail.extend(memoryview(block))
        return write_varint(offset) + write_varint(packer.size + len(tail) - offset - _TRAILER.size)

    index = put(contents, compression)
    told = {
        **_EXPECTED,
        b"rocksdb.block.based.table.prefix.filtering": b"0",
        b"rocksdb.block.based.table.whole.key.filtering": b"1",
        b"rocksdb.compression": _NAMES[compression],
        b"rocksdb.creating.db.identity": b"SST Writer",
        b"rocksdb.creating.session.identity": _identity(digest),
        b"rocksdb.merge.operator": b"nullptr",
        b"rocksdb.prefix.extractor.name": b"nullptr",
        b"rocksdb.property.collectors": b"[]",
    }
    numbers = {
        b"creation.time": 0,
        b"data.size": packer.size,
        b"deleted.keys": 0,
        b"filter.size": 0,
        b"fixed.key.length": 0,
        b"format.version": _FORMAT,
        b"index.size": len(contents) + _TRAILER.size,
        b"key.largest.seqno": 0,
        b"merge.operands": 0,
        b"num.data.blocks": packer.blocks,
        b"num.entries": packer.entries,
        b"num.filter_entries": 0,
        b"num.range-deletions": 0,
        b"oldest.key.time": 0,
        b"original.file.number": 1,
        b"raw.key.size": packer.key_bytes,
        b"raw.value.size": packer.value_bytes,
        b"tail.start.offset": packer.size,
    }
    told |= {b"rocksdb." + name: write_varint(number) for name, number in numbers.items()}
    metaindex = put(_block_of({_PROPERTIES: put(_block_of(told, cuts=True))}))
    return bytes(tail) + _FOOTER.pack(_XXH3, metaindex + index, _FORMAT, _MAGIC)


def _block_of(entries: dict[bytes, bytes], *, cuts: bool = False) -> bytes:
    """A block of metadata, of entries in any order. With `cuts` only its first key is whole."""
    block, restarts, before = bytearray(), list[int](), b""
    for key, value in sorted(entries.items()):
        if not cuts or not restarts:
            restarts.append(len(block))
            before = b""
        pairs = zip(before, key, strict=False)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), len(before))
        block += b"".join(map(write_varint, (shared, len(key) - shared, len(value))))
        block += key[shared:] + value
        before = key
    return bytes(block) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def _identity(digest: bytes) -> bytes:
    left, letters = int.from_bytes(digest, "big"), ""
    for _ in range(_IDENTITY_SIZE):
        left, letter = divmod(left, len(_IDENTITY_LETTERS))
        letters += _IDENTITY_LETTERS[letter]
    return letters.encode()
