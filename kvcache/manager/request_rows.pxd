# The rows of a manager's requests in C: given out, filled with hashes, taken back.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport UNUSED, ManagerState


cdef inline bint is_request(const ManagerState* m, Py_ssize_t row) noexcept nogil:
    return 0 <= row < m.max_requests and m.progress[row].status != UNUSED


# The row that the next request will have, without hashes as yet; -1 if there is none.
cdef int32_t next_row(ManagerState* m, int64_t num_tokens) noexcept nogil
# It is a request's from now on: one that waits.
cdef void open_row(ManagerState* m) noexcept nogil
# It is nobody's; it holds nothing any more.
cdef void close_row(ManagerState* m, int32_t row) noexcept nogil
# Room for `count` more block hashes; False if there is no memory.
cdef bint reserve_digests(
    ManagerState* m, int32_t row, Py_ssize_t count
) noexcept nogil
# There are more hashes: blocks may be cached that could not be.
cdef void wake(ManagerState* m, int32_t row) noexcept nogil
