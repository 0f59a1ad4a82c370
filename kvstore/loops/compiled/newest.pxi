# Included by lookup: the class of `kvstore.loops.plain.newest`, which explains it.
#
# 1. No step between a look at `_touched` and the end of `keep`, or within `note`, allocates an object
#    that the collector tracks: no finalizer runs there, and no other thread.

from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.object cimport PyObject, PyObject_Hash
from libc.stdint cimport uint32_t

from kvstore.loops.plain import newest as _newest
from kvstore.timestamp import TIMESTAMP_MAX as _TIMESTAMP_MAX

cdef enum:
    SPANS_MAX = 64

assert SPANS_MAX == _newest.SPANS_MAX

cdef Py_ssize_t ENTRY_BYTES = _newest.ENTRY_BYTES
cdef Py_ssize_t LARGEST_PART = _newest._LARGEST_PART


@cython.final
cdef class _Kept:
    cdef bytes key, value       # the value is None once it has left
    cdef Py_ssize_t place
    cdef int64_t since
    cdef uint64_t spans
    cdef bint is_used


@cython.final
cdef class NewestValues:
    cdef readonly Py_ssize_t most, size
    cdef readonly uint64_t hits, misses
    cdef dict _kept             # key: `_Kept`
    cdef list _ring, _free, _spans
    cdef Py_ssize_t _hand
    cdef uint64_t _spans_noted
    cdef int64_t _touched
    cdef uint32_t *_asked
    cdef uint64_t _mask

    def __cinit__(self, Py_ssize_t most):
        self.most = most
        self._kept = {}
        self._ring = []
        self._free = []
        self._spans = []
        self._touched = _TIMESTAMP_MAX

    def __dealloc__(self):
        free(self._asked)

    def __len__(self):
        return len(self._kept)

    def get(self, bytes key not None, int64_t as_of):
        return self._at(key, as_of)

    def keep(self, bytes key not None, bytes value not None, int64_t as_of):
        self._offer(key, value, as_of)

    def note(self, int64_t timestamp, points not None, spans not None):
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef Py_ssize_t place = 0
        cdef dict written
        cdef list touched = list(spans)
        self._touched = timestamp
        if PyList_GET_SIZE(touched):
            self._spans_noted += PyList_GET_SIZE(touched)
            self._spans += touched
            if PyList_GET_SIZE(self._spans) > SPANS_MAX:
                del self._spans[:PyList_GET_SIZE(self._spans) - SPANS_MAX]
        if self._kept and points:
            written = <dict?>points
            while PyDict_Next(written, &place, &key, &value):
                self._replace(<object>key, <object>value, timestamp)
            self._make_room(0)

    cdef inline object _at(self, bytes key, int64_t as_of):
        """The value of `key` at `as_of`, None where it is not kept."""
        cdef PyObject *found = PyDict_GetItemWithError(self._kept, key)
        cdef _Kept kept
        if found is not NULL:
            kept = <_Kept>found
            if as_of >= kept.since and (
                kept.spans == self._spans_noted or self._is_current(kept)
            ):
                kept.is_used = True
                self.hits += 1
                return kept.value
        self.misses += 1
        return None

    cdef int _offer(self, bytes key, bytes value, int64_t as_of) except -1:
        cdef Py_ssize_t weight = (
            PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(value) + ENTRY_BYTES
        )
        cdef _Kept kept
        if as_of < self._touched or weight > self.most // LARGEST_PART:
            return 0
        if PyDict_GetItemWithError(self._kept, key) is not NULL:
            return 0
        if self.size + weight > self.most and not self._is_asked_again(key):
            return 0
        self._make_room(weight)
        kept = _Kept.__new__(_Kept)
        kept.key, kept.value, kept.since = key, value, as_of
        kept.spans = self._spans_noted
        if PyList_GET_SIZE(self._free):
            kept.place = <Py_ssize_t>self._free.pop()
            self._ring[kept.place] = kept
        else:
            kept.place = PyList_GET_SIZE(self._ring)
            self._ring.append(kept)
        self._kept[key] = kept
        self.size += weight
        return 0

    cdef int _replace(self, object key, object value, int64_t timestamp) except -1:
        cdef PyObject *found = PyDict_GetItemWithError(self._kept, key)
        cdef _Kept kept
        if found is NULL:
            return 0
        kept = <_Kept>found
        if type(value) is bytes:
            self.size += PyBytes_GET_SIZE(<bytes>value) - PyBytes_GET_SIZE(kept.value)
            kept.value, kept.since, kept.spans = <bytes>value, timestamp, self._spans_noted
        else:
            self._drop(kept)
        return 0

    cdef bint _is_current(self, _Kept kept) except -1:
        """Whether no write to a span has touched a value since it was last looked at."""
        cdef Py_ssize_t at, count = PyList_GET_SIZE(self._spans)
        cdef uint64_t missed = self._spans_noted - kept.spans
        cdef bytes key = kept.key
        if missed > <uint64_t>count:
            self._drop(kept)
            return False
        for at in range(count - <Py_ssize_t>missed, count):
            start, end = self._spans[at]
            if compare(key, <bytes?>start) >= 0 and (
                end is None or compare(key, <bytes?>end) < 0
            ):
                self._drop(kept)
                return False
        kept.spans = self._spans_noted
        return True

    cdef bint _is_asked_again(self, bytes key) except -1:
        cdef uint64_t bits = <uint64_t>PyObject_Hash(key)
        cdef uint32_t mark = <uint32_t>(bits >> 32) | 1
        cdef uint32_t *slot
        cdef Py_ssize_t slots
        if self._asked is NULL:
            slots = _newest._slots(self.most)
            self._asked = <uint32_t *>calloc(slots, sizeof(uint32_t))
            if self._asked is NULL:
                raise MemoryError
            self._mask = slots - 1
        slot = &self._asked[bits & self._mask]
        if slot[0] == mark:
            return True
        slot[0] = mark
        return False

    cdef int _drop(self, _Kept kept) except -1:
        if kept.value is not None:
            self.size -= PyBytes_GET_SIZE(kept.key) + PyBytes_GET_SIZE(kept.value) + ENTRY_BYTES
            kept.value = None
            self._ring[kept.place] = None
            self._free.append(kept.place)
            del self._kept[kept.key]
        return 0

    cdef int _make_room(self, Py_ssize_t weight) except -1:
        cdef list ring = self._ring
        cdef _Kept kept
        while self.size + weight > self.most:
            if self._hand >= PyList_GET_SIZE(ring):
                self._hand = 0
            kept = <_Kept>PyList_GET_ITEM(ring, self._hand)  # None where a place is free
            self._hand += 1
            if kept is None:
                continue
            if kept.is_used:
                kept.is_used = False
            else:
                self._drop(kept)
        return 0
