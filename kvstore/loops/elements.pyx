# cython: language_level=3, wraparound=False, initializedcheck=False, boundscheck=False
"""Keys of several columns, whole columns at a time: `kvstore.codec.tuples` has the bytes.

A column is described by its kind (`kvstore.loops.shapes`), the tag of its elements, whether its
elements are flipped, and its width in bytes, 0 if it varies.

Invariants
1. A buffer of a column is compared with the number of rows before its first byte is read.
2. No byte of a stored key is read behind the end of the key.
"""

include "shared.pxi"
include "buffers.pxi"
include "parts.pxi"

from kvstore.errors import CorruptionError


def encode_keys(bytes prefix not None, columns, Py_ssize_t count):
    """`count` keys that begin with `prefix`, as the two buffers of an Arrow binary array. None
    where one array cannot hold them."""
    cdef list held = []
    cdef Py_ssize_t many = len(columns), at, place, begin, size = PyBytes_GET_SIZE(prefix)
    cdef Source *sources = <Source *>malloc(max(many, 1) * sizeof(Source))
    cdef Text text
    cdef bytes offsets
    cdef int32_t *places
    text.size, text.room = 0, max(count * (size + 12 * many), 64)
    text.data = <unsigned char *>malloc(text.room)
    try:
        if sources is NULL or text.data is NULL:
            raise MemoryError
        for at in range(many):
            kind, tag, is_flipped, *buffers = columns[at]
            _open(&sources[at], buffers, count, held)
            sources[at].kind, sources[at].tag = kind, tag
            sources[at].mask = 255 if is_flipped else 0
            require_width(&sources[at])
        offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
        places = <int32_t *>PyBytes_AS_STRING(offsets)
        places[0] = 0
        for at in range(count):
            reserve(&text, size)
            memcpy(text.data + text.size, PyBytes_AS_STRING(prefix), size)
            text.size += size
            for place in range(many):
                begin = text.size
                lay_element(&text, &sources[place], at)
                if sources[place].mask:
                    for begin in range(begin, text.size):
                        text.data[begin] ^= 255
            if text.size > ARRAY_BYTES_MAX:
                return None
            places[at + 1] = <int32_t>text.size
        return offsets, PyBytes_FromStringAndSize(<char *>text.data, text.size)
    finally:
        free(sources)
        free(text.data)


cdef int require_width(Source *source) except -1:
    cdef int kind = source.kind
    if kind in (SIGNED, UNSIGNED, DOUBLE) and source.width == 8:
        return 0
    if kind in (FRAMED, WHOLE) and source.width == 0:
        return 0
    if kind == BOOLEAN and source.width == 1 or kind == FIXED and source.width > 0:
        return 0
    raise ValueError(f"kind {kind} does not go with width {source.width}")


cdef int lay_element(Text *text, Source *source, Py_ssize_t at) except -1:
    cdef const unsigned char *value
    cdef Py_ssize_t start, end, place
    cdef unsigned char *out
    cdef uint64_t number
    if is_null(source, at):
        reserve(text, 1)
        text.data[text.size] = NULL_TAG
        text.size += 1
        return 0
    if source.width:
        value = source.data + (source.offset + at) * source.width
        reserve(text, source.width + 1)
        out = text.data + text.size
        if source.kind == BOOLEAN:
            out[0] = TRUE_TAG if value[0] else FALSE_TAG
            text.size += 1
            return 0
        out[0] = source.tag
        text.size += source.width + 1
        if source.kind == FIXED:
            memcpy(out + 1, value, source.width)
            return 0
        memcpy(&number, value, 8)
        if source.kind == DOUBLE:
            number = ordered_double(number)
        elif source.kind == SIGNED or number < SIGN:
            number ^= SIGN
        else:
            out[0] = UNSIGNED_TAG
        put_big(out + 1, number)
        return 0
    bounds_of(source, at, &start, &end)
    value = source.data
    reserve(text, 2 * (end - start) + 3)
    out = text.data + text.size
    out[0] = source.tag
    out += 1
    if source.kind == WHOLE:
        memcpy(out, value + start, end - start)
        text.size += end - start + 1
        return 0
    if memchr(value + start, 0, end - start) is NULL:
        memcpy(out, value + start, end - start)
        out += end - start
    else:
        for place in range(start, end):
            out[0] = value[place]
            out += 1
            if not value[place]:
                out[0] = 255
                out += 1
    out[0], out[1] = TERMINATOR_0, TERMINATOR_1
    text.size = out + 2 - text.data
    return 0


def decode_keys(offsets, data, Py_ssize_t first, Py_ssize_t count, Py_ssize_t skip, columns,
                str where not None):
    """The columns at the beginning of the keys from `first` on in an Arrow binary array, behind
    `skip` bytes; and the offsets in `data` at which the last column ends in each key.

    Raises `CorruptionError` that names `where` and the key.
    """
    cdef _Buffer places = _Buffer(offsets), stored = _Buffer(data)
    cdef Py_ssize_t many = len(columns), at, place, here, end, width
    cdef const int32_t *bounds = <const int32_t *>places.data + first
    cdef Target *targets = <Target *>malloc(max(many, 1) * sizeof(Target))
    cdef Source *sources = <Source *>malloc(max(many, 1) * sizeof(Source))
    cdef bytes ends = PyBytes_FromStringAndSize(NULL, count * 4)
    cdef list result = []
    try:
        if targets is NULL or sources is NULL:
            raise MemoryError
        if first < 0 or skip < 0 or places.size < (first + count + 1) * 4:
            raise ValueError("keys have too few offsets")
        for at in range(count):
            if not 0 <= bounds[at] <= bounds[at + 1] <= stored.size:
                raise ValueError("the offsets of keys do not ascend within their bytes")
        width = bounds[count] - bounds[0] if count else 0
        for place in range(many):
            kind, tag, is_flipped, size = columns[place]
            sources[place].kind, sources[place].tag, sources[place].width = kind, tag, size
            sources[place].mask = 255 if is_flipped else 0
            require_width(&sources[place])
            targets[place].width, targets[place].filled = size, 0
            result.append(open_target(&targets[place], count))
            if not size:
                result[place][1] = PyBytes_FromStringAndSize(NULL, width)
                targets[place].data = <unsigned char *>PyBytes_AS_STRING(<bytes>result[place][1])
                targets[place].ends[0] = 0
        for at in range(count):
            here, end = bounds[at] + skip, bounds[at + 1]
            for place in range(many):
                here = take_element(
                    &targets[place], &sources[place], stored.data, here, end, at
                )
                if here < 0:
                    raise CorruptionError(
                        f"{where}, key {stored.data[bounds[at]:end].hex()}",
                        f"no key of its table: column {place} does not fit",
                    )
            (<int32_t *>PyBytes_AS_STRING(ends))[at] = <int32_t>here
        for place in range(many):
            if not targets[place].width:
                result[place][1] = (<bytes>result[place][1])[: targets[place].filled]
        return result, ends
    finally:
        free(targets)
        free(sources)


cdef Py_ssize_t take_element(
    Target *target,
    Source *source,
    const unsigned char *stored,
    Py_ssize_t here,
    Py_ssize_t end,
    Py_ssize_t at,
) noexcept:
    """Write the element at `here` to row `at` of a column. Returns where it ends, -1 where it is
    not of this column."""
    cdef unsigned char mask = source.mask, tag
    cdef uint64_t number
    cdef Py_ssize_t place
    if here >= end:
        return -1
    tag = stored[here] ^ mask
    here += 1
    if tag == NULL_TAG:
        target.valid[at >> 3] &= <unsigned char>~(1 << (at & 7))
        if target.width:
            memset(target.data + at * target.width, 0, target.width)
        else:
            target.ends[at + 1] = <int32_t>target.filled
        return here
    if source.kind == BOOLEAN:
        target.data[at] = tag == TRUE_TAG
        return here if tag == TRUE_TAG or tag == FALSE_TAG else -1
    if source.width:
        if here + source.width > end:
            return -1
        if source.kind == FIXED:
            for place in range(source.width):
                target.data[at * source.width + place] = stored[here + place] ^ mask
            return here + source.width if tag == source.tag else -1
        number = big_endian(stored + here)
        if mask:
            number = ~number
        if source.kind == DOUBLE:
            number = number ^ SIGN if number & SIGN else ~number
        elif source.kind == SIGNED:
            number ^= SIGN
        elif tag == INTEGER_TAG and number & SIGN:
            number ^= SIGN
        elif tag != UNSIGNED_TAG or not number & SIGN:
            return -1
        else:
            tag = source.tag
        memcpy(target.data + at * 8, &number, 8)
        return here + 8 if tag == source.tag else -1
    if tag != source.tag:
        return -1
    if source.kind == WHOLE:
        return take_decimal(target, stored, here, end, at, mask)
    return take_framed(target, stored, here, end, at, mask)


cdef Py_ssize_t take_framed(
    Target *target,
    const unsigned char *stored,
    Py_ssize_t here,
    Py_ssize_t end,
    Py_ssize_t at,
    unsigned char mask,
) noexcept:
    cdef unsigned char *out = target.data + target.filled
    cdef unsigned char byte
    while here < end:
        byte = stored[here] ^ mask
        if byte:
            out[0] = byte
            out += 1
            here += 1
            continue
        if here + 1 == end:
            return -1
        byte = stored[here + 1] ^ mask
        here += 2
        if byte == TERMINATOR_1:
            target.filled = out - target.data
            target.ends[at + 1] = <int32_t>target.filled
            return here
        if byte != 255:
            return -1
        out[0] = 0
        out += 1
    return -1


cdef Py_ssize_t take_decimal(
    Target *target,
    const unsigned char *stored,
    Py_ssize_t here,
    Py_ssize_t end,
    Py_ssize_t at,
    unsigned char mask,
) noexcept:
    cdef Py_ssize_t last = decimal_end(stored, here, end, mask)
    if last < 0:
        return -1
    for here in range(here, last):
        target.data[target.filled] = stored[here] ^ mask
        target.filled += 1
    target.ends[at + 1] = <int32_t>target.filled
    return last
