# cython: language_level=3, wraparound=False, initializedcheck=False
"""Serials, and the epochs of commits outside any changeset: `kvstore.changes.epochs` tells what both
are. Every commit takes two serials and closes two epochs. In Python that took 0.8 us, a tenth of a
put.

Invariants
1. A commit is counted as a whole: no code of Python runs in between, so no signal comes there.
2. `draining` is None while no changeset is open; then the next epoch begins at `next_begin`.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc

from array import array as _array

cdef extern from "Python.h":
    int PyContextVar_Get(object, PyObject *, PyObject **) except -1
    void Py_DECREF(PyObject *)

cdef enum:
    FIELDS = 4                          # numbers of an epoch: end, closing time, events, flags
    QUIESCENT = 1                       # a flag
    NS_PER_SECOND = 1_000_000_000

cdef uint64_t TICK = ~<uint64_t>127     # the low seven bits of a serial count
cdef object array = _array


cdef class Serials:
    """The source of the serials of one domain. The caller serialises the calls."""
    cdef uint64_t _last

    def __init__(self, *, uint64_t last=0):
        self._last = last

    def next(self, uint64_t now_ns, *, uint64_t taken=1):
        """The first of `taken` serials in a row, after all before them; `now_ns` is the time."""
        return self._next(now_ns, taken)

    def step(self):
        """The serial right after the last one, whatever the time is."""
        return self._step()

    cdef uint64_t _next(self, uint64_t now_ns, uint64_t taken) noexcept:
        cdef uint64_t serial = (now_ns // NS_PER_SECOND) << 32
        serial += ((now_ns % NS_PER_SECOND) << 32) // NS_PER_SECOND
        serial &= TICK
        if not serial or <int64_t>(serial - self._last) <= 0:  # not after, modulo 2^64
            serial = self._step()
        self._last = serial + taken - 1
        return serial

    cdef uint64_t _step(self) noexcept:
        self._last += 1
        if not self._last:
            self._last = 1
        return self._last


cdef class QuietEpochs:
    """The epochs of one domain that wait to be written, and the commits outside any changeset.

    `scope` is the context variable of the changesets. A subclass finds the open changeset, by
    `around`, and counts the commits that others overlap, by `count_beside`.
    """
    cdef public object domain
    cdef readonly Serials serials
    cdef public object quiet            # the last time at which no changeset was open
    cdef public uint64_t next_begin
    cdef public object draining         # the state of the sequencer
    cdef readonly uint64_t events       # of the epochs that wait
    cdef object _scope
    cdef uint64_t *_numbers
    cdef Py_ssize_t _count, _room

    def __init__(self, scope, Serials serials not None, domain, quiet):
        self._scope, self.serials, self.domain, self.quiet = scope, serials, domain, quiet

    def __dealloc__(self):
        free(self._numbers)

    def begin_commit(self, uint64_t timestamp):
        """Find the changeset of a commit at `timestamp`, before it is staged.

        A commit outside any changeset takes two serials in a row: its own, at which its epoch
        ends, and the one at which the empty epoch behind it ends.
        """
        cdef PyObject *found = NULL
        cdef bint is_alone
        PyContextVar_Get(self._scope, NULL, &found)
        is_alone = found is NULL or <object>found is None
        if found is not NULL:
            Py_DECREF(found)
        changeset = None if is_alone else self.around()
        if changeset is not None:
            return changeset.id, changeset
        return (self.domain, self.serials._next(timestamp, 2)), None

    def finish_commit(self, begun, uint64_t events, upper):
        """Count a written commit with `events` in the change index; `upper` is above its time."""
        cdef uint64_t serial, closed_at
        (_, number), changeset = begun
        if changeset is not None:
            changeset.counted = (changeset.counted[0] + events, upper)
        elif events:
            serial, closed_at = number, upper
            if self.draining is not None:
                self.count_beside(serial, events, upper)
                return
            self._reserve(2 * FIELDS)
            self._add(serial + 1, closed_at, events, 0)
            self._add(serial + 2, closed_at, 0, QUIESCENT)
            self.next_begin, self.quiet = serial + 2, upper

    def around(self):
        """The open changeset in this context, if it is one of this domain."""
        raise NotImplementedError

    def count_beside(self, serial, events, upper):
        """As `finish_commit`, while a changeset is open elsewhere."""
        raise NotImplementedError

    # -- epochs that wait to be written -----------------------------------------------------------

    def close_epoch(self, uint64_t end, uint64_t closed_at, uint64_t events, uint64_t flags):
        """Add an epoch to those that wait."""
        self._reserve(FIELDS)
        self._add(end, closed_at, events, flags)

    def waiting(self):
        """The numbers of the epochs that wait."""
        return array(
            "Q", PyBytes_FromStringAndSize(<char *>self._numbers, self._count * sizeof(uint64_t))
        )

    def drop_waiting(self, Py_ssize_t kept=0):
        """Forget the epochs that wait, behind the first `kept`."""
        cdef Py_ssize_t at
        if not 0 <= FIELDS * kept <= self._count:
            raise ValueError("so many epochs do not wait")
        for at in range(FIELDS * kept, self._count, FIELDS):
            self.events -= self._numbers[at + 2]
        self._count = FIELDS * kept

    @property
    def waiting_count(self):
        """How many epochs wait."""
        return self._count // FIELDS

    cdef int _reserve(self, Py_ssize_t count) except -1:
        cdef Py_ssize_t room
        cdef uint64_t *numbers
        if self._count + count > self._room:
            room = 2 * self._room + count
            numbers = <uint64_t *>realloc(self._numbers, room * sizeof(uint64_t))
            if numbers is NULL:
                raise MemoryError
            self._numbers, self._room = numbers, room
        return 0

    cdef void _add(
        self, uint64_t end, uint64_t closed_at, uint64_t events, uint64_t flags
    ) noexcept:
        cdef uint64_t *target = self._numbers + self._count
        target[0], target[1], target[2], target[3] = end, closed_at, events, flags
        self._count += FIELDS
        self.events += events
