"""What a request is to take, counted before anything is taken.

Stores: nothing; works on `ManagerState` and its pool.
Invariant: what is counted here is what `serve` then takes, so that all memory that a
call needs, also for what it returns, is there before the first block is taken.
Costs: O(groups). Threads: one at a time on one manager; the caller sees to it.
"""
cimport numpy as cnp

from kvcache._args cimport new_ids
from kvcache._memory cimport allocate, deallocate
from kvcache.block_pool cimport BlockPool
from kvcache.manager.manager_state cimport (
    RUNNING,
    cdiv,
    num_skipped,
    table_row,
)

cnp.import_array()


cdef bint has_hits(const ManagerState* m, int32_t row) noexcept nogil:
    cdef int32_t g
    if m.requests[row].matched:
        for g in range(m.num_groups):
            if m.groups[g].rows[row].num_hits:
                return True
    return False


cdef Plan plan_of(
    const ManagerState* m, int32_t row, const Slots* slots
) noexcept nogil:
    cdef Plan plan
    plan.computed = (
        m.progress[row].num_computed + m.requests[row].hit_length + slots.num_external
    )
    plan.total = min(plan.computed, m.max_model_len)
    plan.wanted = min(
        plan.total + slots.num_new + slots.num_lookahead, m.max_model_len
    )
    plan.num_encoder = slots.num_encoder
    plan.external = slots.num_external > 0
    plan.adopts = plan.external or has_hits(m, row)
    return plan


cdef void hits_to_hold(
    const ManagerState* m,
    const Group* group,
    int32_t row,
    const Plan* plan,
    int32_t* first,
    int32_t* stop,
) noexcept nogil:
    first[0] = stop[0] = group.rows[row].num_blocks
    if plan.adopts and group.kind != CROSS_ATTENTION:
        first[0] = <int32_t> (num_skipped(group, plan.computed) // group.block_size)
        # Those of a match that was dropped since do not count.
        stop[0] = max(
            first[0], group.rows[row].num_hits if m.requests[row].matched else 0
        )


cdef int64_t num_external_blocks(
    const ManagerState* m, const Group* group, int32_t row, const Plan* plan
) noexcept nogil:
    cdef int32_t first, stop
    if (
        not plan.adopts
        or not plan.external
        or group.kind == CROSS_ATTENTION
        or plan.computed <= num_skipped(group, plan.computed)
    ):
        return 0
    hits_to_hold(m, group, row, plan, &first, &stop)
    return max(cdiv(plan.computed, group.block_size) - stop, <int64_t> 0)


cdef int64_t num_new_blocks(
    const ManagerState* m, const Group* group, int32_t row, const Plan* plan
) noexcept nogil:
    cdef int64_t needed = slots_needed(group, plan.wanted, plan.num_encoder)
    cdef int32_t first, stop
    hits_to_hold(m, group, row, plan, &first, &stop)
    return max(
        cdiv(needed, group.block_size) - stop
        - num_external_blocks(m, group, row, plan),
        <int64_t> 0,
    )


cdef int64_t new_blocks(
    const ManagerState* m, int32_t g, int32_t row, const Slots* slots
) noexcept nogil:
    cdef const Group* group = &m.groups[g]
    cdef Plan plan
    cdef int64_t wanted
    if m.progress[row].status != RUNNING:
        plan = plan_of(m, row, slots)
        return num_new_blocks(m, group, row, &plan)
    wanted = m.progress[row].num_computed + slots.num_new + slots.num_lookahead
    wanted = min(wanted, m.max_model_len)
    return blocks_lacking(group, row, slots_needed(group, wanted, slots.num_encoder))


cdef int take_loudly(ManagerState* m, int32_t row, const Plan* plan) except -1 with gil:
    cdef int64_t num_taken = 0, num_hits = 0
    cdef int32_t g, first, stop
    cdef cnp.ndarray hits
    cdef int32_t* data
    cdef void* bigger
    for g in range(m.num_groups):
        num_taken += num_external_blocks(m, &m.groups[g], row, plan)
        num_taken += num_new_blocks(m, &m.groups[g], row, plan)
        hits_to_hold(m, &m.groups[g], row, plan, &first, &stop)
        num_hits += stop - first
    if num_taken == 0 and num_hits == 0:
        return 0
    hits = new_ids(num_hits)
    data = <int32_t*> cnp.PyArray_DATA(hits)
    for g in range(m.num_groups):
        hits_to_hold(m, &m.groups[g], row, plan, &first, &stop)
        memcpy(
            data, table_row(&m.groups[g], row) + first, (stop - first) * sizeof(int32_t)
        )
        data += stop - first
    if num_taken > m.taken_capacity:
        bigger = allocate(2 * num_taken, sizeof(int32_t), "ids")
        deallocate(m.taken)
        m.taken = <int32_t*> bigger
        m.taken_capacity = <int32_t> (2 * num_taken)
    m.next_taken = m.taken
    (<BlockPool> m.loud).take_told(
        m.taken, num_taken, <int32_t*> cnp.PyArray_DATA(hits), num_hits, False
    )
    return 0
