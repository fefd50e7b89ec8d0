"""vLLM's `KVCacheManager.allocate_slots` in compiled code.

Stores: nothing. Works on vLLM's objects: its dicts, its lists of blocks, its requests;
whoever reads those sees what vLLM's own code would have left.
Invariant: when a call goes to vLLM's method, nothing was changed.
Costs: some attribute reads a group, and the pool's calls. Threads: as vLLM, one at a
time.
"""
# The rules are those of vLLM 0.32 and 0.33, which are the same.
cimport cython

from kvcache._types cimport FLAG_NULL
from kvcache.block_pool cimport BlockPool
from kvcache.block_store cimport KVCacheBlock
from kvcache.integrations._vllm_caching cimport cache
from kvcache.integrations._vllm_known cimport (
    as_blocks,
    cdiv,
    full_attention,
    is_known,
    manager_class,
    num_skipped,
    preempted,
    running,
    sliding_window,
    stock,
    tell,
    waiting,
)


@cython.final
cdef class Call:
    """One call of `allocate_slots`."""

    cdef object request, name
    cdef object hits            # per group: a list or tuple of the blocks that were hit
    cdef bint adopts            # there are such, or tokens that a connector has
    cdef bint tracked           # the request's blocks are counted already
    cdef Py_ssize_t num_new, num_lookahead, num_local, num_external
    cdef Py_ssize_t total       # computed tokens of all kinds, not over the longest
    cdef Py_ssize_t longest     # max_model_len


@cython.binding(True)
def allocate_slots(
    self,
    request,
    num_new_tokens,
    num_new_computed_tokens=0,
    new_computed_blocks=None,
    num_lookahead_tokens=0,
    num_external_computed_tokens=0,
    delay_cache_blocks=False,
    num_encoder_tokens=0,
    full_sequence_must_fit=False,
    reserved_blocks=0,
    has_scheduled_reqs=True,
    skip_zeroing_group_ids=(),
):
    """vLLM's `KVCacheManager.allocate_slots`."""
    cdef Call call
    if (
        new_computed_blocks is None
        and type(num_new_tokens) is int
        and type(num_lookahead_tokens) is int
        and num_new_computed_tokens == 0
        and num_external_computed_tokens == 0
        and num_encoder_tokens == 0
        and reserved_blocks == 0
        and not delay_cache_blocks
        and not full_sequence_must_fit
        and request.status is running
        and is_settled(self, request, num_new_tokens, num_lookahead_tokens)
    ):
        return self.empty_kv_cache_blocks
    if num_encoder_tokens or type(self) is not manager_class:
        tell("allocate_slots", "encoder tokens or of a derived manager")
    elif (
        type(num_new_tokens) is int
        and type(num_new_computed_tokens) is int
        and type(num_lookahead_tokens) is int
        and type(num_external_computed_tokens) is int
        and type(reserved_blocks) is int
        and is_known(self.coordinator, "allocate_slots")
    ):
        call = Call.__new__(Call)
        call.num_new, call.num_lookahead = num_new_tokens, num_lookahead_tokens
        call.num_local = num_new_computed_tokens
        call.num_external = num_external_computed_tokens
        if read_call(call, self, request, new_computed_blocks):
            return serve(
                call,
                self,
                full_sequence_must_fit,
                delay_cache_blocks,
                reserved_blocks,
                has_scheduled_reqs,
                skip_zeroing_group_ids,
            )
    return stock["KVCacheManager.allocate_slots"](
        self,
        request,
        num_new_tokens,
        num_new_computed_tokens,
        new_computed_blocks,
        num_lookahead_tokens,
        num_external_computed_tokens,
        delay_cache_blocks,
        num_encoder_tokens,
        full_sequence_must_fit,
        reserved_blocks,
        has_scheduled_reqs,
        skip_zeroing_group_ids,
    )


cdef bint is_settled(
    object manager, object request, Py_ssize_t num_new, Py_ssize_t num_lookahead
) except -1:
    """Whether a running request has slots for its tokens and nothing else to do."""
    cdef Py_ssize_t computed = request.num_computed_tokens
    cdef Py_ssize_t longest = manager.max_model_len
    cdef Py_ssize_t total = computed + num_new
    cdef Py_ssize_t needed = min(total + num_lookahead, longest), size, held
    cdef object name = request.request_id, group, blocks, cached, kind
    if num_new < 1 or num_lookahead < 0 or total > longest:
        return False
    for group in manager.coordinator.single_type_managers:
        kind, blocks = type(group), group.req_to_blocks
        if kind is not full_attention and kind is not sliding_window:
            return False
        if name not in blocks or name in group._partial_hit_reqs:
            return False
        blocks = blocks[name]
        size, held = group.block_size, len(blocks)
        if needed > held * size:
            return False
        if group.enable_caching:
            cached = group.num_cached_block
            # Of the tokens some may not be known or hashed: then it is looked at.
            if name not in cached or total // size > <Py_ssize_t> cached[name]:
                return False
            if kind is full_attention and size != manager.block_pool.hash_block_size:
                return False
        if kind is sliding_window:
            held = min(held, num_skipped(group, processed(request, computed)) // size)
            if held > 0 and not blocks[held - 1].is_null:
                return False
    return True


cdef Py_ssize_t processed(object request, Py_ssize_t num_computed) except? -1:
    """Computed tokens that no step on its way still reads."""
    return max(num_computed - <Py_ssize_t> request.num_in_flight_tokens, 0)


cdef bint read_call(
    Call call, object manager, object request, object hit_blocks
) except -1:
    """Fill a call in; False if vLLM's own code is to see to it."""
    cdef object group, blocks
    cdef Py_ssize_t i = 0, num_tracked = 0
    if call.num_new < 0 or call.num_lookahead < 0 or call.num_external < 0:
        return False
    if call.num_new == 0 and call.num_local <= 0 and call.num_external == 0:
        return False
    call.request, call.name = request, request.request_id
    call.num_local += <Py_ssize_t> request.num_computed_tokens
    call.longest = manager.max_model_len
    call.total = min(call.num_local + call.num_external, call.longest)
    call.hits = manager.empty_kv_cache_blocks.blocks
    call.adopts = call.num_external > 0
    if hit_blocks is not None and hit_blocks.blocks is not call.hits:
        call.hits, call.adopts = hit_blocks.blocks, True
    for group in manager.coordinator.single_type_managers:
        blocks = call.hits[i]
        if type(blocks) is not list and type(blocks) is not tuple:
            return False
        num_tracked += call.name in group.num_cached_block
        if call.name in group._partial_hit_reqs or (
            blocks and call.num_local % <Py_ssize_t> group.block_size
        ):
            tell("allocate_slots", "hits that end inside a block")
            return False
        if blocks and (num_tracked or not group.enable_caching):
            return False
        if call.adopts and not num_tracked and group.req_to_blocks.get(call.name):
            return False
        i += 1
    call.tracked = num_tracked > 0
    return num_tracked == 0 or num_tracked == i


cdef object serve(
    Call call,
    object manager,
    bint must_fit,
    bint delay,
    Py_ssize_t reserved,
    bint others_run,
    object unzeroed_groups,
):
    """vLLM's stages: give back what is skipped, take the hits, take new blocks."""
    cdef object coordinator = manager.coordinator, request = call.request
    cdef object group, status
    cdef tuple groups = coordinator.single_type_managers
    cdef BlockPool pool = manager.block_pool
    cdef Py_ssize_t watermark = 0, num_tokens = request.num_tokens, slots, i = 0
    if others_run:
        status = request.status
        if status is waiting or status is preempted:
            watermark = manager.watermark_blocks
    if must_fit:
        slots = min(num_tokens, call.longest)
        if watermark + num_needed(call, groups, slots, call.total, True) > (
            pool.state.queue.num_free
        ):
            return None
    slots = min(call.total + call.num_new + call.num_lookahead, call.longest)
    for group in groups:
        if type(group) is sliding_window:
            remove_skipped(group, call.name, processed(request, call.total))
    if watermark + num_needed(
        call, groups, slots, call.num_local + call.num_external, False
    ) > pool.state.queue.num_free - reserved:
        return None
    if call.adopts and not call.tracked:
        # First all hits, lest one group's new blocks evict another's.
        for group in groups:
            adopt(call, group, call.hits[i])
            i += 1
        if call.num_external:
            for i in range(len(groups)):
                groups[i].allocate_external_computed_blocks(
                    call.name,
                    call.num_local,
                    call.num_external,
                    record_for_zeroing=i not in unzeroed_groups,
                )
    cdef list taken = [take_new(group, call.name, slots) for group in groups]
    if not delay:
        cache(coordinator, request, min(call.total + call.num_new, num_tokens))
    return as_blocks(manager, tuple(taken))


cdef Py_ssize_t num_needed(
    Call call, tuple groups, Py_ssize_t slots, Py_ssize_t computed, bint admission
) except -1:
    """Free blocks that so many slots take, hits that are free included."""
    cdef Py_ssize_t total = 0, size, required, held, skipped, i, at = 0
    cdef object group, most, hits
    cdef KVCacheBlock block
    for group in groups:
        size, hits = group.block_size, call.hits[at]
        at += 1
        required = cdiv(slots, size)
        if admission:
            most = group.max_admission_blocks_per_request
            if most is not None:
                required = min(required, <Py_ssize_t> most)
        held = len(group.req_to_blocks.get(call.name, ()))
        if call.tracked:
            total += max(required - held, 0)
            continue
        skipped = num_skipped(group, computed) // size
        total += max(required - max(skipped, <Py_ssize_t> len(hits) + held), 0)
        for i in range(max(0, skipped - held), len(hits)):
            block = hits[i]
            total += block.row.ref_cnt == 0 and not block.row.flags & FLAG_NULL
    return total


cdef int remove_skipped(object group, object name, Py_ssize_t num_tokens) except -1:
    """Give back the blocks that a window has passed; a null block stands for each."""
    cdef Py_ssize_t skipped = num_skipped(group, num_tokens), i
    cdef object null = group._null_block
    cdef list blocks, freed = []
    if skipped <= 0:
        return 0
    blocks = group.req_to_blocks[name]
    skipped = min(skipped // <Py_ssize_t> group.block_size, len(blocks))
    for i in range(skipped - 1, -1, -1):
        if blocks[i] is null:
            break
        freed.append(blocks[i])
        blocks[i] = null
    if freed:
        group.block_pool.free_blocks(freed)
    return 0


cdef int adopt(Call call, object group, object hits) except -1:
    """Give a request, which has none, the blocks that were hit."""
    cdef Py_ssize_t size = group.block_size
    cdef Py_ssize_t skipped = num_skipped(group, call.num_local + call.num_external)
    cdef list blocks = group.req_to_blocks[call.name]
    skipped //= size
    if skipped:
        hits = hits[skipped:]
    if group.enable_caching:
        group.block_pool.touch(hits)
    blocks.extend([group._null_block] * skipped)
    blocks.extend(hits)
    group.num_cached_block[call.name] = len(blocks)
    return 0


cdef list take_new(object group, object name, Py_ssize_t slots):
    """Give a request the blocks that it lacks."""
    cdef list blocks = group.req_to_blocks[name], taken
    cdef Py_ssize_t n = cdiv(slots, group.block_size) - len(blocks)
    if n <= 0:
        return []
    taken = group.block_pool.get_new_blocks(n)
    blocks.extend(taken)
    if group._record_new_block_ids:
        group.new_block_ids.extend([block.block_id for block in taken])
    return taken
