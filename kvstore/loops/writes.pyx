# cython: language_level=3, wraparound=False, initializedcheck=False
"""Writes: the puts that a commit collects, and the entries that it makes of them.

Invariants
1. A key is checked to be bytes before its bytes are read.
"""

include "shared.pxi"
include "order.pxi"

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


def put_in_pieces(
    next_batch,
    dict points not None,
    bytes suffix not None,
    family,
    Py_ssize_t rows_max,
    Py_ssize_t bytes_max,
):
    """Put the entries of `put_all`, in the same order, into one batch after the other, which
    `next_batch` gives. Yields each batch when it has `rows_max` entries or `bytes_max` bytes, and
    the last one earlier."""
    cdef list keys = list(points), values = list(points.values())
    cdef bytes value_tail = TERMINATOR + suffix + VALUE
    cdef bytes tombstone_tail = TERMINATOR + suffix + TOMBSTONE
    cdef bytes entry
    cdef Py_ssize_t at = 0, place, count = PyList_GET_SIZE(keys), rows, size
    cdef Place *order = order_of(keys)
    try:
        while at < count:
            rows = size = 0
            batch = next_batch()
            put = batch.put
            while at < count and rows < rows_max and size < bytes_max:
                place = order[at].at
                value = <object>PyList_GET_ITEM(values, place)
                entry = escape(<bytes>PyList_GET_ITEM(keys, place))
                entry = concat(entry, tombstone_tail if value is None else value_tail)
                if value is None:
                    value = b""
                put(entry, value, family)
                size += PyBytes_GET_SIZE(entry) + len(value)
                rows += 1
                at += 1
            yield batch
    finally:
        free(order)
