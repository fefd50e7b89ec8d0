"""What the benchmarks share: sizes, hashes, prepared pools, a plain-Python baseline."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import numpy as np

import kvcache

# A block takes some 80 bytes. A pool of 1,000 stays in the first two levels of cache,
# one of 100,000 (8 MB) in the last, one of 10,000,000 (800 MB) in memory alone.
SIZES = [1_000, 100_000, 10_000_000]
# More is not asked of plain Python: it takes seconds to set up.
PLAIN_LIMIT = 100_000
BLOCK_SIZE = 16
REQUEST = 100  # blocks
SEED = 20

WHO = ["kvcache", "plain"]

# For what takes seconds to set up and is as good after a sample as before: asv sets up
# before each sample, in one process.
once = lru_cache(maxsize=1)


class PlainPool:
    """The same job with dicts, lists and an OrderedDict, and without any check."""

    def __init__(self, num_blocks):
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.ref_cnt = [0] * num_blocks
        self.hash_of = [None] * num_blocks
        self.blocks_of = {}  # hash -> dict of blocks, oldest first
        self.num_evicted = 0

    def get_num_free_blocks(self):
        return len(self.free)

    def get_new_block_ids(self, n):
        ids = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in ids:
            self.ref_cnt[block] = 1
            block_hash = self.hash_of[block]
            if block_hash is not None:
                self.hash_of[block] = None
                self.num_evicted += 1
                blocks = self.blocks_of[block_hash]
                del blocks[block]
                if not blocks:
                    del self.blocks_of[block_hash]
        return ids

    def touch_block_ids(self, ids):
        for block in ids:
            if self.ref_cnt[block] == 0:
                del self.free[block]
            self.ref_cnt[block] += 1

    def free_block_ids(self, ids):
        uncached = []
        for block in ids:
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.free[block] = None
                if self.hash_of[block] is None:
                    uncached.append(block)
        for block in reversed(uncached):
            self.free.move_to_end(block, last=False)

    def cache_block_ids(self, ids, hashes):
        for block, block_hash in zip(ids, hashes, strict=True):
            self.hash_of[block] = block_hash
            self.blocks_of.setdefault(block_hash, {})[block] = None

    def match_prefix_ids(self, hashes):
        found = []
        for block_hash in hashes:
            blocks = self.blocks_of.get(block_hash)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found


def skip_what_is_too_big(who, num_blocks):
    """Call it in a setup."""
    if who == "plain" and num_blocks > PLAIN_LIMIT:
        raise NotImplementedError  # asv reports the case as skipped


def make_pool(who, num_blocks):
    if who == "kvcache":
        return kvcache.BlockPool(num_blocks, True, BLOCK_SIZE)
    return PlainPool(num_blocks)


def random_digests(who, count):
    """Block hashes as each side takes them: rows of an array, or a list of bytes."""
    digests = np.random.default_rng(SEED).integers(0, 256, (count, 32), np.uint8)
    return digests if who == "kvcache" else list(map(bytes, digests))


def scatter(pool):
    """Put the free queue in random order, as it is once requests came and went."""
    ids = pool.get_new_block_ids(pool.get_num_free_blocks())
    order = np.random.default_rng(SEED).permutation(len(ids))
    ids = np.asarray(ids, np.int32)[order]
    pool.free_block_ids(ids if isinstance(pool, kvcache.BlockPool) else ids.tolist())
