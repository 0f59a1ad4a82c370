# cython: language_level=3, wraparound=False, boundscheck=False, initializedcheck=False, cdivision=True
"""Sorted files read as columns: a pass at one time over the files of a database, without the
interpreter lock.

The files are given as runs, the newest first: what a run says of a stored key hides what the runs
behind it say. `kvstore.engine.sorted_file` has the bytes of a file, `kvstore.loops.live` the rule
by which an entry is alive; this is the same rule over bytes that no object of Python holds.

Invariants
1. A number of a file is compared with the buffer before it is used as an offset or a length.
2. The checksum of a block is verified before the block is used.
3. A buffer of blocks has `KV_PAD` bytes behind its end, which `blocks.h` may write and read.
4. An entry points into the block or the window of its run, and is used before the run moves on.
5. The row behind the last one is not counted until the pass has left its key: a newer entry, or a
   tombstone, takes its place.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t
from libc.string cimport memmove
from posix.types cimport off_t
from posix.unistd cimport pread

include "shared.pxi"

cdef extern from "blocks.h" nogil:
    enum:
        KV_PAD
    uint64_t kv_xxh3(const unsigned char *data, size_t size)
    int kv_unpack_lz4(
        const unsigned char *packed, size_t size, unsigned char *to, size_t wanted
    )

include "growing.pxi"
include "labels.pxi"

cdef enum:
    TRAILER = 5                 # codec and checksum behind a block
    INTERNAL = 8                # kind and sequence number behind a stored key
    DELETED = 0
    PUT = 1
    LZ4 = 4
    ZSTD = 7
    CODEC_PRIME = 0x6B9083D9
    NEVER = 0x7FFFFFFF
    STAMPS_KEPT = 64            # lifetimes of imports, by their references; a power of two
    KEPT_SHIFT = 58

cdef enum:                      # what a step found
    MORE = 0
    END = 1
    DAMAGE = -1                 # `_Fault.what` says it
    NOT_READ = -3               # `_Fault.number` is the error of the system
    RAISED = -4                 # an exception of Python is set

cdef size_t WINDOW_BYTES = _contract.WINDOW_BYTES
cdef size_t BLOCK_BYTES_MOST = _contract.BLOCK_BYTES_MOST
cdef size_t INDEX_BYTES_MOST = _contract.INDEX_BYTES_MOST
cdef size_t KEY_BYTES_MOST = _contract.STORED_KEY_BYTES_MOST


cdef struct File:
    int descriptor
    bint has_plain_index        # the keys of its index have no kind and number behind them
    uint64_t end                # of its blocks
    uint64_t index_at, index_size


cdef struct Fault:
    const char *what
    int number
    Py_ssize_t file             # which file of the run
    uint64_t at                 # where in it


cdef struct Run:
    File *files
    Py_ssize_t count, number    # files, and the one being read
    bint is_open, has_ended
    bint is_inside              # the pass has begun in it
    bint is_bounded             # whether keys of the block may lie at the end of the pass
    Bytes index, window, block, packed_index
    uint64_t window_at          # where in the file the window begins
    size_t index_at, index_end
    const unsigned char *entries
    size_t at, entries_end
    Bytes key                   # of the entry, with kind and number
    const unsigned char *value
    size_t value_size
    Fault fault


cdef inline int compare_bytes(
    const unsigned char *one, size_t size, const unsigned char *other, size_t other_size
) noexcept nogil:
    cdef int difference = memcmp(one, other, min(size, other_size))
    return difference if difference else (size > other_size) - (size < other_size)


cdef inline int damage(Run *run, const char *what, uint64_t at) noexcept nogil:
    run.fault.what, run.fault.at, run.fault.file = what, at, run.number
    return DAMAGE


cdef inline size_t number_at(
    const unsigned char *data, size_t at, size_t end, uint64_t *found
) noexcept nogil:
    """Read the number at `at`. Returns the place behind it, 0 where it does not end before `end`."""
    cdef int shift = 0
    cdef uint64_t byte
    found[0] = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        found[0] |= (byte & 127) << shift
        if not byte & 128:
            return at
        shift += 7
    return 0


cdef int read_bytes(Run *run, unsigned char *to, size_t size, uint64_t at) noexcept nogil:
    cdef int descriptor = run.files[run.number].descriptor
    cdef Py_ssize_t done
    cdef size_t filled = 0
    while filled < size:
        done = pread(descriptor, to + filled, size - filled, <off_t>(at + filled))
        if done < 0:
            if errno == EINTR:
                continue
            run.fault.number, run.fault.file, run.fault.at = errno, run.number, at
            return NOT_READ
        if done == 0:
            return damage(run, "it became shorter while it was read", at)
        filled += done
    return MORE


cdef int unpacked(
    Run *run, const unsigned char *stored, size_t size, int codec, uint64_t at, size_t most,
    Bytes *to
) noexcept nogil:
    """Unpack a block behind its checksum into `to`."""
    cdef uint64_t wanted = 0
    cdef size_t head = number_at(stored, 0, size, &wanted)
    cdef int status
    if not head:
        return damage(run, "a packed block does not tell its size", at)
    if wanted > most:
        return damage(run, "a packed block tells more bytes than a block has", at)
    status = grow(to, wanted)
    if status:
        return status
    to.size = wanted
    if codec == LZ4:
        if kv_unpack_lz4(stored + head, size - head, to.data, wanted):
            return damage(run, "a block of LZ4 does not unpack", at)
        return MORE
    if codec == ZSTD:
        return unpacked_zstd(run, stored + head, size - head, at, to)
    return damage(run, "a block has an unknown codec", at)


cdef int unpacked_zstd(
    Run *run, const unsigned char *stored, size_t size, uint64_t at, Bytes *to
) noexcept with gil:
    """A store packs nothing by zstd; a file that it was given may."""
    cdef bytes found
    try:
        found = _unpack_zstd(PyBytes_FromStringAndSize(<const char *>stored, size), to.size)
    except MemoryError:
        return NO_MEMORY
    except Exception:
        return damage(run, "a block of zstd does not unpack", at)
    if <size_t>PyBytes_GET_SIZE(found) != to.size:
        return damage(run, "a block of zstd has not the size that it tells", at)
    memcpy(to.data, PyBytes_AS_STRING(found), to.size)
    return MORE


def _unpack_zstd(bytes packed, size_t size):
    import pyarrow as pa

    return pa.decompress(packed, decompressed_size=size, codec="zstd", asbytes=True)


cdef int block_at(
    Run *run, uint64_t at, uint64_t size, size_t most, Bytes *window, uint64_t *window_at,
    Bytes *block, const unsigned char **found, size_t *found_size, size_t ahead
) noexcept nogil:
    """Find the contents of the block at `at`: in `window`, or unpacked into `block`."""
    cdef File *file = &run.files[run.number]
    cdef size_t wanted
    cdef const unsigned char *stored
    cdef uint32_t told = 0, checksum
    cdef int status, codec
    if size > most or at > file.end or size + TRAILER > file.end - at:
        return damage(run, "a block lies outside of its file", at)
    wanted = size + TRAILER
    if at < window_at[0] or at + wanted > window_at[0] + window.size:
        wanted = min(max(wanted, ahead), file.end - at)
        status = grow(window, wanted)
        if status:
            return status
        window.size = 0
        status = read_bytes(run, window.data, wanted, at)
        if status:
            return status
        window.size, window_at[0] = wanted, at
    stored = window.data + (at - window_at[0])
    codec = stored[size]
    memcpy(&told, stored + size + 1, 4)
    checksum = <uint32_t>kv_xxh3(stored, size) ^ <uint32_t>codec * <uint32_t>CODEC_PRIME
    if checksum != told:
        return damage(run, "the checksum of a block differs", at)
    if not codec:
        found[0], found_size[0] = stored, size
        return MORE
    status = unpacked(run, stored, size, codec, at, most, block)
    found[0], found_size[0] = block.data, block.size
    return status


cdef int entries_of(Run *run, const unsigned char *block, size_t size, size_t *end) noexcept nogil:
    """Where the entries of a block end, and its restarts begin."""
    cdef uint32_t count = 0
    if size < 4:
        return DAMAGE
    memcpy(&count, block + size - 4, 4)
    if not count or 4 * (<uint64_t>count + 1) >= size:
        return DAMAGE
    end[0] = size - 4 * (<size_t>count + 1)
    return MORE


cdef int open_file(Run *run, Pass one) noexcept nogil:
    """Read the index of the run's next file."""
    cdef File *file = &run.files[run.number]
    cdef const unsigned char *index = NULL
    cdef size_t size = 0
    cdef uint64_t window_at = 0
    cdef int status
    run.window.size = run.packed_index.size = 0
    status = block_at(
        run, file.index_at, file.index_size, INDEX_BYTES_MOST, &run.packed_index, &window_at,
        &run.index, &index, &size, 0
    )
    if status:
        return status
    if index is not run.index.data:  # it was not packed
        status = grow(&run.index, size)
        if status:
            return status
        memcpy(run.index.data, index, size)
        run.index.size = size
    free(run.packed_index.data)
    run.packed_index.data, run.packed_index.size, run.packed_index.room = NULL, 0, 0
    run.index_at = 0
    if entries_of(run, run.index.data, run.index.size, &run.index_end):
        return damage(run, "its index has no entries", file.index_at)
    run.is_open = True
    return MORE


cdef int next_block(Run *run, Pass one) noexcept nogil:
    """Go to the run's next block that may have keys of the pass."""
    cdef uint64_t shared = 0, fresh = 0, at = 0, size = 0
    cdef size_t place, length, found_size = 0
    cdef const unsigned char *last
    cdef const unsigned char *found = NULL
    cdef bint is_last = False
    cdef int status
    while True:
        if run.number == run.count:
            run.has_ended = True
            return END
        if not run.is_open:
            status = open_file(run, one)
            if status:
                return status
        if run.index_at >= run.index_end:
            run.is_open = False
            run.number += 1
            continue
        place = number_at(run.index.data, run.index_at, run.index_end, &shared)
        if place:
            place = number_at(run.index.data, place, run.index_end, &fresh)
        if not place or shared or fresh > run.index_end - place:
            return damage(run, "an entry of its index is cut", run.index_at)
        last, length = run.index.data + place, fresh
        place = number_at(run.index.data, place + length, run.index_end, &at)
        if place:
            place = number_at(run.index.data, place, run.index_end, &size)
        if not place:
            return damage(run, "an entry of its index is cut", run.index_at)
        if not run.files[run.number].has_plain_index:
            if length < INTERNAL:
                return damage(run, "a key of its index is cut", run.index_at)
            length -= INTERNAL
        run.index_at = place
        # No key of the block is above `last`, and no key of the next one is below it.
        if compare_bytes(last, length, one.begin, one.begin_size) < 0:
            continue
        run.is_bounded = (
            one.has_end and compare_bytes(last, length, one.end, one.end_size) >= 0
        )
        status = block_at(
            run, at, size, BLOCK_BYTES_MOST, &run.window, &run.window_at, &run.block,
            &found, &found_size, WINDOW_BYTES
        )
        if status:
            return status
        if entries_of(run, found, found_size, &run.entries_end):
            return damage(run, "a block has no entries", at)
        run.entries, run.at = found, 0
        one.blocks += 1
        return MORE


cdef inline int next_entry(Run *run, Pass one) noexcept nogil:
    """Go to the run's next entry: of several with one stored key to the newest, which is first."""
    cdef uint64_t shared, fresh, size
    cdef size_t at, end, length, former
    cdef const unsigned char *entries
    cdef bint is_same
    cdef int status
    while True:
        if run.at >= run.entries_end:
            status = next_block(run, one)
            if status:
                return status
        entries, at, end = run.entries, run.at, run.entries_end
        if end - at >= 3 and entries[at] < 128 and entries[at + 1] < 128 and entries[at + 2] < 128:
            shared, fresh, size = entries[at], entries[at + 1], entries[at + 2]
            at += 3
        else:
            at = number_at(entries, at, end, &shared)
            if at:
                at = number_at(entries, at, end, &fresh)
            if at:
                at = number_at(entries, at, end, &size)
            if not at:
                return damage(run, "an entry does not fit its block", run.at)
        former = run.key.size
        if fresh > end - at or size > end - at - fresh or shared > (former if run.at else 0):
            return damage(run, "an entry does not fit its block", run.at)
        length = shared + fresh
        if length < INTERNAL or length > KEY_BYTES_MOST:
            return damage(run, "a key is too short or too long", run.at)
        # The key before it may be the same, with a greater number: a block that cuts no key tells
        # it whole.
        is_same = length == former and (
            shared >= length - INTERNAL
            or memcmp(run.key.data + shared, entries + at, length - INTERNAL - shared) == 0
        )
        if length + KV_PAD > run.key.room:
            status = grow(&run.key, length)
            if status:
                return status
        memcpy(run.key.data + shared, entries + at, fresh)
        run.key.size = length
        run.value = entries + at + fresh
        run.value_size = size
        run.at = at + fresh + size
        one.entries += 1
        if is_same:
            continue
        if run.is_bounded and compare_bytes(
            run.key.data, length - INTERNAL, one.end, one.end_size
        ) >= 0:
            run.has_ended = True
            return END
        if not run.is_inside:
            if compare_bytes(run.key.data, length - INTERNAL, one.begin, one.begin_size) < 0:
                continue
            run.is_inside = True
        return MORE


@cython.final
cdef class Files:
    """The files of a pass, in runs, the newest run first; the files of a run ascend and do not
    meet. A file is a tuple: its descriptor, where its blocks end, offset and size of its index,
    and whether the keys of the index are stored keys.

    The caller keeps the descriptors open."""
    cdef File *_files
    cdef Py_ssize_t *_first     # of each run, and where the last ends
    cdef Py_ssize_t _runs

    def __cinit__(self, list runs not None):
        cdef Py_ssize_t total = sum(map(len, runs)), at = 0, number
        self._files = <File *>calloc(max(total, 1), sizeof(File))
        self._first = <Py_ssize_t *>calloc(len(runs) + 1, sizeof(Py_ssize_t))
        if self._files is NULL or self._first is NULL:
            raise MemoryError
        self._runs = len(runs)
        for number, run in enumerate(runs):
            for descriptor, end, index_at, index_size, is_plain in run:
                self._files[at] = File(descriptor, is_plain, end, index_at, index_size)
                at += 1
            self._first[number + 1] = at

    def __dealloc__(self):
        free(self._files)
        free(self._first)


cdef struct Lifetime:
    uint64_t reference          # 0: none, for no import has it
    bint is_known
    int64_t added
    uint64_t reverted


cdef struct Bound:
    const unsigned char *key
    size_t size
    int64_t newest              # the range tombstone from here on


cdef inline Bound _bound(bytes key, int64_t newest):
    return Bound(<const unsigned char *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), newest)


include "answering.pxi"


@cython.final
cdef class Pass:
    """The rows of `begin <= stored key < end` that are alive at `as_of`, ascending.

    `stamps` and `nearby` are as in `kvstore.loops.live.Live`. With `keys_only` values are empty.
    With `whole` the rows are all entries, alive or not: stored keys with their values. With
    `answers` there are no rows: the labels are answered from all entries. One thread at a time may
    use it.
    """
    cdef readonly Py_ssize_t rows           # found since the last call of `found`
    cdef readonly Py_ssize_t entries        # passed over since the beginning
    cdef readonly Py_ssize_t blocks         # read since the beginning
    cdef Files _files
    cdef Answers _answers
    cdef object _stamps, _nearby
    cdef bytes _begin, _end
    cdef const unsigned char *begin
    cdef const unsigned char *end
    cdef size_t begin_size, end_size
    cdef bint has_end, _keys_only, _is_whole, _has_begun, _has_ended
    cdef int64_t _as_of
    cdef Run *_runs
    cdef Py_ssize_t _count
    cdef Lifetime _kept[STAMPS_KEPT]
    # the key that the pass has reached, with its terminator, and the newest entry seen of it
    cdef Bytes _seen
    cdef int64_t _time          # INVISIBLE: none
    cdef bint _is_value
    cdef size_t _held_key, _held_value
    # the range tombstones near it
    cdef list _bounds_kept
    cdef Bound *_bounds
    cdef Py_ssize_t _bounds_count, _at
    cdef bytes _low, _high      # the keys that the last answer is about
    cdef Bound _from, _below
    cdef bint _is_asked
    cdef int64_t _covered
    # the rows
    cdef Bytes _key_ends, _keys, _value_ends, _values
    cdef Fault _fault
    cdef Py_ssize_t _faulty     # the run at fault
    cdef object _raised         # the exception of a call of Python

    def __cinit__(
        self, Files files not None, bytes begin not None, bytes end, int64_t as_of, stamps,
        nearby=None, *, bint keys_only=False, bint whole=False, Answers answers=None
    ):
        cdef Py_ssize_t number
        self._answers = answers
        self._files, self._stamps, self._nearby = files, stamps, nearby
        self._begin, self._end = begin, end
        self.begin = <const unsigned char *>PyBytes_AS_STRING(begin)
        self.begin_size = PyBytes_GET_SIZE(begin)
        self.has_end = end is not None
        if self.has_end:
            self.end = <const unsigned char *>PyBytes_AS_STRING(end)
            self.end_size = PyBytes_GET_SIZE(end)
        self._as_of, self._keys_only, self._is_whole = as_of, keys_only, whole
        self._time = INVISIBLE
        self._count = files._runs
        self._runs = <Run *>calloc(max(self._count, 1), sizeof(Run))
        if self._runs is NULL:
            raise MemoryError
        for number in range(self._count):
            self._runs[number].files = files._files + files._first[number]
            self._runs[number].count = files._first[number + 1] - files._first[number]
        self._low = b""
        if self._clear():
            raise MemoryError

    def __dealloc__(self):
        cdef Py_ssize_t number
        if self._runs is not NULL:
            for number in range(self._count):
                free(self._runs[number].index.data)
                free(self._runs[number].packed_index.data)
                free(self._runs[number].window.data)
                free(self._runs[number].block.data)
                free(self._runs[number].key.data)
        free(self._runs)
        free(self._seen.data)
        free(self._bounds)
        free(self._key_ends.data)
        free(self._keys.data)
        free(self._value_ends.data)
        free(self._values.data)

    @property
    def size(self):
        """The bytes of the rows that were found since the last call of `found`: keys count too, for
        an Arrow array has room for 2 GiB of them."""
        return self._keys.size + self._values.size

    def take(self, Py_ssize_t rows, size_t bytes_max, Py_ssize_t entries):
        """Find further rows: until `rows` are found or their bytes are `bytes_max`, or until about
        `entries` entries are passed. False once the pass has ended.

        Raises `ValueError` for a damaged file with what is damaged, the run, the file in the run
        and the place; `OSError` for a file that cannot be read.
        """
        cdef int status
        with nogil:
            status = self._take(rows, bytes_max, self.entries + entries)
        if status >= 0:
            return status == MORE
        if status == NO_MEMORY:
            raise MemoryError
        if status == RAISED:
            raise self._raised
        place = self._faulty, self._fault.file
        if status == NOT_READ:
            raise OSError(self._fault.number, place)
        raise ValueError(self._fault.what.decode(), self._fault.at, place)

    cdef int _take(self, Py_ssize_t rows, size_t bytes_max, Py_ssize_t entries_max) noexcept nogil:
        cdef Run *run = NULL
        cdef Run *other
        cdef Py_ssize_t number, best, second
        cdef int status
        if self._has_ended:
            return END
        if not self._has_begun:
            self._has_begun = True
            for number in range(self._count):
                status = next_entry(&self._runs[number], self)
                if status < 0:
                    return self._at_fault(number, status)
        while True:
            best = -1
            for number in range(self._count):
                other = &self._runs[number]
                if not other.has_ended and (best < 0 or _order(other, run) < 0):
                    best, run = number, other
            if best < 0:
                self._has_ended = True
                if self._answers is not None:
                    return self._answers.end()
                return self._release() or END
            second = -1
            for number in range(self._count):
                other = &self._runs[number]
                if number == best or other.has_ended:
                    continue
                if number > best and _order(other, run) == 0:  # hidden by the newer run
                    status = next_entry(other, self)
                    if status < 0:
                        return self._at_fault(number, status)
                    if other.has_ended:
                        continue
                if second < 0 or _order(other, &self._runs[second]) < 0:
                    second = number
            while True:
                if run.key.data[run.key.size - INTERNAL] == PUT:
                    if self._answers is not None:
                        status = self._answers.meet(run, self)
                        if status == END:
                            self._has_ended = True
                            return END
                    else:
                        status = self._keep(run) if self._is_whole else self._meet(run)
                    if status < 0:
                        return self._at_fault(best, status)
                elif run.key.data[run.key.size - INTERNAL] != DELETED:
                    status = damage(run, "an entry is of a kind that stores do not write", run.at)
                    return self._at_fault(best, status)
                status = next_entry(run, self)
                if status:
                    if status < 0:
                        return self._at_fault(best, status)
                    break
                if second >= 0 and _order(run, &self._runs[second]) >= 0:
                    break
                if self._has_enough(rows, bytes_max, entries_max):
                    return MORE
            if self._has_enough(rows, bytes_max, entries_max):
                return MORE

    cdef inline bint _has_enough(
        self, Py_ssize_t rows, size_t bytes_max, Py_ssize_t entries_max
    ) noexcept nogil:
        return (
            self.rows >= rows
            or self._values.size + self._keys.size >= bytes_max
            or self.entries >= entries_max
        )

    cdef int _at_fault(self, Py_ssize_t number, int status) noexcept nogil:
        self._faulty, self._fault = number, self._runs[number].fault
        return status

    cdef inline int _keep(self, Run *run) noexcept nogil:
        """Take an entry as it is."""
        cdef size_t size = run.key.size - INTERNAL
        if (
            grow(&self._keys, self._keys.size + size)
            or grow(&self._values, self._values.size + run.value_size)
        ):
            return NO_MEMORY
        memcpy(self._keys.data + self._keys.size, run.key.data, size)
        memcpy(self._values.data + self._values.size, run.value, run.value_size)
        self._held_key, self._held_value = size, run.value_size
        return self._count_row()

    cdef inline int _count_row(self) noexcept nogil:
        """Count the row that lies behind the others."""
        cdef int32_t end
        if grow(&self._key_ends, self._key_ends.size + 4):
            return NO_MEMORY
        if grow(&self._value_ends, self._value_ends.size + 4):
            return NO_MEMORY
        self._keys.size += self._held_key
        self._values.size += self._held_value
        end = <int32_t>self._keys.size
        memcpy(self._key_ends.data + self._key_ends.size, &end, 4)
        self._key_ends.size += 4
        end = <int32_t>self._values.size
        memcpy(self._value_ends.data + self._value_ends.size, &end, 4)
        self._value_ends.size += 4
        self.rows += 1
        return MORE

    cdef inline int _meet(self, Run *run) noexcept nogil:
        """Take an entry: see `Live._take`."""
        cdef const unsigned char *key = run.key.data
        cdef size_t size = run.key.size - INTERNAL
        cdef int64_t time
        cdef int status
        if (
            size < <size_t>LEAST
            or key[size - LEAST] != TERMINATOR_0
            or key[size - LEAST + 1] != TERMINATOR_1
            or key[size - 1] > KIND_MAX
        ):
            return self._refuse(key, size)
        if self._seen.size != size - TAIL or memcmp(self._seen.data, key, size - TAIL):
            status = self._release()
            if status:
                return status
            status = grow(&self._seen, size)
            if status:
                return status
            memcpy(self._seen.data, key, size - TAIL)
            self._seen.size = size - TAIL
        time = 0
        status = self._time_of(key + size - TAIL, &time)
        if status:
            return status
        if time <= self._time:
            return MORE
        self._time = time
        self._is_value = key[size - 1] != 0
        if self._is_value:
            return self._hold(key, size - LEAST, run.value, run.value_size)
        return MORE

    cdef inline int _hold(
        self, const unsigned char *key, size_t key_size, const unsigned char *value, size_t size
    ) noexcept nogil:
        """Put the row behind the others."""
        cdef Py_ssize_t plain
        if grow(&self._keys, self._keys.size + key_size):
            return NO_MEMORY
        memcpy(self._keys.data + self._keys.size, key, key_size)
        plain = unescape(<char *>self._keys.data + self._keys.size, key_size)
        if plain < 0:
            return self._refuse(key, key_size + LEAST)
        self._held_key = plain
        self._held_value = 0
        if self._keys_only:
            return MORE
        if grow(&self._values, self._values.size + size):
            return NO_MEMORY
        memcpy(self._values.data + self._values.size, value, size)
        self._held_value = size
        return MORE

    cdef inline int _release(self) noexcept nogil:
        """Count the row that is held, if no newer range tombstone covers it."""
        cdef int64_t time = self._time
        cdef int status
        if time == INVISIBLE:
            return MORE
        self._time = INVISIBLE
        if not self._is_value:
            return MORE
        if self._nearby is not None:
            status = self._move()
            if status:
                return status
            if self._covered > time:
                return MORE
        return self._count_row()

    cdef inline int _time_of(self, const unsigned char *tail, int64_t *time) noexcept nogil:
        cdef uint64_t suffix = big_endian(tail)
        cdef Lifetime *kept
        if suffix >= FIRST_TIMED:
            time[0] = <int64_t>~suffix
            if time[0] > self._as_of:
                time[0] = INVISIBLE
            return MORE
        kept = self._lifetime(suffix, tail)
        if kept is NULL:
            return RAISED
        time[0] = INVISIBLE
        if (
            kept.is_known
            and kept.added <= self._as_of
            and <uint64_t>self._as_of < kept.reverted
        ):
            time[0] = kept.added
        return MORE

    cdef inline Lifetime *_lifetime(
        self, uint64_t reference, const unsigned char *tail
    ) noexcept nogil:
        """When an import is visible. NULL where asking raised an exception."""
        cdef Lifetime *kept = &self._kept[(reference * <uint64_t>0x9E3779B97F4A7C15) >> KEPT_SHIFT]
        if kept.reference != reference and self._ask_lifetime(kept, reference, tail):
            return NULL
        return kept

    cdef int _ask_lifetime(
        self, Lifetime *kept, uint64_t reference, const unsigned char *tail
    ) noexcept with gil:
        try:
            lifetime = self._stamps.get(PyBytes_FromStringAndSize(<const char *>tail, 8))
            kept.is_known = lifetime is not None
            if lifetime is not None:
                kept.added, kept.reverted = lifetime
        except BaseException as error:
            self._raised = error
            return RAISED
        kept.reference = reference
        return MORE

    cdef int _move(self) noexcept nogil:
        """Find the newest range tombstone over the key that is held."""
        cdef Py_ssize_t at
        if (
            not self._is_asked
            or compare_bytes(
                self._seen.data, self._seen.size, self._from.key, self._from.size
            ) < 0
            or self._below.key is not NULL and compare_bytes(
                self._seen.data, self._seen.size, self._below.key, self._below.size
            ) >= 0
        ):
            if self._ask():
                return RAISED
        at = self._at  # keys ascend
        while at + 1 < self._bounds_count and compare_bytes(
            self._seen.data, self._seen.size, self._bounds[at + 1].key, self._bounds[at + 1].size
        ) >= 0:
            at += 1
        self._at = at
        self._covered = self._bounds[at].newest
        return MORE

    cdef int _ask(self) noexcept with gil:
        cdef Bound *fresh
        cdef Py_ssize_t number
        try:
            stem = PyBytes_FromStringAndSize(<char *>self._seen.data, self._seen.size)
            low, high, bounds, newest = self._nearby(stem + bytes(TAIL))
            kept = [b"", *bounds]
            fresh = <Bound *>calloc(len(kept), sizeof(Bound))
            if fresh is NULL:
                raise MemoryError
            free(self._bounds)
            self._bounds, self._bounds_count, self._at = fresh, len(kept), 0
            self._bounds_kept, self._low, self._high = kept, low, high
            self._from = _bound(self._low, 0)
            self._below = Bound(NULL, 0, 0)
            if self._high is not None:
                self._below = _bound(self._high, 0)
            for number, time in enumerate(newest):
                fresh[number] = _bound(kept[number], time)
        except BaseException as error:
            self._raised = error
            return RAISED
        self._is_asked = True
        return MORE

    cdef int _refuse(self, const unsigned char *key, size_t size) noexcept with gil:
        try:
            refuse_key(PyBytes_FromStringAndSize(<const char *>key, size))
        except BaseException as error:
            self._raised = error
        return RAISED

    cdef int _clear(self) noexcept nogil:
        """Begin the next rows, in new buffers."""
        cdef Bytes none
        none.data, none.size, none.room = NULL, 0, 0
        cdef size_t ends = self._key_ends.size, keys = self._keys.size, values = self._values.size
        self._key_ends = self._keys = self._value_ends = self._values = none
        self.rows = 0
        if (
            grow(&self._key_ends, ends + 4)
            or grow(&self._value_ends, ends + 4)
            or grow(&self._keys, keys)
            or grow(&self._values, values)
        ):
            return NO_MEMORY
        memset(self._key_ends.data, 0, 4)
        memset(self._value_ends.data, 0, 4)
        self._key_ends.size = self._value_ends.size = 4
        return MORE

    def found(self):
        """The rows that were found since the last call, as `kvstore.loops.live.LiveColumns` gives
        them. Not while a row is held: call it where `take` has returned."""
        cdef size_t held_key = self._held_key, held_value = self._held_value
        cdef bint is_held = self._time != INVISIBLE and self._is_value
        cdef Bytes keys = self._keys, values = self._values
        shown = (
            self.rows, _owned(&self._key_ends), _owned(&self._keys), _owned(&self._value_ends),
            _owned(&self._values),
        )
        if self._clear():
            raise MemoryError
        if is_held:  # its bytes lie behind the rows that were handed out
            if grow(&self._keys, held_key) or grow(&self._values, held_value):
                raise MemoryError
            memcpy(self._keys.data, keys.data + keys.size, held_key)
            memcpy(self._values.data, values.data + values.size, held_value)
        return shown

    def found_rows(self):
        """As `found`, as lists of keys and values."""
        cdef Py_ssize_t row, rows = self.rows
        cdef int32_t key_start = 0, key_end = 0, start = 0, end = 0
        cdef list keys = [None] * rows, values = [None] * rows
        for row in range(rows):
            memcpy(&key_end, self._key_ends.data + 4 * (row + 1), 4)
            memcpy(&end, self._value_ends.data + 4 * (row + 1), 4)
            keys[row] = PyBytes_FromStringAndSize(
                <const char *>self._keys.data + key_start, key_end - key_start
            )
            values[row] = PyBytes_FromStringAndSize(
                <const char *>self._values.data + start, end - start
            )
            key_start, start = key_end, end
        # The row that is held moves to the front of the same buffers.
        if self._time != INVISIBLE and self._is_value:
            memmove(self._keys.data, self._keys.data + self._keys.size, self._held_key)
            memmove(self._values.data, self._values.data + self._values.size, self._held_value)
        self._keys.size = self._values.size = 0
        self._key_ends.size = self._value_ends.size = 4
        self.rows = 0
        return keys, values


cdef inline int _order(Run *one, Run *other) noexcept nogil:
    return compare_bytes(
        one.key.data, one.key.size - INTERNAL, other.key.data, other.key.size - INTERNAL
    )


@cython.final
cdef class _Owned:
    """Bytes of a column, which are freed with it."""
    cdef unsigned char *_data
    cdef size_t _size

    def __dealloc__(self):
        free(self._data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._data, self._size, True, flags)


cdef _Owned _owned(Bytes *bytes_):
    cdef _Owned owned = _Owned()
    owned._data, owned._size = bytes_.data, bytes_.size
    bytes_.data = NULL
    return owned
