"""The blocks that hold one sequence.

Stores: a list of blocks with their ids, and how many tokens are in them.
Invariant: tokens fill the blocks from the first on; behind the last token there may be
empty slots and whole empty blocks (lookahead). Blocks that a sliding window has passed
are the null block.
Costs: O(1) a block and what the allocator takes; a token appended touches one block.
Threads: each call is atomic, where the allocator is kvcache's.
"""
cimport cython
from cpython.object cimport PyObject

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS
from kvcache.prefix_caching.blocks cimport NO_ROW, PrefixCachingBlock, TokenBlock
from kvcache.prefix_caching.cpu_gpu_block_allocator cimport CpuGpuBlockAllocator
from kvcache.prefix_caching.null_block cimport NullBlock
from kvcache.prefix_caching.prefix_hash cimport exact_tokens

from kvcache.errors import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.interfaces import Device

cdef object GPU = Device.GPU

cdef inline Py_ssize_t ceil_div(Py_ssize_t n, Py_ssize_t size) noexcept:
    """n / size rounded up, for n from 0 on."""
    return (n + size - 1) // size


cdef Py_ssize_t slots(object value, str name) except -1:
    # Sums of two such numbers and a block size stay in range.
    return as_int(value, name, 0, 2**61)


cdef Py_ssize_t num_tokens_in(object block, Py_ssize_t block_size) except -1:
    if isinstance(block, NullBlock):
        return block_size       # only full blocks are dropped
    if isinstance(block, TokenBlock):
        return (<TokenBlock> block).num_tokens
    return len(block.token_ids)


cdef bint is_plain(object block, BlockOwner owner) noexcept:
    """Whether a block takes tokens without asking a block of another class."""
    if not isinstance(block, TokenBlock) or (
        (<TokenBlock> block).owner != <PyObject*> owner
    ):
        return False
    return not (
        type(block) is PrefixCachingBlock
        and (<PrefixCachingBlock> block).has_foreign_parent()
    )


cdef bint all_ours(object blocks) noexcept:
    if type(blocks) is not list:
        return False
    for block in <list> blocks:
        if not isinstance(block, TokenBlock):
            return False
    return True


cdef class BlockTable:
    """vLLM 0.8.5's block table: which blocks hold the tokens of a sequence.

    Args:
        block_size: Tokens a block, at least 1; the allocator's.
        block_allocator: What gives and takes blocks: a `CpuGpuBlockAllocator`, or
            what has its methods.
        _blocks: Blocks to start with, in order; they become the table's.
        max_block_sliding_window: Number of blocks to keep behind the computed ones,
            at least 1; None keeps all.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range.
    """

    @cython.critical_section
    def __init__(
        self, block_size, block_allocator, _blocks=None, max_block_sliding_window=None
    ):
        self._block_size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        if max_block_sliding_window is not None:
            as_int(
                max_block_sliding_window, "max_block_sliding_window", 1, MAX_BLOCKS
            )
        self._allocator = block_allocator
        self._max_block_sliding_window = max_block_sliding_window
        self._blocks = BlockList(() if _blocks is None else _blocks)
        self._num_full_slots = 0
        for block in self._blocks._blocks:
            self._num_full_slots += num_tokens_in(block, self._block_size)

    def __reduce__(self):
        raise no_copy(self)

    @staticmethod
    def get_num_required_blocks(token_ids, block_size, num_lookahead_slots=0):
        """Number of blocks for tokens and lookahead slots, were none of them cached."""
        return ceil_div(
            len(token_ids) + slots(num_lookahead_slots, "num_lookahead_slots"),
            as_int(block_size, "block_size", 1, MAX_BLOCKS),
        )

    cdef int require_allocated(self) except -1:
        if not self._blocks._blocks:
            raise BlockStateError("the table has no blocks: allocate first")
        return 0

    # -- take blocks -----------------------------------------------------------------

    @cython.critical_section
    def allocate(self, token_ids, device=GPU, extra_hash=None):
        """Take blocks for the first tokens of a sequence; full ones may be cached ones.

        Args:
            token_ids: The tokens, at least one.
            device: Where to take the blocks.
            extra_hash: What the content depends on beside tokens, an int or None.

        Raises:
            BlockStateError: The table has blocks already.
            NoFreeBlocksError: Too few blocks are free. None was taken.
            TypeError, ValueError: An argument is of the wrong type, or empty.
        """
        if self._blocks._blocks:
            raise BlockStateError(f"the table has {len(self._blocks)} blocks already")
        tokens = exact_tokens(token_ids)
        if not tokens:
            raise ValueError("token_ids must not be empty")
        cdef Py_ssize_t size = self._block_size, start
        cdef list pieces = [
            tokens[start : start + size] for start in range(0, len(tokens), size)
        ]
        cdef BlockOwner owner = self.owner_on(device)
        cdef list numbers
        blocks = None if owner is None else owner.make_chain(None, pieces, extra_hash)
        if blocks is None:
            blocks = self.allocate_in_two(pieces, device, extra_hash)
            self.update(blocks)
        else:
            numbers = [None] * len(blocks)
            self._blocks.reserve(len(blocks))
            # From here on nothing runs that could change the table or the allocator.
            if self._blocks._blocks:
                raise BlockStateError("the table got blocks while its tokens were read")
            owner.require_places(blocks, None)
            owner.place_all(blocks, True)
            self._blocks.adopt(blocks, numbers)
            self.num_dropped = 0
        self._num_full_slots = len(tokens)

    cdef BlockOwner owner_on(self, object device):
        """A device's allocator, if it and what has it are kvcache's; else None."""
        if type(self._allocator) is not CpuGpuBlockAllocator:
            return None
        allocator = (<CpuGpuBlockAllocator> self._allocator).on(device)
        return allocator if isinstance(allocator, BlockOwner) else None

    cdef list allocate_in_two(self, list pieces, object device, object extra_hash):
        """`allocate_blocks`, of an allocator that has vLLM's methods alone."""
        cdef list blocks = []
        tail = pieces.pop() if len(pieces[len(pieces) - 1]) < self._block_size else None
        if pieces:
            blocks += self._allocator.allocate_immutable_blocks(
                None, block_token_ids=pieces, device=device, extra_hash=extra_hash
            )
        if tail is not None:
            try:
                block = self._allocator.allocate_mutable_block(
                    prev_block=blocks[len(blocks) - 1] if blocks else None,
                    device=device,
                    extra_hash=extra_hash,
                )
            except BaseException:
                for block in reversed(blocks):
                    self._allocator.free(block)
                raise
            block.append_token_ids(tail)
            blocks.append(block)
        return blocks

    @cython.critical_section
    def update(self, blocks):
        """Put blocks in place of the table's, which hold the same tokens; or the same
        blocks after a swap, to read their ids again.

        Raises:
            BlockStateError: One has no physical block. The table is as before.
        """
        self._blocks.update(blocks)
        self.num_dropped = 0

    cdef Py_ssize_t missing_blocks(self, Py_ssize_t num_empty_slots):
        """Number of blocks to add for that many empty slots."""
        cdef Py_ssize_t empty = (
            len(self._blocks._blocks) * self._block_size - self._num_full_slots
        )
        if num_empty_slots <= empty:
            return 0
        return ceil_div(num_empty_slots - empty, self._block_size)

    cdef Py_ssize_t shared_blocks(self, Py_ssize_t num_tokens) except -1:
        """Number of blocks that appending tokens makes a copy of.

        Of kvcache's blocks: those that somebody shares.
        """
        cdef Py_ssize_t shared = 0, index
        cdef Py_ssize_t first = self._num_full_slots // self._block_size
        cdef Py_ssize_t end = min(
            ceil_div(self._num_full_slots + num_tokens, self._block_size),
            len(self._blocks._blocks),
        )
        cdef TokenBlock block
        if num_tokens == 0:
            return 0
        for index in range(first, end):
            if isinstance(self._blocks._blocks[index], TokenBlock):
                block = self._blocks._blocks[index]
                if block.owner != NULL:
                    if block.row == NO_ROW:
                        raise BlockStateError(f"{block!r} at {index} was freed")
                    shared += (
                        (<BlockOwner> block.owner).store.rows[block.row].ref_cnt > 1
                    )
        return shared

    cdef int require_free(self, Py_ssize_t n, object device) except -1:
        cdef Py_ssize_t free
        if n:
            free = self._allocator.get_num_free_blocks(device)
            if n > free:
                raise NoFreeBlocksError(
                    f"{n} blocks are needed, {free} are free on {device}"
                )
        return 0

    cdef int grow(self, Py_ssize_t n, object extra_hash) except -1:
        """Add n empty blocks, or none if one cannot be had."""
        cdef list blocks = self._blocks._blocks
        cdef Py_ssize_t before = len(blocks)
        try:
            for _ in range(n):
                self._blocks.add(
                    self._allocator.allocate_mutable_block(
                        prev_block=blocks[len(blocks) - 1],
                        device=GPU,
                        extra_hash=extra_hash,
                    )
                )
        except BaseException:
            while len(blocks) > before:
                self._blocks.numbers.pop()
                self._allocator.free(blocks.pop())
            raise
        return 0

    @cython.critical_section
    def ensure_num_empty_slots(self, num_empty_slots, extra_hash=None):
        """Have that many slots behind the last token, in new blocks of the GPU's.

        Raises:
            BlockStateError: The table has no blocks.
            NoFreeBlocksError: Too few blocks are free. None was taken.
        """
        cdef Py_ssize_t num_slots = slots(num_empty_slots, "num_empty_slots")
        cdef BlockOwner owner = self.owner_on(GPU)
        self.require_allocated()
        if owner is None or not self.append_here(owner, (), num_slots, extra_hash):
            self.append_anywhere((), num_slots, extra_hash)

    # -- append ----------------------------------------------------------------------

    @cython.critical_section
    def append_token_ids(
        self,
        token_ids,
        num_lookahead_slots=0,
        num_computed_slots=None,
        extra_hash=None,
    ):
        """Put tokens behind the last one; take blocks of the GPU's where needed.

        Args:
            token_ids: The tokens.
            num_lookahead_slots: Slots to have behind them.
            num_computed_slots: Number of tokens whose KV values are there, at most
                those of the table and `token_ids`. With a sliding window it says
                which blocks can go; else it is not read.
            extra_hash: What the content depends on beside tokens, an int or None.

        Raises:
            BlockStateError: The table has no blocks, or one was freed.
            NoFreeBlocksError: Too few blocks are free for new blocks and for copies of
                shared ones. Nothing was appended or taken; what the window has passed
                is dropped nevertheless.
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        self.require_allocated()
        tokens = exact_tokens(token_ids)
        cdef Py_ssize_t n = len(tokens)
        cdef Py_ssize_t lookahead = slots(num_lookahead_slots, "num_lookahead_slots")
        if self._max_block_sliding_window is not None:
            self.drop_blocks(num_computed_slots, n)
        cdef BlockOwner owner = self.owner_on(GPU)
        if owner is None or not self.append_here(owner, tokens, lookahead, extra_hash):
            self.append_anywhere(tokens, lookahead, extra_hash)

    cdef bint append_here(
        self, BlockOwner owner, object tokens, Py_ssize_t lookahead, object extra_hash
    ) except -1:
        """Append to blocks of one of kvcache's allocators: all tokens, or none.

        Returns:
            Whether these are such blocks; nothing was done if not.
        """
        cdef list blocks = self._blocks._blocks, fresh, holes, pieces = []
        cdef Py_ssize_t size = self._block_size, n = len(tokens), start = 0, end, i
        cdef Py_ssize_t full = self._num_full_slots, first = full // size
        cdef Py_ssize_t count = len(blocks)
        cdef Py_ssize_t missing = self.missing_blocks(n + lookahead)
        cdef Py_ssize_t shared = 0
        cdef TokenBlock block
        if missing == 0 and n and n <= size - full % size:
            if not is_plain(blocks[first], owner):
                return False
            block = <TokenBlock> blocks[first]
            if block.prepare(tokens):
                owner.require_copies(1)
            block.append(tokens)
            self._blocks.note(first)
            self._blocks.try_to_fill()
            self._num_full_slots = full + n
            return True
        self.require_free(missing + self.shared_blocks(n), GPU)
        fresh = owner.make_chain(blocks[count - 1], [()] * missing, extra_hash)
        if fresh is None:
            return False
        while start < n:
            end = min(n, start + size - (full + start) % size)
            pieces.append(tokens if end - start == n else tokens[start:end])
            start = end
        holes = [None] * missing
        # From here on nothing runs that could change the table or the allocator.
        if len(self._blocks._blocks) != count or self._num_full_slots != full:
            raise BlockStateError("the table changed while it was appended to")
        for i in range(len(pieces)):
            if first + i >= count:
                (<TokenBlock> fresh[first + i - count]).make_room(len(pieces[i]))
            elif not is_plain(blocks[first + i], owner):
                return False
            else:
                block = <TokenBlock> blocks[first + i]
                shared += block.prepare(pieces[i])
        owner.require_copies(missing + shared)
        self._blocks.extend(fresh, holes)
        # From here on nothing fails.
        owner.place_all(fresh, True)
        for i in range(len(pieces)):
            (<TokenBlock> blocks[first + i]).append(pieces[i])
            self._blocks.note(first + i)
        self._blocks.note_all(count)
        self._num_full_slots = full + n
        return True

    cdef int append_anywhere(
        self, object tokens, Py_ssize_t lookahead, object extra_hash
    ) except -1:
        """Append to blocks of any class, one after the other."""
        cdef Py_ssize_t size = self._block_size, n = len(tokens), start = 0, end
        cdef Py_ssize_t missing = self.missing_blocks(n + lookahead)
        self.require_free(missing + self.shared_blocks(n), GPU)
        self.grow(missing, extra_hash)
        while start < n:
            end = min(n, start + size - self._num_full_slots % size)
            self._blocks.add_tokens(
                self._num_full_slots // size,
                tokens if end - start == n else tokens[start:end],
            )
            self._num_full_slots += end - start
            start = end
        return 0

    cdef int drop_blocks(
        self, object num_computed_slots, Py_ssize_t num_new_tokens
    ) except -1:
        """Put the null block in place of those that the window has passed."""
        if num_computed_slots is None:
            raise ValueError("a sliding window needs num_computed_slots, got None")
        cdef Py_ssize_t computed = as_int(
            num_computed_slots,
            "num_computed_slots",
            0,
            self._num_full_slots + num_new_tokens,
        )
        cdef list blocks = self._blocks._blocks
        cdef Py_ssize_t window = self._max_block_sliding_window, index
        # The last block stays: the next one stands behind it.
        cdef Py_ssize_t end = min(
            computed // self._block_size - window,
            self._num_full_slots // self._block_size,
            len(blocks) - 1,
        )
        null_block = self._allocator.allocate_or_get_null_block()
        for index in range(self.num_dropped, end):
            if blocks[index] is not null_block:
                self._allocator.free(blocks[index])
                self._blocks.put(index, null_block)
        self.num_dropped = max(self.num_dropped, end)
        return 0

    # -- fork and free ---------------------------------------------------------------

    @cython.critical_section
    def fork(self):
        """A second table with the same tokens in the same physical blocks.

        Raises:
            BlockStateError: The table has no blocks, or one was freed.
        """
        cdef list blocks = self._blocks._blocks, numbers, ours
        cdef Py_ssize_t count = len(blocks), num_null = 0, i
        cdef BlockTable forked
        self.require_allocated()
        while num_null < count and isinstance(blocks[num_null], NullBlock):
            num_null += 1
        forked = BlockTable(
            self._block_size, self._allocator, (), self._max_block_sliding_window
        )
        ours, numbers = blocks[:], [None] * count
        forked._blocks.reserve(count)
        last = blocks[count - 1]
        if num_null == 0:
            others = self._allocator.fork(last)
        else:
            others = self._allocator.fork(last, count - num_null)
        if not all_ours(others):
            forked._blocks.update(ours[:num_null] + list(others))
        else:
            for i in range(num_null, count):
                ours[i] = others[i - num_null]
            forked._blocks.adopt(ours, numbers)
        forked._num_full_slots = self._num_full_slots
        return forked

    @cython.critical_section
    def free(self):
        """Give all blocks back; the table is empty then, and can be used again.

        Raises:
            BlockStateError: One was freed already. None is given back.
        """
        cdef list blocks = self._blocks._blocks
        for index, block in enumerate(blocks):
            if block.block_id is None:
                raise BlockStateError(f"{block!r} at {index} was freed already")
        for block in blocks:
            self._allocator.free(block)
        self._blocks.reset()
        self._num_full_slots = 0

    # -- look ------------------------------------------------------------------------

    @property
    @cython.critical_section
    def physical_block_ids(self):
        """Ids of the blocks, in order: the table's own list, to be read only."""
        return self._blocks.ids()

    @property
    @cython.critical_section
    def blocks(self):
        """The blocks, in order: the table's own list, to be read only."""
        return self._blocks._blocks

    @property
    @cython.critical_section
    def num_full_slots(self):
        """Number of tokens in the table, those of dropped blocks included."""
        return self._num_full_slots

    @property
    @cython.critical_section
    def _num_empty_slots(self):
        self.require_allocated()
        return len(self._blocks._blocks) * self._block_size - self._num_full_slots

    @property
    @cython.critical_section
    def _is_allocated(self):
        return len(self._blocks._blocks) > 0

    @cython.critical_section
    def _get_all_token_ids(self):
        return [token for block in self._blocks._blocks for token in block.token_ids]

    @cython.critical_section
    def get_unseen_token_ids(self, sequence_token_ids):
        """Those tokens of the whole sequence that are not in the table yet."""
        return sequence_token_ids[self._num_full_slots :]

    @cython.critical_section
    def get_num_blocks_touched_by_append_slots(self, token_ids, num_lookahead_slots):
        """Number of blocks that appending these tokens and slots would write to.

        So many free blocks are enough for it, be all shared or new. As in vLLM, a last
        block that is partly full counts even if nothing is appended.
        """
        return ceil_div(
            self._num_full_slots % self._block_size
            + len(token_ids)
            + slots(num_lookahead_slots, "num_lookahead_slots"),
            self._block_size,
        )
