"""Finds where the records of CSV end, and the first byte that makes text no CSV.

A piece of a file is read in one of five states, which carries on to the next piece:

    FIELD      at the start of a field
    UNQUOTED   in a field that began without a quote
    QUOTED     behind a quote that opened a field
    CLOSED     behind a quote that closes a field, or is the first of two that stand for one
    RETURN     behind a CR, which must be followed by LF

Invariants
1. A record ends in no other state than FIELD: an end in a quoted field belongs to the value.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kvstore.loops.contract import CLOSED, FIELD, QUOTED, RETURN, UNQUOTED

_LF, _CR = b"\n\r"


def scan_records(
    piece: bytes, state: int, delimiter: int, end: int, quote: int
) -> tuple[int, int, int]:
    """The state behind a piece, where the last record that ends in it does so (0 if none), and
    where the first byte stands that fits no record (-1 if all fit).

    `state` is that of the piece before. `end` is LF, also for CR LF, or CR; `quote` is -1 in text
    without quoting. With a wrong byte the state is the one in front of it.
    """
    at = whole = 0
    plain = _plain(delimiter, quote)
    while at < len(piece):
        if state == QUOTED:
            at = piece.find(quote, at) + 1
            if not at:
                return QUOTED, whole, -1
            state = CLOSED
            continue
        byte = piece[at]
        if state == CLOSED and byte == quote:
            state = QUOTED
        elif state == RETURN and byte != _LF:
            return state, whole, at
        elif byte == delimiter:
            state = FIELD
        elif byte == end:
            state, whole = FIELD, at + 1
        elif byte == _CR:
            state = RETURN
        elif byte == _LF or state == CLOSED:
            return state, whole, at
        elif byte == quote:
            if state != FIELD:
                return state, whole, at
            state = QUOTED
        else:
            found = plain.match(piece, at)
            assert found is not None
            state, at = UNQUOTED, found.end()
            continue
        at += 1
    return state, whole, -1


@lru_cache(maxsize=8)
def _plain(delimiter: int, quote: int) -> re.Pattern[bytes]:
    special = bytes([delimiter, _LF, _CR] + [quote] * (quote >= 0))
    return re.compile(b"[^" + re.escape(special) + b"]*")
