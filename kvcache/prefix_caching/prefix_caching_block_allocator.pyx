"""vLLM v0's prefix-caching allocator: blocks that share full blocks' content.

Stores: the physical blocks (cached_blocks.pyx), the copies to make, the hit rate.
Invariant: each block that holds a physical one has one reference to it. A failed call
changes nothing: blocks are made, checked and counted before the first row is taken.
Costs: O(1) a block, but O(log n) where one leaves the heap of those to evict.
Threads: each call is atomic.
"""
cimport cython
from libc.math cimport isnan

import logging
from os.path import commonprefix

from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport is_linked
from kvcache.prefix_caching.blocks cimport NO_BLOCK_ID, NO_ROW, TokenBlock, chain_of
from kvcache.prefix_caching.cached_blocks cimport AllocatorEvictor
from kvcache.prefix_caching.naive_block_allocator cimport check_held_once, refuse_device
from kvcache.prefix_caching.prefix_hash cimport (
    DIGEST_BYTES,
    encode_extra,
    prefetch_tokens,
    read_prefix_hash,
)

from kvcache.errors import BlockStateError
from kvcache.prefix_caching import prefix_hash
from kvcache.prefix_caching.blocks import assert_prefix_caching_block_or_none
from kvcache.prefix_caching.evictor import EvictionPolicy
from kvcache.prefix_caching.interfaces import BlockAllocator

logger = logging.getLogger(__name__)


@cython.final
@cython.no_gc_clear
cdef class PrefixCachingBlockAllocator(BlockOwner):
    """vLLM 0.8.5's `PrefixCachingBlockAllocator`.

    Same ids in the same order wherever vLLM's does not fail. Where it does: the block
    that is evicted is always the one its rule names (see `evictor`), hashes have 128
    bits, and a call that fails changes nothing.

    Args:
        num_blocks: Number of physical blocks, from 0 on.
        block_size: Number of tokens that a full block has, at least 1.
        block_ids: Their ids, ints from 0 to 2**63 - 1 in any order, which is the one
            they are first handed out in; 0 to num_blocks - 1 if None.
        eviction_policy: `EvictionPolicy.LRU`.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range.
        MemoryError: There is not that much memory (152 bytes a block).
    """

    _none_hash = prefix_hash.NONE_HASH

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds an allocator of no blocks.
        self.build(0, 1, None)

    @cython.critical_section
    def __init__(
        self, num_blocks, block_size, block_ids=None, eviction_policy=EvictionPolicy.LRU
    ):
        if self.ids.count:
            raise ValueError("the allocator is already made")
        if eviction_policy is not EvictionPolicy.LRU:
            raise ValueError(
                f"eviction_policy must be EvictionPolicy.LRU, got {eviction_policy!r}"
            )
        self.build(num_blocks, block_size, block_ids)
        self.eviction_policy = eviction_policy

    cdef int build(self, object num_blocks, object block_size, object ids) except -1:
        cdef CachedBlocks blocks = CachedBlocks(num_blocks, block_size, ids)
        cdef CacheMetricData metric_data = CacheMetricData()
        if self.ids is not None and self.ids.count:
            raise ValueError("the allocator was made while its block ids were read")
        self.blocks, self.ids = blocks, blocks.ids
        self.store, self.block_size = blocks.hashless.store, blocks.hashless.block_size
        self.metric_data = metric_data
        return 0

    @cython.critical_section
    def __repr__(self):
        return (
            f"PrefixCachingBlockAllocator({self.blocks.num_free()} of {self.ids.count}"
            " blocks free)"
        )

    cdef block_id_t held_row(self, object block) except -1:
        if type(block) is not PrefixCachingBlock:
            raise TypeError(f"expected a PrefixCachingBlock, got {block!r}")
        cdef PrefixCachingBlock ours = block
        if ours.allocator is not self:
            raise ValueError(f"{block!r} does not belong to {self!r}")
        if ours.row == NO_ROW:
            raise BlockStateError(f"{block!r} holds no physical block: it was freed")
        return ours.row

    # -- what blocks ask for -----------------------------------------------------

    cdef int require_copies(self, Py_ssize_t n) except -1:
        if n:
            self.blocks.require_free(n)
            self.blocks.hashless.copies.reserve(n)
        return 0

    cdef void make_writable(self, TokenBlock block) noexcept:
        if self.store.rows[block.row].ref_cnt == 1:
            return
        self.blocks.hashless.copies.record(
            block.id, self.ids.id_of(self.blocks.first_free())
        )
        self.blocks.drop(block.row, block.total)
        block.hold(self, self.blocks.take())

    cdef void promote(self, TokenBlock block) noexcept:
        cdef block_id_t row = self.blocks.find(block.digest)
        if row == NO_ROW:
            self.blocks.put(block.row, block.digest)
        elif row != block.row:
            self.blocks.drop(block.row, block.total)
            self.blocks.use(row)
            block.hold(self, row)
            block.is_computed = True

    # -- allocate and free -------------------------------------------------------

    cdef PrefixCachingBlock make(
        self, object prev_block, object token_ids, object extra_hash, bytes extra
    ):
        """A block that holds no physical one yet."""
        cdef PrefixCachingBlock block
        block = PrefixCachingBlock.__new__(PrefixCachingBlock)
        block.size = self.block_size
        block.belong_to(self)
        block.extra, block.extra_bytes = extra_hash, extra
        block.set_prev(prev_block)
        block.fill(token_ids)
        return block

    cdef block_id_t cached_row(self, PrefixCachingBlock block) noexcept:
        """The row that holds the block's content, or NO_ROW."""
        return self.blocks.find(block.digest) if block.has_digest else NO_ROW

    cdef int require_places(self, list blocks, set seen) except -1:
        """Prove that each block can hold a cached row, or one taken for it.

        A row that is taken may hold what a later block needs. That block then takes
        another row instead of taking this one out of the heap, so one is needed for it
        either way.
        """
        cdef Py_ssize_t needed = 0
        cdef PrefixCachingBlock block
        cdef block_id_t row
        for item in blocks:
            block = <PrefixCachingBlock> item
            row = self.cached_row(block)
            if row != NO_ROW and self.store.rows[row].ref_cnt:
                continue
            if seen is not None and block.has_digest:
                digest = block.content_hash
                if digest in seen:
                    continue
                seen.add(digest)
            needed += 1
        return self.blocks.require_free(needed)

    cdef bint place(self, PrefixCachingBlock block) noexcept:
        """Have a block hold the row of its content, or a free one."""
        cdef block_id_t row
        if not block.has_digest:
            block.hold(self, self.blocks.take())
            return False
        row = self.blocks.find(block.digest)
        cdef bint hit = row != NO_ROW
        self.metric_data.note(hit)
        if hit:
            self.blocks.use(row)
        else:
            row = self.blocks.take()
            self.blocks.put(row, block.digest)
        block.hold(self, row)
        return hit

    @cython.critical_section
    def allocate_immutable_block(
        self, prev_block, token_ids, extra_hash=None, device=None
    ):
        """A full block: one that is cached already, or a new one.

        Args:
            prev_block: The full block before it in its sequence, or None.
            token_ids: Its tokens, block_size ints of 64 bits, sign included.
            extra_hash: Int that also identifies the content, or None.
            device: None: an allocator has one device.

        Raises:
            NoFreeBlocksError: It is not cached and no block is free.
            TypeError, ValueError: An argument is of the wrong type or length.
        """
        return self.allocate_immutable_blocks(
            prev_block, (token_ids,), extra_hash, device
        )[0]

    @cython.critical_section
    def allocate_immutable_blocks(
        self, prev_block, block_token_ids, extra_hash=None, device=None
    ):
        """Full blocks behind each other, one for each list of tokens.

        Raises:
            NoFreeBlocksError: Fewer blocks are free than are not cached. None was
                taken, and no hit or miss counted.
            TypeError, ValueError: As `allocate_immutable_block`.
        """
        refuse_device(device)
        return self.allocate_all(prev_block, block_token_ids, extra_hash, False)

    @cython.critical_section
    def allocate_blocks(self, prev_block, block_token_ids, extra_hash=None):
        """As `allocate_immutable_blocks`, but the last list may have fewer tokens.

        That block then is mutable, as if `allocate_mutable_block` had made it.
        """
        return self.allocate_all(prev_block, block_token_ids, extra_hash, True)

    cdef list allocate_all(
        self,
        object prev_block,
        object block_token_ids,
        object extra_hash,
        bint may_have_tail,
    ):
        cdef list blocks
        cdef PrefixCachingBlock block
        cdef Py_ssize_t i
        blocks = self.make_chain(prev_block, block_token_ids, extra_hash)
        for i in range(len(blocks)):
            block = <PrefixCachingBlock> blocks[i]
            if block.has_digest:
                continue
            if not may_have_tail:
                raise BlockStateError(
                    f"an immutable block needs {self.block_size} tokens and a full"
                    f" block before it, got {block!r} behind {block.prev_block!r}"
                )
            if i < len(blocks) - 1:
                raise BlockStateError(f"{block!r} has no hash and is not the last")
        # From here on nothing runs that could change the allocator.
        self.require_places(blocks, None)
        self.place_all(blocks, True)
        return blocks

    cdef list make_chain(self, object prev, object pieces, object extra_hash):
        cdef bytes extra = encode_extra(extra_hash)
        cdef list blocks = []
        assert_prefix_caching_block_or_none(prev)
        # A long-lived heap has a prompt's ints all over: asked for a block ahead, hits
        # take 15 % less there. Asking for the lists before them did not help.
        cdef list ahead = pieces if type(pieces) is list else []
        for piece in pieces:
            if len(blocks) + 1 < len(ahead):
                prefetch_tokens(ahead[len(blocks) + 1])
            prev = self.make(prev, piece, extra_hash, extra)
            blocks.append(prev)
        return blocks

    cdef void place_all(self, list blocks, bint fresh) noexcept:
        cdef PrefixCachingBlock block
        cdef bint hit
        for item in blocks:
            block = <PrefixCachingBlock> item
            block.belong_to(self)
            hit = self.place(block)
            if fresh:
                block.is_computed = hit

    cdef Py_ssize_t choices(self, list blocks, block_id_t* rows) except -1:
        cdef Py_ssize_t n = self.blocks.next_free(len(blocks), rows)
        cdef block_id_t row
        for item in blocks:
            row = self.cached_row(<PrefixCachingBlock> item)
            if row != NO_ROW:
                rows[n] = row
                n += 1
        return n

    cdef void release_all(self, list blocks) noexcept:
        for block in blocks:
            self.blocks.drop((<TokenBlock> block).row, (<TokenBlock> block).total)
            (<TokenBlock> block).let_go()

    @cython.critical_section
    def allocate_mutable_block(self, prev_block, extra_hash=None, device=None):
        """A block without tokens, in a physical one of its own.

        A cached block that nobody uses is evicted for it if no other is free.

        Args:
            prev_block: The block before it in its sequence, or None.
            extra_hash: Int that will also identify its content, or None.
            device: None: an allocator has one device.

        Raises:
            NoFreeBlocksError: All blocks are in use.
        """
        refuse_device(device)
        assert_prefix_caching_block_or_none(prev_block)
        cdef PrefixCachingBlock block = self.make(
            prev_block, (), extra_hash, encode_extra(extra_hash)
        )
        self.blocks.require_free(1)
        self.place(block)
        return block

    @cython.critical_section
    def free(self, block, keep_block_object=False):
        """Take back a block's reference to its physical block.

        Full blocks' content stays cached until the physical block is needed.

        Args:
            block: A block of this allocator, which holds no physical one afterwards.
            keep_block_object: Not used: objects are reused when nobody holds them.

        Raises:
            BlockStateError: It was freed already.
            TypeError, ValueError: It is no block of this allocator.
        """
        cdef block_id_t row = self.held_row(block)
        self.blocks.drop(row, (<PrefixCachingBlock> block).total)
        (<PrefixCachingBlock> block).let_go()

    @cython.critical_section
    def fork(self, last_block, num_blocks=None):
        """New blocks of a sequence that shares all physical blocks of another.

        Args:
            last_block: Last block of the other sequence.
            num_blocks: Fork so many of its last blocks, those before having been freed
                (a sliding window has passed them); all if None. The first of the new
                ones stands behind the same block as the old one, so that its hash is
                that of the whole sequence.

        Returns:
            One block for each of the other's, first to last.

        Raises:
            BlockStateError: One of them was freed.
            TypeError, ValueError: One is no block of this allocator.
        """
        cdef list source = chain_of(last_block, PrefixCachingBlock, num_blocks)
        cdef list blocks = []
        cdef PrefixCachingBlock old, block
        cdef object before = (<TokenBlock> source[0]).prev_block
        cdef Py_ssize_t i
        for item in source:
            old = <PrefixCachingBlock> item
            self.held_row(old)
            block = PrefixCachingBlock.__new__(PrefixCachingBlock)
            block.size = self.block_size
            block.belong_to(self)
            # Of any class if it stays: nothing may be asked of it here.
            TokenBlock.set_prev(block, before)
            block.share_content(old)
            if type(before) is PrefixCachingBlock:
                # The old one's total is that of when it was last written to.
                block.total = (<PrefixCachingBlock> before).total + block.num_tokens
            blocks.append(block)
            before = block
        # Nothing has run since the checks that could change the allocator.
        for i in range(len(source)):
            block, old = <PrefixCachingBlock> blocks[i], <PrefixCachingBlock> source[i]
            self.store.rows[old.row].ref_cnt += 1
            block.hold(self, old.row)
        return blocks

    # -- promotion, copy-on-write, swap ------------------------------------------

    @cython.critical_section
    def promote_to_immutable_block(self, block):
        """Share a full block's content; blocks do it themselves as they become full.

        Returns:
            The id of the physical block it then holds: the one that was cached first.

        Raises:
            BlockStateError: It is not full, the one before it is not, or it was freed.
        """
        cdef block_id_t row = self.held_row(block), cached
        cdef object block_id  # made before anything is written
        if not (<PrefixCachingBlock> block).has_digest:
            raise BlockStateError(f"{block!r} has no hash yet")
        cached = self.cached_row(block)
        block_id = self.ids.id_of(row if cached == NO_ROW else cached)
        self.promote(block)
        return block_id

    @cython.critical_section
    def cow_block_if_not_appendable(self, block):
        """Have a block hold a physical one that it may write to; blocks do it too.

        Returns:
            The id: of a new block if others share the old one, else of the old one.

        Raises:
            NoFreeBlocksError: A copy is needed and all blocks are in use.
            BlockStateError: It was freed, or its content is cached: others rely on it.
        """
        cdef block_id_t row = self.held_row(block)
        cdef object block_id  # made before anything is written
        if (<PrefixCachingBlock> block).has_digest:
            raise BlockStateError(f"{block!r} is immutable")
        if (<PrefixCachingBlock> block).is_shared():
            self.require_copies(1)
            row = self.blocks.first_free()
        block_id = self.ids.id_of(row)
        self.make_writable(block)
        return block_id

    @cython.critical_section
    def clear_copy_on_writes(self):
        """The copies to make: pairs (source id, destination id) since the last call."""
        return self.blocks.hashless.copies.clear_cows()

    @cython.critical_section
    def check_swap_out(self, blocks):
        """Raise what `swap_out` would raise, and change nothing."""
        check_held_once(list(blocks), self)

    @cython.critical_section
    def swap_out(self, blocks):
        """Take back the references of blocks whose content moves elsewhere.

        Raises:
            TypeError, ValueError: One is no block of this allocator, was freed, or
                comes twice. Nothing was freed.
        """
        cdef list held = list(blocks)
        check_held_once(held, self)
        self.release_all(held)

    @cython.critical_section
    def check_swap_in(self, blocks):
        """Raise what `swap_in` would raise once they are out, and change nothing."""
        cdef list waiting = list(blocks)
        for block in waiting:
            if type(block) is not PrefixCachingBlock:
                raise TypeError(f"expected a PrefixCachingBlock, got {block!r}")
            if (<PrefixCachingBlock> block).size != self.block_size:
                raise ValueError(f"{block!r} has not {self.block_size} tokens")
        if len({id(block) for block in waiting}) != len(waiting):
            raise ValueError("a block is listed more than once")
        self.require_places(waiting, set())

    @cython.critical_section
    def swap_in(self, blocks):
        """Have blocks that hold no physical one hold one of this allocator's.

        Full blocks take the cached block with their content if there is one.

        Raises:
            NoFreeBlocksError: Fewer are free. Nothing was taken.
            TypeError, ValueError: One is no PrefixCachingBlock, holds a physical
                block, or comes twice. Nothing was taken.
        """
        cdef list waiting = list(blocks)
        self.check_swap_in(waiting)
        for item in waiting:
            if (<PrefixCachingBlock> item).id != NO_BLOCK_ID:
                raise BlockStateError(f"{item!r} holds a physical block")
        self.place_all(waiting, False)

    # -- marks -------------------------------------------------------------------

    @cython.critical_section
    def mark_blocks_as_accessed(self, block_ids, now):
        """Note when blocks were used, which decides what is evicted first.

        Args:
            block_ids: Ids, of blocks in use or cached.
            now: The time, in the caller's clock.

        Raises:
            ValueError: One is neither in use nor cached, or `now` is not a number.
                Nothing was marked.
        """
        cdef double when = now
        cdef list rows = []
        cdef block_id_t row
        if isnan(when):
            raise ValueError("now must be a time, got nan")
        for block_id in list(block_ids):
            row = self.ids.row_of(block_id)
            rows.append(row)
        for item in rows:
            row = item
            if is_linked(&self.store.rows[row]):
                raise ValueError(
                    f"block {self.ids.id_of(row)} is neither in use nor cached"
                )
        for item in rows:
            self.blocks.mark_accessed(item, when)

    @cython.critical_section
    def mark_blocks_as_computed(self, block_ids):
        """Note that the step is done: what it cached can be skipped from now on.

        Until then `find_cached_blocks_prefix` does not report such a block.

        Args:
            block_ids: Not used, as in vLLM: all blocks of the step are marked.
        """
        self.blocks.mark_computed()

    @cython.critical_section
    def block_is_computed(self, block_id):
        """Whether a block's content is cached and computed.

        Raises:
            ValueError: There is no such block.
        """
        return self.blocks.is_computed(self.ids.row_of(block_id))

    @cython.critical_section
    def get_common_computed_block_ids(self, computed_seq_block_ids):
        """The ids that lists of block ids have in common from their start on.

        Empty lists do not count, as in vLLM; [] if there are no others.
        """
        if len(computed_seq_block_ids) == 1:
            return computed_seq_block_ids[0]
        lists = [ids for ids in computed_seq_block_ids if ids]
        return commonprefix(lists) if lists else []

    @cython.critical_section
    def find_cached_blocks_prefix(self, block_hashes):
        """The leading content hashes whose blocks are cached and computed.

        Each is looked up, so what is reported has no hole. (vLLM 0.8.5 searches by
        halves, and may report a prefix past a block that is gone.)

        Args:
            block_hashes: Ints, in a list.
        """
        cdef list hashes = list(block_hashes)
        cdef unsigned char[DIGEST_BYTES] digest
        cdef Py_ssize_t i
        cdef block_id_t row
        for i in range(len(hashes)):
            row = NO_ROW
            if read_prefix_hash(hashes[i], digest):
                row = self.blocks.find(digest)
            if row == NO_ROW or not self.blocks.is_computed(row):
                return hashes[:i]
        return hashes

    # -- state -------------------------------------------------------------------

    @cython.critical_section
    def is_block_cached(self, block):
        """Whether a full block's content is cached here.

        Raises:
            BlockStateError: It has no hash.
            TypeError: It is no PrefixCachingBlock.
        """
        if type(block) is not PrefixCachingBlock:
            raise TypeError(f"expected a PrefixCachingBlock, got {block!r}")
        if not (<PrefixCachingBlock> block).has_digest:
            raise BlockStateError(f"{block!r} has no hash")
        return self.cached_row(block) != NO_ROW

    @cython.critical_section
    def get_num_full_blocks_touched(self, blocks):
        """How many free blocks swapping these in takes for the full ones among them.

        A cached block that nobody uses counts: it is free until it is taken.
        """
        cdef Py_ssize_t count = 0
        cdef block_id_t row
        for block in blocks:
            if type(block) is not PrefixCachingBlock:
                raise TypeError(f"expected a PrefixCachingBlock, got {block!r}")
            if (<PrefixCachingBlock> block).num_tokens == self.block_size:
                row = self.cached_row(block)
                count += row == NO_ROW or self.store.rows[row].ref_cnt == 0
        return count

    @cython.critical_section
    def get_num_free_blocks(self, device=None):
        """Number of blocks that nobody uses, cached or not."""
        refuse_device(device)
        return self.blocks.num_free()

    @cython.critical_section
    def get_prefix_cache_hit_rate(self):
        """Share of full blocks that were cached when allocated: 0.0 to 1.0."""
        return self.metric_data.get_hit_rate()

    @cython.critical_section
    def reset_prefix_cache(self):
        """Forget all cached content, for instance when the weights have changed.

        Returns:
            Whether it was done: not while a block is in use (see the log for how many).
        """
        cdef Py_ssize_t used = self.ids.count - self.blocks.num_free()
        if used:
            logger.warning("prefix cache not reset: %d blocks are in use", used)
            return False
        cdef CacheMetricData metric_data = CacheMetricData()
        self.blocks.forget_all()
        self.metric_data = metric_data
        return True

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C."""
        return self.blocks.hashless.nbytes + self.blocks.nbytes()

    @property
    @cython.critical_section
    def evictor(self):
        """The free blocks that hold content, to look at: see `AllocatorEvictor`."""
        return AllocatorEvictor(self.blocks)

    # What vLLM's tests read; each is made when it is asked for.

    @property
    @cython.critical_section
    def _hashless_allocator(self):
        return self.blocks.hashless

    @property
    @cython.critical_section
    def _refcounter(self):
        return self.blocks.hashless.counter

    @property
    @cython.critical_section
    def _cow_tracker(self):
        return self.blocks.hashless.copies

    @property
    @cython.critical_section
    def _cached_blocks(self):
        return self.blocks.by_hash()

    @property
    @cython.critical_section
    def _touched_blocks(self):
        return self.blocks.touched_ids()

    @property
    @cython.critical_section
    def _block_tracker(self):
        return self.blocks.trackers()

    @cython.critical_section
    def check(self):
        """Prove every invariant of the allocator, in O(n).

        Raises:
            AssertionError: Names the first one that fails, and where.
        """
        self.blocks.check()


BlockAllocator.register(PrefixCachingBlockAllocator)
