"""The hot operations whose instructions are counted; see bench_instructions.py.

    python counted.py SWITCH.so    under callgrind

Each operation comes back to where it began, or has one that gives back what it took and
is counted by itself: so every round executes the same, and finds its memory again.
A commit that does not have yet what a family is about gives no counts of it.
"""

import ctypes
import gc
import sys
from types import SimpleNamespace

import numpy as np

from kvcache import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock

ROUNDS = 16
SIZE = 16
DIGESTS = [b"%32d" % i for i in range(2_000)]


def cached_pool(count):
    """A pool whose first blocks hold the first digests, all free."""
    pool = BlockPool(5_000, True, SIZE)
    ids = pool.get_new_block_ids(count)
    pool.cache_block_ids(ids, DIGESTS[:count])
    return pool, ids


def queue():
    blocks = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(1_000)])

    def popleft_n_and_append_n_100():
        blocks.append_n(blocks.popleft_n(100))

    yield popleft_n_and_append_n_100


def pool():
    pool = BlockPool(20_000, True, SIZE)
    list(pool.blocks)
    held = []

    def get_new_blocks_200():
        held.append(pool.get_new_blocks(200))

    def free_blocks_200():
        pool.free_blocks(held.pop())

    def get_new_blocks_and_free_1():
        pool.free_blocks(pool.get_new_blocks(1))

    def get_new_block_ids_1000():
        held.append(pool.get_new_block_ids(1_000))

    def free_block_ids_1000():
        pool.free_block_ids(held.pop())

    yield get_new_blocks_200, free_blocks_200
    yield get_new_block_ids_1000, free_block_ids_1000
    yield get_new_blocks_and_free_1


def cache():
    pool = BlockPool(5_000, True, SIZE)
    request = SimpleNamespace(block_hashes=DIGESTS[:100])

    def cache_full_blocks_and_evict_100():
        blocks = pool.get_new_blocks(100)
        pool.cache_full_blocks(request, blocks, 0, 100, SIZE, 0)
        pool.evict_blocks([block.block_id for block in blocks])
        pool.free_blocks(blocks[::-1])

    yield cache_full_blocks_and_evict_100


def lookups():
    pool, ids = cached_pool(2_000)
    pool.free_block_ids(ids[::-1])
    hashes = np.frombuffer(b"".join(DIGESTS), np.uint8).reshape(-1, 32)
    blocks = [pool.blocks[i] for i in ids[:100].tolist()]

    def match_prefix_ids_2000():
        pool.match_prefix_ids(hashes)

    def match_prefix_2000():
        pool.match_prefix(DIGESTS, [0])

    def get_cached_block_100():
        for digest in DIGESTS[:100]:
            pool.get_cached_block(digest, [0])

    def touch_and_free_100():
        pool.touch(blocks)
        pool.free_blocks(blocks)

    yield from (
        match_prefix_ids_2000,
        match_prefix_2000,
        get_cached_block_100,
        touch_and_free_100,
    )


def hashing():
    from kvcache.hashing import hash_blocks, keyed_hash, sha256

    tokens = (np.arange(SIZE * 100) * 7_919 % 128_256).astype(np.int32)
    as_list = tokens.tolist()
    root, hasher = bytes(32), keyed_hash.Keyed(bytes(16))

    def sha256_portable_100_int32():
        hash_blocks(tokens, SIZE, root, hash_fn=sha256)

    def sha256_portable_100_list():
        hash_blocks(as_list, SIZE, root, hash_fn=sha256)

    def keyed_100_int32():
        hasher.hash_blocks(tokens, SIZE)

    yield from (sha256_portable_100_int32, sha256_portable_100_list, keyed_100_int32)


def manager():
    from kvcache.manager import FullAttention, KVCacheManager

    one = KVCacheManager(
        20_000, [FullAttention(SIZE)], max_model_len=4_096, max_num_requests=256
    )
    hashes = DIGESTS[:63]

    def admit_and_free_1008_tokens():
        row = one.add_request(hashes=hashes, num_tokens=1_008)
        one.allocate_slots(row, 1_008 - one.match(row))
        one.free(row)

    yield admit_and_free_1008_tokens
    rows = np.arange(256, dtype=np.int32)
    ones = np.ones(256, np.int32)
    for i in range(256):
        hashes_of_its_own = [b"%16d%16d" % (i, k) for k in range(40)]
        row = one.add_request(hashes=hashes_of_its_own, num_tokens=640)
        one.allocate_slots(row, SIZE + i % SIZE)

    def allocate_step_256():
        one.allocate_step(rows, ones)

    def allocate_slots_256():
        for row in range(256):
            one.allocate_slots(row, 1)

    # A block's length of rounds is a cycle: each step takes and fills 16 blocks.
    yield from (allocate_step_256, allocate_slots_256)


def allocator():
    from kvcache.prefix_caching import CpuGpuBlockAllocator, Device

    both = CpuGpuBlockAllocator.create("prefix_caching", 1_000, 1_000, SIZE)
    lists = [[i] * SIZE for i in range(100)]

    def allocate_immutable_blocks_and_free_100():
        blocks = both.allocate_immutable_blocks(None, lists, Device.GPU)
        for block in reversed(blocks):
            both.free(block)

    held = both.allocate_immutable_blocks(None, lists, Device.GPU)

    def fork_and_free_100():
        for block in reversed(both.fork(held[-1])):
            both.free(block)

    yield from (allocate_immutable_blocks_and_free_100, fork_and_free_100)


FAMILIES = (queue, pool, cache, lookups, hashing, manager, allocator)


def main():
    switch = ctypes.CDLL(sys.argv[1])
    gc.disable()

    def count(counted, before, after, rounds, kind):
        toggle = switch.toggle
        switch.begin()
        for _ in range(rounds):
            before()
            toggle()
            counted()
            toggle()
            after()
        switch.end(f"{counted.__name__} {kind}".encode())

    def nothing():
        pass

    def count_all(family):
        for each in family():
            take, give = each if isinstance(each, tuple) else (each, nothing)
            for _ in range(3):
                take()
                give()
            for kind, rounds in (("few", ROUNDS), ("many", 2 * ROUNDS)):
                count(take, nothing, give, rounds, kind)
                if give is not nothing:
                    count(give, take, nothing, rounds, kind)

    for family in FAMILIES:
        try:
            count_all(family)
        except (ImportError, AttributeError, TypeError) as error:
            print(f"not counted: {family.__name__}: {error!r}")


if __name__ == "__main__":
    main()
