# cython: language_level=3, wraparound=False, initializedcheck=False
"""The version of each key at a time of its own, for many keys in one walk.

The walk takes the keys in key order, and the times of one key newest first, because the entries of
`data` lie in this order. So the reader only moves forwards. It takes up to `steps` entries one by
one before it seeks: a `steps` of 0 is a seek for each version, a large one is a merge of the labels
with the entries. Between the two the walk finds the cheaper way by itself: after steps in vain it
seeks for a while, and then tries again.

Invariants
1. Each place that the reader is sent to lies at or above the place before it.
2. A version that answers one time answers the next one, without a move, if it is not newer.
3. Keys and entries are checked to be bytes before their bytes are read.
4. `times` is copied before any Python code runs, so that no other code can reach the copy. The
   columns of labels in order belong to Arrow arrays, which do not change.
5. Nobody but the walk sees the place that it writes anew for each label.
"""

cimport cython
from cpython.buffer cimport PyBUF_CONTIG_RO, PyBuffer_Release, PyObject_GetBuffer

include "shared.pxi"
include "imports.pxi"
include "labels.pxi"
include "order.pxi"
include "reader.pxi"
include "deletions.pxi"

from array import array as _array

cdef enum:
    VAIN_MOST = 15              # seeks after which the walk tries steps again, however often in vain
    VALUES_LEAST = 4096         # bytes of values to begin with

cdef object array = _array
cdef bytes EMPTY = b""


def find_timed(
    reader,
    check,
    list keys not None,
    times,
    limits,
    Py_ssize_t depth,
    stamps,
    int64_t age_max,
    Py_ssize_t steps,
    Py_ssize_t bytes_max,
):
    """The value of the newest version of each of `keys` at its own time of `times`, which are
    integers of 64 bits, and the time of that version. The value is None and the time -1 where there
    is no version, where it deletes, and where it is older than `age_max`.

    `limits` is the tree of range tombstones: see `LimitNode`. Returns None once the values of
    several keys have more than `bytes_max` bytes.
    """
    cdef list asked = list(keys)
    cdef Py_ssize_t count = PyList_GET_SIZE(asked), at, place
    cdef list values = [None] * count
    cdef bytes out = PyBytes_FromStringAndSize(NULL, 8 * count)
    cdef int64_t *found = <int64_t *>PyBytes_AS_STRING(out)
    cdef int64_t time, as_of
    cdef bytes key, before = None
    cdef tuple deletions = NONE_DELETED
    cdef _Walk walk = _Walk(reader, check, stamps, steps)
    cdef int64_t *asked_at = copied(times, count)
    cdef Place *order = NULL
    try:
        order = order_of(asked, asked_at)
        for at in range(count):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            as_of = asked_at[place]
            key = <bytes>PyList_GET_ITEM(asked, place)
            if before is None or (key is not before and compare(key, before)):
                before = key
                deletions = deletions_of(limits, depth, key)
                walk.enter(key)
            value = walk.version(as_of, deleted_at(deletions, as_of), &time)
            if value is None or as_of - time > age_max:
                found[place] = INVISIBLE
                continue
            found[place] = time
            values[place] = value
            bytes_max -= PyBytes_GET_SIZE(<bytes?>value)
            if bytes_max < 0 and count > 1:
                return None
    finally:
        free(order)
        free(asked_at)
    return values, array("q", out)


def find_ordered(
    reader,
    check,
    tuple keys not None,
    starts,
    times,
    limits,
    Py_ssize_t depth,
    stamps,
    int64_t age_max,
    Py_ssize_t steps,
    Py_ssize_t bytes_max,
):
    """As `find_timed`, for labels in order, in columns: the `keys` are distinct and ascend, and key
    i has the labels from `starts[i]` on and below `starts[i + 1]`, newest first.

    Returns the offsets of the values, integers of 32 bits, the bytes of the values, and the times
    of their versions, integers of 64 bits.
    """
    cdef Py_ssize_t groups = keys[0], group, label, count
    cdef const int32_t[::1] offsets = keys[1]
    cdef const unsigned char[::1] data = keys[2]
    cdef const int64_t[::1] firsts = starts, asked_at = times
    cdef Column column = column_of(groups, offsets, data)
    cdef _Walk walk = _Walk(reader, check, stamps, steps)
    cdef int64_t time, as_of
    cdef bytes key
    cdef tuple deletions
    cdef _Values values
    require_starts(firsts, groups, asked_at.shape[0])
    count = asked_at.shape[0]
    if firsts[0] != 0 or firsts[groups] != count:
        raise ValueError("the labels of a key are no part of the labels")
    values = _Values(count)
    for group in range(groups):
        key = PyBytes_FromStringAndSize(
            column.data + offsets[group], offsets[group + 1] - offsets[group]
        )
        deletions = deletions_of(limits, depth, key)
        walk.enter(key)
        for label in range(firsts[group], firsts[group + 1]):
            if label % TURN == TURN - 1:
                let_others_run()
            as_of = asked_at[label]
            value = walk.version(as_of, deleted_at(deletions, as_of), &time)
            if value is None or as_of - time > age_max:
                values.add(label, INVISIBLE, None)
                continue
            values.add(label, time, <bytes?>value)
            if values.size > bytes_max and count > 1:
                return None
    return values.columns()


@cython.final
cdef class _Values:
    """The values of labels, and the times of their versions, as columns that grow."""
    cdef Py_ssize_t size, room
    cdef bytes ends, stamps
    cdef int32_t *offsets
    cdef int64_t *times
    cdef char *data

    def __cinit__(self, Py_ssize_t count):
        self.ends = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
        self.stamps = PyBytes_FromStringAndSize(NULL, 8 * count)
        self.offsets = <int32_t *>PyBytes_AS_STRING(self.ends)
        self.times = <int64_t *>PyBytes_AS_STRING(self.stamps)
        self.offsets[0] = 0

    def __dealloc__(self):
        free(self.data)

    cdef int add(self, Py_ssize_t label, int64_t time, bytes value) except -1:
        cdef Py_ssize_t more = 0 if value is None else PyBytes_GET_SIZE(value)
        cdef char *data
        if self.size + more > ARRAY_BYTES_MAX:
            raise OverflowError("the values of labels are more than an Arrow array holds")
        if self.size + more > self.room:
            self.room = max(2 * self.room, self.size + more, VALUES_LEAST)
            data = <char *>realloc(self.data, self.room)
            if data is NULL:
                raise MemoryError
            self.data = data
        if more:
            memcpy(self.data + self.size, PyBytes_AS_STRING(value), more)
        self.size += more
        self.offsets[label + 1] = <int32_t>self.size
        self.times[label] = time
        return 0

    cdef tuple columns(self):
        return self.ends, PyBytes_FromStringAndSize(self.data, self.size), self.stamps


cdef int64_t *copied(times, Py_ssize_t count) except NULL:
    """A copy of `count` numbers of 64 bits. The caller frees it."""
    cdef Py_buffer view
    cdef int64_t *copy
    PyObject_GetBuffer(times, &view, PyBUF_CONTIG_RO)
    try:
        if view.itemsize != 8 or view.len != 8 * count:
            raise ValueError("a key has one time")
        copy = <int64_t *>malloc(8 * count + 1)
        if copy is NULL:
            raise MemoryError
        memcpy(copy, view.buf, 8 * count)
        return copy
    finally:
        PyBuffer_Release(&view)


@cython.final
cdef class _Life:
    """An entry of an import: when it is visible, and its value, None where it deletes."""
    cdef int64_t added
    cdef uint64_t reverted
    cdef object value


@cython.final
cdef class _Walk:
    """A reader that moves forwards through the entries of ascending keys."""
    cdef _BoundReader _bound
    cdef object _check
    cdef _Imports _imports      # None: there is no import
    cdef Py_ssize_t _steps, _vain, _seeks_due
    cdef bint _is_placed, _is_fresh
    cdef bytes _here, _escaped, _goal
    cdef list _lives            # of `_Life`
    cdef int64_t _time
    cdef object _value

    def __cinit__(self, reader, check, stamps, Py_ssize_t steps):
        self._bound = _BoundReader(reader)
        self._check = check
        self._imports = _Imports(stamps) if stamps else None
        self._steps = steps
        self._lives = []

    cdef int enter(self, bytes key) except -1:
        self._escaped = escape(key)
        self._goal = None
        self._is_fresh = True
        self._time = INVISIBLE
        self._value = None
        if self._imports is not None:
            self._lives = []
            self._take_lives()
        return 0

    cdef object version(self, int64_t as_of, int64_t deleted, int64_t *shown):
        cdef _Life each, life = None
        cdef int64_t newest
        if self._is_fresh or self._time > as_of:
            self._is_fresh = False
            self._aim(~<uint64_t>as_of)
            self._go(self._goal)
            self._arrive()
        newest = self._time
        for found in self._lives:
            each = <_Life>found
            if newest < each.added and each.added <= as_of and <uint64_t>as_of < each.reverted:
                newest = each.added
                life = each
        shown[0] = newest
        if newest == INVISIBLE or deleted > newest:
            return None
        for found in self._lives:
            each = <_Life>found
            if (
                each.reverted <= <uint64_t>as_of
                and <int64_t>each.reverted > shown[0]
                and self._was_showing(each, max(self._time, deleted))
            ):
                shown[0] = <int64_t>each.reverted
        return self._value if life is None else life.value

    cdef bint _was_showing(self, _Life life, int64_t covered) except -1:
        """Whether `life` was in sight until it was reverted."""
        cdef _Life other
        if life.added <= covered:
            return False
        for found in self._lives:
            other = <_Life>found
            if (
                other.added > life.added
                and <uint64_t>other.added < life.reverted
                and life.reverted <= other.reverted
            ):
                return False
        return True

    cdef int _take_lives(self) except -1:
        cdef bytes here, end = self._place(TERMINATOR, FIRST_TIMED, 1)
        cdef const unsigned char *tail
        cdef _Life life
        self._go(concat(self._escaped, TERMINATOR))
        while self._here is not None and compare(self._here, end) < 0:
            here = self._here
            _require_size(here, self._escaped)
            tail = <const unsigned char *>PyBytes_AS_STRING(here) + PyBytes_GET_SIZE(here) - TAIL
            if self._imports.find(big_endian(tail), tail):
                life = _Life()
                life.added = self._imports.added
                life.reverted = self._imports.reverted
                life.value = self._bound.value() if tail[SUFFIX] else None
                self._lives.append(life)
            self._step()
        return 0

    cdef int _arrive(self) except -1:
        cdef bytes here = self._here
        cdef const unsigned char *tail
        self._time = INVISIBLE
        self._value = None
        if here is not None and is_below(here, self._escaped, UNLIMITED):
            _require_size(here, self._escaped)
            tail = <const unsigned char *>PyBytes_AS_STRING(here) + PyBytes_GET_SIZE(here) - TAIL
            self._time = <int64_t>~big_endian(tail)
            self._value = self._bound.value() if tail[SUFFIX] else None
        return 0

    cdef int _aim(self, uint64_t suffix) except -1:
        """Have `_goal` be the place of a suffix among the entries of the key."""
        cdef unsigned char *out
        cdef Py_ssize_t at
        if self._goal is None:
            self._goal = self._place(TERMINATOR, suffix, SUFFIX)
            return 0
        out = <unsigned char *>PyBytes_AS_STRING(self._goal) + PyBytes_GET_SIZE(self._goal) - SUFFIX
        for at in range(SUFFIX):
            out[at] = (suffix >> (56 - 8 * at)) & 0xFF
        return 0

    cdef bytes _place(self, bytes terminator, uint64_t suffix, Py_ssize_t width):
        """The escaped key, `terminator`, and the first `width` bytes of a suffix."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self._escaped), at
        cdef Py_ssize_t behind = size + PyBytes_GET_SIZE(terminator)
        cdef bytes place = PyBytes_FromStringAndSize(NULL, behind + width)
        cdef unsigned char *out = <unsigned char *>PyBytes_AS_STRING(place)
        memcpy(out, PyBytes_AS_STRING(self._escaped), size)
        memcpy(out + size, PyBytes_AS_STRING(terminator), behind - size)
        for at in range(width):
            out[behind + at] = (suffix >> (56 - 8 * at)) & 0xFF
        return place

    cdef int _go(self, bytes target) except -1:
        cdef Py_ssize_t step
        if self._is_placed:
            if self._here is None or compare(self._here, target) >= 0:
                return 0
            if self._seeks_due:
                self._seeks_due -= 1
            else:
                for step in range(self._steps):
                    self._step()
                    if self._here is None or compare(self._here, target) >= 0:
                        self._vain = 0
                        return 0
                self._vain = min(2 * self._vain + 1, VAIN_MOST)
                self._seeks_due = self._vain
        # A copy, because the reader may keep it, and the bytes of `_goal` change.
        self._bound.seek(concat(target, EMPTY))
        self._is_placed = True
        return self._look()

    cdef int _step(self) except -1:
        self._bound.next()
        return self._look()

    cdef inline int _look(self) except -1:
        here = self._bound.key()
        self._here = <bytes?>here if here is not None else None
        if here is None:
            self._check(self._bound.reader)
        return 0
