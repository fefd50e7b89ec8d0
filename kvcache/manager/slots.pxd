# Slots for a request's next tokens, as vLLM 0.33's allocate_slots gives them.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport RUNNING, ManagerState, Slots

cdef enum Served:
    NO_ROOM = 0             # all as it was, but for blocks outside the window
    HAS_ROOM = 1            # in the blocks that the request had
    EXTENDED = 2            # what it has taken stands from first_new on, if anything


# Whether a running request asks for slots alone, and has them.
cdef inline bint is_idle(
    const ManagerState* m, int32_t row, const Slots* slots
) noexcept nogil:
    return asks_for_slots_alone(m, row, slots) and (
        min(
            m.progress[row].num_computed + slots.num_new + slots.num_lookahead,
            m.max_model_len,
        )
        <= m.progress[row].idle_until
    )


cdef inline bint asks_for_slots_alone(
    const ManagerState* m, int32_t row, const Slots* slots
) noexcept nogil:
    return m.progress[row].status == RUNNING and not (
        slots.num_encoder
        or slots.reserved_blocks
        or slots.must_fit
        or slots.delay_cache
    )


# What does not fit, or raises, has changed nothing but for blocks outside the window.
cdef Served serve(
    ManagerState* m, int32_t row, const Slots* slots
) except? NO_ROOM nogil
# The same for a running request that asks for slots for its next tokens, no more.
cdef Served advance(
    ManagerState* m, int32_t row, int64_t num_new, int64_t num_lookahead
) except? NO_ROOM nogil
# The request holds nothing any more: last blocks first, group by group.
cdef void give_back(ManagerState* m, int32_t row) noexcept nogil
# Blocks outside the window are given back, last first; null blocks take their place.
cdef void remove_skipped(
    ManagerState* m, int32_t row, int64_t processed
) noexcept nogil
# Cache what the first so many tokens fill, of those that are known. The number of slots
# up to which no group takes, fills or gives back a block afterwards.
cdef int32_t settle(ManagerState* m, int32_t row, int64_t num_tokens) except -1 nogil
