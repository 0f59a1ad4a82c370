# Included by the modules that read and make Arrow columns: rows, elements and nested.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer


@cython.final
cdef class _Buffer:
    """The bytes of an object that has a buffer; none for None."""
    cdef Py_buffer view
    cdef bint is_held
    cdef const unsigned char *data
    cdef Py_ssize_t size

    def __cinit__(self, source):
        if source is not None:
            PyObject_GetBuffer(source, &self.view, PyBUF_SIMPLE)
            self.is_held = True
            self.data = <const unsigned char *>self.view.buf
            self.size = self.view.len

    def __dealloc__(self):
        if self.is_held:
            PyBuffer_Release(&self.view)


cdef struct Source:
    Py_ssize_t width, offset, size
    const unsigned char *valid
    const unsigned char *data
    const int32_t *ends
    int kind
    unsigned char tag, mask


cdef inline int _open(Source *source, object column, Py_ssize_t count, list held) except -1:
    """Point `source` at the buffers of a column: width, validity, offset, data, offsets."""
    cdef _Buffer valid = _Buffer(column[1]), data = _Buffer(column[3]), ends = _Buffer(column[4])
    cdef Py_ssize_t last
    held += (valid, data, ends)
    source.width, source.offset = column[0], column[2]
    source.valid, source.data, source.size = valid.data, data.data, data.size
    source.ends = <const int32_t *>ends.data
    last = source.offset + count
    if source.offset < 0 or source.width < 0 or (valid.data and valid.size * 8 < last):
        raise ValueError("a column has too few bits of validity")
    if source.width and data.size < last * source.width:
        raise ValueError("a column has too few bytes")
    if not source.width and (ends.size < (last + 1) * 4 or ends.size % 4):
        raise ValueError("a column has too few offsets")
    return 0


cdef inline bint is_null(Source *source, Py_ssize_t at) noexcept nogil:
    at += source.offset
    return source.valid is not NULL and not source.valid[at >> 3] >> (at & 7) & 1


cdef inline int bounds_of(
    Source *source, Py_ssize_t at, Py_ssize_t *start, Py_ssize_t *end
) except -1:
    """Where the bytes of a value of variable length lie."""
    start[0], end[0] = source.ends[source.offset + at], source.ends[source.offset + at + 1]
    if not 0 <= start[0] <= end[0] <= source.size:
        raise ValueError("the offsets of a column do not ascend within its bytes")
    return 0


cdef struct Target:
    Py_ssize_t index, width, place, filled
    unsigned char *valid
    unsigned char *data
    int32_t *ends


cdef inline list open_target(Target *target, Py_ssize_t count):
    """The buffers of a column of `count` values: validity, data and offsets."""
    cdef bytes valid = PyBytes_FromStringAndSize(NULL, (count + 7) // 8), data = b"", ends = None
    memset(PyBytes_AS_STRING(valid), 255, (count + 7) // 8)
    target.valid = <unsigned char *>PyBytes_AS_STRING(valid)
    target.data, target.ends = NULL, NULL
    if target.width:
        data = PyBytes_FromStringAndSize(NULL, count * target.width)
        target.data = <unsigned char *>PyBytes_AS_STRING(data)
    else:
        ends = PyBytes_FromStringAndSize(NULL, (count + 1) * 4)
        target.ends = <int32_t *>PyBytes_AS_STRING(ends)
    return [valid, data, ends]
