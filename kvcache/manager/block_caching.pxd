# Caching a request's blocks as they fill.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport FULL_ATTENTION, Group, ManagerState


cdef inline bint may_have_tail(const Group* group) noexcept nogil:
    """Whether a prompt's end inside a block has a hash."""
    return group.hash_scale > 1 and group.kind == FULL_ATTENTION


# A request's full blocks up to so many tokens are cached in a group. `starved` is set
# if there was no memory for all of them: the next time the others are.
cdef int cache_blocks(
    ManagerState* m, int32_t row, int32_t g, int64_t num_tokens
) except -1 nogil
# Bring to the cache what `advance` will read and write for a step's busy requests.
cdef void prefetch_events(const ManagerState* m, const int32_t* rows) noexcept nogil
# Whether a prompt's end inside a block is as it will stay.
cdef bint tail_is_cached(
    const ManagerState* m, const Group* group, int32_t row
) noexcept nogil
# Whether block i of a request is one that a hit could need, and not cached already.
cdef bint to_be_cached(
    const ManagerState* m, const Group* group, int32_t row, int64_t i
) noexcept nogil
