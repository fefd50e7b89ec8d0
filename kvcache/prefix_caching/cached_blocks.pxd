# Physical blocks by row: who uses them, what they hold, which goes next.
from libc.stdint cimport int64_t, uint8_t

from kvcache._types cimport BlockMeta, block_id_t
from kvcache.hash_index cimport HashIndex
from kvcache.prefix_caching.block_ids cimport BlockIds
from kvcache.prefix_caching.eviction_heap cimport EvictionHeap
from kvcache.prefix_caching.naive_block_allocator cimport NaiveBlockAllocator

# What is kept of a physical block while it is in use.
cdef struct Tracked:
    double last_accessed    # -1 if it was not said since the block was taken
    bint computed           # its KV values are there
    bint touched            # cached since the last mark_computed
    bint listed             # its row is in `touched`


cdef class CachedBlocks:
    cdef NaiveBlockAllocator hashless   # owns the rows, queues those without content
    cdef BlockIds ids
    cdef BlockMeta* rows
    cdef HashIndex index                # content hash -> the row that holds it
    cdef EvictionHeap heap              # free rows that hold content
    cdef Tracked* tracked               # per row
    cdef block_id_t* touched            # rows to mark as computed; num_touched of them
    cdef block_id_t num_touched

    # Bytes in C besides those of `hashless`.
    cdef Py_ssize_t nbytes(self) noexcept
    cdef Py_ssize_t num_free(self) noexcept
    cdef int require_free(self, Py_ssize_t n) except -1
    # Row that holds the content, or NO_ROW.
    cdef block_id_t find(self, const uint8_t* digest) noexcept
    # What `take` would take; there is a free row.
    cdef block_id_t first_free(self) noexcept
    cdef block_id_t take(self) noexcept
    # The rows that n calls of `take` would take, were none used in between; how many.
    cdef Py_ssize_t next_free(self, Py_ssize_t n, block_id_t* rows) except -1
    cdef void drop(self, block_id_t row, int64_t num_tokens) noexcept
    cdef void use(self, block_id_t row) noexcept
    cdef void put(self, block_id_t row, const uint8_t* digest) noexcept
    # The row is in use or cached.
    cdef void mark_accessed(self, block_id_t row, double when) noexcept
    cdef void mark_computed(self) noexcept
    cdef bint is_computed(self, block_id_t row) noexcept
    # Nobody uses a block.
    cdef void forget_all(self) noexcept
    cdef dict by_hash(self)
    cdef set touched_ids(self)
    cdef dict trackers(self)
    cdef int check(self) except -1


cdef class AllocatorEvictor:
    cdef CachedBlocks blocks
