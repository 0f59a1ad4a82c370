# cython: language_level=3, wraparound=False, initializedcheck=False
"""Floors: the greatest live key at or below a place, for many places.

A floor is found from its place downwards. The entries of a key come oldest first on this way, so
the last visible one of them decides, and the references of imports come behind all of them. A key
with many entries takes two seeks; a key that is not alive takes a step for each of its entries.

Invariants
1. The reader stands at the last entry of a key, or at any entry of it, when the key is decided: the
   next move leads to the entries below.
2. Places and entries are checked to be bytes before their bytes are read.
3. An entry has at least `LEAST` bytes once `_Descent` has accepted it.
"""

cimport cython

include "shared.pxi"
include "imports.pxi"
include "order.pxi"
include "reader.pxi"
include "deletions.pxi"

cdef bytes FIRST_TIMED_SUFFIX = _keys.FIRST_TIMED_SUFFIX


def find_floors(
    reader,
    check,
    list places not None,
    times,
    bytes least not None,
    limits,
    Py_ssize_t depth,
    stamps,
    Py_ssize_t steps,
    Py_ssize_t bytes_max,
):
    """For each of `places` at its own time of `times`: the greatest key whose entries lie below
    the place, and that is alive then, with its value. None where there is no such key with entries
    at or above `least`.

    `limits` is as in `find_timed`. Passes up to `steps` entries of a key before it seeks.
    Returns None once the keys and values found for several places have more than `bytes_max` bytes.
    """
    cdef list asked = list(places), found = [None] * PyList_GET_SIZE(asked)
    cdef list asked_at = list(times)
    cdef Py_ssize_t at, place, passed = 0
    cdef int64_t as_of
    cdef _Descent descent = _Descent(reader, check, least, stamps, steps)
    cdef Place *order
    if PyList_GET_SIZE(asked_at) != PyList_GET_SIZE(asked):
        raise ValueError("a place has one time")
    order = order_of(asked)
    try:
        for at in range(PyList_GET_SIZE(asked)):
            place = order[at].at
            as_of = <object>PyList_GET_ITEM(asked_at, place)
            descent.seek(<bytes>PyList_GET_ITEM(asked, place))
            while True:
                passed += 1
                if passed % TURN == 0:
                    let_others_run()
                if not descent.newest(as_of):
                    break
                if descent.value is None:
                    continue
                if descent.time >= deleted_at(deletions_of(limits, depth, descent.key), as_of):
                    found[place] = descent.key, descent.value
                    bytes_max -= PyBytes_GET_SIZE(descent.key)
                    bytes_max -= PyBytes_GET_SIZE(<bytes?>descent.value)
                    if bytes_max < 0 and PyList_GET_SIZE(asked) > 1:
                        return None
                    break
    finally:
        free(order)
    return found


@cython.final
cdef class _Descent:
    """A reader that moves down from key to key."""
    cdef _BoundReader _bound
    cdef object _seek_for_prev, _prev, _check
    cdef bytes _least
    cdef _Imports _imports
    cdef Py_ssize_t _steps
    cdef bytes key              # that `newest` has decided
    cdef int64_t time
    cdef object value

    def __cinit__(self, reader, check, bytes least, stamps, Py_ssize_t steps):
        self._bound = _BoundReader(reader)
        self._seek_for_prev = reader.seek_for_prev
        self._prev = reader.prev
        self._check = check
        self._least = least
        self._imports = _Imports(stamps)
        self._steps = steps

    cdef int seek(self, bytes place) except -1:
        self._seek_for_prev(place)
        return 0

    cdef bint newest(self, int64_t as_of) except -1:
        """Decide the key whose entries the reader has reached. False where no key is left."""
        cdef bytes here = self._here(), first = here
        cdef const unsigned char *tail
        cdef uint64_t suffix
        cdef int64_t time
        cdef bint is_newer
        cdef Py_ssize_t passed = 0, size
        if here is None:
            return False
        size = PyBytes_GET_SIZE(here)
        self.time = INVISIBLE
        self.value = None
        while here is not None and PyBytes_GET_SIZE(here) == size and not memcmp(
            PyBytes_AS_STRING(here), PyBytes_AS_STRING(first), size - TAIL
        ):
            passed += 1
            tail = <const unsigned char *>PyBytes_AS_STRING(here) + size - TAIL
            suffix = big_endian(tail)
            if suffix < FIRST_TIMED:
                is_newer = (
                    self._imports.find(suffix, tail)
                    and self.time < self._imports.added
                    and self._imports.added <= as_of
                    and <uint64_t>as_of < self._imports.reverted
                )
                if is_newer:
                    self._take(here, self._imports.added)
                self._prev()
            else:
                time = <int64_t>~suffix
                if time <= as_of:
                    if passed > self._steps:
                        here = self._jump(
                            first[: size - TAIL] + (~<uint64_t>as_of).to_bytes(SUFFIX, "big")
                        )
                        if PyBytes_GET_SIZE(here) != size:
                            raise AssertionError(MOVED)
                        tail = <const unsigned char *>PyBytes_AS_STRING(here) + size - TAIL
                        time = <int64_t>~big_endian(tail)
                    self._take(here, time)
                if passed > self._steps:
                    self._seek_for_prev(first[: size - TAIL] + FIRST_TIMED_SUFFIX)
                else:
                    self._prev()
            here = self._here()
        self._set_key(first)
        return True

    cdef int _take(self, bytes here, int64_t time) except -1:
        cdef bint has_value = PyBytes_AS_STRING(here)[PyBytes_GET_SIZE(here) - 1]
        self.value = self._bound.value() if has_value else None
        self.time = time
        return 0

    cdef int _set_key(self, bytes stored) except -1:
        cdef bytes escaped = stored[: PyBytes_GET_SIZE(stored) - LEAST]
        if memchr(PyBytes_AS_STRING(escaped), 0, PyBytes_GET_SIZE(escaped)) is NULL:
            self.key = escaped
            return 0
        if not _ordered.is_escaped(escaped):
            refuse_key(stored)
        self.key = escaped.replace(ESCAPED_ZERO, ZERO)
        return 0

    cdef bytes _jump(self, bytes target):
        self._bound.seek(target)
        cdef bytes here = self._here()
        if here is None:
            raise AssertionError(MOVED)
        return here

    cdef bytes _here(self):
        cdef const unsigned char *bytes_
        cdef Py_ssize_t size
        found = self._bound.key()
        if found is None:
            self._check(self._bound.reader)
            return None
        cdef bytes here = <bytes?>found
        if compare(here, self._least) < 0:
            return None
        bytes_ = <const unsigned char *>PyBytes_AS_STRING(here)
        size = PyBytes_GET_SIZE(here)
        if (
            size < LEAST
            or bytes_[size - LEAST] != TERMINATOR_0
            or bytes_[size - LEAST + 1] != TERMINATOR_1
            or bytes_[size - 1] > KIND_MAX
        ):
            refuse_key(here)
        return here


cdef object MOVED = "an entry that was passed is gone from the reader's view"
