"""vLLM v1's block pool, compiled: allocate, free, touch, cache, evict, reset.

Stores: a `BlockStore`, its free queue, its hash index and, if asked to, the tokens of
cached blocks; beside them only flags, the event queue and `unpin_blocks`' watchers.
Invariant: `check()` proves all of them (see invariants.pyx). A failed call changes
nothing: a batch is checked before its first write, and whatever can run foreign code
(making objects, reading requests) comes before the check.
Costs: every operation is O(1) a block, whatever the pool's size and content.
Threads: one at a time. Each call is atomic; no method gives up the GIL.
"""
cimport cython
cimport numpy as cnp
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

import logging

from kvcache._args cimport (
    as_group_id,
    as_hashes,
    as_ids,
    as_int,
    as_list,
    check_digest,
    check_hashes,
    new_ids,
    next_digests,
    no_copy,
    read_key,
)
from kvcache._lock cimport kvc_lend
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport (
    ANCHOR,
    FLAG_NULL,
    FLAG_TOKENS_KEPT,
    MAX_BLOCKS,
    NO_NUM_TOKENS,
    NULL_BLOCK,
    BlockMeta,
    clear_hash,
    has_hash,
    group_suffix,
    make_key,
    row_has_key,
)
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    SIDE_ALIAS,
    HashIndex,
    index_add_row,
    index_add_side,
    index_chain,
    index_clear,
    index_has_side,
    index_drop_block,
    index_find,
    index_is_far,
    index_match,
    index_prefetch_key,
    HandMade,
    hand_made_of,
    key_bytes,
)
from kvcache.hashing.keyed_hash cimport KEYED_BYTES, Keyed, KeyedHash, as_tokens
from kvcache.invariants cimport check_pool
from kvcache.kept_tokens cimport (
    kept_bytes,
    kept_free,
    kept_init,
    kept_match,
    kept_move,
)
from kvcache.pool_state cimport (
    FLAG_IN_BATCH,
    Freed,
    PoolState,
    cache_block,
    drop_reference,
    evict_taken,
    freed_init,
    is_block,
    pool_can_cache,
    pool_can_free,
    pool_evict,
    pool_free,
    pool_front,
    pool_get,
    pool_touch,
    pool_unpin,
    return_freed,
    set_first,
    take_first,
    undo_drop,
)
from kvcache.token_match cimport (
    TokenParent,
    cache_tokens,
    hash_behind,
    match_tokens,
    read_parent,
    tokens_behind,
)

from kvcache import pool_events
from kvcache.errors import BlockStateError, NoFreeBlocksError
from kvcache.events import MEDIUM_GPU, event_classes
from kvcache.hashing.block_hashes import pick_block_hashes
from kvcache.pool_views import AliasesByBlock

cnp.import_array()

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(PyObject*)
    void* Py_TYPE(PyObject*)

cdef enum:
    MAX_INT32 = 2147483647

logger = logging.getLogger(__name__)

cdef str OVERFREED = "is freed more often than it is used"


cdef const KeyedHash* keyed_of(object hasher) except NULL:
    if type(hasher) is not Keyed:
        raise TypeError(f"hasher must be a Keyed, got {hasher!r}")
    return &(<Keyed> hasher).hasher


cdef void prefetch_keys(
    const HashIndex* index, list hashes, Py_ssize_t start, uint64_t suffix
) noexcept:
    """Have the slots of the next hashes, which are digests, brought to the cache."""
    cdef Key key
    cdef bytes digest
    cdef Py_ssize_t i
    for i in range(start, min(start + <Py_ssize_t> MATCH_CHUNK, len(hashes))):
        digest = <bytes> hashes[i]
        make_key(&key, <const uint8_t*> <char*> digest, len(digest), suffix)
        index_prefetch_key(index, &key)


cdef void run_hook(object owner, str name, object argument) noexcept:
    """Call a hook; what it raises goes to sys.unraisablehook."""
    hook = getattr(owner, name) if name is not None else owner
    if argument is None:
        hook()
    else:
        hook(argument)


@cython.no_gc_clear
cdef class BlockPool:
    """Blocks of a KV cache: who uses them, what they hold, which goes next.

    A drop-in for vLLM 0.33's `BlockPool` (v1/core/block_pool.py): same ids in the same
    order, same hashes, same events. Every method has an array form with int32 ids.
    Block 0 is the null block: it stands for "no block" in a table, and is never handed
    out, counted, or cached.

    Args:
        num_gpu_blocks: Number of blocks, the null block included; at least 1.
        enable_caching: Whether freed blocks keep their content for later hits.
        hash_block_size: Tokens that each of a request's block hashes adds.
        enable_kv_cache_events: Whether to record events for `take_events`.
        metrics_collector: Object with vLLM's hooks `on_block_allocated`,
            `on_block_accessed`, `on_block_evicted` and `reset`, or None.
        num_hash_lookahead_tokens: Tokens behind each block that its hash covers.
        medium: Where the blocks are, as events say it.
        keep_tokens: Whether `cache_block_tokens` keeps the blocks' tokens and
            `match_prefix_tokens` compares them, so that no collision of hashes can
            give a prompt the blocks of another.

    Raises:
        TypeError, ValueError: An argument is not of its type or range, or keep_tokens
            is asked for without enable_caching.
        MemoryError: There is not that much memory (80 bytes a block, and to keep
            tokens 16 + 4 hash_block_size more: another 80 at 16).
    """

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds an empty pool.
        self.watchers = {}
        self.hash_block_size = 1
        self.build(0, False, 0)

    @cython.critical_section
    def __init__(
        self,
        num_gpu_blocks,
        enable_caching,
        hash_block_size,
        enable_kv_cache_events=False,
        metrics_collector=None,
        num_hash_lookahead_tokens=0,
        medium=MEDIUM_GPU,
        *,
        keep_tokens=False,
    ):
        cdef Py_ssize_t n = as_int(num_gpu_blocks, "num_gpu_blocks", 1, MAX_BLOCKS)
        cdef Py_ssize_t size = as_int(hash_block_size, "hash_block_size", 1, MAX_BLOCKS)
        cdef Py_ssize_t lookahead = as_int(
            # vLLM passes its "one or none" here as a bool.
            int(num_hash_lookahead_tokens)
            if isinstance(num_hash_lookahead_tokens, bool)
            else num_hash_lookahead_tokens,
            "num_hash_lookahead_tokens", 0, MAX_BLOCKS,
        )
        cdef bint caching = enable_caching, keep = keep_tokens
        cdef bint events = enable_kv_cache_events
        if keep and not caching:
            raise ValueError("keep_tokens needs enable_caching")
        if self.state.num_blocks:
            raise ValueError("the pool is already made")
        # Through the attribute: a subclass may hold the queue elsewhere.
        (<object> self).kv_event_queue = []
        self.build(<block_id_t> n, caching, size if keep else 0)
        self.hash_block_size = size
        self.num_hash_lookahead_tokens = lookahead
        self.enable_kv_cache_events = events
        self.metrics_collector = metrics_collector
        self.medium = medium

    def __dealloc__(self):
        if self.store is not None:  # else it was never made whole
            with cython.critical_section(self):
                self.store.owner = NULL
        deallocate(self.scratch)
        kept_free(&self.kept)

    def __reduce__(self):
        raise no_copy(self)

    cdef int build(
        self, block_id_t num_blocks, bint enable_caching, Py_ssize_t kept_block_size
    ) except -1:
        cdef BlockStore store = BlockStore(num_blocks)
        cdef BlockHashToBlockMap index = BlockHashToBlockMap.for_pool(
            store, enable_caching
        )
        cdef FreeKVCacheBlockQueue queue = FreeKVCacheBlockQueue.for_pool(store)
        cdef block_id_t i
        if num_blocks:
            store.rows[NULL_BLOCK].flags = FLAG_NULL
            for i in range(1, num_blocks):
                store.rows[i].prev_free_block = i - 1
                store.rows[i].next_free_block = i + 1
            if num_blocks > 1:
                store.rows[1].prev_free_block = ANCHOR
                store.rows[num_blocks - 1].next_free_block = ANCHOR
                store.rows[ANCHOR].next_free_block = 1
                store.rows[ANCHOR].prev_free_block = num_blocks - 1
            queue.queue.num_free = num_blocks - 1
        if kept_block_size:
            kept_init(&self.kept, num_blocks, kept_block_size)
        # From here on nothing fails.
        if self.store is not None:
            self.store.owner = NULL
        store.owner = <PyObject*> self
        kvc_lend(store.owner)
        self.store, self.free_block_queue = store, queue
        self.cached_block_hash_to_block = index
        self.enable_caching = enable_caching
        self.state.rows = store.rows
        self.state.num_blocks = num_blocks
        self.state.enable_caching = enable_caching
        self.state.queue = &queue.queue
        self.state.index = &index.index
        self.state.kept = &self.kept if kept_block_size else NULL
        return 0

    @property
    @cython.critical_section
    def num_gpu_blocks(self):
        """Number of blocks, the null block included."""
        return self.state.num_blocks

    @property
    @cython.critical_section
    def blocks(self):
        """All blocks by id: a sequence of KVCacheBlock, made as they are asked for."""
        return self.store

    @property
    @cython.critical_section
    def null_block(self):
        """Block 0."""
        if self.state.num_blocks == 0:
            raise ValueError("the pool was not initialised")
        return self.store.view(NULL_BLOCK)

    @property
    @cython.critical_section
    def cached_block_hashes_by_block(self):
        """Further keys of blocks that have several: mapping of id to set of keys."""
        return AliasesByBlock(self.cached_block_hash_to_block)

    @property
    @cython.critical_section
    def _reuse_watchers(self):
        return self.watchers

    @property
    @cython.critical_section
    def keep_tokens(self):
        """Whether the tokens of cached blocks are kept and compared."""
        return self.state.kept != NULL

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C; Python objects are not counted."""
        return (
            self.store.nbytes
            + self.cached_block_hash_to_block.nbytes
            + kept_bytes(&self.kept)
            + self.scratch_size * sizeof(block_id_t)
        )

    # -- arguments ---------------------------------------------------------------

    cdef block_id_t* room_for(self, Py_ssize_t n) except NULL:
        """Scratch for n ids; what it held is lost."""
        cdef block_id_t* bigger
        if n >= self.scratch_size:
            bigger = <block_id_t*> allocate(2 * n + 64, sizeof(block_id_t), "ids")
            deallocate(self.scratch)
            self.scratch, self.scratch_size = bigger, 2 * n + 64
        return self.scratch

    cdef block_id_t* ids_of(self, object blocks, Py_ssize_t n) except NULL:
        """Ids of a list of this pool's blocks, in scratch; null blocks become id 0."""
        cdef block_id_t* ids = self.room_for(n)
        cdef PyObject** items = PySequence_Fast_ITEMS(<PyObject*> blocks)
        cdef KVCacheBlock block
        cdef Py_ssize_t i
        for i in range(n):
            block = <KVCacheBlock> items[i]
            if (
                Py_TYPE(items[i]) == <void*> KVCacheBlock
                and block.store == <PyObject*> self.store
                and block.index != ANCHOR
            ):
                ids[i] = block.index
            else:
                self.own(<object> items[i])  # raises, but for a null block
                ids[i] = NULL_BLOCK
        return ids

    cdef KVCacheBlock own(self, object block):
        """The block, which is this pool's or a null block."""
        if type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock, got {block!r}")
        cdef KVCacheBlock ours = block
        if ours.store != <PyObject*> self.store or ours.index == ANCHOR:
            if not ours.row.flags & FLAG_NULL:
                raise ValueError(f"block {ours.id} does not belong to this pool")
        return ours

    cdef int refuse(self, Py_ssize_t at, const block_id_t* ids, str why) except -1:
        """Say why the id at a place of a batch cannot be taken."""
        cdef block_id_t block = ids[at]
        if not is_block(&self.state, block):
            raise ValueError(
                f"block id {block} is not one of the pool's {self.state.num_blocks}"
            )
        raise ValueError(
            f"block {block} {why} (ref_cnt {self.state.rows[block].ref_cnt})"
        )

    cdef int refuse_hash(
        self, Py_ssize_t at, const block_id_t* ids, bytes digest
    ) except -1:
        """Say why the id at a place of a batch cannot be given a hash."""
        cdef block_id_t block = ids[at]
        if not is_block(&self.state, block):
            self.refuse(at, ids, "")
        raise BlockStateError(
            f"block {block} carries the hash {self.store.view(block).block_hash!r} or"
            f" is listed twice, it cannot take {digest!r}"
        )

    # -- events and hooks --------------------------------------------------------

    cdef object event_queue(self):
        """Where events go, or None if they are off.

        Read by each call: a subclass may hold the queue elsewhere. What that raises
        does not stop the call, but for a lack of memory.
        """
        if not self.enable_kv_cache_events:
            return None
        try:
            return (<object> self).kv_event_queue
        except MemoryError:
            raise
        except Exception:
            return ()  # no list: `announce_late` reads it again

    cdef int announce(self, object queue, list events) except -1:
        """Append events, just before they come true: all, or none and an error.

        Runs no foreign code. A queue that is no list gets them afterwards.
        """
        if type(queue) is list:
            (<list> queue).extend(events)
        return 0

    cdef void announce_late(self, object queue, list events) noexcept:
        if queue is not None and type(queue) is not list:
            for event in events:
                (<object> self).kv_event_queue.append(event)

    cdef void after_get(self, list blocks, list due) noexcept:
        """Run the hooks of blocks that were handed out, in vLLM's order.

        `due` are the ids, in the same order, of those that have watchers.
        """
        for block_id in due:
            watcher = self.watchers.pop(block_id, None)
            if watcher is not None:
                run_hook(watcher, None, self.store.view(block_id))
        collector = self.metrics_collector
        if collector is not None:
            for block in blocks:
                if self.state.enable_caching:
                    run_hook(collector, "on_block_evicted", block)
                run_hook(collector, "on_block_allocated", block)

    # -- allocate and free -------------------------------------------------------

    cdef Py_ssize_t count_free(self, object num_blocks) except -1:
        """The number asked for, which is not more than are free."""
        cdef Py_ssize_t n = as_int(num_blocks, "num_blocks", 0, MAX_BLOCKS)
        if n > self.state.queue.num_free:
            self.refuse_count(n)
        return n

    cdef int refuse_count(self, Py_ssize_t n) except -1:
        raise NoFreeBlocksError(
            f"Cannot get {n} free blocks from the pool:"
            f" {self.state.queue.num_free} are free"
        )

    cdef bint make_front_views(self, Py_ssize_t n) except -1:
        """Make the views that the first n free blocks lack; whether there were any.

        Making one may run foreign code, which may change the queue: the caller asks
        again until there were none.
        """
        cdef block_id_t block = self.state.rows[ANCHOR].next_free_block
        cdef bint made = False
        while n > 0 and block >= 0:
            if self.store.views == NULL or self.store.views[block] == NULL:
                self.store.view(block)
                made = True
            block = self.state.rows[block].next_free_block
            n -= 1
        return made

    cdef bint is_watched(self) noexcept:
        """Whether what is handed out is to be told of."""
        return (
            self.enable_kv_cache_events
            or self.metrics_collector is not None
            or bool(self.watchers)
        )

    cdef bint make_views(self, const block_id_t* ids, Py_ssize_t n) except -1:
        """Make the views that blocks lack; whether there were any."""
        cdef bint made = False
        cdef Py_ssize_t i
        for i in range(n):
            if self.store.views == NULL or self.store.views[ids[i]] == NULL:
                self.store.view(ids[i])
                made = True
        return made

    cdef int append_lost_keys(
        self, const block_id_t* ids, Py_ssize_t n, list keys
    ) except -1:
        """Append the keys that blocks would lose; runs no foreign code."""
        cdef BlockMeta* rows = self.state.rows
        cdef Py_ssize_t i, done = 0
        try:
            for i in range(n):
                if not rows[ids[i]].flags & FLAG_IN_BATCH:
                    self.cached_block_hash_to_block.append_keys(ids[i], keys, True)
                rows[ids[i]].flags |= FLAG_IN_BATCH
                done = i + 1
        finally:
            for i in range(done):
                rows[ids[i]].flags &= ~<uint8_t> FLAG_IN_BATCH
        return 0

    cdef list take_told(
        self, block_id_t* into, Py_ssize_t n, const block_id_t* hits,
        Py_ssize_t num_hits, bint wanted,
    ):
        """Touch hits and hand out n blocks, with events and hooks: both, or an error.

        The ids go to `into`, which is not the pool's scratch: hooks may use that.

        Returns:
            The views of the blocks handed out; [] unless they are wanted or needed.
        """
        cdef bint viewed
        cdef object queue = self.event_queue(), collector
        cdef list keys = [], again = [], events = []
        cdef list blocks = [], touched = [], due = []
        cdef Py_ssize_t i
        # What is made here may run foreign code, which may change the pool: it is
        # looked at again until nothing was made.
        while True:
            for i in range(num_hits):
                if not is_block(&self.state, hits[i]):
                    self.refuse(i, hits, "")
            if pool_front(&self.state, hits, num_hits, into, n) < n:
                self.refuse_count(n)
            viewed = wanted or self.metrics_collector is not None or self.watchers
            if viewed and (
                self.make_views(into, n) or self.make_views(hits, num_hits)
            ):
                continue
            if queue is not None and self.state.enable_caching:
                again.clear()
                self.append_lost_keys(into, n, again)
                if again != keys:
                    keys, again = again, keys
                    events = pool_events.removed_events(self, keys)
                    continue
            break
        if viewed:
            for i in range(n):
                blocks.append(self.store.view(into[i]))
                if into[i] in self.watchers:
                    due.append(into[i])
            for i in range(num_hits):
                if hits[i] != NULL_BLOCK:
                    touched.append(self.store.view(hits[i]))
        self.announce(queue, events)
        # From here on nothing fails.
        pool_touch(&self.state, hits, num_hits)
        pool_get(&self.state, into, n)
        self.announce_late(queue, events)
        collector = self.metrics_collector
        if collector is not None:
            for block in touched:
                run_hook(collector, "on_block_accessed", block)
        self.after_get(blocks, due)
        return blocks

    cdef int touch_and_get(
        self, const block_id_t* hits, Py_ssize_t num_hits, block_id_t* into,
        Py_ssize_t n,
    ) except -1:
        """Touch blocks in use and hand out n others: both, or none and an error."""
        if self.is_watched():
            self.take_told(into, n, hits, num_hits, False)
        else:
            if n > self.state.queue.num_free:
                self.refuse_count(n)
            pool_touch(&self.state, hits, num_hits)
            pool_get(&self.state, into, n)
        return 0

    @cython.critical_section
    def get_new_blocks(self, num_blocks):
        """Hand out blocks from the front of the free queue, one reference each.

        What they held is evicted. Prefix hits are the caller's to look up first.

        Raises:
            NoFreeBlocksError: Fewer are free.
            TypeError, ValueError: num_blocks is not an int from 0 on.
        """
        cdef Py_ssize_t n = self.count_free(num_blocks), i
        cdef bint holding = False
        cdef block_id_t block
        cdef PyObject* view
        cdef cnp.ndarray ids
        if self.is_watched():
            ids = new_ids(n)
            return self.take_told(
                <block_id_t*> cnp.PyArray_DATA(ids), n, NULL, 0, True
            )
        cdef list blocks = PyList_New(n)
        self.room_for(n)
        # From the last of these on, nothing runs that could change the queue.
        while (
            self.store.num_views < self.state.num_blocks - 1
            and self.make_front_views(n)
        ):
            pass
        if n > self.state.queue.num_free:
            self.refuse_count(n)
        block = self.state.rows[ANCHOR].next_free_block
        for i in range(n):
            view = self.store.views[block]
            Py_INCREF(<object> view)
            PyList_SET_ITEM(blocks, i, <object> view)
            self.scratch[i] = block
            block = take_first(&self.state, block, &holding)
        set_first(&self.state, block, n)
        if holding:
            evict_taken(&self.state, self.scratch, n)
        return blocks

    @cython.critical_section
    def get_new_block_ids(self, n):
        """As `get_new_blocks`; the ids, int32, shape (n,)."""
        cdef Py_ssize_t count = self.count_free(n)
        cdef cnp.ndarray ids = new_ids(count)
        cdef block_id_t* data = <block_id_t*> cnp.PyArray_DATA(ids)
        if self.is_watched():
            self.take_told(data, count, NULL, 0, False)
        elif pool_get(&self.state, data, count) < 0:
            self.refuse_count(count)
        return ids

    @cython.critical_section
    def free_blocks(self, ordered_blocks):
        """Take back one reference of each block, listed first to be evicted first.

        Blocks without users return to the free queue: cached ones at the back, others
        at the front, each in the order given (all at the front if caching is off). A
        block listed k times gives k references. Null blocks are skipped; a block of
        another pool goes to that pool; one made by hand gives a reference, if it has
        one, and goes nowhere (vLLM's tests free such blocks).

        Raises:
            ValueError: A block has fewer references than are taken, or its pool is
                gone. Nothing was freed.
            TypeError: An element is not a KVCacheBlock. Nothing was freed.
        """
        ordered_blocks = as_list(ordered_blocks)
        cdef Py_ssize_t n = len(<list> ordered_blocks)
        cdef PyObject** items = PySequence_Fast_ITEMS(<PyObject*> ordered_blocks)
        cdef KVCacheBlock block
        cdef Freed freed
        cdef Py_ssize_t i, k
        freed_init(&self.state, &freed, False)
        for i in range(n):
            block = <KVCacheBlock> items[i]
            if (
                Py_TYPE(items[i]) == <void*> KVCacheBlock
                and block.store == <PyObject*> self.store
                and block.index != ANCHOR
            ):
                if block.index == NULL_BLOCK:
                    continue
                if drop_reference(&self.state, block.row, block.index, &freed):
                    continue
            # Not ours, or not in use: undo, and let the slow way tell.
            for k in range(i):
                block = <KVCacheBlock> items[k]
                if block.index != NULL_BLOCK:
                    undo_drop(block.row)
            self.free_by_pool(ordered_blocks)
            return
        return_freed(&self.state, &freed)

    cdef int require_free(self, list blocks) except -1:
        """Prove that `free_blocks` of this pool's blocks would succeed."""
        cdef Py_ssize_t n = len(blocks)
        cdef block_id_t* ids = self.ids_of(blocks, n)
        cdef Py_ssize_t bad = pool_can_free(&self.state, ids, n)
        if bad >= 0:
            self.refuse(bad, ids, OVERFREED)
        return 0

    cdef int free_by_pool(self, list blocks) except -1:
        """Free blocks of several pools: check all, then each pool frees its own."""
        cdef dict by_pool = {id(self): (self, [])}
        cdef list hand_made = []
        cdef KVCacheBlock block
        for item in blocks:
            if type(item) is not KVCacheBlock:
                raise TypeError(f"expected a KVCacheBlock, got {item!r}")
            block = item
            if block.row.flags & FLAG_NULL:
                continue
            pool = block.pool
            if block.is_end() or (
                pool is None and (block.loose is None or block.loose.orphan)
            ):
                raise ValueError(f"block {block.id} does not belong to a pool")
            if block.loose is not None and (
                pool is None or isinstance(pool, BlockPool)
            ):
                hand_made.append(block)
                continue
            by_pool.setdefault(id(pool), (pool, []))[1].append(block)
        cdef list own = [], others = []
        for pool, theirs in by_pool.values():
            if pool is self or type(pool) is BlockPool:
                own.append((pool, theirs))
            else:
                others.append((pool, theirs))
            if isinstance(pool, BlockPool):
                (<BlockPool> pool).require_free(theirs)
        for pool, theirs in others:
            pool.free_blocks(theirs)
        # Again, since other code may have run; each has the ids in its scratch then.
        for pool, theirs in own:
            (<BlockPool> pool).require_free(theirs)
        cdef PoolState* state
        for pool, theirs in own:
            state = &(<BlockPool> pool).state
            pool_free(state, (<BlockPool> pool).scratch, len(<list> theirs))
        for block in hand_made:
            if block.row.ref_cnt > 0:
                block.row.ref_cnt -= 1
        return 0

    @cython.critical_section
    def free_block_ids(self, ids):
        """As `free_blocks`, by id: int32, shape (n,); id 0 is skipped."""
        cdef cnp.ndarray array = as_ids(ids)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
        cdef block_id_t* data = <block_id_t*> cnp.PyArray_DATA(array)
        cdef Py_ssize_t bad = pool_free(&self.state, data, n)
        if bad >= 0:
            self.refuse(bad, data, OVERFREED)

    @cython.critical_section
    def touch(self, blocks):
        """Add one reference to each block; a free one leaves the free queue.

        Null blocks are skipped.

        Raises:
            ValueError: A block is not this pool's. No block was touched.
            TypeError: An element is not a KVCacheBlock. No block was touched.
        """
        if self.metrics_collector is not None:
            blocks = list(blocks)  # for the hooks, whatever they do to the caller's
        blocks = as_list(blocks)
        cdef Py_ssize_t n = len(<list> blocks)
        cdef block_id_t* ids = self.ids_of(blocks, n)
        cdef Py_ssize_t bad = pool_touch(&self.state, ids, n)
        if bad >= 0:
            self.refuse(bad, ids, "has too many users")
        if self.metrics_collector is not None:
            self.after_touch(blocks)

    cdef void after_touch(self, list blocks) noexcept:
        for block in blocks:
            if not (<KVCacheBlock> block).row.flags & FLAG_NULL:
                run_hook(self.metrics_collector, "on_block_accessed", block)

    @cython.critical_section
    def touch_block_ids(self, ids):
        """As `touch`, by id: int32, shape (n,); id 0 is skipped."""
        cdef cnp.ndarray array = as_ids(ids)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
        cdef block_id_t* data = <block_id_t*> cnp.PyArray_DATA(array)
        cdef list blocks = None
        cdef Py_ssize_t i, bad
        if self.metrics_collector is not None:
            blocks = []
            for i in range(n):
                if not is_block(&self.state, data[i]):
                    self.refuse(i, data, "")
                blocks.append(self.store.view(data[i]))
        bad = pool_touch(&self.state, data, n)
        if bad >= 0:
            self.refuse(bad, data, "has too many users")
        if blocks is not None:
            self.after_touch(blocks)

    @cython.critical_section
    def unpin_blocks(self, blocks, on_reuse):
        """Take back one reference of blocks that stay readable until reused.

        Those without users join the back of the free queue whatever they hold.
        `on_reuse(block)` is called when the block is handed out again or the cache is
        reset, so that its reader can stop.

        Raises:
            ValueError: A block is null, another pool's, or has fewer references.
                Nothing was unpinned.
            TypeError: on_reuse cannot be called, or an element is not a KVCacheBlock.
        """
        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, got {on_reuse!r}")
        cdef list held = list(blocks), numbers = [], before = []
        cdef Py_ssize_t n = len(held), i, bad
        cdef block_id_t* ids = self.ids_of(held, n)
        try:
            for i in range(n):
                numbers.append(ids[i])
                before.append(self.watchers.get(numbers[i]))
                self.watchers[numbers[i]] = on_reuse
            bad = pool_unpin(&self.state, ids, n)
            if bad >= 0:
                self.refuse(bad, ids, "cannot be unpinned")
        except BaseException:
            for i in range(len(before) - 1, -1, -1):
                if before[i] is None:
                    self.watchers.pop(numbers[i], None)
                else:
                    self.watchers[numbers[i]] = before[i]
            raise

    @cython.critical_section
    def is_block_writable(self, block):
        """Whether its only user may change a block: one reference, and no hash."""
        cdef KVCacheBlock ours = self.own(block)
        return (
            not ours.row.flags & FLAG_NULL
            and ours.row.ref_cnt == 1
            and not has_hash(ours.row)
        )

    # -- look up -----------------------------------------------------------------

    @cython.critical_section
    def get_cached_block(self, block_hash, kv_cache_group_ids):
        """The block cached first under a hash, in each group; None if one misses.

        Args:
            block_hash: bytes, 1 to 32.
            kv_cache_group_ids: Sequence of ints from 0 to 2**32 - 1.
        """
        cdef Py_ssize_t length = check_digest(block_hash)
        cdef list found = []
        cdef Key key
        cdef int entry
        for group_id in kv_cache_group_ids:
            make_key(
                &key, <const uint8_t*> <char*> <bytes> block_hash, length,
                group_suffix(as_group_id(group_id)),
            )
            entry = index_find(self.state.index, &key)
            if entry == 0:
                return None
            found.append(self.cached_block_hash_to_block.block_of(entry))
        return found

    cdef Py_ssize_t match(
        self, const HashSource* source, Py_ssize_t limit, object group_id,
        block_id_t* ids,
    ) except -1:
        """Ids of the leading hashes that are cached, at most `limit` of them."""
        cdef const uint8_t* digests[MATCH_CHUNK]
        cdef Py_ssize_t done = 0, count, hits, length
        cdef uint64_t suffix = group_suffix(as_group_id(group_id))
        while done < limit:
            count = min(limit - done, <Py_ssize_t> MATCH_CHUNK)
            count = next_digests(source, done, count, digests, &length)
            hits = index_match(
                self.state.index, ids[done - 1] if done else NULL_BLOCK, digests,
                length, suffix, count, ids + done,
            )
            done += hits
            if hits < count:
                break
        return done

    @cython.critical_section
    def match_prefix_ids(self, hashes, kv_cache_group_id=0):
        """Ids of the longest cached prefix, int32, shape (n,).

        Args:
            hashes: Chained block hashes, uint8 of shape (m, L), 1 <= L <= 32, or a
                sequence of bytes, of which few are read behind the first miss.
            kv_cache_group_id: Int from 0 to 2**32 - 1.
        """
        cdef HashSource source
        _held = as_hashes(hashes, &source)
        cdef cnp.ndarray ids = new_ids(source.count)
        cdef Py_ssize_t n = self.match(
            &source, source.count, kv_cache_group_id,
            <block_id_t*> cnp.PyArray_DATA(ids),
        )
        return ids if n == source.count else ids[:n].copy()

    @cython.critical_section
    def match_prefix_tokens(self, tokens, hasher, kv_cache_group_id=0):
        """Ids of the longest cached prefix of a prompt, int32, shape (n,).

        The same as `match_prefix_ids(hasher.hash_blocks(tokens, hash_block_size))`, in
        one pass that stops hashing at the first miss. In a pool that keeps tokens only
        blocks cached by `cache_block_tokens` count, whose tokens, up to the start of
        the prompt, were compared with these.

        Args:
            tokens: Ints from 0 to 2**63 - 1: an array, shape (m,), or a sequence.
            hasher: The `Keyed` whose digests the blocks were cached under.
            kv_cache_group_id: Int from 0 to 2**32 - 1.

        Raises:
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef const KeyedHash* keyed = keyed_of(hasher)
        cdef uint64_t suffix = group_suffix(as_group_id(kv_cache_group_id))
        cdef cnp.ndarray held = as_tokens(tokens)
        cdef Py_ssize_t size = self.hash_block_size, count, n
        if cnp.PyArray_TYPE(held) != cnp.NPY_INT32:
            if self.state.kept == NULL:
                return self.match_prefix_ids(
                    hasher.hash_blocks(held, size), kv_cache_group_id
                )
            # No block that is kept has such a token: what comes before may match.
            held = held[: (held > MAX_INT32).argmax()].astype("int32")
        count = cnp.PyArray_DIM(held, 0) // size
        cdef cnp.ndarray ids = new_ids(count)
        cdef const int32_t* data = <const int32_t*> cnp.PyArray_DATA(held)
        cdef block_id_t* found = <block_id_t*> cnp.PyArray_DATA(ids)
        if self.state.kept == NULL:
            n = match_tokens(self.state.index, keyed, data, size, count, suffix, found)
        else:
            n = kept_match(
                self.state.kept, self.state.index, keyed, data, count, suffix, found
            )
        return ids if n == count else ids[:n].copy()

    @cython.critical_section
    def match_prefix(self, hashes, kv_cache_group_ids):
        """The longest prefix cached in every group: one list of blocks a group.

        Args:
            hashes: As `match_prefix_ids`.
            kv_cache_group_ids: Sequence of ints from 0 to 2**32 - 1.
        """
        cdef HashSource source
        cdef Py_ssize_t i, limit
        cdef block_id_t* data
        cdef list blocks
        cdef PyObject* view
        _held = as_hashes(hashes, &source)
        limit = source.count
        groups = []
        for group_id in kv_cache_group_ids:
            ids = new_ids(limit)
            limit = self.match(
                &source, limit, group_id, <block_id_t*> cnp.PyArray_DATA(ids)
            )
            groups.append(ids)
        found = []
        for ids in groups:
            data = <block_id_t*> cnp.PyArray_DATA(ids)
            blocks = PyList_New(limit)
            for i in range(limit):
                if self.store.views == NULL or self.store.views[data[i]] == NULL:
                    self.store.view(data[i])
                view = self.store.views[data[i]]
                Py_INCREF(<object> view)
                PyList_SET_ITEM(blocks, i, <object> view)
            found.append(blocks)
        return found

    # -- cache and evict ---------------------------------------------------------

    cdef void write_hash(
        self, KVCacheBlock block, const Key* key, block_id_t num_tokens, HandMade made
    ) noexcept:
        """Register a key: as the block's own if it has none, else as a further one.

        There is room; a hand-made block is noted as `made`.
        """
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        if self.holds(block, key, made):
            return
        if made is None:
            if has_hash(block.row):
                index_add_side(&index.index, key, block.index, SIDE_ALIAS)
            else:
                index_add_row(&index.index, block.index, key, num_tokens)
            return
        index.hold(made, key, SIDE_ALIAS)
        if not has_hash(block.row):
            memcpy(block.row.block_hash, key.words, key.length)
            block.row.block_hash_len = <uint8_t> key.length
            block.row.block_hash_num_tokens = num_tokens

    cdef bint holds(self, KVCacheBlock block, const Key* key, HandMade made) noexcept:
        """Whether a block carries a key, or it has an entry of the block's id."""
        if has_hash(block.row) and row_has_key(block.row, key):
            return True
        if made is None:
            return index_has_side(self.state.index, key, block.index)
        return self.cached_block_hash_to_block.find_named(key, block.id, made.name) != 0

    cdef HandMade made_of(self, KVCacheBlock block, const Key* key):
        """What the map is to hold of a hand-made block, None for one of the pool's."""
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        return None if index.owns(block) else hand_made_of(key, block)

    cdef int commit_to(self, object queue, list events, list made) except -1:
        """Note hand-made blocks and announce what is to be cached: both, or an error.

        The map has room. Runs no foreign code; from here on nothing fails.
        """
        if made:
            self.cached_block_hash_to_block.name_all(made)
        try:
            self.announce(queue, events)
        except BaseException:
            if made:
                self.cached_block_hash_to_block.unname(made)
            raise
        return 0

    cdef KVCacheBlock cacheable(self, object block):
        """The block, which is this pool's or one made by hand, as in vLLM's tests."""
        return self.cached_block_hash_to_block.accepted(block)

    @cython.critical_section
    def cache_full_blocks(
        self,
        request,
        blocks,
        num_cached_blocks,
        num_full_blocks,
        block_size,
        kv_cache_group_id,
        block_mask=None,
    ):
        """Cache a request's full blocks under its block hashes.

        A block that carries a hash of fewer tokens is promoted: it loses its keys and
        takes the new one. Null and masked blocks are skipped. With events off, only
        `request.block_hashes` is read.

        Args:
            request: Has `block_hashes`, one for each hash_block_size tokens.
            blocks: The request's block table; may hold null blocks.
            num_cached_blocks: Blocks at its start that are cached already.
            num_full_blocks: Blocks at its start that are full.
            block_size: Tokens a block, a multiple of hash_block_size.
            kv_cache_group_id: Int from 0 to 2**32 - 1.
            block_mask: For each of the blocks in between, whether to cache it.

        Raises:
            BlockStateError: A block carries a hash of as many tokens or more (also if
                it is the same hash: it is in the cache already), or the mask has
                another length. Nothing was cached.
            TypeError, ValueError: An argument is of the wrong type or range, there are
                too few hashes or blocks, or a block is another pool's.
        """
        cdef Py_ssize_t start = as_int(
            num_cached_blocks, "num_cached_blocks", 0, MAX_BLOCKS
        )
        cdef Py_ssize_t stop = as_int(num_full_blocks, "num_full_blocks", 0, MAX_BLOCKS)
        if start >= stop:
            return
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef unsigned int group = as_group_id(kv_cache_group_id)
        if stop > MAX_BLOCKS // size:
            raise ValueError(f"{stop} blocks of {size} tokens are too many")
        cdef Py_ssize_t first = max(start - 1, 0)
        cdef list table = list(blocks[first:stop])
        if len(table) != stop - first:
            raise ValueError(f"{stop} full blocks in a table of {len(blocks)}")
        before_first = table.pop(0) if start else None
        cdef list mask = None
        if block_mask is not None:
            mask = [bool(one) for one in block_mask]
            if len(mask) != stop - start:
                raise BlockStateError(
                    f"a mask of {len(mask)} for {stop - start} new full blocks"
                )
        cdef Py_ssize_t i
        cdef KVCacheBlock block
        cdef bytes digest
        cdef list taken = None
        for i in range(stop - start):
            block = None
            if mask is None or mask[i]:
                block = self.cacheable(table[i])
                if block.row.flags & FLAG_NULL:
                    block = None
            if taken is None and block is None:
                taken = list(range(start, start + i))
            elif taken is not None and block is not None:
                taken.append(start + i)
            # From here on the table holds what is cached, and None.
            table[i] = block
        numbers = range(start, stop) if taken is None else taken
        source = request.block_hashes
        cdef list hashes = pick_block_hashes(
            source, self.hash_block_size, size, numbers
        )
        if len(hashes) != len(numbers):
            raise ValueError(f"{len(hashes)} block hashes for {len(numbers)} blocks")
        stored = None
        if self.enable_kv_cache_events:
            parent = None
            if start:
                parent = pick_block_hashes(
                    source, self.hash_block_size, size, [start - 1]
                )[0]
            stored = pool_events.stored_event(
                self,
                request,
                block_hashes=hashes,
                parent=parent,
                starts=[number * size for number in numbers],
                token_range=(start * size, stop * size),
                block_size=size,
                group_id=group,
            )
        cdef uint64_t suffix = group_suffix(group)
        cdef list events = [], lost = [], again = [], made = []
        cdef object queue = self.event_queue()
        cdef HandMade noted
        cdef Key key
        cdef Py_ssize_t k = 0, h = 0
        for i in range(stop - start):
            if table[i] is None:
                continue
            block = <KVCacheBlock> table[i]
            check_digest(hashes[k])
            if block.loose is not None:
                digest = <bytes> hashes[k]
                make_key(&key, <const uint8_t*> <char*> digest, len(digest), suffix)
                made.append(hand_made_of(&key, block))
            k += 1
        # What is made here may run foreign code, so the blocks are looked at again.
        while True:
            again.clear()
            self.check_to_cache(
                table, hashes, start, size, suffix, again if queue is not None else None
            )
            if again == lost:
                break
            lost, again = again, lost
            events = pool_events.removed_events(self, lost)
        if stored is not None:
            events.append(stored)
        self.cached_block_hash_to_block.reserve(k, len(made))
        self.commit_to(queue, events, made)
        cdef block_id_t before = NULL_BLOCK
        if type(before_first) is KVCacheBlock:
            block = before_first
            if block.store == <PyObject*> self.store:
                before = block.index
        k = 0
        for i in range(stop - start):
            if table[i] is None:
                continue
            block = <KVCacheBlock> table[i]
            if has_hash(block.row):
                self.lose_hashes(block)
            if k % MATCH_CHUNK == 0 and index_is_far(self.state.index):
                prefetch_keys(self.state.index, hashes, k, suffix)
            digest = <bytes> hashes[k]
            make_key(&key, <const uint8_t*> <char*> digest, len(digest), suffix)
            noted = None
            if block.loose is not None:
                noted = <HandMade> made[h]
                h += 1
            self.write_hash(block, &key, <block_id_t> ((start + i + 1) * size), noted)
            if noted is None:
                index_chain(self.state.index, before, block.index)
                before = block.index
            k += 1
        self.cached_block_hash_to_block.unname(made)
        self.announce_late(queue, events)

    cdef int check_to_cache(
        self, list table, list hashes, Py_ssize_t start, Py_ssize_t size,
        uint64_t suffix, list lost,
    ) except -1:
        """Prove that each block of a table may take its hash.

        Unless it is None, `lost` gets the keys that they lose. Runs no foreign code.
        """
        cdef Py_ssize_t n = len(table), i, k = 0, bad = -1, done = 0
        cdef KVCacheBlock block
        try:
            for i in range(n):
                if table[i] is None:
                    continue
                block = <KVCacheBlock> table[i]
                if has_hash(block.row) and not (
                    NO_NUM_TOKENS < block.row.block_hash_num_tokens
                    < (start + i + 1) * size
                ):
                    bad = i
                    break
                if lost is not None:
                    self.append_lost(table, hashes, i, k, suffix, lost)
                    block.row.flags |= FLAG_IN_BATCH
                    done = i + 1
                k += 1
        finally:
            for i in range(done):
                if table[i] is not None:
                    block = <KVCacheBlock> table[i]
                    block.row.flags &= ~<uint8_t> FLAG_IN_BATCH
        if bad >= 0:
            block = <KVCacheBlock> table[bad]
            raise BlockStateError(
                f"block {block.id} carries the hash {block.block_hash!r} of"
                f" {block.block_hash_num_tokens} tokens, it cannot take"
                f" {hashes[k]!r} of {(start + bad + 1) * size}"
            )
        return 0

    cdef int append_lost(
        self, list table, list hashes, Py_ssize_t i, Py_ssize_t k, uint64_t suffix,
        list lost,
    ) except -1:
        """Append the keys that block i of a table, the k-th to be cached, will lose."""
        cdef KVCacheBlock block = <KVCacheBlock> table[i]
        cdef Key key
        cdef bytes digest
        if not block.row.flags & FLAG_IN_BATCH:
            if has_hash(block.row):
                self.append_keys_of(block, lost)
            return 0
        # It is listed twice: what it loses is what the table gave it before.
        while True:
            i -= 1
            k -= table[i] is not None
            if table[i] is block:
                break
        digest = <bytes> hashes[k]
        make_key(&key, <const uint8_t*> <char*> digest, len(digest), suffix)
        lost.append(key_bytes(&key))
        return 0

    @cython.critical_section
    def cache_partial_block(
        self,
        request,
        block,
        num_tokens,
        kv_cache_group_id,
        block_size,
        replace_existing_hashes=False,
    ):
        """Make a block answer to the hash of a prefix that ends inside it.

        The key becomes the block's own if it has none or one of fewer tokens (which it
        then loses), else a further one. As in vLLM, a boundary shorter than the
        block's own hash becomes such an alias, and is announced.

        Args:
            request: As vLLM's; with events off only `block_hashes` is read.
            block: A block of this pool.
            num_tokens: Length of the prefix, a multiple of hash_block_size.
            kv_cache_group_id: Int from 0 to 2**32 - 1.
            block_size: Tokens a block, a multiple of hash_block_size.
            replace_existing_hashes: The block's content changed: it loses all its keys.

        Returns:
            The key, or None for a null block.

        Raises:
            BlockStateError: num_tokens or block_size is no such multiple, or the
                request has no hash for the prefix.
        """
        cdef KVCacheBlock ours = self.cacheable(block)
        if ours.row.flags & FLAG_NULL:
            return None
        cdef Py_ssize_t tokens = as_int(num_tokens, "num_tokens", 0, MAX_BLOCKS)
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef Py_ssize_t unit = self.hash_block_size
        cdef unsigned int group = as_group_id(kv_cache_group_id)
        cdef bint replace = replace_existing_hashes
        source = request.block_hashes
        if size % unit:
            raise BlockStateError(f"block size {size} is no multiple of {unit}")
        if tokens % unit or not 0 < tokens // unit <= len(source):
            raise BlockStateError(
                f"a prefix of {tokens} tokens has no hash: hashes end at multiples of"
                f" {unit}, the last at {len(source) * unit}"
            )
        cdef bytes digest = source[tokens // unit - 1]
        cdef Key key
        make_key(
            &key, <const uint8_t*> <char*> digest, check_digest(digest),
            group_suffix(group),
        )
        stored = None
        if self.enable_kv_cache_events:
            stored = pool_events.stored_event(
                self,
                request,
                block_hashes=[digest],
                parent=source[tokens // unit - 2] if tokens > unit else None,
                starts=[tokens - unit],
                token_range=(tokens - unit, tokens),
                block_size=unit,
                group_id=group,
            )
        cdef list events = [], lost = [], again = [], names = []
        cdef object queue = self.event_queue()
        cdef bytes name = key_bytes(&key)
        cdef HandMade made = self.made_of(ours, &key)
        cdef bint known, loses
        if made is not None:
            names.append(made)
        # What is made here may run foreign code, so the block is looked at again.
        while True:
            known = self.holds(ours, &key, made)
            loses = replace or (
                not known
                and has_hash(ours.row)
                and NO_NUM_TOKENS < ours.row.block_hash_num_tokens < tokens
            )
            again.clear()
            if loses and queue is not None:
                self.append_keys_of(ours, again)
            if again == lost:
                break
            lost, again = again, lost
            events = pool_events.removed_events(self, lost)
        if stored is not None and (loses or not known):
            events.append(stored)
        self.cached_block_hash_to_block.reserve(1, 1)
        self.commit_to(queue, events, names)
        if loses:
            self.lose_hashes(ours)
        self.write_hash(ours, &key, <block_id_t> tokens, made)
        self.cached_block_hash_to_block.unname(names)
        self.announce_late(queue, events)
        return name

    @cython.critical_section
    def cache_block_ids(self, ids, hashes, kv_cache_group_id=0):
        """Cache blocks by id under block hashes; id 0 is skipped with its hash.

        With events on, one BlockStored without tokens and parent is recorded.

        Args:
            ids: int32, shape (n,); blocks without a hash, none twice.
            hashes: uint8, shape (n, L), 1 <= L <= 32, or a sequence of n bytes.
            kv_cache_group_id: Int from 0 to 2**32 - 1.

        Raises:
            BlockStateError: A block carries a hash already. Nothing was cached.
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
        cdef block_id_t* data = <block_id_t*> cnp.PyArray_DATA(array)
        cdef unsigned int group = as_group_id(kv_cache_group_id)
        cdef HashSource source
        cdef Key key
        cdef const uint8_t* digests[MATCH_CHUNK]
        cdef Py_ssize_t i, bad, length, count, done = 0
        cdef uint64_t suffix = group_suffix(group)
        cdef block_id_t before = NULL_BLOCK
        held = as_hashes(hashes, &source)
        if source.count != n:
            raise ValueError(f"{source.count} block hashes for {n} block ids")
        cdef object queue = self.event_queue()
        cdef list events = []
        if queue is not None and n:
            check_hashes(&source, 0)
            events.append(pool_events.stored_event_of_ids(
                self, [bytes(held[i]) for i in range(n) if data[i] != NULL_BLOCK], group
            ))
        # From here on nothing runs that could change the pool or the list.
        check_hashes(&source, 0)
        bad = pool_can_cache(&self.state, data, n)
        if bad >= 0:
            self.refuse_hash(bad, data, bytes(held[bad]))
        self.cached_block_hash_to_block.reserve(n, 0)
        self.announce(queue, events)
        while done < n:
            count = min(n - done, <Py_ssize_t> MATCH_CHUNK)
            count = next_digests(&source, done, count, digests, &length)
            for i in range(count if index_is_far(self.state.index) else 0):
                make_key(&key, digests[i], length, suffix)
                index_prefetch_key(self.state.index, &key)
            for i in range(count):
                make_key(&key, digests[i], length, suffix)
                before = cache_block(&self.state, data[done + i], &key, before)
            done += count
        self.announce_late(queue, events)

    @cython.critical_section
    def cache_block_tokens(
        self, ids, tokens, hasher, num_cached_blocks=0, kv_cache_group_id=0
    ):
        """Cache a request's full blocks under the digests of its tokens.

        The counterpart of `match_prefix_tokens`. In a pool that keeps tokens these are
        kept: a block can be found there as long as all blocks before it, or copies of
        them, stay cached. With events on, one BlockStored without a request is
        recorded.

        Args:
            ids: The request's block table, int32, shape (n,): its full blocks, and as
                many more as there may be.
            tokens: All tokens of the request: ints from 0 to 2**63 - 1 (2**31 - 1 in a
                pool that keeps them), an array, shape (m,), or a sequence. Those of the
                cached blocks, but for the last, are not read.
            hasher: The `Keyed` to hash them with; the cached blocks' as well.
            num_cached_blocks: Blocks at the start that are cached already. The last of
                them is the parent of the next: its own hash must be a digest of the
                group, and the tokens that are kept of it must be these.
            kv_cache_group_id: Int from 0 to 2**32 - 1.

        Raises:
            BlockStateError: A block carries a hash already. Nothing was cached.
            TypeError, ValueError: An argument is of the wrong type or range, a block to
                cache or their parent is null or another pool's, or the parent is not
                as above. Nothing was cached.
        """
        cdef const KeyedHash* keyed = keyed_of(hasher)
        cdef Py_ssize_t start = as_int(
            num_cached_blocks, "num_cached_blocks", 0, MAX_BLOCKS
        )
        cdef unsigned int group = as_group_id(kv_cache_group_id)
        cdef cnp.ndarray table = as_ids(ids)
        cdef Py_ssize_t size = self.hash_block_size, skipped = max(start - 1, 0)
        cdef cnp.ndarray held = tokens_behind(tokens, skipped * size)
        cdef bint wide = cnp.PyArray_TYPE(held) != cnp.NPY_INT32
        cdef Py_ssize_t stop = skipped + cnp.PyArray_DIM(held, 0) // size
        cdef Py_ssize_t count = stop - start, i, bad
        if count < 0:
            raise ValueError(
                f"{start} cached blocks of {size} tokens, but fewer tokens are given"
            )
        if stop > MAX_BLOCKS // size:
            raise ValueError(f"{stop} blocks of {size} tokens are too many")
        if cnp.PyArray_DIM(table, 0) < stop:
            raise ValueError(f"{stop} full blocks in a table of {len(table)}")
        if wide and self.state.kept != NULL:
            raise ValueError(
                f"token {held[held > MAX_INT32][0]} does not fit int32, and the pool"
                " keeps tokens"
            )
        if count == 0:
            return
        cdef const int32_t* data = <const int32_t*> cnp.PyArray_DATA(held)
        cdef block_id_t* parents = <block_id_t*> cnp.PyArray_DATA(table) + skipped
        cdef block_id_t* blocks = parents + (1 if start else 0)
        cdef TokenParent parent, read
        memset(&parent, 0, sizeof(TokenParent))
        memcpy(parent.digest, keyed.root, KEYED_BYTES)
        if start:
            read_parent(&self.state, parents[0], group, data, size, &parent)
        cdef Py_ssize_t skip = size if start else 0
        cdef bytes digests = hash_behind(keyed, &parent, held, skip, size, count)
        cdef object queue = self.event_queue()
        cdef list events = []
        if queue is not None:
            events.append(pool_events.stored_event_of_ids(
                self,
                [
                    digests[i : i + KEYED_BYTES]
                    for i in range(0, len(digests), KEYED_BYTES)
                ],
                group,
                parent=parent.digest[:KEYED_BYTES] if start else None,
                token_ids=held[skip : skip + count * size].tolist(),
            ))
        # From here on nothing runs that could change the pool.
        if start:
            read = parent
            read_parent(&self.state, parents[0], group, data, size, &parent)
            if (
                parent.serial != read.serial
                or memcmp(parent.digest, read.digest, KEYED_BYTES)
            ):
                raise ValueError(f"block {parent.block} changed during the call")
        for i in range(count):
            if blocks[i] == NULL_BLOCK:
                raise ValueError(
                    f"the null block cannot be cached, it is number {start + i} of the"
                    " table"
                )
        bad = pool_can_cache(&self.state, blocks, count)
        if bad >= 0:
            self.refuse_hash(
                bad, blocks, digests[bad * KEYED_BYTES : (bad + 1) * KEYED_BYTES]
            )
        self.cached_block_hash_to_block.reserve(count, 0)
        self.announce(queue, events)
        cache_tokens(
            &self.state, &parent, blocks, <const uint8_t*> <char*> digests, data + skip,
            size, count, group_suffix(group), <int32_t> (start * size),
        )
        self.announce_late(queue, events)

    @cython.critical_section
    def emit_cached_block_events(
        self, request, num_cached_blocks, block_size, kv_cache_group_id
    ):
        """Record a BlockStored for blocks that a request reuses; nothing else changes.

        Args:
            request: As vLLM's.
            num_cached_blocks: Blocks at its start that were hits.
            block_size: Tokens a block, a multiple of hash_block_size.
            kv_cache_group_id: Int from 0 to 2**32 - 1.
        """
        cdef Py_ssize_t n = as_int(
            num_cached_blocks, "num_cached_blocks", 0, MAX_BLOCKS
        )
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef object queue = self.event_queue()
        cdef list events
        if queue is None or n == 0:
            return
        events = [
            pool_events.stored_event(
                self,
                request,
                block_hashes=pick_block_hashes(
                    request.block_hashes, self.hash_block_size, size, range(n)
                ),
                parent=None,
                starts=range(0, n * size, size),
                token_range=(0, n * size),
                block_size=size,
                group_id=as_group_id(kv_cache_group_id),
            )
        ]
        self.announce(queue, events)
        self.announce_late(queue, events)

    cdef int append_keys_of(self, KVCacheBlock block, list keys) except -1:
        """Append the keys of the entries that name a block; runs no foreign code."""
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        if index.owns(block):
            return index.append_keys(block.index, keys, True)
        return index.append_object_keys(block, keys)

    cdef int lose_hashes(self, KVCacheBlock block) noexcept:
        """Remove every entry that names a block; how many there were."""
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        if index.owns(block):
            return index_drop_block(&index.index, block.index)
        clear_hash(block.row)
        return index.drop_object(block)

    @cython.critical_section
    def _remove_cached_block_hashes(self, block):
        cdef list removed = []
        cdef KVCacheBlock ours = self.cacheable(block)
        self.append_keys_of(ours, removed)
        self.lose_hashes(ours)
        return removed

    @cython.critical_section
    def _insert_block_hash(self, block_hash_with_group_id, block, num_tokens):
        """Register a key for a block, as vLLM's managers do.

        Raises:
            ValueError: The block is null or another pool's, or the key has not 1 to 36
                bytes.
        """
        cdef KVCacheBlock ours = self.cacheable(block)
        cdef block_id_t tokens = NO_NUM_TOKENS
        cdef Key key
        read_key(block_hash_with_group_id, &key)
        if num_tokens is not None:
            tokens = <block_id_t> as_int(num_tokens, "num_tokens", 0, MAX_BLOCKS)
        if ours.row.flags & FLAG_NULL:
            raise ValueError("the null block cannot be cached")
        cdef HandMade made = self.made_of(ours, &key)
        cdef list names = [] if made is None else [made]
        self.cached_block_hash_to_block.reserve(1, 1)
        self.commit_to(None, [], names)
        self.write_hash(ours, &key, tokens, made)
        self.cached_block_hash_to_block.unname(names)

    @cython.critical_section
    def move_block_hashes(self, src_block, dst_block):
        """Give a block's keys to another one, which holds a copy of its content.

        Lookups go on without a gap, so no event is recorded.

        Raises:
            BlockStateError: dst_block has keys already.
            ValueError: A block is another pool's, or dst_block is null.
        """
        cdef KVCacheBlock src = self.own(src_block)
        cdef KVCacheBlock dst = self.own(dst_block)
        cdef list keys = []
        cdef Key key
        cdef block_id_t num_tokens = src.row.block_hash_num_tokens
        cdef bint tokens_kept = src.row.flags & FLAG_TOKENS_KEPT
        if dst.row.flags & FLAG_NULL:
            raise ValueError("the null block cannot be cached")
        self.cached_block_hash_to_block.append_keys(dst.index, keys, True)
        if keys or has_hash(dst.row):
            raise BlockStateError(
                f"block {dst.id} has keys already: {keys or dst.block_hash}"
            )
        if src.row.flags & FLAG_NULL:
            return
        self.cached_block_hash_to_block.append_keys(src.index, keys, True)
        self.cached_block_hash_to_block.reserve(len(keys), len(keys))
        index_drop_block(self.state.index, src.index)
        for name in keys:
            read_key(name, &key)
            self.write_hash(dst, &key, num_tokens, None)
        if tokens_kept:
            kept_move(self.state.kept, self.state.rows, src.index, dst.index)

    @cython.critical_section
    def _maybe_evict_cached_block(self, block):
        """Take a block's content out of the cache; whether it was in there."""
        cdef KVCacheBlock ours = self.cacheable(block)
        cdef object queue = self.event_queue()
        cdef list events = [], lost = [], again = []
        cdef bint cached
        # What is made here may run foreign code, so the block is looked at again.
        while queue is not None:
            again.clear()
            self.append_keys_of(ours, again)
            if again == lost:
                break
            lost, again = again, lost
            events = pool_events.removed_events(self, lost)
        self.announce(queue, events)
        cached = self.lose_hashes(ours) > 0
        self.announce_late(queue, events)
        if self.metrics_collector is not None:
            run_hook(self.metrics_collector, "on_block_evicted", ours)
        return cached

    @cython.critical_section
    def evict_blocks(self, block_ids):
        """Take blocks' content out of the cache; a free block stays where it stands.

        Args:
            block_ids: Ints, in any iterable or an int32 array; uncached ones are
                skipped, and so is the null block.

        Raises:
            ValueError: An id is none of the pool's. Nothing was evicted.
        """
        cdef cnp.ndarray array = as_ids(block_ids)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
        cdef block_id_t* data = <block_id_t*> cnp.PyArray_DATA(array)
        cdef object queue = self.event_queue(), collector = self.metrics_collector
        cdef list events = [], lost = [], again = [], blocks = []
        cdef Py_ssize_t i
        for i in range(n):
            if not is_block(&self.state, data[i]):
                self.refuse(i, data, "")
        if collector is not None:
            for i in range(n):
                blocks.append(self.store.view(data[i]))
        # What is made here may run foreign code, so the blocks are looked at again.
        while queue is not None:
            again.clear()
            self.append_lost_keys(data, n, again)
            if again == lost:
                break
            lost, again = again, lost
            events = pool_events.removed_events(self, lost)
        self.announce(queue, events)
        pool_evict(&self.state, data, n)
        self.announce_late(queue, events)
        for block in blocks:
            run_hook(collector, "on_block_evicted", block)

    evict_block_ids = evict_blocks

    @cython.critical_section
    def reset_prefix_cache(self):
        """Forget all cached content, for instance when the weights have changed.

        Returns:
            Whether it was done: not while a block is in use (see the log for how many).
        """
        cdef object queue = self.event_queue()
        cdef list events = []
        cdef dict watchers, none = {}
        cdef block_id_t used, i
        if queue is not None and self.state.queue.num_free == self.state.num_blocks - 1:
            events.append(event_classes().cleared())
        # From here on nothing runs that could change the pool.
        used = self.state.num_blocks - 1 - self.state.queue.num_free
        if used != 0:
            logger.warning("prefix cache not reset: %d blocks are in use", used)
            return False
        self.announce(queue, events)
        index_clear(self.state.index)
        for i in range(self.state.num_blocks):
            if has_hash(&self.state.rows[i]):
                clear_hash(&self.state.rows[i])
                self.state.rows[i].flags &= FLAG_NULL
        watchers, self.watchers = self.watchers, none
        self.cached_block_hash_to_block.forget_all()
        self.announce_late(queue, events)
        for block_id, watcher in watchers.items():
            run_hook(watcher, None, self.store.view(block_id))
        if self.metrics_collector is not None:
            run_hook(self.metrics_collector, "reset", None)
        return True

    # -- state -------------------------------------------------------------------

    @cython.critical_section
    def get_num_free_blocks(self):
        """Number of free blocks: what `get_new_blocks` can hand out."""
        return self.state.queue.num_free

    @cython.critical_section
    def get_usage(self):
        """Share of the blocks, the null block aside, that is in use: 0.0 to 1.0."""
        if self.state.num_blocks <= 1:
            return 0.0
        return 1.0 - self.state.queue.num_free / <double> (self.state.num_blocks - 1)

    @cython.critical_section
    def take_events(self):
        """The events since the last call, oldest first; [] if they are off."""
        if not self.enable_kv_cache_events:
            return []
        events = (<object> self).kv_event_queue
        (<object> self).kv_event_queue = []
        return events

    @cython.critical_section
    def check(self):
        """Prove every invariant of the pool, in O(n).

        Raises:
            AssertionError: Names the first one that fails, and where.
        """
        check_pool(&self.state, self.cached_block_hash_to_block)


cdef int let_go(object pool) except -1:
    """Drop what its user put into a pool that is garbage.

    Cython's tp_clear, which `no_gc_clear` leaves out, would also drop the parts that no
    pool can be without; without any, a circle of nothing but pools is never freed.
    """
    cdef BlockPool garbage = pool
    garbage.metrics_collector = garbage.medium = garbage.kv_event_queue = None
    return 0


(<PyTypeObject*> BlockPool).tp_clear = let_go
