# The blocks of a sequence beside their physical ids.


cdef class BlockList:
    cdef readonly list _blocks
    cdef readonly list _block_ids

    cdef Py_ssize_t place(self, object block_index) except -1
    cdef int add(self, object block) except -1
    cdef int add_tokens(self, Py_ssize_t index, object token_ids) except -1
    cdef int put(self, Py_ssize_t index, object block) except -1


# The physical block of the block at an index of a table; an error if it has none.
cdef object id_of(object block, Py_ssize_t index)
