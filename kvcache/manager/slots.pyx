"""Slots for a request's next tokens: what a scheduler asks for at every step.

Stores: nothing; works on `ManagerState` and its pool.
Invariant: what is held is counted before the first block is taken, so a request is
served or it is not. Blocks stand in a table row in the order of their tokens.
Costs: O(groups) where a request needs no block and fills none, else O(1) a block.
Threads: one at a time on one manager; the caller sees to it.
"""
# The rules are those of vLLM 0.33's KVCacheManager.allocate_slots, its coordinators and
# single-type managers; ids come out in the same order.
from libc.string cimport memset

from kvcache._types cimport NULL_BLOCK
from kvcache.manager.block_caching cimport (
    cache_blocks,
    may_have_tail,
    tail_is_cached,
)
from kvcache.manager.manager_state cimport (
    CROSS_ATTENTION,
    FULL_ATTENTION,
    MAMBA,
    NOT_TRACKED,
    RUNNING,
    SLIDING_WINDOW,
    Group,
    GroupRow,
    Progress,
    Request,
    cdiv,
    fills_at,
    note_change,
    num_skipped,
    table_row,
)
from kvcache.manager.plan cimport (
    Plan,
    blocks_lacking,
    hits_to_hold,
    num_external_blocks,
    num_new_blocks,
    plan_of,
    slots_needed,
    take,
    take_loudly,
    touch,
)
from kvcache.pool_state cimport pool_free


cdef inline int64_t slots_of(const Group* group, const GroupRow* held) noexcept nogil:
    return <int64_t> held.num_blocks * group.block_size


cdef inline void extend(
    ManagerState* m, Group* group, int32_t row, int64_t n
) noexcept nogil:
    """Take n free blocks more, of which there are enough."""
    cdef GroupRow* held = &group.rows[row]
    if n > 0:
        take(m, table_row(group, row) + held.num_blocks, <int32_t> n)
        held.num_blocks += <int32_t> n
        note_change(m, row)


cdef inline int64_t blocks_needed(
    ManagerState* m,
    const Group* group,
    int32_t row,
    int64_t num_tokens,
    int64_t total_computed,
    const Slots* slots,
    bint cap,
) noexcept nogil:
    """Free blocks that a group takes to have so many slots: new ones, and free hits."""
    cdef GroupRow* held = &group.rows[row]
    cdef int32_t* hits = table_row(group, row)
    cdef int64_t required, skipped, needed
    cdef int32_t i
    cdef int32_t num_hits = held.num_hits if m.requests[row].matched else 0
    if group.kind == CROSS_ATTENTION:
        total_computed, num_hits = 0, 0
    num_tokens = slots_needed(group, num_tokens, slots.num_encoder)
    if held.num_cached != NOT_TRACKED and num_tokens <= slots_of(group, held):
        return 0
    required = cdiv(num_tokens, group.block_size)
    if cap and required > group.max_admission:
        required = group.max_admission
    if held.num_cached != NOT_TRACKED:
        return max(required - held.num_blocks, <int64_t> 0)
    skipped = num_skipped(group, total_computed) // group.block_size
    needed = max(
        required - max(skipped, <int64_t> num_hits + held.num_blocks), <int64_t> 0
    )
    # A hit that nobody uses leaves the free queue as well.
    for i in range(<int32_t> max(skipped - held.num_blocks, <int64_t> 0), num_hits):
        needed += hits[i] != NULL_BLOCK and m.pool.rows[hits[i]].ref_cnt == 0
    return needed


cdef inline int64_t all_blocks_needed(
    ManagerState* m,
    int32_t row,
    int64_t num_tokens,
    int64_t total_computed,
    const Slots* slots,
    bint cap,
) noexcept nogil:
    cdef int64_t needed = 0
    cdef int32_t g
    for g in range(m.num_groups):
        needed += blocks_needed(
            m, &m.groups[g], row, num_tokens, total_computed, slots, cap
        )
    return needed


cdef void remove_skipped(
    ManagerState* m, int32_t row, int64_t processed
) noexcept nogil:
    cdef Group* group
    cdef GroupRow* held
    cdef int32_t* ids
    cdef int32_t g, i, stop
    cdef int64_t skipped
    for g in range(m.num_groups):
        group = &m.groups[g]
        held = &group.rows[row]
        skipped = num_skipped(group, processed)
        if skipped < (<int64_t> held.num_nulls + 1) * group.block_size:
            continue
        stop = <int32_t> min(skipped // group.block_size, <int64_t> held.num_blocks)
        if stop <= held.num_nulls:
            continue
        ids = table_row(group, row)
        i = stop - 1
        # What is before a null block was given back earlier.
        while i >= 0 and ids[i] != NULL_BLOCK:
            i -= 1
        give_range(m, ids, i + 1, stop)
        for i in range(i + 1, stop):
            ids[i] = NULL_BLOCK
        held.num_nulls = stop
        note_change(m, row)


cdef void give_range(
    ManagerState* m, int32_t* ids, int32_t start, int32_t stop
) noexcept nogil:
    """Give back ids[start:stop], the last one first; null blocks are skipped."""
    cdef int32_t i
    for i in range(stop - start):
        m.scratch[i] = ids[stop - 1 - i]
    pool_free(m.pool, m.scratch, max(stop - start, 0))


cdef void give_back(ManagerState* m, int32_t row) noexcept nogil:
    cdef Group* group
    cdef GroupRow* held
    cdef int32_t g
    for g in range(m.num_groups):
        group = &m.groups[g]
        held = &group.rows[row]
        give_range(m, table_row(group, row), held.num_nulls, held.num_blocks)
        held.num_blocks = held.num_hits = held.num_nulls = 0
        held.num_cached = NOT_TRACKED
    m.requests[row].matched = False
    m.requests[row].hit_length = 0
    m.progress[row].idle_until = 0
    note_change(m, row)


cdef void hold_hits(
    ManagerState* m, Group* group, int32_t row, const Plan* plan
) noexcept nogil:
    """Use the hits; those outside the window become null blocks."""
    cdef GroupRow* held = &group.rows[row]
    cdef int32_t* ids = table_row(group, row)
    cdef int32_t first, stop, i
    if group.kind == CROSS_ATTENTION:
        return
    hits_to_hold(m, group, row, plan, &first, &stop)
    for i in range(first):
        ids[i] = NULL_BLOCK
    if stop > first:
        touch(m, ids + first, stop - first)
    held.num_blocks = held.num_cached = stop
    held.num_nulls = first
    # Hits may start with null blocks too: those that the window had left behind.
    while held.num_nulls < stop and ids[held.num_nulls] == NULL_BLOCK:
        held.num_nulls += 1


cdef Served advance(
    ManagerState* m, int32_t row, int64_t num_new, int64_t num_lookahead
) except? NO_ROOM nogil:
    cdef Served served = HAS_ROOM
    cdef Group* group
    cdef Progress* progress = &m.progress[row]
    cdef int64_t total = progress.num_computed + num_new, needed = 0
    cdef int32_t g
    cdef Plan plan
    memset(&plan, 0, sizeof(Plan))
    plan.wanted = min(total + num_lookahead, m.max_model_len)
    if m.drops_blocks:
        remove_skipped(
            m, row, max(progress.num_computed - m.requests[row].num_in_flight, 0)
        )
    for g in range(m.num_groups):
        group = &m.groups[g]
        needed += blocks_lacking(group, row, slots_needed(group, plan.wanted, 0))
    if needed:
        if needed > m.pool.queue.num_free:
            return NO_ROOM
        served = EXTENDED
        if m.loud != NULL:
            take_loudly(m, row, &plan)
        for g in range(m.num_groups):
            group = &m.groups[g]
            group.rows[row].first_new = group.rows[row].num_blocks
            needed = blocks_lacking(group, row, slots_needed(group, plan.wanted, 0))
            extend(m, group, row, needed)
    progress.num_computed = <int32_t> total
    progress.idle_until = 0
    progress.idle_until = settle(m, row, total)
    return served


cdef Served serve(
    ManagerState* m, int32_t row, const Slots* slots
) except? NO_ROOM nogil:
    cdef Request* request = &m.requests[row]
    cdef Progress* progress = &m.progress[row]
    cdef Group* group
    cdef int64_t total, required, num_free, watermark = 0
    cdef int32_t g
    cdef Plan plan
    if is_idle(m, row, slots):
        progress.num_computed += <int32_t> slots.num_new
        return HAS_ROOM
    if asks_for_slots_alone(m, row, slots):
        return advance(m, row, slots.num_new, slots.num_lookahead)
    plan = plan_of(m, row, slots)
    total = plan.total
    if slots.has_scheduled and progress.status != RUNNING:
        watermark = m.watermark_blocks
    if slots.must_fit:
        required = watermark + all_blocks_needed(
            m, row, min(<int64_t> m.content[row].num_tokens, m.max_model_len), total,
            slots, True,
        )
        if required > m.pool.queue.num_free:
            return NO_ROOM
    if m.drops_blocks:
        remove_skipped(m, row, max(total - request.num_in_flight, <int64_t> 0))
    required = watermark + all_blocks_needed(
        m, row, plan.wanted, plan.computed, slots, False
    )
    num_free = <int64_t> m.pool.queue.num_free - slots.reserved_blocks
    if required > num_free:
        return NO_ROOM
    if m.loud != NULL:
        take_loudly(m, row, &plan)
    if plan.adopts:
        note_change(m, row)
        # All hits first: a block taken for one group could be another one's hit.
        for g in range(m.num_groups):
            hold_hits(m, &m.groups[g], row, &plan)
        for g in range(m.num_groups):
            group = &m.groups[g]
            extend(m, group, row, num_external_blocks(m, group, row, &plan))
        plan.adopts = False
    for g in range(m.num_groups):
        group = &m.groups[g]
        group.rows[row].first_new = group.rows[row].num_blocks
        extend(m, group, row, num_new_blocks(m, group, row, &plan))
    request.matched = False
    request.hit_length = 0
    progress.status = RUNNING
    progress.num_computed = <int32_t> (total + slots.num_new)
    progress.idle_until = 0
    if not slots.delay_cache:
        progress.idle_until = settle(m, row, progress.num_computed)
    return EXTENDED


cdef int32_t settle(ManagerState* m, int32_t row, int64_t num_tokens) except -1 nogil:
    cdef Group* group
    cdef GroupRow* held
    cdef int64_t at = m.max_model_len, limit
    cdef int32_t g
    num_tokens = min(num_tokens, <int64_t> m.content[row].num_tokens)
    for g in range(m.num_groups):
        group = &m.groups[g]
        held = &group.rows[row]
        if group.kind == CROSS_ATTENTION:
            continue
        limit = <int64_t> (held.num_blocks - group.spec_blocks) * group.block_size
        at = min(at, limit)
        if m.enable_caching:
            limit = fills_at(m, group, row)
            if num_tokens >= limit or may_have_tail(group):
                cache_blocks(m, row, g, num_tokens)
                limit = fills_at(m, group, row)
                if not tail_is_cached(m, group, row):
                    limit = 1
            at = min(at, limit - 1)
        if group.kind == SLIDING_WINDOW:
            limit = <int64_t> (held.num_nulls + 1) * group.block_size
            at = min(at, limit + group.window - 2 + group.extra_retained)
        elif group.kind == MAMBA:
            at = min(at, <int64_t> (held.num_nulls + 1) * group.block_size)
        elif group.kind != FULL_ATTENTION:
            limit = <int64_t> (held.num_nulls + 1) * group.block_size
            at = min(at, cdiv(limit, group.window) * group.window - 1)
    return <int32_t> at
