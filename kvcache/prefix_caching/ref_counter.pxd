# References to physical blocks, and the copies that writing to a shared one causes.
from libc.stdint cimport int64_t

from kvcache.block_store cimport BlockStore
from kvcache.prefix_caching.block_ids cimport BlockIds


cdef class RefCounter:
    cdef BlockIds ids
    cdef BlockStore store       # ref_cnt of each row
    cdef bint of_allocator      # its counts decide which blocks are free

    @staticmethod
    cdef RefCounter for_allocator(BlockIds ids, BlockStore store)
    cdef int add(self, object block_id, int change) except -1


cdef class ReadOnlyRefCounter:
    cdef object counter


cdef class CopyOnWriteTracker:
    cdef object counter
    cdef int64_t* copies        # source and destination of each, oldest first
    cdef Py_ssize_t num_copies
    cdef Py_ssize_t capacity

    cdef int reserve(self, Py_ssize_t n) except -1
    # `reserve` has made room.
    cdef void record(self, int64_t source, int64_t destination) noexcept
