"""The change index: every commit's changes, in time order, beside the versions.

One engine batch writes a commit's versions and its change entries, so neither exists without the
other. With the index an incremental read costs what changed. An entry holds no large values: a
reader fetches them from the versions, which are kept as long as the index.

A large entry is first staged thin, that is without its values. The engine's log already has the
values with the versions, and logging them a second time would cost more than all other work of
the index (3 us a KB). The full entry is then written outside the log, in the place of the thin
one. A crash can lose the full entry only; the thin entry means the same and is slower to read.

Invariants
1. A commit at t has exactly one run of chunks (stream, t, 0..n) in each stream that it touches,
   and the last chunk is marked. The time t and the keys decide the streams (`generation`).
2. The index is complete for a window `(since, upto]` if `since` is at or above its floor: the
   store's own `since`, or in a restored store the time of the restore.
"""

from __future__ import annotations

import heapq
import struct
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
from typing_extensions import Buffer

from kvstore.base.timestamp import TIMESTAMP_MAX
from kvstore.changes.streams import CONTROL_STREAM, Generation, Generations, GenerationWindow
from kvstore.codec.keys import decode_change_key, encode_change_key
from kvstore.engine.api import CHANGES, DATA, Engine, WriteBatch, pairs
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.limits import (
    CHANGE_CHUNK_BYTES,
    COMPRESS_FROM_BYTES,
    INDEX_ENTRIES_PER_TAKE,
    INLINE_VALUE_BYTES,
    THIN_FROM_BYTES,
)
from kvstore.loops.blocks import unpack_lz4
from kvstore.loops.columns import cut, join, join_writes, survey, tuples
from kvstore.loops.shapes import ENTRY_HEAD, RULE_ANY, RULE_ID, RULE_NO_VALUE, RULE_SPAN
from kvstore.loops.writes import SmallCommits
from kvstore.mvcc.meta import STAGED, Meta
from kvstore.mvcc.write_set import WriteSet, stage

# --------------------------------------------------------------------------------------------------
# LZ4 blocks with their size stored beside them.

CODEC: Final = "lz4_raw"
"""The name by which Arrow packs a block."""


def unpack_block(block: Buffer, size: int, *, where: str) -> memoryview:
    """The `size` bytes of a block. Raises `CorruptionError` where the block has another size."""
    try:
        return memoryview(unpack_lz4(block, size))
    except ValueError as error:
        raise CorruptionError(where, str(error)) from error


# --------------------------------------------------------------------------------------------------
# The packed record of one commit in one stream of the change index.
#
#     entry  := | version u8 | codec u8 | flags u8 | 0 | count u32 | body bytes u32 |
#               | domain u64 | changeset u64 | body |
#     body   := | key offsets i32[count + 1] | value offsets i32[count + 1]
#               | sequence u32[count] where flagged | keys | values | ops u8[count] |
#     codec  := 0 none | 1 lz4           body bytes counts the uncompressed body
#     flags  := bit 0: last entry of its commit in this stream
#               bit 1: sequence: the place of each row in its commit, which other streams share
#     op     := 1 put | 3 delete | 5 delete range: value is the end key     (ScyllaDB's CDC codes)
#               16 import | 17 revert: key is the import id u64 big-endian
#               65 put whose value is too large to travel: read it from the versions
#
# Numbers are little-endian, so that offsets and data have Arrow's layout: a reader wraps them
# without copying. Because there is one entry per commit rather than one per key, reading 10,000
# changes takes 0.5 ms; a key index and point reads take 33 ms.
#
# All readers open an entry by `unpack`. It checks every number against the others before any of
# them serves as an address, so damaged or hostile bytes raise `CorruptionError`.
#
# Invariants
# 1. Offsets start at 0, never fall, and end at the length of their data. Every row has a known op,
#    and a key and a value of the form that the op takes. A sequence ascends.
# 2. A commit has range deletes first, then points in the order in which they were made. In a commit
#    of one stream the rows are numbered 0, 1, 2 ... over its chunks. In a commit of several streams
#    the sequence column holds the numbers.

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
_POINTS: Final = bytes((OP_PUT, OP_DELETE))
_WRITES: Final = bytes((OP_DELETE_RANGE,)) + _POINTS

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
    value that is put has more than `longest` bytes. A hundred rows take 3 us; `pack` takes 9."""
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


# --------------------------------------------------------------------------------------------------
# The index.


FIRST_STREAM: Final = CONTROL_STREAM
"""The stream of a store with a single stream."""

_CHUNKS_MAX = (1 << 32) - 1
_PUT, _PUT_LARGE = bytes([OP_PUT]), bytes([OP_PUT_LARGE])


Select: TypeAlias = "Callable[[Generation], Iterable[bytes]]"
"""Chooses the streams of a generation that a reader wants."""


FullEntry: TypeAlias = "tuple[bytes, bytes]"
"""Key and value, in `changes`, of the full form of an entry that was staged thin."""


class Packed(NamedTuple):
    """One chunk of a commit's entry: the staged form, and the full form if the staged one is
    thin."""

    staged: bytes
    full: bytes | None = None


class Commit(NamedTuple):
    """One chunk of one commit in one stream, as stored."""

    timestamp: int
    chunk: int
    entry: ChangeEntry
    stream: bytes = FIRST_STREAM


class PlacedRow(NamedTuple):
    """One row of the index and its place: `sequence` counts the rows of its commit."""

    timestamp: int
    sequence: int
    row: Row
    stream: bytes
    changeset: tuple[int, int]


class ChangeIndex:
    """Writes and reads the change entries of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._meta = Meta(engine)
        self.generations = Generations(self._meta)
        self._small = SmallCommits(FIRST_STREAM, ENTRY_VERSION | _LAST << 16, _POINTS)
        self.trims: list[Callable[[WriteBatch, int], None]] = [self.generations.stage_trim]

    # -- writing ----------------------------------------------------------------------------

    def stage_commit(
        self, batch: WriteBatch, writes: WriteSet, timestamp: int, changeset: tuple[int, int]
    ) -> list[FullEntry]:
        """Add the versions of a sealed write set to the engine batch, and its entries, as `stage`
        does. Hot: one pass of compiled code for a small commit in a single stream."""
        families = self._engine.families
        if timestamp >= self.generations.single_from and self._small.put(
            batch.put, writes, timestamp, changeset, families[DATA], families[CHANGES]
        ):
            return []
        stage(batch, writes, timestamp, families)
        return self.stage(batch, writes, timestamp, changeset)

    def stage(
        self, batch: WriteBatch, writes: WriteSet, timestamp: int, changeset: tuple[int, int]
    ) -> list[FullEntry]:
        """Add the entries of a sealed write set to the engine batch that holds its versions.

        `changeset` tags them. Returns the full forms of thin entries, for `complete`.
        """
        found = self.generations.at(timestamp)
        if found.is_split:
            return self._stage_split(batch, writes, timestamp, changeset, found)
        return self._put(batch, FIRST_STREAM, timestamp, writes, changeset)

    def complete(self, entries: Iterable[FullEntry]) -> None:
        """Write the full entries that `stage` returned: after the batch, and before readers see
        it."""
        batch = self._engine.batch()
        for key, packed in entries:
            batch.put(key, packed, self._engine.families[CHANGES])
        self._engine.write(batch, {}, logged=False)

    def stage_event(
        self, batch: WriteBatch, op: int, key: bytes, timestamp: int, changeset: tuple[int, int]
    ) -> None:
        """Add the entry of a commit with a single event: an import or a revert."""
        row = column([key]), column([b""])
        packed = pack(bytes([op]), *row, changeset=changeset)
        batch.put(
            encode_change_key(CONTROL_STREAM, timestamp), packed, self._engine.families[CHANGES]
        )

    def _stage_split(
        self,
        batch: WriteBatch,
        writes: WriteSet,
        timestamp: int,
        changeset: tuple[int, int],
        found: Generation,
    ) -> list[FullEntry]:
        """As `stage`, for several streams: 1.5 us per key, most of it for the token."""
        full: list[FullEntry] = []
        parts: dict[bytes, _Part] = {}
        ranges = len(writes.ranges)
        if ranges:
            parts[found.control] = _Part({}, writes.ranges, writes.size, [*range(ranges)])
        by_position = [
            parts.setdefault(stream, _Part({}, (), writes.size, [])) for stream in found.streams
        ]
        targets = [(part.points, part.order.append) for part in by_position]
        positions = found.positions(writes.points)
        rows = zip(positions, writes.points.items(), strict=True)
        for number, (position, (key, value)) in enumerate(rows, start=ranges):
            points, note = targets[position]
            points[key] = value
            note(number)
        for stream, part in parts.items():
            full += self._put(batch, stream, timestamp, part, changeset, part.order)
        return full

    def _put(
        self,
        batch: WriteBatch,
        stream: bytes,
        timestamp: int,
        writes: WriteSet | _Part,
        changeset: tuple[int, int],
        order: Sequence[int] | None = None,
    ) -> list[FullEntry]:
        changes: Any = self._engine.families[CHANGES]
        whole = _whole(writes, changeset, order)
        if whole is not None:
            batch.put(encode_change_key(stream, timestamp), whole, changes)
            return []
        full = []
        for number, chunk in enumerate(_packed(writes, changeset, order)):
            key = encode_change_key(stream, timestamp, number)
            batch.put(key, chunk.staged, changes)
            if chunk.full is not None:
                full.append((key, chunk.full))
        return full

    # -- reading ----------------------------------------------------------------------------

    def read(self, *, since: int, upto: int, select: Select | None = None) -> Iterator[Commit]:
        """Entries of the commits in `(since, upto]`, oldest first; the entries of a commit come
        stream by stream.

        `select` chooses the streams of each generation; the default is all. Costs what it yields,
        and holds one chunk per stream in memory.
        """
        for window in self.generations.windows(since=since, upto=upto):
            yield from self.commits_in(window, select)

    def commits_in(
        self, window: GenerationWindow, select: Select | None = None
    ) -> Iterator[Commit]:
        """As `read`, for a window in one generation."""
        found, since, upto = window
        wanted = found.every_stream() if select is None else select(found)
        parts = [self._entries(stream, since=since, upto=upto) for stream in wanted]
        return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=itemgetter(0))

    def rows(self, *, since: int, upto: int, select: Select | None = None) -> Iterator[PlacedRow]:
        """Rows of the commits in `(since, upto]`, oldest first; the rows of a commit in its order.

        `select` chooses the streams of each generation; the default is all.
        """
        for window in self.generations.windows(since=since, upto=upto):
            yield from self.rows_in(window, select)

    def rows_in(
        self, window: GenerationWindow, select: Select | None = None
    ) -> Iterator[PlacedRow]:
        """As `rows`, for a window in one generation."""
        found, since, upto = window
        wanted = found.every_stream() if select is None else select(found)
        parts = [self._placed(stream, since=since, upto=upto) for stream in wanted]
        return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=itemgetter(0, 1))

    def headers(self, *, since: int, upto: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Timestamp, row count and changeset of each entry in `(since, upto]`, oldest first.

        The rows stay packed: 0.5 us per entry.
        """
        for found, low, high in self.generations.windows(since=since, upto=upto):
            streams = found.every_stream()
            parts = [self._stored(stream, since=low, upto=high) for stream in streams]
            for timestamp, chunk, value in heapq.merge(*parts, key=itemgetter(0)):
                yield timestamp, *peek(value, where=_where(timestamp, chunk))

    def heads(self, stream: bytes, *, since: int, upto: int) -> Iterator[tuple[int, int]]:
        """Timestamp and row count of each entry of one stream in `(since, upto]`, oldest first."""
        for timestamp, chunk, value in self._stored(stream, since=since, upto=upto):
            yield timestamp, peek(value, where=_where(timestamp, chunk))[0]

    def stage_trim(self, batch: WriteBatch, upto: int) -> None:
        """Add the removal of all entries at or below `upto`, and of their epochs and generations.

        One range delete per stream. The caller holds the commit lock and writes the batch.
        """
        changes = self._engine.families[CHANGES]
        for stream in self.stored_streams():
            begin = encode_change_key(stream, 0)
            batch.delete_range(begin, encode_change_key(stream, upto + 1), changes)
        for stage_trim in self.trims:
            stage_trim(batch, upto)

    def stored_streams(self) -> Iterator[bytes]:
        """The streams that have entries. One seek each."""
        start = b""
        while True:
            cursor = self._engine.cursor(CHANGES, start)
            keys, _ = cursor.take(1)
            cursor.close()
            if not keys:
                return
            stream, _, _ = decode_change_key(keys[0])
            yield stream
            start = stream + b"\xff" * (len(keys[0]) - len(stream) + 1)

    def first(self) -> int:
        """Timestamp of the oldest commit in the index, 0 if it is empty. One seek per stream."""
        oldest = 0
        for stream in self.stored_streams():
            cursor = self._engine.cursor(CHANGES, encode_change_key(stream, 0))
            keys, _ = cursor.take(1)
            cursor.close()
            _, timestamp, _ = decode_change_key(keys[0])
            oldest = min(oldest or timestamp, timestamp)
        return oldest

    def entries_at(self, timestamp: int) -> Iterator[tuple[bytes, ChangeEntry]]:
        """The stored chunks of the commit at `timestamp`, which may lack some, by their keys."""
        for stream in list(self.stored_streams()):
            first = encode_change_key(stream, timestamp)
            cursor = self._engine.cursor(CHANGES, first, encode_change_key(stream, timestamp + 1))
            for key, value in pairs(cursor):
                _, _, chunk = decode_change_key(key)
                yield key, unpack(value, where=_where(timestamp, chunk))

    def last(self, *, below: int = TIMESTAMP_MAX, passes_staged: bool = True) -> int:
        """Timestamp of the newest commit in the index before the time `below`, 0 if there is none.
        One or two seeks per stream, which finds streams of any writer.

        A commit whose pieces are under way is passed over: see `kvstore.timeline.pieces`.
        """
        if passes_staged and (staged := self._meta.timestamp(STAGED)):
            below = min(below, staged)
        newest, bound = 0, None
        while True:
            found = self._last_key(b"", bound)
            if found is None:
                return newest
            stream, timestamp, _ = decode_change_key(found)
            if timestamp >= below:
                first, end = encode_change_key(stream, 0), encode_change_key(stream, below)
                found = self._last_key(first, end)
                timestamp = 0 if found is None else decode_change_key(found)[1]
            newest, bound = max(newest, timestamp), stream

    def _last_key(self, start: bytes, bound: bytes | None) -> bytes | None:
        cursor = self._engine.cursor(CHANGES, start, bound, reverse=True)
        keys, _ = cursor.take(1)
        cursor.close()
        return keys[0] if keys else None

    # -- inside -----------------------------------------------------------------------------

    def _entries(self, stream: bytes, *, since: int, upto: int) -> Iterator[Commit]:
        for timestamp, chunk, value in self._stored(stream, since=since, upto=upto):
            entry = unpack(value, where=_where(timestamp, chunk))
            yield Commit(timestamp, chunk, entry, stream)

    def _placed(self, stream: bytes, *, since: int, upto: int) -> Iterator[PlacedRow]:
        taken = 0
        for commit in self._entries(stream, since=since, upto=upto):
            first = 0 if commit.chunk == 0 else taken
            taken = first + commit.entry.count
            yield from placed(commit, first)

    def _stored(self, stream: bytes, *, since: int, upto: int) -> Iterator[tuple[int, int, bytes]]:
        cursor = self._engine.cursor(
            CHANGES,
            encode_change_key(stream, since, _CHUNKS_MAX) + b"\x00",
            encode_change_key(stream, upto + 1),
        )
        count, expected = 1, None
        try:
            while True:
                keys, values = cursor.take(count)
                if not keys:
                    if expected is not None:
                        raise _missing(*expected)
                    return
                is_small = sum(map(len, values)) < CHANGE_CHUNK_BYTES // 4
                count = min(count * 2, INDEX_ENTRIES_PER_TAKE) if is_small else 1
                for key, value in zip(keys, values, strict=True):
                    _, timestamp, chunk = decode_change_key(key)
                    if (chunk or expected) and (timestamp, chunk) != expected:
                        raise _missing(*(expected or (timestamp, 0)))
                    expected = None if is_last(value) else (timestamp, chunk + 1)
                    yield timestamp, chunk, value
        finally:
            cursor.close()


def placed(commit: Commit, first: int) -> Iterator[PlacedRow]:
    """The rows of one entry; `first` counts the rows before it in its commit and stream."""
    timestamp, _, entry, stream = commit
    numbers: Iterable[int] = range(first, first + entry.count)
    if entry.sequence is not None:
        numbers = entry.sequence.tolist()
    changeset = entry.changeset
    for number, row in zip(numbers, entry.rows(), strict=True):
        yield PlacedRow(timestamp, number, row, stream, changeset)


def _where(timestamp: int, chunk: int) -> str:
    return f"change entry {timestamp}/{chunk}"


def _missing(timestamp: int, chunk: int) -> CorruptionError:
    return CorruptionError(_where(timestamp, chunk), "chunks of a commit are missing")


class _Part(NamedTuple):
    """The writes of a commit in one stream, their places in the commit, and a bound of their
    size."""

    points: dict[bytes, bytes | None]
    ranges: Sequence[tuple[bytes, bytes]]
    size: int
    order: list[int]


def _whole(
    writes: WriteSet | _Part, changeset: tuple[int, int], order: Sequence[int] | None = None
) -> bytes | None:
    """The entry of a small write set without large values, in one chunk; None of any other one.
    It looks at the lengths only."""
    points, ranges, size = writes.points, writes.ranges, writes.size
    if size >= THIN_FROM_BYTES or size >= CHANGE_CHUNK_BYTES or not (points or ranges):
        return None
    return pack_writes(points, ranges, INLINE_VALUE_BYTES, changeset, order)


def _packed(
    writes: WriteSet | _Part, changeset: tuple[int, int], order: Sequence[int] | None = None
) -> Iterable[Packed]:
    """The entry of any other write set, cut into chunks where it would grow too large."""
    points = writes.points
    if writes.size < CHANGE_CHUNK_BYTES and points and not writes.ranges:
        try:
            packed_keys = column(points)
            packed_values = column(cast("Mapping[bytes, bytes]", points).values())
        except TypeError:  # a delete
            return _chunks(writes, changeset, order)
        if packed_values.longest() <= INLINE_VALUE_BYTES:
            ops = _PUT * len(points)
            return [_chunk(ops, packed_keys, packed_values, changeset=changeset, sequence=order)]
    return _chunks(writes, changeset, order)


def _chunks(
    writes: WriteSet | _Part, changeset: tuple[int, int], order: Sequence[int] | None
) -> Iterator[Packed]:
    """As `_packed`, row by row, for operations and values of any kind."""
    chunks = list(_columns(writes))
    taken = 0
    for number, (ops, keys, values) in enumerate(chunks, start=1):
        sequence = None if order is None else order[taken : taken + len(ops)]
        is_last = number == len(chunks)
        packed = column(keys), column(values)
        yield _chunk(ops, *packed, is_last=is_last, changeset=changeset, sequence=sequence)
        taken += len(ops)


def _chunk(ops: bytes, keys: PackedColumn, values: PackedColumn, **tags: Any) -> Packed:
    """An entry; thin and full forms if its values are large enough for that to pay.

    The engine compresses the full form when it writes it.
    """
    if len(values.data) < THIN_FROM_BYTES or OP_DELETE_RANGE in ops:
        return Packed(pack(ops, keys, values, **tags))
    none = PackedColumn(bytes(len(values.offsets)), b"")
    thin = pack(ops.replace(_PUT, _PUT_LARGE), keys, none, **tags)
    return Packed(thin, pack(ops, keys, values, compress=False, **tags))


def _columns(writes: WriteSet | _Part) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Columns of a write set's entries, cut where a chunk would grow too large."""
    keys = [start for start, _ in writes.ranges]
    values = [end for _, end in writes.ranges]
    ops = bytearray([OP_DELETE_RANGE]) * len(keys)
    size = 0
    rows = iter(writes.points.items())
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        found = _small_puts(some)
        if found is not None and size + found[2] < CHANGE_CHUNK_BYTES:  # hot: 50 ns a row
            keys += found[0]
            values += found[1]
            ops += _PUT * len(some)
            size += found[2]
            continue
        for key, value in some:
            if value is None:
                ops.append(OP_DELETE)
                values.append(b"")
            elif len(value) <= INLINE_VALUE_BYTES:
                ops.append(OP_PUT)
                values.append(value)
                size += len(value)
            else:
                ops.append(OP_PUT_LARGE)
                values.append(b"")
            keys.append(key)
            size += len(key)
            if size >= CHANGE_CHUNK_BYTES:
                yield bytes(ops), keys, values
                ops, keys, values, size = bytearray(), [], [], 0
    if keys:
        yield bytes(ops), keys, values


_ROWS_AT_ONCE: Final = 1024
"""Rows of a large write set that are looked at together."""


def _small_puts(
    rows: Sequence[tuple[bytes, bytes | None]],
) -> tuple[tuple[bytes, ...], tuple[bytes, ...], int] | None:
    """The keys and values of rows, and their bytes, if each is a put whose value travels."""
    keys: tuple[bytes, ...]
    values: tuple[Any, ...]
    keys, values = zip(*rows, strict=True)
    try:
        if max(map(len, values)) > INLINE_VALUE_BYTES:
            return None
    except TypeError:  # a delete
        return None
    return keys, values, sum(map(len, keys)) + sum(map(len, values))
