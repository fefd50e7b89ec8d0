"""The work that the block pool's rows measure: each function prepares one side.

Stores nothing. Both sides of a row get a pool of the same size, in the same state, the
same 32-byte hashes and the same calls: where the API is the same, one function serves
both. Half of a pool's blocks hold content. In a *scattered* pool the free queue was in
random order before, as it is once requests have come and gone: neighbours in a request
are then not neighbours in memory. *Cold* work goes round a scattered pool of a million
blocks, so that nothing it reads is in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from itertools import cycle
from random import Random
from time import perf_counter_ns as clock
from types import SimpleNamespace
from typing import Any

import numpy as np
from c_loop import compiled
from measure import Side

import kvcache

POOL = 100_000  # blocks of the pools below
HALF = 50_000  # of them hold content
PREFIX = 2_000  # hashes that a lookup is given: all hits
REQUEST = 100  # blocks of one request
REQUESTS = 20  # cached before anything is undone
BIG_POOL = 1_000_000
BLOCK_SIZE = 16
SEED = 20

MakePool = Callable[..., Any]


def digests(first: int, count: int) -> list[bytes]:
    return [sha256(b"%d" % i).digest() for i in range(first, first + count)]


def half_cached_pool(make_pool: MakePool, scattered: bool, num_blocks: int = POOL):
    """A pool of which half is free and cached, under digests(0, num_blocks // 2)."""
    pool = make_pool(num_blocks, True, BLOCK_SIZE)
    if scattered:
        blocks = pool.get_new_blocks(num_blocks - 1)
        Random(SEED).shuffle(blocks)
        pool.free_blocks(blocks)
    half = num_blocks // 2
    cached = pool.get_new_blocks(half)
    request = SimpleNamespace(block_hashes=digests(0, half))
    pool.cache_full_blocks(request, cached, 0, half, BLOCK_SIZE, 0)
    pool.free_blocks(cached[::-1])
    return pool


def cold_starts() -> list[int]:
    """Where the requests of a big pool's cached half begin, in random order."""
    starts = list(range(0, BIG_POOL // 2, REQUEST))
    Random(SEED).shuffle(starts)
    return starts


def get_and_free(make_pool: MakePool, n: int, scattered: bool = False) -> Side:
    """The blocks hold no content, so the same n go round at the front of the queue."""
    pool = half_cached_pool(make_pool, scattered)
    get, free = pool.get_new_blocks, pool.free_blocks

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            free(get(n))
        return clock() - start

    return Side(run, n)


def get_and_free_ids(n: int, scattered: bool = False) -> Side:
    pool = half_cached_pool(kvcache.BlockPool, scattered)
    get, free = pool.get_new_block_ids, pool.free_block_ids

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            free(get(n))
        return clock() - start

    return Side(run, n)


def get_and_free_in_c(n: int, scattered: bool = False) -> Side:
    loop = compiled().get_and_free
    pool = half_cached_pool(kvcache.BlockPool, scattered)

    def run(loops: int) -> int:
        start = clock()
        loop(pool, n, loops)
        return clock() - start

    return Side(run, n)


def loop_matcher(pool: Any) -> Callable[[list[bytes]], list[Any]]:
    """What a scheduler has to write where a lookup takes one hash."""
    get, groups = pool.get_cached_block, [0]

    def match(hashes: list[bytes]) -> list[Any]:
        found = []
        for block_hash in hashes:
            blocks = get(block_hash, groups)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    return match


def match_by_loop(make_pool: MakePool, scattered: bool = False) -> Side:
    pool = half_cached_pool(make_pool, scattered)
    return lookup(loop_matcher(pool), [digests(0, PREFIX)])


def match_objects(scattered: bool = False) -> Side:
    pool = half_cached_pool(kvcache.BlockPool, scattered)
    return lookup(
        lambda hashes: pool.match_prefix(hashes, [0])[0], [digests(0, PREFIX)]
    )


def match_ids(scattered: bool = False) -> Side:
    pool = half_cached_pool(kvcache.BlockPool, scattered)
    return lookup(pool.match_prefix_ids, [as_rows(digests(0, PREFIX))])


def match_in_c(scattered: bool = False) -> Side:
    pool = half_cached_pool(kvcache.BlockPool, scattered)
    rows, loop = as_rows(digests(0, PREFIX)), compiled().match

    def run(loops: int) -> int:
        start = clock()
        loop(pool, rows, loops)
        return clock() - start

    return Side(run, len(rows))


def match_cold_by_loop(make_pool: MakePool) -> Side:
    pool = half_cached_pool(make_pool, True, BIG_POOL)
    hashes = digests(0, BIG_POOL // 2)
    return lookup(loop_matcher(pool), [hashes[i : i + REQUEST] for i in cold_starts()])


def match_cold_ids() -> Side:
    pool = half_cached_pool(kvcache.BlockPool, True, BIG_POOL)
    rows = as_rows(digests(0, BIG_POOL // 2))
    return lookup(pool.match_prefix_ids, [rows[i : i + REQUEST] for i in cold_starts()])


def as_rows(hashes: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)


def lookup(match: Callable[[Any], Any], prefixes: list[Any]) -> Side:
    """Each loop looks up one prefix, in turns if there are several."""
    turns = cycle(prefixes)
    if len(match(prefixes[0])) != len(prefixes[0]):
        raise AssertionError("the prefix is not cached as a whole")

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            match(next(turns))
        return clock() - start

    return Side(run, len(prefixes[0]))


def get_cached(make_pool: MakePool, scattered: bool = False) -> Side:
    """One call a hash and nothing else; the loop itself counts on both sides."""
    pool = half_cached_pool(make_pool, scattered)
    get, groups, hashes = pool.get_cached_block, [0], digests(0, PREFIX)

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            for block_hash in hashes:
                get(block_hash, groups)
        return clock() - start

    return Side(run, PREFIX)


def touch_and_free(make_pool: MakePool, scattered: bool = False) -> Side:
    pool = half_cached_pool(make_pool, scattered)
    return hit_and_end(pool, [blocks_of(pool, digests(0, REQUEST))])


def touch_and_free_cold(make_pool: MakePool) -> Side:
    pool = half_cached_pool(make_pool, True, BIG_POOL)
    blocks = blocks_of(pool, digests(0, BIG_POOL // 2))
    return hit_and_end(pool, [blocks[i : i + REQUEST] for i in cold_starts()])


def blocks_of(pool: Any, hashes: list[bytes]) -> list[Any]:
    return [pool.get_cached_block(block_hash, [0])[0] for block_hash in hashes]


def hit_and_end(pool: Any, requests: list[list[Any]]) -> Side:
    """A request that hits and ends: its blocks leave the free queue and return."""
    turns = cycle([(blocks, blocks[::-1]) for blocks in requests])
    touch, free = pool.touch, pool.free_blocks

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            blocks, tail_first = next(turns)
            touch(blocks)
            free(tail_first)
        return clock() - start

    return Side(run, REQUEST)


def cache_full(make_pool: MakePool, scattered: bool = False) -> Side:
    """Only the caching is timed; evicting what was cached is not."""
    pool = half_cached_pool(make_pool, scattered)
    jobs = []
    for i in range(REQUESTS):
        request = SimpleNamespace(block_hashes=digests(HALF + i * REQUEST, REQUEST))
        jobs.append((request, pool.get_new_blocks(REQUEST)))
    ids = [block.block_id for _, blocks in jobs for block in blocks]
    cache = pool.cache_full_blocks

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            start = clock()
            for request, blocks in jobs:
                cache(request, blocks, 0, REQUEST, BLOCK_SIZE, 0)
            spent += clock() - start
            pool.evict_blocks(ids)
        return spent

    return Side(run, len(ids))


def life_in_full_pool(make_pool: MakePool, scattered: bool = False) -> Side:
    """Get, cache, free in a pool whose every free block is cached: each get evicts."""
    pool = half_cached_pool(make_pool, scattered)
    rest = pool.get_new_blocks(POOL - 1 - HALF)
    request = SimpleNamespace(block_hashes=digests(HALF, len(rest)))
    pool.cache_full_blocks(request, rest, 0, len(rest), BLOCK_SIZE, 0)
    pool.free_blocks(rest[::-1])
    # More content than the pool holds, so that none is there when it comes again.
    hashes = digests(POOL, 2 * POOL)
    requests = cycle(
        [
            SimpleNamespace(block_hashes=hashes[i : i + REQUEST])
            for i in range(0, len(hashes), REQUEST)
        ]
    )

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            blocks = pool.get_new_blocks(REQUEST)
            pool.cache_full_blocks(next(requests), blocks, 0, REQUEST, BLOCK_SIZE, 0)
            pool.free_blocks(blocks[::-1])
        return clock() - start

    return Side(run, REQUEST)


def make_big(make_pool: MakePool, objects: bool = False) -> Side:
    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            start = clock()
            pool = big_pool(make_pool, objects)
            spent += clock() - start
            del pool
        return spent

    return Side(run, BIG_POOL)


def big_pool(make_pool: MakePool, objects: bool = False) -> Any:
    pool = make_pool(BIG_POOL, True, BLOCK_SIZE)
    if objects:
        for _block in pool.blocks:
            pass
    return pool
