# The requests of a manager.
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from kvcache.manager.manager_state cimport ManagerState


cdef class Requests:
    cdef ManagerState state
    cdef object hash_fn
    cdef bint keep_token_ids    # events tell them
    cdef list contents          # per row: RequestContent of a request in use, or None
    cdef list hashers           # per row: the BlockHasher of its tokens, or None
    cdef list vacant            # rows, the next one last

    cdef int make_rows(self, Py_ssize_t count) except -1
    cdef int check_not_serving(self) except -1
    cdef int check_row(self, Py_ssize_t row) except -1
    cdef int grow(self, int32_t row, object tokens, Py_ssize_t count) except -1
    cdef int cut(self, int32_t row, int64_t num_tokens) except -1
    cdef int32_t find_row(self, object row) except -1
    cdef cnp.ndarray as_rows(self, object rows)
    cdef void wake(self, int32_t row) noexcept
    cdef int add_hashes(self, int32_t row, object hashes) except -1
    cdef int32_t open_request(
        self, int64_t num_tokens, const uint8_t* digests, Py_ssize_t num_hashes,
        Py_ssize_t length,
    ) except -1
    cdef int append_digests(
        self, int32_t row, const uint8_t* digests, Py_ssize_t count
    ) except -1
    cdef int32_t next_row(self, int64_t num_tokens) except -1
    cdef int32_t open_row(self, int32_t row, object content) except -1
    cdef int reserve_digests(self, int32_t row, Py_ssize_t count) except -1
    cdef int forget(self, int32_t row) except -1
