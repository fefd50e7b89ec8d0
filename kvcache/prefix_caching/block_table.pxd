# The blocks that hold one sequence.
from kvcache.prefix_caching.block_list cimport BlockList
from kvcache.prefix_caching.blocks cimport BlockOwner


cdef class BlockTable:
    cdef readonly object _allocator
    cdef readonly BlockList _blocks
    cdef readonly object _max_block_sliding_window
    cdef readonly Py_ssize_t _block_size
    cdef readonly Py_ssize_t _num_full_slots
    cdef Py_ssize_t num_dropped     # blocks at the front known to be the null block

    cdef int require_allocated(self) except -1
    cdef list allocate_in_two(self, list pieces, object device, object extra_hash)
    cdef Py_ssize_t missing_blocks(self, Py_ssize_t num_empty_slots)
    cdef Py_ssize_t shared_blocks(self, Py_ssize_t num_tokens) except -1
    cdef int require_free(self, Py_ssize_t n, object device) except -1
    cdef BlockOwner owner_on(self, object device)
    cdef int grow(self, Py_ssize_t n, object extra_hash) except -1
    cdef bint append_here(
        self, BlockOwner owner, object tokens, Py_ssize_t lookahead, object extra_hash
    ) except -1
    cdef int append_anywhere(
        self, object tokens, Py_ssize_t lookahead, object extra_hash
    ) except -1
    cdef int drop_blocks(
        self, object num_computed_slots, Py_ssize_t num_new_tokens
    ) except -1
