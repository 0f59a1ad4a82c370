"""The change index: every commit's changes, in time order, beside the versions.

One engine batch writes a commit's versions and its change entries, so neither exists without the
other. With the index an incremental read costs what changed. An entry holds no large values: a
reader fetches them from the versions, which are kept as long as the index.

A large entry is first staged thin, that is without its values. The engine's log already has the
values with the versions, and logging them a second time would cost more than all other work of the
index (3 us a KB). The full entry is then written outside the log, in the place of the thin one. A
crash can lose the full entry only; the thin entry means the same and is slower to read.

Invariants
1. A commit at t has exactly one run of chunks (stream, t, 0..n) in each stream that it touches, and
   the last chunk is marked. The time t and the keys decide the streams (`generation`).
2. The index is complete for a window `(since, upto]` if `since` is at or above its floor: the
   store's own `since`, or in a restored store the time of the restore.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

from kvstore.changes.entry import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_PUT,
    OP_PUT_LARGE,
    ChangeEntry,
    PackedColumn,
    Row,
    column,
    is_last,
    pack,
    pack_writes,
    peek,
    unpack,
)
from kvstore.changes.generation import Generation, Generations, GenerationWindow
from kvstore.changes.stream import CONTROL_STREAM
from kvstore.codec.keys import decode_change_key, encode_change_key
from kvstore.engine.api import CHANGES, Engine, WriteBatch
from kvstore.errors import CorruptionError
from kvstore.limits import (
    CHANGE_CHUNK_BYTES,
    INDEX_ENTRIES_PER_TAKE,
    INLINE_VALUE_BYTES,
    THIN_FROM_BYTES,
)
from kvstore.meta import Meta
from kvstore.mvcc.write import WriteSet
from kvstore.timestamp import TIMESTAMP_MAX

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
        self.generations = Generations(Meta(engine))
        self.trims: list[Callable[[WriteBatch, int], None]] = [self.generations.stage_trim]

    # -- writing ----------------------------------------------------------------------------

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

    def last(self, *, below: int = TIMESTAMP_MAX) -> int:
        """Timestamp of the newest commit in the index before the time `below`, 0 if there is none.
        One or two seeks per stream, which finds streams of any writer.
        """
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

    Hot: this is the common case, and it looks at the lengths only.
    """
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
    for key, value in writes.points.items():
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
