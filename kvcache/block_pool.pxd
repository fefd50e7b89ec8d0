# vLLM v1's block pool as a Python class, and what compiled code may use of it.
from kvcache._types cimport HashSource, Key, block_id_t
from kvcache.block_store cimport BlockStore, KVCacheBlock
from kvcache.free_queue cimport FreeKVCacheBlockQueue
from kvcache.hash_index cimport BlockHashToBlockMap
from kvcache.kept_tokens cimport KeptTokens
from kvcache.pool_state cimport PoolState


cdef class BlockPool:
    cdef PoolState state
    cdef KeptTokens kept            # all zero unless the pool keeps tokens
    cdef BlockStore store
    cdef readonly FreeKVCacheBlockQueue free_block_queue
    cdef readonly BlockHashToBlockMap cached_block_hash_to_block
    cdef readonly bint enable_caching
    cdef readonly Py_ssize_t hash_block_size
    cdef readonly Py_ssize_t num_hash_lookahead_tokens
    cdef public bint enable_kv_cache_events
    cdef public object kv_event_queue
    cdef public object metrics_collector
    cdef public object medium
    cdef dict watchers      # block id -> on_reuse of unpin_blocks
    cdef block_id_t* scratch        # room for scratch_size ids, for one call's length
    cdef Py_ssize_t scratch_size
    cdef object __weakref__

    cdef int build(
        self, block_id_t num_blocks, bint enable_caching, Py_ssize_t kept_block_size
    ) except -1
    cdef block_id_t* room_for(self, Py_ssize_t n) except NULL
    cdef block_id_t* ids_of(self, object blocks, Py_ssize_t n) except NULL
    cdef KVCacheBlock own(self, object block)
    cdef KVCacheBlock cacheable(self, object block)
    cdef bint holds(self, KVCacheBlock block, const Key* key) except -1
    cdef int refuse(self, Py_ssize_t at, const block_id_t* ids, str why) except -1
    cdef int refuse_hash(
        self, Py_ssize_t at, const block_id_t* ids, bytes digest
    ) except -1
    cdef void emit(self, object event) noexcept
    cdef void emit_removed(self, list keys) noexcept
    cdef void after_get(self, list blocks) noexcept
    cdef void after_touch(self, list blocks) noexcept
    cdef Py_ssize_t count_free(self, object num_blocks) except -1
    cdef bint make_front_views(self, Py_ssize_t n) except -1
    cdef int keys_in_front(self, Py_ssize_t n, list keys) except -1
    cdef int require_free(self, list blocks) except -1
    cdef int free_by_pool(self, list blocks) except -1
    cdef Py_ssize_t match(
        self, const HashSource* source, Py_ssize_t limit, object group_id,
        block_id_t* ids,
    ) except -1
    cdef int write_hash(
        self, KVCacheBlock block, const Key* key, block_id_t num_tokens
    ) except -1
    cdef int drop_hashes(self, KVCacheBlock block, list removed) except -1
