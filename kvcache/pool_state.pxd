# A pool's state in C, and the C form of every operation on it.
#
# The C form of every operation takes a PoolState and ids, needs no GIL, and checks its
# whole batch before the first write. It returns -1 when all went well, else the place
# in `ids` of the first id that is no block of the pool or not in the state required.
# One pool is used by one thread at a time: the GIL or the caller's lock sees to it.
from libc.stdint cimport int32_t

from kvcache._types cimport (
    ANCHOR,
    NOT_LINKED,
    NULL_BLOCK,
    BlockMeta,
    block_id_t,
    has_hash,
)
from kvcache.free_queue cimport FreeQueue, queue_unlink
from kvcache.hash_index cimport HashIndex, index_prefetch

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #include <intrin.h>
    #define kvc_prefetch_row(p) _mm_prefetch((const char*)(p), _MM_HINT_T0)
    #else
    #define kvc_prefetch_row(p) __builtin_prefetch((p), 1)
    #endif
    """
    void kvc_prefetch_row(const void* address) nogil

cdef struct PoolState:
    BlockMeta* rows         # num_blocks of them
    block_id_t num_blocks
    bint enable_caching
    FreeQueue* queue
    HashIndex* index
    block_id_t* scratch     # room for scratch_size ids, for the length of one call
    Py_ssize_t scratch_size

# Blocks that lost their last reference, where they go in the queue. Kept in `scratch`.
cdef struct Freed:
    block_id_t* front       # uncached
    block_id_t* back        # cached, or all of them
    Py_ssize_t num_front
    Py_ssize_t num_back
    bint all_back


cdef inline bint is_block(const PoolState* pool, block_id_t block) noexcept nogil:
    return 0 <= block < pool.num_blocks


# The steps of one block, shared by the loops over ids and those over objects.

cdef inline block_id_t take_first(
    PoolState* pool, block_id_t block, bint* holding
) noexcept nogil:
    """Hand out the first free block; the one behind it.

    `set_first` comes when all are taken, and `evict_taken` if any was `holding`.
    """
    cdef BlockMeta* row = &pool.rows[block]
    cdef block_id_t behind = row.next_free_block
    cdef const int32_t* first_side = pool.index.first_side
    kvc_prefetch_row(&pool.rows[behind])
    row.prev_free_block = row.next_free_block = NOT_LINKED
    row.ref_cnt = 1
    if pool.enable_caching and (
        has_hash(row) or (first_side != NULL and first_side[block])
    ):
        holding[0] = True
        index_prefetch(pool.index, row)
    return behind


cdef inline void set_first(
    PoolState* pool, block_id_t block, Py_ssize_t taken
) noexcept nogil:
    pool.rows[ANCHOR].next_free_block = block
    pool.rows[block].prev_free_block = ANCHOR
    pool.queue.num_free -= <block_id_t> taken


cdef inline void freed_init(
    PoolState* pool, Freed* freed, Py_ssize_t n, bint all_back
) noexcept nogil:
    """Room for n blocks of either kind, in scratch."""
    freed.all_back = all_back
    freed.front = pool.scratch
    freed.back = pool.scratch + n
    freed.num_front = freed.num_back = 0


cdef inline bint drop_reference(
    PoolState* pool, BlockMeta* row, block_id_t block, Freed* freed
) noexcept nogil:
    """One reference less; False and nothing done if there is none."""
    if row.ref_cnt <= 0:
        return False
    row.ref_cnt -= 1
    if row.ref_cnt == 0:
        if freed.all_back or (pool.enable_caching and has_hash(row)):
            freed.back[freed.num_back] = block
            freed.num_back += 1
        else:
            freed.front[freed.num_front] = block
            freed.num_front += 1
    return True


cdef inline void touch_row(
    PoolState* pool, BlockMeta* row, block_id_t block
) noexcept nogil:
    if block == NULL_BLOCK:
        return
    if row.ref_cnt == 0:
        queue_unlink(pool.queue, block)
    row.ref_cnt += 1


# n blocks from the front into `ids`, evicting what they held; how many were evicted,
# or -1 and nothing done if fewer than n are free.
cdef Py_ssize_t pool_get(PoolState* pool, block_id_t* ids, Py_ssize_t n) noexcept nogil
# One reference less for each id; blocks without users go back to the queue. Needs
# room for 2 n ids in `scratch`, as do the next two.
cdef Py_ssize_t pool_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# Whether pool_free would succeed; changes nothing.
cdef Py_ssize_t pool_can_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# As pool_free, but freed blocks go to the back whatever they hold.
cdef Py_ssize_t pool_unpin(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# One reference more for each id.
cdef Py_ssize_t pool_touch(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# Whether each id may be given a hash: it is not the null block's, has none, and is
# listed once; changes nothing. The hash itself is index_add_row's to give.
cdef Py_ssize_t pool_can_cache(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
cdef void return_freed(PoolState* pool, const Freed* freed) noexcept nogil
cdef Py_ssize_t evict_taken(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# Room for n ids in `scratch`; -1 if there is no memory.
cdef int pool_scratch(PoolState* pool, Py_ssize_t n) noexcept nogil
