# Included by timed and floors, behind reader.pxi: the range tombstones over a key.


cdef tuple NONE_DELETED = ((), ())


cdef tuple deletions_of(node, Py_ssize_t depth, bytes key):
    """The times of the range tombstones over `key`, in two stacks, each newest first."""
    cdef list below
    cdef Py_ssize_t at
    while depth > 0:
        below = <list?>_item(node, 1)
        node = below[_stretch(<list?>_item(node, 0), key)]
        depth -= 1
    at = _stretch(<list?>_item(node, 0), key)
    if at == 0:
        return NONE_DELETED
    below = <list?>_item(node, 2)
    return <tuple?>below[at - 1], <tuple?>_item(node, 3)


cdef int64_t deleted_at(tuple deletions, int64_t as_of) except -2:
    """The newest of these times that is at or below `as_of`, else `INVISIBLE`."""
    return max(_newest(deletions[0], as_of), _newest(deletions[1], as_of))


cdef int64_t _newest(tuple stack, int64_t as_of) except -2:
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = len(stack)
    cdef Py_ssize_t middle
    cdef int64_t time
    while low < high:
        middle = (low + high) // 2
        time = stack[middle]
        if time <= as_of:
            high = middle
        else:
            low = middle + 1
    return INVISIBLE if low == len(stack) else <int64_t>stack[low]


cdef inline object _item(node, Py_ssize_t at):
    if not isinstance(node, tuple) or PyTuple_GET_SIZE(node) <= at:
        raise TypeError("a node of limits is a tuple of keys, of what lies below, and of stacks")
    return <object>PyTuple_GET_ITEM(node, at)
