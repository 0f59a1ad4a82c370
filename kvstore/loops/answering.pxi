# Included by files: labels that a pass answers on its way.

cdef bytes _EMPTY = b""


cdef struct Life:
    int64_t added
    uint64_t reverted
    bint has_value
    size_t at, size             # of its value, among those of the key


@cython.final
cdef class Answers:
    """Labels in order, which a pass over all entries answers: each with the newest version of its
    key at its time.

    `keys` are the buffers of distinct escaped keys, which ascend; key i has the labels from
    `starts[i]` on and below `starts[i + 1]`, with `times`, newest first. A version that is older
    than `age_max` at the time of its label is no answer. `stretch` gives the range tombstones over
    an escaped key: the escaped keys between which they lie, and their times, newest first; None
    where there are none.

    The rule is that of `kvstore.loops.lookup.find_ordered`, over bytes that no object of Python
    holds. The labels are given up once the values of several have more than `bytes_max` bytes.
    """
    cdef object _keys_kept, _starts_kept, _times_kept, _stretch
    cdef Column _keys
    cdef const int64_t *_starts
    cdef const int64_t *_times
    cdef Py_ssize_t _count, _group, _label
    cdef int64_t _age_max
    cdef size_t _bytes_max
    cdef readonly bint is_given_up
    # the key that the pass has reached, if it has an entry
    cdef bint _is_entered
    cdef Life *_lives
    cdef Py_ssize_t _lives_count, _lives_room
    cdef Bytes _life_values
    # the range tombstones near it
    cdef bint _is_asked
    cdef bytes _low, _high
    cdef Bound _from, _below
    cdef int64_t *_deletions
    cdef Py_ssize_t _deletions_count
    # the answers
    cdef Bytes _ends, _found, _values

    def __cinit__(
        self, tuple keys not None, starts, times, int64_t age_max, size_t bytes_max, stretch=None
    ):
        cdef Py_ssize_t groups = keys[0]
        cdef const int32_t[::1] offsets = keys[1]
        cdef const unsigned char[::1] data = keys[2]
        cdef const int64_t[::1] firsts = starts, asked_at = times
        self._keys_kept, self._starts_kept, self._times_kept = (offsets, data), firsts, asked_at
        self._keys = column_of(groups, offsets, data)
        if self._keys.data is NULL:  # the only key is empty
            self._keys.data = PyBytes_AS_STRING(_EMPTY)
        self._count = asked_at.shape[0]
        require_starts(firsts, groups, self._count)
        if firsts[0] != 0 or firsts[groups] != self._count:
            raise ValueError("the labels of a key are no part of the labels")
        self._starts = &firsts[0]
        self._times = &asked_at[0] if self._count else NULL
        self._age_max, self._bytes_max = age_max, min(bytes_max, <size_t>ARRAY_BYTES_MAX)
        self._stretch = stretch
        if grow(&self._ends, 4 * (self._count + 1)) or grow(&self._found, 8 * self._count):
            raise MemoryError
        memset(self._ends.data, 0, 4)
        self._ends.size, self._found.size = 4 * (self._count + 1), 8 * self._count

    def __dealloc__(self):
        free(self._lives)
        free(self._life_values.data)
        free(self._deletions)
        free(self._ends.data)
        free(self._found.data)
        free(self._values.data)

    cdef int meet(self, Run *run, Pass one) noexcept nogil:
        """Answer what an entry answers. END once all labels are answered, or given up."""
        cdef const unsigned char *key = run.key.data
        cdef size_t size = run.key.size - INTERNAL
        cdef int difference, status
        cdef int64_t time
        cdef uint64_t suffix
        cdef bint has_value
        if (
            size < <size_t>LEAST
            or key[size - LEAST] != TERMINATOR_0
            or key[size - LEAST + 1] != TERMINATOR_1
            or key[size - 1] > KIND_MAX
        ):
            return one._refuse(key, size)
        while True:
            if self._group == self._keys.count:
                return END
            difference = compare_bytes(
                key, size - LEAST, self._wanted(), self._wanted_size()
            )
            if difference <= 0:
                break
            status = self._leave()
            if status:
                return status
        if difference < 0:  # no block below the key that is wanted is read
            one.begin, one.begin_size = self._wanted(), self._wanted_size()
            return MORE
        if not self._is_entered:
            status = self._enter(one)
            if status:
                return status
        has_value = key[size - 1] != 0
        suffix = big_endian(key + size - TAIL)
        if suffix < FIRST_TIMED:
            return self._take_life(run, one, suffix, key + size - TAIL, has_value)
        time = <int64_t>~suffix
        while self._label < self._starts[self._group + 1] and self._times[self._label] >= time:
            status = self._answer(time, has_value, run.value, run.value_size)
            if status:
                return status
        return MORE

    cdef inline const unsigned char *_wanted(self) noexcept nogil:
        return <const unsigned char *>self._keys.data + self._keys.offsets[self._group]

    cdef inline size_t _wanted_size(self) noexcept nogil:
        return self._keys.offsets[self._group + 1] - self._keys.offsets[self._group]

    cdef int end(self) noexcept nogil:
        """Answer the labels behind the last entry."""
        cdef int status
        while self._group < self._keys.count:
            status = self._leave()
            if status:
                return status
        return END

    cdef inline int _leave(self) noexcept nogil:
        """Answer the labels of the key below its last entry, and go to the next key."""
        cdef int status
        while self._label < self._starts[self._group + 1]:
            status = self._answer(INVISIBLE, False, NULL, 0)
            if status:
                return status
        self._group += 1
        self._is_entered = False
        self._lives_count = 0
        self._life_values.size = 0
        return MORE

    cdef inline int _enter(self, Pass one) noexcept nogil:
        self._is_entered = True
        if self._stretch is None or (
            self._is_asked
            and compare_bytes(
                self._wanted(), self._wanted_size(), self._from.key, self._from.size
            ) >= 0
            and (
                self._below.key is NULL
                or compare_bytes(
                    self._wanted(), self._wanted_size(), self._below.key, self._below.size
                ) < 0
            )
        ):
            return MORE
        return self._ask(one)

    cdef int _ask(self, Pass one) noexcept with gil:
        cdef int64_t *fresh
        cdef Py_ssize_t number
        try:
            low, high, stack = self._stretch(
                PyBytes_FromStringAndSize(<const char *>self._wanted(), self._wanted_size())
            )
            fresh = <int64_t *>calloc(len(stack) + 1, sizeof(int64_t))
            if fresh is NULL:
                raise MemoryError
            free(self._deletions)
            self._deletions, self._deletions_count = fresh, 0
            for number, time in enumerate(stack):
                fresh[number] = time
            self._deletions_count = len(stack)
            self._low, self._high = low, high
            self._from = _bound(self._low, 0)
            self._below = Bound(NULL, 0, 0)
            if self._high is not None:
                self._below = _bound(self._high, 0)
        except BaseException as error:
            one._raised = error
            return RAISED
        self._is_asked = True
        return MORE

    cdef int _take_life(
        self, Run *run, Pass one, uint64_t reference, const unsigned char *tail, bint has_value
    ) noexcept nogil:
        """Keep the entry of an import: the labels of its key look at it."""
        cdef Lifetime *kept = one._lifetime(reference, tail)
        cdef Life *moved
        cdef size_t at = self._life_values.size, size = run.value_size if has_value else 0
        if kept is NULL:
            return RAISED
        if not kept.is_known:
            return MORE
        if self._lives_count == self._lives_room:
            moved = <Life *>realloc(self._lives, (2 * self._lives_room + 4) * sizeof(Life))
            if moved is NULL:
                return NO_MEMORY
            self._lives, self._lives_room = moved, 2 * self._lives_room + 4
        if grow(&self._life_values, at + size):
            return NO_MEMORY
        memcpy(self._life_values.data + at, run.value, size)
        self._life_values.size = at + size
        self._lives[self._lives_count] = Life(kept.added, kept.reverted, has_value, at, size)
        self._lives_count += 1
        return MORE

    cdef int _answer(
        self, int64_t time, bint has_value, const unsigned char *value, size_t size
    ) noexcept nogil:
        """Answer the next label, whose newest entry with a time of its own is this one: see
        `kvstore.loops.lookup._Walk.version`."""
        cdef int64_t as_of = self._times[self._label], shown = time, covered, deleted = INVISIBLE
        cdef int32_t end
        cdef Py_ssize_t number
        cdef Life *life
        for number in range(self._lives_count):
            life = &self._lives[number]
            if shown < life.added and life.added <= as_of and <uint64_t>as_of < life.reverted:
                shown, has_value = life.added, life.has_value
                value, size = self._life_values.data + life.at, life.size
        if shown != INVISIBLE:
            deleted = self._deleted_at(as_of)
        if shown == INVISIBLE or deleted > shown:
            has_value = False
        covered = max(time, deleted)
        for number in range(self._lives_count if has_value else 0):
            life = &self._lives[number]
            if (
                life.reverted <= <uint64_t>as_of
                and <int64_t>life.reverted > shown
                and self._was_showing(life, covered)
            ):
                shown = <int64_t>life.reverted
        if not has_value or as_of - shown > self._age_max:
            shown, size = INVISIBLE, 0
        elif self._values.size + size > self._bytes_max and self._count > 1:
            self.is_given_up = True
            return END
        if grow(&self._values, self._values.size + size):
            return NO_MEMORY
        if size:
            memcpy(self._values.data + self._values.size, value, size)
        self._values.size += size
        end = <int32_t>self._values.size
        memcpy(self._ends.data + 4 * (self._label + 1), &end, 4)
        memcpy(self._found.data + 8 * self._label, &shown, 8)
        self._label += 1
        return MORE

    cdef bint _was_showing(self, const Life *life, int64_t covered) noexcept nogil:
        """Whether `life` was in sight until it was reverted."""
        cdef const Life *other
        cdef Py_ssize_t number
        if life.added <= covered:
            return False
        for number in range(self._lives_count):
            other = &self._lives[number]
            if (
                other.added > life.added
                and <uint64_t>other.added < life.reverted
                and life.reverted <= other.reverted
            ):
                return False
        return True

    cdef int64_t _deleted_at(self, int64_t as_of) noexcept nogil:
        """The newest range tombstone over the key at or below `as_of`, else `INVISIBLE`."""
        cdef Py_ssize_t low = 0, high = self._deletions_count, middle
        while low < high:
            middle = (low + high) // 2
            if self._deletions[middle] <= as_of:
                high = middle
            else:
                low = middle + 1
        return self._deletions[low] if low < self._deletions_count else INVISIBLE

    def columns(self):
        """The offsets of the values, integers of 32 bits, the bytes of the values, and the times of
        their versions, integers of 64 bits, -1 where a label has none. Once, behind the pass, unless
        the labels were given up."""
        if self.is_given_up or self._label != self._count or self._ends.data is NULL:
            raise ValueError("the labels are not answered")
        if grow(&self._values, 0):
            raise MemoryError
        return _owned(&self._ends), _owned(&self._values), _owned(&self._found)
