# cython: language_level=3, wraparound=False, boundscheck=False, initializedcheck=False
"""Finds where the records of CSV end, and the first byte that makes text no CSV.

A piece of a file is read in one of five states, which carries on to the next piece:

    FIELD      at the start of a field
    UNQUOTED   in a field that began without a quote
    QUOTED     behind a quote that opened a field
    CLOSED     behind a quote that closes a field, or is the first of two that stand for one
    RETURN     behind a CR, which must be followed by LF

Invariants
1. A record ends in no other state than FIELD: an end in a quoted field belongs to the value.
2. No byte outside the piece is read.
"""

include "shared.pxi"

cdef enum:
    WINDOW = 4096

cdef int FIELD = _contract.FIELD, UNQUOTED = _contract.UNQUOTED, QUOTED = _contract.QUOTED
cdef int CLOSED = _contract.CLOSED, RETURN = _contract.RETURN


def scan_records(bytes piece not None, int state, int delimiter, int end, int quote):
    """The state behind a piece, where the last record that ends in it does so (0 if none), and
    where the first byte stands that fits no record (-1 if all fit).

    `state` is that of the piece before. `end` is LF, also for CR LF, or CR; `quote` is -1 in text
    without quoting. With a wrong byte the state is the one in front of it.
    """
    cdef const unsigned char *data = <const unsigned char *>PyBytes_AS_STRING(piece)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(piece), whole = 0, wrong
    with nogil:
        wrong = _scan(data, size, &state, delimiter, end, quote, &whole)
    return state, whole, wrong


cdef Py_ssize_t _scan(
    const unsigned char *data, Py_ssize_t size, int *state_, int delimiter, int end, int quote,
    Py_ssize_t *whole,
) noexcept nogil:
    cdef Py_ssize_t at = 0
    cdef int byte, state = state_[0], field = FIELD, unquoted = UNQUOTED, quoted = QUOTED
    cdef int closed = CLOSED, returned = RETURN
    cdef int other = 13 if end == 10 else 10
    cdef Py_ssize_t window = 0, upto
    cdef const unsigned char *found
    while at < size:
        if at >= window and (state == field or state == unquoted):
            # Without quotes and other ends, the bytes between need no look: 0.1 ns each, not 1.3.
            window = at + WINDOW
            if window <= size and memchr(data + at, other, WINDOW) is NULL and (
                quote < 0 or memchr(data + at, quote, WINDOW) is NULL
            ):
                upto = window
                while upto > at and data[upto - 1] != end:
                    upto -= 1
                if upto > at:
                    whole[0] = upto
                at = window
                byte = data[at - 1]
                state = field if byte == delimiter or byte == end else unquoted
                continue
        if state == quoted:
            found = <const unsigned char *>memchr(data + at, quote, size - at)
            if found is NULL:
                break
            at = found - data + 1
            state = closed
            continue
        byte = data[at]
        if state == closed and byte == quote:
            state = quoted
        elif state == returned and byte != 10:
            state_[0] = state
            return at
        elif byte == delimiter:
            state = field
        elif byte == end:
            state = field
            whole[0] = at + 1
        elif byte == 13:
            state = returned
        elif byte == 10 or state == closed or (byte == quote and state != field):
            state_[0] = state
            return at
        elif byte == quote:
            state = quoted
        else:
            state = unquoted
            at += 1
            while at < size:
                byte = data[at]
                if byte == delimiter or byte == 10 or byte == 13 or byte == quote:
                    break
                at += 1
            continue
        at += 1
    state_[0] = state
    return -1
