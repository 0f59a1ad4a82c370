"""Records of a journal: word stuffing, the header and checksum of a record, and a file cut into raw
records.

The pair `FE FD` starts each record and never occurs inside one, so a reader finds the next record
behind any damage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, NamedTuple, cast
from zlib import crc32

from kvstore.errors import FormatVersionError, UsageError
from kvstore.limits import JOURNAL_READ_BYTES, JOURNAL_RECORD_BYTES_MAX

# --------------------------------------------------------------------------------------------------
# Word stuffing: cuts byte strings into blocks, so that one byte pair can mark where each starts.
#
#     framed   := | FE FD | first block | later block ... |      nothing at all for empty data
#     first    := | size u8 0..252 | literals |
#     later    := | size 2 digits, little-endian, radix 253: 0..64008 | literals |
#
# Consistent overhead stuffing with a two-byte word, as Backtrace's recordio describes it. A block
# shorter than its limit implies the pair `FE FD` behind it; a block at its limit implies nothing.
# The pair that the last block implies is dropped. Data that ends in the pair ends with an explicit
# empty block `00 00`.
#
# Invariants
# 1. The pair never occurs inside a framed record: not in literals (it is cut out), not in digits
#    (they end at 252 = FC), not across a size and its literals (a size byte is neither FE nor FD).
# 2. So a reader that starts anywhere finds a record at the next pair.
# 3. Overhead is 3 bytes up to 252, 5 up to 64,260, then 2 more for each 64,008.
# 4. Cost: one scan for the pair and one copy. No loop runs over single bytes.
#
# The meaning of a record and its checksum stand further down.

PAIR = b"\xfe\xfd"
search_pair = re.compile(PAIR).search
RADIX = 0xFD
"""Digits run from 0 to 252, so that no digit can be a byte of the pair."""

FIRST_MAX = RADIX - 1
LATER_MAX = RADIX * RADIX - 1


class StuffingError(ValueError):
    """Bytes that no encoder wrote: `problem` at `offset` of the raw record (behind its pair)."""

    def __init__(self, problem: str, offset: int) -> None:
        super().__init__(f"{problem} at byte {offset} of the record")
        self.problem = problem
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Blocks:
    """The limits of blocks. Tests make them tiny, to reach every path; files use `BLOCKS`."""

    first_max: int = FIRST_MAX
    later_max: int = LATER_MAX


BLOCKS = Blocks()


def stuff(data: bytes, blocks: Blocks = BLOCKS) -> bytes:
    """Frame `data`, with the pair in front. Empty data becomes no bytes."""
    if not data:
        return b""
    parts: list[bytes | memoryview] = [PAIR]
    return _joined(parts, data, 0, blocks.first_max, blocks)


def stuff_behind(front: bytes, data: bytes) -> bytes:
    """`stuff(front + data)` without copying both into one buffer. The system takes such a large
    buffer back each time, which cost 750 us per MB in page faults.

    Neither `front` nor the seam may contain the pair. `data` is longer than a first block.
    """
    at = FIRST_MAX - len(front)
    if data.find(PAIR, 0, at) >= 0:
        return stuff(front + data)
    parts: list[bytes | memoryview] = [PAIR, _size(FIRST_MAX, first=True), front, data[:at]]
    return _joined(parts, data, at, LATER_MAX, BLOCKS)


def _joined(
    parts: list[bytes | memoryview], data: bytes, at: int, limit: int, blocks: Blocks
) -> bytes:
    """`parts`, and `data` from `at` on in blocks, of which the first has at most `limit`."""
    length = len(data)
    view = memoryview(data)
    pair = find_pair(data, at)
    while True:
        if 0 <= pair < at:
            pair = find_pair(data, at)  # the last pair was cut out, or ended a full block
        cut = 0 <= pair <= at + limit - 2
        end = pair if cut else min(at + limit, length)
        parts.append(_size(end - at, first=len(parts) == 1))
        parts.append(view[at:end])
        if not cut and (end == length or end - at < limit):
            return b"".join(parts)
        at, limit = (end + 2 if cut else end), blocks.later_max


def find_pair(data: bytes, at: int = 0) -> int:
    """Where the pair is next at or after `at`, or -1.

    Searching `FE` first passes over text at the speed of memory. Over random bytes a compiled
    pattern runs at 2.5 GB/s, `bytes.find` of two bytes at 1.1.
    """
    at = data.find(b"\xfe", at)
    match = search_pair(data, at) if at >= 0 else None
    return -1 if match is None else match.start()


def unstuff(raw: bytes, blocks: Blocks = BLOCKS) -> bytes:
    """Remove the framing from the bytes behind a pair. Raises `StuffingError`."""
    prefix = unstuff_prefix(raw, blocks)
    if prefix.announced:
        raise StuffingError("the record is cut off", len(raw))
    return prefix.decoded


class Prefix(NamedTuple):
    """The decoded beginning of a framed record.

    At least `announced` bytes must follow, 0 if the record can end here. `implies_pair`: if bytes
    follow, the pair comes first.
    """

    decoded: bytes
    announced: int
    implies_pair: bool


def unstuff_prefix(raw: bytes, blocks: Blocks = BLOCKS) -> Prefix:
    """Decode as far as `raw` goes. Raises `StuffingError` for an impossible size."""
    view = memoryview(raw)
    decoded = bytearray()  # a list would take 200 bytes for each two zeros, which are empty blocks
    end, short = 1, False
    for at, size, limit in _headers(raw, blocks):
        if short:
            decoded += PAIR
        decoded += view[at : at + size]
        end, short = at + size, size < limit
    if end < len(raw):  # one digit of the next size follows, so the pair before it is certain
        if short:
            decoded += PAIR
        return Prefix(bytes(decoded), 1, False)
    return Prefix(bytes(decoded), end - len(raw), short and end == len(raw))


def block_ends(raw: bytes, blocks: Blocks = BLOCKS) -> Iterator[tuple[int, int]]:
    """The end of each whole block: (bytes of `raw`, bytes decoded if the record ended here).

    Stops silently where the framing ends, so that a record can be found in front of bytes that do
    not belong to it.
    """
    decoded = 0
    try:
        for at, size, limit in _headers(raw, blocks):
            if at + size > len(raw):
                return
            yield at + size, decoded + size
            decoded += size + (2 if size < limit else 0)
    except StuffingError:
        return


def _headers(raw: bytes, blocks: Blocks) -> Iterator[tuple[int, int, int]]:
    """Each block's (offset of literals, size, limit); the last may reach beyond `raw`."""
    length = len(raw)
    if not raw:
        return
    at, size, limit = 1, raw[0], blocks.first_max
    while True:
        if size > limit:
            raise StuffingError(f"block size {size} is above {limit}", at)
        yield at, size, limit
        at += size
        if at >= length:
            return
        low, high = raw[at], raw[at + 1] if at + 1 < length else 0
        if low >= RADIX or high >= RADIX:
            raise StuffingError("a size digit is above 252", at)
        if at + 1 == length:
            return
        at, size, limit = at + 2, low + RADIX * high, blocks.later_max


def _size(size: int, *, first: bool) -> bytes:
    return bytes((size,)) if first else bytes((size % RADIX, size // RADIX))


# --------------------------------------------------------------------------------------------------
# Records of a journal: a payload with its place in the order, under a checksum.
#
#     record      := | head check u32 | checksum u32 | head | payload |  little-endian, then stuffed
#     head        := | incarnation u64 | ordinal u64 | type u8 | payload bytes u32 |
#     head check  := CRC-32 of head
#     checksum    := CRC-32 of head and payload: of everything after it
#     incarnation := | identity u32 | openings u32 |      identity in the upper half
#
#     type FE opens a file:   payload := | version u16 | kind u8 | content, ASCII |
#     type FF seals a file:   payload := | records u64 |
#     type FD marks a sync:   payload := | bytes u64 |    bytes of the file that were synced when
#                             this record was written
#     type FC is the note in `LOCK`:  payload := | live file's number u64 | its synced bytes u64 |
#     kind        := 0 journal, 1 snapshot
#
# The checksum is zlib's CRC-32 (reversed polynomial EDB88320). It is the only checksum of the
# standard library at hardware speed, measured at 3.3 GB/s, and detects every burst of up to 32
# bits. The head has its own check, so that its length can be trusted when the rest of the record is
# missing. This tells a write that was cut off from a record that was damaged later.
#
# Invariants
# 1. Ordinals count from 1 without a gap. An opening, a mark or a seal carries the ordinal of the
#    next record and does not use it up. A note carries the last ordinal that was synced.
# 2. The identity is drawn when a journal is created and is the same in all its files. `openings`
#    counts the writers, so incarnations never fall.
# 3. A record that is read is byte for byte a record that was written, with the same ordinal.
# 4. The layout of the opening record never changes, so that any release can name a format that it
#    refuses.

FORMAT_VERSION = 1
KIND_JOURNAL, KIND_SNAPSHOT = 0, 1
TYPE_RESERVED = 0xF0
"""Record types from here on are reserved for the journal itself."""

TYPE_OPEN, TYPE_SEAL, TYPE_MARK, TYPE_NOTE = 0xFE, 0xFF, 0xFD, 0xFC

_CHECKS = struct.Struct("<II")
_HEAD = struct.Struct("<QQBI")
_PREFIX = struct.Struct("<IIQQBI")
assert _PREFIX.size == _CHECKS.size + _HEAD.size
HEAD_AT = _CHECKS.size
HEAD_BYTES = _HEAD.size
PAYLOAD_AT = _PREFIX.size
_DIGITS = struct.Struct("BB")
_OPEN = struct.Struct("<HB")
_SEAL = struct.Struct("<Q")
_MARK = struct.Struct("<Q")
_NOTE = struct.Struct("<QQ")
MARK_RAW_BYTES_MAX = 64
"""At least the bytes of a framed mark: 40, and a few more where its head contains the pair."""
PAYLOAD_IN_FIRST = FIRST_MAX - PAYLOAD_AT
_PAYLOAD_IN_TWO = PAYLOAD_IN_FIRST + LATER_MAX
_ONE_BLOCK = tuple(PAIR + bytes((size,)) for size in range(FIRST_MAX + 1))
_TWO_BLOCKS = _ONE_BLOCK[FIRST_MAX]

_pack_head, _pack_checks, _pack_digits = _HEAD.pack, _CHECKS.pack, _DIGITS.pack


@lru_cache(maxsize=4096)
def _digits(size: int) -> bytes:
    """The encoded size of a second block. Cached, because lengths repeat."""
    high, low = divmod(size, RADIX)
    return _pack_digits(low, high)


unpack_prefix = _PREFIX.unpack_from

FRAME = struct.Struct("<HBIIQQBI")
"""Pair, size of the first block, and the fields before the payload, for reading in one step."""

FRAME_PAIR = int.from_bytes(PAIR, "little")


class Record(NamedTuple):
    """One record: `ordinal` within its journal (or snapshot), and the caller's `type`, 0..239."""

    ordinal: int
    type: int
    payload: bytes
    incarnation: int


class Opening(NamedTuple):
    """The first record of a file: its kind, and the meaning of its records."""

    kind: int
    content: str


class Note(NamedTuple):
    """A writer's note in `LOCK`: ordinals up to `last` were synced, and `bytes` bytes of the live
    file with this `number`."""

    incarnation: int
    last: int
    number: int
    bytes: int


class RecordError(ValueError):
    """The bytes of a record contradict each other."""


def encode(incarnation: int, ordinal: int, kind: int, payload: bytes) -> bytes:
    """The bytes of a record in a file, with its pair in front. Hot: see `encode_many`."""
    length = len(payload)
    head = _pack_head(incarnation, ordinal, kind, length)
    check = crc32(head)
    front = _pack_checks(check, crc32(payload, check)) + head
    if length <= PAYLOAD_IN_FIRST:
        body = front + payload
        if 0xFE not in body or search_pair(body) is None:
            return _ONE_BLOCK[PAYLOAD_AT + length] + body
    elif length <= _PAYLOAD_IN_TWO and (0xFE not in front or search_pair(front) is None):
        if 0xFE not in payload or search_pair(payload, payload.find(b"\xfe")) is None:
            digits = _digits(length - PAYLOAD_IN_FIRST)
            start, rest = payload[:PAYLOAD_IN_FIRST], payload[PAYLOAD_IN_FIRST:]
            return b"".join((_TWO_BLOCKS, front, start, digits, rest))
    elif length > _PAYLOAD_IN_TWO and (0xFE not in front or search_pair(front) is None):
        return stuff_behind(front, payload)
    return stuff(front + payload)


def encode_many(incarnation: int, ordinal: int, kind: int, payloads: Iterable[bytes]) -> bytes:
    """The bytes of records from `ordinal` on in a file, each with its pair in front.

    The hot loop of appending. A record that fits one or two blocks skips `stuff`, which would take
    three times as long. No pair lies across head and payload, because no length ends with FE.
    """
    frames: list[bytes] = []
    add, search, crc = frames.append, search_pair, crc32
    pack_head, pack_checks, one_block = _pack_head, _pack_checks, _ONE_BLOCK
    known, digits = -1, b""  # neighbours often have one length
    for payload in payloads:
        length = len(payload)
        head = pack_head(incarnation, ordinal, kind, length)
        check = crc(head)
        front = pack_checks(check, crc(payload, check)) + head
        ordinal += 1
        if length <= PAYLOAD_IN_FIRST:
            body = front + payload
            if 0xFE not in body or search(body) is None:
                add(one_block[PAYLOAD_AT + length])
                add(body)
                continue
        elif 0xFE in front and search(front) is not None:
            pass
        elif length > _PAYLOAD_IN_TWO:
            add(stuff_behind(front, payload))
            continue
        elif 0xFE not in payload or search(payload, payload.find(b"\xfe")) is None:
            if length != known:
                digits, known = _digits(length - PAYLOAD_IN_FIRST), length
            start, rest = payload[:PAYLOAD_IN_FIRST], payload[PAYLOAD_IN_FIRST:]
            frames += (_TWO_BLOCKS, front, start, digits, rest)
            continue
        add(stuff(front + payload))
    return b"".join(frames)


def decode(raw: bytes) -> tuple[Record, int]:
    """The record in the bytes behind a pair, and its checksum. Raises `RecordError`."""
    try:
        body = unstuff(raw)
    except StuffingError as error:
        raise RecordError(str(error)) from error
    if len(body) < PAYLOAD_AT:
        raise RecordError(f"{len(body)} bytes are less than a record's head")
    check, checksum, incarnation, ordinal, kind, length = unpack_prefix(body)
    found = crc32(body[HEAD_AT:PAYLOAD_AT])
    payload = body[PAYLOAD_AT:]
    if found != check:
        raise RecordError("the head's check does not match")
    if length != len(payload):
        raise RecordError(f"{len(payload)} bytes of payload, the head says {length}")
    if crc32(payload, found) != checksum:
        raise RecordError("the checksum does not match")
    return Record(ordinal, kind, payload, incarnation), checksum


def length_in(body: bytes) -> int | None:
    """The length of the payload, if the head's check matches, else None."""
    if len(body) < PAYLOAD_AT or crc32(body[HEAD_AT:PAYLOAD_AT]) != unpack_prefix(body)[0]:
        return None
    length: int = unpack_prefix(body)[5]
    return length


def checksum_matches(body: bytes) -> bool:
    """Whether the checksum of a whole body matches."""
    checksum: int = unpack_prefix(body)[1]
    return crc32(memoryview(body)[HEAD_AT:]) == checksum


def require_payload(payload: object, kind: int) -> bytes:
    """Check a payload and a record type that a caller passed. Raises `UsageError`."""
    if not isinstance(payload, bytes):
        found = type(payload).__name__
        raise UsageError(f"a payload must be bytes, not {found}", "encode it first")
    if len(payload) > JOURNAL_RECORD_BYTES_MAX:
        raise UsageError(
            f"a payload has {len(payload)} bytes, at most {JOURNAL_RECORD_BYTES_MAX} are written",
            "split it over several records",
        )
    if not 0 <= kind < TYPE_RESERVED:
        raise UsageError(
            f"record type {kind} is outside 0..{TYPE_RESERVED - 1}", "choose a number inside"
        )
    return payload


def require_payloads(payloads: Iterable[object], kind: int) -> list[bytes]:
    """`require_payload` for many payloads, in two passes of C if all are sound."""
    checked = list(payloads)
    if set(map(type, checked)) <= {bytes} and 0 <= kind < TYPE_RESERVED:
        plain = cast(list[bytes], checked)
        if max(map(len, plain), default=0) <= JOURNAL_RECORD_BYTES_MAX:
            return plain
    return [require_payload(payload, kind) for payload in checked]


# -- opening and sealing records --------------------------------------------------------------


def in_pieces(payloads: list[bytes]) -> Iterator[list[bytes]]:
    """Cut a list into pieces of about `JOURNAL_READ_BYTES`, to be written one by one."""
    if not payloads:
        return
    count = max(1, JOURNAL_READ_BYTES * len(payloads) // (sum(map(len, payloads)) + 1))
    for at in range(0, len(payloads), count):
        yield payloads[at : at + count]


def encode_opening(incarnation: int, ordinal: int, opening: Opening) -> bytes:
    """The opening record of a file. The first record of a caller in it will be `ordinal`."""
    payload = _OPEN.pack(FORMAT_VERSION, opening.kind) + opening.content.encode("ascii")
    return encode(incarnation, ordinal, TYPE_OPEN, payload)


def decode_opening(payload: bytes, *, path: str) -> Opening:
    """Read an opening record. Raises `FormatVersionError`, `RecordError`."""
    if len(payload) < _OPEN.size:
        raise RecordError("the opening record is too short")
    version, kind = _OPEN.unpack_from(payload)
    if version != FORMAT_VERSION:
        raise FormatVersionError(path, found=version, supported=FORMAT_VERSION)
    return Opening(kind, payload[_OPEN.size :].decode("ascii", "replace"))


def encode_seal(incarnation: int, ordinal: int, *, records: int) -> bytes:
    """The last record of a file with `records` records. `ordinal` is the next file's first."""
    return encode(incarnation, ordinal, TYPE_SEAL, _SEAL.pack(records))


def decode_seal(payload: bytes) -> int:
    """The number of records that a seal tells. Raises `RecordError`."""
    if len(payload) != _SEAL.size:
        raise RecordError("the seal has the wrong length")
    records: int = _SEAL.unpack(payload)[0]
    return records


# -- marks and notes --------------------------------------------------------------------------


def encode_mark(incarnation: int, ordinal: int, *, synced: int) -> bytes:
    """The mark in front of the record `ordinal`: `synced` bytes of its file were synced."""
    return encode(incarnation, ordinal, TYPE_MARK, _MARK.pack(synced))


def decode_mark(payload: bytes, *, at: int) -> int:
    """The synced bytes that the mark at byte `at` tells. Raises `RecordError`."""
    if len(payload) != _MARK.size:
        raise RecordError("the mark has the wrong length")
    synced: int = _MARK.unpack(payload)[0]
    if synced > at:
        raise RecordError(f"the mark counts {synced} synced bytes and stands at byte {at}")
    return synced


def encode_note(note: Note) -> bytes:
    """The bytes that a writer leaves in `LOCK`."""
    payload = _NOTE.pack(note.number, note.bytes)
    return encode(note.incarnation, note.last, TYPE_NOTE, payload)


def decode_note(data: bytes) -> Note | None:
    """The note in the bytes of `LOCK`; None if there is no note, or a crash left half of one."""
    if not data.startswith(PAIR):
        return None
    try:
        record, _ = decode(data[len(PAIR) :])
    except RecordError:
        return None
    if record.type != TYPE_NOTE or len(record.payload) != _NOTE.size:
        return None
    return Note(record.incarnation, record.ordinal, *_NOTE.unpack(record.payload))


# --------------------------------------------------------------------------------------------------
# A file as raw records: cut at its pairs, and decoded at full speed while every record is sound.
#
# Invariants
# 1. A short read is not the end of a stream: only an empty one is.
# 2. `decode_run` accepts a record only if its bytes, its checksums, its ordinal and its incarnation
#    are the expected ones. It judges nothing else, and never fails.
#
# `decode_run` is the hot loop of replay: 0.9 us for a record of 100 bytes. It steps from record to
# record by their lengths and handles the ordinary case. `FileScan` searches and judges all others.

_HELD_BYTES_MIN = 4096
"""At least this many bytes are held until the next pair: they contain any record's head."""


class RawRecords:
    """A byte stream cut at some of its pairs: yields (offset, bytes) that make up the stream.

    A run of bytes begins with a pair and ends before one, or with the stream. Bytes in front of the
    first pair, and bytes behind a pair that are too many for one record, are runs of their own.
    `end` is how many bytes have been read, `ended` whether the stream has no more. Holds one piece
    and one record at a time, however far away the next pair is.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.end = 0
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
