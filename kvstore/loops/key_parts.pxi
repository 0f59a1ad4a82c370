# Included by single: the columns of a key, and where their elements end in a stored key.

cdef struct Part:
    int kind, way               # of a column of a key
    unsigned char tag, mask
    Py_ssize_t width
    int64_t least, most
    bint is_wanted


cdef bytes unframed(
    const unsigned char *data, Py_ssize_t here, Py_ssize_t end, unsigned char mask
):
    """The bytes of a frame, whose zeros are followed by an escape."""
    cdef bytes cell = PyBytes_FromStringAndSize(NULL, end - here)
    cdef unsigned char *out = <unsigned char *>PyBytes_AS_STRING(cell)
    cdef Py_ssize_t size = 0
    while here < end:
        out[size] = data[here] ^ mask
        here += 1 if out[size] else 2
        size += 1
    return cell[:size]


cdef int set_part(Part *part, kind, tag, is_flipped, width) except -1:
    part.kind, part.tag, part.width = kind, tag, width
    part.mask = 255 if is_flipped else 0
    part.way, part.is_wanted = STORED, False
    part.least, part.most = 0, 0
    if part.kind == FIXED and part.width <= 0:
        raise ValueError("a column of fixed values has a width")
    return 0


cdef Py_ssize_t element_end(
    Part *part, const unsigned char *data, Py_ssize_t here, Py_ssize_t size
) noexcept:
    """Where the element at `here` ends, -1 where it is not of this column."""
    cdef unsigned char mask = part.mask, tag, byte, stop
    cdef bint is_large
    if here >= size:
        return -1
    tag = data[here] ^ mask
    here += 1
    if tag == NULL_TAG:
        return here
    if part.kind == BOOLEAN:
        return here if tag == TRUE_TAG or tag == FALSE_TAG else -1
    if part.kind == FIXED:
        return here + part.width if tag == part.tag and here + part.width <= size else -1
    if part.kind == UNSIGNED:
        if here + 8 > size:
            return -1
        is_large = (data[here] ^ mask) >> 7
        return here + 8 if is_large and (tag == part.tag or tag == UNSIGNED_TAG) else -1
    if tag != part.tag:
        return -1
    if part.kind == SIGNED or part.kind == DOUBLE:
        return here + 8 if here + 8 <= size else -1
    if part.kind == WHOLE:
        return decimal_end(data, here, size, mask)
    while here + 1 < size:
        if data[here] ^ mask:
            here += 1
            continue
        byte = data[here + 1] ^ mask
        here += 2
        if byte == TERMINATOR_1:
            return here
        if byte != 255:
            return -1
    return -1
