"""Numbers at the edges: block ids at those of int32, slots in 64 bits.

A pool of 50,000,000 blocks is made by `python -m tests.long_memory`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pools import hashes_of, refused

from kvcache import BlockPool, BlockStore
from kvcache.hashing import Keyed
from kvcache.manager import FullAttention, KVCacheManager
from kvcache.prefix_caching import CpuGpuBlockAllocator
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

TOO_MANY = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 2**100]
MAKERS: dict[str, Callable[[Any], Any]] = {
    "store": BlockStore,
    "pool": lambda n: BlockPool(n, True, 16),
    "pool without caching": lambda n: BlockPool(n, False, 16),
    "pool that keeps tokens": lambda n: BlockPool(n, True, 16, keep_tokens=True),
    "manager": lambda n: KVCacheManager(
        n, [FullAttention(16)], max_model_len=100, max_num_requests=4
    ),
    "naive": lambda n: NaiveBlockAllocator(NaiveBlock, n, 16),
    "caching": lambda n: PrefixCachingBlockAllocator(n, 16),
    "two devices": lambda n: CpuGpuBlockAllocator.create("naive", n, 1, 16),
}


@pytest.mark.parametrize("number", [*TOO_MANY, -1, -(2**31), -(2**63), -(2**64)])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_number_of_blocks_that_cannot_be_is_refused(maker: str, number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        MAKERS[maker](number)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**63, 2**64])
def test_a_block_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        BlockPool(10, True, size)


def test_kept_tokens_that_no_machine_has_room_for_are_a_memory_error() -> None:
    """The product of two numbers that can be is one that cannot."""
    with pytest.raises(MemoryError, match="bytes for kept tokens"):
        BlockPool(2**20, True, 2**31 - 2, keep_tokens=True)


# -- ids --------------------------------------------------------------------------

NO_IDS = [10, 11, 2**31 - 1, -1, -2, -3, -(2**31)]
"""They fit int32, and are no blocks of a pool of ten."""
BEYOND = [2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31) - 1, -(2**63)]
"""They do not; some are a block's once they are cut."""

CALLS: dict[str, Callable[[BlockPool, Any], Any]] = {
    "free_block_ids": lambda pool, ids: pool.free_block_ids(ids),
    "touch_block_ids": lambda pool, ids: pool.touch_block_ids(ids),
    "evict_blocks": lambda pool, ids: pool.evict_blocks(ids),
    "cache_block_ids": lambda pool, ids: pool.cache_block_ids(ids, hashes_of(7)),
    "cache_block_tokens": lambda pool, ids: pool.cache_block_tokens(
        ids, range(4), Keyed()
    ),
}


@pytest.mark.parametrize("number", NO_IDS)
@pytest.mark.parametrize("call", CALLS)
def test_an_id_that_is_no_block_is_refused(call: str, number: int) -> None:
    pool = BlockPool(10, True, 4)
    pool.get_new_block_ids(5)
    for ids in ([number], np.array([number], np.int32), np.array([number])):
        with refused(ValueError, pool, match=str(number)):
            CALLS[call](pool, ids)


@pytest.mark.parametrize("number", BEYOND)
@pytest.mark.parametrize("call", CALLS)
def test_an_id_beyond_int32_is_refused_and_not_cut(call: str, number: int) -> None:
    pool = BlockPool(10, True, 4)
    pool.get_new_block_ids(5)
    for ids in ([number], np.array([number])):
        with refused(ValueError, pool, match=str(number)):
            CALLS[call](pool, ids)


def test_unsigned_ids_beyond_int64_are_refused() -> None:
    pool = BlockPool(10, True, 4)
    with refused(ValueError, pool, match=str(2**64 - 1)):
        pool.free_block_ids(np.array([2**64 - 1], np.uint64))


def test_a_place_beyond_the_blocks_is_no_block() -> None:
    blocks = BlockPool(10, True, 4).blocks
    for place in (10, -11, 2**31, 2**63, -(2**31) - 1, 2**32 + 1):
        with pytest.raises(IndexError):
            blocks[place]
    assert (blocks[2**63 :], blocks[-(2**63) :][0].block_id) == ([], 0)


@pytest.mark.parametrize("row", [4, -1, 2**31 - 1, 2**31, 2**32, 2**63])
def test_a_row_that_is_no_requests_is_refused(row: int) -> None:
    manager = KVCacheManager(
        10, [FullAttention(4)], max_model_len=16, max_num_requests=4
    )
    manager.add_request(range(4))
    for call in (manager.free, manager.match, manager.num_tokens, manager.fork):
        with pytest.raises(ValueError, match=str(row)):
            call(row)
    with pytest.raises(ValueError, match=str(row)):
        manager.slot_mapping([row], [1])


# -- slots ------------------------------------------------------------------------


def test_slots_beyond_int32_are_right() -> None:
    """200,000 blocks of 16,384 tokens have 3.3e9 slots."""
    size, num_blocks = 16_384, 200_000
    manager = KVCacheManager(
        num_blocks,
        [FullAttention(size)],
        max_model_len=10 * size,
        max_num_requests=2,
        enable_caching=False,
    )
    used = manager.block_pool.get_new_block_ids(num_blocks - 5)
    row = manager.add_request(hashes=(), num_tokens=3 * size + 5)
    [ids] = manager.allocate_slots(row, 3 * size + 5)
    assert ids.tolist() == [199_996, 199_997, 199_998, 199_999]
    slots = manager.slot_mapping([row], [2 * size + 6])
    tokens = np.arange(size - 1, 3 * size + 5)
    expected = ids.astype(np.int64)[tokens // size] * size + tokens % size
    assert slots.dtype == np.int64
    assert (slots == expected).all()
    assert slots[-1] == 199_999 * size + 4 > 2**31
    manager.free(row)
    manager.block_pool.free_block_ids(used)
    manager.check()


def test_tokens_up_to_int32_are_counted_and_no_more() -> None:
    """A block of 2**30 tokens: sums of such numbers are made in 64 bits."""
    manager = KVCacheManager(
        10,
        [FullAttention(2**30)],
        max_model_len=2**31 - 2,
        max_num_requests=2,
        enable_caching=False,
    )
    row = manager.add_request(hashes=(), num_tokens=2**31 - 2)
    assert manager.allocate_slots(row, 2**31 - 3)[0].tolist() == [1, 2]
    [slot] = manager.slot_mapping([row], [1])
    assert slot == 2 * 2**30 + (2**31 - 4) % 2**30
    with pytest.raises(ValueError, match="the limit is 2147483646"):
        manager.allocate_slots(row, 2)
    assert len(manager.allocate_slots(row, 1, num_lookahead_tokens=2**31 - 2)[0]) == 0
    with pytest.raises(ValueError, match="max_model_len"):
        KVCacheManager(
            10, [FullAttention(16)], max_model_len=2**31 - 1, max_num_requests=2
        )
