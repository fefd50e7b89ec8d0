"""Physical blocks handed out and taken back by reference count, without a cache.

Stores: a row a block in a `BlockStore`, the free ones in its queue, in the order in
which they go; the copies that writing to a shared block causes.
Invariant: a block is in the queue if and only if nobody has a reference to it
(`check()`). A failed call changes nothing: everything is made and checked first.
Costs: O(1) a block. Threads: each call is atomic.
"""
cimport cython

from kvcache._args cimport as_int
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate as allocate_memory, deallocate
from kvcache._types cimport ANCHOR, MAX_BLOCKS, MAX_REF_CNT, BlockMeta, is_linked
from kvcache.block_store cimport BlockStore
from kvcache.free_queue cimport queue_insert_after, queue_push_back, queue_unlink
from kvcache.prefix_caching.block_ids cimport BlockIds
from kvcache.prefix_caching.blocks cimport NO_ROW, NaiveBlock, chain_of

from kvcache.errors import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.block_list import get_all_blocks_recursively
from kvcache.prefix_caching.interfaces import BlockAllocator

cdef enum:
    # Objects kept for reuse, per physical block: several may share one.
    OBJECTS_A_BLOCK = 4


cdef int refuse_device(object device) except -1:
    """An allocator has one device, so none can be named."""
    if device is not None:
        raise ValueError(f"this allocator has one device, {device!r} cannot be named")
    return 0


cdef int check_held_once(list blocks, BlockOwner owner) except -1:
    """Prove that each block holds a physical one of the owner's, and comes once."""
    cdef set seen = set()
    for block in blocks:
        owner.held_row(block)
        if id(block) in seen:
            raise ValueError(f"{block!r} is listed more than once")
        seen.add(id(block))
    return 0


@cython.final
@cython.no_gc_clear
cdef class NaiveBlockAllocator(BlockOwner):
    """vLLM 0.8.5's `NaiveBlockAllocator`: blocks without prefix caching.

    Args:
        create_block: `NaiveBlock`, or what makes another kind of block from the same
            arguments.
        num_blocks: Number of physical blocks, from 0 on.
        block_size: Number of tokens that a full block has, at least 1.
        block_ids: Their ids, ints from 0 to 2**63 - 1 in any order, which is the one
            they are handed out in; 0 to num_blocks - 1 if None.
        block_pool: `BlockPool` to make blocks with, or None for one of its own.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range.
        MemoryError: There is not that much memory (64 bytes a block).
    """

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds an allocator of no blocks.
        self.build(0, 1, None)

    @cython.critical_section
    def __init__(
        self, create_block, num_blocks, block_size, block_ids=None, block_pool=None
    ):
        if self.ids.count:
            raise ValueError("the allocator is already made")
        if not callable(create_block):
            raise TypeError(f"create_block must be callable, got {create_block!r}")
        if block_pool is not None and type(block_pool) is not BlockPool:
            raise TypeError(f"block_pool must be a BlockPool, got {block_pool!r}")
        if block_pool is None and create_block is not NaiveBlock:
            block_pool = BlockPool(
                block_size, create_block, self,
                OBJECTS_A_BLOCK * as_int(num_blocks, "num_blocks", 0, MAX_BLOCKS),
            )
        self.build(num_blocks, block_size, block_ids)
        self.objects = block_pool

    @staticmethod
    cdef NaiveBlockAllocator part_of(object num_blocks, object block_size, object ids):
        """The one that a prefix-caching allocator takes blocks without content from."""
        cdef NaiveBlockAllocator made = NaiveBlockAllocator.__new__(NaiveBlockAllocator)
        made.build(num_blocks, block_size, ids)
        made.inner = True
        return made

    cdef int build(self, object num_blocks, object block_size, object ids) except -1:
        cdef Py_ssize_t count = as_int(num_blocks, "num_blocks", 0, MAX_BLOCKS)
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef BlockIds made = BlockIds(range(count) if ids is None else ids, count)
        cdef BlockStore store = BlockStore(count)
        cdef block_id_t row
        cdef RefCounter counter = RefCounter.for_allocator(made, store)
        cdef CopyOnWriteTracker copies = CopyOnWriteTracker(counter.as_readonly())
        if self.ids is not None and self.ids.count:
            raise ValueError("the allocator was made while its block ids were read")
        # From here on nothing fails.
        self.block_size, self.ids, self.store = size, made, store
        self.counter, self.copies = counter, copies
        self.queue.num_free = 0
        self.queue.rows = self.store.rows
        self.queue.rows[ANCHOR].prev_free_block = ANCHOR
        self.queue.rows[ANCHOR].next_free_block = ANCHOR
        if made.order is None:
            for row in range(made.count):
                queue_push_back(&self.queue, row)
        else:
            for item in made.order:
                queue_push_back(&self.queue, item)
            made.order = None
        return 0

    @cython.critical_section
    def __repr__(self):
        return (
            f"{type(self).__name__}({self.queue.num_free} of {self.ids.count}"
            " blocks free)"
        )

    # -- rows --------------------------------------------------------------------

    cdef int require_free(self, Py_ssize_t n) except -1:
        """Prove that n blocks can be taken."""
        if n > self.queue.num_free:
            raise NoFreeBlocksError(
                f"{n} blocks are needed, {self.queue.num_free} of {self.ids.count}"
                " are free"
            )
        return 0

    cdef block_id_t take_row(self) noexcept:
        """The first free block, with one reference."""
        cdef block_id_t row = self.queue.rows[ANCHOR].next_free_block
        queue_unlink(&self.queue, row)
        self.queue.rows[row].ref_cnt = 1
        return row

    cdef void return_row(self, block_id_t row) noexcept:
        """Put a block that lost its last reference where it is taken next."""
        self.queue.rows[row].ref_cnt = 0
        queue_insert_after(&self.queue, ANCHOR, row)

    cdef int require_shareable(self, block_id_t row) except -1:
        """Prove that a block is in use and can have one more user."""
        cdef BlockMeta* meta = &self.queue.rows[row]
        if meta.ref_cnt == 0 or meta.ref_cnt == MAX_REF_CNT:
            raise BlockStateError(
                f"block {self.ids.id_of(row)} has {meta.ref_cnt} references, it cannot"
                " be shared"
            )
        return 0

    # -- blocks of any kind ------------------------------------------------------

    cdef int check_open(self) except -1:
        if self.inner:
            raise ValueError(
                "these blocks change through their prefix-caching allocator alone"
            )
        return 0

    cdef object make(self, object prev_block, object token_ids):
        """A block that holds no physical one yet."""
        cdef NaiveBlock block
        if self.objects is not None:
            return self.objects.init_block(
                prev_block, token_ids, self.block_size, None, None
            )
        block = NaiveBlock.__new__(NaiveBlock)
        block.size = self.block_size
        block.belong_to(self)
        block.set_prev(prev_block)
        block.fill(token_ids)
        return block

    cdef int require_idle(self, object block) except -1:
        """Prove that a block, which `create_block` may have made, can get a row."""
        if isinstance(block, TokenBlock):
            if (<TokenBlock> block).allocator is not self:
                raise ValueError(f"{block!r} does not belong to {self!r}")
            if (<TokenBlock> block).row != NO_ROW:
                raise BlockStateError(f"{block!r} holds a physical block")
        elif block.block_id is not None:
            raise BlockStateError(f"{block!r} holds physical block {block.block_id}")
        return 0

    cdef int attach(self, object block, block_id_t row) except -1:
        """Have a block hold a physical one, whose reference becomes its."""
        self.require_idle(block)
        if isinstance(block, TokenBlock):
            (<TokenBlock> block).hold(self, row)
        else:
            block.block_id = self.ids.id_of(row)
        return 0

    cdef block_id_t held_row(self, object block) except -1:
        """The physical block that a block of this allocator holds."""
        cdef block_id_t row
        if isinstance(block, TokenBlock):
            if (<TokenBlock> block).allocator is not self:
                raise ValueError(f"{block!r} does not belong to {self!r}")
            row = (<TokenBlock> block).row
        else:
            if not hasattr(block, "block_id"):
                raise TypeError(f"expected a block, got {block!r}")
            block_id = block.block_id
            row = NO_ROW if block_id is None else self.ids.row_of(block_id)
        if row == NO_ROW:
            raise BlockStateError(f"{block!r} holds no physical block: it was freed")
        if self.queue.rows[row].ref_cnt == 0:  # `free_block_id` took its reference
            raise BlockStateError(f"block {self.ids.id_of(row)} is free already")
        return row

    cdef int detach(self, object block) except -1:
        """Have a block hold no physical one; the reference is still to be taken."""
        if isinstance(block, TokenBlock):
            (<TokenBlock> block).let_go()
        else:
            block.block_id = None
        return 0

    cdef void drop_row(self, block_id_t row) noexcept:
        """One reference less, unless a custom block took the last one meanwhile."""
        if self.queue.rows[row].ref_cnt > 1:
            self.queue.rows[row].ref_cnt -= 1
        elif self.queue.rows[row].ref_cnt == 1:
            self.return_row(row)

    cdef int require_copies(self, Py_ssize_t n) except -1:
        if n:
            self.require_free(n)
            self.copies.reserve(n)
        return 0

    cdef void make_writable(self, TokenBlock block) noexcept:
        cdef block_id_t row = block.row
        if self.queue.rows[row].ref_cnt == 1:
            return
        self.copies.record(
            block.id, self.ids.id_of(self.queue.rows[ANCHOR].next_free_block)
        )
        self.queue.rows[row].ref_cnt -= 1
        block.hold(self, self.take_row())

    cdef list make_chain(self, object prev, object pieces, object extra_hash):
        cdef list blocks = []
        if self.objects is not None:
            return None
        for piece in pieces:
            prev = self.make(prev, piece)
            blocks.append(prev)
        return blocks

    cdef int require_places(self, list blocks, set seen) except -1:
        return self.require_free(len(blocks))

    cdef void place_all(self, list blocks, bint fresh) noexcept:
        for block in blocks:
            (<TokenBlock> block).belong_to(self)
            (<TokenBlock> block).hold(self, self.take_row())

    cdef Py_ssize_t choices(self, list blocks, block_id_t* rows) except -1:
        cdef block_id_t row = self.queue.rows[ANCHOR].next_free_block
        cdef Py_ssize_t n = 0
        while row != ANCHOR and n < len(blocks):
            rows[n] = row
            row = self.queue.rows[row].next_free_block
            n += 1
        return n

    cdef void release_all(self, list blocks) noexcept:
        cdef block_id_t row
        for block in blocks:
            row = (<TokenBlock> block).row
            (<TokenBlock> block).let_go()
            self.drop_row(row)

    # -- allocate and free -------------------------------------------------------

    @cython.critical_section
    def allocate_mutable_block(self, prev_block, extra_hash=None, device=None):
        """A new block without tokens, behind another one of its sequence.

        Args:
            prev_block: The block before it, or None.
            extra_hash: Not used.
            device: None: an allocator has one device.

        Raises:
            NoFreeBlocksError: No block is free.
        """
        refuse_device(device)
        return self.allocate(prev_block, ((),))[0]

    @cython.critical_section
    def allocate_immutable_block(
        self, prev_block, token_ids, extra_hash=None, device=None
    ):
        """As `allocate_mutable_block`, with its tokens, block_size of them or fewer."""
        refuse_device(device)
        return self.allocate(prev_block, (token_ids,))[0]

    @cython.critical_section
    def allocate_immutable_blocks(
        self, prev_block, block_token_ids, extra_hash=None, device=None
    ):
        """New blocks behind each other, one for each list of tokens.

        Raises:
            NoFreeBlocksError: Fewer are free. None was taken.
        """
        refuse_device(device)
        return self.allocate(prev_block, block_token_ids)

    @cython.critical_section
    def allocate_blocks(self, prev_block, block_token_ids, extra_hash=None):
        """As `allocate_immutable_blocks`, which takes shorter lists of tokens too."""
        return self.allocate(prev_block, block_token_ids)

    cdef list allocate(self, object prev_block, object block_token_ids):
        cdef list blocks = []
        self.check_open()
        for token_ids in block_token_ids:
            prev_block = self.make(prev_block, token_ids)
            blocks.append(prev_block)
        self.attach_all(blocks)
        return blocks

    cdef int attach_all(self, list blocks) except -1:
        """Have each block hold a free physical one."""
        cdef Py_ssize_t n = len(blocks), i
        cdef block_id_t* rows = <block_id_t*> allocate_memory(
            n, sizeof(block_id_t), "rows"
        )
        try:
            self.require_free(n)
            for i in range(n):
                rows[i] = self.take_row()
            self.attach_to(blocks, rows)
        finally:
            deallocate(rows)
        return 0

    cdef int attach_to(self, list blocks, block_id_t* rows) except -1:
        """Have each block hold a row; if one does not take it, drop all of them."""
        cdef Py_ssize_t i, done = 0, n = len(blocks)
        try:
            for i in range(n):
                self.attach(blocks[i], rows[i])
                done = i + 1
        except BaseException:
            for i in range(done):
                self.detach(blocks[i])
            for i in range(n - 1, -1, -1):
                self.drop_row(rows[i])
            raise
        return 0

    @cython.critical_section
    def free(self, block, keep_block_object=False):
        """Take back a block's reference to its physical block.

        Args:
            block: A block of this allocator, which holds no physical one afterwards.
            keep_block_object: Whether its object is still needed; kvcache's own are
                reused only when nobody holds them.

        Raises:
            BlockStateError: It was freed already.
            TypeError, ValueError: It is no block of this allocator.
        """
        self.check_open()
        cdef block_id_t row = self.held_row(block)
        self.detach(block)
        self.drop_row(row)
        if self.objects is not None and not keep_block_object:
            self.objects.free_block(block)

    @cython.critical_section
    def free_block_id(self, block_id):
        """Take back one reference to a physical block, given by its id.

        Raises:
            BlockStateError: It is free already.
            TypeError, ValueError: There is no such block.
        """
        cdef block_id_t row = self.ids.row_of(block_id)
        self.check_open()
        if self.queue.rows[row].ref_cnt == 0:
            raise BlockStateError(f"block {block_id} is free already")
        if self.queue.rows[row].ref_cnt > 1:
            self.queue.rows[row].ref_cnt -= 1
        else:
            self.return_row(row)

    @cython.critical_section
    def fork(self, last_block, num_blocks=None):
        """New blocks of a sequence that shares all physical blocks of another.

        Args:
            last_block: Last block of the other sequence.
            num_blocks: Fork so many of its last blocks, those before having been freed
                (a sliding window has passed them); all if None.

        Returns:
            One block for each of the other's, first to last.

        Raises:
            BlockStateError: One of them was freed.
            TypeError, ValueError: One is no block of this allocator.
        """
        cdef list blocks
        cdef block_id_t* rows
        cdef Py_ssize_t i, n
        self.check_open()
        if self.objects is None:
            source = chain_of(last_block, NaiveBlock, num_blocks)
        else:
            source = get_all_blocks_recursively(last_block)
            if num_blocks is not None:
                last = as_int(num_blocks, "num_blocks", 1, len(source))
                source = source[len(source) - last :]
        blocks = []
        prev_block = source[0].prev_block
        for block in source:
            if self.objects is None:
                prev_block = self.make(prev_block, ())
                (<NaiveBlock> prev_block).share_content(block)
            else:
                prev_block = self.make(prev_block, block.token_ids)
            blocks.append(prev_block)
        n = len(<list> source)
        rows = <block_id_t*> allocate_memory(
            n, sizeof(block_id_t), "rows"
        )
        try:
            for i in range(n):
                rows[i] = self.held_row(source[i])
                self.require_shareable(rows[i])
            for i in range(n):
                self.queue.rows[rows[i]].ref_cnt += 1
            self.attach_to(blocks, rows)
        finally:
            deallocate(rows)
        return blocks

    # -- copy-on-write, swap -----------------------------------------------------

    @cython.critical_section
    def cow_block_if_not_appendable(self, block):
        """Have a block hold a physical one that it may write to.

        Returns:
            The id: of a new block if others share the old one, else of the old one.

        Raises:
            NoFreeBlocksError: A copy is needed and no block is free.
            BlockStateError: The block was freed.
        """
        cdef block_id_t row, copy
        cdef object copy_id  # made before anything is written
        self.check_open()
        row = self.held_row(block)
        if self.queue.rows[row].ref_cnt == 1:
            return self.ids.id_of(row)
        self.require_copies(1)
        copy_id = self.ids.id_of(self.queue.rows[ANCHOR].next_free_block)
        if isinstance(block, TokenBlock):
            self.make_writable(block)
            return copy_id
        copy = self.take_row()
        try:
            block.block_id = copy_id
            self.copies.reserve(1)  # again: that ran the block's own code
        except BaseException:
            self.drop_row(copy)
            raise
        self.copies.record(self.ids.id_of(row), self.ids.id_of(copy))
        self.drop_row(row)
        return copy_id

    @cython.critical_section
    def clear_copy_on_writes(self):
        """The copies to make: pairs (source id, destination id) since the last call."""
        return self.copies.clear_cows()

    @cython.critical_section
    def check_swap_out(self, blocks):
        """Raise what `swap_out` would raise, and change nothing."""
        self.check_open()
        check_held_once(list(blocks), self)

    @cython.critical_section
    def swap_out(self, blocks):
        """Take back the references of blocks whose content moves elsewhere.

        Raises:
            TypeError, ValueError: One is no block of this allocator, was freed, or
                comes twice. Nothing was freed.
        """
        cdef list held = list(blocks), old_ids
        cdef Py_ssize_t n = len(held), done = 0, i
        cdef block_id_t* rows = <block_id_t*> allocate_memory(
            n, sizeof(block_id_t), "rows"
        )
        try:
            self.check_open()
            check_held_once(held, self)
            old_ids = [block.block_id for block in held]
            for i in range(n):
                rows[i] = self.held_row(held[i])
            for i in range(n):
                done = i
                self.detach(held[i])
            done = n
            for i in range(n):
                self.drop_row(rows[i])
        except BaseException:
            for i in range(done):
                if isinstance(held[i], TokenBlock):
                    (<TokenBlock> held[i]).hold(self, rows[i])
                else:
                    held[i].block_id = old_ids[i]
            raise
        finally:
            deallocate(rows)

    @cython.critical_section
    def check_swap_in(self, blocks):
        """Raise what `swap_in` would raise once they are out, and change nothing."""
        cdef list waiting = list(blocks)
        self.check_open()
        for block in waiting:
            if self.objects is None and type(block) is not NaiveBlock:
                raise TypeError(f"expected a NaiveBlock, got {block!r}")
            if block.block_size != self.block_size:
                raise ValueError(f"{block!r} has not {self.block_size} tokens")
        if len({id(block) for block in waiting}) != len(waiting):
            raise ValueError("a block is listed more than once")
        self.require_free(len(waiting))

    @cython.critical_section
    def swap_in(self, blocks):
        """Have blocks that hold no physical one hold one of this allocator's.

        Raises:
            NoFreeBlocksError: Fewer are free. Nothing was taken.
            TypeError, ValueError: One is no NaiveBlock, holds a physical block, or
                comes twice. Nothing was taken.
        """
        cdef list waiting = list(blocks)
        self.check_swap_in(waiting)
        for block in waiting:
            if block.block_id is not None:
                raise BlockStateError(f"{block!r} holds a physical block")
        for block in waiting:
            if isinstance(block, TokenBlock):
                (<TokenBlock> block).belong_to(self)
        self.attach_all(waiting)

    # -- what only a cache has ---------------------------------------------------

    @cython.critical_section
    def promote_to_immutable_block(self, block):
        """Raises NotImplementedError: there is no cache to share it through."""
        raise NotImplementedError("a naive block is in no cache")

    @cython.critical_section
    def mark_blocks_as_accessed(self, block_ids, now):
        """Nothing: there is no cache."""

    @cython.critical_section
    def mark_blocks_as_computed(self, block_ids):
        """Nothing: there is no cache."""

    @cython.critical_section
    def get_common_computed_block_ids(self, computed_seq_block_ids):
        """[]: nothing is cached."""
        return []

    @cython.critical_section
    def find_cached_blocks_prefix(self, block_hashes):
        """[]: nothing is cached."""
        return []

    @cython.critical_section
    def get_prefix_cache_hit_rate(self):
        """-1: there is no cache."""
        return -1

    @cython.critical_section
    def reset_prefix_cache(self):
        """True: there is nothing to forget."""
        return True

    # -- state -------------------------------------------------------------------

    @cython.critical_section
    def get_num_full_blocks_touched(self, blocks):
        """How many physical blocks swapping these in takes for the full ones."""
        return len({id(block) for block in blocks if block.is_full})

    @cython.critical_section
    def get_num_free_blocks(self):
        """Number of blocks that nobody uses."""
        return self.queue.num_free

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C."""
        return self.store.nbytes + self.ids.nbytes() + self.copies.nbytes

    @property
    @cython.critical_section
    def refcounter(self):
        """Counts the references to each block."""
        return self.counter

    @property
    @cython.critical_section
    def _refcounter(self):
        return self.counter

    @property
    @cython.critical_section
    def _free_block_indices(self):
        cdef list found = []
        cdef block_id_t row = self.queue.rows[ANCHOR].next_free_block
        while row != ANCHOR:
            found.append(self.ids.id_of(row))
            row = self.queue.rows[row].next_free_block
        return found

    @cython.critical_section
    def check(self):
        """Prove that a block is in the queue if and only if nobody uses it; O(n).

        Raises:
            AssertionError: Names the first block for which it is not so.
        """
        cdef block_id_t row
        cdef block_id_t at = self.queue.rows[ANCHOR].next_free_block, before = ANCHOR
        cdef Py_ssize_t count = 0
        while at != ANCHOR:
            if (
                self.queue.rows[at].ref_cnt
                or self.queue.rows[at].prev_free_block != before
            ):
                raise AssertionError(f"block {self.ids.id_of(at)} is wrongly queued")
            count += 1
            before, at = at, self.queue.rows[at].next_free_block
        if count != self.queue.num_free:
            raise AssertionError(
                f"{count} blocks are queued, {self.queue.num_free} counted"
            )
        for row in range(self.ids.count):
            # A prefix-caching allocator keeps its free cached blocks elsewhere.
            if is_linked(&self.queue.rows[row]) != (
                self.queue.rows[row].ref_cnt == 0
            ) and not self.inner:
                raise AssertionError(
                    f"block {self.ids.id_of(row)} has {self.queue.rows[row].ref_cnt}"
                    " references and is wrongly in or out of the queue"
                )


BlockAllocator.register(NaiveBlockAllocator)
