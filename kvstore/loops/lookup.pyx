# cython: language_level=3, wraparound=False, initializedcheck=False
"""Look-ups: the value of one key, or of many, in the entries of `data`.

`kvstore/mvcc/lookup.py` draws the stretch of entries in which a look-up searches: from the escaped
key with `rest` behind it, to below the escaped key with a limit behind it. Where range tombstones
lie, each piece of the key space between two boundaries has a limit of its own. `limits` is the
tree of these (see `LimitNode`), which is `depth` steps deep.

Invariants
1. Keys, limits and boundaries are checked to be bytes before their bytes are read.
2. Where a call may run Python code, items are taken by an index that is checked, or from a copy
   that no other code can reach.
"""

cimport cython

include "shared.pxi"
include "imports.pxi"
include "order.pxi"
include "reader.pxi"
include "newest.pxi"

from kvstore.limits import KEY_BYTES_MAX
from kvstore.timestamp import OTHER_UNITS_MAX as _OTHER_UNITS_MAX
from kvstore.timestamp import Timestamp as _Timestamp

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

cdef object ABSENT = _contract.ABSENT, Timestamp = _Timestamp  # looking names up takes time
cdef Py_ssize_t LONGEST_KEY
cdef int64_t OTHER_UNITS = _OTHER_UNITS_MAX


def take_bounds():
    """Copy the limits that the loops compare with. `kvstore.testing.bounds` calls this again."""
    global LONGEST_KEY
    LONGEST_KEY = KEY_BYTES_MAX


take_bounds()


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
    """For each of `keys`, in a store with imports: the time and the value of the newest entry that
    a read at `as_of` sees. The time is -1 where there is no entry, the value None where it is a
    tombstone.

    Mostly takes one seek and one step a key. Seeks in key order.
    """
    cdef list asked = list(keys), found = [None] * PyList_GET_SIZE(asked)
    cdef Py_ssize_t at, place, count = PyList_GET_SIZE(asked)
    cdef int64_t newest
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
            value = _find_among(
                bound,
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
