"""Records of a journal: a payload with its place in the order, under a checksum.

    record      := | head check u32 | checksum u32 | head | payload |   little-endian, then stuffed
    head        := | incarnation u64 | ordinal u64 | type u8 | payload bytes u32 |
    head check  := CRC-32 of head
    checksum    := CRC-32 of head and payload: of everything after it
    incarnation := | identity u32 | openings u32 |      identity in the upper half

    type FE opens a file:   payload := | version u16 | kind u8 | content, ASCII |
    type FF seals a file:   payload := | records u64 |
    type FD marks a sync:   payload := | bytes u64 |        bytes of the file that were synced when
                            this record was written
    type FC is the note in `LOCK`:  payload := | live file's number u64 | its synced bytes u64 |
    kind        := 0 journal, 1 snapshot

The checksum is zlib's CRC-32 (reversed polynomial EDB88320). It is the only checksum of the
standard library at hardware speed, measured at 3.3 GB/s, and detects every burst of up to 32 bits.
The head has its own check, so that its length can be trusted when the rest of the record is
missing. This tells a write that was cut off from a record that was damaged later.

Invariants
1. Ordinals count from 1 without a gap. An opening, a mark or a seal carries the ordinal of the next
   record and does not use it up. A note carries the last ordinal that was synced.
2. The identity is drawn when a journal is created and is the same in all its files. `openings`
   counts the writers, so incarnations never fall.
3. A record that is read is byte for byte a record that was written, with the same ordinal.
4. The layout of the opening record never changes, so that any release can name a format that it
   refuses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, cast
from zlib import crc32

from kvstore.errors import FormatVersionError, UsageError
from kvstore.journal.stuffing import (
    FIRST_MAX,
    LATER_MAX,
    PAIR,
    RADIX,
    StuffingError,
    search_pair,
    stuff,
    stuff_behind,
    unstuff,
)
from kvstore.limits import JOURNAL_READ_BYTES, JOURNAL_RECORD_BYTES_MAX

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
