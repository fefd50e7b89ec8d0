"""The C form of every pool operation: ids in, ids out, no GIL.

Holds no state of its own: `PoolState` points at the rows, the queue and the index that
a `BlockPool` owns.
Invariant: each function checks its whole batch before the first write.
Costs: O(1) a block. Threads: one at a time on one pool; the caller sees to it.
"""
from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int32_t, uint8_t

from kvcache._memory cimport zeroed
from kvcache._types cimport (
    ANCHOR,
    MAX_REF_CNT,
    NOT_LINKED,
    NULL_BLOCK,
    has_hash,
)
from kvcache.free_queue cimport queue_insert_after, queue_push_back, queue_unlink
from kvcache.hash_index cimport index_drop_block

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

cdef enum:
    FLAG_IN_BATCH = 128     # on a row for the length of one check: the id was met


cdef Py_ssize_t pool_get(PoolState* pool, block_id_t* ids, Py_ssize_t n) noexcept nogil:
    cdef FreeQueue* queue = pool.queue
    cdef BlockMeta* rows = pool.rows
    cdef int32_t* first_side = pool.index.first_side
    cdef block_id_t block = rows[ANCHOR].next_free_block
    cdef BlockMeta* row
    cdef Py_ssize_t i, evicted = 0
    if not 0 <= n <= queue.num_free:
        return -1
    for i in range(n):
        row = &rows[block]
        ids[i] = block
        block = row.next_free_block
        kvc_prefetch_row(&rows[block])
        row.prev_free_block = row.next_free_block = NOT_LINKED
        row.ref_cnt = 1
        if pool.enable_caching and (
            has_hash(row) or (first_side != NULL and first_side[ids[i]])
        ):
            evicted += index_drop_block(pool.index, ids[i]) != 0
    rows[ANCHOR].next_free_block = block
    rows[block].prev_free_block = ANCHOR
    queue.num_free -= <block_id_t> n
    return evicted


cdef Py_ssize_t drop_references(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n, Py_ssize_t* num_zero
) noexcept nogil:
    """One reference less for each id; those that reach zero go to `scratch`.

    Undone, and the place of the culprit returned, where an id has none to give.
    """
    cdef Py_ssize_t i, k, zero = 0
    cdef BlockMeta* row
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            continue
        if not is_block(pool, ids[i]) or pool.rows[ids[i]].ref_cnt <= 0:
            for k in range(i):
                if ids[k] != NULL_BLOCK:
                    pool.rows[ids[k]].ref_cnt += 1
            return i
        row = &pool.rows[ids[i]]
        row.ref_cnt -= 1
        if row.ref_cnt == 0:
            pool.scratch[zero] = ids[i]
            zero += 1
    num_zero[0] = zero
    return -1


cdef Py_ssize_t pool_can_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i, num_zero
    cdef Py_ssize_t bad = drop_references(pool, ids, n, &num_zero)
    if bad < 0:
        for i in range(n):
            if ids[i] != NULL_BLOCK:
                pool.rows[ids[i]].ref_cnt += 1
    return bad


cdef Py_ssize_t pool_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i, num_zero
    cdef Py_ssize_t bad = drop_references(pool, ids, n, &num_zero)
    cdef block_id_t front = ANCHOR
    cdef block_id_t block
    if bad >= 0:
        return bad
    for i in range(num_zero):
        block = pool.scratch[i]
        if pool.enable_caching and has_hash(&pool.rows[block]):
            # Least recently used first out.
            queue_push_back(pool.queue, block)
        else:
            # Nothing to reuse but the memory, which is warm: next out, in this order.
            queue_insert_after(pool.queue, front, block)
            front = block
    return -1


cdef Py_ssize_t pool_unpin(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i, num_zero
    cdef Py_ssize_t bad
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            return i
    bad = drop_references(pool, ids, n, &num_zero)
    if bad >= 0:
        return bad
    for i in range(num_zero):
        queue_push_back(pool.queue, pool.scratch[i])
    return -1


cdef Py_ssize_t pool_touch(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    cdef BlockMeta* row
    for i in range(n):
        if not is_block(pool, ids[i]) or pool.rows[ids[i]].ref_cnt > MAX_REF_CNT - n:
            return i
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            continue
        row = &pool.rows[ids[i]]
        if row.ref_cnt == 0:
            queue_unlink(pool.queue, ids[i])
        row.ref_cnt += 1
    return -1


cdef Py_ssize_t pool_can_cache(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i, k, bad = -1
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            continue
        if (
            not is_block(pool, ids[i])
            or has_hash(&pool.rows[ids[i]])
            or pool.rows[ids[i]].flags & FLAG_IN_BATCH
        ):
            bad = i
            break
        pool.rows[ids[i]].flags |= FLAG_IN_BATCH
    for k in range(n if bad < 0 else bad):
        if ids[k] != NULL_BLOCK:
            pool.rows[ids[k]].flags &= ~<uint8_t> FLAG_IN_BATCH
    return bad


cdef int pool_scratch(PoolState* pool, Py_ssize_t n) noexcept nogil:
    cdef block_id_t* bigger
    if n > pool.scratch_size:
        bigger = <block_id_t*> zeroed(2 * n + 64, sizeof(block_id_t))
        if bigger == NULL:
            return -1
        PyMem_RawFree(pool.scratch)
        pool.scratch = bigger
        pool.scratch_size = 2 * n + 64
    return 0
