"""What owns memory is not copied behind one's back; a forked child goes on alone."""

import copy
import os
import pickle
import sys
from typing import Any

import pytest

from kvcache import (
    BlockHashToBlockMap,
    BlockPool,
    BlockStore,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from kvcache.hashing import BlockHasher, Keyed, get_request_block_hasher
from kvcache.manager import FullAttention, KVCacheManager
from kvcache.prefix_caching import (
    BlockList,
    BlockTable,
    ComputedBlocksTracker,
    CpuGpuBlockAllocator,
    Device,
    LastAccessBlocksTracker,
    LRUEvictor,
    NaiveBlock,
    RefCounter,
)
from kvcache.prefix_caching import BlockPool as ObjectPool
from kvcache.replay._simulate import PoolReplay


def live_objects() -> list[Any]:
    pool = BlockPool(5, True, 16)
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 5, 5, 4)
    naive = CpuGpuBlockAllocator.create("naive", 5, 5, 4)
    block = allocator.allocate_mutable_block(None, Device.GPU)
    manager = KVCacheManager(
        9, [FullAttention(4)], max_model_len=64, max_num_requests=2
    )
    return [
        pool,
        pool.blocks,
        pool.blocks[1],
        pool.free_block_queue,
        pool.cached_block_hash_to_block,
        manager,
        allocator,
        naive,
        block,
        naive.allocate_mutable_block(None, Device.GPU),
        allocator.allocate_or_get_null_block(),
        BlockTable(4, allocator),
        BlockStore(3),
        FreeKVCacheBlockQueue([KVCacheBlock(1)]),
        BlockHashToBlockMap(),
        KVCacheBlock(3),
        LRUEvictor(),
        BlockHasher(16, Keyed()),
        get_request_block_hasher(16, Keyed()),
        BlockList([]),
        ComputedBlocksTracker(allocator, 4, True),
        LastAccessBlocksTracker(allocator),
        RefCounter([1]),
        RefCounter([1]).as_readonly(),
        ObjectPool(4, NaiveBlock, None, 2),
        PoolReplay(4, 4),
    ]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("live", live_objects(), ids=lambda thing: type(thing).__name__)
def test_a_live_object_is_neither_pickled_nor_copied(copied: Any, live: Any) -> None:
    name = type(live).__name__
    with pytest.raises(TypeError, match=f"a {name} cannot be pickled or copied"):
        copied(live)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.skipif(sys.platform == "darwin", reason="forks of a test runner may hang")
def test_pools_and_managers_go_on_in_a_forked_child() -> None:
    pool = BlockPool(100, True, 16)
    manager = KVCacheManager(
        100, [FullAttention(4)], max_model_len=64, max_num_requests=2
    )
    row = manager.add_request(list(range(20)))
    held = pool.get_new_block_ids(10)
    child = os.fork()
    if child == 0:
        try:
            pool.free_block_ids(held)
            pool.free_block_ids(pool.get_new_block_ids(99))
            manager.allocate_slots(row, 20)
            manager.free(row)
            pool.check()
            manager.check()
            os._exit(pool.get_num_free_blocks())
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
    assert pool.get_num_free_blocks() == 89
    assert manager.num_requests == 1
    manager.allocate_slots(row, 20)
    manager.check()
