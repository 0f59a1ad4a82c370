# cython: language_level=3, wraparound=False, initializedcheck=False
"""The loops of `kvstore.loops.plain.writes`, which explains them.

Invariant: a key is checked to be bytes before its bytes are read.
"""

include "shared.pxi"
include "order.pxi"

from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

from kvstore.span import RESERVED as _RESERVED

cdef bytes RESERVED = _RESERVED
cdef Py_ssize_t RESERVED_SIZE = len(_RESERVED)

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef Py_ssize_t LONGEST_KEY, LONGEST_VALUE


def take_bounds():
    """Copy the limits that the loops compare with. `kvstore.testing.bounds` calls this again."""
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
    cdef public dict _points
    cdef public list _ranges
    cdef public Py_ssize_t _size
    cdef readonly Py_ssize_t size_max

    def __cinit__(self):
        self._points = {}
        self._ranges = []

    def __init__(self, Py_ssize_t size_max=PY_SSIZE_T_MAX):
        self.size_max = size_max

    @property
    def points(self):
        return self._points

    @property
    def ranges(self):
        return self._ranges

    @property
    def size(self):
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
        else:
            self.put_otherwise(key, value)

    def put_otherwise(self, key, value):
        raise NotImplementedError


def put_all(put, dict points not None, bytes suffix not None, family):
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
