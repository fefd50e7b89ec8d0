"""Caching a request's blocks as they fill, under the hashes of its tokens.

Stores: nothing; works on `ManagerState` and its pool.
Invariant: what is cached are full blocks whose tokens are final, and of these only what
a later hit could end with; `num_cached` blocks are done with.
Costs: O(1) a block. Threads: one at a time on one manager; the caller sees to it.
"""
# No request goes without slots because there is no memory to cache what it had: that
# is left for its next call.
#
# The rules are those of cache_blocks in vLLM 0.33's coordinators and single-type
# managers, with dense retention.
from libc.stdint cimport uint32_t

from kvcache._memory cimport kvc_prefetch
from kvcache._types cimport (
    NO_NUM_TOKENS,
    NULL_BLOCK,
    BlockMeta,
    Key,
    has_hash,
    make_key,
    row_has_key,
)
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    SIDE_ALIAS,
    index_add_row,
    index_add_side,
    index_chain,
    index_has_side,
    index_drop_block,
    index_is_far,
    index_prefetch_key,
    index_reserve,
)
from kvcache.manager.manager_state cimport (
    SLIDING_WINDOW,
    Content,
    GroupRow,
    cdiv,
    digest_of,
    table_row,
)

from kvcache.errors import LACK_OF_MEMORY, BlockStateError


cdef int64_t cacheable_tokens(
    const ManagerState* m, const Group* group, int64_t computed
) noexcept nogil:
    """Tokens of which a later hit could make use in a group."""
    cdef int64_t aligned
    if m.num_groups == 1:
        return computed
    aligned = computed - computed % m.alignment
    if group.eagle and aligned > 0:
        # A match goes one block further, and drops it.
        return min(computed, aligned + group.block_size)
    return aligned


cdef bint is_reachable(
    const ManagerState* m, const Group* group, int64_t i
) noexcept nogil:
    """Whether a hit, which ends at a multiple of the alignment, could need block i."""
    cdef int64_t need, a_segment
    if group.kind != SLIDING_WINDOW:
        return True
    need = cdiv(group.window - 1, group.block_size) + group.eagle
    a_segment = m.alignment // group.block_size
    if need >= a_segment:
        return True
    i -= group.eagle
    return i >= 0 and i % a_segment >= a_segment - need


# In another module than its caller: else gcc takes it for a function without effect.
cdef void prefetch_events(const ManagerState* m, const int32_t* rows) noexcept nogil:
    # In a step of 256 requests 16 cache a block and 16 take one, each of which touches
    # six lines that are in no near cache: 3.6 us with this, 4.2 to 5.0 without.
    cdef const Group* group
    cdef GroupRow* held
    cdef int32_t* ids
    cdef int32_t g, i, row
    cdef Key key
    for g in range(m.num_groups):
        group = &m.groups[g]
        for i in range(m.num_busy):
            row = rows[m.busy[i]]
            held = &group.rows[row]
            ids = table_row(group, row)
            kvc_prefetch(ids + held.num_blocks)
            if may_cache(m, group, row):
                kvc_prefetch(digest_of(m, group, row, held.num_cached))
        for i in range(m.num_busy):
            row = rows[m.busy[i]]
            held = &group.rows[row]
            if may_cache(m, group, row):
                kvc_prefetch(&m.pool.rows[table_row(group, row)[held.num_cached]])
                key_of_block(m, group, row, held.num_cached, &key)
                index_prefetch_key(m.pool.index, &key)


cdef inline bint may_cache(
    const ManagerState* m, const Group* group, int32_t row
) noexcept nogil:
    """Whether the block behind the cached ones is there, and its hash."""
    cdef GroupRow* held = &group.rows[row]
    return (
        0 <= held.num_cached < held.num_blocks
        and (held.num_cached + 1) * group.hash_scale <= m.content[row].num_hashes
    )


cdef inline void key_of_block(
    const ManagerState* m, const Group* group, int32_t row, int64_t i, Key* key
) noexcept nogil:
    make_key(key, digest_of(m, group, row, i), m.digest_length, group.suffix)


cdef bint to_be_cached(
    const ManagerState* m, const Group* group, int32_t row, int64_t i
) noexcept nogil:
    cdef BlockMeta* meta = &m.pool.rows[table_row(group, row)[i]]
    cdef Key key
    if not is_reachable(m, group, i):
        return False
    key_of_block(m, group, row, i, &key)
    # One of two requests that share the block, a fork, may have cached it.
    return not (has_hash(meta) and row_has_key(meta, &key))


cdef int cache_blocks(
    ManagerState* m, int32_t row, int32_t g, int64_t num_tokens
) except -1 nogil:
    cdef Group* group = &m.groups[g]
    cdef GroupRow* held = &group.rows[row]
    cdef int64_t hashed = <int64_t> m.content[row].num_hashes * m.hash_block_size
    cdef int64_t tokens = cacheable_tokens(m, group, num_tokens)
    cdef int32_t start = max(held.num_cached, 0)
    cdef int32_t stop = <int32_t> (min(tokens, hashed) // group.block_size)
    if stop > start:
        if m.loud != NULL:
            cache_full_loudly(m, row, g, start, stop)
        else:
            cache_full(m, group, row, start, stop)
        if held.num_cached < stop:
            return 0  # the tail's turn is behind the others'
    if may_have_tail(group):
        cache_tail(m, group, row, g, tokens)
    return 0


# Apart, since a function that has Python variables takes the GIL whenever it returns.
cdef int cache_full_loudly(
    ManagerState* m, int32_t row, int32_t g, int32_t start, int32_t stop
) except -1 with gil:
    try:
        m.cache_full(m.owner, row, g, start, stop)
        m.groups[g].rows[row].num_cached = stop
    except LACK_OF_MEMORY:
        m.starved = True
    return 0


cdef int cache_tail_loudly(
    ManagerState* m, int32_t row, int32_t g, int32_t i, int64_t num_tokens
) except -1 with gil:
    try:
        m.cache_partial(m.owner, row, g, i, num_tokens)
    except LACK_OF_MEMORY:
        m.starved = True
    return 0


cdef int cache_full(
    ManagerState* m, Group* group, int32_t row, int32_t start, int32_t stop
) except -1 nogil:
    cdef int32_t* ids = table_row(group, row)
    cdef BlockMeta* meta
    cdef int32_t before = ids[start - 1] if start else NULL_BLOCK, i, k
    cdef int64_t tokens
    cdef Key key
    if (
        m.pool.index.num_keys + <uint32_t> (stop - start) > m.pool.index.max_keys
        and index_reserve(m.pool.index, stop - start, 0) < 0
    ):
        m.starved = True
        return 0
    for i in range(start, stop):
        # One alone, as in a step of decoding, has been seen to before.
        if (
            (i - start) % MATCH_CHUNK == 0
            and stop - i > 1
            and index_is_far(m.pool.index)
        ):
            for k in range(i, min(i + <int32_t> MATCH_CHUNK, stop)):
                key_of_block(m, group, row, k, &key)
                index_prefetch_key(m.pool.index, &key)
        if ids[i] == NULL_BLOCK or not is_reachable(m, group, i):
            continue
        meta = &m.pool.rows[ids[i]]
        tokens = <int64_t> (i + 1) * group.block_size
        key_of_block(m, group, row, i, &key)
        if has_hash(meta):
            if row_has_key(meta, &key):
                before = ids[i]
                continue
            if not NO_NUM_TOKENS < meta.block_hash_num_tokens < tokens:
                with gil:
                    raise BlockStateError(
                        f"block {ids[i]} of request {row} carries a hash already"
                    )
            index_drop_block(m.pool.index, ids[i])
        index_add_row(m.pool.index, ids[i], &key, <int32_t> tokens)
        index_chain(m.pool.index, before, ids[i])
        before = ids[i]
    group.rows[row].num_cached = stop
    return 0


cdef inline int64_t tail_hashes(
    const ManagerState* m, const Group* group, int32_t row
) noexcept nogil:
    """Hash blocks of the prompt that a repeat of it can match."""
    return (m.requests[row].num_prompt - (0 if group.eagle else 1)) // m.hash_block_size


cdef bint tail_is_cached(
    const ManagerState* m, const Group* group, int32_t row
) noexcept nogil:
    cdef int64_t hashes
    if not may_have_tail(group):
        return True
    hashes = tail_hashes(m, group, row)
    # The block that it is in was full already when the tail was last looked at.
    return hashes <= m.content[row].num_hashes and (
        hashes % group.hash_scale == 0
        or group.rows[row].num_cached > hashes // group.hash_scale
    )


cdef int cache_tail(
    ManagerState* m, Group* group, int32_t row, int32_t g, int64_t num_tokens
) except -1 nogil:
    """Cache the end of the prompt, where it is inside a block, under its last hash."""
    cdef const Content* content = &m.content[row]
    cdef int64_t hashes = min(tail_hashes(m, group, row), <int64_t> content.num_hashes)
    cdef int64_t boundary = hashes * m.hash_block_size
    cdef int64_t i = boundary // group.block_size
    cdef BlockMeta* meta
    cdef int32_t block
    cdef Key key
    if (
        boundary <= 0
        or boundary > num_tokens
        or boundary % group.block_size == 0
        or i >= group.rows[row].num_blocks
    ):
        return 0
    block = table_row(group, row)[i]
    make_key(
        &key, content.digests + (hashes - 1) * m.digest_length, m.digest_length,
        group.suffix,
    )
    meta = &m.pool.rows[block]
    if (has_hash(meta) and row_has_key(meta, &key)) or index_has_side(
        m.pool.index, &key, block
    ):
        return 0
    if m.loud != NULL:
        return cache_tail_loudly(m, row, g, <int32_t> i, boundary)
    if index_reserve(m.pool.index, 1, 1) < 0:
        m.starved = True
        return 0
    if has_hash(meta) and NO_NUM_TOKENS < meta.block_hash_num_tokens < boundary:
        index_drop_block(m.pool.index, block)
    if has_hash(meta):
        index_add_side(m.pool.index, &key, block, SIDE_ALIAS)
    else:
        index_add_row(m.pool.index, block, &key, <int32_t> boundary)
    return 0
