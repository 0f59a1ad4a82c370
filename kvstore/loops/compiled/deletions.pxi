# Included by timed and floors, behind reader.pxi: the range tombstones over a key.


cdef tuple deletions_of(node, Py_ssize_t depth, bytes key):
    """The times of the range tombstones over `key`, newest first."""
    cdef list below
    cdef Py_ssize_t at
    while depth > 0:
        below = <list?>_item(node, 1)
        node = below[_stretch(<list?>_item(node, 0), key)]
        depth -= 1
    at = _stretch(<list?>_item(node, 0), key)
    if at == 0:
        return ()
    below = <list?>_item(node, 2)
    return <tuple?>below[at - 1]


cdef int64_t deleted_at(tuple deletions, int64_t as_of) except -2:
    """The first of these times, which descend, that is at or below `as_of`, else `INVISIBLE`."""
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = len(deletions)
    cdef Py_ssize_t middle
    cdef int64_t time
    while low < high:
        middle = (low + high) // 2
        time = deletions[middle]
        if time <= as_of:
            high = middle
        else:
            low = middle + 1
    return INVISIBLE if low == len(deletions) else <int64_t>deletions[low]


cdef inline object _item(node, Py_ssize_t at):
    if not isinstance(node, tuple) or PyTuple_GET_SIZE(node) <= at:
        raise TypeError("a node of limits is a tuple of keys, of what lies below, and of stacks")
    return <object>PyTuple_GET_ITEM(node, at)
