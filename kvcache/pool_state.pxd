# A pool's state in C, and the C form of every operation on it.
#
# The C form of every operation takes a PoolState and ids, needs no GIL, and checks its
# whole batch before the first write. It returns -1 when all went well, else the place
# in `ids` of the first id that is no block of the pool or not in the state required.
# One pool is used by one thread at a time: the GIL or the caller's lock sees to it.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from kvcache._memory cimport kvc_prefetch
from kvcache._types cimport (
    ANCHOR,
    NO_NUM_TOKENS,
    NOT_LINKED,
    NULL_BLOCK,
    BlockMeta,
    Key,
    block_id_t,
    has_hash,
)
from kvcache.free_queue cimport FreeQueue, queue_unlink
from kvcache.hash_index cimport (
    HashIndex,
    index_add_row,
    index_chain,
    index_has_side,
    index_prefetch,
)
from kvcache.kept_tokens cimport KeptTokens

cdef enum:
    POOL_NO_MEMORY = -2
    FLAG_IN_BATCH = 128     # on a row for the length of one check: the id was met

cdef struct PoolState:
    BlockMeta* rows         # num_blocks of them
    block_id_t num_blocks
    bint enable_caching
    FreeQueue* queue
    HashIndex* index
    KeptTokens* kept        # NULL unless the pool keeps tokens

# Blocks that lost their last reference, strung on two chains that will join the queue.
# Until `return_freed` nothing but their own rows has changed.
cdef struct Freed:
    block_id_t front_first  # uncached
    block_id_t front_last
    block_id_t back_first   # cached, or all of them
    block_id_t back_last
    block_id_t* front_next  # where the next one's id goes
    block_id_t* back_next
    block_id_t old_last     # of the queue
    block_id_t num_freed
    int32_t least_len       # of the hash of what goes to the back


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
    kvc_prefetch(&pool.rows[behind])
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
    PoolState* pool, Freed* freed, bint all_back
) noexcept nogil:
    freed.front_last = ANCHOR
    freed.back_last = freed.old_last = pool.rows[ANCHOR].prev_free_block
    freed.front_next = &freed.front_first
    freed.back_next = &freed.back_first
    freed.num_freed = 0
    freed.least_len = 0 if all_back else 1 if pool.enable_caching else 255


cdef inline bint drop_reference(
    PoolState* pool, BlockMeta* row, block_id_t block, Freed* freed
) noexcept nogil:
    """One reference less; False and nothing done if there is none."""
    if row.ref_cnt <= 0:
        return False
    row.ref_cnt -= 1
    if row.ref_cnt == 0:
        freed.num_freed += 1
        if row.block_hash_len >= freed.least_len:
            freed.back_next[0] = block
            freed.back_next = &row.next_free_block
            row.prev_free_block = freed.back_last
            freed.back_last = block
        else:
            freed.front_next[0] = block
            freed.front_next = &row.next_free_block
            row.prev_free_block = freed.front_last
            freed.front_last = block
    return True


cdef inline void undo_drop(BlockMeta* row) noexcept nogil:
    row.ref_cnt += 1
    row.prev_free_block = row.next_free_block = NOT_LINKED


cdef inline void return_freed(PoolState* pool, Freed* freed) noexcept nogil:
    """Link freed blocks: uncached ones in front, cached ones behind, in their order."""
    cdef BlockMeta* rows = pool.rows
    cdef block_id_t first
    # Least recently used first out.
    freed.back_next[0] = ANCHOR
    rows[freed.old_last].next_free_block = freed.back_first
    rows[ANCHOR].prev_free_block = freed.back_last
    # Nothing to reuse but the memory, which is warm: next out.
    first = rows[ANCHOR].next_free_block
    freed.front_next[0] = first
    rows[first].prev_free_block = freed.front_last
    rows[ANCHOR].next_free_block = freed.front_first
    pool.queue.num_free += freed.num_freed


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
# One reference less for each id; blocks without users go back to the queue.
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
# The first n free blocks that are none of these ids; fewer where there are not so many.
cdef Py_ssize_t pool_front(
    PoolState* pool, const block_id_t* without, Py_ssize_t num_without,
    block_id_t* front, Py_ssize_t n,
) noexcept nogil
cdef Py_ssize_t evict_taken(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil
# Blocks of the leading digests, `length` bytes each, that are cached in a group: how
# many, or -1 for a length that no digest has. `ids` has room for n.
cdef Py_ssize_t pool_match(
    const PoolState* pool, const uint8_t* digests, Py_ssize_t length, Py_ssize_t n,
    uint32_t group_id, block_id_t* ids,
) noexcept nogil
# Have the slots of the first MATCH_CHUNK of `count` digests brought to the cache, if it
# pays, for they are about to be cached.
cdef void prefetch_digests(
    const PoolState* pool, const uint8_t* digests, Py_ssize_t length, uint64_t suffix,
    Py_ssize_t count,
) noexcept nogil
# Cache each block under the digest in its place, where pool_can_cache allows all of
# them; null blocks are skipped. POOL_NO_MEMORY, or n for a length that no digest has,
# and nothing done. Events do not tell of it.
cdef Py_ssize_t pool_cache(
    PoolState* pool, const block_id_t* ids, const uint8_t* digests, Py_ssize_t length,
    Py_ssize_t n, uint32_t group_id,
) noexcept nogil
# Take blocks' content out of the cache; free ones stay where they stand.
cdef Py_ssize_t pool_evict(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil


cdef inline block_id_t cache_block(
    PoolState* pool, block_id_t block, const Key* key, block_id_t before
) noexcept nogil:
    """Cache a block that may be cached, and is behind another; the one before the next.

    There is room in the index.
    """
    if block == NULL_BLOCK:
        return before
    if not index_has_side(pool.index, key, block):
        index_add_row(pool.index, block, key, NO_NUM_TOKENS)
    index_chain(pool.index, before, block)
    return block
