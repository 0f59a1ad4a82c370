"""The ends of records are those that a table of states finds byte by byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.loops.records import scan_records
from kvstore.loops.shapes import CLOSED, FIELD, QUOTED, RETURN, UNQUOTED

LF, CR, QUOTE, COMMA = b'\n\r",'

pieces = st.sampled_from(
    [b'"', b",", b"\n", b"\r\n", b"\r", b"a", b"\x00\xff", b"a" * 5000, b"a,\n" * 2000]
)
texts = st.lists(pieces, max_size=12).map(b"".join)


def scanned(text: bytes, state: int, end: int, quote: int) -> tuple[int, int, int]:
    """One byte at a time."""
    whole = 0
    for at, byte in enumerate(text):
        if state == QUOTED:
            state = CLOSED if byte == quote else QUOTED
        elif state == CLOSED and byte == quote:
            state = QUOTED
        elif state == RETURN and byte != LF:
            return state, whole, at
        elif byte == COMMA:
            state = FIELD
        elif byte == end:
            state, whole = FIELD, at + 1
        elif byte == CR:
            state = RETURN
        elif byte == LF or state == CLOSED or (byte == quote and state == UNQUOTED):
            return state, whole, at
        else:
            state = QUOTED if byte == quote else UNQUOTED
    return state, whole, -1


@given(texts, st.sampled_from([LF, CR]), st.sampled_from([QUOTE, -1]), st.integers(0, 9))
def test_records_end_where_one_byte_at_a_time_says(
    text: bytes, end: int, quote: int, cut: int
) -> None:
    state = FIELD
    for piece in (text[:cut], text[cut:]):
        if state == RETURN and end == CR:
            break
        wanted = scanned(piece, state, end, quote)
        assert scan_records(piece, state, COMMA, end, quote) == wanted
        if wanted[2] >= 0:
            break
        state = wanted[0]
