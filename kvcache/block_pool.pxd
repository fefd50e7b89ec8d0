# vLLM v1's block pool as a Python class, and what compiled code may use of it.
from libc.stdint cimport uint64_t

from kvcache._types cimport HashSource, Key, block_id_t
from kvcache.block_store cimport BlockStore, KVCacheBlock
from kvcache.free_queue cimport FreeKVCacheBlockQueue
from kvcache.hash_index cimport BlockHashToBlockMap, HandMade
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
    cdef bint holds(self, KVCacheBlock block, const Key* key, HandMade made) noexcept
    cdef HandMade made_of(self, KVCacheBlock block, const Key* key)
    cdef int refuse(self, Py_ssize_t at, const block_id_t* ids, str why) except -1
    cdef int refuse_hash(
        self, Py_ssize_t at, const block_id_t* ids, bytes digest
    ) except -1
    cdef object event_queue(self)
    cdef int announce(self, object queue, list events) except -1
    cdef void announce_late(self, object queue, list events) noexcept
    cdef void after_get(self, list blocks, list due) noexcept
    cdef void after_touch(self, list blocks) noexcept
    cdef bint is_watched(self) noexcept
    cdef bint make_views(self, const block_id_t* ids, Py_ssize_t n) except -1
    cdef int append_lost_keys(
        self, const block_id_t* ids, Py_ssize_t n, list keys
    ) except -1
    cdef list take_told(
        self, block_id_t* into, Py_ssize_t n, const block_id_t* hits,
        Py_ssize_t num_hits, bint wanted,
    )
    cdef int touch_and_get(
        self, const block_id_t* hits, Py_ssize_t num_hits, block_id_t* into,
        Py_ssize_t n,
    ) except -1
    cdef int refuse_count(self, Py_ssize_t n) except -1
    cdef Py_ssize_t count_free(self, object num_blocks) except -1
    cdef bint make_front_views(self, Py_ssize_t n) except -1
    cdef int require_free(self, list blocks) except -1
    cdef int free_by_pool(self, list blocks) except -1
    cdef Py_ssize_t match(
        self, const HashSource* source, Py_ssize_t limit, object group_id,
        block_id_t* ids,
    ) except -1
    cdef void write_hash(
        self, KVCacheBlock block, const Key* key, block_id_t num_tokens, HandMade made
    ) noexcept
    cdef int commit_to(self, object queue, list events, list made) except -1
    cdef int check_to_cache(
        self, list table, list hashes, Py_ssize_t start, Py_ssize_t size,
        uint64_t suffix, list lost,
    ) except -1
    cdef int append_lost(
        self, list table, list hashes, Py_ssize_t i, Py_ssize_t k, uint64_t suffix,
        list lost,
    ) except -1
    cdef int append_keys_of(self, KVCacheBlock block, list keys) except -1
    cdef int lose_hashes(self, KVCacheBlock block) noexcept
