# The doubly linked queue of free blocks, linked by row number inside BlockMeta.
# The front is evicted next. Every primitive is O(1), never branches on the ends
# (the anchor is row -1), and trusts its caller: the faces check, these do not.
from kvcache._types cimport ANCHOR, NOT_LINKED, BlockMeta, block_id_t
from kvcache.block_store cimport BlockStore, KVCacheBlock

cdef struct FreeQueue:
    BlockMeta* rows         # rows[ANCHOR] is the anchor
    block_id_t num_free     # length of the list


cdef inline void queue_insert_after(
    FreeQueue* queue, block_id_t at, block_id_t block
) noexcept nogil:
    cdef block_id_t after = queue.rows[at].next_free_block
    queue.rows[block].prev_free_block = at
    queue.rows[block].next_free_block = after
    queue.rows[at].next_free_block = block
    queue.rows[after].prev_free_block = block
    queue.num_free += 1


cdef inline void queue_push_back(FreeQueue* queue, block_id_t block) noexcept nogil:
    queue_insert_after(queue, queue.rows[ANCHOR].prev_free_block, block)


cdef inline void queue_unlink(FreeQueue* queue, block_id_t block) noexcept nogil:
    cdef BlockMeta* row = &queue.rows[block]
    queue.rows[row.prev_free_block].next_free_block = row.next_free_block
    queue.rows[row.next_free_block].prev_free_block = row.prev_free_block
    row.prev_free_block = row.next_free_block = NOT_LINKED
    queue.num_free -= 1


cdef class FreeKVCacheBlockQueue:
    cdef FreeQueue queue
    cdef readonly KVCacheBlock fake_free_list_head
    cdef readonly KVCacheBlock fake_free_list_tail
    cdef BlockStore store
    cdef bint of_pool       # a pool's queue changes through the pool alone

    @staticmethod
    cdef FreeKVCacheBlockQueue for_pool(BlockStore store)
    cdef int stand_on(self, BlockStore store) except -1
    cdef int check_own(self) except -1
    cdef int check_holds(self, Py_ssize_t count) except -1
    cdef KVCacheBlock take(self, block_id_t row)
    cdef list adopt_all(self, object blocks)
