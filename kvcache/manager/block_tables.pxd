# The block tables of a manager.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport Group
from kvcache.manager.requests cimport Requests


cdef class BlockTables(Requests):
    cdef int build(self, tuple groups, object max_num_requests) except -1
    cdef void free_tables(self) noexcept
    cdef int read_groups(self, tuple groups, Py_ssize_t in_flight) except -1
    cdef Group* group(self, object group_id) except NULL
    cdef int check_unshared(self, int32_t row, int64_t num_tokens) except -1
    cdef int check_window(self, int32_t row, int64_t num_tokens) except -1
    cdef Py_ssize_t table_bytes(self) noexcept
    cdef object row_view(self, const Group* group, int32_t row)
