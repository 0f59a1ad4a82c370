# cython: language_level=3, wraparound=False, initializedcheck=False, boundscheck=False
"""Lists, structs and maps as the bytes of one value of a row, and back as Arrow buffers.
`kvstore.tables.nested` has the bytes.

A type is a tree of nodes, laid out with each node before its children:

    FIXED     a value of `width` bytes
    VARYING   bytes
    LIST      any number of values of its child
    SLOTS     `width` values of its child
    FIELDS    a value of each of its children

Invariants
1. A number of stored bytes is compared with the bytes that are left before it is used.
2. One value of a row makes at most `most` values of its children.
3. An offset of a column is compared with the length of its child before it is used.
4. Nothing below a null is read, and nothing is stored of it.
"""

include "shared.pxi"
include "buffers.pxi"
include "parts.pxi"

from kvstore.errors import CorruptionError

cdef enum:
    FIXED_NODE = 0      # the order of `kvstore.loops.shapes`
    VARYING_NODE = 1
    LIST_NODE = 2
    SLOTS_NODE = 3
    FIELDS_NODE = 4
    OFFSET_MAX = 0x7FFFFFFF


cdef struct Node:
    int kind, after             # the place behind the node and its children
    bint is_nullable
    Py_ssize_t width
    # the column that is encoded
    Py_ssize_t offset, length, size, base
    const unsigned char *valid
    const unsigned char *bytes_
    const unsigned char *ends
    int end_width
    # the column that is made
    Py_ssize_t count
    Text marks, made, places    # a byte for each value, if one is null; values; offsets


cdef Node *open_nodes(shape) except NULL:
    """The nodes of a type. Each item of `shape` has kind, width, nullability and the number of
    nodes in all below it."""
    cdef Py_ssize_t at, many = len(shape)
    cdef Node *nodes = <Node *>calloc(max(many, 1), sizeof(Node))
    if nodes is NULL:
        raise MemoryError
    try:
        for at, (kind, width, is_nullable, below) in enumerate(shape):
            if kind not in (0, 1, 2, 3, 4) or width < (kind == 0) or not 0 <= below < many - at:
                raise ValueError("a node is none")
            nodes[at].kind, nodes[at].width, nodes[at].is_nullable = kind, width, is_nullable
            nodes[at].after = at + 1 + below
        require_tree(nodes, many)
    except BaseException:
        free(nodes)
        raise
    return nodes


cdef int require_tree(Node *nodes, Py_ssize_t many) except -1:
    """Raise `ValueError` unless each node has the children that its kind has."""
    cdef Py_ssize_t at, number
    cdef int child
    if not many or nodes[0].after != many:
        raise ValueError("the nodes are no tree")
    for at in range(many):
        child, number = at + 1, 0
        while child < nodes[at].after:
            child = nodes[child].after
            number += 1
        if nodes[at].kind == FIELDS_NODE:
            number = number > 0
        elif nodes[at].kind <= VARYING_NODE:
            number += 1
        if child != nodes[at].after or number != 1:
            raise ValueError("the nodes are no tree")
    return 0


cdef void close_nodes(Node *nodes, Py_ssize_t many) noexcept:
    cdef Py_ssize_t at
    for at in range(many):
        free(nodes[at].marks.data)
        free(nodes[at].made.data)
        free(nodes[at].places.data)
    free(nodes)


cdef inline int add(Text *text, const unsigned char *data, Py_ssize_t size) except -1:
    if not size:  # there may be no buffer yet
        return 0
    reserve(text, size)
    memcpy(text.data + text.size, data, size)
    text.size += size
    return 0


cdef inline int add_byte(Text *text, unsigned char byte) except -1:
    reserve(text, 1)
    text.data[text.size] = byte
    text.size += 1
    return 0


cdef inline int add_number(Text *text, uint64_t number) except -1:
    while number >= 128:
        add_byte(text, <unsigned char>(number & 127 | 128))
        number >>= 7
    return add_byte(text, <unsigned char>number)


# -- from columns to bytes


def encode_nested(shape, columns, Py_ssize_t count, Py_ssize_t most):
    """The `count` values of the column of the first node as the two buffers of an Arrow
    binary array: offsets and bytes. A null has no bytes. None where one array cannot hold them.

    The child of a list begins with the value at the list's `base`. Raises `OverflowError` with the number of the first
    row that has more than `most` values below it.
    """
    cdef Py_ssize_t many = len(shape), at, left
    cdef Node *nodes = open_nodes(shape)
    cdef list held = []
    cdef bytes offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
    cdef int32_t *places = <int32_t *>PyBytes_AS_STRING(offsets)
    cdef Text out
    memset(&out, 0, sizeof(Text))
    try:
        if len(columns) != many:
            raise ValueError("columns and nodes differ in number")
        for at in range(many):
            open_column(&nodes[at], columns[at], held)
        if nodes[0].length < count:
            raise ValueError("a column has too few rows")
        places[0] = 0
        for at in range(count):
            if at % 4096 == 4095:
                let_others_run()
            if not is_empty(&nodes[0], at):
                left = most
                put_value(nodes, 0, at, &out, &left)
                if left < 0:
                    raise OverflowError(at)
            if out.size > ARRAY_BYTES_MAX:
                return None
            places[at + 1] = <int32_t>out.size
        return offsets, PyBytes_FromStringAndSize(<char *>out.data, out.size)
    finally:
        free(out.data)
        close_nodes(nodes, many)


cdef object let_others_run = _contract.let_others_run


cdef int open_column(Node *node, column, list held) except -1:
    cdef _Buffer valid = _Buffer(column[0]), data = _Buffer(column[2]), ends = _Buffer(column[3])
    cdef Py_ssize_t last
    held += (valid, data, ends)
    node.offset, node.end_width, node.length, node.base = column[1], column[4], column[5], column[6]
    node.valid, node.bytes_, node.size, node.ends = valid.data, data.data, data.size, ends.data
    last = node.offset + node.length
    if node.offset < 0 or node.length < 0 or (valid.data and valid.size * 8 < last):
        raise ValueError("a column has too few bits of validity")
    if node.kind == FIXED_NODE and node.length and data.size < last * node.width:
        raise ValueError("a column has too few bytes")
    if node.kind == VARYING_NODE or node.kind == LIST_NODE:
        if node.end_width != 4 and node.end_width != 8:
            raise ValueError("offsets have 4 or 8 bytes")
        if node.length and ends.size < (last + 1) * node.end_width:
            raise ValueError("a column has too few offsets")
    return 0


cdef inline bint is_empty(Node *node, Py_ssize_t at) noexcept:
    """Whether a value is null."""
    at += node.offset
    return node.valid is not NULL and not node.valid[at >> 3] >> (at & 7) & 1


cdef inline Py_ssize_t end_at(Node *node, Py_ssize_t at) noexcept:
    if node.end_width == 4:
        return (<const int32_t *>node.ends)[node.offset + at]
    return <Py_ssize_t>(<const int64_t *>node.ends)[node.offset + at]


cdef int put_value(Node *nodes, int place, Py_ssize_t at, Text *out, Py_ssize_t *left) except -1:
    """Add the value of row `at`, which is not null."""
    cdef Node *node = &nodes[place]
    cdef Py_ssize_t start, end
    cdef int child = place + 1, number = 0
    if node.kind == FIXED_NODE:
        return add(out, node.bytes_ + (node.offset + at) * node.width, node.width)
    if node.kind == SLOTS_NODE:
        start = at * node.width
        return put_values(nodes, place + 1, start, node.width, out, left, False)
    if node.kind == FIELDS_NODE:
        start = out.size
        while child < node.after:
            if nodes[child].length <= at:
                raise ValueError("a column has too few rows")
            if not number & 7:
                add_byte(out, 0)
            number += 1
            child = nodes[child].after
        child, number = place + 1, 0
        while child < node.after:
            if is_empty(&nodes[child], at):
                require_nullable(&nodes[child])
                left[0] -= room_of(nodes, child)
                out.data[start + (number >> 3)] |= <unsigned char>(1 << (number & 7))
            else:
                put_value(nodes, child, at, out, left)
            number += 1
            child = nodes[child].after
        return 0
    start, end = end_at(node, at), end_at(node, at + 1)
    if node.kind == LIST_NODE:
        if start < 0 or start > end:
            raise ValueError("the offsets of a column do not ascend")
        start -= node.base
        end -= node.base
        return put_values(nodes, place + 1, start, end - start, out, left, True)
    if not 0 <= start <= end <= node.size:
        raise ValueError("the offsets of a column do not ascend within its bytes")
    add_number(out, end - start)
    return add(out, node.bytes_ + start, end - start)


cdef int put_values(
    Node *nodes,
    int place,
    Py_ssize_t start,
    Py_ssize_t count,
    Text *out,
    Py_ssize_t *left,
    bint is_counted,
) except -1:
    """Add the values of the rows from `start` on. Adds nothing more once too many are added."""
    cdef Node *node = &nodes[place]
    cdef Py_ssize_t at, nulls = 0, bits
    if start < 0 or count > node.length or start > node.length - count:
        raise ValueError("the offsets of a column lead out of its values")
    left[0] -= count
    if left[0] < 0:
        return 0
    if node.valid is not NULL:
        for at in range(start, start + count):
            nulls += is_empty(node, at)
    if nulls:
        require_nullable(node)
    if is_counted:
        add_number(out, <uint64_t>count << 1 | (nulls > 0))
    else:
        add_byte(out, nulls > 0)
    if nulls:
        bits = out.size
        reserve(out, (count + 7) // 8)
        memset(out.data + bits, 0, (count + 7) // 8)
        out.size += (count + 7) // 8
        for at in range(count):
            if is_empty(node, start + at):
                out.data[bits + (at >> 3)] |= <unsigned char>(1 << (at & 7))
                left[0] -= room_of(nodes, place)
    elif node.kind == FIXED_NODE:
        if not count:
            return 0
        return add(out, node.bytes_ + (node.offset + start) * node.width, count * node.width)
    for at in range(start, start + count):
        if left[0] < 0:
            return 0
        if not is_empty(node, at):
            put_value(nodes, place, at, out, left)
    return 0


cdef int require_nullable(Node *node) except -1:
    if not node.is_nullable:
        raise ValueError("a value is null, and its type takes no null")
    return 0


cdef Py_ssize_t room_of(Node *nodes, int place) noexcept:
    """The values that Arrow keeps below a null."""
    cdef Node *node = &nodes[place]
    cdef Py_ssize_t found = 0
    cdef int child = place + 1
    if node.kind == SLOTS_NODE:
        return node.width * (1 + room_of(nodes, child))
    if node.kind == FIELDS_NODE:
        while child < node.after:
            found += room_of(nodes, child)
            child = nodes[child].after
    return found


# -- from bytes to columns


cdef struct Stored:
    const unsigned char *data
    Py_ssize_t here, end, left


def decode_nested(
    shape, valid, offsets, data, Py_ssize_t first, Py_ssize_t count, Py_ssize_t most,
    str where not None,
):
    """The columns of a type of the values from `first` on of an Arrow binary array: for each node
    the number of values, a byte for each that is 0 for a null (None if none is), bytes, and
    offsets of 32 bits.

    Raises `CorruptionError` that names `where` and the row.
    """
    cdef _Buffer bits = _Buffer(valid), places = _Buffer(offsets), stored = _Buffer(data)
    cdef const int32_t *bounds = <const int32_t *>places.data + first
    cdef Py_ssize_t many = len(shape), at, row
    cdef Node *nodes = open_nodes(shape)
    cdef Stored value
    try:
        if first < 0 or places.size < (first + count + 1) * 4:
            raise ValueError("values have too few offsets")
        if bits.data is not NULL and bits.size * 8 < first + count:
            raise ValueError("values have too few bits of validity")
        for at in range(many):
            if nodes[at].kind == VARYING_NODE or nodes[at].kind == LIST_NODE:
                add_end(&nodes[at], 0)
        for at in range(count):
            if at % 4096 == 4095:
                let_others_run()
            row = first + at
            if bits.data is not NULL and not bits.data[row >> 3] >> (row & 7) & 1:
                make_null(nodes, 0)
                continue
            value.data, value.here, value.end = stored.data, bounds[at], bounds[at + 1]
            value.left = most
            if not 0 <= value.here <= value.end <= stored.size:
                raise ValueError("the offsets of values do not ascend within their bytes")
            if not take_value(nodes, 0, &value) or value.here != value.end:
                raise CorruptionError(f"{where}, row {at}", "its bytes are no value of the column")
        return [made_of(&nodes[at]) for at in range(many)]
    finally:
        close_nodes(nodes, many)


cdef object made_of(Node *node):
    marks = ends = None
    if node.marks.data is not NULL:
        marks = PyBytes_FromStringAndSize(<char *>node.marks.data, node.marks.size)
    if node.places.data is not NULL:
        ends = PyBytes_FromStringAndSize(<char *>node.places.data, node.places.size)
    made = PyBytes_FromStringAndSize(<char *>node.made.data, node.made.size)
    return node.count, marks, made, ends


cdef inline int mark(Node *node, Py_ssize_t count, bint is_valid) except -1:
    """Count values that are all null, or none of them."""
    if not is_valid and node.marks.data is NULL:
        reserve(&node.marks, max(node.count + count, 64))
        memset(node.marks.data, 1, node.count)
        node.marks.size = node.count
    node.count += count
    if node.count > OFFSET_MAX:
        raise OverflowError("the lists of a column have 2^31 values; read fewer rows at once")
    if node.marks.data is not NULL:
        reserve(&node.marks, count)
        memset(node.marks.data + node.marks.size, is_valid, count)
        node.marks.size += count
    return 0


cdef inline int add_end(Node *node, Py_ssize_t end) except -1:
    cdef int32_t place = <int32_t>end
    return add(&node.places, <const unsigned char *>&place, 4)


cdef int make_null(Node *nodes, int place) except -1:
    """Add a null; below a null, what its type allows: a zero where it takes no null."""
    cdef Node *node = &nodes[place]
    mark(node, 1, not node.is_nullable)
    return make_room(nodes, place)


cdef int make_room(Node *nodes, int place) except -1:
    """Add what lies in the buffers of a value that is null or zero."""
    cdef Node *node = &nodes[place]
    cdef Node *child
    cdef int at = place + 1
    cdef Py_ssize_t turn
    if node.kind == FIXED_NODE:
        return add_zeros(node, 1)
    if node.kind == VARYING_NODE:
        return add_end(node, node.made.size)
    if node.kind == LIST_NODE:
        return add_end(node, nodes[at].count)
    if node.kind == SLOTS_NODE:
        child = &nodes[at]
        if child.kind == FIXED_NODE:
            mark(child, node.width, not child.is_nullable)
            return add_zeros(child, node.width)
        for turn in range(node.width):
            make_null(nodes, at)
        return 0
    while at < node.after:
        make_null(nodes, at)
        at = nodes[at].after
    return 0


cdef inline int add_zeros(Node *node, Py_ssize_t count) except -1:
    if not count:
        return 0
    reserve(&node.made, count * node.width)
    memset(node.made.data + node.made.size, 0, count * node.width)
    node.made.size += count * node.width
    return 0


cdef inline bint take_number(Stored *value, Py_ssize_t *number) noexcept:
    """Read a number below 2^56, in the fewest bytes."""
    cdef int shift = 0
    cdef unsigned char byte = 128
    number[0] = 0
    while byte & 128:
        if value.here >= value.end or shift > 49:
            return False
        byte = value.data[value.here]
        value.here += 1
        number[0] |= <Py_ssize_t>(byte & 127) << shift
        shift += 7
    return byte > 0 or shift == 7


cdef bint take_value(Node *nodes, int place, Stored *value) except -1:
    """Read a value that is not null. False for bytes that are none."""
    cdef Node *node = &nodes[place]
    cdef Py_ssize_t number, many = 0, bits
    cdef int child = place + 1
    mark(node, 1, True)
    if node.kind == FIXED_NODE:
        if value.end - value.here < node.width:
            return False
        add(&node.made, value.data + value.here, node.width)
        value.here += node.width
        return True
    if node.kind == VARYING_NODE:
        if not take_number(value, &number) or number > value.end - value.here:
            return False
        add(&node.made, value.data + value.here, number)
        value.here += number
        if node.made.size > OFFSET_MAX:
            raise OverflowError("the values of a column have 2 GiB")
        add_end(node, node.made.size)
        return True
    if node.kind == LIST_NODE:
        if not take_number(value, &number):
            return False
        if not take_values(nodes, child, value, number >> 1, number & 1):
            return False
        add_end(node, nodes[child].count)
        return True
    if node.kind == SLOTS_NODE:
        if value.here >= value.end or value.data[value.here] > 1:
            return False
        value.here += 1
        return take_values(nodes, child, value, node.width, value.data[value.here - 1])
    while child < node.after:
        many += 1
        child = nodes[child].after
    bits = value.here
    if not take_bits(value, many):
        return False
    many, child = 0, place + 1
    while child < node.after:
        if value.data[bits + (many >> 3)] >> (many & 7) & 1:
            value.left -= room_of(nodes, child)
            if value.left < 0 or not nodes[child].is_nullable:
                return False
            make_null(nodes, child)
        elif not take_value(nodes, child, value):
            return False
        many += 1
        child = nodes[child].after
    return True


cdef inline bint take_bits(Stored *value, Py_ssize_t count) noexcept:
    """Go behind a bit for each of `count` values, and the zeros that fill the last byte."""
    cdef Py_ssize_t size = (count + 7) // 8
    if value.end - value.here < size:
        return False
    value.here += size
    return not count & 7 or not value.data[value.here - 1] >> (count & 7)


cdef bint take_values(
    Node *nodes, int place, Stored *value, Py_ssize_t count, bint has_nulls
) except -1:
    """Read values, with a bit for each that tells nulls if `has_nulls`."""
    cdef Node *node = &nodes[place]
    cdef Py_ssize_t at, bits = value.here
    value.left -= count
    if value.left < 0:
        return False
    if has_nulls:
        if not node.is_nullable or not take_bits(value, count):
            return False
    elif node.kind == FIXED_NODE:
        if (value.end - value.here) // node.width < count:
            return False
        mark(node, count, True)
        add(&node.made, value.data + value.here, count * node.width)
        value.here += count * node.width
        return True
    for at in range(count):
        if has_nulls and value.data[bits + (at >> 3)] >> (at & 7) & 1:
            value.left -= room_of(nodes, place)
            if value.left < 0:
                return False
            make_null(nodes, place)
        elif not take_value(nodes, place, value):
            return False
    return True
