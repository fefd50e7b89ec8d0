# A pool's state in C, and the C form of every operation on it.
#
# The C form of every operation takes a PoolState and ids, needs no GIL, and checks its
# whole batch before the first write. It returns -1 when all went well, else the place
# in `ids` of the first id that is no block of the pool or not in the state required.
# One pool is used by one thread at a time: the GIL or the caller's lock sees to it.
from kvcache._types cimport BlockMeta, block_id_t
from kvcache.free_queue cimport FreeQueue
from kvcache.hash_index cimport HashIndex

cdef struct PoolState:
    BlockMeta* rows         # num_blocks of them
    block_id_t num_blocks
    bint enable_caching
    FreeQueue* queue
    HashIndex* index
    block_id_t* scratch     # room for scratch_size ids, for the length of one call
    Py_ssize_t scratch_size


cdef inline bint is_block(const PoolState* pool, block_id_t block) noexcept nogil:
    return 0 <= block < pool.num_blocks


# n blocks from the front into `ids`, evicting what they held; how many were evicted,
# or -1 and nothing done if fewer than n are free.
cdef Py_ssize_t pool_get(PoolState* pool, block_id_t* ids, Py_ssize_t n) noexcept nogil
# One reference less for each id; blocks without users go back to the queue. Needs
# room for n ids in `scratch`.
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
# Room for n ids in `scratch`; -1 if there is no memory.
cdef int pool_scratch(PoolState* pool, Py_ssize_t n) noexcept nogil
