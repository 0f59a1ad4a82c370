# cython: language_level=3, wraparound=False, initializedcheck=False
"""Writes: the puts that a commit collects, the entries that it makes of them, and the entries that
go to a sorted file.

Invariants
1. A key is checked to be bytes before its bytes are read.
2. A buffer of a column is compared with the number of rows before its first byte is read.
"""

include "shared.pxi"
include "order.pxi"
include "buffers.pxi"

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

from kvstore.base.span import RESERVED as _RESERVED

cdef bytes RESERVED = _RESERVED
cdef Py_ssize_t RESERVED_SIZE = len(_RESERVED)
cdef char ESCAPED_ZERO_1 = <char><unsigned char>ESCAPED_ZERO[1]

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef Py_ssize_t LONGEST_KEY, LONGEST_VALUE


def take_bounds():
    """Copy the limits that the loops compare with. `tests/harness/bounds.py` calls this again."""
    global LONGEST_KEY, LONGEST_VALUE
    LONGEST_KEY, LONGEST_VALUE = KEY_BYTES_MAX, VALUE_BYTES_MAX


take_bounds()


cdef inline bint is_reserved(bytes key) noexcept:
    return (
        <unsigned char>PyBytes_AS_STRING(key)[0] == 255  # hot: an empty key ends with a zero
        and PyBytes_GET_SIZE(key) >= RESERVED_SIZE
        and not memcmp(PyBytes_AS_STRING(key), PyBytes_AS_STRING(RESERVED), RESERVED_SIZE)
    )


cdef class Puts:
    """Writes as they are collected.

    `put` accepts a plain write while `size` is at most `size_max`, and passes every other write on
    to `put_otherwise`, which a subclass defines. Only the methods of a subclass change `_points`,
    `_ranges` and `_size`, so that the size counts each write. `expiring` has the keys whose last
    put expires, by a note of the subclass, or is None: a plain put takes its key out.
    """
    cdef public dict _points
    cdef public list _ranges
    cdef public Py_ssize_t _size
    cdef public dict expiring
    cdef readonly Py_ssize_t size_max

    def __cinit__(self):
        self._points = {}
        self._ranges = []

    def __init__(self, Py_ssize_t size_max=PY_SSIZE_T_MAX):
        self.size_max = size_max

    @property
    def points(self):
        """Each key's new value, None for a delete."""
        return self._points

    @property
    def ranges(self):
        """The range deletes: `start` and `end` of each."""
        return self._ranges

    @property
    def size(self):
        """The bytes of all keys and values that were written; a key that is written twice counts
        twice."""
        return self._size

    def put(self, key, value):
        """Set `key` to `value`. The last write to a key wins."""
        if (
            self._size <= self.size_max
            and type(key) is bytes
            and type(value) is bytes
            and PyBytes_GET_SIZE(key) <= LONGEST_KEY
            and not is_reserved(<bytes>key)
            and PyBytes_GET_SIZE(value) <= LONGEST_VALUE
        ):
            self._points[key] = value
            self._size += PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(value)
            if self.expiring is not None:
                self.expiring.pop(key, None)
        else:
            self.put_otherwise(key, value)

    def put_otherwise(self, key, value):
        """Check `key` and `value` closely. Set `key` to `value`, or raise."""
        raise NotImplementedError


def put_all(put, dict points not None, bytes suffix not None, family):
    """Call `put` with the entry of each point at the time of `suffix`; the entry of None is a
    tombstone. Goes in key order, which takes the memtable half the time of any other order."""
    cdef list keys = list(points), values = list(points.values())
    cdef bytes value_tail = TERMINATOR + suffix + VALUE
    cdef bytes tombstone_tail = TERMINATOR + suffix + TOMBSTONE
    cdef bytes escaped
    cdef Py_ssize_t at, place
    cdef Place *order = order_of(keys)
    try:
        for at in range(PyList_GET_SIZE(keys)):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            escaped = escape(<bytes>PyList_GET_ITEM(keys, place))
            value = <object>PyList_GET_ITEM(values, place)
            if value is None:
                put(concat(escaped, tombstone_tail), b"", family)
            else:
                put(concat(escaped, value_tail), value, family)
    finally:
        free(order)


def set_rows(target, keys, values, Py_ssize_t count, bytes suffixes not None, bytes kinds):
    """Set `count` entries of `data`, in their order, until `target` raises an error. Returns how
    many were set, and the error.

    `suffixes` has the suffix of all entries, or one for each. `kinds` has a byte for each, `VALUE`
    or `TOMBSTONE`; without it all have values. A tombstone and a null have an empty value.
    """
    cdef list held = []
    cdef Source key, value
    cdef unsigned char kind = VALUE[0], tombstone = TOMBSTONE[0]
    cdef Py_ssize_t at = 0, start = 0, end = 0, step = 0, size = TAIL - 1
    cdef const char *suffix = PyBytes_AS_STRING(suffixes)
    cdef bytes entry, stored
    open_varying(&key, keys, count, held)
    open_varying(&value, values, count, held)
    if kinds is not None and PyBytes_GET_SIZE(kinds) != count:
        raise ValueError("an entry has one kind")
    if PyBytes_GET_SIZE(suffixes) != size:
        if PyBytes_GET_SIZE(suffixes) != size * count:
            raise ValueError("an entry has one suffix")
        step = size
    for at in range(count):
        if at % TURN == TURN - 1:
            let_others_run()
        if kinds is not None:
            kind = <unsigned char>PyBytes_AS_STRING(kinds)[at]
        bounds_of(&key, at, &start, &end)
        entry = entry_of(key.data + start, end - start, suffix + at * step, kind)
        stored = b""
        if kind != tombstone and not is_null(&value, at):
            bounds_of(&value, at, &start, &end)
            stored = PyBytes_FromStringAndSize(<const char *>value.data + start, end - start)
        try:
            target[entry] = stored
        except Exception as error:
            return at, error
    return count, None


cdef int open_varying(Source *source, object column, Py_ssize_t count, list held) except -1:
    _open(source, column, count, held)
    if source.width:
        raise ValueError("keys and values have no fixed width")
    return 0


cdef bytes entry_of(
    const unsigned char *key, Py_ssize_t size, const char *suffix, unsigned char kind
):
    """The stored key of a version: the framed key, its suffix and its kind."""
    cdef Py_ssize_t at, zeros = 0
    cdef const unsigned char *end = key + size
    cdef const unsigned char *found = key
    cdef bytes made
    cdef char *out
    while found < end:
        found = <const unsigned char *>memchr(found, 0, end - found)
        if found is NULL:
            break
        zeros += 1
        found += 1
    made = PyBytes_FromStringAndSize(NULL, size + zeros + 2 + TAIL)
    out = PyBytes_AS_STRING(made)
    if zeros == 0:
        if size:
            memcpy(out, key, size)
        out += size
    else:
        for at in range(size):
            out[0] = <char>key[at]
            out += 1
            if key[at] == 0:
                out[0] = ESCAPED_ZERO_1
                out += 1
    out[0], out[1] = TERMINATOR_0, TERMINATOR_1
    memcpy(out + 2, suffix, TAIL - 1)
    out[1 + TAIL] = <char>kind
    return made
