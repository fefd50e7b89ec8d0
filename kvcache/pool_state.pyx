"""The C form of every pool operation: ids in, ids out, no GIL.

Holds no state of its own: `PoolState` points at the rows, the queue and the index that
a `BlockPool` owns.
Invariant: each function checks its whole batch before the first write.
Costs: O(1) a block. Threads: one at a time on one pool; the caller sees to it.
"""
from libc.stdint cimport uint8_t

from kvcache._types cimport (
    ANCHOR,
    MAX_REF_CNT,
    NULL_BLOCK,
    has_hash,
)
from kvcache.hash_index cimport index_drop_block

cdef enum:
    FLAG_IN_BATCH = 128     # on a row for the length of one check: the id was met


cdef Py_ssize_t pool_get(PoolState* pool, block_id_t* ids, Py_ssize_t n) noexcept nogil:
    cdef block_id_t block = pool.rows[ANCHOR].next_free_block
    cdef Py_ssize_t i
    cdef bint holding = False
    if not 0 <= n <= pool.queue.num_free:
        return -1
    for i in range(n):
        ids[i] = block
        block = take_first(pool, block, &holding)
    set_first(pool, block, n)
    return evict_taken(pool, ids, n) if holding else 0


cdef Py_ssize_t evict_taken(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    """Drop what taken blocks held; from how many.

    A loop of its own: by now the slots of all of them are on their way to the cache.
    """
    cdef Py_ssize_t i, evicted = 0
    for i in range(n):
        evicted += index_drop_block(pool.index, ids[i]) != 0
    return evicted


cdef inline Py_ssize_t drop_references(
    PoolState* pool,
    const block_id_t* ids,
    Py_ssize_t n,
    Freed* freed,
    bint all_back,
) noexcept nogil:
    """One reference less for each id; `freed` says which have no users left.

    Undone, and the place of the culprit returned, where an id has none to give.
    """
    cdef Py_ssize_t i
    freed_init(pool, freed, all_back)
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            continue
        if not is_block(pool, ids[i]) or not drop_reference(
            pool, &pool.rows[ids[i]], ids[i], freed
        ):
            add_references(pool, ids, i)
            return i
    return -1


cdef void add_references(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if ids[i] != NULL_BLOCK:
            undo_drop(&pool.rows[ids[i]])


cdef Py_ssize_t pool_can_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Freed freed
    cdef Py_ssize_t bad = drop_references(pool, ids, n, &freed, False)
    if bad < 0:
        add_references(pool, ids, n)
    return bad


cdef Py_ssize_t pool_free(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Freed freed
    cdef Py_ssize_t bad = drop_references(pool, ids, n, &freed, False)
    if bad < 0:
        return_freed(pool, &freed)
    return bad


cdef Py_ssize_t pool_unpin(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Freed freed
    cdef Py_ssize_t i, bad
    for i in range(n):
        if ids[i] == NULL_BLOCK:
            return i
    bad = drop_references(pool, ids, n, &freed, True)
    if bad < 0:
        return_freed(pool, &freed)
    return bad


cdef Py_ssize_t pool_touch(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if not is_block(pool, ids[i]) or pool.rows[ids[i]].ref_cnt > MAX_REF_CNT - n:
            return i
    for i in range(n):
        touch_row(pool, &pool.rows[ids[i]], ids[i])
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
