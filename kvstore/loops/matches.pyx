# cython: language_level=3, wraparound=False, boundscheck=False, initializedcheck=False
"""The rows that answer labels: two sorted lists, of versions and of labels, meet in one pass.

Both lists are columns: keys as the offsets and bytes of an Arrow array, times as integers of 64
bits. Rows are sorted by key and then newest first, and so are labels. The pass leaps: in the list
whose key is less it searches for the other key by steps that double. So few labels cost few
comparisons among many rows, and few rows cost few among many labels.

Invariants
1. The sizes of all buffers, and each offset of a key, are checked before bytes are read.
2. The pass holds no interpreter lock. The buffers belong to Arrow arrays, which do not change.
"""

cimport cython

include "shared.pxi"
include "labels.pxi"

from array import array as _array

cdef object array = _array


def match(
    tuple keys not None,
    times,
    ops,
    int passed_op,
    tuple label_keys not None,
    label_starts,
    label_times,
):
    """Labels and the rows that answer them: the newest row of the label's key at or below the
    label's time, except rows of `ops` (one byte each) that are `passed_op`.

    `label_keys` are distinct and ascend. Key i has the labels from `label_starts[i]` on and below
    `label_starts[i + 1]`, with `label_times`. Returns the numbers of the labels that have a row,
    ascending, and the numbers of their rows.
    """
    cdef Py_ssize_t rows = keys[0], groups = label_keys[0]
    cdef const int32_t[::1] row_offsets = keys[1], label_offsets = label_keys[1]
    cdef const unsigned char[::1] row_data = keys[2], label_data = label_keys[2]
    cdef const int64_t[::1] versions = times, starts = label_starts, asked_at = label_times
    cdef const unsigned char[::1] kinds = ops
    cdef Column row_column = column_of(rows, row_offsets, row_data)
    cdef Column label_column = column_of(groups, label_offsets, label_data)
    cdef Py_ssize_t count, found
    if versions.shape[0] != rows or kinds.shape[0] != rows:
        raise ValueError("a row has one time and one operation")
    require_starts(starts, groups, asked_at.shape[0])
    count = starts[groups] - starts[0]
    cdef int64_t *out = <int64_t *>malloc(16 * count + 1)
    if out is NULL:
        raise MemoryError
    try:
        if rows and groups and count:
            with nogil:
                found = _match(
                    row_column, &versions[0], &kinds[0], passed_op,
                    label_column, &starts[0], &asked_at[0], out, out + count,
                )
        else:
            found = 0
        return _numbers(out, found), _numbers(out + count, found)
    finally:
        free(out)


cdef object _numbers(const int64_t *numbers, Py_ssize_t count):
    return array("q", PyBytes_FromStringAndSize(<const char *>numbers, 8 * count))


cdef inline int order(
    const Column *one, Py_ssize_t at, const Column *other, Py_ssize_t there
) noexcept nogil:
    """Below, at or above zero, as the key of `one` sorts against the key of `other`."""
    cdef Py_ssize_t begin = one.offsets[at], size = one.offsets[at + 1] - begin
    cdef Py_ssize_t start = other.offsets[there], other_size = other.offsets[there + 1] - start
    cdef Py_ssize_t shared = size if size < other_size else other_size
    cdef int difference = memcmp(one.data + begin, other.data + start, shared) if shared else 0
    return difference if difference else (size > other_size) - (size < other_size)


cdef inline bint is_same(
    const Column *one, Py_ssize_t at, const Column *other, Py_ssize_t there
) noexcept nogil:
    cdef Py_ssize_t begin = one.offsets[at], size = one.offsets[at + 1] - begin
    cdef Py_ssize_t start = other.offsets[there]
    if size != other.offsets[there + 1] - start:
        return False
    return size == 0 or memcmp(one.data + begin, other.data + start, size) == 0


cdef Py_ssize_t leap(
    const Column *column, Py_ssize_t at, const Column *other, Py_ssize_t there
) noexcept nogil:
    """The first place behind `at` whose key is not below the other one, which `at` is."""
    cdef Py_ssize_t step = 1, low = at, high, middle
    while low + step < column.count and order(column, low + step, other, there) < 0:
        low += step
        step *= 2
    high = low + step if low + step < column.count else column.count
    while high - low > 1:
        middle = low + (high - low) // 2
        if order(column, middle, other, there) < 0:
            low = middle
        else:
            high = middle
    return high


cdef inline bint is_newer(
    const Column *rows,
    const int64_t *times,
    Py_ssize_t row,
    const Column *labels,
    Py_ssize_t group,
    int64_t as_of,
) noexcept nogil:
    return row < rows.count and times[row] > as_of and is_same(rows, row, labels, group)


cdef Py_ssize_t pass_newer(
    const Column *rows,
    const int64_t *times,
    Py_ssize_t row,
    const Column *labels,
    Py_ssize_t group,
    int64_t as_of,
) noexcept nogil:
    """The first row from `row` on that is of another key, or not newer than `as_of`."""
    cdef Py_ssize_t step = 1, low = row, high, middle
    if not is_newer(rows, times, row, labels, group, as_of):
        return row
    while is_newer(rows, times, low + step, labels, group, as_of):
        low += step
        step *= 2
    high = low + step if low + step < rows.count else rows.count
    while high - low > 1:
        middle = low + (high - low) // 2
        if is_newer(rows, times, middle, labels, group, as_of):
            low = middle
        else:
            high = middle
    return high


cdef Py_ssize_t _match(
    Column rows,
    const int64_t *times,
    const unsigned char *kinds,
    int passed_op,
    Column labels,
    const int64_t *starts,
    const int64_t *asked_at,
    int64_t *found_labels,
    int64_t *found_rows,
) noexcept nogil:
    cdef Py_ssize_t row = 0, group = 0, here, found = 0
    cdef int64_t label
    cdef int difference
    while row < rows.count and group < labels.count:
        difference = order(&rows, row, &labels, group)
        if difference < 0:
            row = leap(&rows, row, &labels, group)
        elif difference > 0:
            group = leap(&labels, group, &rows, row)
        else:
            for label in range(starts[group], starts[group + 1]):
                row = pass_newer(&rows, times, row, &labels, group, asked_at[label])
                here = row
                while (
                    here < rows.count
                    and kinds[here] == passed_op
                    and is_same(&rows, here, &labels, group)
                ):
                    here += 1
                if here >= rows.count or not is_same(&rows, here, &labels, group):
                    break
                found_labels[found] = label
                found_rows[found] = here
                found += 1
            group += 1
    return found


def runs_of(tuple keys not None):
    """Where the runs of equal keys start, and where the last one ends; None unless the keys
    ascend. 10 ns a key."""
    cdef Py_ssize_t count = keys[0], at, found = 0
    cdef const int32_t[::1] offsets = keys[1]
    cdef const unsigned char[::1] data = keys[2]
    cdef Column column = column_of(count, offsets, data)
    cdef int difference
    cdef bint ascends = True
    cdef int64_t *starts = <int64_t *>malloc(8 * (count + 1))
    if starts is NULL:
        raise MemoryError
    try:
        with nogil:
            for at in range(count):
                difference = order(&column, at - 1, &column, at) if at else -1
                if difference > 0:
                    ascends = False
                    break
                if difference:
                    starts[found] = at
                    found += 1
            starts[found] = count
        return _numbers(starts, found + 1) if ascends else None
    finally:
        free(starts)


@cython.final
cdef class Neighbours:
    """Places among rows that come piece by piece. The row next to a place is the first one that is
    not below it, or with `is_behind` the last one that is not above it. It is no answer unless it
    begins with the first bytes of the place, as many as `stem_sizes` tells.

    The places ascend.
    """
    cdef object _places_kept, _sizes_kept
    cdef Column _places
    cdef const int32_t *_sizes
    cdef Py_ssize_t _at
    cdef bint _is_behind

    def __cinit__(self, tuple places not None, stem_sizes, bint is_behind):
        cdef Py_ssize_t count = places[0], number
        cdef const int32_t[::1] offsets = places[1], sizes = stem_sizes
        cdef const unsigned char[::1] data = places[2]
        self._places_kept, self._sizes_kept = (offsets, data), sizes
        self._places = column_of(count, offsets, data)
        self._is_behind = is_behind
        if sizes.shape[0] != count:
            raise ValueError("a place has one stem")
        for number in range(count):
            if not 0 <= sizes[number] <= offsets[number + 1] - offsets[number]:
                raise ValueError("a stem is a part of its place")
        if count:
            self._sizes = &sizes[0]

    @property
    def is_over(self):
        """Whether each place has had its answer."""
        return self._at == self._places.count

    def among(self, tuple rows not None, bint is_last=False):
        """The numbers of the rows next to the next places, -1 for none: up to the first place that
        further rows may answer; with `is_last` there are none. The keys of `rows` are distinct and
        ascend. Leaps, as `match` does."""
        cdef Py_ssize_t count = rows[0], found = 0, asked = self._places.count - self._at
        cdef const int32_t[::1] offsets = rows[1]
        cdef const unsigned char[::1] data = rows[2]
        cdef Column column = column_of(count, offsets, data)
        cdef int64_t *out = <int64_t *>malloc(8 * asked + 1)
        if out is NULL:
            raise MemoryError
        try:
            if asked:
                with nogil:
                    found = _neighbours(
                        column, self._places, self._sizes, self._at, self._is_behind, is_last, out
                    )
            self._at += found
            return _numbers(out, found)
        finally:
            free(out)


cdef Py_ssize_t _neighbours(
    Column rows,
    Column places,
    const int32_t *sizes,
    Py_ssize_t first,
    bint is_behind,
    bint is_last,
    int64_t *out,
) noexcept nogil:
    cdef Py_ssize_t row = 0, place, answer, size
    cdef int difference
    for place in range(first, places.count):
        while row < rows.count:
            difference = order(&rows, row, &places, place)
            if difference < 0:
                row = leap(&rows, row, &places, place)
            elif difference == 0 and is_behind:
                row += 1
            else:
                break
        if row == rows.count and not is_last:
            return place - first
        answer = row - 1 if is_behind else row
        size = sizes[place]
        if (
            answer < 0
            or answer == rows.count
            or rows.offsets[answer + 1] - rows.offsets[answer] < size
            or size and memcmp(
                rows.data + rows.offsets[answer], places.data + places.offsets[place], size
            )
        ):
            answer = -1
        out[place - first] = answer
    return places.count - first
