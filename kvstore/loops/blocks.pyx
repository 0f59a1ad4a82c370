# cython: language_level=3, wraparound=False, initializedcheck=False
"""The blocks of sorted files and of packed columns: their keys, checksums and bytes.

The keys of a sorted file's block are cut: each names how many bytes it shares with the key before
it (`kvstore.engine.sorted_file` has the form). A block of a stranger may tell anything.

Invariants
1. A number of a block is compared with the block before it is used as an offset.
2. An item of a list is checked to be bytes before its bytes are read.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport UINT64_MAX, uint32_t

include "shared.pxi"

cdef extern from "blocks.h" nogil:
    enum:
        KV_PAD
    uint64_t kv_xxh3(const unsigned char *data, size_t size)
    int kv_unpack_lz4(
        const unsigned char *packed, size_t size, unsigned char *to, size_t wanted
    )

cdef enum:
    VARINT_SHIFT_MAX = 63

cdef Py_ssize_t BLOCK_KEYS_BYTES_MAX = _contract.BLOCK_KEYS_BYTES_MAX


def block_keys(bytes contents not None, bytes suffix not None, Py_ssize_t longest, Py_ssize_t most,
               list values=None):
    """The keys of a block of a sorted file, ascending, each without the `suffix` that it must end
    with. At least one. Their values are added to `values`.

    Raises `ValueError` at damage, and if the block has a key above `longest` bytes, more than
    `most` keys from one whole key to the next, or an entry that begins behind the first MiB.
    """
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(contents)
    cdef Py_ssize_t limit = PyBytes_GET_SIZE(contents), cut = PyBytes_GET_SIZE(suffix)
    cdef Py_ssize_t end, first, length, at = 0, run = 0
    cdef uint32_t count = 0, whole = 0, place = 0
    cdef uint64_t shared = 0, fresh = 0, size = 0
    cdef bytes key = b"", found = None, former
    cdef list keys = []
    if limit >= 4:
        memcpy(&count, begin + limit - 4, 4)
    end = limit - 4 * (<Py_ssize_t>count + 1)
    if end <= 0 or not count:
        raise ValueError("a block has no entries")
    memcpy(&place, begin + end, 4)
    while at < end:
        if at > BLOCK_KEYS_BYTES_MAX:
            raise ValueError("a block has more entries than RocksDB puts into one")
        first = at
        at = _number(begin, at, limit, &shared)
        at = _number(begin, at, limit, &fresh)
        at = _number(begin, at, limit, &size)
        if (
            at > end
            or fresh > <uint64_t>(end - at)
            or size > <uint64_t>(end - at) - fresh
            or shared > <uint64_t>PyBytes_GET_SIZE(key)
            or shared + fresh > <uint64_t>longest
        ):
            raise ValueError("an entry does not fit its block")
        run += 1
        if whole < count and first == place:
            if shared:
                raise ValueError("a key is cut where a block tells a whole one")
            whole += 1
            if whole < count:
                memcpy(&place, begin + end + 4 * <Py_ssize_t>whole, 4)
            run = 1
        if run > most:
            raise ValueError("more keys are cut than RocksDB cuts behind a whole one")
        key = _extended(key, shared, begin + at, fresh)
        at += fresh
        length = PyBytes_GET_SIZE(key) - cut
        if length < 0 or memcmp(PyBytes_AS_STRING(key) + length, PyBytes_AS_STRING(suffix), cut):
            raise ValueError(f"an entry is of another kind than {suffix.hex()}")
        former, found = found, key
        if cut:
            found = PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), length)
        if former is not None and compare(found, former) <= 0:
            raise ValueError("its keys do not ascend")
        keys.append(found)
        if values is not None:
            values.append(PyBytes_FromStringAndSize(<const char *>begin + at, size))
        at += size
    if whole < count:
        raise ValueError("a block tells a whole key where no entry begins")
    return keys


def block_handles(bytes index not None, list places not None):
    """The blocks that the entries of an index name which begin at `places`: offset, size, and
    where the entry ends. Raises `ValueError` at damage."""
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(index)
    cdef Py_ssize_t limit = PyBytes_GET_SIZE(index), at
    cdef uint64_t shared = 0, fresh = 0, offset = 0, size = 0
    cdef list handles = []
    for place in places:
        at = place
        if at < 0:
            raise ValueError("an entry begins before its index")
        at = _number(begin, at, limit, &shared)
        at = _number(begin, at, limit, &fresh)
        if shared:
            raise ValueError("a key of an index is cut")
        if fresh > <uint64_t>(limit - at):
            raise ValueError("an index ends within an entry")
        at = _number(begin, at + <Py_ssize_t>fresh, limit, &offset)
        at = _number(begin, at, limit, &size)
        handles.append((offset, size, at))
    return handles


def referring_keys(list stored not None, bytes reference not None):
    """The user keys of those stored keys whose tails refer to an import. Raises `ValueError` if
    one of them is not framed."""
    cdef Py_ssize_t number, size, count = PyList_GET_SIZE(stored)
    cdef Py_ssize_t referring = PyBytes_GET_SIZE(reference)
    cdef const char *data
    cdef bytes key, stem
    cdef list keys = []
    if referring != TAIL - 1:
        return keys
    for number in range(count):
        key = <bytes?>(<object>PyList_GET_ITEM(stored, number))
        data = PyBytes_AS_STRING(key)
        size = PyBytes_GET_SIZE(key) - TAIL
        if size < 0 or memcmp(data + size, PyBytes_AS_STRING(reference), referring):
            continue
        size -= 2
        stem = None
        if size >= 0 and data[size] == TERMINATOR_0 and data[size + 1] == TERMINATOR_1:
            stem = PyBytes_FromStringAndSize(data, size)
            size = unescape(PyBytes_AS_STRING(stem), size)
        if stem is None or size < 0:
            raise ValueError(f"{key[:-TAIL][:64].hex()} is not a framed key")
        keys.append(stem if size == PyBytes_GET_SIZE(stem) else stem[:size])
    return keys


cdef inline Py_ssize_t _number(
    const unsigned char *data, Py_ssize_t at, Py_ssize_t end, uint64_t *found
) except -1:
    """Read the number at `at`. Returns the place behind it."""
    cdef int shift = 0, byte
    found[0] = 0
    while at < end:
        byte = data[at]
        at += 1
        if shift == VARINT_SHIFT_MAX and byte > 1:
            found[0] = UINT64_MAX
        else:
            found[0] |= <uint64_t>(byte & 127) << shift
        if not byte & 128:
            return at
        shift += 7
        if shift > VARINT_SHIFT_MAX:
            raise ValueError("a number has no end")
    raise ValueError("a block ends within an entry")


cdef inline bytes _extended(
    bytes former, Py_ssize_t shared, const unsigned char *fresh, Py_ssize_t size
):
    """The first `shared` bytes of a key, and behind them the fresh ones of the next."""
    cdef bytes key
    if not shared:
        return PyBytes_FromStringAndSize(<const char *>fresh, size)
    key = PyBytes_FromStringAndSize(NULL, shared + size)
    memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(former), shared)
    memcpy(PyBytes_AS_STRING(key) + shared, fresh, size)
    return key


def xxh3(data):
    """The checksum of bytes: XXH3 of 64 bits, with seed 0."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return kv_xxh3(<const unsigned char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def unpack_lz4(block, Py_ssize_t size):
    """The `size` bytes of an LZ4 block. Raises `ValueError` where the block does not unpack, or to
    another number of bytes; takes memory for the bytes that were asked for."""
    cdef Py_buffer view
    cdef unsigned char *padded = NULL
    cdef unsigned char *unpacked = NULL
    cdef int status = -1
    if size < 0:
        raise ValueError("a block has no negative size")
    PyObject_GetBuffer(block, &view, PyBUF_SIMPLE)
    try:
        padded = <unsigned char *>malloc(view.len + KV_PAD)
        unpacked = <unsigned char *>malloc(size + KV_PAD)
        if padded is NULL or unpacked is NULL:
            raise MemoryError
        memcpy(padded, view.buf, view.len)
        memset(padded + view.len, 0, KV_PAD)
        with nogil:
            status = kv_unpack_lz4(padded, view.len, unpacked, size)
        if status:
            raise ValueError(f"a block of LZ4 does not unpack to {size} bytes")
        return PyBytes_FromStringAndSize(<const char *>unpacked, size)
    finally:
        free(padded)
        free(unpacked)
        PyBuffer_Release(&view)
