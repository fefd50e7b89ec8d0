"""vLLM's `KVCacheManager.allocate_slots`, the usual call in compiled code.

Stores: vLLM's own method, for all other calls, and the manager classes whose rules are
known here. Works on vLLM's objects: its lists of blocks, its dicts, its requests.
Invariant: it answers by itself only where vLLM's method would change nothing and return
no block: the request runs, has its slots, fills no block and gives none back.
Costs: some attribute reads a group, no Python call. Threads: as vLLM, one at a time.
"""
cimport cython

import logging

cdef object log = logging.getLogger("vllm.plugins.kvcache")
cdef set told = set()   # kinds of managers that were logged

# Set by `use`, from the vLLM that is there.
cdef object stock = None
cdef object full_attention = None
cdef object sliding_window = None
cdef object running = None


def use(method, full_attention_manager, sliding_window_manager, running_status):
    """Take vLLM's own method, its two managers' classes and the status RUNNING."""
    global stock, full_attention, sliding_window, running
    stock, running = method, running_status
    full_attention, sliding_window = full_attention_manager, sliding_window_manager


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
    return stock(
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
    cdef Py_ssize_t processed = -1
    cdef object name = request.request_id, group, blocks, cached, kind
    if num_new < 1 or num_lookahead < 0 or total > longest:
        return False
    for group in manager.coordinator.single_type_managers:
        kind = type(group)
        if kind is not full_attention and kind is not sliding_window:
            tell(kind)
            return False
        blocks = group.req_to_blocks
        if name not in blocks or name in group._partial_hit_reqs:
            return False
        blocks = blocks[name]
        size, held = group.block_size, len(blocks)
        if needed > held * size:
            return False
        if group.enable_caching:
            cached = group.num_cached_block
            # Of the tokens some may not be known or hashed: then vLLM sees to it.
            if name not in cached or total // size > <Py_ssize_t> cached[name]:
                return False
            if kind is full_attention and size != manager.block_pool.hash_block_size:
                return False
        if kind is sliding_window:
            if processed < 0:
                processed = max(computed - <Py_ssize_t> request.num_in_flight_tokens, 0)
            held = min(held, num_skipped(group, processed) // size)
            if held > 0 and not blocks[held - 1].is_null:
                return False
    return True


cdef Py_ssize_t num_skipped(object group, Py_ssize_t processed) except? -1:
    """Tokens at the start that a sliding window has passed."""
    cdef Py_ssize_t kept = group.sliding_window + group.extra_retained_tokens - 1
    return max(processed - kept, 0)


cdef int tell(object kind) except -1:
    """Log once that a kind of manager is served by vLLM's own method, and why."""
    if kind not in told:
        told.add(kind)
        log.info(
            "kvcache: vLLM's own allocate_slots serves requests with a %s, whose rules"
            " are not known here", kind.__name__,
        )
    return 0
