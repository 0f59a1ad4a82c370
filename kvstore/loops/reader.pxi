# Included by the modules that move a reader: lookup, timed and floors.

cdef Py_ssize_t SUFFIX = _keys.SUFFIX_BYTES


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
