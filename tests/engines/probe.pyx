# cython: language_level=3
"""What tests reach in no other way: the core's memory, to break it, and calls in C."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from kvcache cimport (
    BlockMeta,
    BlockPool,
    KVCacheManager,
    Slots,
    block_id_t,
    manager_add_request,
    manager_allocate_slots,
    manager_allocate_step,
    manager_append,
    manager_block_ids,
    manager_free,
    manager_match,
    manager_preempt,
    manager_slot_mapping,
    pool_cache,
    pool_evict,
)
from kvcache.hash_index cimport HashIndex, SideEntry, Slot
from kvcache.kept_tokens cimport KeptPrefix
from kvcache.manager.manager_state cimport GroupRow, Progress
from kvcache.prefix_caching.cached_blocks cimport CachedBlocks, Tracked
from kvcache.prefix_caching.eviction_heap cimport EvictionEntry, EvictionHeap
from kvcache.prefix_caching.evictor cimport LRUEvictor
from kvcache.prefix_caching.naive_block_allocator cimport NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator cimport (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter cimport RefCounter

import numpy as np

# -- memory ----------------------------------------------------------------------------
# Each gives arrays by the names of the fields in C; a number is an array of one.


cdef object rows_of(BlockMeta* rows, Py_ssize_t n):
    return np.asarray(<BlockMeta[:n]> rows)


cdef dict index_of(HashIndex* index):
    memory = {
        "slots": np.asarray(<Slot[: index.num_slots]> index.slots),
        "num_keys": np.asarray(<uint32_t[:1]> &index.num_keys),
        "num_side": np.asarray(<int32_t[:1]> &index.num_side),
    }
    if index.side != NULL:
        memory["side"] = np.asarray(<SideEntry[: index.side_capacity]> index.side)
        memory["first_side"] = np.asarray(
            <int32_t[: index.num_rows]> index.first_side
        )
    return memory


cdef dict heap_of(EvictionHeap* heap):
    return {
        "entries": np.asarray(<EvictionEntry[: heap.capacity]> heap.entries),
        "place": np.asarray(<int32_t[: heap.capacity]> heap.place),
        "added": np.asarray(<uint64_t[: heap.capacity]> heap.added),
        "count": np.asarray(<block_id_t[:1]> &heap.count),
    }


def pool_memory(BlockPool pool):
    memory = {
        "rows": rows_of(pool.state.rows, pool.state.num_blocks),
        "num_free": np.asarray(<block_id_t[:1]> &pool.state.queue.num_free),
        "entries": pool.cached_block_hash_to_block.entries,
        **index_of(pool.state.index),
    }
    if pool.state.kept != NULL:
        memory["prefixes"] = np.asarray(
            <KeptPrefix[: pool.state.num_blocks]> pool.state.kept.prefixes
        )
        memory["last_serial"] = np.asarray(
            <uint64_t[:1]> &pool.state.kept.last_serial
        )
    return memory


def manager_memory(KVCacheManager manager):
    cdef Py_ssize_t n = manager.state.max_requests
    cdef int32_t width = manager.state.groups[0].width
    return {
        "progress": np.asarray(<Progress[:n]> manager.state.progress),
        "group": np.asarray(<GroupRow[:n]> manager.state.groups[0].rows),
        "table": np.asarray(<int32_t[: n * width]> manager.state.groups[0].table),
        "step": np.asarray(<uint32_t[:1]> &manager.state.step),
    }


def naive_memory(NaiveBlockAllocator allocator):
    return {
        "rows": rows_of(allocator.queue.rows, allocator.ids.count),
        "num_free": np.asarray(<block_id_t[:1]> &allocator.queue.num_free),
    }


def cached_memory(PrefixCachingBlockAllocator allocator):
    cdef CachedBlocks blocks = allocator.blocks
    return {
        "tracked": np.asarray(<Tracked[: blocks.ids.count]> blocks.tracked),
        **naive_memory(blocks.hashless),
        **index_of(&blocks.index),
        **heap_of(&blocks.heap),
    }


def evictor_memory(LRUEvictor evictor):
    return {
        "rows": evictor.rows, "hashes": evictor.hashes, **heap_of(&evictor.heap)
    }


def counter_memory(RefCounter counter):
    return {"rows": rows_of(counter.store.rows, counter.ids.count)}


# -- calls -----------------------------------------------------------------------------


def add_request(
    KVCacheManager manager, int64_t num_tokens, bytes digests, Py_ssize_t num_hashes,
    Py_ssize_t length,
):
    return manager_add_request(
        &manager.state, num_tokens, <const uint8_t*> <char*> digests, num_hashes, length
    )


def append(
    KVCacheManager manager, int32_t row, int64_t num_tokens, bytes digests=b"",
    Py_ssize_t num_hashes=0,
):
    return manager_append(
        &manager.state, row, num_tokens, <const uint8_t*> <char*> digests, num_hashes
    )


def match(KVCacheManager manager, int32_t row, int64_t max_length=-1):
    return manager_match(&manager.state, row, max_length)


def allocate_slots(
    KVCacheManager manager, int32_t row, int64_t num_new=0, int64_t num_lookahead=0,
    int64_t num_external=0, int64_t num_encoder=0, int32_t reserved_blocks=0,
):
    cdef Slots slots
    memset(&slots, 0, sizeof(slots))
    slots.num_new, slots.num_lookahead = num_new, num_lookahead
    slots.num_external, slots.num_encoder = num_external, num_encoder
    slots.reserved_blocks = reserved_blocks
    return manager_allocate_slots(&manager.state, row, &slots)


def allocate_step(
    KVCacheManager manager, int32_t row, int32_t num_new, Py_ssize_t n=1,
    int64_t num_lookahead=0,
):
    cdef int32_t[64] starts
    return manager_allocate_step(
        &manager.state, &row, &num_new, n, num_lookahead, starts
    )


def preempt(KVCacheManager manager, int32_t row):
    return manager_preempt(&manager.state, row)


def free(KVCacheManager manager, int32_t row):
    return manager_free(&manager.state, row)


def has_block_ids(KVCacheManager manager, int32_t row, int32_t group):
    cdef int32_t num_blocks
    return manager_block_ids(&manager.state, row, group, &num_blocks) != NULL


def slot_mapping(
    KVCacheManager manager, int32_t row, int32_t num_new, int32_t group=0
):
    cdef int64_t[64] slots
    return manager_slot_mapping(&manager.state, &row, &num_new, 1, group, slots)


def cache(BlockPool pool, int32_t block, bytes digest, Py_ssize_t length):
    return pool_cache(
        &pool.state, &block, <const uint8_t*> <char*> digest, length, 1, 0
    )


def evict(BlockPool pool, int32_t block):
    return pool_evict(&pool.state, &block, 1)
