# Physical blocks handed out and taken back by reference count, without a cache.
from kvcache._types cimport block_id_t
from kvcache.free_queue cimport FreeQueue
from kvcache.prefix_caching.blocks cimport BlockOwner, TokenBlock
from kvcache.prefix_caching.object_pool cimport BlockPool
from kvcache.prefix_caching.ref_counter cimport CopyOnWriteTracker, RefCounter


cdef class NaiveBlockAllocator(BlockOwner):
    cdef FreeQueue queue
    cdef RefCounter counter
    cdef CopyOnWriteTracker copies
    cdef BlockPool objects      # makes the blocks; None if they are NaiveBlocks
    cdef bint inner             # part of a prefix-caching allocator, which uses it

    @staticmethod
    cdef NaiveBlockAllocator part_of(object num_blocks, object block_size, object ids)
    cdef int build(self, object num_blocks, object block_size, object ids) except -1
    cdef int require_free(self, Py_ssize_t n) except -1
    # There is a free block.
    cdef block_id_t take_row(self) noexcept
    cdef void return_row(self, block_id_t row) noexcept
    cdef int require_shareable(self, block_id_t row) except -1
    cdef int check_open(self) except -1
    cdef object make(self, object prev_block, object token_ids)
    cdef int require_idle(self, object block) except -1
    cdef int attach(self, object block, block_id_t row) except -1
    cdef list allocate(self, object prev_block, object block_token_ids)
    cdef int attach_all(self, list blocks) except -1
    cdef int attach_to(self, list blocks, block_id_t* rows) except -1
    cdef void drop_row(self, block_id_t row) noexcept
    cdef int detach(self, object block) except -1


cdef int refuse_device(object device) except -1
cdef int check_held_once(list blocks, BlockOwner owner) except -1
