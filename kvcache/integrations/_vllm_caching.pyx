"""What vLLM's managers cache, find and free, in compiled code.

Stores: nothing. Works on vLLM's objects, as _vllm_slots.pyx.
Invariant: when a call goes to vLLM's method, nothing was changed.
Costs: a lookup a block. Threads: as vLLM, one at a time.
"""
# The rules are those of vLLM 0.33; 0.32 has the same, but for a lookahead of hashes.
cimport cython

from kvcache.block_pool cimport BlockPool
from kvcache.integrations._vllm_known cimport (
    as_blocks,
    cdiv,
    full_attention,
    full_spec,
    hybrid,
    is_known,
    manager_class,
    sliding_window,
    stock,
    tell,
    unitary,
    window_spec,
)

from kvcache.hashing import BlockHashListWithBlockSize

# -- cache, free -------------------------------------------------------------------


@cython.binding(True)
def cache_blocks(self, request, num_computed_tokens):
    """vLLM's `KVCacheCoordinator.cache_blocks`."""
    if is_known(self, "cache_blocks"):
        cache(self, request, num_computed_tokens)
    else:
        stock["KVCacheCoordinator.cache_blocks"](self, request, num_computed_tokens)


cdef int cache(object coordinator, object request, object num_computed) except -1:
    cdef object name = request.request_id, group
    cdef tuple groups = coordinator.single_type_managers
    cdef Py_ssize_t num_hashed = len(request.block_hashes), most, full, i
    cdef bint of_hybrid = type(coordinator) is hybrid, fresh, finer
    cdef list todo = []
    most = max(num_computed - coordinator.num_reprefillable_tokens, 0)
    for i in range(len(groups)):
        group = groups[i]
        if not group.enable_caching:
            continue
        if of_hybrid:
            most = coordinator.get_num_cacheable_tokens(num_computed, i)
        full = num_hashed * <Py_ssize_t> group.block_pool.hash_block_size
        full = min(most, full) // <Py_ssize_t> group.block_size
        fresh = group.num_cached_block.get(name, 0) < full
        finer = (
            type(group) is full_attention
            and group.block_size != group.block_pool.hash_block_size
        )
        if fresh and not caches_all(coordinator, group):
            tell("cache_blocks", "windows of which not every block can be hit")
            stock["KVCacheCoordinator.cache_blocks"](coordinator, request, num_computed)
            return 0
        if (fresh or finer) and group.kv_cache_spec.prefix_cacheable:
            todo.append((group, full if fresh else 0, most if finer else None))
    for group, num_full, tail in todo:
        if num_full:
            group.block_pool.cache_full_blocks(
                request,
                group.req_to_blocks[name],
                group.num_cached_block.get(name, 0),
                num_full,
                group.block_size,
                group.kv_cache_group_id,
            )
            group.num_cached_block[name] = num_full
        if tail is not None:
            group._cache_partial_tail_block(request, tail)
    return 0


cdef bint caches_all(object coordinator, object group) except -1:
    """Whether any full block may be hit, and so is cached."""
    if type(group) is full_attention:
        return True
    cdef Py_ssize_t size = group.block_size
    cdef Py_ssize_t alignment = group.cache_hit_alignment_tokens
    cdef Py_ssize_t needed = cdiv(group.sliding_window - 1, size)
    if coordinator.retention_interval is not None or alignment % size:
        return False
    return needed + bool(group.use_eagle) >= alignment // size


@cython.binding(True)
def free(self, request_id):
    """vLLM's `KVCacheCoordinator.free`."""
    cdef object group, blocks
    if not is_known(self, "free"):
        stock["KVCacheCoordinator.free"](self, request_id)
        return
    for group in self.single_type_managers:
        blocks = group.req_to_blocks.pop(request_id, ())
        group.num_cached_block.pop(request_id, None)
        group._partial_hit_reqs.pop(request_id, None)
        if blocks:
            group.block_pool.free_blocks(blocks[::-1])


# -- hits --------------------------------------------------------------------------


@cython.binding(True)
def get_computed_blocks(self, request, max_cache_hit_length=None):
    """vLLM's `KVCacheManager.get_computed_blocks`."""
    cdef object coordinator = self.coordinator, group
    cdef tuple given = (), hits
    if type(self) is not manager_class or type(coordinator) is not unitary:
        tell("get_computed_blocks", "several groups or of a derived manager")
    elif (
        self.enable_caching
        and not request.skip_reading_prefix_cache
        and not self.enable_kv_cache_events
        and is_known(coordinator, "get_computed_blocks")
    ):
        if max_cache_hit_length is None:
            max_cache_hit_length = request.num_tokens - 1
        group = coordinator.single_type_managers[0]
        hits, length = group.find_longest_cache_hit(
            request.block_hashes,
            max_cache_hit_length,
            [0],
            self.block_pool,
            group.kv_cache_spec,
            group.use_eagle,
            coordinator.block_size,
            coordinator.dcp_world_size,
            coordinator.pcp_world_size,
        )
        return as_blocks(self, hits), length, 0
    if max_cache_hit_length is not None:  # vLLM 0.32 does not take it
        given = (max_cache_hit_length,)
    return stock["KVCacheManager.get_computed_blocks"](self, request, *given)


@cython.binding(True)
def find_full(
    cls,
    block_hashes,
    max_length,
    kv_cache_group_ids,
    block_pool,
    kv_cache_spec,
    drop_eagle_block,
    alignment_tokens,
    dcp_world_size=1,
    pcp_world_size=1,
):
    """vLLM's `FullAttentionManager.find_longest_cache_hit`: one call of the pool."""
    cdef str name = "FullAttentionManager.find_longest_cache_hit"
    cdef Py_ssize_t size = kv_cache_spec.block_size, length
    cdef list hits, blocks
    if (
        cls is full_attention
        and type(kv_cache_spec) is full_spec
        and type(block_hashes) is list
        and isinstance(block_pool, BlockPool)
        and alignment_tokens % size == 0  # else a hit may end inside a block
        and dcp_world_size == 1
    ):
        hits = block_pool.match_prefix(
            hashes_of(block_hashes, max_length // size, size, block_pool),
            kv_cache_group_ids,
        )
        length = <Py_ssize_t> len(hits[0]) * size
        if drop_eagle_block and length:  # its KV values are computed again
            length -= size
        length -= length % <Py_ssize_t> alignment_tokens
        for blocks in hits:
            del blocks[length // size :]
        return tuple(hits), length
    tell(name, "other specs or lists, hits inside a block or blocks over several ranks")
    return stock[name](
        cls,
        block_hashes,
        max_length,
        kv_cache_group_ids,
        block_pool,
        kv_cache_spec,
        drop_eagle_block,
        alignment_tokens,
        dcp_world_size,
        pcp_world_size,
    )


@cython.binding(True)
def find_window(
    cls,
    block_hashes,
    max_length,
    kv_cache_group_ids,
    block_pool,
    kv_cache_spec,
    drop_eagle_block,
    alignment_tokens,
    dcp_world_size=1,
    pcp_world_size=1,
):
    """vLLM's `SlidingWindowManager.find_longest_cache_hit`."""
    cdef str name = "SlidingWindowManager.find_longest_cache_hit"
    if (
        cls is sliding_window
        and type(kv_cache_spec) is window_spec
        and type(block_hashes) is list
        and isinstance(block_pool, BlockPool)
        and dcp_world_size == pcp_world_size == 1
    ):
        return window_hits(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            bool(drop_eagle_block),
            alignment_tokens,
        )
    tell(name, "other specs or lists or blocks over several ranks")
    return stock[name](
        cls,
        block_hashes,
        max_length,
        kv_cache_group_ids,
        block_pool,
        kv_cache_spec,
        drop_eagle_block,
        alignment_tokens,
        dcp_world_size,
        pcp_world_size,
    )


cdef object hashes_of(list hashes, Py_ssize_t n, Py_ssize_t size, BlockPool pool):
    """Hashes of the first n blocks, of which each may have several."""
    cdef Py_ssize_t finer = pool.hash_block_size
    if size == finer:
        return hashes[:n]
    return BlockHashListWithBlockSize(hashes[: n * (size // finer)], finer, size)


cdef tuple window_hits(
    list block_hashes,
    Py_ssize_t max_length,
    object group_ids,
    BlockPool pool,
    object spec,
    bint drop,
    Py_ssize_t alignment,
):
    """The last place behind which the window's blocks are all cached."""
    cdef Py_ssize_t size = spec.block_size
    cdef Py_ssize_t needed = cdiv(spec.sliding_window - 1, size) + drop
    cdef Py_ssize_t most = max_length // size, run = 0, end = -1, i
    cdef object found, blocks, block, null = pool.null_block
    cdef object hashes = hashes_of(block_hashes, most, size, pool)
    cdef list hits = [[null] * most for _ in group_ids]
    for i in range(most - 1, -1, -1):
        found = pool.get_cached_block(hashes[i], group_ids)
        if not found:
            run = 0
            continue
        if run == 0 and (i + (not drop)) * size % alignment:
            continue
        for blocks, block in zip(hits, found):
            blocks[i] = block
        run += 1
        if run >= needed:
            end = i + run
            break
    if end < 0:
        # All that there is from the start on, though less than a window.
        end = run
        while end * size % alignment:
            end -= 1
    if drop and end > 0:
        end -= 1
        while end * size % alignment:
            end -= 1
    for blocks in hits:
        del blocks[end:]
    return tuple(hits), end * size
