# Who owns which blocks, request by request; the C form is in slots.pxd.
from libc.stdint cimport int32_t, int64_t

from kvcache.block_pool cimport BlockPool
from kvcache.manager.block_tables cimport BlockTables
from kvcache.manager.manager_state cimport Slots


# Sums since they were last taken.
cdef struct Admissions:
    int64_t requests
    int64_t queries             # tokens that they looked up
    int64_t hits                # of these, tokens that were cached


cdef class KVCacheManager(BlockTables):
    cdef readonly BlockPool block_pool
    cdef readonly tuple groups
    cdef tuple no_blocks        # an empty array a group
    cdef Admissions fresh       # of requests that never ran before
    cdef Admissions resumed     # of those that were preempted
    cdef bint was_reset
    cdef object __weakref__

    cdef int check_slots(self, int32_t row, const Slots* slots) except -1
    cdef int refuse_step(
        self, const int32_t* rows, const int32_t* news, Py_ssize_t n
    ) except -1
    cdef void record(self, int32_t row, int64_t num_hits) noexcept
    cdef bint has_room_for(self, tuple made, int32_t row, const Slots* slots) noexcept
    cdef tuple arrays_for(self, int32_t row, const Slots* slots)
    cdef int count_fork(
        self, int32_t row, Py_ssize_t* num_shared, Py_ssize_t* num_copies
    ) except -1
    cdef void list_shared(self, int32_t row, int32_t* into) noexcept
    cdef void copy_row(
        self, int32_t source, int32_t target, const int32_t* fresh, int32_t* copies
    ) noexcept
