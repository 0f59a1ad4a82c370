# Included by the modules that read and make rows and keys of tables: rows, elements, nested and single.

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

from kvstore.codec import tuples as _tuples

cdef int SIGNED = _contract.SIGNED, UNSIGNED = _contract.UNSIGNED, DOUBLE = _contract.DOUBLE
cdef int FRAMED = _contract.FRAMED, BOOLEAN = _contract.BOOLEAN, FIXED = _contract.FIXED
cdef int WHOLE = _contract.WHOLE
cdef unsigned char NULL_TAG = _tuples.NULL[0], FALSE_TAG = _tuples.FALSE[0]
cdef unsigned char TRUE_TAG = _tuples.TRUE[0], INTEGER_TAG = _tuples.INTEGER[0]
cdef unsigned char UNSIGNED_TAG = _tuples.UNSIGNED[0]
cdef uint64_t SIGN = <uint64_t>1 << 63
cdef uint64_t NAN_BITS = <uint64_t>0x7FF8 << 48
cdef int FORMAT = _contract.ROW_FORMAT
cdef enum:
    HEAD = 3


cdef struct Text:
    unsigned char *data
    Py_ssize_t size, room


cdef inline int reserve(Text *text, Py_ssize_t size) except -1:
    """Make room for `size` further bytes."""
    cdef void *moved
    if text.size + size > text.room:
        text.room = 2 * text.room + size
        moved = realloc(text.data, text.room)
        if moved is NULL:
            raise MemoryError
        text.data = <unsigned char *>moved
    return 0


cdef inline uint64_t ordered_double(uint64_t bits) noexcept:
    if bits << 1 > <uint64_t>0x7FF << 53:
        bits = NAN_BITS
    elif bits == SIGN:
        bits = 0
    return ~bits if bits & SIGN else bits ^ SIGN


cdef inline void put_big(unsigned char *out, uint64_t number) noexcept:
    cdef int at
    for at in range(8):
        out[at] = number >> (56 - 8 * at) & 255


cdef inline Py_ssize_t get_little(const unsigned char *data, int width) noexcept:
    cdef Py_ssize_t number = 0
    cdef int at
    for at in range(width):
        number |= <Py_ssize_t>data[at] << 8 * at
    return number


cdef inline Py_ssize_t decimal_end(
    const unsigned char *stored, Py_ssize_t here, Py_ssize_t end, unsigned char mask
) noexcept:
    """Where the decimal at `here` ends, -1 where there is none."""
    cdef unsigned char head, stop
    if here >= end:
        return -1
    head = stored[here] ^ mask
    if head == 0x80:
        return here + 1
    if head != 0xC0 and head != 0x40:
        return -1
    stop = 0 if head == 0xC0 else 255
    here += 3
    while here < end and stored[here] ^ mask != stop:
        here += 1
    return here + 1 if here < end else -1
