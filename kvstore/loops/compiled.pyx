# cython: language_level=3, wraparound=False, initializedcheck=False
"""The loops of `plain`, which says what they do, over the bytes themselves.

What holds here beside that: an item of a list or an entry is checked to be bytes before it is
looked into; a stored key is at least eleven bytes long once `Live` has taken it; while anything is
called that might run Python, a list is indexed, which is checked, or a copy that nobody else has.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from kvstore.codec.keys import check_data_key as _check_data_key
from kvstore.errors import CorruptionError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.loops.plain import ABSENT as _ABSENT
from kvstore.loops.plain import let_others_run as _let_others_run
from kvstore.timestamp import Timestamp as _Timestamp

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type, Py_ssize_t)
    void PyObject_GC_UnTrack(PyObject *)
    const Py_ssize_t PY_SSIZE_T_MAX
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

cdef enum:
    TAIL = 9                    # suffix and kind
    CUT = 11                    # terminator, suffix, kind
    INVISIBLE = -1
    BUFFER_BYTES_MAX = 0x7FFFFFFF
    ROOM_BYTES_MIN = 1 << 10
    ROOM_BYTES_MAX = 1 << 22    # made before it is known to be needed
    TURN = 1024                 # keys between two calls of `let_others_run`, a millisecond

REVISION = 6

# Not looked up by name each time.
cdef object ABSENT = _ABSENT, Timestamp = _Timestamp, let_others_run = _let_others_run
cdef bytes TERMINATOR = b"\x00\x01", UNLIMITED = b"\x00\x02"
cdef Py_ssize_t LONGEST_KEY, LONGEST_VALUE


def take_bounds():
    """Copy the limits that the loops compare with. `kvstore.testing.bounds` calls this again."""
    global LONGEST_KEY, LONGEST_VALUE
    LONGEST_KEY, LONGEST_VALUE = KEY_BYTES_MAX, VALUE_BYTES_MAX


take_bounds()


def collect(
    source, list keys not None, list values not None, Py_ssize_t count, Py_ssize_t bytes_max
):
    cdef tuple entry
    cdef bytes value
    if count <= 0:
        return True
    for found in source:
        entry = _entry(found)
        value = <bytes?>(<object>PyTuple_GET_ITEM(entry, 1))
        keys.append(<object>PyTuple_GET_ITEM(entry, 0))
        values.append(value)
        count -= 1
        bytes_max -= PyBytes_GET_SIZE(value)
        if count == 0 or bytes_max <= 0:
            return True
    return False


def gather(
    source,
    list rows not None,
    Py_ssize_t count,
    Py_ssize_t bytes_max,
    Py_ssize_t first,
    Py_ssize_t last,
):
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


cdef inline tuple _entry(found):
    cdef tuple entry = <tuple?>found
    if PyTuple_GET_SIZE(entry) != 2:
        raise ValueError("an entry is a key and a value")
    return entry


cdef class Imports:
    """When the rows of an import are visible. Neighbours mostly have the same: it is kept."""
    cdef object _stamps
    cdef uint64_t _last
    cdef bint _is_known
    cdef int64_t added
    cdef uint64_t reverted      # 2 ** 63: never

    def __cinit__(self, stamps):
        self._stamps = stamps

    cdef bint find(self, uint64_t reference, const unsigned char *suffix) except -1:
        """Whether the import is known; `added` and `reverted` are its own then."""
        if reference != self._last:  # 0 is never given out
            lifetime = self._stamps.get(PyBytes_FromStringAndSize(<const char *>suffix, 8))
            self._last = 0
            self._is_known = lifetime is not None
            if lifetime is not None:
                self.added, self.reverted = lifetime
            self._last = reference
        return self._is_known


cdef class Live:
    """What `LiveRows` and `LiveColumns` have in common: all but what becomes of a live entry."""
    cdef readonly bytes last
    cdef int64_t _as_of
    cdef Imports _imports
    cdef list _starts, _newest
    cdef bytes _seen            # a key with the present stem
    cdef bytes _held            # the newest entry of that stem, None: none is visible
    cdef bytes _held_value
    cdef int64_t _time
    cdef Py_ssize_t _at         # between which bounds the last key lay, and what covers it there
    cdef int64_t _covered

    def __cinit__(self, int64_t as_of, stamps, list starts not None, list newest not None):
        if len(newest) != len(starts) + 1:
            raise ValueError("newest has one more than starts")
        self._as_of = as_of
        self._imports = Imports(stamps)
        self._starts = starts
        self._newest = newest
        self._time = INVISIBLE
        self._covered = newest[0]

    def pass_over(self, source, Py_ssize_t count, Py_ssize_t bytes_max=PY_SSIZE_T_MAX):
        cdef tuple entry
        cdef bytes key = None, value
        if count <= 0:
            return True
        for found in source:
            entry = _entry(found)
            key = <bytes?>(<object>PyTuple_GET_ITEM(entry, 0))
            value = <bytes?>(<object>PyTuple_GET_ITEM(entry, 1))
            self._take(key, value)
            count -= 1
            bytes_max -= PyBytes_GET_SIZE(value)
            if count == 0 or bytes_max <= 0:
                self.last = key
                return True
        if key is not None:
            self.last = key
        return False

    def end(self):
        self._release()

    cdef int _take(self, bytes key, bytes value) except -1:
        cdef const unsigned char *bytes_ = <const unsigned char *>PyBytes_AS_STRING(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key)
        cdef int64_t time
        if (
            size < CUT
            or bytes_[size - CUT] != 0
            or bytes_[size - CUT + 1] != 1
            or bytes_[size - 1] > 1
        ):
            _refuse_key(key)
        if (
            self._seen is None
            or PyBytes_GET_SIZE(self._seen) != size
            or memcmp(PyBytes_AS_STRING(self._seen), bytes_, size - TAIL)
        ):
            self._release()
            self._seen = key
        time = self._time_of(bytes_ + size - TAIL)
        if time > self._time:
            self._time = time
            self._held = key
            self._held_value = value
        return 0

    cdef int64_t _time_of(self, const unsigned char *tail) except -2:
        cdef uint64_t suffix = _big_endian(tail)
        cdef int64_t added
        if suffix >> 63:
            suffix = ~suffix
            return <int64_t>suffix if <int64_t>suffix <= self._as_of else INVISIBLE
        if not self._imports.find(suffix, tail):
            return INVISIBLE
        added = self._imports.added
        if added <= self._as_of and <uint64_t>self._as_of < self._imports.reverted:
            return added
        return INVISIBLE

    cdef int _release(self) except -1:
        cdef bytes key = self._held, value = self._held_value
        cdef int64_t time = self._time
        if key is None:
            return 0
        self._held = self._held_value = None
        self._time = INVISIBLE
        if PyBytes_AS_STRING(key)[PyBytes_GET_SIZE(key) - 1]:
            if PyList_GET_SIZE(self._starts):
                self._move(key)
            if self._covered <= time:
                self._show(key, value)
        return 0

    cdef int _move(self, bytes key) except -1:
        # Keys come in order: a step now and then, where `plain` searches each time.
        cdef Py_ssize_t at = self._at
        cdef list starts = self._starts
        while at < PyList_GET_SIZE(starts) and _compare(key, <bytes?>starts[at]) >= 0:
            at += 1
        while at > 0 and _compare(key, <bytes?>starts[at - 1]) < 0:
            at -= 1
        if at != self._at:
            self._at = at
            self._covered = self._newest[at]
        return 0

    cdef int _show(self, bytes key, bytes value) except -1:
        raise NotImplementedError


cdef class LiveRows(Live):
    cdef list _keys, _values

    def __cinit__(self, *_):
        self._keys = []
        self._values = []

    def found(self):
        shown = self._keys, self._values
        self._keys = []
        self._values = []
        return shown

    cdef int _show(self, bytes key, bytes value) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key) - CUT
        cdef bytes user_key = PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), size)
        if memchr(PyBytes_AS_STRING(key), 0, size) is not NULL:
            user_key = user_key.replace(b"\x00\xff", b"\x00")
            if PyBytes_GET_SIZE(_escaped(user_key)) != size:
                _refuse_key(key)
        self._keys.append(user_key)
        self._values.append(value)
        return 0


cdef class LiveColumns(Live):
    cdef Columns _columns
    cdef list _full             # what had no room for another one

    def __cinit__(self, *_):
        self._columns = Columns(None)
        self._full = []

    @property
    def rows(self):
        return self._columns.count

    @property
    def size(self):
        return self._columns.values.size

    def found(self):
        cdef list full = self._full
        cdef Columns columns = self._columns
        self._columns = Columns(columns)
        self._full = []
        if columns.count:
            full.append(columns.buffers())
        return full

    cdef int _show(self, bytes key, bytes value) except -1:
        cdef Columns columns = self._columns
        if (
            columns.keys.size + PyBytes_GET_SIZE(key) > BUFFER_BYTES_MAX
            or columns.values.size + PyBytes_GET_SIZE(value) > BUFFER_BYTES_MAX
        ):
            self._full.append(columns.buffers())
            columns = self._columns = Columns(columns)
        columns.add(key, value)
        return 0


cdef class Columns:
    """Two Arrow binary arrays that grow: offsets and bytes of each."""
    cdef Py_ssize_t count
    cdef Buffer key_offsets, keys, value_offsets, values

    def __cinit__(self, Columns before):
        self.key_offsets = _buffer_like(None if before is None else before.key_offsets)
        self.keys = _buffer_like(None if before is None else before.keys)
        self.value_offsets = _buffer_like(None if before is None else before.value_offsets)
        self.values = _buffer_like(None if before is None else before.values)
        self.key_offsets.end(0)
        self.value_offsets.end(0)

    cdef int add(self, bytes key, bytes value) except -1:
        cdef Py_ssize_t key_size = PyBytes_GET_SIZE(key) - CUT
        cdef Py_ssize_t value_size = PyBytes_GET_SIZE(value)
        cdef char *key_at = self.keys.reserve(key_size)
        cdef char *value_at = self.values.reserve(value_size)
        self.key_offsets.reserve(sizeof(int32_t))
        self.value_offsets.reserve(sizeof(int32_t))
        memcpy(key_at, PyBytes_AS_STRING(key), key_size)
        key_size = _unescape(key_at, key_size)
        if key_size < 0:
            _refuse_key(key)
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


cdef class Buffer:
    """Bytes that grow until they are handed out, and are then a buffer of Python's."""
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
        """Where so many bytes can be written behind those that are there."""
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
        """Append an offset, for which there is room."""
        cdef int32_t narrow = <int32_t>offset
        memcpy(self._bytes + self.size, &narrow, sizeof(int32_t))
        self.size += sizeof(int32_t)


cdef Buffer _buffer_like(Buffer before):
    """With room for a little more than that one has."""
    if before is None:
        return Buffer(ROOM_BYTES_MIN)
    return Buffer(min(max(before.size + before.size // 8, ROOM_BYTES_MIN), ROOM_BYTES_MAX))


cdef class Position:
    """A reader and its methods, bound once: a quarter of what a look-up takes is finding them."""
    cdef object reader, seek, next, key, value

    def __cinit__(self, reader):
        self.reader = reader
        self.seek = reader.seek
        self.next = reader.next
        self.key = reader.key
        self.value = reader.value


cdef class Readers:
    cdef object _make, _check
    cdef Py_ssize_t _most
    cdef list _idle             # of `Position`

    def __cinit__(self, make, check, Py_ssize_t most):
        self._make = make
        self._check = check
        self._most = most
        self._idle = []

    def renew(self):
        self._idle = []

    def borrow(self):
        cdef list idle = self._idle
        return idle, self._taken(idle).reader

    def give_back(self, list ticket not None, reader):
        self._kept(ticket, Position(reader))

    def find(self, bytes key not None, bytes rest not None, bytes limit not None):
        return self._found(key, rest, limit)

    cdef Position _taken(self, list idle):
        return <Position?>idle.pop() if PyList_GET_SIZE(idle) else Position(self._make())

    cdef int _kept(self, list idle, Position position) except -1:
        if PyList_GET_SIZE(idle) < self._most:
            idle.append(position)
        return 0

    cdef object _found(self, bytes key, bytes rest, bytes limit):
        cdef list idle = self._idle
        cdef Position position = self._taken(idle)
        value = _find(position, self._check, _escaped(key), rest, limit, ABSENT)
        self._kept(idle, position)
        return value

    cdef object _found_among(self, bytes key, int64_t as_of, bytes rest, Imports imports):
        cdef list idle = self._idle
        cdef Position position = self._taken(idle)
        cdef int64_t newest = INVISIBLE
        value = _find_among(position, self._check, key, as_of, rest, imports, &newest)
        self._kept(idle, position)
        return value


cdef class Lookup:
    cdef object _engine, _slowly
    cdef Readers _readers       # of the engine, where its `find` is theirs: 50 ns less than a call
    cdef Imports _imports
    cdef list _boundaries, _limits
    cdef int64_t _as_of         # the time of the last look-up, and what follows a key there
    cdef bytes _rest

    def __cinit__(self, engine, slowly):
        owner = getattr(engine.find, "__self__", None)
        self._engine = engine
        self._slowly = slowly
        self._readers = owner if isinstance(owner, Readers) else None
        self._as_of = 0
        self._rest = TERMINATOR + b"\xff" * 8
        self.show([], [UNLIMITED], {})

    def show(self, list boundaries not None, list limits not None, stamps):
        if len(limits) != len(boundaries) + 1:
            raise ValueError("limits has one more than boundaries")
        cdef Imports imports = Imports(stamps) if stamps else None
        self._boundaries = boundaries
        self._limits = limits
        self._imports = imports

    def get(self, bytes key not None, int64_t as_of):
        return self._value(key, as_of)

    cdef object _value(self, bytes key, int64_t as_of):
        # One view: making `rest` may let the collector run, and with it another thread.
        cdef list boundaries = self._boundaries, limits = self._limits
        cdef Imports imports = self._imports
        cdef bytes rest, limit
        if as_of != self._as_of:
            self._rest = TERMINATOR + (~<uint64_t>as_of).to_bytes(8, "big")
            self._as_of = as_of
        rest = self._rest
        if imports is not None:
            if self._readers is None or PyList_GET_SIZE(boundaries):
                return self._slowly(key, as_of)
            return self._readers._found_among(key, as_of, rest, imports)
        limit = <bytes?>limits[_stretch(boundaries, key)]
        if self._readers is not None:
            value = self._readers._found(key, rest, limit)
        else:
            value = self._engine.find(key, rest, limit)
        if value is ABSENT:
            return None if limit == UNLIMITED else self._slowly(key, as_of)
        return value


cdef class PointRead:
    cdef Lookup _lookup
    cdef object _frontiers, _otherwise

    def __cinit__(self, Lookup lookup not None, frontiers, otherwise):
        self._lookup = lookup
        self._frontiers = frontiers
        self._otherwise = otherwise

    def get(self, key, as_of=None, default=None):
        """The value of `key` at `as_of`, `default` where it is absent or deleted. One seek."""
        cdef int64_t at, upper
        cdef int overflow = 0
        frontiers = self._frontiers
        if type(key) is bytes and PyBytes_GET_SIZE(key) <= LONGEST_KEY and frontiers.is_healthy:
            upper = frontiers.upper
            if as_of is None:
                at = upper - 1
            elif type(as_of) is Timestamp or type(as_of) is int:
                at = PyLong_AsLongLongAndOverflow(as_of, &overflow)
                if overflow or at >= upper or at < <int64_t>frontiers.since:
                    return self._otherwise(key, as_of, default)
            else:
                return self._otherwise(key, as_of, default)
            value = self._lookup._value(<bytes>key, at)
            if at >= <int64_t>frontiers.floor:
                return default if value is None else value
        return self._otherwise(key, as_of, default)


cdef Py_ssize_t _stretch(list boundaries, bytes key) except -1:
    """How many of `boundaries` are at or below `key`."""
    cdef Py_ssize_t low = 0, middle, high = PyList_GET_SIZE(boundaries)
    while low < high:
        middle = (low + high) // 2
        if _compare(key, <bytes?>boundaries[middle]) < 0:
            high = middle
        else:
            low = middle + 1
    return low


def find_many(
    reader,
    check,
    list keys not None,
    bytes rest not None,
    list boundaries not None,
    list limits not None,
    absent,
):
    cdef list asked = list(keys), found = [None] * PyList_GET_SIZE(asked)
    cdef Py_ssize_t at, place, stretch = 0, stretches = PyList_GET_SIZE(boundaries)
    cdef Position position = Position(reader)
    cdef bytes key
    if PyList_GET_SIZE(limits) != stretches + 1:
        raise ValueError("limits has one more than boundaries")
    cdef Place *order = _order(asked)
    try:
        for at in range(PyList_GET_SIZE(asked)):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            key = <bytes>PyList_GET_ITEM(asked, place)
            while stretch < stretches and _compare(key, <bytes?>boundaries[stretch]) >= 0:
                stretch += 1
            found[place] = _find(
                position, check, _escaped(key), rest, <bytes?>limits[stretch], absent
            )
    finally:
        free(order)
    return found


def find_among(reader, check, list keys not None, int64_t as_of, bytes rest not None, stamps):
    cdef list asked = list(keys), found = [None] * PyList_GET_SIZE(asked)
    cdef Py_ssize_t at, place
    cdef int64_t newest
    cdef Position position = Position(reader)
    cdef Imports imports = Imports(stamps)
    cdef Place *order = _order(asked)
    try:
        for at in range(PyList_GET_SIZE(asked)):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            value = _find_among(
                position,
                check,
                <bytes>PyList_GET_ITEM(asked, place),
                as_of,
                rest,
                imports,
                &newest,
            )
            found[place] = newest, value
    finally:
        free(order)
    return found


def arrange(items, keys):
    cdef list given = list(items), by = list(keys), arranged
    cdef Py_ssize_t at
    cdef Place *order
    if PyList_GET_SIZE(by) != PyList_GET_SIZE(given):
        raise ValueError("each item has a key")
    arranged = [None] * PyList_GET_SIZE(given)
    order = _order(by)
    try:
        for at in range(PyList_GET_SIZE(given)):
            arranged[at] = <object>PyList_GET_ITEM(given, order[at].at)
    finally:
        free(order)
    return arranged


cdef class Puts:
    cdef public dict points
    cdef public Py_ssize_t size, size_max

    def __cinit__(self):
        self.points = {}
        self.size_max = PY_SSIZE_T_MAX

    def put(self, key, value):
        """Set `key` to `value`. The last write to a key wins."""
        if (
            self.size <= self.size_max
            and type(key) is bytes
            and type(value) is bytes
            and PyBytes_GET_SIZE(key) <= LONGEST_KEY
            and PyBytes_GET_SIZE(value) <= LONGEST_VALUE
        ):
            self.points[key] = value
            self.size += PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(value)
        else:
            self.put_otherwise(key, value)

    def put_otherwise(self, key, value):
        raise NotImplementedError


def put_all(put, dict points not None, bytes suffix not None, family):
    cdef list keys = list(points), values = list(points.values())
    cdef bytes value_tail = TERMINATOR + suffix + b"\x01"
    cdef bytes tombstone_tail = TERMINATOR + suffix + b"\x00"
    cdef bytes escaped
    cdef Py_ssize_t at, place
    cdef Place *order = _order(keys)
    try:
        for at in range(PyList_GET_SIZE(keys)):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            escaped = _escaped(<bytes>PyList_GET_ITEM(keys, place))
            value = <object>PyList_GET_ITEM(values, place)
            if value is None:
                put(_joined(escaped, tombstone_tail), b"", family)
            else:
                put(_joined(escaped, value_tail), value, family)
    finally:
        free(order)


cdef inline object _find(
    Position position, check, bytes escaped, bytes rest, bytes limit, absent
):
    position.seek(_joined(escaped, rest))
    here = position.key()
    if here is None:
        check(position.reader)
        return absent
    cdef bytes found = <bytes?>here
    cdef Py_ssize_t size = PyBytes_GET_SIZE(found)
    if not _is_below(found, escaped, limit):
        return absent
    _require_size(found, escaped)
    return None if PyBytes_AS_STRING(found)[size - 1] == 0 else position.value()


cdef object _find_among(
    Position position,
    check,
    bytes key,
    int64_t as_of,
    bytes rest,
    Imports imports,
    int64_t *newest,
):
    cdef bytes escaped = _escaped(key), found
    cdef const unsigned char *tail
    cdef uint64_t suffix
    cdef Py_ssize_t size
    newest[0] = INVISIBLE
    value = None
    position.seek(_joined(escaped, TERMINATOR))
    here = position.key()
    while here is not None:
        found = <bytes?>here
        size = PyBytes_GET_SIZE(found)
        if not _is_below(found, escaped, UNLIMITED):
            break
        _require_size(found, escaped)
        tail = <const unsigned char *>PyBytes_AS_STRING(found) + size - TAIL
        suffix = _big_endian(tail)
        if not suffix >> 63:
            if (
                imports.find(suffix, tail)
                and newest[0] < imports.added
                and imports.added <= as_of
                and <uint64_t>as_of < imports.reverted
            ):
                newest[0] = imports.added
                value = position.value() if tail[8] else None
            position.next()
        elif <int64_t>~suffix <= as_of:
            if <int64_t>~suffix > newest[0]:
                newest[0] = <int64_t>~suffix
                value = position.value() if tail[8] else None
            break
        else:
            position.seek(_joined(escaped, rest))
        here = position.key()
    if here is None:
        check(position.reader)
    return value


cdef inline int _require_size(bytes found, bytes escaped) except -1:
    """Raise `CorruptionError` unless an entry that lies among those of a key, escaped, is one."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(found)
    if (
        size != PyBytes_GET_SIZE(escaped) + CUT
        or <unsigned char>PyBytes_AS_STRING(found)[size - 1] > 1
    ):
        _refuse_key(found)
    return 0


cdef int _refuse_key(bytes key) except -1:
    _check_data_key(key)
    raise AssertionError("a key of data was refused and is one")


cdef inline bytes _escaped(bytes key):
    if memchr(PyBytes_AS_STRING(key), 0, PyBytes_GET_SIZE(key)) is NULL:
        return key
    return key.replace(b"\x00", b"\x00\xff")


cdef inline bytes _joined(bytes first, bytes second):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(first)
    cdef bytes both = PyBytes_FromStringAndSize(NULL, size + PyBytes_GET_SIZE(second))
    memcpy(PyBytes_AS_STRING(both), PyBytes_AS_STRING(first), size)
    memcpy(PyBytes_AS_STRING(both) + size, PyBytes_AS_STRING(second), PyBytes_GET_SIZE(second))
    return both


cdef inline int _compare(bytes one, bytes other) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(one), other_size = PyBytes_GET_SIZE(other)
    cdef int difference = memcmp(
        PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), min(size, other_size)
    )
    return difference if difference else (size > other_size) - (size < other_size)


cdef inline bint _is_below(bytes found, bytes escaped, bytes limit) noexcept:
    """Whether `found < escaped + limit`."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(escaped), rest = PyBytes_GET_SIZE(found) - size
    cdef int difference = memcmp(
        PyBytes_AS_STRING(found), PyBytes_AS_STRING(escaped), size if rest >= 0 else rest + size
    )
    if difference or rest < 0:
        return difference <= 0
    cdef Py_ssize_t limited = PyBytes_GET_SIZE(limit)
    difference = memcmp(
        PyBytes_AS_STRING(found) + size, PyBytes_AS_STRING(limit), min(rest, limited)
    )
    return difference < 0 if difference else rest < limited


cdef inline uint64_t _big_endian(const unsigned char *bytes_) noexcept:
    cdef uint64_t word = 0
    cdef int at
    for at in range(8):
        word = word << 8 | bytes_[at]
    return word


cdef struct Place:
    uint64_t word               # the eight bytes behind what all keys begin with
    Py_ssize_t at


cdef Place *_order(list keys) except NULL:
    """The places of `keys` in their order, to be freed. A merge sort: most comparisons are of two
    words, which lie where they are used, and not of keys, each of which lies elsewhere."""
    cdef Py_ssize_t at, size, shared, count = PyList_GET_SIZE(keys), width = 1
    cdef Py_ssize_t left, right, middle, end, out
    cdef const char *first
    cdef const char *bytes_
    cdef bytes key
    cdef bint is_ordered = True
    for at in range(count):
        key = <bytes?>(<object>PyList_GET_ITEM(keys, at))
        bytes_ = PyBytes_AS_STRING(key)
        size = PyBytes_GET_SIZE(key)
        if at == 0:
            first, shared = bytes_, size
        shared = min(shared, size)
        size = 0
        while size < shared and bytes_[size] == first[size]:
            size += 1
        shared = size
    cdef Place *places = <Place *>malloc((2 * count + 1) * sizeof(Place))
    if places is NULL:
        raise MemoryError
    cdef Place *source = places
    cdef Place *target = places + count
    for at in range(count):
        source[at].at = at
        source[at].word = _word(<bytes>PyList_GET_ITEM(keys, at), shared)
        if at and is_ordered:
            is_ordered = not _is_less(keys, source[at], source[at - 1])
    if is_ordered:
        return places
    while width < count:
        left = 0
        while left < count:
            middle = min(left + width, count)
            end = min(middle + width, count)
            right, out, at = middle, left, left
            while out < end:
                if at < middle and (right == end or not _is_less(keys, source[right], source[at])):
                    target[out] = source[at]
                    at += 1
                else:
                    target[out] = source[right]
                    right += 1
                out += 1
            left = end
        source, target = target, source
        width *= 2
    if source is not places:
        memcpy(places, source, count * sizeof(Place))
    return places


cdef inline uint64_t _word(bytes key, Py_ssize_t skip) noexcept:
    cdef const unsigned char *bytes_ = <const unsigned char *>PyBytes_AS_STRING(key) + skip
    cdef Py_ssize_t at, size = PyBytes_GET_SIZE(key) - skip
    cdef uint64_t word = 0
    if size >= 8:
        return _big_endian(bytes_)
    for at in range(size):
        word |= <uint64_t>bytes_[at] << (56 - 8 * at)
    return word


cdef inline bint _is_less(list keys, Place one, Place other) noexcept:
    if one.word != other.word:
        return one.word < other.word
    cdef bytes key = <bytes>PyList_GET_ITEM(keys, one.at)
    return _compare(key, <bytes>PyList_GET_ITEM(keys, other.at)) < 0


def join_puts(dict points not None, Py_ssize_t longest, bytes places not None, int op):
    cdef list keys = list(points), values = list(points.values())
    cdef Py_ssize_t at, total = 0, count = PyList_GET_SIZE(keys)
    cdef Py_ssize_t head = 2 * (count + 1) * sizeof(int32_t), middle = PyBytes_GET_SIZE(places)
    cdef bytes body
    cdef char *begin
    cdef char *end
    if PyList_GET_SIZE(values) != count:
        raise ValueError("points changed")
    for at in range(count):
        value = <object>PyList_GET_ITEM(values, at)
        if value is None or PyBytes_GET_SIZE(<bytes?>value) > longest:
            return None
        total += PyBytes_GET_SIZE(<bytes?>(<object>PyList_GET_ITEM(keys, at)))
        total += PyBytes_GET_SIZE(value)
    if total > BUFFER_BYTES_MAX:
        raise OverflowError("the puts of an entry have 2 GiB")
    body = PyBytes_FromStringAndSize(NULL, head + middle + total + count)
    begin = PyBytes_AS_STRING(body)
    end = begin + head
    memcpy(end, PyBytes_AS_STRING(places), middle)
    end = _lay(keys, <int32_t *>begin, end + middle)
    end = _lay(values, <int32_t *>begin + count + 1, end)
    memset(end, op, count)
    return body


cdef enum:
    RULE_ANY = 1                # as in `plain`
    RULE_NO_VALUE = 2
    RULE_ID = 3
    RULE_SPAN = 4


def survey(
    body, Py_ssize_t count, bint is_sequenced, bytes rules not None, where
):
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
    """One of several integers, which need not be aligned."""
    cdef int32_t number
    memcpy(&number, numbers + at * <Py_ssize_t>sizeof(int32_t), sizeof(int32_t))
    return number


cdef bint _ascend(const unsigned char *numbers, Py_ssize_t count) noexcept:
    # No branch in the loop, so that it takes several at once: 10,000 in 2 us.
    cdef Py_ssize_t at
    cdef int falls = 0
    for at in range(count - 1):
        falls |= _number(numbers, at) > _number(numbers, at + 1)
    return not falls


cdef bint _ascend_strictly(const unsigned char *numbers, Py_ssize_t count) noexcept:
    """Whether numbers that are not negative ascend, none coming twice."""
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
    """Whether the key and the value of a row are such as its operation has."""
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


def lz4_size(block):
    cdef Py_buffer view
    PyObject_GetBuffer(block, &view, PyBUF_SIMPLE)
    try:
        return _lz4_size(<const unsigned char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t _lz4_size(const unsigned char *block, Py_ssize_t end) noexcept:
    cdef Py_ssize_t at = 0, size = 0, literals
    cdef int token
    while at < end:
        token = block[at]
        at += 1
        literals = _lz4_length(block, &at, end, token >> 4)
        at += literals
        size += literals
        if at >= end:
            return size if at == end else -1
        at += 2
        size += _lz4_length(block, &at, end, token & 15) + 4
    return -1


cdef inline Py_ssize_t _lz4_length(
    const unsigned char *block, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t length
) noexcept:
    """A length whose first four bits are `length`; `at` is behind it, or behind `end`."""
    cdef int more = 255
    if length == 15:
        while more == 255:
            if at[0] >= end:
                at[0] = end + 1
                break
            more = block[at[0]]
            at[0] += 1
            length += more
    return length


def cut(offsets, data):
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


cdef class Tuples:
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
                field = (<list>field)[at]  # checked: it may have been cut meanwhile
            Py_INCREF(field)
            PyTuple_SET_ITEM(made, number, field)
        self._at = at + 1
        return made


tuples = Tuples


def join(list items not None):
    cdef Py_ssize_t at, total = 0, count = PyList_GET_SIZE(items)
    cdef bytes offsets, joined
    for at in range(count):
        total += PyBytes_GET_SIZE(<bytes?>(<object>PyList_GET_ITEM(items, at)))
    if total > BUFFER_BYTES_MAX:
        return None
    offsets = PyBytes_FromStringAndSize(NULL, (count + 1) * sizeof(int32_t))
    joined = PyBytes_FromStringAndSize(NULL, total)
    _lay(items, <int32_t *>PyBytes_AS_STRING(offsets), PyBytes_AS_STRING(joined))
    return offsets, joined


cdef char *_lay(list items, int32_t *offsets, char *joined) noexcept:
    """Write `items`, which are bytes, one behind the other, and where each begins and the last one
    ends. Where that is."""
    cdef Py_ssize_t at, size
    cdef char *end = joined
    offsets[0] = 0
    for at in range(PyList_GET_SIZE(items)):
        size = PyBytes_GET_SIZE(<bytes>PyList_GET_ITEM(items, at))
        memcpy(end, PyBytes_AS_STRING(<bytes>PyList_GET_ITEM(items, at)), size)
        end += size
        offsets[at + 1] = <int32_t>(end - joined)
    return end


cdef Py_ssize_t _unescape(char *bytes_, Py_ssize_t size) noexcept:
    """Turn each 00 ff into 00, in place; the new length, -1 where a 00 has no ff behind it."""
    cdef char *read = <char *>memchr(bytes_, 0, size)
    cdef char *end = bytes_ + size
    cdef char *write = read
    if read is NULL:
        return size
    while read < end:
        write[0] = read[0]
        write += 1
        if read[0] == 0:
            if read + 1 == end or <unsigned char>read[1] != 0xFF:
                return -1
            read += 1
        read += 1
    return write - bytes_
