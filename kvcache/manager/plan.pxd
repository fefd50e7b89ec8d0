# What a request is to take: the hits it holds from now on, and new blocks.
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from kvcache.manager.manager_state cimport (
    CROSS_ATTENTION,
    Group,
    ManagerState,
    Slots,
    cdiv,
)
from kvcache.pool_state cimport pool_get, pool_touch

cdef struct Plan:
    int64_t computed        # tokens at the start that are computed, or a cache brings
    int64_t total           # the same, at most max_model_len
    int64_t wanted          # tokens to have slots for
    int64_t num_encoder
    bint external           # a connector brings some of the computed ones
    bint adopts             # hits, or blocks for what a connector brings, come first


cdef Plan plan_of(const ManagerState* m, int32_t row, const Slots* slots) noexcept nogil
# Which blocks in a group's table row are hits to be used; those before are skipped.
cdef void hits_to_hold(
    const ManagerState* m, const Group* group, int32_t row, const Plan* plan,
    int32_t* first, int32_t* stop,
) noexcept nogil
# Blocks to take for what a connector brings, but for what is outside the window.
cdef int64_t num_external_blocks(
    const ManagerState* m, const Group* group, int32_t row, const Plan* plan
) noexcept nogil
# Blocks to take for what is to be computed.
cdef int64_t num_new_blocks(
    const ManagerState* m, const Group* group, int32_t row, const Plan* plan
) noexcept nogil
# The same, before it is known whether they fit.
cdef int64_t new_blocks(
    const ManagerState* m, int32_t g, int32_t row, const Slots* slots
) noexcept nogil
# Have a pool with events or metrics touch the hits and hand out the blocks of all
# groups in one go, or raise; `touch` and `take` then give them out.
cdef int take_loudly(ManagerState* m, int32_t row, const Plan* plan) except -1 with gil


cdef inline int64_t slots_needed(
    const Group* group, int64_t num_tokens, int64_t num_encoder
) noexcept nogil:
    """Slots that a group has to have for so many tokens."""
    if group.kind == CROSS_ATTENTION:
        return num_encoder
    return num_tokens + <int64_t> group.block_size * group.spec_blocks


cdef inline int64_t blocks_lacking(
    const Group* group, int32_t row, int64_t num_slots
) noexcept nogil:
    """Blocks that a request's group has to take to have so many slots."""
    cdef int64_t lacking = (
        num_slots - <int64_t> group.rows[row].num_blocks * group.block_size
    )
    if lacking <= group.block_size:  # nearly always: spare the division
        return lacking > 0
    return cdiv(lacking, group.block_size)


cdef inline void take(ManagerState* m, int32_t* into, int32_t n) noexcept nogil:
    """n free blocks, of which there are enough."""
    if m.loud != NULL:
        memcpy(into, m.next_taken, n * sizeof(int32_t))
        m.next_taken += n
    else:
        pool_get(m.pool, into, n)


cdef inline void touch(ManagerState* m, int32_t* ids, int32_t n) noexcept nogil:
    """One more user of each block."""
    if m.loud == NULL:
        pool_touch(m.pool, ids, n)
