# The evictor of Python's callers, over the heap in C (eviction_heap.pxd).
from libc.stdint cimport int64_t

from kvcache._types cimport block_id_t
from kvcache.prefix_caching.eviction_heap cimport EvictionHeap


cdef class BlockMetaData:
    cdef readonly object content_hash
    cdef readonly int64_t num_hashed_tokens
    cdef readonly double last_accessed


cdef class LRUEvictor:
    cdef EvictionHeap heap
    cdef dict rows          # block id -> row, in the order in which they were added
    cdef list hashes        # per row: content hash, or None

    cdef block_id_t row_of(self, object block_id) except -1
    cdef int reserve_row(self) except -1
    cdef tuple take(self, block_id_t row)
