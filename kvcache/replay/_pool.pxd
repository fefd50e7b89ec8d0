# A manager that a replay drives, and the totals of what it did.
from libc.stdint cimport int32_t, int64_t, uint8_t

from kvcache.manager.kv_cache_manager cimport KVCacheManager
from kvcache.manager.manager_state cimport ManagerState, Slots

cdef enum:
    KEY_BYTES = 16


cdef class ReplayedPool:
    cdef readonly KVCacheManager manager
    cdef ManagerState* m        # the manager's
    cdef Slots slots            # what the next request asks for
    cdef int64_t block_size
    cdef int64_t most_tokens    # that a request which fits can have
    cdef object digest          # hashlib's sha256, or None
    cdef char* text             # what goes into the digest next
    cdef Py_ssize_t text_length
    # Totals; `hashed` counts blocks given a hash, `blocks` all that requests held.
    cdef int64_t requests, skipped, prompt_tokens, hit_tokens, new_blocks, hashed
    cdef int64_t blocks, nanoseconds

    cdef int make(
        self, object num_blocks, object block_size, object num_requests,
        object longest, object record_assignment,
    ) except -1
    cdef int require_made(self) except -1
    cdef int32_t open(self, int64_t num_tokens, const uint8_t* keys) except -1
    cdef int64_t admit(self, int32_t row) except -2
    cdef int count_blocks(self, int32_t row, int64_t hit_tokens) except -1
    cdef int count_empty(self) except -1
    cdef int count_skipped(self) except -1
    cdef int write_text(self, const char* text, Py_ssize_t length) except -1
    cdef int write_number(self, int64_t number, char behind) except -1
    cdef int flush(self) except -1
    cdef int64_t evictions(self) noexcept
    cdef dict totals(self)
    cdef const void* data_of(self, object array, str kind, tuple shape) except NULL
