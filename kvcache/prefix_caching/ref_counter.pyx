"""References to physical blocks, and the copies that writing to a shared one causes.

Stores: a count in each block's row; of the copies, pairs of ids.
Invariant: a count is never negative; an allocator's block is free if and only if it has
none, so such counts cross zero through the allocator alone.
Costs: every operation O(1). Threads: each call is atomic.
"""
cimport cython

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate, copy_bytes, deallocate
from kvcache._types cimport MAX_REF_CNT, BlockMeta

from kvcache.errors import BlockStateError


@cython.final
@cython.no_gc_clear
cdef class RefCounter:
    """How many users each block has.

    Args:
        all_block_indices: The blocks' ids, in any iterable; a repeated one counts once.
    """

    def __cinit__(self, *args, **kwargs):
        self.ids, self.store = BlockIds(()), BlockStore(0)

    @cython.critical_section
    def __init__(self, all_block_indices):
        if self.ids.count:
            raise ValueError("the counter is already made")
        cdef BlockIds ids = BlockIds(all_block_indices)
        self.store = BlockStore(ids.count)
        self.ids = ids

    def __reduce__(self):
        raise no_copy(self)

    @staticmethod
    cdef RefCounter for_allocator(BlockIds ids, BlockStore store):
        cdef RefCounter made = RefCounter.__new__(RefCounter)
        made.ids, made.store, made.of_allocator = ids, store, True
        return made

    cdef int add(self, object block_id, int change) except -1:
        """Change a count by one; the new count."""
        cdef BlockMeta* row = &self.store.rows[self.ids.row_of(block_id)]
        if self.of_allocator:
            raise BlockStateError(
                f"the references to block {block_id} come and go through its allocator"
            )
        if row.ref_cnt == MAX_REF_CNT and change > 0:
            raise ValueError(f"block {block_id} has {MAX_REF_CNT} references already")
        if row.ref_cnt + change < 0:
            raise BlockStateError(f"block {block_id} has no reference to give back")
        row.ref_cnt += change
        return row.ref_cnt

    @cython.critical_section
    def incr(self, block_id):
        """One reference more; the new count.

        Raises:
            ValueError: There is no such block, or the count is at its limit.
        """
        return self.add(block_id, 1)

    @cython.critical_section
    def decr(self, block_id):
        """One reference less; the new count.

        Raises:
            ValueError: There is no such block.
            BlockStateError: It has no reference.
        """
        return self.add(block_id, -1)

    @cython.critical_section
    def get(self, block_id):
        """The count.

        Raises:
            ValueError: There is no such block.
        """
        return self.store.rows[self.ids.row_of(block_id)].ref_cnt

    @cython.critical_section
    def as_readonly(self):
        """A view that shows the counts and refuses to change them."""
        return ReadOnlyRefCounter(self)

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C; 0 if they are an allocator's."""
        return 0 if self.of_allocator else self.store.nbytes + self.ids.nbytes()

    @property
    @cython.critical_section
    def _refcounts(self):
        cdef int row
        return {
            self.ids.id_of(row): self.store.rows[row].ref_cnt
            for row in range(self.ids.count)
        }


@cython.final
cdef class ReadOnlyRefCounter:
    """A view of a counter that cannot change it.

    Args:
        refcounter: The `RefCounter`, or what has its `get`.
    """

    @cython.critical_section
    def __init__(self, refcounter):
        self.counter = refcounter

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def incr(self, block_id):
        """Raises ValueError: the view is read-only."""
        raise ValueError(f"cannot count block {block_id} up: the view is read-only")

    @cython.critical_section
    def decr(self, block_id):
        """Raises ValueError: the view is read-only."""
        raise ValueError(f"cannot count block {block_id} down: the view is read-only")

    @cython.critical_section
    def get(self, block_id):
        """The count, as `RefCounter.get`."""
        return self.counter.get(block_id)


@cython.final
@cython.no_gc_clear
cdef class CopyOnWriteTracker:
    """The copies that the engine must make before the next step.

    Args:
        refcounter: What tells how many users a block has: `get(block_id)`.
    """

    @cython.critical_section
    def __init__(self, refcounter):
        self.counter = refcounter

    def __dealloc__(self):
        deallocate(self.copies)

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def is_appendable(self, block):
        """Whether a block may be written to: nobody shares its physical block."""
        block_id = block.block_id
        return block_id is None or self.counter.get(block_id) <= 1

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Make sure that n more copies can be recorded without failing."""
        cdef Py_ssize_t capacity = 2 * (self.num_copies + n)
        cdef void* bigger
        if self.num_copies + n > self.capacity:
            bigger = allocate(capacity, 2 * sizeof(int64_t), "copies")
            copy_bytes(bigger, self.copies, self.num_copies * 2 * sizeof(int64_t))
            deallocate(self.copies)
            self.copies, self.capacity = <int64_t*> bigger, capacity
        return 0

    cdef void record(self, int64_t source, int64_t destination) noexcept:
        self.copies[2 * self.num_copies] = source
        self.copies[2 * self.num_copies + 1] = destination
        self.num_copies += 1

    @cython.critical_section
    def record_cow(self, src_block_id, trg_block_id):
        """Note that one block's content must be copied to another.

        Raises:
            TypeError, ValueError: One of the ids is None, or no int of 64 bits.
        """
        if src_block_id is None or trg_block_id is None:
            raise ValueError(f"cannot copy block {src_block_id} to {trg_block_id}")
        cdef int64_t source = as_int(src_block_id, "a block id", INT64_MIN, INT64_MAX)
        cdef int64_t target = as_int(trg_block_id, "a block id", INT64_MIN, INT64_MAX)
        self.reserve(1)
        self.record(source, target)

    @cython.critical_section
    def clear_cows(self):
        """The pairs (source id, destination id) since the last call, oldest first."""
        cdef list copies = []
        cdef Py_ssize_t i = 0
        while i < self.num_copies:
            copies.append((self.copies[2 * i], self.copies[2 * i + 1]))
            i += 1
        self.num_copies = 0
        return copies

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C."""
        return self.capacity * 2 * sizeof(int64_t)
