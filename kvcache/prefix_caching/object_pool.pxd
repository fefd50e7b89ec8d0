# Block objects of any class, kept for reuse.


cdef class BlockPool:
    cdef readonly Py_ssize_t block_size
    cdef object create_block
    cdef object allocator
    cdef Py_ssize_t pool_size   # most objects that are kept
    cdef object spare           # list of those given back, the last one on top
