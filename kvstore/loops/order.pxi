# Included by the modules that go through many keys in their order: columns, lookup and writes.

cdef enum:
    TURN = 1024                 # keys between two calls of `let_others_run`, a millisecond

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define fetch(address) __builtin_prefetch(address)
    #else
    #define fetch(address) ((void)(address))
    #endif
    """
    void fetch(const void *) noexcept

cdef enum:
    AHEAD = 8                   # keys: memory gives a key while the ones before it are looked up

cdef object let_others_run = _contract.let_others_run

cdef struct Place:
    uint64_t word               # the eight bytes behind the prefix that all keys share
    Py_ssize_t at


cdef Place *order_of(list keys, const int64_t *times=NULL) except NULL:
    """The places of `keys` in key order. The caller frees them. Raises `TypeError` where a key is
    not bytes. Places of equal keys keep their order, or come newest first where there are `times`.

    A merge sort. Most comparisons read two words that lie in the array itself. Keys lie scattered
    in memory, and are read where the words are equal: many keys that ascend are read once."""
    cdef Py_ssize_t at, shared, count = PyList_GET_SIZE(keys), width = 1
    cdef bint is_ordered = True, is_whole
    cdef Place *places = <Place *>malloc((2 * count + 1) * sizeof(Place))
    if places is NULL:
        raise MemoryError
    try:
        if times is NULL and ascend(keys):
            for at in range(count):
                places[at].at = at
            return places
        shared = shared_bytes(keys)
        is_whole = times is not NULL and are_words(keys, shared)
    except BaseException:
        free(places)
        raise
    cdef Place *source = places
    cdef Place *target = places + count
    for at in range(count):
        source[at].at = at
        source[at].word = word_of(<bytes>PyList_GET_ITEM(keys, at), shared)
        if at and is_ordered:
            is_ordered = not is_less(keys, times, is_whole, source[at], source[at - 1])
    if is_ordered:
        return places
    while width < count:
        merge_runs(keys, times, is_whole, source, target, count, width)
        source, target = target, source
        width *= 2
    if source is not places:
        memcpy(places, source, count * sizeof(Place))
    return places


cdef inline void fetch_key(list keys, Py_ssize_t at) noexcept:
    """Have the processor read a key that is used soon: its object has two lines of memory."""
    cdef const char *key
    if at < PyList_GET_SIZE(keys):
        key = <const char *>PyList_GET_ITEM(keys, at)
        fetch(key)
        fetch(key + 48)


cdef bint ascend(list keys) except -1:
    """Whether each key is at or above the one before."""
    cdef Py_ssize_t at, count = PyList_GET_SIZE(keys)
    cdef bytes key, before = None
    for at in range(count):
        fetch_key(keys, at + AHEAD)
        key = <bytes?>(<object>PyList_GET_ITEM(keys, at))
        if at and compare(key, before) < 0:
            return False
        before = key
    return True


cdef Py_ssize_t shared_bytes(list keys) except -1:
    """The length of the prefix that all keys share."""
    cdef Py_ssize_t at, size, shared = 0
    cdef const char *first = NULL
    cdef const char *bytes_
    cdef bytes key
    for at in range(PyList_GET_SIZE(keys)):
        key = <bytes?>(<object>PyList_GET_ITEM(keys, at))
        bytes_ = PyBytes_AS_STRING(key)
        size = PyBytes_GET_SIZE(key)
        if at == 0:
            first, shared = bytes_, size
        shared = min(shared, size)
        size = 0
        while size < shared and bytes_[size] == first[size]:
            size += 1
        shared = size
    return shared


cdef void merge_runs(
    list keys,
    const int64_t *times,
    bint is_whole,
    Place *source,
    Place *target,
    Py_ssize_t count,
    Py_ssize_t width,
) noexcept:
    """Merge pairs of ordered runs of `width` places each, from `source` into `target`."""
    cdef Py_ssize_t left = 0, middle, end, at, right, out
    while left < count:
        middle = min(left + width, count)
        end = min(middle + width, count)
        right, out, at = middle, left, left
        while out < end:
            if at < middle and (
                right == end or not is_less(keys, times, is_whole, source[right], source[at])
            ):
                target[out] = source[at]
                at += 1
            else:
                target[out] = source[right]
                right += 1
            out += 1
        left = end


cdef inline uint64_t word_of(bytes key, Py_ssize_t skip) noexcept:
    """The eight bytes of `key` behind the first `skip`, as a number that sorts as they do."""
    cdef const unsigned char *bytes_ = <const unsigned char *>PyBytes_AS_STRING(key) + skip
    cdef Py_ssize_t at, size = PyBytes_GET_SIZE(key) - skip
    cdef uint64_t word = 0
    if size >= 8:
        return big_endian(bytes_)
    for at in range(size):
        word |= <uint64_t>bytes_[at] << (56 - 8 * at)
    return word


cdef bint are_words(list keys, Py_ssize_t shared) except -1:
    """Whether keys are equal where their words are: all have one length, of eight bytes more than
    they share at most."""
    cdef Py_ssize_t at, size
    if not PyList_GET_SIZE(keys):
        return False
    size = PyBytes_GET_SIZE(<bytes>PyList_GET_ITEM(keys, 0))
    for at in range(PyList_GET_SIZE(keys)):
        if PyBytes_GET_SIZE(<bytes>PyList_GET_ITEM(keys, at)) != size:
            return False
    return size <= shared + 8


cdef inline bint is_less(
    list keys, const int64_t *times, bint is_whole, Place one, Place other
) noexcept:
    cdef int difference = 0
    if one.word != other.word:
        return one.word < other.word
    if not is_whole:
        difference = compare(
            <bytes>PyList_GET_ITEM(keys, one.at), <bytes>PyList_GET_ITEM(keys, other.at)
        )
    if difference or times is NULL:
        return difference < 0
    return times[one.at] > times[other.at]
