# Included by files, lookup and matches: labels in order, as columns: distinct keys that ascend, and the labels
# of each key.

cdef struct Column:
    Py_ssize_t count
    const int32_t *offsets
    const char *data


cdef Column column_of(
    Py_ssize_t count, const int32_t[::1] offsets, const unsigned char[::1] data
) except *:
    cdef Column column
    cdef Py_ssize_t at
    cdef int32_t before = 0
    column.count = count
    if offsets.shape[0] != count + 1:
        raise ValueError("the offsets of keys do not fit their bytes")
    for at in range(count + 1):
        if offsets[at] < before:
            raise ValueError("the offsets of keys do not fit their bytes")
        before = offsets[at]
    if before > data.shape[0]:
        raise ValueError("the offsets of keys do not fit their bytes")
    column.offsets = &offsets[0]
    column.data = <const char *>&data[0] if data.shape[0] else NULL
    return column


cdef int require_starts(
    const int64_t[::1] starts, Py_ssize_t groups, Py_ssize_t labels
) except -1:
    cdef Py_ssize_t at
    cdef int64_t before = 0
    if starts.shape[0] == groups + 1:
        for at in range(groups + 1):
            if starts[at] < before:
                break
            before = starts[at]
        else:
            if before <= labels:
                return 0
    raise ValueError("the labels of a key are no part of the labels")
