"""The C form of every pool operation: ids in, ids out, no GIL.

Holds no state of its own: `PoolState` points at the rows, the queue and the index that
a `BlockPool` owns.
Invariant: each function checks its whole batch before the first write.
Costs: O(1) a block. Threads: one at a time on one pool; the caller sees to it.
"""
from libc.stdint cimport uint64_t

from kvcache._types cimport (
    ANCHOR,
    MAX_DIGEST_BYTES,
    MAX_REF_CNT,
    NULL_BLOCK,
    group_suffix,
    has_hash,
    make_key,
)
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    index_drop_block,
    index_match,
    index_is_far,
    index_prefetch_key,
    index_reserve,
)

cdef enum:
    # Blocks are evicted so many behind the one that is taken: their slots have come by
    # then, and it fills the time in which the next row comes from memory. Of 100,000
    # strewn about a block takes 150 ns, not 220 as with a loop of its own for it.
    EVICT_BEHIND = 8


cdef Py_ssize_t pool_get(PoolState* pool, block_id_t* ids, Py_ssize_t n) noexcept nogil:
    cdef block_id_t block = pool.rows[ANCHOR].next_free_block
    cdef Py_ssize_t i = 0, done, evicted = 0
    cdef bint holding = False
    if not 0 <= n <= pool.queue.num_free:
        return -1
    while i < n and not holding:
        ids[i] = block
        block = take_first(pool, block, &holding)
        i += 1
    done = i - holding
    while i < n:
        ids[i] = block
        block = take_first(pool, block, &holding)
        i += 1
        if i - done > EVICT_BEHIND:
            evicted += index_drop_block(pool.index, ids[done]) != 0
            done += 1
    set_first(pool, block, n)
    return evicted + evict_taken(pool, ids + done, n - done)


cdef Py_ssize_t pool_front(
    PoolState* pool,
    const block_id_t* without,
    Py_ssize_t num_without,
    block_id_t* front,
    Py_ssize_t n,
) noexcept nogil:
    cdef block_id_t block = pool.rows[ANCHOR].next_free_block
    cdef Py_ssize_t count = 0, i
    for i in range(num_without):
        pool.rows[without[i]].flags |= FLAG_IN_BATCH
    while count < n and block != ANCHOR:
        if not pool.rows[block].flags & FLAG_IN_BATCH:
            front[count] = block
            count += 1
        block = pool.rows[block].next_free_block
    for i in range(num_without):
        pool.rows[without[i]].flags &= ~<uint8_t> FLAG_IN_BATCH
    return count


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


cdef Py_ssize_t pool_match(
    const PoolState* pool,
    const uint8_t* digests,
    Py_ssize_t length,
    Py_ssize_t n,
    uint32_t group_id,
    block_id_t* ids,
) noexcept nogil:
    cdef const uint8_t* places[MATCH_CHUNK]
    cdef uint64_t suffix = group_suffix(group_id)
    cdef Py_ssize_t done = 0, count, hits, i
    if not 0 < length <= MAX_DIGEST_BYTES:
        return -1
    while done < n:
        count = min(n - done, <Py_ssize_t> MATCH_CHUNK)
        for i in range(count):
            places[i] = digests + (done + i) * length
        hits = index_match(
            pool.index, ids[done - 1] if done else NULL_BLOCK, places, length, suffix,
            count, ids + done,
        )
        done += hits
        if hits < count:
            break
    return done


cdef void prefetch_digests(
    const PoolState* pool,
    const uint8_t* digests,
    Py_ssize_t length,
    uint64_t suffix,
    Py_ssize_t count,
) noexcept nogil:
    cdef Key key
    cdef Py_ssize_t i
    if index_is_far(pool.index):
        for i in range(min(count, <Py_ssize_t> MATCH_CHUNK)):
            make_key(&key, digests + i * length, length, suffix)
            index_prefetch_key(pool.index, &key)


cdef Py_ssize_t pool_cache(
    PoolState* pool,
    const block_id_t* ids,
    const uint8_t* digests,
    Py_ssize_t length,
    Py_ssize_t n,
    uint32_t group_id,
) noexcept nogil:
    cdef uint64_t suffix = group_suffix(group_id)
    cdef block_id_t before = NULL_BLOCK
    cdef Py_ssize_t i, bad = pool_can_cache(pool, ids, n)
    cdef Key key
    if bad >= 0:
        return bad
    if not 0 < length <= MAX_DIGEST_BYTES:
        return n
    if index_reserve(pool.index, n, 0) < 0:
        return POOL_NO_MEMORY
    for i in range(n):
        if i % MATCH_CHUNK == 0:
            prefetch_digests(pool, digests + i * length, length, suffix, n - i)
        make_key(&key, digests + i * length, length, suffix)
        before = cache_block(pool, ids[i], &key, before)
    return -1


cdef Py_ssize_t pool_evict(
    PoolState* pool, const block_id_t* ids, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if not is_block(pool, ids[i]):
            return i
    for i in range(n):
        index_drop_block(pool.index, ids[i])
    return -1
