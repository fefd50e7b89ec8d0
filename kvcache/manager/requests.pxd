# The requests of a manager.
from libc.stdint cimport int32_t, int64_t

from kvcache.manager.manager_state cimport ManagerState


cdef class Requests:
    cdef ManagerState state
    cdef object hash_fn
    cdef bint keep_token_ids    # events tell them
    cdef list contents          # per row: RequestContent of a request in use, or None
    cdef list hashers           # per row: the BlockHasher of its tokens, or None

    cdef int make_rows(self, Py_ssize_t count) except -1
    cdef void free_rows(self) noexcept
    cdef int check_not_serving(self) except -1
    cdef int check_row(self, Py_ssize_t row) except -1
    cdef int grow(self, int32_t row, object tokens, Py_ssize_t count) except -1
    cdef int cut(self, int32_t row, int64_t num_tokens) except -1
    cdef int32_t find_row(self, object row) except -1
    cdef object as_rows(self, object rows)
    cdef int reserve_hashes(
        self, int32_t row, object hashes, int64_t num_tokens
    ) except -1
    cdef void write_hashes(self, int32_t row, object hashes) noexcept
    cdef int32_t vacant_row(self, int64_t num_tokens) except -1
    cdef object content_of(self, int32_t row)
    cdef int forget(self, int32_t row) except -1
