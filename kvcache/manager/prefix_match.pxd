# The longest cached prefix of a request that all groups agree on.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport ManagerState


# Its length in tokens, at most max_length; the blocks are written to the start of the
# request's table rows, and their numbers to `num_hits`. The request holds no blocks.
cdef int64_t match_request(
    ManagerState* m, int32_t row, int64_t max_length
) noexcept nogil
# Whether the blocks found are still cached under the request's hashes.
cdef bint hits_hold(ManagerState* m, int32_t row) noexcept nogil
