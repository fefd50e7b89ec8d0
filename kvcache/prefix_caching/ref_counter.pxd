# References to physical blocks, and the copies that writing to a shared one causes.
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
    cdef list copies            # of (source, destination), oldest first

    cdef int record(self, object source, object destination) except -1
