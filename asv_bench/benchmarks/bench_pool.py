"""The block pool: the array face, the object face, memory."""

import gc
import tracemalloc
from itertools import cycle

import kvcache

from .common import (
    BLOCK_SIZE,
    REQUEST,
    SIZES,
    WHO,
    make_pool,
    once,
    random_digests,
    scatter,
    skip_what_is_too_big,
)


@once
def full_pool(who, num_blocks):
    """A pool, what it is to hold next, and what it holds, by request."""
    pool = make_pool(who, num_blocks)
    scatter(pool)
    # Twice as much content as fits: by the time it comes again, it is gone.
    digests = random_digests(who, 2 * (num_blocks // REQUEST) * REQUEST)
    contents = cycle(
        [digests[i : i + REQUEST] for i in range(0, len(digests), REQUEST)]
    )
    requests = []
    for _ in range((num_blocks - 1) // REQUEST):
        ids = pool.get_new_block_ids(REQUEST)
        pool.cache_block_ids(ids, next(contents))
        requests.append(ids)
    # The few that are left stay in use: they hold nothing.
    pool.get_new_block_ids(pool.get_num_free_blocks())
    for ids in requests:
        pool.free_block_ids(ids[::-1])
    return pool, contents, cycle(requests)


class ById:
    """The array face on a pool whose blocks are all cached, in random places.

    The timed calls go round the pool, so what they read is as far away as the pool is
    big: see SIZES.
    """

    params = (WHO, SIZES)
    param_names = ("who", "blocks")
    timeout = 300

    def setup(self, who, num_blocks):
        skip_what_is_too_big(who, num_blocks)
        self.pool, self.contents, self.hits = full_pool(who, num_blocks)

    def time_get_cache_free_100(self, who, num_blocks):
        """Every block that is handed out is evicted first."""
        ids = self.pool.get_new_block_ids(REQUEST)
        self.pool.cache_block_ids(ids, next(self.contents))
        self.pool.free_block_ids(ids[::-1])

    def time_touch_and_free_100(self, who, num_blocks):
        ids = next(self.hits)
        self.pool.touch_block_ids(ids)
        self.pool.free_block_ids(ids[::-1])


class HotFront:
    """Get and free blocks without content: the same few go round at the front.

    The pool's size must not matter here, nor how much is cached.
    """

    params = (["ids", "objects"], [1, 10, 100], [SIZES[0], SIZES[-1]])
    param_names = ("face", "n", "blocks")

    def setup(self, face, n, num_blocks):
        pool = make_pool("kvcache", num_blocks)
        if face == "ids":
            self.get, self.free = pool.get_new_block_ids, pool.free_block_ids
        else:
            self.get, self.free = pool.get_new_blocks, pool.free_blocks

    def time_get_and_free(self, face, n, num_blocks):
        self.free(self.get(n))


class Making:
    params = (WHO, SIZES)
    param_names = ("who", "blocks")

    def setup(self, who, num_blocks):
        skip_what_is_too_big(who, num_blocks)

    def time_make(self, who, num_blocks):
        make_pool(who, num_blocks)

    def peakmem_make(self, who, num_blocks):
        make_pool(who, num_blocks)


class Memory:
    """Deterministic: what a pool takes, and what it adds for the collector to visit."""

    params = ([1_000, 100_000, 1_000_000],)
    param_names = ("blocks",)

    def track_bytes_a_block(self, num_blocks):
        return traced_bytes(num_blocks, objects=False) / num_blocks

    def track_bytes_a_block_with_objects(self, num_blocks):
        return traced_bytes(num_blocks, objects=True) / num_blocks

    def track_collector_objects(self, num_blocks):
        gc.collect()
        before = len(gc.get_objects())
        pool = pool_with_objects(num_blocks)
        added = len(gc.get_objects()) - before
        del pool
        return added

    track_bytes_a_block.unit = track_bytes_a_block_with_objects.unit = "bytes"
    track_collector_objects.unit = "objects"


def pool_with_objects(num_blocks):
    pool = kvcache.BlockPool(num_blocks, True, BLOCK_SIZE)
    for _block in pool.blocks:
        pass
    return pool


def traced_bytes(num_blocks, objects):
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        if objects:
            pool = pool_with_objects(num_blocks)
        else:
            pool = kvcache.BlockPool(num_blocks, True, BLOCK_SIZE)
        after = tracemalloc.get_traced_memory()[0]
        del pool
        return after - before
    finally:
        tracemalloc.stop()
