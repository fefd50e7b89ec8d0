# The block hashes of requests that grow.
from libc.stdint cimport int64_t

from kvcache.hashing.chain cimport CompiledHash
from kvcache.hashing.tokens cimport TokenSource


cdef class BlockHasher:
    cdef readonly Py_ssize_t block_size
    cdef readonly Py_ssize_t num_lookahead_tokens
    cdef readonly object hash_fn
    cdef CompiledHash compiled      # C form of hash_fn, or None
    cdef object parent              # of the first block
    cdef object extra_keys          # callable(start, end), or None
    cdef list hashes                # one for each block that is covered by tokens
    cdef int64_t* tokens            # owned; capacity of them, num_tokens written
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t num_tokens
    cdef bint busy                  # tokens are being read; foreign code may run
    cdef Py_ssize_t _num_blocks(self, Py_ssize_t num_tokens) noexcept
    cdef int _must_be_idle(self) except -1
    cdef int _reserve(self, Py_ssize_t count) except -1
    cdef void _copy(self, const TokenSource* source) noexcept
    cdef list _new_hashes(self, Py_ssize_t count)


cdef class RequestBlockHasher:
    cdef readonly Py_ssize_t hash_block_size
    cdef readonly Py_ssize_t num_hash_lookahead_tokens
    cdef readonly object caching_hash_fn
    cdef CompiledHash compiled
