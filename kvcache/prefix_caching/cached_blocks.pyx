"""Physical blocks by row: who uses them, what they hold, which goes next.

Stores: what a `NaiveBlockAllocator` stores; an index of content hashes; a heap of the
free blocks that hold content; per block when it was used and whether it is computed.
Invariant: a block that nobody uses is in the queue if it holds no content and in the
heap if it does; the index names it if and only if it does. `check()` proves it.
Costs: O(1) a block, but O(log n) where one leaves the heap; 152 bytes a block.
Threads: each call of an allocator is atomic.
"""
cimport cython

from kvcache._args cimport no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport ANCHOR, FLAG_INDEXED, NO_NUM_TOKENS, Key, is_linked
from kvcache.hash_index cimport (
    entry_block,
    index_add_row,
    index_bytes,
    index_drop_block,
    index_find,
    index_free,
    index_init,
)
from kvcache.prefix_caching.blocks cimport NO_ROW
from kvcache.prefix_caching.eviction_heap cimport (
    heap_add,
    heap_check,
    heap_contains,
    heap_first,
    heap_free,
    heap_init,
    heap_nbytes,
    heap_pop,
    heap_remove,
    heap_rows,
    heap_update,
)
from kvcache.prefix_caching.prefix_hash cimport key_of_digest, prefix_hash_of

from kvcache.errors import NoFreeBlocksError
from kvcache.prefix_caching.block_tracker import BlockTracker
from kvcache.prefix_caching.evictor import BlockMetaData, Evictor

cdef double NEVER_ACCESSED = -1.0


@cython.final
@cython.no_gc_clear
cdef class CachedBlocks:
    """The physical blocks of a `PrefixCachingBlockAllocator`; it alone makes one."""

    def __cinit__(self, num_blocks=0, block_size=1, block_ids=None):
        cdef block_id_t row
        self.hashless = NaiveBlockAllocator.part_of(num_blocks, block_size, block_ids)
        self.ids, self.rows = self.hashless.ids, self.hashless.store.rows
        cdef block_id_t count = self.ids.count
        if index_init(&self.index, self.rows, count, count) < 0:
            raise MemoryError(f"cannot allocate an index of {count} blocks")
        heap_init(&self.heap, count)
        self.tracked = <Tracked*> allocate(count, sizeof(Tracked), "blocks' state")
        self.touched = <block_id_t*> allocate(count, sizeof(block_id_t), "block ids")
        for row in range(count):
            self.tracked[row].last_accessed = NEVER_ACCESSED

    def __dealloc__(self):
        index_free(&self.index)
        heap_free(&self.heap)
        deallocate(self.tracked)
        deallocate(self.touched)

    cdef Py_ssize_t nbytes(self) noexcept:
        cdef Py_ssize_t a_row = sizeof(Tracked) + sizeof(block_id_t)
        return index_bytes(&self.index) + heap_nbytes(&self.heap) + (
            self.ids.count * a_row
        )

    cdef Py_ssize_t num_free(self) noexcept:
        return self.hashless.queue.num_free + self.heap.count

    cdef int require_free(self, Py_ssize_t n) except -1:
        """Prove that n blocks can be taken."""
        if n > self.num_free():
            raise NoFreeBlocksError(
                f"{n} blocks are needed, {self.num_free()} of {self.ids.count} are free"
            )
        return 0

    cdef block_id_t find(self, const uint8_t* digest) noexcept:
        cdef Key key
        cdef int entry
        key_of_digest(&key, digest)
        entry = index_find(&self.index, &key)
        return entry_block(&self.index, entry) if entry else NO_ROW

    cdef block_id_t first_free(self) noexcept:
        if self.hashless.queue.num_free:
            return self.rows[ANCHOR].next_free_block
        return self.heap.entries[0].row

    cdef block_id_t take(self) noexcept:
        """A free row, with one reference: one without content, or it is evicted."""
        cdef block_id_t row
        if self.hashless.queue.num_free:
            return self.hashless.take_row()
        row = heap_pop(&self.heap)
        index_drop_block(&self.index, row)
        self.rows[row].ref_cnt = 1
        return row

    cdef Py_ssize_t next_free(self, Py_ssize_t n, block_id_t* rows) except -1:
        cdef block_id_t row = self.rows[ANCHOR].next_free_block
        cdef Py_ssize_t count = 0
        while row != ANCHOR and count < n:
            rows[count] = row
            row = self.rows[row].next_free_block
            count += 1
        return count + heap_first(&self.heap, n - count, rows + count)

    cdef void drop(self, block_id_t row, int64_t num_tokens) noexcept:
        """One reference less; without any the row is free, with its content if any."""
        cdef Tracked* tracked = &self.tracked[row]
        if self.rows[row].ref_cnt > 1:
            self.rows[row].ref_cnt -= 1
            return
        if self.rows[row].flags & FLAG_INDEXED:
            self.rows[row].ref_cnt = 0
            heap_add(
                &self.heap, row, self.ids.id_of(row), num_tokens, tracked.last_accessed
            )
        else:
            self.hashless.return_row(row)
        tracked.last_accessed = NEVER_ACCESSED
        tracked.computed = tracked.touched = False

    cdef void use(self, block_id_t row) noexcept:
        """One more user of a row that holds content."""
        if self.rows[row].ref_cnt == 0:
            heap_remove(&self.heap, row)
            # Whoever used it before has had it computed.
            self.tracked[row].computed = True
        self.rows[row].ref_cnt += 1

    cdef void put(self, block_id_t row, const uint8_t* digest) noexcept:
        """Let a row in use answer for content, computed once the step is done."""
        cdef Tracked* tracked = &self.tracked[row]
        cdef Key key
        key_of_digest(&key, digest)
        index_add_row(&self.index, row, &key, NO_NUM_TOKENS)
        tracked.touched = True
        if not tracked.listed:
            tracked.listed = True
            self.touched[self.num_touched] = row
            self.num_touched += 1

    cdef void mark_accessed(self, block_id_t row, double when) noexcept:
        if self.rows[row].ref_cnt:
            self.tracked[row].last_accessed = when
        else:
            heap_update(&self.heap, row, when)

    cdef void mark_computed(self) noexcept:
        cdef block_id_t i
        cdef Tracked* tracked
        for i in range(self.num_touched):
            tracked = &self.tracked[self.touched[i]]
            # vLLM would also mark a block that was freed and taken again since.
            if tracked.touched:
                tracked.computed = True
            tracked.touched = tracked.listed = False
        self.num_touched = 0

    cdef bint is_computed(self, block_id_t row) noexcept:
        if self.rows[row].ref_cnt:
            return self.tracked[row].computed
        return heap_contains(&self.heap, row)

    cdef void forget_all(self) noexcept:
        """Evict all, first to go first: the last one is then taken first."""
        cdef block_id_t row
        while self.heap.count:
            row = heap_pop(&self.heap)
            index_drop_block(&self.index, row)
            self.hashless.return_row(row)

    cdef dict by_hash(self):
        cdef block_id_t row
        return {
            prefix_hash_of(self.rows[row].block_hash): self.ids.id_of(row)
            for row in range(self.ids.count)
            if self.rows[row].flags & FLAG_INDEXED
        }

    cdef set touched_ids(self):
        cdef block_id_t row
        return {
            self.ids.id_of(row)
            for row in range(self.ids.count)
            if self.tracked[row].touched
        }

    cdef dict trackers(self):
        cdef block_id_t row
        return {
            self.ids.id_of(row): BlockTracker.of(
                self.rows[row].ref_cnt > 0,
                self.tracked[row].last_accessed,
                self.tracked[row].computed,
            )
            for row in range(self.ids.count)
        }

    cdef int check(self) except -1:
        cdef block_id_t row, indexed = 0
        cdef bint used, cached
        cdef Tracked* tracked
        self.hashless.check()
        heap_check(&self.heap)
        for row in range(self.ids.count):
            tracked = &self.tracked[row]
            used = self.rows[row].ref_cnt > 0
            cached = (self.rows[row].flags & FLAG_INDEXED) != 0
            name = self.ids.id_of(row)
            if is_linked(&self.rows[row]) != (not used and not cached):
                raise AssertionError(f"block {name} is wrongly in or out of the queue")
            if heap_contains(&self.heap, row) != (not used and cached):
                raise AssertionError(f"block {name} is wrongly in or out of the heap")
            if not used and (tracked.computed or tracked.touched):
                raise AssertionError(f"block {name} is free and tracked")
            if tracked.touched and not (cached and tracked.listed):
                raise AssertionError(f"block {name} is touched and unknown")
            if cached and self.find(self.rows[row].block_hash) != row:
                raise AssertionError(f"block {name} is not found by its hash")
            indexed += cached
        if indexed != <block_id_t> self.index.num_keys:
            raise AssertionError(
                f"{indexed} blocks are cached, the index has {self.index.num_keys}"
            )
        return 0


@cython.final
@cython.no_gc_clear
cdef class AllocatorEvictor:
    """The free blocks of an allocator that hold content: those it may evict.

    To look at: they change through the allocator alone.
    """

    def __cinit__(self, CachedBlocks blocks not None):
        self.blocks = blocks

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def __contains__(self, block_id):
        cdef block_id_t row = self.blocks.ids.find(block_id)
        return row != NO_ROW and heap_contains(&self.blocks.heap, row)

    @property
    @cython.critical_section
    def num_blocks(self):
        """How many there are."""
        return self.blocks.heap.count

    @property
    @cython.critical_section
    def free_table(self):
        """What is known of each, by block id, in the order in which they were freed."""
        cdef EvictionHeap* heap = &self.blocks.heap
        cdef block_id_t row
        table = {}
        for item in heap_rows(heap):
            row = item
            table[self.blocks.ids.id_of(row)] = BlockMetaData(
                prefix_hash_of(self.blocks.rows[row].block_hash),
                heap.entries[heap.place[row]].num_tokens,
                heap.entries[heap.place[row]].last_accessed,
            )
        return table

    @cython.critical_section
    def refuse(self, *args, **kwargs):
        """Raises ValueError: these blocks change through their allocator alone."""
        raise ValueError("these blocks change through their allocator alone")

    add = update = remove = evict = refuse


Evictor.register(AllocatorEvictor)
