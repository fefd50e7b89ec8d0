# The placeholder for blocks that a sliding window has dropped.


cdef class NullBlock:
    cdef readonly object _proxy
