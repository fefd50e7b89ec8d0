"""vLLM v0's block allocators, compiled: blocks that share, fork and copy on write.

The names and the behaviour are those of vLLM 0.8.5's `core/block` package and evictor;
where that loses a block, recurses, or leaves a half-done call behind, these do not.

    interfaces                       what a block and an allocator must offer
    block_ids, ref_counter           which blocks there are, and who uses them
    prefix_hash, blocks              content hashes; the blocks of a sequence
    eviction_heap, evictor           which free block gives up its content next
    naive_block_allocator            physical blocks by reference count
    prefix_caching_block_allocator   the same, and full blocks are found again
    cpu_gpu_block_allocator          one of either kind for each of two devices
    block_table, trackers            what a block manager keeps of each sequence
"""

from kvcache.errors import NoFreeBlocksError
from kvcache.prefix_caching.block_list import BlockList, get_all_blocks_recursively
from kvcache.prefix_caching.block_table import BlockTable
from kvcache.prefix_caching.block_tracker import BlockTracker
from kvcache.prefix_caching.blocks import (
    NaiveBlock,
    PrefixCachingBlock,
    assert_prefix_caching_block_or_none,
)
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.evictor import (
    BlockMetaData,
    EvictionPolicy,
    Evictor,
    LRUEvictor,
    make_evictor,
)
from kvcache.prefix_caching.interfaces import (
    Block,
    BlockAllocator,
    BlockId,
    Device,
    DeviceAwareBlockAllocator,
    PrefixHash,
    RefCounterProtocol,
)
from kvcache.prefix_caching.metric_data import CacheMetricData
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.null_block import NullBlock
from kvcache.prefix_caching.object_pool import BlockPool
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter import (
    CopyOnWriteTracker,
    ReadOnlyRefCounter,
    RefCounter,
)
from kvcache.prefix_caching.trackers import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
)

__all__ = [
    "Block",
    "BlockAllocator",
    "BlockId",
    "BlockList",
    "BlockMetaData",
    "BlockPool",
    "BlockTable",
    "BlockTracker",
    "CacheMetricData",
    "ComputedBlocksTracker",
    "CopyOnWriteTracker",
    "CpuGpuBlockAllocator",
    "Device",
    "DeviceAwareBlockAllocator",
    "EvictionPolicy",
    "Evictor",
    "LRUEvictor",
    "LastAccessBlocksTracker",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "NoFreeBlocksError",
    "NullBlock",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "PrefixHash",
    "ReadOnlyRefCounter",
    "RefCounter",
    "RefCounterProtocol",
    "assert_prefix_caching_block_or_none",
    "get_all_blocks_recursively",
    "make_evictor",
]
