# vLLM v0's prefix-caching allocator: blocks that share full blocks' content.
from kvcache._types cimport block_id_t
from kvcache.prefix_caching.blocks cimport BlockOwner, PrefixCachingBlock
from kvcache.prefix_caching.cached_blocks cimport CachedBlocks
from kvcache.prefix_caching.metric_data cimport CacheMetricData


cdef class PrefixCachingBlockAllocator(BlockOwner):
    cdef CachedBlocks blocks
    cdef readonly object eviction_policy
    cdef readonly CacheMetricData metric_data

    cdef int build(self, object num_blocks, object block_size, object ids) except -1
    cdef PrefixCachingBlock make(
        self, object prev_block, object token_ids, object extra_hash, bytes extra
    )
    cdef block_id_t cached_row(self, PrefixCachingBlock block) noexcept
    cdef list allocate_all(
        self,
        object prev_block,
        object block_token_ids,
        object extra_hash,
        bint may_have_tail,
    )
    # Whether it was a hit.
    cdef bint place(self, PrefixCachingBlock block) noexcept
