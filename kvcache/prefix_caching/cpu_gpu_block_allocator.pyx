"""The blocks of a GPU and of a CPU, and the way between them.

Stores: an allocator a device, the null block, which ids were swapped since last asked.
Invariant: no id is on both devices; a swap moves all its blocks or none.
Costs: a call to the device's allocator and 50 ns; a swap O(1) a block.
Threads: each call is atomic, where both allocators are kvcache's.
"""
cimport cython
from types import MappingProxyType

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS
from kvcache.prefix_caching.block_ids cimport BlockIds
from kvcache.prefix_caching.blocks cimport BlockOwner, TokenBlock
from kvcache.prefix_caching.null_block cimport NullBlock
from kvcache.prefix_caching.swap cimport swap_own

from kvcache.errors import BlockStateError
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.interfaces import Device, DeviceAwareBlockAllocator
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

cdef object GPU = Device.GPU
cdef object CPU = Device.CPU


cdef bint is_one_range(object allocator):
    if not isinstance(allocator, BlockOwner):
        return False
    return (<BlockOwner> allocator).ids.ids == NULL


cdef int check_disjoint(object one, object other) except -1:
    """Prove that two allocators share no id; without a set of ids where that can be."""
    cdef BlockIds a, b
    if is_one_range(one) and is_one_range(other):
        a, b = (<BlockOwner> one).ids, (<BlockOwner> other).ids
        if not a.count or not b.count:
            return 0
        if a.first + a.count <= b.first or b.first + b.count <= a.first:
            return 0
    shared = one.all_block_ids & other.all_block_ids
    if shared:
        raise ValueError(
            f"{len(shared)} block ids are on both devices, {min(shared)} is the first"
        )
    return 0


cdef int check_shared_by_content(list blocks) except -1:
    """Prove that blocks with one physical block go to one, which only cached ones do.

    Else each would get an id of its own, and a dict of ids has room for one.
    """
    cdef dict block_of = {}
    for block in blocks:
        other = block_of.get(block.block_id)
        if other is block:
            raise ValueError(f"{block!r} is listed more than once")
        if other is not None and block.content_hash is None:
            raise ValueError(
                f"{other!r} and {block!r} share a physical block: swap one only"
            )
        block_of[block.block_id] = block
    return 0


cdef class CpuGpuBlockAllocator:
    """vLLM 0.8.5's allocator for two devices.

    Args:
        cpu_block_allocator: Allocator of the CPU's blocks.
        gpu_block_allocator: Allocator of the GPU's blocks.

    Raises:
        ValueError: They have ids in common.
    """

    def __reduce__(self):
        raise no_copy(self)

    @staticmethod
    def create(allocator_type, num_gpu_blocks, num_cpu_blocks, block_size):
        """An allocator of either kind; the GPU's ids start at 0, the CPU's behind them.

        Args:
            allocator_type: "naive" or "prefix_caching".
            num_gpu_blocks: Physical blocks of the GPU, from 0 on.
            num_cpu_blocks: Physical blocks of the CPU, from 0 on.
            block_size: Tokens a block, at least 1.

        Raises:
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef Py_ssize_t on_gpu = as_int(num_gpu_blocks, "num_gpu_blocks", 0, MAX_BLOCKS)
        cdef Py_ssize_t on_cpu = as_int(num_cpu_blocks, "num_cpu_blocks", 0, MAX_BLOCKS)
        cdef object gpu_ids = range(on_gpu)
        cdef object cpu_ids = range(on_gpu, on_gpu + on_cpu)
        if allocator_type == "naive":
            gpu = NaiveBlockAllocator(NaiveBlock, on_gpu, block_size, gpu_ids)
            cpu = NaiveBlockAllocator(NaiveBlock, on_cpu, block_size, cpu_ids)
        elif allocator_type == "prefix_caching":
            gpu = PrefixCachingBlockAllocator(on_gpu, block_size, gpu_ids)
            cpu = PrefixCachingBlockAllocator(on_cpu, block_size, cpu_ids)
        else:
            raise ValueError(
                "allocator_type must be 'naive' or 'prefix_caching', got"
                f" {allocator_type!r}"
            )
        return CpuGpuBlockAllocator(cpu, gpu)

    @cython.critical_section
    def __init__(self, cpu_block_allocator, gpu_block_allocator):
        if self.gpu is not None:
            raise ValueError("the allocator is already made")
        check_disjoint(cpu_block_allocator, gpu_block_allocator)
        self.cpu, self.gpu = cpu_block_allocator, gpu_block_allocator
        self._swap_mapping = {}

    @property
    @cython.critical_section
    def _allocators(self):
        return MappingProxyType({CPU: self.cpu, GPU: self.gpu})

    cdef object on(self, object device):
        """The allocator of a device."""
        if device is GPU:
            return self.gpu
        if device is CPU:
            return self.cpu
        raise TypeError(f"device must be Device.GPU or Device.CPU, got {device!r}")

    cdef object owner_of(self, object block):
        """The allocator that a block's physical block belongs to."""
        if isinstance(block, TokenBlock):
            allocator = (<TokenBlock> block).allocator
            if allocator is self.gpu or allocator is self.cpu:
                return allocator
            raise ValueError(f"{block!r} belongs to another allocator")
        try:
            block_id = block.block_id
        except AttributeError:
            raise TypeError(f"expected a block, got {block!r}") from None
        if block_id is None:
            raise BlockStateError(f"{block!r} has no physical block")
        for allocator in (self.gpu, self.cpu):
            if block_id in allocator.all_block_ids:
                return allocator
        raise ValueError(f"block {block_id} is on neither device")

    # -- allocate and free -----------------------------------------------------------

    @cython.critical_section
    def allocate_mutable_block(self, prev_block, device, extra_hash=None):
        """A new block without tokens on a device, behind another of its sequence.

        Raises:
            NoFreeBlocksError: No block of the device is free.
        """
        return self.on(device).allocate_mutable_block(prev_block, extra_hash=extra_hash)

    @cython.critical_section
    def allocate_immutable_block(self, prev_block, token_ids, device, extra_hash=None):
        """A full block on a device, a cached one where there is one.

        Raises:
            NoFreeBlocksError: None is cached, and none is free.
        """
        return self.on(device).allocate_immutable_block(
            prev_block, token_ids, extra_hash=extra_hash
        )

    @cython.critical_section
    def allocate_immutable_blocks(
        self, prev_block, block_token_ids, device, extra_hash=None
    ):
        """Full blocks on a device, behind each other, one for each list of tokens.

        Raises:
            NoFreeBlocksError: Too few are free. None was taken.
        """
        return self.on(device).allocate_immutable_blocks(
            prev_block, block_token_ids, extra_hash=extra_hash
        )

    @cython.critical_section
    def allocate_blocks(self, prev_block, block_token_ids, device, extra_hash=None):
        """As `allocate_immutable_blocks`, but the last list may have fewer tokens.

        That block then is mutable. Not in vLLM: None if the device's allocator is
        not kvcache's and has no such method.
        """
        allocate = getattr(self.on(device), "allocate_blocks", None)
        if allocate is not None:
            return allocate(prev_block, block_token_ids, extra_hash)

    @cython.critical_section
    def allocate_or_get_null_block(self):
        """The null block, one an allocator; the first call takes a block of the GPU.

        Raises:
            NoFreeBlocksError: It is the first, and no block is free.
        """
        cdef NullBlock null
        if self.null is None:
            null = NullBlock.__new__(NullBlock)
            block = self.gpu.allocate_mutable_block(None)
            if isinstance(self.gpu, BlockOwner):
                null._proxy = block
            else:
                null.__init__(block)
            self.null = null
        return self.null

    @cython.critical_section
    def free(self, block):
        """Take back a block, on whichever device it is; a null block stays.

        Raises:
            BlockStateError: It has no physical block: it was freed already.
            TypeError, ValueError: It is no block of either device.
        """
        if not isinstance(block, NullBlock):
            self.owner_of(block).free(block)

    @cython.critical_section
    def fork(self, last_block, num_blocks=None):
        """New blocks of a sequence that shares all physical blocks of another.

        Args:
            last_block: Last block of the other sequence; no null block.
            num_blocks: Fork so many of its last blocks, for those before are null
                blocks; all if None.

        Returns:
            One block for each of the other's, first to last.
        """
        if isinstance(last_block, NullBlock):
            raise BlockStateError(f"no sequence ends with {last_block!r}, none to fork")
        if num_blocks is None:
            return self.owner_of(last_block).fork(last_block)
        return self.owner_of(last_block).fork(last_block, num_blocks)

    # -- swap ------------------------------------------------------------------------

    @cython.critical_section
    def swap(self, blocks, src_device, dst_device):
        """Give blocks of one device physical blocks of the other.

        The caller copies the content. Null blocks are passed over.

        Args:
            blocks: Blocks of `src_device`; a full one may turn out to be cached on
                `dst_device` already.
            src_device: Where they are.
            dst_device: Where they go; not the same.

        Returns:
            Dict from the old id of each to the new one.

        Raises:
            NoFreeBlocksError: Too few blocks are free on `dst_device`. Nothing moved.
            TypeError, ValueError: One is not on `src_device` or comes twice, or two
                that are not cached share a physical block. Nothing moved.
        """
        source, destination = self.on(src_device), self.on(dst_device)
        if source is destination:
            raise ValueError(f"cannot swap from {src_device} to itself")
        cdef list moving = [one for one in blocks if not isinstance(one, NullBlock)]
        cdef list old_ids = []
        cdef dict mapping = {}
        for block in moving:
            if self.owner_of(block) is not source:
                raise ValueError(f"{block!r} is not on {src_device}")
            if block.block_id is None:
                raise BlockStateError(f"{block!r} has no physical block")
            old_ids.append(block.block_id)
        if len(set(old_ids)) < len(old_ids):
            check_shared_by_content(moving)
        # Allocators that are not kvcache's need not have these.
        check = getattr(source, "check_swap_out", None)
        if check is not None:
            check(moving)
        check = getattr(destination, "check_swap_in", None)
        if check is not None:
            check(moving)
        cdef dict swaps
        if isinstance(source, BlockOwner) and isinstance(destination, BlockOwner):
            if all([isinstance(block, TokenBlock) for block in moving]):
                mapping = dict.fromkeys(old_ids)
                swaps = {**self._swap_mapping, **mapping}
                swap_own(moving, old_ids, source, destination, mapping, swaps)
                self._swap_mapping = swaps
                return mapping
        source.swap_out(moving)
        destination.swap_in(moving)
        for old_id, block in zip(old_ids, moving):
            mapping[old_id] = block.block_id
        self._swap_mapping.update(mapping)
        return mapping

    @cython.critical_section
    def get_and_reset_swaps(self):
        """Pairs (old id, new id) of all swaps since the last call."""
        swaps, none = list(self._swap_mapping.items()), {}
        self._swap_mapping = none
        return swaps

    @cython.critical_section
    def get_num_full_blocks_touched(self, blocks, device):
        """How many free blocks swapping these to a device takes for the full ones."""
        return self.on(device).get_num_full_blocks_touched(
            [block for block in blocks if not isinstance(block, NullBlock)]
        )

    # -- the GPU's prefix cache ------------------------------------------------------

    @cython.critical_section
    def clear_copy_on_writes(self):
        """The copies to make on the GPU: pairs (from, to) since the last call."""
        return self.gpu.clear_copy_on_writes()

    @cython.critical_section
    def mark_blocks_as_accessed(self, block_ids, now):
        """Note that blocks of the GPU were used at the time `now`."""
        return self.gpu.mark_blocks_as_accessed(block_ids, now)

    @cython.critical_section
    def mark_blocks_as_computed(self, block_ids):
        """Note that the content of every block filled so far on the GPU is there."""
        return self.gpu.mark_blocks_as_computed(block_ids)

    @cython.critical_section
    def get_common_computed_block_ids(self, computed_seq_block_ids):
        """The longest prefix of ids that all lists have, empty lists left out."""
        return self.gpu.get_common_computed_block_ids(computed_seq_block_ids)

    @cython.critical_section
    def find_cached_blocks_prefix(self, block_hashes, device=GPU):
        """The leading hashes whose blocks are cached on a device, and computed."""
        return self.on(device).find_cached_blocks_prefix(block_hashes)

    @cython.critical_section
    def get_prefix_cache_hit_rate(self, device):
        """Hits / queries on a device, from 0 to 1; -1 where nothing is cached."""
        return self.on(device).get_prefix_cache_hit_rate()

    @cython.critical_section
    def reset_prefix_cache(self, device=None):
        """Forget what is cached on a device, or on both.

        Returns:
            False if blocks of one are in use; that device keeps what it has.
        """
        if device is not None:
            return self.on(device).reset_prefix_cache()
        done = [one.reset_prefix_cache() for one in (self.cpu, self.gpu)]
        return all(done)

    # -- state -----------------------------------------------------------------------

    @cython.critical_section
    def get_num_free_blocks(self, device):
        """Number of blocks of a device that can be taken."""
        return self.on(device).get_num_free_blocks()

    @cython.critical_section
    def get_num_total_blocks(self, device):
        """Number of physical blocks of a device."""
        return self.on(device).get_num_total_blocks()

    @cython.critical_section
    def get_physical_block_id(self, device, absolute_id):
        """Place of an id among the device's ids in ascending order, from 0 on.

        Raises:
            ValueError: There is no such block on the device.
        """
        return self.on(device).get_physical_block_id(absolute_id)

    @property
    @cython.critical_section
    def all_block_ids(self):
        """The ids of both devices, a frozenset made anew."""
        return self.gpu.all_block_ids | self.cpu.all_block_ids


DeviceAwareBlockAllocator.register(CpuGpuBlockAllocator)
