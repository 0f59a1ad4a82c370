# cython: language_level=3, wraparound=False, initializedcheck=False
"""Look-ups in the entries of `data`: the value of one key, of many keys, of many keys each at a time
of its own, or its next version from that time on; and floors, the greatest live key at or below a
place.

`kvstore/mvcc/lookup.py` draws the stretch of entries in which a look-up searches: from the escaped
key with `rest` behind it, to below the escaped key with a limit behind it. Where range tombstones
lie, each piece of the key space between two boundaries has a limit of its own. `limits` is the
tree of these (see `LimitNode`), which is `depth` steps deep.

Keys with times of their own are found in one walk. It takes the keys in key order, and the times of
one key newest first, because the entries of `data` lie in this order. So the reader only moves
forwards. It takes up to `steps` entries one by one before it seeks: a `steps` of 0 is a seek for
each version, a large one is a merge of the labels with the entries. Between the two the walk finds
the cheaper way by itself: after steps in vain it seeks for a while, and then tries again.

A floor is found from its place downwards. The entries of a key come oldest first on this way, so
the last visible one of them decides, and the references of imports come behind all of them. A key
with many entries takes two seeks; a key that is not alive takes a step for each of its entries.

Invariants
1. Keys, places, entries, limits and boundaries are checked to be bytes before their bytes are read.
2. Where a call may run Python code, items are taken by an index that is checked, or from a copy
   that no other code can reach. The columns of labels in order belong to Arrow arrays, which do not
   change.
3. Each place that the reader of a walk is sent to lies at or above the place before it. A version
   that answers one time answers the next one, without a move, if it is not newer.
4. Nobody but the walk sees the place that it writes anew for each label.
5. The reader of a floor stands at the last entry of a key, or at any entry of it, when the key is
   decided: the next move leads to the entries below.
6. An entry has at least `LEAST` bytes once `_Descent` has accepted it.
"""

cimport cython
from cpython.buffer cimport PyBUF_CONTIG_RO, PyBuffer_Release, PyObject_GetBuffer

include "shared.pxi"
include "imports.pxi"
include "labels.pxi"
include "order.pxi"
include "newest.pxi"

from array import array as _array

from kvstore.limits import KEY_BYTES_MAX
from kvstore.base.timestamp import OTHER_UNITS_MAX as _OTHER_UNITS_MAX
from kvstore.base.timestamp import Timestamp as _Timestamp

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

cdef enum:
    VAIN_MOST = 15              # seeks after which the walk tries steps again, however often in vain
    VALUES_LEAST = 4096         # bytes of values to begin with

cdef object ABSENT = _contract.ABSENT, Timestamp = _Timestamp  # looking names up takes time
cdef object array = _array
cdef bytes EMPTY = b"", LAST = b"\xff", FIRST_TIMED_SUFFIX = _keys.FIRST_TIMED_SUFFIX
cdef Py_ssize_t SUFFIX = _keys.SUFFIX_BYTES
cdef object MOVED = "an entry that was passed is gone from the reader's view"
cdef Py_ssize_t LONGEST_KEY
cdef int64_t OTHER_UNITS = _OTHER_UNITS_MAX


def take_bounds():
    """Copy the limits that the loops compare with. `tests/harness/bounds.py` calls this again."""
    global LONGEST_KEY
    LONGEST_KEY = KEY_BYTES_MAX


take_bounds()


# -- readers -----------------------------------------------------------------------------------------


@cython.final
cdef class _BoundReader:
    """A reader and its methods, bound once: binding them takes a quarter of a look-up."""
    cdef object reader, seek, next, key, value

    def __cinit__(self, reader):
        self.reader = reader
        self.seek = reader.seek
        self.next = reader.next
        self.key = reader.key
        self.value = reader.value


cdef inline int _require_size(bytes found, bytes escaped) except -1:
    """Raise `CorruptionError` unless `found`, which lies among the entries of a key, is one."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(found)
    if (
        size != PyBytes_GET_SIZE(escaped) + LEAST
        or <unsigned char>PyBytes_AS_STRING(found)[size - 1] > KIND_MAX
    ):
        refuse_key(found)
    return 0


cdef inline bint is_below(bytes found, bytes escaped, bytes limit) noexcept:
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


cdef Py_ssize_t _stretch(list boundaries, bytes key) except -1:
    """How many of `boundaries` are at or below `key`."""
    cdef Py_ssize_t low = 0, middle, high = PyList_GET_SIZE(boundaries)
    while low < high:
        middle = (low + high) // 2
        if compare(key, <bytes?>boundaries[middle]) < 0:
            high = middle
        else:
            low = middle + 1
    return low


# -- one key, and many at one time -------------------------------------------------------------------


@cython.final
cdef class _Lending:
    """Readers that may answer the same look-ups: all keys but `written` have in each reader the
    entries that they have now. `size` counts the bytes of the writes that are noted."""
    cdef list idle              # of `_BoundReader`
    cdef set written
    cdef Py_ssize_t size
    cdef bint is_used

    def __cinit__(self):
        self.idle = []
        self.written = None     # until a key is noted


cdef class Readers:
    """Readers kept between look-ups: moving a reader costs less than making one.

    `make` returns a new reader. `check` raises the error that left a reader without an entry. At
    most `most` readers are kept.

    A reader does not see later writes. It may answer for keys that no later write concerns, so
    `outlive` notes the keys of a commit, and the readers stay. Every other write drops them.
    """
    cdef object _make, _check
    cdef Py_ssize_t _most
    # `renew` replaces this object. A reader that is given back later goes into the list that lent
    # it, from which no look-up takes any more.
    cdef _Lending _now

    def __cinit__(self, make, check, Py_ssize_t most):
        self._make = make
        self._check = check
        self._most = most
        self._now = _Lending()

    def renew(self):
        """Drop all readers made so far: they do not see the write that was just made."""
        self._now = _Lending()

    def outlive(self, dict points not None, Py_ssize_t bytes_max):
        """Keep the readers over the write that was just made, which has the versions `points` and
        nothing else. Drops them once such writes have more than `bytes_max` bytes."""
        cdef _Lending now = self._now
        cdef PyObject *key = NULL
        cdef PyObject *value = NULL
        cdef Py_ssize_t place = 0
        if not now.is_used:
            return
        if now.written is None:
            now.written = set()
        while PyDict_Next(points, &place, &key, &value):
            now.written.add(<bytes?><object>key)
            now.size += PyBytes_GET_SIZE(<bytes><object>key)
            if <object>value is not None:
                now.size += PyBytes_GET_SIZE(<bytes?><object>value)
            if now.size > bytes_max:
                self.renew()
                return

    def borrow(self):
        """A ticket to give the reader back with, and a reader that sees all writes so far."""
        if self._now.written is not None:
            self.renew()
        cdef _Lending now = self._now
        return now.idle, self._taken(now).reader

    def give_back(self, list ticket not None, reader):
        """Return what `borrow` gave."""
        self._kept(ticket, _BoundReader(reader))

    def find(self, bytes key not None, bytes rest not None, bytes limit not None):
        """The value of the first entry of `key` from `rest` on and below `limit`: None where the
        entry is a tombstone, `ABSENT` where there is no entry."""
        return self._found(key, rest, limit)

    cdef _Lending _knowing(self, bytes key):
        """Readers that have all entries of `key`."""
        cdef _Lending now = self._now
        if now.written is not None and key in now.written:
            self._now = now = _Lending()
        return now

    cdef _BoundReader _taken(self, _Lending now):
        cdef list idle = now.idle
        now.is_used = True      # before a reader is made: `outlive` notes each write behind that
        return <_BoundReader?>idle.pop() if PyList_GET_SIZE(idle) else _BoundReader(self._make())

    cdef int _kept(self, list idle, _BoundReader bound) except -1:
        if PyList_GET_SIZE(idle) < self._most:
            idle.append(bound)
        return 0

    cdef object _found(self, bytes key, bytes rest, bytes limit):
        cdef _Lending now = self._knowing(key)
        cdef _BoundReader bound = self._taken(now)
        value = _find(bound, self._check, escape(key), rest, limit, ABSENT)
        self._kept(now.idle, bound)
        return value

    cdef object _found_among(self, bytes key, int64_t as_of, bytes rest, _Imports imports):
        cdef _Lending now = self._knowing(key)
        cdef _BoundReader bound = self._taken(now)
        cdef int64_t newest = INVISIBLE
        value = _find_among(bound, self._check, key, as_of, rest, imports, &newest)
        self._kept(now.idle, bound)
        return value


cdef class Lookup:
    """`get` among the range tombstones and imports that `show` was last given.

    `engine` lends the readers. `slowly` answers two questions that one search cannot: whether a
    range tombstone above the time of the read hides one below it, and what a key has where imports
    and range tombstones meet. `newest` keeps the values of keys that are asked for again.
    """
    cdef object _engine, _slowly
    cdef Readers _readers       # whose `find` is the engine's, or None: saves a call of 50 ns
    cdef _Imports _imports
    cdef NewestValues _newest   # None where none is kept
    cdef object _limits
    cdef Py_ssize_t _depth
    cdef int64_t _as_of         # the time of the last look-up
    cdef bytes _rest            # the terminator and the suffix of that time

    def __cinit__(self, engine, slowly, NewestValues newest=None):
        owner = getattr(engine.find, "__self__", None)
        self._engine = engine
        self._slowly = slowly
        self._readers = owner if isinstance(owner, Readers) else None
        self._newest = newest if newest is not None and newest.most else None
        self._as_of = 0
        self._rest = TERMINATOR + _keys.encode_suffix(0)
        self.show(([], [UNLIMITED]), 0, {})

    def show(self, limits, Py_ssize_t depth, stamps):
        """Use these limits and imports from the next look-up on."""
        _limit(limits, depth, b"")  # refuses any object here that is no tree
        cdef _Imports imports = _Imports(stamps) if stamps else None
        self._limits = limits
        self._depth = depth
        self._imports = imports

    def get(self, bytes key not None, int64_t as_of):
        """The value of `key` at `as_of`, None where it is absent or deleted."""
        return self._value(key, as_of)

    cdef inline object _value(self, bytes key, int64_t as_of):
        cdef NewestValues newest = self._newest
        if newest is None:
            return self._searched(key, as_of)
        value = newest._at(key, as_of)
        if value is None:
            value = self._searched(key, as_of)
            if type(value) is bytes:
                newest._offer(key, <bytes>value, as_of)
        return value

    cdef object _searched(self, bytes key, int64_t as_of):
        # Take all three at once: making `rest` may run the collector, and so another thread.
        cdef object limits = self._limits
        cdef Py_ssize_t depth = self._depth
        cdef _Imports imports = self._imports
        cdef bytes rest, limit
        if as_of != self._as_of:
            self._rest = TERMINATOR + (~<uint64_t>as_of).to_bytes(SUFFIX, "big")
            self._as_of = as_of
        rest = self._rest
        if imports is not None:
            if self._readers is None or depth or limits[0]:
                return self._slowly(key, as_of)
            return self._readers._found_among(key, as_of, rest, imports)
        limit = _limit(limits, depth, key)
        if self._readers is not None:
            value = self._readers._found(key, rest, limit)
        else:
            value = self._engine.find(key, rest, limit)
        if value is ABSENT:
            return None if limit == UNLIMITED else self._slowly(key, as_of)
        return value


cdef class PointRead:
    """`Store.get` for the common case: a key of bytes, a readable time, a healthy store. Passes
    every other call on to `otherwise`, which checks its arguments and raises."""
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
                if overflow or at >= upper or at < <int64_t>frontiers.since or (
                    at <= OTHER_UNITS and type(as_of) is int
                ):
                    return self._otherwise(key, as_of, default)
            else:
                return self._otherwise(key, as_of, default)
            value = self._lookup._value(<bytes>key, at)
            if at >= <int64_t>frontiers.floor:
                return default if value is None else value
        return self._otherwise(key, as_of, default)


cdef bytes _limit(node, Py_ssize_t depth, bytes key):
    cdef list keys, below
    while True:
        if not isinstance(node, tuple) or PyTuple_GET_SIZE(node) < 2:
            raise TypeError("a node of limits is a tuple of keys and of what lies below")
        keys = <list?>(<object>PyTuple_GET_ITEM(node, 0))
        below = <list?>(<object>PyTuple_GET_ITEM(node, 1))
        node = below[_stretch(keys, key)]
        if depth == 0:
            return <bytes?>node
        depth -= 1


def are_keys(list keys not None):
    """Whether each of `keys` is `bytes` that a store takes as a key."""
    cdef Py_ssize_t at, count = PyList_GET_SIZE(keys)
    for at in range(count):
        fetch_key(keys, at + AHEAD)
        key = <object>PyList_GET_ITEM(keys, at)
        if type(key) is not bytes or PyBytes_GET_SIZE(<bytes>key) > LONGEST_KEY:
            return False
    return True


def find_many(
    reader,
    check,
    list keys not None,
    bytes rest not None,
    limits,
    Py_ssize_t depth,
    absent,
):
    """The answers of `Readers.find` for `keys`, in the order given; `absent` for a key that has no
    entry.

    Seeks in key order, which takes half the time of seeking in any other order.
    """
    cdef list asked = list(keys), found = [None] * PyList_GET_SIZE(asked)
    cdef Py_ssize_t at, place, count = PyList_GET_SIZE(asked)
    cdef _BoundReader bound = _BoundReader(reader)
    cdef bytes key
    cdef Place *order = order_of(asked)
    try:
        for at in range(count):
            if at % TURN == TURN - 1:
                let_others_run()
            if at + AHEAD < count:
                fetch_key(asked, order[at + AHEAD].at)
            place = order[at].at
            key = <bytes>PyList_GET_ITEM(asked, place)
            found[place] = _find(
                bound, check, escape(key), rest, _limit(limits, depth, key), absent
            )
    finally:
        free(order)
    return found


def find_among(reader, check, list keys not None, int64_t as_of, bytes rest not None, stamps):
    """For each of `keys`, in a store with imports: the value of the newest entry that a read at
    `as_of` sees, None where it is a tombstone or there is none; and the bytes of an array of the
    entries' times, int64, -1 where there is none.

    Mostly takes one seek and one step a key. Seeks in key order.
    """
    cdef list asked = list(keys), found = [None] * PyList_GET_SIZE(asked)
    cdef Py_ssize_t at, place, count = PyList_GET_SIZE(asked)
    cdef bytes times = PyBytes_FromStringAndSize(NULL, count * <Py_ssize_t>sizeof(int64_t))
    cdef int64_t *newest = <int64_t *>PyBytes_AS_STRING(times)
    cdef _BoundReader bound = _BoundReader(reader)
    cdef _Imports imports = _Imports(stamps)
    cdef Place *order = order_of(asked)
    try:
        for at in range(count):
            if at % TURN == TURN - 1:
                let_others_run()
            if at + AHEAD < count:
                fetch_key(asked, order[at + AHEAD].at)
            place = order[at].at
            found[place] = _find_among(
                bound,
                check,
                <bytes>PyList_GET_ITEM(asked, place),
                as_of,
                rest,
                imports,
                newest + place,
            )
    finally:
        free(order)
    return found, times


cdef inline object _find(
    _BoundReader bound, check, bytes escaped, bytes rest, bytes limit, absent
):
    bound.seek(concat(escaped, rest))
    here = bound.key()
    if here is None:
        check(bound.reader)
        return absent
    cdef bytes found = <bytes?>here
    cdef Py_ssize_t size = PyBytes_GET_SIZE(found)
    if not is_below(found, escaped, limit):
        return absent
    _require_size(found, escaped)
    return bound.value() if PyBytes_AS_STRING(found)[size - 1] else None


cdef object _find_among(
    _BoundReader bound,
    check,
    bytes key,
    int64_t as_of,
    bytes rest,
    _Imports imports,
    int64_t *newest,
):
    cdef bytes escaped = escape(key), found
    cdef const unsigned char *tail
    cdef uint64_t suffix
    cdef Py_ssize_t size
    newest[0] = INVISIBLE
    value = None
    bound.seek(concat(escaped, TERMINATOR))
    here = bound.key()
    while here is not None:
        found = <bytes?>here
        size = PyBytes_GET_SIZE(found)
        if not is_below(found, escaped, UNLIMITED):
            break
        _require_size(found, escaped)
        tail = <const unsigned char *>PyBytes_AS_STRING(found) + size - TAIL
        suffix = big_endian(tail)
        if suffix < FIRST_TIMED:
            if (
                imports.find(suffix, tail)
                and newest[0] < imports.added
                and imports.added <= as_of
                and <uint64_t>as_of < imports.reverted
            ):
                newest[0] = imports.added
                value = bound.value() if tail[SUFFIX] else None
            bound.next()
        elif <int64_t>~suffix <= as_of:
            if <int64_t>~suffix > newest[0]:
                newest[0] = <int64_t>~suffix
                value = bound.value() if tail[SUFFIX] else None
            break
        else:
            bound.seek(concat(escaped, rest))
        here = bound.key()
    if here is None:
        check(bound.reader)
    return value


# -- range tombstones over a key ---------------------------------------------------------------------


cdef tuple NONE_DELETED = ((), ())


cdef tuple deletions_of(node, Py_ssize_t depth, bytes key):
    """The times of the range tombstones over `key`, in two stacks, each newest first."""
    cdef list below
    cdef Py_ssize_t at
    while depth > 0:
        below = <list?>_item(node, 1)
        node = below[_stretch(<list?>_item(node, 0), key)]
        depth -= 1
    at = _stretch(<list?>_item(node, 0), key)
    if at == 0:
        return NONE_DELETED
    below = <list?>_item(node, 2)
    return <tuple?>below[at - 1], <tuple?>_item(node, 3)


cdef int64_t deleted_at(tuple deletions, int64_t as_of) except -2:
    """The newest of these times that is at or below `as_of`, else `INVISIBLE`."""
    return max(_newest(deletions[0], as_of), _newest(deletions[1], as_of))


cdef int64_t _newest(tuple stack, int64_t as_of) except -2:
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = len(stack)
    cdef Py_ssize_t middle
    cdef int64_t time
    while low < high:
        middle = (low + high) // 2
        time = stack[middle]
        if time <= as_of:
            high = middle
        else:
            low = middle + 1
    return INVISIBLE if low == len(stack) else <int64_t>stack[low]


cdef inline object _item(node, Py_ssize_t at):
    if not isinstance(node, tuple) or PyTuple_GET_SIZE(node) <= at:
        raise TypeError("a node of limits is a tuple of keys, of what lies below, and of stacks")
    return <object>PyTuple_GET_ITEM(node, at)


# -- many keys, each at a time of its own ------------------------------------------------------------


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


# -- the next versions of keys -----------------------------------------------------------------------


def find_following(
    reader,
    check,
    list keys not None,
    times,
    limits,
    Py_ssize_t depth,
    stamps,
    int64_t upto,
):
    """For each of `keys`: the time of its oldest version at or above its own time of `times`, which
    are integers of 64 bits, and at or below `upto`; -1 where there is none. A deletion is a version,
    and so is the revert of an import that was in sight.

    `limits` is as in `find_timed`. Costs a seek for each key, and two more and a step for each entry
    of an import where there are imports.
    """
    cdef list asked = list(keys)
    cdef Py_ssize_t count = PyList_GET_SIZE(asked), at, place
    cdef bytes out = PyBytes_FromStringAndSize(NULL, 8 * count)
    cdef int64_t *found = <int64_t *>PyBytes_AS_STRING(out)
    cdef bytes key, before = None
    cdef tuple deletions = NONE_DELETED
    cdef _Ascent ascent = _Ascent(reader, check, stamps)
    cdef int64_t *asked_at = copied(times, count)
    cdef Place *order = NULL
    try:
        order = order_of(asked, asked_at)
        for at in range(count):
            if at % TURN == TURN - 1:
                let_others_run()
            place = order[at].at
            key = <bytes>PyList_GET_ITEM(asked, place)
            if before is None or (key is not before and compare(key, before)):
                before = key
                deletions = deletions_of(limits, depth, key)
                ascent.enter(key)
            found[place] = ascent.oldest(asked_at[place], deletions)
            if found[place] > upto:
                found[place] = INVISIBLE
    finally:
        free(order)
        free(asked_at)
    return array("q", out)


@cython.final
cdef class _Ascent:
    """A reader that looks for the oldest version of a key at or above a time."""
    cdef _BoundReader _bound
    cdef object _seek_for_prev, _check
    cdef _Walk _walk            # None: there is no import
    cdef bytes _escaped

    def __cinit__(self, reader, check, stamps):
        self._bound = _BoundReader(reader)
        self._seek_for_prev = reader.seek_for_prev
        self._check = check
        self._walk = _Walk(reader, check, stamps, 0) if stamps else None

    cdef int enter(self, bytes key) except -1:
        self._escaped = escape(key)
        if self._walk is not None:
            self._walk._is_placed = False
            self._walk.enter(key)
        return 0

    cdef int64_t oldest(self, int64_t since, tuple deletions) except -2:
        """The time of that version, `INVISIBLE` if there is none."""
        cdef int64_t best = self._stored(since)
        cdef int64_t deleted = _oldest_of(deletions, since)
        cdef _Life life
        cdef int64_t reverted
        if deleted != INVISIBLE and (best == INVISIBLE or deleted < best):
            best = deleted
        if self._walk is None:
            return best
        for each in self._walk._lives:
            life = <_Life>each
            if life.added >= since and (best == INVISIBLE or life.added < best):
                best = life.added
        for each in self._walk._lives:
            life = <_Life>each
            reverted = <int64_t>life.reverted
            if (
                reverted >= since  # negative where the import was not reverted
                and (best == INVISIBLE or reverted < best)
                and self._was_showing(life, reverted, deletions)
            ):
                best = reverted
        return best

    cdef bint _was_showing(self, _Life life, int64_t reverted, tuple deletions) except -1:
        """Whether `life` was in sight until it was reverted: then its revert is a version."""
        cdef int64_t shown
        self._walk._is_placed = False
        self._walk._is_fresh = True
        self._walk.version(reverted, INVISIBLE, &shown)
        return self._walk._was_showing(life, max(self._walk._time, deleted_at(deletions, reverted)))

    cdef int64_t _stored(self, int64_t since) except -2:
        """The oldest entry with a time of its own, at or above `since`."""
        cdef const unsigned char *tail
        cdef uint64_t suffix = ~<uint64_t>since
        cdef Py_ssize_t size
        self._seek_for_prev(concat(self._escaped, TERMINATOR) + suffix.to_bytes(SUFFIX, "big") + LAST)
        here = self._bound.key()
        if here is None:
            self._check(self._bound.reader)
            return INVISIBLE
        cdef bytes found = <bytes?>here
        size = PyBytes_GET_SIZE(found)
        if (
            not is_below(found, self._escaped, UNLIMITED)
            or compare(found, concat(self._escaped, TERMINATOR)) < 0
        ):
            return INVISIBLE
        _require_size(found, self._escaped)
        tail = <const unsigned char *>PyBytes_AS_STRING(found) + size - TAIL
        suffix = big_endian(tail)
        return <int64_t>~suffix if suffix >= FIRST_TIMED else INVISIBLE


cdef int64_t _oldest_of(tuple deletions, int64_t since) except -2:
    """The oldest of these times that is at or above `since`, else `INVISIBLE`."""
    cdef int64_t one = _oldest(deletions[0], since), other = _oldest(deletions[1], since)
    if one == INVISIBLE or other == INVISIBLE:
        return max(one, other)
    return min(one, other)


cdef int64_t _oldest(tuple stack, int64_t since) except -2:
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = len(stack)
    cdef Py_ssize_t middle
    cdef int64_t time
    while low < high:
        middle = (low + high) // 2
        time = stack[middle]
        if time >= since:
            low = middle + 1
        else:
            high = middle
    return <int64_t>stack[low - 1] if low else INVISIBLE


# -- floors ------------------------------------------------------------------------------------------


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
