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
from cpython.mem cimport PyMem_RawFree
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
from kvcache._memory cimport allocate
from kvcache._types cimport (
    ANCHOR,
    FLAG_NULL,
    FLAG_TOKENS_KEPT,
    MAX_BLOCKS,
    NO_NUM_TOKENS,
    NULL_BLOCK,
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
    index_contains,
    index_drop_block,
    index_find,
    index_is_far,
    index_match,
    index_prefetch_key,
    index_reserve,
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
    Freed,
    cache_block,
    drop_reference,
    evict_taken,
    freed_init,
    is_block,
    pool_can_cache,
    pool_can_free,
    pool_free,
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
        if keep and not caching:
            raise ValueError("keep_tokens needs enable_caching")
        if self.state.num_blocks:
            raise ValueError("the pool is already made")
        self.build(<block_id_t> n, caching, size if keep else 0)
        self.hash_block_size = size
        self.num_hash_lookahead_tokens = lookahead
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.medium = medium
        # Through the attribute: a subclass may hold the queue elsewhere.
        (<object> self).kv_event_queue = []

    def __dealloc__(self):
        with cython.critical_section(self):
            self.store.owner = NULL
        PyMem_RawFree(self.scratch)
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
            PyMem_RawFree(self.scratch)
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

    cdef void emit(self, object event) noexcept:
        # Read at each append: a subclass may hold the queue elsewhere.
        (<object> self).kv_event_queue.append(event)

    cdef void emit_removed(self, list keys) noexcept:
        if keys and self.enable_kv_cache_events:
            for event in pool_events.removed_events(self, keys):
                self.emit(event)

    cdef void after_get(self, list blocks) noexcept:
        """Run the hooks of blocks that were handed out, in vLLM's order."""
        if self.watchers:
            for block in blocks:
                watcher = self.watchers.pop(block.block_id, None)
                if watcher is not None:
                    run_hook(watcher, None, block)
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
            raise NoFreeBlocksError(
                f"Cannot get {n} free blocks from the pool:"
                f" {self.state.queue.num_free} are free"
            )
        return n

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

    cdef int keys_in_front(self, Py_ssize_t n, list keys) except -1:
        """Append the keys that the first n free blocks would lose to an allocation."""
        cdef block_id_t block = ANCHOR
        if self.state.enable_caching:
            for _ in range(n):
                block = self.state.rows[block].next_free_block
                self.cached_block_hash_to_block.append_keys(block, keys, True)
        return 0

    @cython.critical_section
    def get_new_blocks(self, num_blocks):
        """Hand out blocks from the front of the free queue, one reference each.

        What they held is evicted. Prefix hits are the caller's to look up first.

        Raises:
            NoFreeBlocksError: Fewer are free.
            TypeError, ValueError: num_blocks is not an int from 0 on.
        """
        cdef list removed = [] if self.enable_kv_cache_events else None
        cdef Py_ssize_t n = self.count_free(num_blocks)
        cdef list blocks = PyList_New(n)
        cdef Py_ssize_t i
        cdef bint holding = False
        cdef block_id_t block
        cdef PyObject* view
        self.room_for(n)
        # From the last of these on, nothing runs that could change the queue.
        while (
            self.store.num_views < self.state.num_blocks - 1
            and self.make_front_views(n)
        ):
            pass
        if n > self.state.queue.num_free:
            self.count_free(num_blocks)
        if removed is not None:
            self.keys_in_front(n, removed)
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
        if removed is not None:
            self.emit_removed(removed)
        if self.metrics_collector is not None or self.watchers:
            self.after_get(blocks)
        return blocks

    @cython.critical_section
    def get_new_block_ids(self, n):
        """As `get_new_blocks`; the ids, int32, shape (n,)."""
        cdef list removed = [] if self.enable_kv_cache_events else None
        cdef Py_ssize_t count = self.count_free(n)
        cdef cnp.ndarray ids = new_ids(count)
        self.count_free(n)
        if removed is not None:
            self.keys_in_front(count, removed)
        pool_get(&self.state, <block_id_t*> cnp.PyArray_DATA(ids), count)
        if removed is not None:
            self.emit_removed(removed)
        if self.metrics_collector is not None or self.watchers:
            self.after_get([self.store.view(block) for block in ids.tolist()])
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
        for pool, theirs in by_pool.values():
            if isinstance(pool, BlockPool):
                (<BlockPool> pool).require_free(theirs)
        for pool, theirs in by_pool.values():
            pool.free_blocks(theirs)
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
        blocks = as_list(blocks)
        cdef Py_ssize_t n = len(<list> blocks)
        cdef block_id_t* ids = self.ids_of(blocks, n)
        cdef Py_ssize_t bad = pool_touch(&self.state, ids, n)
        if bad >= 0:
            self.refuse(bad, ids, "has too many users")
        if self.metrics_collector is not None:
            self.after_touch(list(blocks))

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
        cdef Py_ssize_t bad = pool_touch(&self.state, data, n)
        if bad >= 0:
            self.refuse(bad, data, "has too many users")
        if self.metrics_collector is not None:
            self.after_touch([self.store.view(block) for block in array.tolist()])

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
        cdef list held = list(blocks)
        cdef Py_ssize_t n = len(held)
        cdef block_id_t* ids = self.ids_of(held, n)
        cdef Py_ssize_t bad = pool_unpin(&self.state, ids, n)
        if bad >= 0:
            self.refuse(bad, ids, "cannot be unpinned")
        for block in held:
            self.watchers[(<KVCacheBlock> block).index] = on_reuse

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

    cdef int write_hash(
        self, KVCacheBlock block, const Key* key, block_id_t num_tokens
    ) except -1:
        """Register a key: as the block's own if it has none, else as a further one.

        `index_reserve` has made room, so this cannot fail for a pool's block.
        """
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        if has_hash(block.row) and row_has_key(block.row, key):
            return 0
        if self.holds(block, key):
            return 0
        if block.store == <PyObject*> self.store:
            if has_hash(block.row):
                index_add_side(&index.index, key, block.index, SIDE_ALIAS)
            else:
                index_add_row(&index.index, block.index, key, num_tokens)
            return 0
        index.add(key, block, SIDE_ALIAS)
        if not has_hash(block.row):
            memcpy(block.row.block_hash, key.words, key.length)
            block.row.block_hash_len = <uint8_t> key.length
            block.row.block_hash_num_tokens = num_tokens
        return 0

    cdef bint holds(self, KVCacheBlock block, const Key* key) except -1:
        """Whether a key has an entry of this block's id."""
        if block.store == <PyObject*> self.store:
            return index_contains(self.state.index, key, block.index)
        return self.cached_block_hash_to_block.find_block(key, block.id) != 0

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
        cdef Py_ssize_t i, num_hand_made = 0, num_tokens
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
        cdef list removed = []
        cdef block_id_t before = NULL_BLOCK
        if type(before_first) is KVCacheBlock:
            block = before_first
            if block.store == <PyObject*> self.store:
                before = block.index
        # From here on nothing runs that could change the pool.
        cdef Py_ssize_t k = 0
        for i in range(stop - start):
            if table[i] is None:
                continue
            block = <KVCacheBlock> table[i]
            check_digest(hashes[k])
            num_tokens = (start + i + 1) * size
            if has_hash(block.row) and not (
                NO_NUM_TOKENS < block.row.block_hash_num_tokens < num_tokens
            ):
                raise BlockStateError(
                    f"block {block.id} carries the hash {block.block_hash!r} of"
                    f" {block.block_hash_num_tokens} tokens, it cannot take"
                    f" {hashes[k]!r} of {num_tokens}"
                )
            k += 1
            if block.loose is not None:
                num_hand_made += 1
        if index_reserve(self.state.index, k, num_hand_made) < 0:
            raise MemoryError(f"cannot cache {k} more blocks")
        cdef Key key
        cdef uint64_t suffix = group_suffix(group)
        k = 0
        for i in range(stop - start):
            if table[i] is None:
                continue
            block = <KVCacheBlock> table[i]
            if has_hash(block.row):
                self.drop_hashes(block, removed)
            if k % MATCH_CHUNK == 0 and index_is_far(self.state.index):
                prefetch_keys(self.state.index, hashes, k, suffix)
            digest = <bytes> hashes[k]
            make_key(&key, <const uint8_t*> <char*> digest, len(digest), suffix)
            self.write_hash(block, &key, <block_id_t> ((start + i + 1) * size))
            if block.store == <PyObject*> self.store:
                index_chain(self.state.index, before, block.index)
                before = block.index
            k += 1
        self.emit_removed(removed)
        if stored is not None:
            self.emit(stored)

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
        cdef list removed = []
        cdef bytes name = key_bytes(&key)
        cdef bint known = (
            has_hash(ours.row) and row_has_key(ours.row, &key)
        ) or self.holds(ours, &key)
        if index_reserve(self.state.index, 1, 1) < 0:
            raise MemoryError("cannot cache one more block")
        if replace or (
            not known
            and has_hash(ours.row)
            and NO_NUM_TOKENS < ours.row.block_hash_num_tokens < tokens
        ):
            self.drop_hashes(ours, removed)
            known = known and not replace
        self.write_hash(ours, &key, <block_id_t> tokens)
        self.emit_removed(removed)
        if stored is not None and not known:
            self.emit(stored)
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
        stored = None
        if self.enable_kv_cache_events and n:
            check_hashes(&source, 0)
            stored = pool_events.stored_event_of_ids(
                self, [bytes(held[i]) for i in range(n) if data[i] != NULL_BLOCK], group
            )
        # From here on nothing runs that could change the pool or the list.
        check_hashes(&source, 0)
        bad = pool_can_cache(&self.state, data, n)
        if bad >= 0:
            self.refuse_hash(bad, data, bytes(held[bad]))
        if index_reserve(self.state.index, n, 0) < 0:
            raise MemoryError(f"cannot cache {n} more blocks")
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
        if stored is not None:
            self.emit(stored)

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
        stored = None
        if self.enable_kv_cache_events:
            stored = pool_events.stored_event_of_ids(
                self,
                [
                    digests[i : i + KEYED_BYTES]
                    for i in range(0, len(digests), KEYED_BYTES)
                ],
                group,
                parent=parent.digest[:KEYED_BYTES] if start else None,
                token_ids=held[skip : skip + count * size].tolist(),
            )
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
        if index_reserve(self.state.index, count, 0) < 0:
            raise MemoryError(f"cannot cache {count} more blocks")
        cache_tokens(
            &self.state, &parent, blocks, <const uint8_t*> <char*> digests, data + skip,
            size, count, group_suffix(group), <int32_t> (start * size),
        )
        if stored is not None:
            self.emit(stored)

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
        if not self.enable_kv_cache_events or n == 0:
            return
        self.emit(
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
        )

    cdef int drop_hashes(self, KVCacheBlock block, list removed) except -1:
        """Remove every entry that names a block; its keys are appended to `removed`."""
        cdef BlockHashToBlockMap index = self.cached_block_hash_to_block
        if block.store == <PyObject*> self.store:
            index.append_keys(block.index, removed, True)
            index_drop_block(&index.index, block.index)
        else:
            removed += index.remove_object(block)
            clear_hash(block.row)
        return 0

    @cython.critical_section
    def _remove_cached_block_hashes(self, block):
        cdef list removed = []
        self.drop_hashes(self.cacheable(block), removed)
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
        if index_reserve(self.state.index, 1, 1) < 0:
            raise MemoryError("cannot cache one more block")
        self.write_hash(ours, &key, tokens)

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
        if index_reserve(self.state.index, len(keys), len(keys)) < 0:
            raise MemoryError(f"cannot move {len(keys)} keys")
        index_drop_block(self.state.index, src.index)
        for name in keys:
            read_key(name, &key)
            self.write_hash(dst, &key, num_tokens)
        if tokens_kept:
            kept_move(self.state.kept, self.state.rows, src.index, dst.index)

    @cython.critical_section
    def _maybe_evict_cached_block(self, block):
        """Take a block's content out of the cache; whether it was in there."""
        cdef KVCacheBlock ours = self.cacheable(block)
        cdef list removed = []
        self.drop_hashes(ours, removed)
        self.emit_removed(removed)
        if self.metrics_collector is not None:
            run_hook(self.metrics_collector, "on_block_evicted", ours)
        return bool(removed)

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
        cdef list removed = []
        cdef Py_ssize_t i
        for i in range(n):
            if not is_block(&self.state, data[i]):
                self.refuse(i, data, "")
        for i in range(n):
            if self.enable_kv_cache_events:
                self.cached_block_hash_to_block.append_keys(data[i], removed, True)
            index_drop_block(self.state.index, data[i])
        self.emit_removed(removed)
        if self.metrics_collector is not None:
            for block in array.tolist():
                run_hook(
                    self.metrics_collector, "on_block_evicted", self.store.view(block)
                )

    evict_block_ids = evict_blocks

    @cython.critical_section
    def reset_prefix_cache(self):
        """Forget all cached content, for instance when the weights have changed.

        Returns:
            Whether it was done: not while a block is in use (see the log for how many).
        """
        cdef block_id_t used = self.state.num_blocks - 1 - self.state.queue.num_free
        cdef block_id_t i
        if used != 0:
            logger.warning("prefix cache not reset: %d blocks are in use", used)
            return False
        index_clear(self.state.index)
        for i in range(self.state.num_blocks):
            if has_hash(&self.state.rows[i]):
                clear_hash(&self.state.rows[i])
                self.state.rows[i].flags &= FLAG_NULL
        self.cached_block_hash_to_block.forget_all()
        watchers = list(self.watchers.items())
        self.watchers.clear()
        for block_id, watcher in watchers:
            run_hook(watcher, None, self.store.view(block_id))
        if self.metrics_collector is not None:
            run_hook(self.metrics_collector, "reset", None)
        if self.enable_kv_cache_events:
            self.emit(event_classes().cleared())
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
