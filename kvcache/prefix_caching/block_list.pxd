# The blocks of a sequence beside their physical ids.
from libc.stdint cimport int64_t


cdef class BlockList:
    cdef readonly list _blocks
    cdef list numbers           # the ids, None while one is only `known`
    cdef int64_t* known         # per block: room for `capacity`
    cdef Py_ssize_t capacity
    cdef Py_ssize_t first_lacking   # all None in `numbers` are from here on
    cdef Py_ssize_t end_lacking     # up to here

    cdef Py_ssize_t place(self, object block_index) except -1
    cdef int reserve(self, Py_ssize_t n) except -1
    # Blocks at the end that get their physical blocks next, or an error; `note`
    # follows. `holes` are as many None. Runs no foreign code.
    cdef int extend(self, list blocks, list holes) except -1
    # These in place of all; as many None beside. `reserve` has made room.
    cdef void adopt(self, list blocks, list numbers) noexcept
    # Read the id of a kvcache block at an index, without an object.
    cdef void note(self, Py_ssize_t index) noexcept
    cdef void note_all(self, Py_ssize_t start) noexcept
    cdef int fill(self) except -1
    cdef void try_to_fill(self) noexcept
    cdef int add(self, object block) except -1
    cdef int add_tokens(self, Py_ssize_t index, object token_ids) except -1
    cdef int put(self, Py_ssize_t index, object block) except -1


# The physical block of the block at an index of a table; an error if it has none.
cdef object id_of(object block, Py_ssize_t index)
