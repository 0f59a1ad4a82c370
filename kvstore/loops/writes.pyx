# cython: language_level=3, wraparound=False, initializedcheck=False
"""Writes: the puts that a commit collects, and the entries that it makes of them.

Invariants
1. A key is checked to be bytes before its bytes are read.
2. `SmallCommits.put` puts nothing before it knows that it can put all.
"""

cimport cython
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t

include "shared.pxi"
include "order.pxi"

from kvstore.limits import (
    CHANGE_CHUNK_BYTES,
    COMPRESS_FROM_BYTES,
    INLINE_VALUE_BYTES,
    KEY_BYTES_MAX,
    THIN_FROM_BYTES,
    VALUE_BYTES_MAX,
)

from kvstore.base.span import RESERVED as _RESERVED

cdef bytes RESERVED = _RESERVED
cdef Py_ssize_t RESERVED_SIZE = len(_RESERVED)
cdef Py_ssize_t HEAD_BYTES = _contract.ENTRY_HEAD.size
cdef unsigned char KIND_TOMBSTONE = TOMBSTONE[0], KIND_VALUE = VALUE[0]
cdef bytes EMPTY = b""

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef Py_ssize_t LONGEST_KEY, LONGEST_VALUE
cdef Py_ssize_t LONGEST_INLINE      # value that travels in a change entry
cdef Py_ssize_t SMALL               # writes have fewer bytes, and so has the body of their entry


def take_bounds():
    """Copy the limits that the loops compare with. `tests/harness/bounds.py` calls this again."""
    global LONGEST_KEY, LONGEST_VALUE, LONGEST_INLINE, SMALL
    LONGEST_KEY, LONGEST_VALUE = KEY_BYTES_MAX, VALUE_BYTES_MAX
    LONGEST_INLINE = INLINE_VALUE_BYTES
    SMALL = min(COMPRESS_FROM_BYTES, THIN_FROM_BYTES, CHANGE_CHUNK_BYTES)


take_bounds()


cdef inline bint is_reserved(bytes key) noexcept:
    return (
        <unsigned char>PyBytes_AS_STRING(key)[0] == 255  # hot: an empty key ends with a zero
        and PyBytes_GET_SIZE(key) >= RESERVED_SIZE
        and not memcmp(PyBytes_AS_STRING(key), PyBytes_AS_STRING(RESERVED), RESERVED_SIZE)
    )


cdef class Puts:
    """Writes as they are collected. `whose` names their owner in errors.

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
    cdef readonly str whose

    def __cinit__(self):
        self._points = {}
        self._ranges = []

    def __init__(self, str whose not None="the write set", Py_ssize_t size_max=PY_SSIZE_T_MAX):
        self.whose = whose
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
    _put_versions(put, points, suffix, family)
    return None


cdef int _put_versions(put, dict points, bytes suffix, family) except -1:
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
                put(concat(escaped, tombstone_tail), EMPTY, family)
            else:
                put(concat(escaped, value_tail), value, family)
    finally:
        free(order)
    return 0


@cython.final
cdef class SmallCommits:
    """Puts small commits: their versions and their whole change entry, as `kvstore.changes.index`
    has it, in `stream`. `word` is the first four bytes of such an entry, and `ops` has the
    operations of a put and of a delete."""
    cdef bytes _stream
    cdef uint32_t _word
    cdef char _put, _delete

    def __cinit__(self, bytes stream not None, uint32_t word, bytes ops not None):
        self._stream, self._word = stream, word
        self._put, self._delete = ops

    def put(self, put, Puts writes not None, int64_t timestamp, changeset, data, changes):
        """Call `put` with the versions of puts and deletes in the family `data`, as `put_all` does,
        and with their change entry in `changes`. Returns whether that was done: writes that are
        many or large, or delete ranges, are left to the caller. A row takes 0.15 us."""
        cdef dict points = writes._points
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef Py_ssize_t place = 0, count = 0, keys_size = 0, size = 0, body
        cdef uint64_t domain, serial, suffix = ~<uint64_t>timestamp
        cdef bytes entry
        if writes._size >= SMALL or PyList_GET_SIZE(writes._ranges):
            return False
        # No object is made from here until the entry is filled: a collection of garbage might run
        # code that changes the writes.
        domain, serial = changeset
        while PyDict_Next(points, &place, &key, &value):
            keys_size += PyBytes_GET_SIZE(<bytes?><object>key)
            if <object>value is not None:
                if PyBytes_GET_SIZE(<bytes?><object>value) > LONGEST_INLINE:
                    return False
                size += PyBytes_GET_SIZE(<bytes><object>value)
            count += 1
        body = 2 * (count + 1) * sizeof(int32_t) + keys_size + size + count
        if body >= SMALL or not count:
            return False
        entry = self._entry(points, count, keys_size, body, domain, serial)
        if count == 1:
            place = 0
            PyDict_Next(points, &place, &key, &value)
            _put_version(put, <bytes><object>key, <object>value, suffix, data)
        else:
            _put_versions(put, points, suffix.to_bytes(8, "big"), data)
        put(_change_key(self._stream, timestamp), entry, changes)
        return True

    cdef bytes _entry(
        self, dict points, Py_ssize_t count, Py_ssize_t keys_size, Py_ssize_t body,
        uint64_t domain, uint64_t serial,
    ):
        cdef bytes entry = PyBytes_FromStringAndSize(NULL, HEAD_BYTES + body)
        cdef char *begin = PyBytes_AS_STRING(entry)
        cdef char *keys = begin + HEAD_BYTES + 2 * (count + 1) * sizeof(int32_t)
        cdef char *values = keys + keys_size
        cdef char *ops = begin + HEAD_BYTES + body - count
        cdef int32_t *key_ends = <int32_t *>(begin + HEAD_BYTES)
        cdef int32_t *value_ends = key_ends + count + 1
        cdef int32_t key_end = 0, value_end = 0
        cdef Py_ssize_t place = 0, at = 0, size
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        (<uint32_t *>begin)[0], (<uint32_t *>begin)[1] = self._word, <uint32_t>count
        (<uint32_t *>begin)[2] = <uint32_t>body
        memcpy(begin + 12, &domain, 8)
        memcpy(begin + 20, &serial, 8)
        key_ends[0] = value_ends[0] = 0
        while PyDict_Next(points, &place, &key, &value):
            size = PyBytes_GET_SIZE(<bytes><object>key)
            memcpy(keys + key_end, PyBytes_AS_STRING(<bytes><object>key), size)
            key_end += <int32_t>size
            ops[at] = self._delete
            if <object>value is not None:
                size = PyBytes_GET_SIZE(<bytes><object>value)
                memcpy(values + value_end, PyBytes_AS_STRING(<bytes><object>value), size)
                value_end += <int32_t>size
                ops[at] = self._put
            at += 1
            key_ends[at], value_ends[at] = key_end, value_end
        return entry


cdef int _put_version(put, bytes key, object value, uint64_t suffix, family) except -1:
    cdef bytes escaped = escape(key), entry
    cdef Py_ssize_t size = PyBytes_GET_SIZE(escaped)
    entry = PyBytes_FromStringAndSize(NULL, size + LEAST)
    cdef unsigned char *end = <unsigned char *>PyBytes_AS_STRING(entry)
    memcpy(end, PyBytes_AS_STRING(escaped), size)
    end[size], end[size + 1] = TERMINATOR_0, TERMINATOR_1
    put_big_endian(end + size + 2, suffix)
    end[size + 10] = KIND_TOMBSTONE if value is None else KIND_VALUE  # `LEAST` bytes in all
    put(entry, EMPTY if value is None else value, family)
    return 0


cdef bytes _change_key(bytes stream, int64_t timestamp):
    """As `encode_change_key`, of the first chunk."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(stream)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, size + 12)
    cdef unsigned char *end = <unsigned char *>PyBytes_AS_STRING(key)
    memcpy(end, PyBytes_AS_STRING(stream), size)
    put_big_endian(end + size, <uint64_t>timestamp)
    memset(end + size + 8, 0, 4)
    return key


cdef inline void put_big_endian(unsigned char *target, uint64_t word) noexcept:
    cdef int at
    for at in range(8):
        target[at] = <unsigned char>(word >> (56 - 8 * at))


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
