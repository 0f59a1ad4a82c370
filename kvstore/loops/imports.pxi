# Included by the modules that read entries of imports: the times at which these are visible.


@cython.final
cdef class _Imports:
    """The lifetimes of imports. Neighbouring entries mostly belong to one import, so the last
    answer is kept."""
    cdef object _stamps
    cdef uint64_t _last
    cdef bint _is_known
    cdef int64_t added
    cdef uint64_t reverted      # 2 ** 63: never

    def __cinit__(self, stamps):
        self._stamps = stamps

    cdef bint find(self, uint64_t reference, const unsigned char *suffix) except -1:
        """Whether the import is known. If it is, `added` and `reverted` are set to its times."""
        if reference != self._last:  # 0 is never given out
            lifetime = self._stamps.get(PyBytes_FromStringAndSize(<const char *>suffix, 8))
            self._last = 0
            self._is_known = lifetime is not None
            if lifetime is not None:
                self.added, self.reverted = lifetime
            self._last = reference
        return self._is_known
