# cython: language_level=3, wraparound=False, initializedcheck=False, boundscheck=False
"""Rows of a table as values of the store, and back as Arrow buffers.

    row    := | head u8 | schema number u16 | nulls | fixed | ends | bytes |

    head   := 10 | w              the format, 1, in the upper half; w is 1, 2 or 4
    nulls  := one bit per column, from the lowest bit of the first byte on; 1 is a null
    fixed  := the values of fixed width, in the order of the columns; zeros for a null
    ends   := for each column of varying width: where its bytes end within `bytes`, in w bytes
    bytes  := the values of varying width, in the order of the columns

Integers are little-endian, as in Arrow. A row has the columns of the schema with this number,
without the columns of the key. A value of fixed width has the bytes of Arrow, a boolean has a byte
0 or 1. A value of a column is found without looking at the others.

Invariants
1. A row has exactly the bytes that its schema and its last end ask for.
2. Ends ascend.
3. A buffer of a column is compared with the number of rows before its first byte is read.
4. A number of a stored row is compared with the length of the row before it is used as an offset.
"""

include "shared.pxi"
include "buffers.pxi"
include "parts.pxi"

from kvstore.errors import CorruptionError, FormatVersionError


def encode_rows(int number, columns, Py_ssize_t count):
    """`count` rows of the schema `number` as the two buffers of an Arrow binary array. None where
    one array cannot hold them."""
    cdef list held = []
    cdef Py_ssize_t fixed = 0, variable = 0, many = len(columns), at, place, total, start, end
    cdef Py_ssize_t size, nulls
    cdef Source *sources = <Source *>malloc(max(many, 1) * sizeof(Source))
    cdef bytes offsets, data
    cdef int32_t *places
    cdef unsigned char *out
    try:
        if sources is NULL:
            raise MemoryError
        for at in range(many):
            _open(&sources[at], columns[at], count, held)
            fixed += sources[at].width
            variable += sources[at].width == 0
        nulls = (many + 7) // 8
        offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
        places = <int32_t *>PyBytes_AS_STRING(offsets)
        total = places[0] = 0
        for at in range(count):
            size = 0
            for place in range(many if variable else 0):
                if not sources[place].width and not is_null(&sources[place], at):
                    bounds_of(&sources[place], at, &start, &end)
                    size += end - start
            total += HEAD + nulls + fixed + variable * width_of(size) + size
            if total > ARRAY_BYTES_MAX:
                return None
            places[at + 1] = <int32_t>total
        data = PyBytes_FromStringAndSize(NULL, total)
        out = <unsigned char *>PyBytes_AS_STRING(data)
        for at in range(count):
            lay_row(sources, many, at, number, fixed, variable, out + places[at],
                    places[at + 1] - places[at])
        return offsets, data
    finally:
        free(sources)


cdef inline int width_of(Py_ssize_t size) noexcept:
    """The bytes of an offset within `size` bytes."""
    return 1 if size < 256 else 2 if size < 65536 else 4


cdef void lay_row(
    Source *sources,
    Py_ssize_t many,
    Py_ssize_t at,
    int number,
    Py_ssize_t fixed,
    Py_ssize_t variable,
    unsigned char *out,
    Py_ssize_t size,
) noexcept:
    cdef Py_ssize_t nulls = (many + 7) // 8, place, start, filled = 0
    cdef Py_ssize_t rest = size - HEAD - nulls - fixed
    cdef int width = 1
    cdef unsigned char *body = out + HEAD + nulls
    cdef unsigned char *ends = body + fixed
    cdef unsigned char *tail
    cdef Source *source
    if rest - variable >= 256:
        width = 2 if rest - 2 * variable < 65536 else 4
    tail = ends + variable * width
    out[0] = <unsigned char>(FORMAT << 4 | width)
    out[1], out[2] = <unsigned char>(number & 255), <unsigned char>(number >> 8)
    memset(out + HEAD, 0, nulls)
    for place in range(many):
        source = &sources[place]
        if is_null(source, at):
            out[HEAD + (place >> 3)] |= <unsigned char>(1 << (place & 7))
            memset(body, 0, source.width)
        elif source.width == 8:
            memcpy(body, source.data + (source.offset + at) * 8, 8)
        elif source.width:
            memcpy(body, source.data + (source.offset + at) * source.width, source.width)
        else:
            start = source.ends[source.offset + at]
            size = source.ends[source.offset + at + 1] - start
            memcpy(tail + filled, source.data + start, size)
            filled += size
        body += source.width
        if not source.width:
            put_little(ends, filled, width)
            ends += width


cdef inline void put_little(unsigned char *out, Py_ssize_t number, int width) noexcept:
    cdef int at
    for at in range(width):
        out[at] = number >> 8 * at & 255


def decode_rows(offsets, data, Py_ssize_t first, Py_ssize_t count, int number, widths, wanted,
                str where not None):
    """The columns `wanted`, by place, of the rows from `first` on in an Arrow binary array. All
    rows have the schema `number`, whose columns have these `widths`, 0 where it varies.

    Raises `CorruptionError` and `FormatVersionError` that name `where` and the row. Columns that
    are not wanted are not read.
    """
    cdef _Buffer places = _Buffer(offsets), stored = _Buffer(data)
    cdef Py_ssize_t many = len(widths), kept = len(wanted), fixed = 0, variable = 0, at, index
    cdef Py_ssize_t start, end
    cdef const int32_t *bounds = <const int32_t *>places.data + first
    cdef Target *targets = <Target *>malloc(max(kept, 1) * sizeof(Target))
    cdef list result = [], layout = []
    if targets is NULL:
        raise MemoryError
    try:
        if first < 0 or places.size < (first + count + 1) * 4:
            raise ValueError("rows have too few offsets")
        for width in widths:
            layout.append(fixed if width else variable)
            fixed += width
            variable += width == 0
        for at in range(kept):
            index = wanted[at]
            targets[at].index, targets[at].width = index, widths[index]
            targets[at].place, targets[at].filled = layout[index], 0
            result.append(open_target(&targets[at], count))
        for at in range(count):
            start, end = bounds[at], bounds[at + 1]
            if not 0 <= start <= end <= stored.size:
                raise ValueError("the offsets of rows do not ascend within their bytes")
            check_row(stored.data + start, end - start, many, fixed, variable, number, where, at)
        for at in range(kept):
            if not targets[at].width:
                targets[at].ends[0] = 0
                size_target(&targets[at], stored.data, bounds, count, many, fixed, variable, where)
                result[at][1] = PyBytes_FromStringAndSize(NULL, targets[at].filled)
                targets[at].data = <unsigned char *>PyBytes_AS_STRING(<bytes>result[at][1])
            fill_target(&targets[at], stored.data, bounds, count, many, fixed, variable)
        return result
    finally:
        free(targets)


cdef int check_row(
    const unsigned char *row,
    Py_ssize_t size,
    Py_ssize_t many,
    Py_ssize_t fixed,
    Py_ssize_t variable,
    int number,
    str where,
    Py_ssize_t at,
) except -1:
    cdef Py_ssize_t head = HEAD + (many + 7) // 8 + fixed, last = 0
    cdef int width
    if size < HEAD:
        raise CorruptionError(f"{where}, row {at}", f"{size} bytes are no row")
    if row[0] >> 4 != FORMAT:
        raise FormatVersionError(f"{where}, row {at}", found=row[0] >> 4, supported=FORMAT)
    width = row[0] & 15
    if (row[1] | row[2] << 8) != number or width not in (1, 2, 4):
        raise CorruptionError(f"{where}, row {at}", f"its head is {row[:HEAD].hex()}")
    if size >= head + variable * width:
        if variable:
            last = get_little(row + head + (variable - 1) * width, width)
        if head + variable * width + last == size:
            return 0
    raise CorruptionError(f"{where}, row {at}", f"its {size} bytes do not fit its schema")


cdef int size_target(
    Target *target,
    const unsigned char *stored,
    const int32_t *bounds,
    Py_ssize_t count,
    Py_ssize_t many,
    Py_ssize_t fixed,
    Py_ssize_t variable,
    str where,
) except -1:
    """Lay the offsets of a column of variable length."""
    cdef Py_ssize_t head = HEAD + (many + 7) // 8 + fixed, at, start, end, total = 0
    cdef const unsigned char *row
    cdef int width
    for at in range(count):
        row = stored + bounds[at]
        width = row[0] & 15
        end = get_little(row + head + target.place * width, width)
        start = get_little(row + head + (target.place - 1) * width, width) if target.place else 0
        if start > end or head + variable * width + end > bounds[at + 1] - bounds[at]:
            raise CorruptionError(f"{where}, row {at}", "its offsets do not ascend")
        total += end - start
        if total > ARRAY_BYTES_MAX:
            raise OverflowError("the values of a column have 2 GiB")
        target.ends[at + 1] = <int32_t>total
    target.filled = total
    return 0


cdef void fill_target(
    Target *target,
    const unsigned char *stored,
    const int32_t *bounds,
    Py_ssize_t count,
    Py_ssize_t many,
    Py_ssize_t fixed,
    Py_ssize_t variable,
) noexcept:
    cdef Py_ssize_t body = HEAD + (many + 7) // 8, at, start, size, byte = target.index >> 3
    cdef unsigned char bit = <unsigned char>(1 << (target.index & 7))
    cdef const unsigned char *row
    cdef int width
    for at in range(count):
        row = stored + bounds[at]
        if row[HEAD + byte] & bit:
            target.valid[at >> 3] &= <unsigned char>~(1 << (at & 7))
        if target.width == 8:
            memcpy(target.data + at * 8, row + body + target.place, 8)
        elif target.width:
            memcpy(target.data + at * target.width, row + body + target.place, target.width)
        else:
            width = row[0] & 15
            size = target.ends[at + 1] - target.ends[at]
            start = 0
            if target.place:
                start = get_little(row + body + fixed + (target.place - 1) * width, width)
            memcpy(
                target.data + target.ends[at], row + body + fixed + variable * width + start, size
            )
