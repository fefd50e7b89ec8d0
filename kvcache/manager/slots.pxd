# Slots for a request's next tokens, as vLLM 0.33's allocate_slots gives them.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport ManagerState, Slots

cdef enum Served:
    NO_ROOM = 0             # all as it was, but for blocks outside the window
    HAS_ROOM = 1            # in the blocks that the request had
    EXTENDED = 2            # what it has taken stands from first_new on, if anything


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
