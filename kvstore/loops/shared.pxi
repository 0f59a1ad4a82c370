# Included by each of the compiled modules: the format of stored keys, and functions on
# bytes. Constants come from `kvstore.codec`.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

from kvstore.codec import keys as _keys
from kvstore.codec import keys as _ordered
from kvstore.loops import shapes as _contract

cdef enum:
    INVISIBLE = -1              # stands for a time, and is older than every time

cdef bytes ZERO = _ordered.ZERO, ESCAPED_ZERO = _ordered.ESCAPED_ZERO
cdef unsigned char ESCAPE_MARK = ESCAPED_ZERO[1]
cdef bytes TERMINATOR = _ordered.TERMINATOR, UNLIMITED = _keys.UNLIMITED
cdef bytes TOMBSTONE = _keys.TOMBSTONE, VALUE = _keys.VALUE
cdef Py_ssize_t TAIL = _keys.TAIL_BYTES, LEAST = _keys.KEY_BYTES_LEAST
cdef unsigned char KIND_MAX = _keys.KIND_MAX
cdef unsigned char TERMINATOR_0 = TERMINATOR[0], TERMINATOR_1 = TERMINATOR[1]
cdef uint64_t FIRST_TIMED = int.from_bytes(_keys.FIRST_TIMED_SUFFIX.ljust(8, b"\x00"), "big")
cdef Py_ssize_t ARRAY_BYTES_MAX = _contract.ARRAY_BYTES_MAX
cdef object check_data_key = _keys.check_data_key


cdef inline bytes escape(bytes key):
    if memchr(PyBytes_AS_STRING(key), 0, PyBytes_GET_SIZE(key)) is NULL:
        return key
    return key.replace(ZERO, ESCAPED_ZERO)


cdef inline Py_ssize_t unescape(char *bytes_, Py_ssize_t size) noexcept nogil:
    """Replace each escaped zero by a zero, in place. Returns the new length, -1 where a zero is
    not escaped."""
    cdef char *read = <char *>memchr(bytes_, 0, size)
    cdef char *end = bytes_ + size
    cdef char *write = read
    if read is NULL:
        return size
    while read < end:
        write[0] = read[0]
        write += 1
        if read[0] == 0:
            if read + 1 == end or <unsigned char>read[1] != ESCAPE_MARK:
                return -1
            read += 1
        read += 1
    return write - bytes_


cdef inline bytes concat(bytes first, bytes second):
    cdef Py_ssize_t size = PyBytes_GET_SIZE(first)
    cdef bytes both = PyBytes_FromStringAndSize(NULL, size + PyBytes_GET_SIZE(second))
    memcpy(PyBytes_AS_STRING(both), PyBytes_AS_STRING(first), size)
    memcpy(PyBytes_AS_STRING(both) + size, PyBytes_AS_STRING(second), PyBytes_GET_SIZE(second))
    return both


cdef inline int compare(bytes one, bytes other) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(one), other_size = PyBytes_GET_SIZE(other)
    cdef int difference = memcmp(
        PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), min(size, other_size)
    )
    return difference if difference else (size > other_size) - (size < other_size)


cdef inline uint64_t big_endian(const unsigned char *bytes_) noexcept nogil:
    cdef uint64_t word = 0
    cdef int at
    for at in range(8):
        word = word << 8 | bytes_[at]
    return word


cdef inline int refuse_key(bytes key) except -1:
    check_data_key(key)
    raise AssertionError("a key of data was refused and is sound")
