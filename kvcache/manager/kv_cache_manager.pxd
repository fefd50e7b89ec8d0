# Who owns which blocks, request by request; the C form is in slots.pxd.
from libc.stdint cimport int32_t, int64_t

from kvcache.block_pool cimport BlockPool
from kvcache.manager.block_tables cimport BlockTables
from kvcache.manager.manager_state cimport Slots


cdef class KVCacheManager(BlockTables):
    cdef readonly BlockPool block_pool
    cdef readonly tuple groups
    cdef tuple no_blocks        # an empty array a group
    cdef readonly object prefix_cache_stats
    cdef object __weakref__

    cdef int check_slots(self, int32_t row, const Slots* slots) except -1
    cdef int refuse_step(
        self, const int32_t* rows, const int32_t* news, Py_ssize_t n
    ) except -1
    cdef int record(self, int32_t row, int64_t num_hits) except -1
