"""Torn tails: telling a last write that was cut off from a record that was damaged later.

A crash leaves a prefix of what was being written, or a file made longer whose new bytes never
arrived and read as zeros. Everything else is damage, because the writer never does it. The
difference matters: what was cut off was never acknowledged and may go, what was damaged was.

Invariants
1. A tail is torn only if it is a strict prefix of a valid record, or zeros only.
2. No single flipped bit of a whole record makes it look torn, as far as its head reaches and
   its length tells: the head has its own check, and the framing cannot announce more bytes
   than the head says. (tests flip every bit.)
"""

from __future__ import annotations

from kvstore.journal.records import PAYLOAD_AT, checksum_matches, length_in
from kvstore.journal.stuffing import PAIR, StuffingError, block_ends, unstuff, unstuff_prefix


def is_torn_start(lead: bytes) -> bool:
    """Whether bytes where a pair should be are what a cut-off write leaves."""
    return lead == PAIR[:1] or not lead.strip(b"\0")


def torn_at(raw: bytes) -> int | None:
    """Where the last bytes of a file, behind their pair, stop being whole; None if damaged.

    0 if not even the record they begin with is whole: then its pair goes as well. Costs a few
    passes over `raw`.
    """
    whole = _whole_record(raw)
    if whole is not None:
        return whole if is_torn_start(raw[whole:]) else None
    return 0 if _is_strict_prefix(raw) else None


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
