# Included by lookup: the newest values of keys that are read again and again, kept in memory between look-ups.
#
#     get     asks for the value of a key at a time
#     keep    offers a value that a look-up has found
#     note    tells of a commit: its time, its points, and the spans in which it may have written
#
# A kept value has a time: the time of the read that found it, or of the commit that wrote it. It
# answers every read at or after that time. The next commit to its key replaces it or removes it: a
# commit of many keys removes, because its time would double with the values that it replaces.
#
# The values lie in one table of slots, a cache line each. A key begins its search at the slot that
# its hash tells, and takes the next free one (linear probing). A byte beside each slot has some bits
# of the hash, so a search that finds nothing mostly reads no slot: these bytes stay in the
# processor's cache, and the slots do not.
#
#     tag   := 0 where the slot is free, DEAD where its value is not the newest, else some bits of the
#              hash and USED
#     slot  := value | since | spans | hash u32 | bytes of the key u32 | key, or the object of a long key
#
# Invariants
# 1. `note` is called for each commit, in the order of commits, after the engine has taken the entries
#    and before any read asks for the time of the commit. Nothing is kept before the first `note`.
# 2. A value is kept only if its read was at or above the time of the newest `note`. The look-up then
#    saw every commit that was noted, and `note` will tell of every later one. So a kept value is the
#    newest value of its key at each time that it answers.
# 3. A write to a span leaves the kept values in place. A value that was last looked at before this
#    write is compared with the span at its next use. The last `SPANS_MAX` writes to spans are
#    remembered; a value that missed more of them is dropped.
# 4. `size`, which counts `ENTRY_BYTES` for the objects of each value, stays at or below `most`. Above
#    it the values that were not used since the last turn leave first (the clock algorithm: Corbató,
#    "A paging experiment with the Multics system", 1969).
# 5. A full cache lets a key in when it is asked for a second time, so a pass over many keys changes
#    little. A write by a commit of few keys counts as the first time. `_asked` remembers some bits of
#    each such key (the doorkeeper of Einziger, Friedman and Manes, "TinyLFU", 2017).
#    Where keys are read once they were written, as a sample of them shows, a write lets its key in.
# 6. A full cache that answers few reads rests: it asks and keeps a sample of the keys only, so it
#    costs next to nothing where keys are read in no order. It works again once the sample has hits.
# 7. No step between a look at `_touched` and the end of `keep`, or within `note`, allocates an object
#    that the collector tracks: no finalizer runs there, and no other thread.
# 8. A slot with a value owns it, and owns the object of a long key.
# 9. No free slot lies between the first slot of a key and its own. At most three quarters of the
#    slots are taken, so each search ends.
# 10. The hand takes the slots in steps of a golden section of the table, and comes to each slot once
#    in a turn. A hand that went slot by slot would empty the slots behind it, while new keys, which
#    come everywhere, crowd the slots in front of it: a search there passed over thousands of slots.

from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject, PyObject_Hash
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t

from kvstore.base.timestamp import TIMESTAMP_MAX as _TIMESTAMP_MAX

cdef extern from "<stdlib.h>":
    void *aligned_alloc(size_t, size_t) nogil

cpdef enum:                     # tests ask for these
    # Bytes that a kept value takes beside its own bytes and the bytes of its key: a slot, of which
    # three fifths are taken after the table grew, and the head of an object.
    ENTRY_BYTES = 160
    SPANS_MAX = 64
    # A commit of more keys removes the values of its keys. A search for a key whose value is not
    # read takes 10 ns; a replaced value takes 120 ns, in memory that no cache of the processor holds.
    REPLACED_MAX = 64
    ROUND = 4096                # the reads after which the cache counts its hits
    # A key is in the sample if its hash has none of these bits: one key of sixteen. Neither the tag
    # nor the first slot tells them.
    SAMPLE = 0xF << 27
    # The writes to keys of the sample after which the cache counts how many of the keys were read: a
    # quarter is enough. Keys that are let in and not read push others out: with four such writes to
    # each read of YCSB's zipfian keys, three fifths of the reads hit instead of four fifths.
    WRITES_JUDGED = 64

cdef enum:
    INLINE = 32                 # bytes of a key that fit into its slot
    DEAD = 0x7F
    USED = 0x80                 # the flag of a tag: used since the hand came by
    SLOTS_LEAST = 64
    # Hits in a round (a sixteenth), below which a full cache rests. A miss costs less than a sixteenth of what a
    # hit saves.
    LEAST_HITS = 256
    LARGEST_PART = 16           # a value may take this part of the cache
    # Bytes of the cache for each slot of `_asked`. With fewer, a key is let in that is asked for
    # again much later than the cache turns over: uniform reads then take 10 % longer.
    BYTES_PER_ASKED = 1024
    ASKED_LEAST = 64
    ASKED = 1                   # of a mark in `_asked`, which has the other bits of the hash
    WRITTEN = 2

cdef union KeyPart:
    unsigned char inlined[INLINE]
    PyObject *whole

cdef struct Slot:
    PyObject *value
    int64_t since
    uint64_t spans
    uint32_t hash
    uint32_t size
    KeyPart key

assert sizeof(Slot) == 64


@cython.final
cdef class NewestValues:
    """At most `most` bytes of newest values. 0 keeps none."""
    cdef readonly Py_ssize_t most, size
    cdef readonly uint64_t hits, misses, passed
    cdef Slot *_slots
    cdef uint8_t *_tags
    cdef Py_ssize_t _capacity, _count, _hand, _step
    cdef list _spans
    cdef uint64_t _spans_noted
    cdef int64_t _touched
    cdef uint32_t *_asked
    cdef uint64_t _mask, _hits_before
    cdef Py_ssize_t _left
    cdef bint _is_resting, _admits_writes
    cdef int _written, _read_back

    def __cinit__(self, Py_ssize_t most):
        self.most = most
        self._left = ROUND
        self._spans = []
        self._touched = _TIMESTAMP_MAX

    def __dealloc__(self):
        cdef Py_ssize_t at
        for at in range(self._capacity):
            if self._tags[at]:
                self._release(&self._slots[at])
        free(self._slots)
        free(self._tags)
        free(self._asked)

    def __len__(self):
        return self._count

    def get(self, bytes key not None, int64_t as_of):
        """The value of `key` at `as_of`, None where it is not kept."""
        return self._at(key, as_of)

    def keep(self, bytes key not None, bytes value not None, int64_t as_of):
        """Offer the value that a look-up at `as_of` has found."""
        self._offer(key, value, as_of)

    def note(self, int64_t timestamp, points not None, spans not None):
        """Take a commit into account: a kept value is replaced by a later one."""
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
        if self._count and points:
            written = <dict?>points
            if len(written) > REPLACED_MAX:
                while PyDict_Next(written, &place, &key, NULL):
                    self._forget(<uint64_t>PyObject_Hash(<bytes?><object>key))
                return
            while PyDict_Next(written, &place, &key, &value):
                self._replace(<bytes?><object>key, <object>value, timestamp)
            self._make_room(0)

    cdef inline object _at(self, bytes key, int64_t as_of):
        """The value of `key` at `as_of`, None where it is not kept."""
        cdef uint64_t bits = <uint64_t>PyObject_Hash(key)
        cdef Py_ssize_t at
        cdef Slot *slot
        if self._is_resting and bits & SAMPLE:
            self.misses += 1
            return None
        self._left -= 1
        if not self._left:
            self._judge()
        at = self._find(key, bits)
        if at >= 0:
            slot = &self._slots[at]
            if as_of >= slot.since and (
                slot.spans == self._spans_noted or self._is_current(key, at)
            ):
                self._tags[at] |= USED
                self.hits += 1
                return <object>slot.value
        self.misses += 1
        return None

    cdef int _judge(self) except -1:
        """Rest after a round of few hits, until a round of the sample has more."""
        self._is_resting = (
            self._asked is not NULL and self.hits - self._hits_before < LEAST_HITS
        )
        self._hits_before, self._left = self.hits, ROUND
        return 0

    cdef int _offer(self, bytes key, bytes value, int64_t as_of) except -1:
        cdef Py_ssize_t weight = (
            PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(value) + ENTRY_BYTES
        )
        cdef uint64_t bits = <uint64_t>PyObject_Hash(key)
        cdef Py_ssize_t at
        cdef Slot *slot
        if as_of < self._touched or weight > self.most // LARGEST_PART:
            return 0
        if self._is_resting and bits & SAMPLE:
            return 0
        if self.size + weight > self.most and not self._is_asked_again(bits):
            return 0
        if self._find(key, bits) >= 0:
            return 0
        self._make_room(weight)
        if 4 * (self._count + 1) > 3 * self._capacity and not self._resize():
            return 0
        at = self._free_slot(<uint32_t>(bits >> 32))
        slot = &self._slots[at]
        self._tags[at] = _tag(bits)
        slot.hash = <uint32_t>(bits >> 32)
        slot.size = <uint32_t>PyBytes_GET_SIZE(key)
        if slot.size <= INLINE:
            memcpy(slot.key.inlined, PyBytes_AS_STRING(key), slot.size)
        else:
            Py_INCREF(key)
            slot.key.whole = <PyObject *>key
        Py_INCREF(value)
        slot.value, slot.since, slot.spans = <PyObject *>value, as_of, self._spans_noted
        self._count += 1
        self.size += weight
        return 0

    cdef int _replace(self, bytes key, object value, int64_t timestamp) except -1:
        cdef uint64_t bits = <uint64_t>PyObject_Hash(key)
        cdef Py_ssize_t at = self._find(key, bits)
        cdef PyObject *before
        cdef Slot *slot
        if at < 0:
            if self._asked is not NULL and type(value) is bytes:
                self._meet(key, <bytes>value, bits, timestamp)
            return 0
        if type(value) is not bytes:
            self._drop(at)
            return 0
        slot = &self._slots[at]
        before = slot.value
        self.size += PyBytes_GET_SIZE(<bytes>value) - PyBytes_GET_SIZE(<bytes>before)
        Py_INCREF(value)
        slot.value, slot.since, slot.spans = <PyObject *>value, timestamp, self._spans_noted
        Py_DECREF(<object>before)
        return 0

    cdef int _forget(self, uint64_t bits) noexcept:
        """Mark what may be the value of a key, without a look at its slot."""
        cdef Py_ssize_t at = self._first(<uint32_t>(bits >> 32))
        cdef uint8_t tag = _tag(bits)
        while self._tags[at]:
            if self._tags[at] & ~USED == tag:
                self._tags[at] = DEAD
            at += 1
            if at == self._capacity:
                at = 0
        return 0

    cdef bint _is_current(self, bytes key, Py_ssize_t place) except -1:
        """Whether no write to a span has touched a value since it was last looked at."""
        cdef Py_ssize_t at, count = PyList_GET_SIZE(self._spans)
        cdef uint64_t missed = self._spans_noted - self._slots[place].spans
        if missed > <uint64_t>count:
            self._drop(place)
            return False
        for at in range(count - <Py_ssize_t>missed, count):
            start, end = self._spans[at]
            if compare(key, <bytes?>start) >= 0 and (
                end is None or compare(key, <bytes?>end) < 0
            ):
                self._drop(place)
                return False
        self._slots[place].spans = self._spans_noted
        return True

    cdef int _meet(self, bytes key, bytes value, uint64_t bits, int64_t timestamp) except -1:
        """Remember that a key without a value was written, or keep its value where such keys are
        read."""
        if not bits & SAMPLE:
            self._written += 1
            if self._written == WRITES_JUDGED:
                self._admits_writes = 4 * self._read_back >= WRITES_JUDGED
                self._written = self._read_back = 0
        elif self._is_resting:
            return 0
        self._asked[bits & self._mask] = _mark(bits) | WRITTEN
        if self._admits_writes and bits & SAMPLE:
            self._offer(key, value, timestamp)
        return 0

    cdef bint _is_asked_again(self, uint64_t bits) except -1:
        cdef uint32_t mark = _mark(bits)
        cdef uint32_t *slot
        cdef Py_ssize_t slots
        if self._asked is NULL:
            slots = ASKED_LEAST
            while slots <= self.most // BYTES_PER_ASKED:
                slots *= 2
            self._asked = <uint32_t *>calloc(slots, sizeof(uint32_t))
            if self._asked is NULL:
                raise MemoryError
            self._mask = slots - 1
        slot = &self._asked[bits & self._mask]
        if slot[0] == mark:
            return True
        if slot[0] == mark | WRITTEN:
            self._read_back += not bits & SAMPLE
            slot[0] = mark
            return True
        slot[0] = mark
        return False

    cdef int _make_room(self, Py_ssize_t weight) except -1:
        cdef uint8_t tag
        while self.size + weight > self.most:
            tag = self._tags[self._hand]
            if tag and not tag & USED:
                self._drop(self._hand)  # and the next one may have moved here
            else:
                self._tags[self._hand] = tag & ~USED
                self._hand += self._step
                if self._hand >= self._capacity:
                    self._hand -= self._capacity
        if self._capacity > SLOTS_LEAST and 8 * self._count < 3 * self._capacity:
            self._resize()
        return 0

    # -- the table ------------------------------------------------------------------------------

    cdef inline Py_ssize_t _find(self, bytes key, uint64_t bits) noexcept:
        """The slot of `key`, -1 where it has none."""
        cdef uint32_t spread = <uint32_t>(bits >> 32), size = <uint32_t>PyBytes_GET_SIZE(key)
        cdef uint8_t tag = _tag(bits), here
        cdef Py_ssize_t at = self._first(spread)
        cdef Slot *slot
        if not self._count:
            return -1
        while True:
            here = self._tags[at]
            if not here:
                return -1
            if here & ~USED == tag:
                slot = &self._slots[at]
                if slot.hash == spread and slot.size == size and not memcmp(
                    _key_of(slot), PyBytes_AS_STRING(key), size
                ):
                    return at
            at += 1
            self.passed += 1
            if at == self._capacity:
                at = 0

    cdef inline Py_ssize_t _first(self, uint32_t spread) noexcept:
        return <Py_ssize_t>(<uint64_t>spread * <uint64_t>self._capacity >> 32)

    cdef Py_ssize_t _free_slot(self, uint32_t spread) noexcept:
        cdef Py_ssize_t at = self._first(spread)
        while self._tags[at]:
            at += 1
            if at == self._capacity:
                at = 0
        return at

    cdef int _drop(self, Py_ssize_t at) noexcept:
        """Free a slot, and move later ones back to where searches for their keys pass."""
        cdef Slot gone = self._slots[at]
        cdef Py_ssize_t free_ = at, apart
        self.size -= (
            <Py_ssize_t>gone.size + PyBytes_GET_SIZE(<bytes>gone.value) + ENTRY_BYTES
        )
        self._count -= 1
        while True:
            at += 1
            if at == self._capacity:
                at = 0
            if not self._tags[at]:
                break
            apart = at - self._first(self._slots[at].hash)
            if apart < 0:
                apart += self._capacity
            if apart >= (at - free_ if at > free_ else at - free_ + self._capacity):
                self._slots[free_] = self._slots[at]
                self._tags[free_] = self._tags[at]
                free_ = at
        self._tags[free_] = 0
        self._release(&gone)
        return 0

    cdef int _release(self, Slot *slot) noexcept:
        if slot.size > INLINE:
            Py_DECREF(<object>slot.key.whole)
        Py_DECREF(<object>slot.value)
        return 0

    cdef bint _resize(self) noexcept:
        """Make the table fit its values: three fifths of the slots are taken then. False, with the
        table as it was, where memory is short."""
        cdef Py_ssize_t before = self._capacity, at, to
        cdef Slot *slots = self._slots
        cdef uint8_t *tags = self._tags
        cdef Py_ssize_t capacity = max(<Py_ssize_t>SLOTS_LEAST, (self._count + 1) * 5 // 3)
        cdef uint8_t *new_tags = <uint8_t *>calloc(capacity, 1)
        cdef Slot *new_slots = <Slot *>aligned_alloc(sizeof(Slot), capacity * sizeof(Slot))
        if new_tags is NULL or new_slots is NULL:
            free(new_tags)
            free(new_slots)
            return False
        self._slots, self._tags, self._capacity = new_slots, new_tags, capacity
        for at in range(before):
            if tags[at]:
                to = self._free_slot(slots[at].hash)
                self._slots[to] = slots[at]
                self._tags[to] = tags[at]
        self._hand, self._step = 0, _golden_step(capacity)
        free(slots)
        free(tags)
        return True


cdef inline uint8_t _tag(uint64_t bits) noexcept:
    cdef uint8_t tag = bits & 0x7F
    return tag if 0 < tag < DEAD else 1


cdef inline uint32_t _mark(uint64_t bits) noexcept:
    return <uint32_t>(bits >> 32) & ~<uint32_t>(ASKED | WRITTEN) | ASKED


cdef inline const void *_key_of(Slot *slot) noexcept:
    if slot.size <= INLINE:
        return slot.key.inlined
    return PyBytes_AS_STRING(<bytes>slot.key.whole)


cdef Py_ssize_t _golden_step(Py_ssize_t capacity) noexcept:
    """The number that is nearest below the golden section of `capacity` without a common divisor."""
    cdef Py_ssize_t step = <Py_ssize_t>(capacity * 0.6180339887498949), one, other
    while True:
        one, other = capacity, step
        while other:
            one, other = other, one % other
        if one == 1:
            return step
        step -= 1
