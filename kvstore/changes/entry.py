"""The packed record of one commit in one stream of the change index.

    entry  := | version u8 | codec u8 | flags u8 | 0 | count u32 | body bytes u32 |
              | domain u64 | changeset u64 | body |
    body   := | key offsets i32[count + 1] | value offsets i32[count + 1]
              | sequence u32[count] where flagged | keys | values | ops u8[count] |
    codec  := 0 none | 1 lz4           body bytes counts the uncompressed body
    flags  := bit 0: last entry of its commit in this stream
              bit 1: sequence: the place of each row in its commit, which other streams share
    op     := 1 put | 3 delete | 5 delete range: value is the end key     (ScyllaDB's CDC codes)
              16 import | 17 revert: key is the import id u64 big-endian
              65 put whose value is too large to travel: read it from the versions

Numbers are little-endian, so that offsets and data have Arrow's layout: a reader wraps them without
copying. Because there is one entry per commit rather than one per key, reading 10,000 changes takes
0.5 ms; a key index and point reads take 33 ms.

All readers open an entry by `unpack`. It checks every number against the others before any of them
serves as an address, so damaged or hostile bytes raise `CorruptionError`.

Invariants
1. Offsets start at 0, never fall, and end at the length of their data. Every row has a known op,
   and a key and a value of the form that the op takes. A sequence ascends.
2. A commit has range deletes first, then points in the order in which they were made. In a commit
   of one stream the rows are numbered 0, 1, 2 ... over its chunks. In a commit of several streams
   the sequence column holds the numbers.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kvstore.changes.lz4 import CODEC, unpack_block
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.limits import COMPRESS_FROM_BYTES
from kvstore.loops.columns import cut, join, join_writes, survey, tuples
from kvstore.loops.contract import ENTRY_HEAD, RULE_ANY, RULE_ID, RULE_NO_VALUE, RULE_SPAN

assert sys.byteorder == "little", "entries are written as the machine's own integers"

ENTRY_VERSION: Final = 1
_CODEC_NONE, _CODEC_LZ4 = 0, 1
_LAST, _SEQUENCED = 1, 2
_FLAGS_AT: Final = 2
_SERIAL_MAX = (1 << 64) - 2
"""The largest serial: an epoch ends at the one above it."""

_READ_HEAD = struct.Struct("<IIIqQ")
"""`ENTRY_HEAD`, as read: the domain, which is below 2^63, is signed. A comparison checks the first
number, which saves 0.3 us an entry."""
_HEADS = {
    ENTRY_VERSION | codec << 8 | flags << 16: (codec, flags)
    for codec in (_CODEC_NONE, _CODEC_LZ4)
    for flags in range((_LAST | _SEQUENCED) + 1)
}

OP_PUT: Final = 1
OP_DELETE: Final = 3
OP_DELETE_RANGE: Final = 5
OP_IMPORT: Final = 16
OP_REVERT: Final = 17
OP_PUT_LARGE: Final = 65
_WRITES: Final = bytes((OP_DELETE_RANGE, OP_PUT, OP_DELETE))

RULES: Final = bytes(
    {
        OP_PUT: RULE_ANY,
        OP_DELETE: RULE_NO_VALUE,
        OP_DELETE_RANGE: RULE_SPAN,
        OP_IMPORT: RULE_ID,
        OP_REVERT: RULE_ID,
        OP_PUT_LARGE: RULE_NO_VALUE,
    }.get(op, 0)
    for op in range(256)
)

CHANGESET_NONE: Final = (0, 0)


class Row(NamedTuple):
    """One line of an entry, as stored."""

    op: int
    key: bytes
    value: bytes


@dataclass(slots=True, eq=False)
class ChangeEntry:
    """An unpacked entry: columns over one buffer. Callers must not change it; a frozen dataclass
    would cost 0.8 us for each commit that is read."""

    count: int
    ops: memoryview
    key_offsets: memoryview
    value_offsets: memoryview
    keys: memoryview
    values: memoryview
    is_last: bool
    changeset: tuple[int, int]
    puts: int
    """Rows that are puts with their values."""
    points: int
    """Rows that are puts or deletes, of one key each."""
    sequence: memoryview | None = None

    def rows(self) -> Iterator[Row]:
        """The lines of the entry, in commit order."""
        return tuples(Row, self.count, [list(self.ops), *self.columns()])

    def columns(self) -> tuple[list[bytes], list[bytes]]:
        """All keys and all values."""
        return cut(self.key_offsets, self.keys), cut(self.value_offsets, self.values)

    @property
    def is_small_puts(self) -> bool:
        """Whether every line is a put with its value."""
        return self.puts == self.count


class PackedColumn(NamedTuple):
    """The items of one column of an entry: a buffer of i32 offsets, one more than there are items,
    and a buffer of their bytes."""

    offsets: Any
    data: Any

    def longest(self) -> int:
        """Bytes of the longest item, 0 where there is none."""
        return int(np.diff(np.frombuffer(self.offsets, np.int32)).max(initial=0))


def column(items: Collection[bytes]) -> PackedColumn:
    """A column of `items`, which must have less than 2 GiB together. Raises `TypeError` where an
    item is None."""
    buffers = join(list(items))
    assert buffers is not None, "an entry holds some megabytes"
    return PackedColumn(*buffers)


def pack(
    ops: bytes,
    keys: PackedColumn,
    values: PackedColumn,
    *,
    is_last: bool = True,
    changeset: tuple[int, int] = CHANGESET_NONE,
    sequence: Sequence[int] | None = None,
    compress: bool = True,
) -> bytes:
    """Pack the columns of one entry. O(bytes)."""
    flags = (_LAST if is_last else 0) | (0 if sequence is None else _SEQUENCED)
    places = b"" if sequence is None else _places(sequence)
    # Join once: one more copy of a MB takes fresh memory, which costs 0.7 ms.
    body = b"".join((keys.offsets, values.offsets, places, keys.data, values.data, ops))
    return _headed(body, len(ops), flags, changeset, compress=compress)


def pack_writes(
    points: Mapping[bytes, bytes | None],
    ranges: Sequence[tuple[bytes, bytes]],
    longest: int,
    changeset: tuple[int, int] = CHANGESET_NONE,
    sequence: Sequence[int] | None = None,
) -> bytes | None:
    """Pack the last entry of a commit of range deletes, puts and deletes, in one pass. None where a
    value that is put has more than `longest` bytes. A hundred rows take 3 us; `pack` takes 9. Hot.
    """
    flags, places = (_LAST, b"") if sequence is None else (_LAST | _SEQUENCED, _places(sequence))
    word = ENTRY_VERSION | flags << 16
    packed = join_writes(points, ranges, longest, places, _WRITES, word, changeset)
    if packed is None or len(packed) < ENTRY_HEAD.size + COMPRESS_FROM_BYTES:
        return packed
    body = memoryview(packed)[ENTRY_HEAD.size :]
    return _headed(body, len(points) + len(ranges), flags, changeset)


def _places(sequence: Sequence[int]) -> bytes:
    return array("I", sequence).tobytes()


def _headed(
    body: bytes | memoryview,
    count: int,
    flags: int,
    changeset: tuple[int, int],
    *,
    compress: bool = True,
) -> bytes:
    size, codec, stored = len(body), _CODEC_NONE, body
    if compress and size >= COMPRESS_FROM_BYTES:
        codec, stored = _CODEC_LZ4, pa.compress(body, codec=CODEC)
    word = ENTRY_VERSION | codec << 8 | flags << 16
    return b"".join((ENTRY_HEAD.pack(word, count, size, *changeset), stored))


def peek(packed: bytes, *, where: str) -> tuple[int, tuple[int, int]]:
    """Row count and changeset of an entry, from its header alone. Raises as `unpack`."""
    _, count, _, domain, serial = _opened(packed, where)
    return count, (domain, serial)


def is_last(packed: bytes) -> bool:
    """Whether an unchecked entry says that it is the last of its commit."""
    return len(packed) > _FLAGS_AT and bool(packed[_FLAGS_AT] & _LAST)


def unpack(packed: bytes, *, where: str) -> ChangeEntry:
    """Read an entry. Raises `CorruptionError` on bytes that break the format, and
    `FormatVersionError` on a version this release does not know."""
    head, count, size, domain, serial = _opened(packed, where)
    codec, flags = _HEADS[head]
    body = memoryview(packed)[ENTRY_HEAD.size :]
    if codec == _CODEC_LZ4:
        body = unpack_block(body, size, where=where)
    is_sequenced = flags & _SEQUENCED != 0
    keys_end, values_end, puts, points = survey(body, count, is_sequenced, RULES, where)
    offsets = 4 * (count + 1)
    keys_at = 2 * offsets + (4 * count if is_sequenced else 0)
    return ChangeEntry(
        count,
        body[values_end:],
        body[:offsets].cast("i"),
        body[offsets : 2 * offsets].cast("i"),
        body[keys_at:keys_end],
        body[keys_end:values_end],
        flags & _LAST != 0,
        (domain, serial),
        puts,
        points,
        body[2 * offsets : keys_at].cast("I") if is_sequenced else None,
    )


def _opened(packed: bytes, where: str) -> tuple[int, int, int, int, int]:
    """First word, row count, body bytes, domain and serial of an entry, from its header."""
    if len(packed) < ENTRY_HEAD.size:
        raise CorruptionError(where, f"{len(packed)} bytes are no change entry")
    header: tuple[int, int, int, int, int] = _READ_HEAD.unpack_from(packed)
    head, count, size, domain, serial = header
    if head not in _HEADS:
        version, codec, flags, reserved = packed[:4]
        if version != ENTRY_VERSION or codec not in (_CODEC_NONE, _CODEC_LZ4):
            raise FormatVersionError(where, found=f"{version}.{codec}", supported=ENTRY_VERSION)
        raise CorruptionError(where, f"unknown flags {flags} and {reserved}")
    stored = len(packed) - ENTRY_HEAD.size
    if count > size or (size != stored and not head & _CODEC_LZ4 << 8):
        raise CorruptionError(where, f"{stored} bytes for {count} rows of {size}")
    if domain < 0 or serial > _SERIAL_MAX:
        raise CorruptionError(where, f"no changeset has the id {domain}.{serial}")
    return header
