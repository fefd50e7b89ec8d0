"""The longest cached prefix of a request that all groups agree on.

Stores: nothing; writes the blocks it finds to the request's table rows.
Invariant: a hit ends at a multiple of all block sizes, and each group holds the blocks
that the next token attends to; null blocks stand for the others.
Costs: O(blocks looked up); of a window only its own and those of failed tries.
Threads: one at a time on one manager; the caller sees to it.
"""
# The rules are those of vLLM 0.33's coordinators and of find_longest_cache_hit of its
# single-type managers. Groups of one kind and size (a `spec`) are looked up together: a
# block counts if all of them have it.
from libc.stdint cimport uint8_t, uint64_t

from kvcache._types cimport FOREIGN, NULL_BLOCK, Key, make_key, row_has_key
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    entry_block,
    index_has_side,
    index_find,
    index_match,
)
from kvcache.manager.manager_state cimport (
    CHUNKED_LOCAL,
    FULL_ATTENTION,
    MAX_SPECS,
    SLIDING_WINDOW,
    Group,
    cdiv,
    digest_of,
    table_row,
)


cdef bint find_block(
    ManagerState* m, int32_t row, int32_t spec, int64_t i
) noexcept nogil:
    """Look block i up in each group of a spec; whether all have it, in their rows."""
    cdef Group* group
    cdef Key key
    cdef int32_t g
    cdef int entry
    for g in range(m.num_groups):
        group = &m.groups[g]
        if group.spec != spec:
            continue
        make_key(
            &key, digest_of(m, group, row, i), m.digest_length,
            group.suffix,
        )
        entry = index_find(m.pool.index, &key)
        if entry == 0 or entry_block(m.pool.index, entry) == FOREIGN:
            return False
        table_row(group, row)[i] = entry_block(m.pool.index, entry)
    return True


cdef int64_t find_run(
    ManagerState* m, Group* group, int32_t row, int64_t limit
) noexcept nogil:
    """How many of a group's first blocks are cached, at most `limit`."""
    cdef const uint8_t* places[MATCH_CHUNK]
    cdef int32_t* ids = table_row(group, row)
    cdef int64_t done = 0, wanted, hits, i
    while done < limit:
        wanted = min(limit - done, <int64_t> MATCH_CHUNK)
        for i in range(wanted):
            places[i] = digest_of(m, group, row, done + i)
        hits = index_match(
            m.pool.index, ids[done - 1] if done else NULL_BLOCK, places,
            m.digest_length, group.suffix, wanted, ids + done,
        )
        done += hits
        if hits < wanted:
            break
    return done


cdef void set_hits(
    ManagerState* m, int32_t row, int32_t spec, int64_t n
) noexcept nogil:
    cdef int32_t g
    for g in range(m.num_groups):
        if m.groups[g].spec == spec:
            m.groups[g].rows[row].num_hits = <int32_t> n


cdef int64_t match_full(
    ManagerState* m, int32_t row, int32_t spec, int64_t limit, bint drop
) noexcept nogil:
    """The run of cached blocks from the start; its length in tokens."""
    cdef Group* group
    cdef int64_t n = limit, size = 1
    cdef int32_t g
    for g in range(m.num_groups):
        group = &m.groups[g]
        if group.spec == spec:
            n = find_run(m, group, row, n)
            size = group.block_size
    limit = n * size
    if drop and limit > 0:
        limit -= min(<int64_t> m.alignment, size)
    limit -= limit % m.alignment
    set_hits(m, row, spec, cdiv(limit, size))
    return limit


cdef int64_t match_window(
    ManagerState* m, const Group* first, int32_t row, int32_t spec, int64_t limit,
    bint drop,
) noexcept nogil:
    """The last place behind which a window's blocks are all cached."""
    cdef int64_t need = cdiv(first.window - 1, first.block_size) + drop
    cdef int64_t size = first.block_size, run = 0, n = -1, i, k
    cdef int32_t g
    for i in range(limit - 1, -1, -1):
        if not find_block(m, row, spec, i):
            run = 0
            continue
        if run == 0 and (i + (0 if drop else 1)) * size % m.alignment:
            continue
        run += 1
        if run >= need:
            n = i + run
            break
    if n < 0:
        # All that there is from the start on, though less than a window.
        n = run
        while n * size % m.alignment:
            n -= 1
        i = 0
    if drop and n > 0:
        n -= 1
        while n * size % m.alignment:
            n -= 1
    for g in range(m.num_groups):
        if m.groups[g].spec == spec:
            for k in range(min(i, n)):
                table_row(&m.groups[g], row)[k] = NULL_BLOCK
    set_hits(m, row, spec, n)
    return n * size


cdef int64_t match_chunk(
    ManagerState* m, const Group* first, int32_t row, int32_t spec, int64_t max_length,
    int64_t limit,
) noexcept nogil:
    """The chunks before the last one, and what is cached of that."""
    cdef int64_t n = max_length - max_length % first.window, i
    cdef int32_t g
    n //= first.block_size
    for g in range(m.num_groups):
        if m.groups[g].spec == spec:
            for i in range(n):
                table_row(&m.groups[g], row)[i] = NULL_BLOCK
    while n < limit and find_block(m, row, spec, n):
        n += 1
    set_hits(m, row, spec, n)
    return n * first.block_size


cdef int64_t match_spec(
    ManagerState* m, const Group* first, int32_t row, int64_t max_length, bint drop
) noexcept nogil:
    cdef int64_t limit = min(
        max_length // first.block_size,
        <int64_t> (m.content[row].num_hashes // first.hash_scale),
    )
    if first.kind == SLIDING_WINDOW:
        return match_window(m, first, row, first.spec, limit, drop)
    if first.kind == CHUNKED_LOCAL:
        return match_chunk(m, first, row, first.spec, max_length, limit)
    return match_full(m, row, first.spec, limit, drop)


cdef const Group* first_of(const ManagerState* m, int32_t spec) noexcept nogil:
    cdef int32_t g = 0
    while m.groups[g].spec != spec:
        g += 1
    return &m.groups[g]


cdef int64_t match_request(
    ManagerState* m, int32_t row, int64_t max_length
) noexcept nogil:
    cdef int64_t length = max_length, current, found, limit
    cdef const Group* first
    cdef int32_t spec, g
    cdef bint drop
    cdef uint64_t verified = 0, looked_up = 0
    cdef int64_t[MAX_SPECS] lengths
    if m.num_groups == 1:
        first = &m.groups[0]
        return match_spec(m, first, row, max_length, first.eagle)
    while True:
        current = length
        for spec in range(m.num_specs):
            first = first_of(m, spec)
            if first.kind == FULL_ATTENTION and looked_up >> spec & 1:
                # What is cached of it from the start on is known.
                current = min(current, lengths[spec])
                continue
            drop = first.eagle and not verified >> spec & 1
            limit = current
            if drop:
                # One block more is matched, and dropped.
                limit = min(
                    current + first.block_size,
                    <int64_t> m.content[row].num_hashes * m.hash_block_size,
                )
            found = match_spec(m, first, row, limit, drop)
            if drop:
                verified |= <uint64_t> 1 << spec
            elif found < current:
                verified = 0
            current = lengths[spec] = found
            looked_up |= <uint64_t> 1 << spec
        if current >= length:
            break
        length = current
        if m.num_specs == 2 and first_of(m, 0).kind == FULL_ATTENTION:
            break
    for g in range(m.num_groups):
        if m.groups[g].kind == FULL_ATTENTION:
            m.groups[g].rows[row].num_hits = <int32_t> cdiv(
                length, m.groups[g].block_size
            )
    return length


cdef bint hits_hold(ManagerState* m, int32_t row) noexcept nogil:
    cdef Group* group
    cdef int32_t* ids
    cdef Key key
    cdef int32_t g, i
    for g in range(m.num_groups):
        group = &m.groups[g]
        ids = table_row(group, row)
        for i in range(group.rows[row].num_hits):
            if ids[i] == NULL_BLOCK:
                continue
            make_key(
                &key, digest_of(m, group, row, i), m.digest_length,
                group.suffix,
            )
            if not row_has_key(&m.pool.rows[ids[i]], &key) and not index_has_side(
                m.pool.index, &key, ids[i]
            ):
                return False
    return True
