"""The vLLM that is there: its classes, its own methods, and what is known of both.

Stores: what `use` was given, and the reasons that were logged.
Invariant: a call is served by kvcache's methods only if its coordinator and all its
groups are of the classes whose rules are known. Threads: as vLLM, one at a time.
"""
import logging

from kvcache.block_pool cimport BlockPool

cdef object log = logging.getLogger("vllm.plugins.kvcache")
cdef set told = set()   # reasons that were logged

# Set by `use`.
cdef dict stock = {}
cdef object manager_class = None, blocks_class = None
cdef object unitary = None, hybrid = None, uncached = None
cdef object full_attention = None, sliding_window = None
cdef object full_spec = None, window_spec = None
cdef object running = None, waiting = None, preempted = None


def use(methods, manager, coordinator, single, interface, status):
    """Take vLLM's own methods by name, its modules, and `RequestStatus`."""
    global stock, manager_class, blocks_class, unitary, hybrid, uncached
    global full_attention, sliding_window, full_spec, window_spec
    global running, waiting, preempted
    manager_class, blocks_class = manager.KVCacheManager, manager.KVCacheBlocks
    unitary = coordinator.UnitaryKVCacheCoordinator
    hybrid = coordinator.HybridKVCacheCoordinator
    uncached = coordinator.KVCacheCoordinatorNoPrefixCache
    full_attention = single.FullAttentionManager
    sliding_window = single.SlidingWindowManager
    full_spec, window_spec = interface.FullAttentionSpec, interface.SlidingWindowSpec
    running, waiting, preempted = status.RUNNING, status.WAITING, status.PREEMPTED
    stock = methods
    told.clear()


cdef int tell(str call, str why) except -1:
    """Log once why a kind of calls is vLLM's own to serve."""
    if (call, why) not in told:
        told.add((call, why))
        log.info("kvcache: vLLM's own %s serves calls with %s", call, why)
    return 0


cdef bint is_known(object coordinator, str call) except -1:
    """Whether the rules of a coordinator and of all its groups are known here."""
    cdef object kind = type(coordinator), group
    if kind is not unitary and kind is not hybrid and kind is not uncached:
        tell(call, f"a {kind.__name__}, whose rules are not known here")
        return False
    for group in coordinator.single_type_managers:
        kind = type(group)
        if kind is not full_attention and kind is not sliding_window:
            tell(call, f"a {kind.__name__}, whose rules are not known here")
            return False
        if not isinstance(group.block_pool, BlockPool):
            tell(call, f"a {type(group.block_pool).__name__}, which is not kvcache's")
            return False
    return True


cdef Py_ssize_t num_skipped(object group, Py_ssize_t num_tokens) except? -1:
    """Tokens at the start that a window has passed."""
    if type(group) is full_attention:
        return 0
    cdef Py_ssize_t kept = group.sliding_window + group.extra_retained_tokens - 1
    return max(num_tokens - kept, 0)


cdef object as_blocks(object manager, tuple groups):
    """What the scheduler is given; the manager keeps one object for no blocks."""
    cdef object blocks
    for blocks in groups:
        if blocks:
            return blocks_class(groups)
    return manager.empty_kv_cache_blocks
