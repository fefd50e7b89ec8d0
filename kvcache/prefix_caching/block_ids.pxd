# Which ids an allocator's blocks have, and their rows, which ascend with the ids.
from libc.stdint cimport int64_t

from kvcache._types cimport block_id_t


cdef class BlockIds:
    cdef readonly block_id_t count
    cdef int64_t first          # ids are first, first + 1, ... where `ids` is NULL
    cdef int64_t* ids           # by row, ascending
    cdef dict rows              # row by id, where `ids` is not NULL
    cdef list order             # rows as the caller listed their ids; None if ascending
    cdef frozenset all_ids      # made when first asked for

    cdef inline int64_t id_of(self, block_id_t row) noexcept nogil:
        return self.first + row if self.ids == NULL else self.ids[row]

    # Bytes held in C.
    cdef Py_ssize_t nbytes(self) noexcept
    cdef block_id_t find(self, object block_id) except? -1
    cdef block_id_t row_of(self, object block_id) except -1
    cdef frozenset as_frozenset(self)
