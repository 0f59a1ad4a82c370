"""A file as raw records: cut at its pairs, and decoded at full speed while every record is sound.

Invariants
1. A short read is not the end of a stream: only an empty one is.
2. `decode_run` accepts a record only if its bytes, its checksums, its ordinal and its incarnation
   are the expected ones. It judges nothing else, and never fails.

`decode_run` is the hot loop of replay: 0.9 us for a record of 100 bytes. It steps from record to
record by their lengths and handles the ordinary case. `FileScan` searches and judges all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO
from zlib import crc32

from kvstore.journal.records import (
    FRAME,
    FRAME_PAIR,
    HEAD_BYTES,
    PAYLOAD_AT,
    PAYLOAD_IN_FIRST,
    TYPE_MARK,
    TYPE_RESERVED,
    Record,
    RecordError,
    decode_mark,
    length_in,
)
from kvstore.journal.stuffing import (
    FIRST_MAX,
    LATER_MAX,
    PAIR,
    RADIX,
    StuffingError,
    find_pair,
    unstuff_prefix,
)
from kvstore.limits import JOURNAL_READ_BYTES

_HELD_BYTES_MIN = 4096
"""At least this many bytes are held until the next pair: they contain any record's head."""


class RawRecords:
    """A byte stream cut at some of its pairs: yields (offset, bytes) that make up the stream.

    A run of bytes begins with a pair and ends before one, or with the stream. Bytes in front of the
    first pair, and bytes behind a pair that are too many for one record, are runs of their own.
    `end` is how many bytes have been read, `ended` whether the stream has no more. Holds one piece
    and one record at a time, however far away the next pair is.
    """

    def __init__(self, stream: BinaryIO, *, start: int = 0) -> None:
        self._stream = stream
        self.end = start
        self.ended = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        held: list[bytes] = []  # read and not yielded; begins with a pair once `opened`
        held_at, size, opened = self.end, 0, False
        carried = b""  # an FE at the end of a piece: it may begin a pair
        while piece := self._stream.read(JOURNAL_READ_BYTES):
            self.end += len(piece)
            data = carried + piece
            carried = data[-1:] if data[-1] == PAIR[0] else b""
            data = data[: len(data) - len(carried)]
            if find_pair(data) >= 0:
                last = data.rfind(PAIR)
                run = b"".join((*held, data[:last]))
                yield from _runs(held_at, run, opened=opened)
                held_at += len(run)
                held, size, opened, data = [], 0, True, data[last:]
            if data:
                held.append(data)
                size += len(data)
            if size > max(JOURNAL_READ_BYTES, _HELD_BYTES_MIN) and not (
                opened and size <= _size_max(held)
            ):
                yield held_at, b"".join(held)
                held_at += size
                held, size, opened = [], 0, False
        self.ended = True
        yield from _runs(held_at, b"".join((*held, carried)), opened=opened)


def _runs(at: int, data: bytes, *, opened: bool) -> Iterator[tuple[int, bytes]]:
    """Bytes from offset `at` on. Bytes in front of the first pair are a run of their own."""
    first = 0 if opened else find_pair(data)
    if first > 0:
        yield at, data[:first]
        at, data = at + first, data[first:]
    if data:
        yield at, data


def _size_max(held: list[bytes]) -> int:
    """How many framed bytes the record at the beginning of `held` may have, by its head."""
    first = b""
    for piece in held:  # the head may have come in any number of short reads
        first += piece[: FIRST_MAX - len(first)]
        if len(first) == FIRST_MAX:
            break
    try:
        length = length_in(unstuff_prefix(first[len(PAIR) : FIRST_MAX]).decoded)
    except StuffingError:
        return 0
    return 0 if length is None else length + 2 * (length // LATER_MAX) + FIRST_MAX


def decode_run(
    data: bytes,
    at: int,
    *,
    base: int,
    expected: int,
    incarnation: int,
    synced: int,
    records: list[Record],
) -> tuple[int, int]:
    """Append the records from `at` on to `records`, as long as each is the expected one. `data`
    begins at byte `base` of its file. Returns where it stopped, and how many bytes of the file were
    synced by the newest mark on the way, at least `synced`."""
    end, last = len(data), len(data) - FRAME.size
    unpack, new, add = FRAME.unpack_from, tuple.__new__, records.append
    while at <= last:
        pair, size, check, checksum, found_in, ordinal, kind, length = unpack(data, at)
        payload_at = at + FRAME.size
        if size == PAYLOAD_AT + length and size <= FIRST_MAX:
            following = payload_at + length
            payload = data[payload_at:following]
        elif (
            size == FIRST_MAX
            and length > PAYLOAD_IN_FIRST
            and (following := payload_at + length + 2) <= end
            and data[(middle := payload_at + PAYLOAD_IN_FIRST)] + RADIX * data[middle + 1]
            == following - middle - 2
        ):
            payload = data[payload_at:middle] + data[middle + 2 : following]
        else:
            payload, following = _blocks(data, payload_at, size - PAYLOAD_AT, length)
        found = crc32(data[payload_at - HEAD_BYTES : payload_at])
        if (
            ordinal != expected
            or crc32(payload, found) != checksum
            or found != check
            or found_in != incarnation
            or pair != FRAME_PAIR
            or following > end
        ):
            break
        if kind < TYPE_RESERVED:
            add(new(Record, (ordinal, kind, payload, incarnation)))
            expected += 1
        elif (marked := _marked(kind, payload, at=base + at)) is not None:
            synced = max(synced, marked)
        else:
            break
        at = following
    return at, synced


def _marked(kind: int, payload: bytes, *, at: int) -> int | None:
    """The synced bytes that a mark at byte `at` tells, None for a record that is no sound mark."""
    try:
        return decode_mark(payload, at=at) if kind == TYPE_MARK else None
    except RecordError:
        return None


def _blocks(data: bytes, at: int, size: int, length: int) -> tuple[bytes, int]:
    """A payload of several blocks, `size` bytes of it in the first, and where the record ends.

    The end lies beyond `data` where the blocks do not add up to `length`: `FileScan` finds out why.
    """
    if not 0 <= size <= PAYLOAD_IN_FIRST:
        return b"", len(data) + 1
    parts = [data[at : at + size]]
    at, done, short = at + size, size, size < PAYLOAD_IN_FIRST
    while done < length and at + 1 < len(data) and max(data[at], data[at + 1]) < RADIX:
        size = data[at] + RADIX * data[at + 1]
        if short:
            parts.append(PAIR)
            done += len(PAIR)
        parts.append(data[at + 2 : at + 2 + size])
        at, done, short = at + 2 + size, done + size, size < LATER_MAX
    return (b"".join(parts), at) if done == length else (b"", len(data) + 1)
