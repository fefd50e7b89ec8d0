"""Owners at work, for as many operations as one likes: what must not leak.

Each workload makes its owner and returns a function of a number of operations, which
leaves the owner as it found it: whatever more is allocated then is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from pools import full_request_of, hashes_of, key_of

from kvcache import (
    BlockHashToBlockMap,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from kvcache.hashing import BlockHasher, Keyed
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow
from kvcache.prefix_caching import BlockTable, CpuGpuBlockAllocator
from kvcache.prefix_caching.evictor import LRUEvictor
from kvcache.prefix_caching.interfaces import Device

Workload = Callable[[int], None]
KEYED = Keyed(b"0123456789abcdef")


class Collector:
    def ignore(self, block: KVCacheBlock | None = None) -> None:
        pass

    on_block_allocated = on_block_accessed = on_block_evicted = reset = ignore


def watch(block: KVCacheBlock) -> None:
    pass


def pool(**options: Any) -> Workload:
    """Blocks go and come by id and as objects; all that a pool does happens to them."""
    made = BlockPool(200, True, 4, **options)
    requests = [full_request_of(*range(10 * i, 10 * i + 8)) for i in range(40)]
    prompts = [np.arange(32, dtype=np.int32) + 100 * i for i in range(40)]
    chosen = random.Random(1)

    def by_id() -> None:
        hashes = chosen.choice(requests).block_hashes
        hits = made.match_prefix_ids(hashes)
        made.touch_block_ids(hits)
        ids = made.get_new_block_ids(8 - len(hits))
        made.cache_block_ids(ids, hashes[len(hits) :])
        made.free_block_ids(ids[::-1])
        made.free_block_ids(hits[::-1])

    def as_objects() -> None:
        request = chosen.choice(requests)
        [hits] = made.match_prefix(request.block_hashes, [0])
        made.touch(hits)
        blocks = [*hits, *made.get_new_blocks(8 - len(hits))]
        made.cache_full_blocks(request, blocks, len(hits), 8, 4, 0)
        made.free_blocks(reversed(blocks))

    def in_part() -> None:
        request = chosen.choice(requests)
        one, other = made.get_new_blocks(2)
        made.cache_partial_block(request, one, 8, 1, 8)
        made.cache_partial_block(request, one, 4, 1, 8)
        made.move_block_hashes(one, other)
        made.evict_blocks([other.block_id])
        made.unpin_blocks([one], watch)
        made.free_blocks([other])

    def by_tokens() -> None:
        tokens = chosen.choice(prompts)
        hits = made.match_prefix_tokens(tokens, KEYED)
        made.touch_block_ids(hits)
        ids = np.concatenate([hits, made.get_new_block_ids(8 - len(hits))])
        made.cache_block_tokens(ids, tokens, KEYED, len(hits))
        made.free_block_ids(ids[::-1])

    def made_by_hand() -> None:
        block, of_map = KVCacheBlock(999), made.cached_block_hash_to_block
        of_map.insert(key_of(7), block)
        made.cache_full_blocks(chosen.choice(requests), [block], 0, 1, 4, 2)
        made._maybe_evict_cached_block(block)

    def refused() -> None:
        for bad in (lambda: made.free_block_ids([1, 1, 1]), lambda: made.touch([None])):
            try:
                bad()
            except (ValueError, TypeError):
                continue
            raise AssertionError

    steps = [by_id, as_objects, in_part, by_tokens, made_by_hand, refused]

    def work(operations: int) -> None:
        for i in range(operations // 6):
            steps[i % len(steps)]()
            if i % 50 == 49:
                made.take_events()
        made.reset_prefix_cache()
        made.take_events()

    return work


def manager(*groups: Any, **options: Any) -> Workload:
    made = KVCacheManager(
        400, groups, max_model_len=256, max_num_requests=16, hash_fn=KEYED, **options
    )
    chosen = random.Random(2)

    def work(operations: int) -> None:
        for i in range(operations // 12):
            start = 100 * chosen.randrange(20)
            row = made.add_request(range(start, start + 40))
            made.allocate_slots(row, 40 - made.match(row))
            made.append_step([row], [7])
            made.allocate_step([row], [1])
            made.append(row, list(range(9)))
            made.allocate_slots(row, 9)
            made.slot_mapping([row], [9])
            forked = made.fork(row)
            made.take_changed_rows()
            made.preempt(row)
            made.free(row)
            if forked is not None:
                made.free(forked[0])
            if i % 20 == 19:
                made.take_events()
                made.take_prefix_cache_stats()
        made.reset_prefix_cache()
        made.take_events()

    return work


def tables(kind: str) -> Workload:
    made = CpuGpuBlockAllocator.create(kind, 200, 200, 4)
    chosen = random.Random(3)

    def work(operations: int) -> None:
        for i in range(operations // 8):
            table = BlockTable(4, made)
            start = 100 * chosen.randrange(20)
            table.allocate(range(start, start + 30))
            made.mark_blocks_as_computed([])
            made.mark_blocks_as_accessed(table.physical_block_ids, float(i))
            forked = table.fork()
            forked.append_token_ids([1, 2, 3, 4, 5])
            made.clear_copy_on_writes()
            forked.free()
            made.swap(table.blocks, Device.GPU, Device.CPU)
            made.get_and_reset_swaps()
            table.update(table.blocks)
            table.free()
        made.reset_prefix_cache()

    return work


def hasher() -> Workload:
    def work(operations: int) -> None:
        for i in range(operations // 20):
            made = BlockHasher(4, KEYED)
            for _ in range(8):
                made.append([i, i + 1, i + 2])
                made.append(i)
            made.truncate(5)

    return work


def evictor() -> Workload:
    made = LRUEvictor()

    def work(operations: int) -> None:
        for i in range(operations // 4):
            made.add(i, i, 1, float(i))
            made.update(i, float(i + 1))
            made.add(-i - 1, i, 1, float(i))
            made.remove(i)
            made.evict()

    return work


def queue() -> Workload:
    def work(operations: int) -> None:
        blocks = [KVCacheBlock(i) for i in range(20)]
        made = FreeKVCacheBlockQueue(blocks)
        for i in range(operations // 4):
            made.append(made.popleft())
            made.remove(blocks[i % 20])
            made.prepend_n([blocks[i % 20]])
            made.append_n(made.popleft_n(3))

    return work


def of_map() -> Workload:
    made = BlockHashToBlockMap()

    def work(operations: int) -> None:
        for i in range(operations // 4):
            made.insert(key_of(i % 7), KVCacheBlock(i % 5))
            made.get_one_block(key_of(i % 7))
            made.contain(key_of(3), i % 5)
            if i % 3 == 2:
                made.pop(key_of(i % 7), i % 5)
        for number in range(7):
            for block in range(5):
                made.pop(key_of(number), block)

    return work


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "pool": pool,
    "pool that keeps tokens": lambda: pool(keep_tokens=True),
    "pool with events and metrics": lambda: pool(
        enable_kv_cache_events=True, metrics_collector=Collector()
    ),
    "manager": lambda: manager(FullAttention(4)),
    "manager with events": lambda: manager(
        FullAttention(4), SlidingWindow(4, 12), enable_kv_cache_events=True
    ),
    "tables of a naive allocator": lambda: tables("naive"),
    "tables of a caching allocator": lambda: tables("prefix_caching"),
    "hasher": hasher,
    "evictor": evictor,
    "queue": queue,
    "map": of_map,
}


def make_and_drop_pool() -> None:
    """A pool that did something, and is gone."""
    made = BlockPool(1000, True, 4, True, keep_tokens=True)
    blocks = made.get_new_blocks(30)
    made.cache_full_blocks(full_request_of(1, 2, 3), blocks, 0, 3, 4, 0)
    made.cache_partial_block(full_request_of(4), blocks[0], 4, 1, 4)
    made.free_block_ids([5])
    made.match_prefix_ids(hashes_of(1, 2))
    list(made.blocks[:50])


def make_and_drop_manager() -> None:
    made = KVCacheManager(
        300, [FullAttention(4)], max_model_len=256, max_num_requests=16
    )
    row = made.add_request(range(50))
    made.allocate_slots(row, 50 - made.match(row))
    made.block_table()


def make_and_drop_tables() -> None:
    made = CpuGpuBlockAllocator.create("prefix_caching", 300, 300, 4)
    table = BlockTable(4, made)
    table.allocate(range(50))
    table.fork().append_token_ids([1])


MADE_AND_DROPPED = {
    "pool": make_and_drop_pool,
    "manager": make_and_drop_manager,
    "allocators": make_and_drop_tables,
}
