"""Memory: every byte in C is counted and given back, and no operation loses any.

The long form is `python -m tests.long_memory`.
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from memory_use import STATM, bytes_in_c, left_over
from pools import full_request_of, hash_of, key_of
from workloads import KEYED, MADE_AND_DROPPED, WORKLOADS, Collector

from kvcache import (
    BlockHashToBlockMap,
    BlockPool,
    BlockStore,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    tracemalloc_domain,
)
from kvcache.hashing import BlockHasher, hash_blocks, sha256
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow
from kvcache.prefix_caching import BlockTable, CpuGpuBlockAllocator
from kvcache.prefix_caching.block_list import BlockList
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.evictor import LRUEvictor
from kvcache.prefix_caching.interfaces import Device
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter import CopyOnWriteTracker, RefCounter
from kvcache.replay._simulate import PoolReplay

# -- what is counted: `nbytes` is what was taken, to the byte -----------------------

Owners = Iterator[Any]
"""An owner, or several, each time that it may hold more than before."""


def stores() -> Owners:
    for num_blocks in (0, 1, 1000):
        store = BlockStore(num_blocks)
        yield store
        list(store)
        yield store


def pools() -> Owners:
    for options in ({}, {"keep_tokens": True}, {"enable_kv_cache_events": True}):
        pool = BlockPool(1000, True, 4, **options)
        yield pool
        blocks = pool.get_new_blocks(300)
        yield pool
        pool.cache_full_blocks(full_request_of(1, 2, 3, 4), blocks, 0, 4, 4, 0)
        yield pool
        pool.cache_partial_block(full_request_of(5, 6), blocks[4], 8, 0, 8)
        pool.cache_partial_block(full_request_of(5, 6), blocks[4], 4, 0, 8)
        yield pool
        for i in range(100):
            pool.cached_block_hash_to_block.insert(key_of(i), KVCacheBlock(i))
        yield pool
        pool.touch(blocks)
        pool.cache_block_tokens(pool.get_new_block_ids(2), range(8), KEYED)
        yield pool


def pools_without_hints() -> Owners:
    yield BlockPool(300_000, True, 16)


def pools_that_do_not_cache() -> Owners:
    pool = BlockPool(1000, False, 4)
    yield pool
    pool.get_new_blocks(10)
    yield pool


def maps() -> Owners:
    of_map = BlockHashToBlockMap()
    yield of_map
    for i in range(1000):
        of_map.insert(key_of(i % 100), KVCacheBlock(i))
    yield of_map
    for i in range(1000):
        of_map.pop(key_of(i % 100), i)
    yield of_map


def queues() -> Owners:
    blocks = [KVCacheBlock(i) for i in range(100)]
    queue = FreeKVCacheBlockQueue(blocks[:10])
    yield queue
    queue.append_n(blocks[10:])
    yield queue
    queue.popleft_n(100)
    yield queue


def managers() -> Owners:
    for options in ({}, {"enable_kv_cache_events": True}):
        manager = KVCacheManager(
            100,
            [FullAttention(4), SlidingWindow(4, 8)],
            max_model_len=200,
            max_num_requests=5,
            **options,
        )
        yield manager
        rows = [manager.add_request(range(i, i + 50)) for i in range(3)]
        yield manager
        for row in rows[:2]:
            manager.allocate_slots(row, 50 - manager.match(row))
            yield manager
        manager.append(rows[0], list(range(100)))
        yield manager
        manager.fork(rows[0])
        yield manager
        manager.free(rows[0])
        yield manager
        del rows


def hashers() -> Owners:
    hasher = BlockHasher(4, sha256)
    yield hasher
    for count in (1, 100, 1000):
        hasher.append(list(range(count)))
        yield hasher
    hasher.truncate(3)
    yield hasher


def evictors() -> Owners:
    evictor = LRUEvictor()
    yield evictor
    for i in range(1000):
        evictor.add(i, i, i, float(i))
    yield evictor


def counters() -> Owners:
    yield RefCounter(range(100))
    yield RefCounter([3, 900, 5])


def copies() -> Owners:
    tracker = CopyOnWriteTracker(None)
    yield tracker
    for i in range(100):
        tracker.record_cow(i, i + 1)
    yield tracker


def allocators() -> Owners:
    yield NaiveBlockAllocator(NaiveBlock, 100, 4)
    yield NaiveBlockAllocator(NaiveBlock, 3, 4, [7, 900, 2])
    for ids in (None, range(5000, 5100), range(0, 200, 2)):
        allocator = PrefixCachingBlockAllocator(100, 4, ids)
        yield allocator
        blocks = allocator.allocate_immutable_blocks(None, [[i] * 4 for i in range(9)])
        last = allocator.allocate_mutable_block(blocks[-1])
        allocator.fork(last)[-1].append_token_ids([1])
        yield allocator
        del allocator, blocks, last


def lists() -> Owners:
    allocator = NaiveBlockAllocator(NaiveBlock, 100, 4)
    blocks = allocator.allocate_immutable_blocks(None, [[i] for i in range(100)])
    kept = BlockList(blocks[:5])
    yield allocator, kept
    for block in blocks[5:]:
        kept.append(block)
    yield allocator, kept


def tables() -> Owners:
    both = CpuGpuBlockAllocator.create("prefix_caching", 100, 100, 4)
    devices = tuple(both._allocators.values())
    yield devices
    table = BlockTable(4, both)
    table.allocate(range(50))
    yield *devices, table._blocks
    fork = table.fork()
    fork.append_token_ids(range(9))
    yield *devices, table._blocks, fork._blocks
    fork.free()
    both.swap(table.blocks, Device.GPU, Device.CPU)
    yield *devices, table._blocks, fork._blocks


COUNTED = [
    stores,
    pools,
    pools_without_hints,
    pools_that_do_not_cache,
    maps,
    queues,
    managers,
    hashers,
    evictors,
    counters,
    copies,
    allocators,
    lists,
    tables,
]


@pytest.mark.parametrize("owners", COUNTED)
def test_nbytes_is_what_was_taken_to_the_byte(owners: Callable[[], Owners]) -> None:
    steps, most = 0, 0
    with bytes_in_c() as held:
        for owner in owners():
            parts = owner if isinstance(owner, tuple) else (owner,)
            assert held() == sum(part.nbytes for part in parts), f"step {steps}"
            steps, most = steps + 1, max(most, held())
        owner = parts = None  # type: ignore[assignment]
        gc.collect()
        assert held() == 0
    assert steps and most


def test_a_replay_gives_back_what_it_took() -> None:
    with bytes_in_c() as held:
        replay = PoolReplay(30, 4)
        assert held() > replay.manager.nbytes  # and the text to be digested
        replay = None  # type: ignore[assignment]
        assert held() == 0


def test_hashing_keeps_nothing() -> None:
    with bytes_in_c() as held:
        hash_blocks(np.arange(10_000), 5_000)  # its scratch does not fit the stack
        assert held() == 0


def test_a_pools_bytes_are_no_objects() -> None:
    with bytes_in_c() as held:
        pool = BlockPool(100_000, True, 4)
        snapshot = tracemalloc.take_snapshot()
        others = tracemalloc.DomainFilter(False, tracemalloc_domain)
        traces = snapshot.filter_traces([others]).traces
        assert sum(trace.size for trace in traces) < 100_000
        assert held() == pool.nbytes > 7_900_000


def test_a_call_that_fails_keeps_nothing() -> None:
    pool = BlockPool(10, True, 4)
    with bytes_in_c() as held:
        for bad in (2**31 - 1, 2**31 - 2, -1):
            with pytest.raises((ValueError, MemoryError)):
                BlockStore(bad)
        with pytest.raises(ValueError):
            pool.get_new_block_ids(11)
        assert held() == 0


# -- what is lost: nothing, over many operations -----------------------------------

OPERATIONS = 30_000
# An object lost by one operation in a thousand; and growth that no workload comes near:
# OPERATIONS lost pieces of memory in C, of 32 bytes or more.
MOST_OBJECTS = OPERATIONS // 1000
MOST_BYTES = 32 * OPERATIONS


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_operation_loses_anything(name: str) -> None:
    objects, size = left_over(WORKLOADS[name](), OPERATIONS)
    assert objects < MOST_OBJECTS
    assert size < MOST_BYTES


@pytest.mark.parametrize("name", MADE_AND_DROPPED)
def test_what_is_made_and_dropped_leaves_nothing(name: str) -> None:
    make_and_drop = MADE_AND_DROPPED[name]

    def work(times: int) -> None:
        for _ in range(times):
            make_and_drop()

    objects, size = left_over(work, 500)  # pools of 80 kB and more
    assert objects < 10
    assert size < MOST_BYTES
    with bytes_in_c() as held:
        work(20)
        gc.collect()
        assert held() == 0


def test_a_lost_object_would_be_seen() -> None:
    lost: list[object] = []

    def lose(operations: int) -> None:
        for _ in range(operations):
            lost.append(object())

    assert left_over(lose, OPERATIONS)[0] > 500 * MOST_OBJECTS


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell")
def test_lost_memory_would_be_seen() -> None:
    lost: list[Any] = []

    def lose(times: int) -> None:
        lost.extend(BlockPool(1000, True, 4) for _ in range(times))

    assert left_over(lose, 1000)[1] > 20 * MOST_BYTES


# -- what the collector sees --------------------------------------------------------


def tracked_by(make: Callable[[], Any]) -> int:
    """How many objects more the collector has to look at."""
    gc.collect()
    gc.freeze()  # all others are out of sight
    try:
        made = make()
        gc.collect()  # tuples of ints and the like are tracked until then
        count = len(gc.get_objects())
        del made
        return count
    finally:
        gc.unfreeze()


def with_views(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, True, 4, metrics_collector=Collector())
    pool.free_blocks(pool.get_new_blocks(num_blocks - 1))
    return pool


def full(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, True, 4)
    ids = pool.get_new_block_ids(num_blocks - 1)
    pool.cache_block_ids(ids, [hash_of(i) for i in range(len(ids))])
    return pool


def manager_of(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, [FullAttention(4)], max_model_len=100, max_num_requests=4
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda n: BlockPool(n, True, 4),
        with_views,
        full,
        manager_of,
        lambda n: PrefixCachingBlockAllocator(n, 4),
        lambda n: NaiveBlockAllocator(NaiveBlock, n, 4),
        lambda n: CpuGpuBlockAllocator.create("prefix_caching", n, n, 4),
    ],
    ids=["pool", "views", "full pool", "manager", "caching", "naive", "two devices"],
)
def test_the_collector_sees_no_more_of_many_blocks(make: Callable[[int], Any]) -> None:
    make(10)  # what is made once
    # One or two may be the interpreter's, of a cache that grew meanwhile.
    many, few = tracked_by(lambda: make(100_000)), tracked_by(lambda: make(10))
    assert many < few + 10


def test_blocks_of_sequences_are_not_tracked() -> None:
    allocator = PrefixCachingBlockAllocator(1000, 4)

    def take(count: int) -> Any:
        return allocator.allocate_immutable_blocks(
            None, [[i] * 4 for i in range(count)]
        )

    take(1)
    assert tracked_by(lambda: take(900)) < tracked_by(lambda: take(1)) + 10
