# cython: language_level=3, wraparound=False, initializedcheck=False
"""Columns: Arrow's two buffers joined and cut, change entries checked, rows made and ordered.

Invariants
1. An item is checked to be bytes before its bytes are read.
2. A number of a body or a column is compared with the others before it is used as an offset.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from libc.stdint cimport uint32_t

include "shared.pxi"
include "order.pxi"

from kvstore.errors import CorruptionError

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type, Py_ssize_t)
    void PyObject_GC_UnTrack(PyObject *)

cdef Py_ssize_t HEAD_BYTES = _contract.ENTRY_HEAD.size
cdef int RULE_ANY = _contract.RULE_ANY, RULE_NO_VALUE = _contract.RULE_NO_VALUE
cdef int RULE_ID = _contract.RULE_ID, RULE_SPAN = _contract.RULE_SPAN


def join(list items not None):
    """The two buffers of an Arrow binary array: the offsets, and the bytes of all items in a row.
    None where one array cannot hold the bytes."""
    cdef Py_ssize_t at, total = 0, count = PyList_GET_SIZE(items)
    cdef bytes offsets, joined
    for at in range(count):
        total += PyBytes_GET_SIZE(<bytes?>(<object>PyList_GET_ITEM(items, at)))
    if total > ARRAY_BYTES_MAX:
        return None
    offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * sizeof(int32_t))
    joined = PyBytes_FromStringAndSize(NULL, total)
    _lay(items, <int32_t *>PyBytes_AS_STRING(offsets), PyBytes_AS_STRING(joined))
    return offsets, joined


def join_writes(dict points not None, ranges not None, Py_ssize_t longest, bytes places not None,
                bytes ops not None, uint32_t word, changeset):
    """The uncompressed change entry of range deletes and `points`, as `kvstore.changes.index` has
    it: `word` is its first four bytes, `places` is its sequence, and `ops` has the operations of a
    range delete, a put and a delete. None where the value of a point has more than `longest` bytes.
    The keys and values must have less than 2 GiB together."""
    cdef list keys = [], values = []
    cdef Py_ssize_t at, spans, count, total = 0, middle = PyBytes_GET_SIZE(places), body
    cdef uint64_t domain, serial
    cdef bytes entry
    cdef char *begin
    cdef char *end
    domain, serial = changeset
    if PyBytes_GET_SIZE(ops) != 3:
        raise ValueError("a range delete, a put and a delete have an operation each")
    for first, last in ranges:
        total += PyBytes_GET_SIZE(<bytes?>last)
        keys.append(first)
        values.append(last)
    spans = PyList_GET_SIZE(keys)
    for value in points.values():
        if value is not None:
            if PyBytes_GET_SIZE(<bytes?>value) > longest:
                return None
            total += PyBytes_GET_SIZE(<bytes>value)
        values.append(value)
    keys += points
    count = PyList_GET_SIZE(keys)
    if PyList_GET_SIZE(values) != count:
        raise ValueError("points changed")
    for at in range(count):
        total += PyBytes_GET_SIZE(<bytes?>(<object>PyList_GET_ITEM(keys, at)))
    if total > ARRAY_BYTES_MAX:
        raise OverflowError("the rows of an entry have 2 GiB")
    body = 2 * (count + 1) * sizeof(int32_t) + middle + total + count
    entry = PyBytes_FromStringAndSize(NULL, HEAD_BYTES + body)
    begin = PyBytes_AS_STRING(entry)
    (<uint32_t *>begin)[0], (<uint32_t *>begin)[1], (<uint32_t *>begin)[2] = word, count, body
    memcpy(begin + 12, &domain, 8)
    memcpy(begin + 20, &serial, 8)
    begin += HEAD_BYTES
    end = begin + 2 * (count + 1) * sizeof(int32_t)
    memcpy(end, PyBytes_AS_STRING(places), middle)
    end = _lay(keys, <int32_t *>begin, end + middle)
    end = _lay(values, <int32_t *>begin + count + 1, end)
    memset(end, PyBytes_AS_STRING(ops)[0], spans)
    for at in range(spans, count):
        end[at] = PyBytes_AS_STRING(ops)[1 + (<object>PyList_GET_ITEM(values, at) is None)]
    return entry


cdef char *_lay(list items, int32_t *offsets, char *joined) noexcept:
    """Write `items`, each of them bytes or an empty None, in a row to `joined`, and to `offsets`
    where each begins and the last one ends. Returns the end."""
    cdef Py_ssize_t at, size
    cdef char *end = joined
    offsets[0] = 0
    for at in range(PyList_GET_SIZE(items)):
        item = <object>PyList_GET_ITEM(items, at)
        if item is not None:
            size = PyBytes_GET_SIZE(<bytes>item)
            memcpy(end, PyBytes_AS_STRING(<bytes>item), size)
            end += size
        offsets[at + 1] = <int32_t>(end - joined)
    return end


def cut(offsets, data):
    """The items that `join` has joined. Raises `CorruptionError` where `offsets` do not ascend
    within `data`."""
    cdef Py_buffer bounds, joined
    PyObject_GetBuffer(offsets, &bounds, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(data, &joined, PyBUF_SIMPLE)
        try:
            return _cut(
                <const unsigned char *>bounds.buf, bounds.len // <Py_ssize_t>sizeof(int32_t), joined
            )
        finally:
            PyBuffer_Release(&joined)
    finally:
        PyBuffer_Release(&bounds)


cdef list _cut(const unsigned char *bounds, Py_ssize_t count, Py_buffer joined):
    cdef Py_ssize_t at
    cdef int32_t start, end
    cdef list items
    if count < 1 or _number(bounds, 0) < 0:
        _refuse_offsets()
    items = [None] * (count - 1)
    for at in range(count - 1):
        start, end = _number(bounds, at), _number(bounds, at + 1)
        if start > end or end > joined.len:
            _refuse_offsets()
        items[at] = PyBytes_FromStringAndSize(<const char *>joined.buf + start, end - start)
    return items


cdef _refuse_offsets():
    raise CorruptionError("a column of an entry", "its offsets do not ascend within its bytes")


def arrange(items, keys):
    """`items` in the order of their `keys`. Items of equal keys keep their order."""
    cdef list given = list(items), by = list(keys), arranged
    cdef Py_ssize_t at
    cdef Place *order
    if PyList_GET_SIZE(by) != PyList_GET_SIZE(given):
        raise ValueError("each item has a key")
    arranged = [None] * PyList_GET_SIZE(given)
    order = order_of(by)
    try:
        for at in range(PyList_GET_SIZE(given)):
            arranged[at] = <object>PyList_GET_ITEM(given, order[at].at)
    finally:
        free(order)
    return arranged


def gather(
    source,
    list rows not None,
    Py_ssize_t count,
    Py_ssize_t bytes_max,
    Py_ssize_t first,
    Py_ssize_t last,
):
    """Append rows of `source` to `rows`: `count` rows, or fewer once their fields from `first` to
    before `last` have `bytes_max` bytes. Returns the bytes of these fields, each of which is bytes
    or None."""
    cdef Py_ssize_t at, size = 0
    if count <= 0:
        return size
    for row in source:
        if not isinstance(row, tuple) or first < 0 or PyTuple_GET_SIZE(row) < last:
            raise TypeError("a row is a tuple that has these fields")
        rows.append(row)
        for at in range(first, last):
            field = <object>PyTuple_GET_ITEM(row, at)
            if field is not None:
                size += PyBytes_GET_SIZE(<bytes?>field)
        count -= 1
        if count == 0 or size >= bytes_max:
            break
    return size


def tuples(kind, count, fields):
    """Make `count` instances of the named tuple `kind`. A field that is a list has an item for each
    instance; any other field is the same in all.

    Items must not refer back to the tuple: the loop untracks it from the garbage collector, so a
    cycle would leak.
    """
    return _Tuples(kind, count, fields)


cdef class _Tuples:
    cdef type _kind
    cdef list _fields
    cdef Py_ssize_t _at, _count

    def __cinit__(self, type kind not None, Py_ssize_t count, fields):
        self._kind = kind
        self._fields = list(fields)
        self._count = count
        if not issubclass(kind, tuple):
            raise TypeError("no tuple")
        for field in self._fields:
            if type(field) is list and PyList_GET_SIZE(<list>field) != count:
                raise ValueError("a column has another length")

    def __iter__(self):
        return self

    def __next__(self):
        cdef Py_ssize_t at = self._at, number, width = PyList_GET_SIZE(self._fields)
        cdef object made
        if at >= self._count:
            raise StopIteration
        made = (<PyTypeObject *>self._kind).tp_alloc(self._kind, width)
        PyObject_GC_UnTrack(<PyObject *>made)
        for number in range(width):
            field = <object>PyList_GET_ITEM(self._fields, number)
            if type(field) is list:
                field = (<list>field)[at]  # checked: the caller may have shortened the list
            Py_INCREF(field)
            PyTuple_SET_ITEM(made, number, field)
        self._at = at + 1
        return made


def survey(body, Py_ssize_t count, bint is_sequenced, bytes rules not None, where):
    """Check the `body` of a change entry of `count` rows (`kvstore.changes.index`). Returns where
    its keys and its values end, the number of rows with `RULE_ANY`, and the number with `RULE_ANY`
    or `RULE_NO_VALUE`.

    Raises `CorruptionError` where the numbers of the body contradict each other, and where a row
    breaks the rule that `rules`, of 256 bytes, has for its operation. After this check every
    reader may use the offsets as they are.
    """
    cdef Py_buffer view
    if PyBytes_GET_SIZE(rules) != 256:
        raise ValueError("a rule for each operation")
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        return _survey(
            <const unsigned char *>view.buf,
            view.len,
            count,
            is_sequenced,
            <const unsigned char *>PyBytes_AS_STRING(rules),
            where,
        )
    finally:
        PyBuffer_Release(&view)


cdef tuple _survey(
    const unsigned char *body,
    Py_ssize_t size,
    Py_ssize_t count,
    bint is_sequenced,
    const unsigned char *rules,
    where,
):
    cdef Py_ssize_t offsets, keys_at, keys_end, values_end, row, plain = 0, empty = 0
    cdef const unsigned char *values
    cdef const unsigned char *ops
    if not 0 <= count <= size:
        raise CorruptionError(where, f"{size} bytes for {count} rows")
    offsets = 4 * (count + 1)
    values = body + offsets
    keys_at = 2 * offsets + (4 * count if is_sequenced else 0)
    if size < keys_at + count:
        raise CorruptionError(where, f"{size} bytes for {count} rows")
    keys_end = keys_at + _number(body, count)
    values_end = keys_end + _number(values, count)
    if (
        _number(body, 0)
        or _number(values, 0)
        or keys_end < keys_at
        or values_end < keys_end
        or values_end + count != size
    ):
        raise CorruptionError(where, "its offsets do not add up")
    if not _ascend(body, count + 1) or not _ascend(values, count + 1):
        raise CorruptionError(where, "its offsets do not ascend")
    if is_sequenced and not _ascend_strictly(values + offsets, count):
        raise CorruptionError(where, "the places of its rows do not ascend")
    ops = body + values_end
    for row in range(count):
        plain += rules[ops[row]] == RULE_ANY
    if plain < count:
        for row in range(count):
            empty += rules[ops[row]] == RULE_NO_VALUE
            if not _fits(rules[ops[row]], body, values, body + keys_at, body + keys_end, row):
                problem = "does not fit" if rules[ops[row]] else "has the unknown"
                raise CorruptionError(where, f"row {row} {problem} operation {ops[row]}")
    return keys_end, values_end, plain, plain + empty


cdef inline int32_t _number(const unsigned char *numbers, Py_ssize_t at) noexcept:
    """The integer number `at`. The address need not be aligned."""
    cdef int32_t number
    memcpy(&number, numbers + at * <Py_ssize_t>sizeof(int32_t), sizeof(int32_t))
    return number


cdef bint _ascend(const unsigned char *numbers, Py_ssize_t count) noexcept:
    # Without a branch the C compiler makes vector instructions of the loop: 10,000 in 2 us.
    cdef Py_ssize_t at
    cdef int falls = 0
    for at in range(count - 1):
        falls |= _number(numbers, at) > _number(numbers, at + 1)
    return not falls


cdef bint _ascend_strictly(const unsigned char *numbers, Py_ssize_t count) noexcept:
    """Whether no number is negative and each is above the one before."""
    cdef Py_ssize_t at
    if count and _number(numbers, 0) < 0:
        return False
    for at in range(count - 1):
        if _number(numbers, at) >= _number(numbers, at + 1):
            return False
    return True


cdef bint _fits(
    int rule,
    const unsigned char *key_ends,
    const unsigned char *value_ends,
    const unsigned char *keys,
    const unsigned char *values,
    Py_ssize_t row,
) noexcept:
    """Whether the key and the value of a row keep the rule of its operation."""
    cdef Py_ssize_t key = _number(key_ends, row), value = _number(value_ends, row)
    cdef Py_ssize_t key_size = _number(key_ends, row + 1) - key
    cdef Py_ssize_t value_size = _number(value_ends, row + 1) - value
    cdef int difference
    if rule == RULE_NO_VALUE or rule == RULE_ID:
        return not value_size and (rule == RULE_NO_VALUE or key_size == 8)
    if rule == RULE_SPAN:
        difference = memcmp(keys + key, values + value, min(key_size, value_size))
        return difference < 0 or (difference == 0 and key_size < value_size)
    return rule == RULE_ANY
