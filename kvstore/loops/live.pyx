# cython: language_level=3, wraparound=False, initializedcheck=False
"""Live entries: what a read at one time sees of a pass over `data`.

A key's live entry is its newest entry at or below the read's time, if that is a value and no newer
range tombstone covers it. The suffix of an entry has its time. An entry of an import has a
reference there instead, and the time at which the import was added.

Invariants
1. The entries of one key are neighbours in the pass. The newest seen so far is held until the pass
   reaches another key, or ends.
2. An item of a list or an entry is checked to be bytes before its bytes are read.
3. A stored key has at least `LEAST` bytes once `Live` has accepted it.
4. Where a call may run Python code, items are taken by an index that is checked, or from a copy
   that no other code can reach.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo

include "shared.pxi"
include "imports.pxi"

from kvstore.limits import VERSIONS_PASSED_MAX

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    ROOM_BYTES_MIN = 1 << 10
    ROOM_BYTES_MAX = 1 << 22    # allocated before the need is known

cdef bytes FIRST_TIMED_SUFFIX = _keys.FIRST_TIMED_SUFFIX
cdef Py_ssize_t PASSED_MAX


def take_bounds():
    """Copy the limits that the loops compare with. `tests/harness/bounds.py` calls this again."""
    global PASSED_MAX
    PASSED_MAX = VERSIONS_PASSED_MAX


take_bounds()


def collect(
    source, list keys not None, list values not None, Py_ssize_t count, Py_ssize_t bytes_max
):
    """Append entries of `source` to `keys` and `values`: `count` entries, or fewer once their
    values have `bytes_max` bytes. False where `source` has ended, True where it may have more."""
    cdef tuple entry
    cdef bytes value
    if count <= 0:
        return True
    for found in source:
        entry = entry_of(found)
        value = <bytes?>(<object>PyTuple_GET_ITEM(entry, 1))
        keys.append(<object>PyTuple_GET_ITEM(entry, 0))
        values.append(value)
        count -= 1
        bytes_max -= PyBytes_GET_SIZE(value)
        if count == 0 or bytes_max <= 0:
            return True
    return False


cdef inline tuple entry_of(found):
    cdef tuple entry = <tuple?>found
    if PyTuple_GET_SIZE(entry) != 2:
        raise ValueError("an entry is a key and a value")
    return entry


@cython.final
cdef class Entries:
    """The entries from the one where a reader stands, forwards or backwards. The reader may be
    moved meanwhile. With a `bound` the entries end below this key, or backwards at it."""
    cdef object _reader, _key, _value, _step
    cdef bytes _bound
    cdef bint _reverse

    def __cinit__(self, reader, *, bint reverse, bytes bound=None):
        self._reader, self._reverse, self._bound = reader, reverse, bound
        self._key = reader.key
        self._value = reader.value
        self._step = reader.prev if reverse else reader.next

    def __iter__(self):
        return self

    def __next__(self):
        cdef bytes key = self._here()
        if key is None:
            raise StopIteration
        value = self._value()
        self._step()
        return key, value

    cdef bytes _here(self):
        """The key of the next entry, None where there is none."""
        cdef bytes key = self._key()
        if (
            key is not None
            and self._bound is not None
            and (compare(key, self._bound) < 0) == self._reverse
        ):
            return None
        return key


cdef class Live:
    """Picks the live entries out of a pass over `data`, in pieces, forwards or backwards.

    `stamps` maps the reference of each import that the read knows to the times at which the import
    was added and reverted; entries of other imports are invisible. `nearby` tells of the range
    tombstones near a stored key, and is asked again only where the pass leaves the stored keys
    that an answer is about. The subclasses hand out the entries that were found alive.
    """
    cdef readonly bytes last    # the last stored key that was passed over
    cdef readonly tuple ahead   # where a pass should continue, so that it leaves out versions of one
                                # key that decide nothing
    cdef int64_t _as_of
    cdef _Imports _imports
    cdef object _nearby         # None: there is no range tombstone
    cdef bytes _low, _high      # the stored keys that the last answer is about; high may be None
    cdef list _bounds, _newest  # that answer, copied
    cdef bytes _seen            # the first stored key with the stem that the pass has reached
    cdef Py_ssize_t _run        # the entries with that stem, since the pass last went ahead
    cdef bytes _held            # the newest visible entry of that stem, or None
    cdef bytes _held_value
    cdef int64_t _time
    cdef Py_ssize_t _at         # the last key lay between the bounds `_at - 1` and `_at`
    cdef int64_t _covered       # the newest range tombstone there
    cdef Py_ssize_t _shown      # the entries found alive in this call of `pass_over`

    def __cinit__(self, int64_t as_of, stamps, nearby=None):
        self._as_of = as_of
        self._imports = _Imports(stamps)
        self._nearby = nearby
        self._low = self._high = b""
        self._bounds = []
        self._newest = [0]
        self._time = INVISIBLE

    def pass_over(self, source, Py_ssize_t count, Py_ssize_t bytes_max=PY_SSIZE_T_MAX):
        """Pass over the next entries of `source`, as many as `collect` takes, or fewer: where
        `ahead` is set, `source` has to continue from there. Raises
        `CorruptionError` for a key that `data` cannot have."""
        cdef tuple entry
        cdef bytes key = None, value
        self.ahead = None
        if count <= 0:
            return True
        for found in source:
            entry = entry_of(found)
            key = <bytes?>(<object>PyTuple_GET_ITEM(entry, 0))
            value = <bytes?>(<object>PyTuple_GET_ITEM(entry, 1))
            self._take(key, value)
            if self._run > PASSED_MAX and self._go_ahead(key):
                self.last = key
                return True
            count -= 1
            bytes_max -= PyBytes_GET_SIZE(value)
            if count == 0 or bytes_max <= 0:
                self.last = key
                return True
        if key is not None:
            self.last = key
        return False

    def pass_rows(
        self, Entries source not None, Py_ssize_t count, Py_ssize_t bytes_max, Py_ssize_t rows_max
    ):
        """As `pass_over`, until `rows_max` entries are found alive. Moves the reader of `source`
        itself where versions are left out. Reads no value that decides nothing, such as an old
        version's."""
        cdef bytes key = None
        cdef int64_t time
        self._shown = 0
        while count > 0 and bytes_max > 0 and self._shown < rows_max:
            key = source._here()
            if key is None:
                return False
            time = self._reach(key)
            if time > self._time:
                self._held_value = <bytes?>source._value()
                self._held, self._time = key, time
                bytes_max -= PyBytes_GET_SIZE(self._held_value)
            self.last = key
            if self._run > PASSED_MAX and self._go_ahead(key):
                target, is_floor = self.ahead
                self.ahead = None
                if is_floor:
                    source._reader.seek_for_prev(target)
                else:
                    source._reader.seek(target)
                count -= PASSED_MAX     # a seek takes as long as that many entries
            else:
                source._step()
            count -= 1
        return True

    def end(self):
        """Decide the entry that is held: the pass has no more."""
        self._release()

    @cython.final
    cdef int _take(self, bytes key, bytes value) except -1:
        cdef int64_t time = self._reach(key)
        if time > self._time:
            self._time = time
            self._held = key
            self._held_value = value
        return 0

    @cython.final
    cdef int64_t _reach(self, bytes key) except -2:
        """The time of the entry with this key. Decides the entry that is held, if the key is another
        one's."""
        cdef const unsigned char *bytes_ = <const unsigned char *>PyBytes_AS_STRING(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key)
        if (
            size < LEAST
            or bytes_[size - LEAST] != TERMINATOR_0
            or bytes_[size - LEAST + 1] != TERMINATOR_1
            or bytes_[size - 1] > KIND_MAX
        ):
            refuse_key(key)
        if (
            self._seen is None
            or PyBytes_GET_SIZE(self._seen) != size
            or memcmp(PyBytes_AS_STRING(self._seen), bytes_, size - TAIL)
        ):
            self._release()
            self._seen = key
            self._run = 0
        self._run += 1
        return self._time_of(bytes_ + size - TAIL)

    @cython.final
    cdef bint _go_ahead(self, bytes key) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key)
        cdef uint64_t suffix = big_endian(<const unsigned char *>PyBytes_AS_STRING(key) + size - TAIL)
        cdef bytes stem, least
        if suffix < FIRST_TIMED:
            return False
        self._run = 0
        stem = key[: size - TAIL]
        least = (~<uint64_t>self._as_of).to_bytes(8, "big")
        if <int64_t>~suffix > self._as_of and compare(key, self._seen) < 0:
            self.ahead = stem + FIRST_TIMED_SUFFIX, True
        elif <int64_t>~suffix > self._as_of or compare(key, self._seen) < 0:
            self.ahead = stem + least, False
        else:
            self.ahead = key[: size - LEAST] + UNLIMITED, False
        return True

    @cython.final
    cdef int64_t _time_of(self, const unsigned char *tail) except -2:
        cdef uint64_t suffix = big_endian(tail)
        cdef int64_t added
        if suffix >= FIRST_TIMED:
            suffix = ~suffix
            return <int64_t>suffix if <int64_t>suffix <= self._as_of else INVISIBLE
        if not self._imports.find(suffix, tail):
            return INVISIBLE
        added = self._imports.added
        if added <= self._as_of and <uint64_t>self._as_of < self._imports.reverted:
            return added
        return INVISIBLE

    @cython.final
    cdef int _release(self) except -1:
        cdef bytes key = self._held, value = self._held_value
        cdef int64_t time = self._time
        if key is None:
            return 0
        self._held = self._held_value = None
        self._time = INVISIBLE
        if PyBytes_AS_STRING(key)[PyBytes_GET_SIZE(key) - 1]:
            if self._nearby is not None:
                self._move(key)
            if self._covered <= time:
                self._show(key, value)
                self._shown += 1
        return 0

    @cython.final
    cdef int _move(self, bytes key) except -1:
        # Keys come in order, so the next bound is mostly the same; `plain` searches each time.
        cdef Py_ssize_t at
        if compare(key, self._low) < 0 or self._high is not None and compare(key, self._high) >= 0:
            self._ask(key)
        at = self._at
        cdef list bounds = self._bounds
        while at < PyList_GET_SIZE(bounds) and compare(key, <bytes?>bounds[at]) >= 0:
            at += 1
        while at > 0 and compare(key, <bytes?>bounds[at - 1]) < 0:
            at -= 1
        self._at = at
        self._covered = self._newest[at]
        return 0

    @cython.final
    cdef int _ask(self, bytes key) except -1:
        low, high, bounds, newest = self._nearby(key)
        cdef bytes low_, high_ = high
        low_ = <bytes?>low
        self._bounds, self._newest = list(bounds), list(newest)
        self._low, self._high, self._at = low_, high_, 0
        return 0

    cdef int _show(self, bytes key, bytes value) except -1:
        raise NotImplementedError


cdef class LiveRows(Live):
    """Live entries as rows."""
    cdef list _keys, _values

    def __cinit__(self, *_):
        self._keys = []
        self._values = []

    def found(self):
        """User keys and values that were found since the last call."""
        shown = self._keys, self._values
        self._keys = []
        self._values = []
        return shown

    cdef int _show(self, bytes key, bytes value) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key) - LEAST
        cdef bytes user_key = PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), size)
        if memchr(PyBytes_AS_STRING(key), 0, size) is not NULL:
            size = unescape(PyBytes_AS_STRING(user_key), size)
            if size < 0:
                refuse_key(key)
            user_key = user_key[:size]
        self._keys.append(user_key)
        self._values.append(value)
        return 0


cdef class LiveColumns(Live):
    """Live entries as Arrow columns."""
    cdef _Columns _columns
    cdef list _full             # columns that had no room for another row

    def __cinit__(self, *_):
        self._columns = _Columns(None)
        self._full = []

    @property
    def rows(self):
        """How many live entries were found since the last call of `found`."""
        return self._columns.count

    @property
    def size(self):
        """The bytes of their values."""
        return self._columns.values.size

    def found(self):
        """Keys and values that were found since the last call, in as many pieces as Arrow arrays
        of their bytes need: none where no entry was found."""
        cdef list full = self._full
        cdef _Columns columns = self._columns
        self._columns = _Columns(columns)
        self._full = []
        if columns.count:
            full.append(columns.buffers())
        return full

    cdef int _show(self, bytes key, bytes value) except -1:
        cdef _Columns columns = self._columns
        if (
            columns.keys.size + PyBytes_GET_SIZE(key) > ARRAY_BYTES_MAX
            or columns.values.size + PyBytes_GET_SIZE(value) > ARRAY_BYTES_MAX
        ):
            self._full.append(columns.buffers())
            columns = self._columns = _Columns(columns)
        columns.add(key, value)
        return 0


@cython.final
cdef class _Columns:
    """Two Arrow binary arrays that grow: offsets and bytes of each."""
    cdef Py_ssize_t count
    cdef _Buffer key_offsets, keys, value_offsets, values

    def __cinit__(self, _Columns before):
        self.key_offsets = _buffer_like(None if before is None else before.key_offsets)
        self.keys = _buffer_like(None if before is None else before.keys)
        self.value_offsets = _buffer_like(None if before is None else before.value_offsets)
        self.values = _buffer_like(None if before is None else before.values)
        self.key_offsets.end(0)
        self.value_offsets.end(0)

    cdef int add(self, bytes key, bytes value) except -1:
        cdef Py_ssize_t key_size = PyBytes_GET_SIZE(key) - LEAST
        cdef Py_ssize_t value_size = PyBytes_GET_SIZE(value)
        cdef char *key_at = self.keys.reserve(key_size)
        cdef char *value_at = self.values.reserve(value_size)
        self.key_offsets.reserve(sizeof(int32_t))
        self.value_offsets.reserve(sizeof(int32_t))
        memcpy(key_at, PyBytes_AS_STRING(key), key_size)
        key_size = unescape(key_at, key_size)
        if key_size < 0:
            refuse_key(key)
        # From here on nothing fails.
        memcpy(value_at, PyBytes_AS_STRING(value), value_size)
        self.keys.size += key_size
        self.values.size += value_size
        self.key_offsets.end(self.keys.size)
        self.value_offsets.end(self.values.size)
        self.count += 1
        return 0

    cdef tuple buffers(self):
        return self.count, self.key_offsets, self.keys, self.value_offsets, self.values


@cython.final
cdef class _Buffer:
    """Bytes that grow until they are handed out as a Python buffer."""
    cdef char *_bytes
    cdef Py_ssize_t size, _room

    def __cinit__(self, Py_ssize_t room):
        self._bytes = <char *>malloc(room)
        if self._bytes is NULL:
            raise MemoryError
        self._room = room

    def __dealloc__(self):
        free(self._bytes)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._bytes, self.size, True, flags)

    cdef char *reserve(self, Py_ssize_t more) except NULL:
        """Make room for `more` bytes, and return the place at which to write them."""
        cdef Py_ssize_t room = self._room
        cdef char *moved
        if more > room - self.size:
            room = max(2 * room, self.size + more)
            moved = <char *>realloc(self._bytes, room)
            if moved is NULL:
                raise MemoryError
            self._bytes = moved
            self._room = room
        return self._bytes + self.size

    cdef void end(self, Py_ssize_t offset) noexcept:
        """Append an offset. `reserve` has made room for it."""
        cdef int32_t narrow = <int32_t>offset
        memcpy(self._bytes + self.size, &narrow, sizeof(int32_t))
        self.size += sizeof(int32_t)


cdef _Buffer _buffer_like(_Buffer before):
    """A new buffer with room for a little more bytes than `before` has."""
    if before is None:
        return _Buffer(ROOM_BYTES_MIN)
    return _Buffer(min(max(before.size + before.size // 8, ROOM_BYTES_MIN), ROOM_BYTES_MAX))
