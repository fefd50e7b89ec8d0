# Slots for a request's next tokens, as vLLM 0.33's allocate_slots gives them.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport ManagerState, Slots

cdef enum Served:
    NO_ROOM = 0
    SERVED = 1


# Whether the request was served; its new blocks stand behind those it had. NO_ROOM
# changes nothing but that blocks outside the window are given back.
cdef int serve(ManagerState* m, int32_t row, const Slots* slots) except -1 nogil
# The same for a running request that asks for slots for its next tokens, no more.
cdef int advance(
    ManagerState* m, int32_t row, int64_t num_new, int64_t num_lookahead
) except -1 nogil
# The request holds nothing any more: last blocks first, group by group.
cdef void give_back(ManagerState* m, int32_t row) noexcept nogil
# Blocks outside the window are given back, last first; null blocks take their place.
cdef void remove_skipped(
    ManagerState* m, int32_t row, int64_t processed
) noexcept nogil
