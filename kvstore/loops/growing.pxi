# Included by the modules that read and write sorted files, behind shared.pxi and blocks.h: buffers
# that grow, with `KV_PAD` bytes behind their end.

cdef enum:
    NO_MEMORY = -2
    ROOM_LEAST = 1 << 12


cdef struct Bytes:
    unsigned char *data
    size_t size, room


cdef inline int grow(Bytes *bytes_, size_t room) noexcept nogil:
    """Make room for `room` bytes in all. Returns 0, or NO_MEMORY."""
    cdef unsigned char *moved
    if room + KV_PAD > bytes_.room:
        room = max(room + room // 2, <size_t>ROOM_LEAST) + KV_PAD
        moved = <unsigned char *>realloc(bytes_.data, room)
        if moved is NULL:
            return NO_MEMORY
        bytes_.data, bytes_.room = moved, room
    return 0
