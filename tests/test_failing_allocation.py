"""No allocation that fails breaks a pool, its map, its queue or what hashes.

For each kind of operation, each of its allocations fails in turn: see
failing_allocation.py. `.ci/sanitized` runs this, and its counterparts for the
manager and for v0's allocators, on a build that can fail kvcache's own allocations.
"""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from failing_allocation import ALL, ONCE, World, attempt, each, go_through
from pools import full_request_of, hash_of, hashes_of, key_of
from workloads import KEYED, Collector, watch

from kvcache import (
    BlockHashToBlockMap,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from kvcache.hashing import (
    BlockHasher,
    Keyed,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    sha256,
    xxhash,
)

Act = Callable[[], Any]

# -- pools ------------------------------------------------------------------------


POOLS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "with events": {"enable_kv_cache_events": True},
    "with all": {
        "enable_kv_cache_events": True,
        "metrics_collector": Collector(),
        "keep_tokens": True,
    },
}


def pool_of(options: dict[str, Any]) -> BlockPool:
    """12 blocks: 1 to 4 are free and cached, 5 is used and cached, 6 is used."""
    pool = BlockPool(12, True, 4, **options)
    ids = pool.get_new_block_ids(6)
    if pool.keep_tokens:
        pool.cache_block_tokens(ids[:5], np.arange(20), KEYED)
    else:
        pool.cache_block_ids(ids[:5], hashes_of(1, 2, 3, 4, 1))
    pool.free_block_ids(ids[:4])
    pool.take_events()
    return pool


def state_of(pool: BlockPool) -> tuple[Any, ...]:
    """Everything that a call could have changed. No view is made to see it."""
    rows = pool.blocks.as_array()
    hashed = [row for row in rows if row["block_hash_len"]]
    keys = [bytes(row["block_hash"][: row["block_hash_len"]]) for row in hashed]
    of_map = pool.cached_block_hash_to_block
    return (
        rows.tobytes(),
        pool.get_num_free_blocks(),
        len(of_map),
        [
            pool.match_prefix_ids([key[:-4]], int.from_bytes(key[-4:], "big")).tolist()
            for key in keys
        ],
        [sorted(of_map._aliases_of(block)) for block in range(len(rows))],
        [repr(event) for event in pool.kv_event_queue],
        dict(pool._reuse_watchers),
        bytes(pool.match_prefix_tokens(range(20), KEYED)),
    )


def blocks_of(pool: BlockPool, *block_ids: int) -> list[KVCacheBlock]:
    return [pool.blocks[block] for block in block_ids]


def unpin(pool: BlockPool) -> Act:
    blocks = blocks_of(pool, 5, 6)
    return lambda: pool.unpin_blocks(blocks, watch)


def free_blocks_of_two_pools(pool: BlockPool) -> Act:
    other = BlockPool(5, True, 4)
    blocks = [*other.get_new_blocks(2), *blocks_of(pool, 5), KVCacheBlock(7, 1)]
    return lambda other=other: pool.free_blocks(blocks)


def get_watched(pool: BlockPool) -> Act:
    pool.unpin_blocks(blocks_of(pool, 5, 6), watch)
    return lambda: pool.get_new_block_ids(11)


def cache_full(pool: BlockPool) -> Act:
    blocks, request = pool.get_new_blocks(3), full_request_of(11, 12, 13)
    return lambda: pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)


def cache_full_over_part(pool: BlockPool) -> Act:
    """The first and the last block are promoted, one is of the caller's making."""
    blocks, request = pool.get_new_blocks(2), full_request_of(*range(11, 17))
    blocks.insert(1, KVCacheBlock(20))
    for i in (0, 2):
        pool.cache_partial_block(request, blocks[i], 8 * i + 4, 0, 8)
    return lambda: pool.cache_full_blocks(request, blocks, 0, 3, 8, 0)


def cache_partial(pool: BlockPool) -> Act:
    [block], request = pool.get_new_blocks(1), full_request_of(11, 12)
    return lambda: pool.cache_partial_block(request, block, 4, 0, 8)


def cache_partial_as_alias(pool: BlockPool) -> Act:
    [block], request = pool.get_new_blocks(1), full_request_of(11, 12)
    pool.cache_partial_block(request, block, 8, 0, 8)
    return lambda: pool.cache_partial_block(request, block, 4, 0, 8)


def cache_partial_in_place(pool: BlockPool) -> Act:
    [block], request = pool.get_new_blocks(1), full_request_of(11, 12)
    for tokens in (8, 4):
        pool.cache_partial_block(request, block, tokens, 0, 8)
    other = full_request_of(21, 22)
    return lambda: pool.cache_partial_block(other, block, 8, 0, 8, True)


def cache_by_hand(pool: BlockPool) -> Act:
    blocks, request = [KVCacheBlock(20), KVCacheBlock(20)], full_request_of(11, 12)
    return lambda: pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)


def evict_by_hand(pool: BlockPool) -> Act:
    block, request = KVCacheBlock(20), full_request_of(11, 12)
    pool.cache_full_blocks(request, [block], 0, 1, 4, 0)
    pool.take_events()
    return lambda: pool._maybe_evict_cached_block(block)


def cache_ids(pool: BlockPool) -> Act:
    ids = pool.get_new_block_ids(3)
    return lambda: pool.cache_block_ids(ids, hashes_of(11, 12, 13))


def cache_tokens(pool: BlockPool) -> Act:
    ids, tokens = pool.get_new_block_ids(3), np.arange(100, 112)
    return lambda: pool.cache_block_tokens(ids, tokens, KEYED)


def move_hashes(pool: BlockPool) -> Act:
    source, target = pool.get_new_blocks(2)
    request = full_request_of(11, 12)
    for tokens in (8, 4):
        pool.cache_partial_block(request, source, tokens, 0, 8)
    return lambda: pool.move_block_hashes(source, target)


def reset(pool: BlockPool) -> Act:
    pool.cached_block_hash_to_block.insert(key_of(50), KVCacheBlock(20))
    pool.unpin_blocks(blocks_of(pool, 5, 6), watch)
    return pool.reset_prefix_cache


def insert(block_id: int | None, number: int) -> Callable[[BlockPool], Act]:
    """Into the map: a block of the pool, or one made by hand, under a key."""

    def insert_into(pool: BlockPool) -> Act:
        of_map = pool.cached_block_hash_to_block
        of_map.insert(key_of(50), KVCacheBlock(20))
        block = KVCacheBlock(20) if block_id is None else pool.blocks[block_id]
        return lambda: of_map.insert(key_of(number), block)

    return insert_into


def pop_by_hand(pool: BlockPool) -> Act:
    of_map = pool.cached_block_hash_to_block
    of_map.insert(key_of(50), KVCacheBlock(20))
    return lambda: of_map.pop(key_of(50), 20)


def call_with_blocks(name: str, *arguments: Any) -> Callable[[BlockPool], Act]:
    def call(pool: BlockPool) -> Act:
        [block] = blocks_of(pool, 5)
        return lambda: getattr(pool, name)(*arguments, block)

    return call


def on_block(what: Callable[[KVCacheBlock], Any]) -> Callable[[BlockPool], Act]:
    def call(pool: BlockPool) -> Act:
        [block] = blocks_of(pool, 5)
        return lambda: what(block)

    return call


def with_blocks(name: str, *block_ids: int) -> Callable[[BlockPool], Act]:
    def call(pool: BlockPool) -> Act:
        blocks = blocks_of(pool, *block_ids)
        return lambda: getattr(pool, name)(blocks)

    return call


ON_POOLS: dict[str, Callable[[BlockPool], Act]] = {
    "get_new_blocks": lambda pool: lambda: pool.get_new_blocks(9),
    "get_new_block_ids": lambda pool: lambda: pool.get_new_block_ids(9),
    "get of watched blocks": get_watched,
    "free_blocks": with_blocks("free_blocks", 5, 6),
    "free_blocks of two pools": free_blocks_of_two_pools,
    "free_block_ids": lambda pool: lambda: pool.free_block_ids([5, 6]),
    "touch": with_blocks("touch", 1, 2, 5),
    "touch_block_ids": lambda pool: lambda: pool.touch_block_ids([1, 2, 5]),
    "unpin_blocks": unpin,
    "get_cached_block": lambda pool: lambda: pool.get_cached_block(hash_of(1), [0]),
    "match_prefix": lambda pool: lambda: pool.match_prefix(hashes_of(1, 2), [0]),
    "match_prefix_ids": lambda pool: lambda: pool.match_prefix_ids(hashes_of(1, 2)),
    "match_prefix_tokens": lambda pool: (
        lambda: pool.match_prefix_tokens([*range(20), 2**40], KEYED)
    ),
    "cache_full_blocks": cache_full,
    "cache_full_blocks, promoted": cache_full_over_part,
    "cache_full_blocks, made by hand": cache_by_hand,
    "cache_partial_block": cache_partial,
    "cache_partial_block, an alias": cache_partial_as_alias,
    "cache_partial_block, replaced": cache_partial_in_place,
    "cache_block_ids": cache_ids,
    "cache_block_tokens": cache_tokens,
    "emit_cached_block_events": lambda pool: (
        lambda request: lambda: pool.emit_cached_block_events(request, 2, 4, 0)
    )(full_request_of(1, 2, 3)),
    "move_block_hashes": move_hashes,
    "_insert_block_hash": lambda pool: (
        lambda block: lambda: pool._insert_block_hash(key_of(77), block, 4)
    )(pool.blocks[5]),
    "_maybe_evict_cached_block": call_with_blocks("_maybe_evict_cached_block"),
    "_maybe_evict_cached_block, made by hand": evict_by_hand,
    "_remove_cached_block_hashes": call_with_blocks("_remove_cached_block_hashes"),
    "evict_blocks": lambda pool: lambda: pool.evict_blocks([1, 2, 5, 6, 1]),
    "reset_prefix_cache": reset,
    "take_events": lambda pool: (pool.evict_blocks([1, 2]), pool.take_events)[1],
    "is_block_writable": call_with_blocks("is_block_writable"),
    "get_usage": lambda pool: pool.get_usage,
    "check": lambda pool: pool.check,
    "null_block": lambda pool: lambda: pool.null_block,
    "blocks, all": lambda pool: lambda: pool.blocks[:],
    "blocks, one after the other": lambda pool: lambda: list(pool.blocks),
    "as_array": lambda pool: lambda: pool.blocks.as_array()["ref_cnt"],
    "map.insert": insert(5, 60),
    "map.insert of one made by hand": insert(None, 60),
    "map.insert in place of one made by hand": insert(None, 50),
    "map.pop": lambda pool: (lambda of_map: lambda: of_map.pop(key_of(1), 1))(
        pool.cached_block_hash_to_block
    ),
    "map.pop of one made by hand": pop_by_hand,
    "block.reset_hash": on_block(KVCacheBlock.reset_hash),
    "block._block_hash": on_block(
        lambda block: setattr(block, "_block_hash", key_of(3))
    ),
    "block ==": on_block(lambda block: block == KVCacheBlock(5)),
    "block, shown": on_block(repr),
}


@each(ALL)
@pytest.mark.parametrize("pool_kind", POOLS)
@pytest.mark.parametrize("operation", ON_POOLS)
def test_a_pool_is_as_before_where_a_call_finds_no_memory(
    operation: str, pool_kind: str, fails: Any
) -> None:
    def make() -> World:
        pool = pool_of(POOLS[pool_kind])
        act = ON_POOLS[operation](pool)
        return World(act, lambda: state_of(pool), pool.check)

    go_through(make, fails)


# -- queues, maps and hashers of the caller's --------------------------------------


def queue_world(operation: Callable[..., Any]) -> World:
    blocks = [KVCacheBlock(i) for i in range(40)]
    queue = FreeKVCacheBlockQueue(blocks[:6])

    def state() -> Any:
        order = [block.block_id for block in queue.get_all_free_blocks()]
        assert len(order) == queue.num_free_blocks
        return order, [
            (block.prev_free_block is None, block.next_free_block is None)
            for block in blocks
        ]

    return World(operation(queue, blocks), state)


@each(ALL)
@pytest.mark.parametrize(
    "operation",
    [
        lambda queue, blocks: queue.popleft,
        lambda queue, blocks: lambda: queue.popleft_n(5),
        lambda queue, blocks: lambda: queue.remove(blocks[2]),
        lambda queue, blocks: lambda: queue.append(blocks[7]),
        lambda queue, blocks: lambda: queue.append_n(blocks[7:]),
        lambda queue, blocks: lambda: queue.prepend_n(blocks[7:]),
        lambda queue, blocks: queue.get_all_free_blocks,
    ],
    ids=["popleft", "popleft_n", "remove", "append", "append_n", "prepend_n", "all"],
)
def test_a_queue_is_as_before(operation: Any, fails: Any) -> None:
    go_through(lambda: queue_world(operation), fails)


def map_world(operation: Callable[..., Any]) -> World:
    """Twenty blocks under five keys."""
    of_map = BlockHashToBlockMap()
    for i in range(20):
        of_map.insert(key_of(i % 5), KVCacheBlock(i))

    def state() -> Any:
        first = [of_map.get_one_block(key_of(number)) for number in range(7)]
        return (
            len(of_map),
            [block and block.block_id for block in first],
            [[of_map.contain(key_of(n), i) for i in range(40)] for n in range(7)],
        )

    return World(operation(of_map, KVCacheBlock(6)), state)


@each(ALL)
@pytest.mark.parametrize(
    "operation",
    [
        lambda of_map, block: lambda: of_map.insert(key_of(6), block),
        lambda of_map, block: lambda: of_map.insert(key_of(2), block),
        lambda of_map, block: lambda: of_map.insert(key_of(1), block),
        lambda of_map, block: lambda: of_map.pop(key_of(1), 6),
        lambda of_map, block: lambda: of_map.get_one_block(key_of(1)),
        lambda of_map, block: lambda: of_map.contain(key_of(1), 6),
    ],
    ids=["insert", "insert a copy", "replace", "pop", "get_one_block", "contain"],
)
def test_a_map_is_as_before(operation: Any, fails: Any) -> None:
    go_through(lambda: map_world(operation), fails)


def hasher_world(operation: Callable[..., Any]) -> World:
    hasher = BlockHasher(200, sha256)
    hasher.append(list(range(600, 1190)))
    return World(
        operation(hasher),
        lambda: (hasher.token_ids.tolist(), list(hasher.block_hashes)),
    )


@each(ALL)
@pytest.mark.parametrize(
    "operation",
    [
        lambda hasher: lambda: hasher.append(5),
        lambda hasher: lambda: hasher.append(list(range(1000, 1450))),
        lambda hasher: lambda: hasher.append(np.arange(450)),
        lambda hasher: lambda: hasher.truncate(201),
        lambda hasher: lambda: hasher.token_ids,
    ],
    ids=["append one", "append", "append an array", "truncate", "token_ids"],
)
def test_a_hasher_is_as_before(operation: Any, fails: Any) -> None:
    go_through(lambda: hasher_world(operation), fails)


@each(ALL)
@pytest.mark.parametrize(
    "call",
    [
        lambda: hash_blocks(list(range(300, 340)), 16),
        lambda: hash_blocks(np.arange(1000), 500),  # more than fits the stack
        lambda: hash_blocks(list(range(40)), 16, extra_keys=[("a",), None]),
        lambda: hash_blocks(list(range(40)), 16, hash_fn=xxhash),
        lambda: hash_block_tokens(sha256, b"parent", range(16), ("a",)),
        lambda: get_request_block_hasher(4, sha256)(
            SimpleNamespace(
                block_hashes=[],
                num_tokens=9,
                all_token_ids=list(range(9)),
                mm_features=[],
                lora_request=None,
                cache_salt=None,
                prompt_embeds=None,
            )
        ),
        lambda: Keyed(b"k" * 16).hash_blocks(np.arange(40), 16),
        lambda: KEYED.hash_block(range(16), None, b"extra"),
        lambda: KEYED((b"a" * 16, (1, 2, 3), ("a",))),
    ],
    ids=str,
)
def test_hashing_gives_the_right_digests_or_none(call: Any, fails: Any) -> None:
    go_through(lambda: World(call, lambda: None), fails)


# -- making, and what is half made -------------------------------------------------


def made_by(make: Callable[[], Any]) -> Callable[[], World]:
    """A world in which one more of something is made, and one that is made again."""

    def world() -> World:
        made: list[Any] = []

        def act() -> None:
            made.append(make())

        return World(act, lambda: len(made))

    return world


@each(ALL)
@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockPool(9, True, 4),
        lambda: BlockPool(9, True, 4, True, keep_tokens=True),
        lambda: FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(20)]),
        BlockHashToBlockMap,
        lambda: BlockHasher(4, sha256, parent=b"x" * 32),
        lambda: KVCacheBlock(5, 1, b"hash", 4, KVCacheBlock(4), KVCacheBlock(6)),
    ],
    ids=["pool", "pool that keeps tokens", "queue", "map", "hasher", "block"],
)
def test_what_cannot_be_made_leaves_nothing_behind(make: Any, fails: Any) -> None:
    go_through(made_by(make), fails)


@each(ONCE)
def test_a_pool_whose_making_failed_is_empty_and_can_be_made(fails: Any) -> None:
    def make() -> World:
        pool = BlockPool.__new__(BlockPool)

        def act() -> None:
            pool.__init__(9, True, 4, True, keep_tokens=True)  # type: ignore[misc]

        def state() -> Any:
            return pool.num_gpu_blocks, pool.keep_tokens, pool.get_num_free_blocks()

        return World(act, state, pool.check)

    go_through(make, fails)


@each(ONCE)
def test_blocks_that_outlive_their_pool_lose_their_state_but_stay_safe(
    fails: Any,
) -> None:
    """There is no one to tell where a block cannot be left a row of its own."""
    for n in range(1, 50):
        pool = BlockPool(4, True, 4)
        blocks = pool.get_new_blocks(3)

        def drop() -> None:
            nonlocal pool
            pool = None  # type: ignore[assignment]

        error, _, undisturbed, met = attempt(World(drop, int), fails, n)
        assert error is None
        for block in blocks:
            assert (block.pool, block.next_free_block) == (None, None)
            assert block.ref_cnt in ((0, 1) if met else (1,))
            repr(block)
        if undisturbed:
            break
    else:
        raise AssertionError
    gc.collect()
