# cython: language_level=3, wraparound=False, boundscheck=False, initializedcheck=False, cdivision=True
"""Sorted files made of columns, without the interpreter lock: their entries, blocks and index.

`kvstore.engine.sorted_file` has the bytes of a file, and adds what stands behind the blocks of
data. The blocks are cut where RocksDB cuts them, so that a file without compression differs from
RocksDB's in its properties only.

Invariants
1. An offset of a column is compared with its bytes before it is used.
2. A key that is not above the one before it changes nothing.
3. A buffer that is packed or compared has `KV_PAD` bytes behind its end.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint32_t

include "shared.pxi"
include "buffers.pxi"

cdef extern from "blocks.h" nogil:
    enum:
        KV_PAD
    struct kv_places:
        pass
    uint64_t kv_xxh3(const unsigned char *data, size_t size)
    size_t kv_same(
        const unsigned char *one, const unsigned char *other, const unsigned char *end
    )
    size_t kv_pack_lz4(
        const unsigned char *block, size_t size, unsigned char *to, size_t room, kv_places *places
    )

include "growing.pxi"

cdef enum:
    TRAILER = 5                 # codec and checksum behind a block
    INTERNAL = 8                # kind and sequence number behind a stored key
    LZ4 = 4
    CODEC_PRIME = 0x6B9083D9
    HEAD_MOST = 3 * 10          # three numbers before an entry
    RESTART_EVERY = 16          # entries from one whole key to the next
    ROOM_WHOLE = 10             # percent of a block that may stay empty, where an entry is larger
    PACKED_LEAST = 16           # a shorter block is not packed

cdef enum:                      # what a step found
    DONE = 0
    FULL = 1
    OUT_OF_ORDER = -3
    RAISED = -4                 # an exception of Python is kept

cdef size_t PACKED_BYTES_MOST = 1 << 31

from kvstore.loops.shapes import OutOfOrder


cdef inline unsigned char *put_number(unsigned char *to, uint64_t number) noexcept nogil:
    while number > 127:
        to[0] = <unsigned char>(number | 128)
        to += 1
        number >>= 7
    to[0] = <unsigned char>number
    return to + 1


cdef inline size_t number_size(uint64_t number) noexcept nogil:
    cdef size_t size = 1
    while number > 127:
        number >>= 7
        size += 1
    return size


cdef inline void put_u32(unsigned char *to, uint32_t number) noexcept nogil:
    to[0], to[1] = <unsigned char>number, <unsigned char>(number >> 8)
    to[2], to[3] = <unsigned char>(number >> 16), <unsigned char>(number >> 24)


cdef inline int put_bytes(Bytes *to, const void *data, size_t size) noexcept nogil:
    if grow(to, to.size + size):
        return NO_MEMORY
    memcpy(to.data + to.size, data, size)
    to.size += size
    return DONE


cdef inline int put_word(Bytes *to, uint64_t word) noexcept nogil:
    return put_bytes(to, &word, sizeof(uint64_t))


@cython.final
cdef class Stretch:
    """Blocks that stand behind each other in a file. `Packer` fills them, `seal` packs them, and
    then the buffer of this object has their bytes. One thread at a time may use it."""
    cdef Bytes _raw, _raw_sizes         # the contents of the blocks, and the size of each
    cdef Bytes _out, _out_sizes, _sums  # the blocks as they stand in the file; their checksums
    cdef kv_places *_places
    cdef object _raised
    cdef Py_ssize_t _looking            # buffers that others have of it

    def __cinit__(self):
        self._places = <kv_places *>calloc(1, sizeof(kv_places))
        if self._places is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._places)
        free(self._raw.data)
        free(self._raw_sizes.data)
        free(self._out.data)
        free(self._out_sizes.data)
        free(self._sums.data)

    @property
    def size(self):
        """The bytes of the contents."""
        return self._raw.size

    def put(self, bytes contents not None):
        """Add the contents of a block."""
        if (
            put_bytes(&self._raw, PyBytes_AS_STRING(contents), PyBytes_GET_SIZE(contents))
            or put_word(&self._raw_sizes, PyBytes_GET_SIZE(contents))
        ):
            raise MemoryError

    def seal(self, int codec, pack_zstd=None):
        """Pack the blocks: by nothing if `codec` is 0, by LZ4 if it is 4, and by `pack_zstd` if it
        is 7. A block stays as it is unless packing saves an eighth."""
        cdef int status = DONE
        cdef size_t at = 0
        cdef uint64_t *sizes = <uint64_t *>self._raw_sizes.data
        cdef Py_ssize_t number, blocks = self._raw_sizes.size // sizeof(uint64_t)
        if self._looking:
            raise BufferError("somebody looks at the blocks")
        self._out.size = self._out_sizes.size = self._sums.size = 0
        with nogil:
            for number in range(blocks):
                status = self._seal(self._raw.data + at, sizes[number], codec, pack_zstd)
                if status:
                    break
                at += sizes[number]
        if status == RAISED:
            error, self._raised = self._raised, None
            raise error
        if status:
            raise MemoryError

    def restart(self, size_t room):
        """Forget the blocks, to take others in the same memory: at most some `room` bytes."""
        if self._looking:
            raise BufferError("somebody looks at the blocks")
        self._raw.size = self._raw_sizes.size = 0
        self._out.size = self._out_sizes.size = self._sums.size = 0
        if self._raw.room > 4 * room:  # of a value of many MiB
            free(self._raw.data)
            free(self._out.data)
            self._raw.data = self._out.data = NULL
            self._raw.room = self._out.room = 0

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._out.data, self._out.size, True, flags)
        self._looking += 1

    def __releasebuffer__(self, Py_buffer *view):
        self._looking -= 1

    cdef int _seal(
        self, const unsigned char *block, size_t size, int codec, object pack_zstd
    ) noexcept nogil:
        cdef size_t stored = 0, head, room
        cdef uint64_t checksum
        cdef unsigned char *out
        cdef int status
        if grow(&self._out, self._out.size + size + HEAD_MOST + TRAILER):
            return NO_MEMORY
        out = self._out.data + self._out.size
        if codec and PACKED_LEAST < size < PACKED_BYTES_MOST:
            head = put_number(out, size) - out
            room = size - size // 8 - head
            if codec == LZ4:
                stored = kv_pack_lz4(block, size, out + head, room, self._places)
            else:
                status = self._pack(block, size, out + head, room, &stored, pack_zstd)
                if status:
                    return status
            if stored:
                stored += head
        if not stored:
            codec = 0
            memcpy(out, block, size)
            stored = size
        checksum = kv_xxh3(out, stored)
        out += stored
        out[0] = <unsigned char>codec
        put_u32(out + 1, <uint32_t>checksum ^ <uint32_t>codec * <uint32_t>CODEC_PRIME)
        self._out.size += stored + TRAILER
        return put_word(&self._out_sizes, stored) or put_word(&self._sums, checksum)

    cdef int _pack(
        self, const unsigned char *block, size_t size, unsigned char *to, size_t room,
        size_t *stored, object pack_zstd
    ) noexcept with gil:
        cdef bytes packed
        try:
            packed = pack_zstd(PyBytes_FromStringAndSize(<const char *>block, size))
        except BaseException as error:
            self._raised = error
            return RAISED
        stored[0] = 0
        if <size_t>PyBytes_GET_SIZE(packed) <= room:
            stored[0] = PyBytes_GET_SIZE(packed)
            memcpy(to, PyBytes_AS_STRING(packed), stored[0])
        return DONE


@cython.final
cdef class Packer:
    """The entries of one sorted file, in blocks of about `block_bytes`, and its index.

    The blocks go to a stretch, which is full behind `stretch_bytes`: `next_stretch` gives another
    one its place. `take` counts the stretches, sealed and in their order, as parts of the file. One
    thread at a time may use it.
    """
    cdef readonly Py_ssize_t entries, blocks
    cdef readonly size_t key_bytes, value_bytes     # of all entries, as RocksDB counts them
    cdef readonly size_t size                       # of the blocks that were taken
    cdef size_t _block_bytes, _block_bytes_low, _stretch_bytes
    cdef Stretch _stretch
    cdef Bytes *_raw            # of the stretch
    cdef size_t _block_at       # where the block begins in it
    cdef Bytes _restarts
    # stored keys with kind and number: the last one, and the next
    cdef Bytes _last, _fresh
    cdef Py_ssize_t _run        # entries behind the last whole key
    cdef bint _is_pending       # the key of the last block is not in the index yet
    cdef Bytes _keys, _handles, _sums   # of the index; and the checksums of the blocks

    def __cinit__(self, size_t block_bytes, size_t stretch_bytes):
        self._block_bytes, self._stretch_bytes = block_bytes, stretch_bytes
        self._block_bytes_low = (block_bytes * (100 - ROOM_WHOLE) + 99) // 100
        self._stretch = Stretch()
        self._raw = &self._stretch._raw
        if self._begin_block():
            raise MemoryError

    def __dealloc__(self):
        free(self._last.data)
        free(self._fresh.data)
        free(self._restarts.data)
        free(self._keys.data)
        free(self._handles.data)
        free(self._sums.data)

    def add(self, rows not None, Py_ssize_t first, Py_ssize_t end):
        """Add the rows from `first` on, until `end` is reached or the stretch is full. Returns the
        first row that was not added.

        `rows` are `kvstore.loops.shapes.FileRows`. Of `suffixes` it has the same for all rows, or
        one for each; it stands behind the key. Of `kinds` it has a byte for each row, `VALUE` or
        `TOMBSTONE`, which stands behind the suffix. Where it is None all rows have values, and with
        `framed` the kind stands there too. A tombstone and a null have an empty value. With
        `framed` keys are user keys, which are framed; otherwise they are stored keys.

        Raises `OutOfOrder` at a key that is not above the one before it.
        """
        cdef list held = []
        cdef Source key, value
        cdef Py_ssize_t at = first, start = 0, stop = 0, step = 0, count = rows[0]
        cdef bytes suffixes = <bytes?>rows[3], kinds = rows[4]
        cdef bint framed = rows[5]
        cdef Py_ssize_t tail = PyBytes_GET_SIZE(suffixes)
        cdef const unsigned char *suffix = <const unsigned char *>PyBytes_AS_STRING(suffixes)
        cdef const unsigned char *kind = NULL
        cdef const unsigned char *found
        cdef unsigned char tombstone = TOMBSTONE[0], a_value = VALUE[0]
        cdef bint has_kind = framed or kinds is not None, is_sound = True
        cdef int status = DONE
        if not 0 <= first <= end <= count:
            raise ValueError("the rows to add are no rows of the columns")
        _open(&key, rows[1], count, held)
        _open(&value, rows[2], count, held)
        if key.width or value.width:
            raise ValueError("keys and values have no fixed width")
        if kinds is not None:
            if PyBytes_GET_SIZE(kinds) != count:
                raise ValueError("an entry has one kind")
            kind = <const unsigned char *>PyBytes_AS_STRING(kinds)
        if framed and tail != TAIL - 1:
            if tail != (TAIL - 1) * count:
                raise ValueError("an entry has one suffix")
            tail = step = TAIL - 1
        with nogil:
            while at < end:
                is_sound = bounds_at(&key, at, &start, &stop)
                if not is_sound:
                    break
                status = self._frame(
                    key.data + start, stop - start, framed, suffix + at * step, tail, has_kind,
                    kind[at] if kind is not NULL else a_value,
                )
                if status:
                    break
                found, start, stop = NULL, 0, 0
                if (kind is NULL or kind[at] != tombstone) and not is_null(&value, at):
                    is_sound = bounds_at(&value, at, &start, &stop)
                    if not is_sound:
                        break
                    found = value.data + start
                status = self._put(found, stop - start)
                if status:
                    break
                at += 1
        if not is_sound:
            raise ValueError("the offsets of a column do not ascend within its bytes")
        self._raise(status, at)
        return at

    def add_one(self, bytes key not None, bytes value not None):
        """Add an entry: a stored key, and its value. Returns whether it was added: it was not if
        the stretch is full. Raises `OutOfOrder` as `add` does, for row 0."""
        cdef int status
        status = self._frame(
            <const unsigned char *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), False, NULL, 0,
            False, 0
        )
        if not status:
            status = self._put(
                <const unsigned char *>PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
            )
        self._raise(status, 0)
        return status == DONE

    def next_stretch(self, Stretch following not None):
        """The stretch that was filled, perhaps with less than it takes. `following` takes its
        place."""
        filled = self._stretch
        if self._raw.size != self._block_at:
            self.end_block()
        following.restart(self._stretch_bytes)
        self._stretch, self._raw = following, &following._raw
        self._block_at = 0
        return filled

    def end_block(self):
        """End the block that is begun, if any."""
        if self._raw.size != self._block_at:
            self._raise(self._end_block(), 0)

    def take(self, Stretch stretch not None):
        """Count the sealed blocks of a stretch as the next ones of the file."""
        cdef uint64_t *sizes = <uint64_t *>stretch._out_sizes.data
        cdef Py_ssize_t number, blocks = stretch._out_sizes.size // sizeof(uint64_t)
        for number in range(blocks):
            if put_word(&self._handles, self.size) or put_word(&self._handles, sizes[number]):
                raise MemoryError
            self.size += sizes[number] + TRAILER
        self.blocks += blocks
        if put_bytes(&self._sums, stretch._sums.data, stretch._sums.size):
            raise MemoryError

    def index(self):
        """The contents of the index, once all blocks were taken; and 16 bytes that are a digest of
        the blocks. Nothing can be added behind it."""
        cdef Bytes index, restarts
        cdef uint64_t *handles
        cdef const unsigned char *key
        cdef unsigned char *out
        cdef uint64_t size = 0
        cdef uint64_t[2] sums
        cdef Py_ssize_t number
        cdef bytes contents
        if self._is_pending:
            self._raise(self._put_key(self._last.size - INTERNAL), 0)
        handles, key = <uint64_t *>self._handles.data, self._keys.data
        memset(&index, 0, sizeof(Bytes))
        memset(&restarts, 0, sizeof(Bytes))
        try:
            for number in range(self.blocks):
                if key == self._keys.data + self._keys.size:
                    raise ValueError("a block has no key")
                memcpy(&size, key, sizeof(uint64_t))
                if (
                    grow(&index, index.size + size + 4 * HEAD_MOST)
                    or grow(&restarts, restarts.size + 4)
                ):
                    raise MemoryError
                put_u32(restarts.data + restarts.size, <uint32_t>index.size)
                restarts.size += 4
                out = index.data + index.size
                out[0] = 0  # the key is whole
                out = put_number(out + 1, size)
                memcpy(out, key + sizeof(uint64_t), size)
                key += sizeof(uint64_t) + size
                out = put_number(out + size, handles[2 * number])
                out = put_number(out, handles[2 * number + 1])
                index.size = out - index.data
            if key != self._keys.data + self._keys.size:
                raise ValueError("a block was not taken")
            if _put_restarts(&index, &restarts):
                raise MemoryError
            contents = PyBytes_FromStringAndSize(<const char *>index.data, index.size)
        finally:
            free(index.data)
            free(restarts.data)
        sums[0] = kv_xxh3(self._sums.data, self._sums.size)
        if put_word(&self._sums, sums[0]):
            raise MemoryError
        sums[1] = kv_xxh3(self._sums.data, self._sums.size)
        return contents, sums[0].to_bytes(8, "big") + sums[1].to_bytes(8, "big")

    cdef int _raise(self, int status, Py_ssize_t at) except -1:
        if status == OUT_OF_ORDER:
            raise OutOfOrder(at)
        if status == NO_MEMORY:
            raise MemoryError
        return 0

    cdef inline int _frame(
        self, const unsigned char *key, size_t size, bint framed, const unsigned char *suffix,
        size_t suffix_size, bint has_kind, unsigned char kind
    ) noexcept nogil:
        """Make the next stored key."""
        cdef const unsigned char *end = key + size
        cdef const unsigned char *zero
        cdef unsigned char *out
        if grow(&self._fresh, 2 * size + suffix_size + TAIL + INTERNAL):
            return NO_MEMORY
        out = self._fresh.data
        zero = <const unsigned char *>memchr(key, 0, size) if framed and size else NULL
        if zero is NULL:
            if size:
                memcpy(out, key, size)
            out += size
        else:
            while key < end:
                out[0] = key[0]
                out += 1
                if key[0] == 0:
                    out[0] = ESCAPE_MARK
                    out += 1
                key += 1
        if framed:
            out[0], out[1] = TERMINATOR_0, TERMINATOR_1
            out += 2
        if suffix_size:
            memcpy(out, suffix, suffix_size)
            out += suffix_size
        if has_kind:
            out[0] = kind
            out += 1
        memset(out, 0, INTERNAL)
        out[0] = 1  # a put, with the sequence number 0
        self._fresh.size = out + INTERNAL - self._fresh.data
        return DONE

    cdef inline int _put(self, const unsigned char *value, size_t size) noexcept nogil:
        """Add the next stored key with its value, unless the stretch is full."""
        cdef Bytes swapped
        cdef unsigned char *out
        cdef const unsigned char *fresh = self._fresh.data
        cdef size_t length = self._fresh.size, shared = 0, now
        cdef Bytes *raw = self._raw
        cdef int status
        if self.entries:
            now = min(length, self._last.size)
            shared = kv_same(fresh, self._last.data, fresh + now)
            if shared + INTERNAL >= now:  # one is the beginning of the other
                if length <= self._last.size:
                    return OUT_OF_ORDER
            elif fresh[shared] < self._last.data[shared]:
                return OUT_OF_ORDER
        if raw.size != self._block_at:
            now = raw.size - self._block_at + self._restarts.size + 4
            if now >= self._block_bytes or (
                now > self._block_bytes_low
                and now + length + size + 4 + number_size(length) + number_size(size)
                + (4 if self._run >= RESTART_EVERY else 0) > self._block_bytes
            ):
                status = self._end_block()
                if status:
                    return status
        if raw.size == self._block_at:
            shared = 0
            if raw.size >= self._stretch_bytes:
                return FULL
        if self._is_pending:
            status = self._put_key(self._separator())
            if status:
                return status
        if grow(raw, raw.size + HEAD_MOST + length + size):
            return NO_MEMORY
        if self._run >= RESTART_EVERY:
            if grow(&self._restarts, self._restarts.size + 4):
                return NO_MEMORY
            put_u32(
                self._restarts.data + self._restarts.size, <uint32_t>(raw.size - self._block_at)
            )
            self._restarts.size += 4
            self._run = shared = 0
        out = raw.data + raw.size
        if shared < 128 and length - shared < 128 and size < 128:
            out[0], out[1] = <unsigned char>shared, <unsigned char>(length - shared)
            out[2] = <unsigned char>size
            out += 3
        else:
            out = put_number(put_number(put_number(out, shared), length - shared), size)
        memcpy(out, fresh + shared, length - shared)
        out += length - shared
        if size:
            memcpy(out, value, size)
        raw.size = out + size - raw.data
        self._run += 1
        self.entries += 1
        self.key_bytes += length
        self.value_bytes += size
        swapped = self._last
        self._last = self._fresh
        self._fresh = swapped
        return DONE

    cdef int _begin_block(self) noexcept nogil:
        self._block_at = self._raw.size
        self._restarts.size = 0
        self._run = 0
        if grow(&self._restarts, 4):
            return NO_MEMORY
        memset(self._restarts.data, 0, 4)  # the first key is whole
        self._restarts.size = 4
        return DONE

    cdef int _end_block(self) noexcept nogil:
        cdef int status = _put_restarts(self._raw, &self._restarts)
        if not status:
            status = put_word(&self._stretch._raw_sizes, self._raw.size - self._block_at)
        if not status:
            self._is_pending = True
            status = self._begin_block()
        return status

    cdef size_t _separator(self) noexcept nogil:
        """Cut the last key to the shortest that is at or above it and below the next one, as
        RocksDB does. Returns its size."""
        cdef unsigned char *last = self._last.data
        cdef const unsigned char *fresh = self._fresh.data
        cdef size_t size = self._last.size - INTERNAL, next_size = self._fresh.size - INTERNAL
        cdef size_t at = kv_same(last, fresh, last + min(size, next_size))
        if at >= min(size, next_size) or last[at] >= fresh[at]:
            return size  # one is the beginning of the other
        if at + 1 < next_size or last[at] + 1 < fresh[at]:
            last[at] += 1
            return at + 1
        at += 1
        while at < size:
            if last[at] != 255:
                last[at] += 1
                return at + 1
            at += 1
        return size

    cdef int _put_key(self, size_t size) noexcept nogil:
        """Put `size` bytes of the last key into the index, as the key of the last block."""
        self._is_pending = False
        return put_word(&self._keys, size) or put_bytes(&self._keys, self._last.data, size)


cdef inline bint bounds_at(
    Source *source, Py_ssize_t at, Py_ssize_t *start, Py_ssize_t *end
) noexcept nogil:
    start[0], end[0] = source.ends[source.offset + at], source.ends[source.offset + at + 1]
    return 0 <= start[0] <= end[0] <= source.size


cdef int _put_restarts(Bytes *block, Bytes *restarts) noexcept nogil:
    """Put the places of the whole keys behind the entries of a block, and their count."""
    cdef unsigned char count[4]
    put_u32(&count[0], <uint32_t>(restarts.size // 4))
    return put_bytes(block, restarts.data, restarts.size) or put_bytes(block, &count[0], 4)
