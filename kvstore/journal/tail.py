"""Torn tails: tells the remains of unsynced writes after a crash from records damaged later.

Unsynced records were never acknowledged and may be cut; damage is an error. A power cut leaves each
unsynced sector of a file in an older state or in the newest, in any combination, and the file at
any length that it had since the sync. An older sector of a file that only grows has zeros, or zeros
from the place where a later write began. So the journal ends at the first record that is not whole,
if

1. the record lost a sector: its bytes in one of its sectors are all zeros, or the file ends in it;
2. its bytes in front of the first such sector are a strict prefix of a valid record;
3. nothing says that it was synced: no mark behind it, no mark in front of it, no note in `LOCK`.
   Whole records behind it prove nothing, because their sectors may have arrived first.

Everything else is damage, because neither a writer nor an honest disk leaves it.

Invariant: no single flipped bit makes a whole record look torn, unless a sector of it is all zeros.
The head has its own check, and the framing cannot announce more bytes than the head says. (Tests
flip every bit.)
"""

from __future__ import annotations

from typing import BinaryIO

from kvstore.journal.records import (
    MARK_RAW_BYTES_MAX,
    PAYLOAD_AT,
    TYPE_MARK,
    RecordError,
    checksum_matches,
    decode,
    decode_mark,
    length_in,
)
from kvstore.journal.stuffing import PAIR, StuffingError, block_ends, unstuff, unstuff_prefix
from kvstore.limits import JOURNAL_READ_BYTES, JOURNAL_SECTOR_BYTES

_MARK_BODY_BYTES = bytes((PAYLOAD_AT + 8,))


def torn_at(raw: bytes, at: int, *, ends: bool) -> int | None:
    """Where in `raw` a torn tail begins by rules 1 and 2, None if `raw` is damaged.

    `raw` stands at byte `at` of its file and reaches from there to the next pair, or with `ends` to
    the end of the file. The answer is 0, or the length of the whole record that `raw` begins with.
    Costs a few passes over `raw`.
    """
    good = 0
    if raw.startswith(PAIR):
        good = _whole_record(raw[len(PAIR) :]) or 0
        good += len(PAIR) if good else 0
    lost = _lost_at(raw, good, at, ends=ends)
    if lost is None or good == len(raw):
        return None
    kept = raw[good:lost]
    if kept in (b"", PAIR[:1]):
        return good
    if good or not kept.startswith(PAIR):
        return None
    return 0 if _is_strict_prefix(kept[len(PAIR) :]) else None


def _lost_at(raw: bytes, begin: int, at: int, *, ends: bool) -> int | None:
    """Where the first sector begins, from `begin` on, whose bytes in `raw` are all zeros."""
    start = begin
    while start < len(raw):
        end = start + JOURNAL_SECTOR_BYTES - (at + start) % JOURNAL_SECTOR_BYTES
        if (end <= len(raw) or ends) and not raw[start:end].strip(b"\0"):
            return start
        start = end
    return len(raw) if ends else None


def synced_behind(stream: BinaryIO, at: int, *, identity: int) -> int:
    """The most synced bytes that a mark behind byte `at` tells, 0 where there is no mark.

    Costs one pass over the rest of the stream, one piece at a time. Leaves the stream anywhere.
    """
    stream.seek(at)
    synced, data, more = 0, b"", True
    while more:
        piece = stream.read(JOURNAL_READ_BYTES)
        more = bool(piece)
        data += piece
        pair = data.find(PAIR)
        while pair >= 0 and (pair + MARK_RAW_BYTES_MAX <= len(data) or not more):
            following = data.find(PAIR, pair + len(PAIR), pair + MARK_RAW_BYTES_MAX)
            end = pair + MARK_RAW_BYTES_MAX if following < 0 else following
            synced = max(synced, _synced_by(data[pair + len(PAIR) : end], at + pair, identity))
            pair = data.find(PAIR, pair + len(PAIR))
        keep = pair if pair >= 0 else max(0, len(data) - 1)
        at, data = at + keep, data[keep:]
    return synced


def _synced_by(raw: bytes, at: int, identity: int) -> int:
    if raw[:1] > _MARK_BODY_BYTES:
        return 0  # a larger record, as most are
    whole = _whole_record(raw)
    if not whole:
        return 0
    record, _ = decode(raw[:whole])
    if record.type != TYPE_MARK or record.incarnation >> 32 != identity:
        return 0
    try:
        return decode_mark(record.payload, at=at)
    except RecordError:
        return 0


def _is_strict_prefix(raw: bytes) -> bool:
    try:
        body, announced, implies_pair = unstuff_prefix(raw)
    except StuffingError:
        return False
    if len(body) < PAYLOAD_AT:
        return True  # no whole record is as short as this
    length = length_in(body)
    if length is None:
        return False
    missing = PAYLOAD_AT + length - len(body)
    if announced and missing:
        return announced <= missing
    if implies_pair and missing != 2:
        return missing > 2
    if missing == 2 and implies_pair:  # all but the last pair, and the empty block behind it
        return checksum_matches(body + PAIR)
    if announced:  # the first digit of that empty block is there
        return raw[-1] == 0 and not unstuff_prefix(raw[:-1]).announced and checksum_matches(body)
    return missing > 0


def _whole_record(raw: bytes) -> int | None:
    """How many bytes of `raw` the valid record at its beginning takes; None if there is none."""
    length: int | None = None
    for end, decoded in block_ends(raw):
        if decoded < PAYLOAD_AT:
            continue
        if length is None:
            length = length_in(unstuff(raw[:end]))
        if length is None or decoded > PAYLOAD_AT + length:
            return None
        if decoded == PAYLOAD_AT + length:
            return end if checksum_matches(unstuff(raw[:end])) else None
    return None
