"""Block hash -> block: the map made by hand, and lookups of prefixes in a pool."""

from itertools import cycle

from kvcache import BlockHashToBlockMap, KVCacheBlock

from .common import (
    REQUEST,
    SIZES,
    WHO,
    make_pool,
    once,
    random_digests,
    scatter,
    skip_what_is_too_big,
)


class HandMadeMap:
    """One call a key, against a dict."""

    # Beyond 1,000 keys the entries leave L2.
    params = (WHO, [1_000, 100_000])
    param_names = ("who", "keys")

    def setup(self, who, num_keys):
        self.keys = [digest + bytes(4) for digest in random_digests("plain", num_keys)]
        self.blocks = [KVCacheBlock(i) for i in range(num_keys)]
        if who == "kvcache":
            self.map = BlockHashToBlockMap()
            for key, block in zip(self.keys, self.blocks, strict=True):
                self.map.insert(key, block)
            self.get = self.map.get_one_block
        else:
            self.map = dict(zip(self.keys, self.blocks, strict=True))
            self.get = self.map.get
        step = num_keys // REQUEST
        self.some = list(zip(self.keys[::step], self.blocks[::step], strict=True))

    def time_get_one_block_100(self, who, num_keys):
        get = self.get
        for key, _ in self.some:
            get(key)

    def time_pop_and_insert_100(self, who, num_keys):
        if who == "kvcache":
            for key, block in self.some:
                self.map.pop(key, block.block_id)
                self.map.insert(key, block)
        else:
            for key, block in self.some:
                self.map.pop(key)
                self.map[key] = block


@once
def half_full_pool(who, num_blocks):
    """How a pool looks a prefix up, and what it holds, by request."""
    pool = make_pool(who, num_blocks)
    scatter(pool)
    digests = random_digests(who, num_blocks // 2)
    ids = pool.get_new_block_ids(len(digests))
    pool.cache_block_ids(ids, digests)
    pool.free_block_ids(ids[::-1])
    starts = range(0, len(digests), REQUEST)
    return pool.match_prefix_ids, cycle([digests[i : i + REQUEST] for i in starts])


class Prefixes:
    """A pool half full of content in random places; each call looks up another prefix.

    So the calls go round all that is cached, and what they read is as far away as the
    pool is big: see SIZES.
    """

    params = (WHO, SIZES)
    param_names = ("who", "blocks")
    timeout = 300

    def setup(self, who, num_blocks):
        skip_what_is_too_big(who, num_blocks)
        self.match, self.prefixes = half_full_pool(who, num_blocks)

    def time_match_100(self, who, num_blocks):
        self.match(next(self.prefixes))
