"""The block pool through its objects: one behaviour of it, one test."""

import copy
import gc
import logging
import pickle
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pools import (
    UNIT,
    cached,
    full_request_of,
    hash_of,
    hashes_of,
    hit,
    ids,
    key_of,
    refused,
    request_of,
    run_apart,
    walk,
)

from kvcache import (
    AllBlocksCleared,
    BlockHashToBlockMap,
    BlockPool,
    BlockStateError,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    NoFreeBlocksError,
)
from kvcache.hashing import BlockHashListWithBlockSize

MakePool = Callable[..., BlockPool]


@pytest.fixture
def make() -> Iterator[MakePool]:
    """Makes pools whose invariants are proved when the test is over."""
    pools = []

    def make(num_blocks: int = 8, caching: bool = True, **options: Any) -> BlockPool:
        pools.append(BlockPool(num_blocks, caching, UNIT, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()


@pytest.fixture
def pool(make: MakePool) -> BlockPool:
    return make()


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What hooks raised and nobody could catch."""
    caught: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: caught.append(it.exc_value))
    return caught


class Recorder:
    """A metrics collector that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        self.told.append(("allocated", block.block_id))

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        self.told.append(("accessed", block.block_id))

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        self.told.append(("evicted", block.block_id))

    def reset(self) -> None:
        self.told.append("reset")


class BrokenRecorder(Recorder):
    def on_block_allocated(self, block: KVCacheBlock) -> None:
        super().on_block_allocated(block)
        raise KeyError(block.block_id)

    on_block_accessed = on_block_evicted = on_block_allocated

    def reset(self) -> None:
        super().reset()
        raise KeyError("reset")


# -- what a pool is made of -------------------------------------------------------


def test_what_a_pool_is_made_with_are_its_attributes() -> None:
    collector = Recorder()
    pool = BlockPool(
        num_gpu_blocks=8,
        enable_caching=True,
        hash_block_size=16,
        enable_kv_cache_events=True,
        metrics_collector=collector,
        num_hash_lookahead_tokens=2,
        medium="CPU",
    )
    assert pool.num_gpu_blocks == 8
    assert pool.enable_caching is True
    assert pool.hash_block_size == 16
    assert pool.enable_kv_cache_events is True
    assert pool.metrics_collector is collector
    assert pool.num_hash_lookahead_tokens == 2
    assert pool.medium == "CPU"


def test_what_may_be_left_out_is_off() -> None:
    pool = BlockPool(8, False, 16)
    assert pool.enable_caching is False
    assert pool.enable_kv_cache_events is False
    assert pool.metrics_collector is None
    assert pool.num_hash_lookahead_tokens == 0
    assert pool.medium == "GPU"
    assert pool.kv_event_queue == []


def test_a_pools_arguments_may_be_given_by_position_in_vllms_order() -> None:
    collector = Recorder()
    pool = BlockPool(8, True, 16, True, collector, 2, "CPU")
    assert pool.metrics_collector is collector
    assert (pool.num_hash_lookahead_tokens, pool.medium) == (2, "CPU")


def test_numpys_ints_are_ints() -> None:
    pool = BlockPool(np.int64(8), True, np.int32(16))
    assert (pool.num_gpu_blocks, pool.hash_block_size) == (8, 16)


def test_the_lookahead_may_be_given_as_a_bool() -> None:
    assert BlockPool(8, True, 16, False, None, True).num_hash_lookahead_tokens == 1


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("num_gpu_blocks", 0, ValueError),
        ("num_gpu_blocks", -1, ValueError),
        ("num_gpu_blocks", 2**31 - 1, ValueError),
        ("num_gpu_blocks", 2**31, ValueError),
        ("num_gpu_blocks", 2**63, ValueError),
        ("num_gpu_blocks", 2**31 - 2, MemoryError),
        ("num_gpu_blocks", "8", TypeError),
        ("num_gpu_blocks", 8.0, TypeError),
        ("num_gpu_blocks", True, TypeError),
        ("num_gpu_blocks", None, TypeError),
        ("hash_block_size", 0, ValueError),
        ("hash_block_size", -16, ValueError),
        ("hash_block_size", 16.0, TypeError),
        ("hash_block_size", "16", TypeError),
        ("num_hash_lookahead_tokens", -1, ValueError),
        ("num_hash_lookahead_tokens", 1.0, TypeError),
        ("colour", "red", TypeError),
    ],
)
def test_a_pool_is_not_made_of_what_an_argument_cannot_be(
    argument: str, value: object, error: type[Exception]
) -> None:
    arguments = {"num_gpu_blocks": 8, "enable_caching": True, "hash_block_size": 16}
    with pytest.raises(error):
        BlockPool(**{**arguments, argument: value})


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_pool_needs_its_first_three_arguments(count: int) -> None:
    with pytest.raises(TypeError):
        BlockPool(*(8, True, 16)[:count])


@pytest.mark.parametrize(
    "name",
    [
        "num_gpu_blocks",
        "enable_caching",
        "hash_block_size",
        "num_hash_lookahead_tokens",
        "blocks",
        "null_block",
        "free_block_queue",
        "cached_block_hash_to_block",
    ],
)
def test_what_a_pool_is_built_on_cannot_be_assigned(pool: BlockPool, name: str) -> None:
    value = getattr(pool, name)
    with pytest.raises(AttributeError):
        setattr(pool, name, value)


def test_a_pool_has_vllms_parts(pool: BlockPool) -> None:
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
    assert type(pool.cached_block_hash_to_block) is BlockHashToBlockMap
    assert all(type(block) is KVCacheBlock for block in pool.blocks)


@pytest.mark.parametrize("caching", [False, True])
def test_a_new_pool_is_all_free_in_the_order_of_ids(
    make: MakePool, caching: bool
) -> None:
    pool = make(caching=caching)
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.get_num_free_blocks() == 7
    assert all(block.ref_cnt == 0 for block in pool.blocks)


def test_a_pool_cannot_be_made_twice(pool: BlockPool) -> None:
    with refused(ValueError, pool):
        pool.__init__(9, True, UNIT)
    assert pool.num_gpu_blocks == 8


def test_a_pool_that_was_never_initialised_is_empty_and_harmless() -> None:
    pool = BlockPool.__new__(BlockPool)
    assert len(pool.blocks) == pool.num_gpu_blocks == pool.get_num_free_blocks() == 0
    assert pool.get_usage() == 0.0
    assert pool.get_new_blocks(0) == []
    assert pool.get_cached_block(hash_of(1), [0]) is None
    assert pool.match_prefix([hash_of(1)], [0]) == [[]]
    assert pool.take_events() == []
    pool.free_blocks([])
    pool.touch([])
    pool.evict_blocks([])
    with pytest.raises(NoFreeBlocksError):
        pool.get_new_blocks(1)
    with pytest.raises(ValueError):
        pool.evict_blocks([0])
    with pytest.raises(ValueError):
        _ = pool.null_block
    pool.check()


def test_nothing_can_be_cached_in_a_pool_that_was_never_initialised() -> None:
    printed = run_apart("""
pool = BlockPool.__new__(BlockPool)
request = SimpleNamespace(block_hashes=[b"x" * 32])
for call in (
    lambda: pool.cache_partial_block(request, KVCacheBlock(1), 16, 0, 16),
    lambda: pool.cache_full_blocks(request, [KVCacheBlock(1)], 0, 1, 16, 0),
    lambda: pool.cache_block_ids([1], [b"x" * 32]),
):
    try:
        call()
    except ValueError:
        print("refused")
""")
    assert printed.split() == ["refused"] * 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_cannot_be_copied_or_pickled(
    pool: BlockPool, duplicate: Callable[[object], object]
) -> None:
    for part in (
        pool,
        pool.blocks,
        pool.free_block_queue,
        pool.cached_block_hash_to_block,
    ):
        with pytest.raises(TypeError):
            duplicate(part)


# -- the null block ---------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 100_000])
def test_the_null_block_is_block_0_and_is_never_handed_out(
    make: MakePool, num_blocks: int
) -> None:
    pool = make(num_blocks)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.block_id == 0
    assert pool.null_block.is_null
    assert ids(pool.get_new_blocks(num_blocks - 1)) == list(range(1, num_blocks))
    assert sum(block.is_null for block in pool.blocks) == 1


def test_the_null_block_is_skipped_wherever_it_is_listed(pool: BlockPool) -> None:
    null = pool.null_block
    (block,) = pool.get_new_blocks(1)
    pool.touch([null, block, null])
    pool.free_blocks([null] * 5 + [block, block])
    pool.evict_blocks({0})
    assert null == KVCacheBlock(0, is_null=True)
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_another_pools_null_block_is_skipped_as_well(
    make: MakePool, pool: BlockPool
) -> None:
    null = make().null_block
    (block,) = pool.get_new_blocks(1)
    pool.touch([null, block])
    assert (null.ref_cnt, block.ref_cnt) == (0, 2)
    pool.free_blocks([null, block, block, null])
    with refused(ValueError, pool, match="block 0 cannot be unpinned"):
        pool.unpin_blocks([null], lambda block: None)
    assert pool.get_num_free_blocks() == 7


def test_a_pool_of_one_block_has_none_to_give(make: MakePool) -> None:
    pool = make(1)
    assert pool.get_num_free_blocks() == 0
    assert pool.get_new_blocks(0) == []
    with refused(NoFreeBlocksError, pool):
        pool.get_new_blocks(1)
    assert pool.get_usage() == 0.0
    assert isinstance(pool.get_usage(), float)
    assert pool.reset_prefix_cache() is True


# -- get_new_blocks ---------------------------------------------------------------


def test_blocks_come_from_the_front_with_one_reference_each(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    assert type(blocks) is list
    assert ids(blocks) == [1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert walk(pool) == [4, 5, 6, 7]


def test_all_blocks_may_be_taken_at_once(pool: BlockPool) -> None:
    assert ids(pool.get_new_blocks(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert walk(pool) == []


def test_no_blocks_may_be_asked_for(pool: BlockPool) -> None:
    assert pool.get_new_blocks(0) == []
    assert pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("count", [6, 100, 2**31 - 2])
def test_more_blocks_than_are_free_are_refused_with_both_numbers(
    pool: BlockPool, count: int
) -> None:
    cached(pool, 1, 2)
    with refused(NoFreeBlocksError, pool, match=rf"{count} free blocks .* 5 are free"):
        pool.get_new_blocks(count)


def test_the_lack_of_blocks_is_a_value_error_as_in_vllm(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="Cannot get 8 free blocks from the pool"):
        pool.get_new_blocks(8)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (-1, ValueError),
        (-3, ValueError),
        (2**70, ValueError),
        (1.0, TypeError),
        ("1", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_a_number_of_blocks_is_an_int_from_0_on(
    pool: BlockPool, count: object, error: type[Exception]
) -> None:
    with refused(error, pool):
        pool.get_new_blocks(count)


def test_allocation_evicts_what_the_blocks_held(make: MakePool) -> None:
    pool = make(4)
    pool.free_blocks(cached(pool, 1, 2, 3)[::-1])
    (block,) = pool.get_new_blocks(1)
    assert block == KVCacheBlock(3, ref_cnt=1)
    assert hit(pool, 3) is None
    assert (hit(pool, 1), hit(pool, 2)) == (1, 2)


def test_allocation_evicts_every_key_of_a_block(make: MakePool) -> None:
    pool = make(2)
    (block,) = cached(pool, 1)
    pool._insert_block_hash(key_of(2), block, UNIT)
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert hit(pool, 1) is hit(pool, 2) is None
    assert dict(pool.cached_block_hashes_by_block) == {}


# -- free_blocks ------------------------------------------------------------------


def test_uncached_blocks_are_next_in_the_order_given(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.free_blocks([blocks[1], blocks[2], blocks[0]])
    assert walk(pool) == [2, 3, 1, 4, 5, 6, 7]
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_cached_blocks_are_last_in_the_order_given(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    pool.free_blocks(reversed(blocks))
    assert walk(pool) == [4, 5, 6, 7, 3, 2, 1]
    assert hit(pool, 1) == 1


def test_cached_and_uncached_blocks_of_one_call_keep_their_order(
    pool: BlockPool,
) -> None:
    held = cached(pool, 1, 2)
    bare = pool.get_new_blocks(2)
    pool.free_blocks([held[1], bare[1], held[0], bare[0]])
    assert walk(pool) == [4, 3, 5, 6, 7, 2, 1]


def test_with_caching_off_all_blocks_are_next_in_the_order_given(
    make: MakePool,
) -> None:
    pool = make(caching=False)
    blocks = pool.get_new_blocks(4)
    blocks[0].set_block_hash(key_of(1))
    pool.free_blocks([blocks[3], blocks[0], blocks[1]])
    assert walk(pool) == [4, 1, 2, 5, 6, 7]


def test_blocks_may_be_freed_from_any_iterable(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(block for block in blocks[:1])
    pool.free_blocks(tuple(blocks[1:]))
    pool.free_blocks(())
    assert pool.get_num_free_blocks() == 7


def test_the_list_of_blocks_stays_the_callers(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks)
    assert ids(blocks) == [1, 2, 3]


def test_a_block_with_further_users_stays_in_use(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert block.ref_cnt == 1
    assert pool.get_num_free_blocks() == 6


def test_a_block_listed_k_times_gives_k_references(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.touch([block, block])
    assert block.ref_cnt == 3
    pool.free_blocks([block, block])
    assert block.ref_cnt == 1
    pool.free_blocks([block])
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_a_block_is_not_freed_more_often_than_it_is_used(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(2)
    with refused(ValueError, pool, match="block 2"):
        pool.free_blocks([blocks[0], blocks[1], blocks[1]])
    with refused(ValueError, pool, match="block 3"):
        pool.free_blocks([blocks[0], pool.blocks[3]])


def test_a_block_that_was_freed_is_not_freed_again(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with refused(ValueError, pool, match="block 1"):
        pool.free_blocks(blocks)
    assert sorted(ids(pool.get_new_blocks(7))) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("thing", [1, None, "block", object()])
def test_what_is_no_block_is_not_freed(pool: BlockPool, thing: object) -> None:
    blocks = pool.get_new_blocks(1)
    with refused(TypeError, pool):
        pool.free_blocks([*blocks, thing])


@pytest.mark.parametrize("thing", [1, None])
def test_blocks_to_free_come_in_an_iterable(pool: BlockPool, thing: object) -> None:
    with refused(TypeError, pool):
        pool.free_blocks(thing)


def test_the_ends_of_the_queue_are_neither_freed_nor_touched(pool: BlockPool) -> None:
    queue = pool.free_block_queue
    for end in (queue.fake_free_list_head, queue.fake_free_list_tail):
        with refused(ValueError, pool, match="block -1"):
            pool.free_blocks([end])
        with refused(ValueError, pool, match="block -1"):
            pool.touch([end])
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_blocks_of_other_pools_go_to_their_own(make: MakePool) -> None:
    pool, other = make(), make()
    ours, theirs = pool.get_new_blocks(2), other.get_new_blocks(2)
    pool.free_blocks([ours[1], theirs[1], ours[0], theirs[0], other.null_block])
    assert walk(pool) == [2, 1, 3, 4, 5, 6, 7]
    assert walk(other) == [2, 1, 3, 4, 5, 6, 7]


def test_no_pools_blocks_are_freed_if_one_of_them_cannot_be(make: MakePool) -> None:
    pool, other = make(), make()
    (ours,), (theirs,) = pool.get_new_blocks(1), other.get_new_blocks(1)
    with refused(ValueError, pool, other, match="block 1"):
        pool.free_blocks([ours, theirs, theirs])
    with refused(ValueError, pool, other, match="block 1"):
        pool.free_blocks([theirs, ours, ours])
    with refused(TypeError, pool, other):
        pool.free_blocks([theirs, ours, None])


def test_a_hand_made_block_is_freed_to_the_pool_it_names(pool: BlockPool) -> None:
    freed = []
    owner = SimpleNamespace(free_blocks=freed.extend)
    block = KVCacheBlock(3, ref_cnt=1, pool=owner)
    pool.free_blocks([block, *pool.get_new_blocks(1)])
    assert len(freed) == 1
    assert freed[0] is block
    assert pool.get_num_free_blocks() == 7


def test_a_hand_made_block_of_no_pool_gives_a_reference_and_joins_no_queue(
    pool: BlockPool,
) -> None:
    block = KVCacheBlock(3, ref_cnt=2)
    pool.free_blocks([block])
    assert block == KVCacheBlock(3, ref_cnt=1)
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


# -- touch ------------------------------------------------------------------------


def test_touching_a_free_block_takes_it_out_of_the_queue(pool: BlockPool) -> None:
    pool.touch([pool.blocks[3]])
    assert pool.blocks[3].ref_cnt == 1
    assert walk(pool) == [1, 2, 4, 5, 6, 7]


def test_touching_a_block_keeps_its_content(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1))
    pool.touch(pool.get_cached_block(hash_of(1), [0]))
    assert hit(pool, 1) == 1
    pool.get_new_blocks(6)
    assert hit(pool, 1) == 1


def test_touching_a_used_block_adds_a_reference(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(2)
    pool.touch(tuple(blocks))
    assert [block.ref_cnt for block in blocks] == [2, 2]


def test_touch_and_free_can_be_repeated_without_a_trace(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool.free_blocks([block])
    for _ in range(3):
        pool.touch([block])
        assert 1 not in walk(pool)
        pool.free_blocks([block])
        assert walk(pool).count(1) == 1
    assert sorted(ids(pool.get_new_blocks(7))) == [1, 2, 3, 4, 5, 6, 7]


def test_blocks_of_another_pool_are_not_touched(make: MakePool) -> None:
    pool, other = make(), make()
    with refused(ValueError, pool, other, match="block 3"):
        pool.touch([pool.blocks[2], other.blocks[3]])
    with refused(ValueError, pool, match="block 5"):
        pool.touch([pool.blocks[2], KVCacheBlock(5)])


@pytest.mark.parametrize("thing", [1, None, "block"])
def test_what_is_no_block_is_not_touched(pool: BlockPool, thing: object) -> None:
    with refused(TypeError, pool):
        pool.touch([pool.blocks[3], thing])


def test_a_count_does_not_run_over(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt = 2**31 - 2
    with refused(ValueError, pool, match="block 1"):
        pool.touch([block, pool.blocks[3], block])
    pool.touch([block])
    assert block.ref_cnt == 2**31 - 1


# -- unpin_blocks -----------------------------------------------------------------


def test_unpinned_blocks_join_the_back_whatever_they_hold(pool: BlockPool) -> None:
    blocks = [*pool.get_new_blocks(1), *cached(pool, 1)]
    pool.unpin_blocks(blocks, print)
    assert walk(pool) == [3, 4, 5, 6, 7, 1, 2]
    assert hit(pool, 1) == 2


def test_a_watcher_is_told_once_when_its_block_is_handed_out(pool: BlockPool) -> None:
    told: list[KVCacheBlock] = []
    blocks = pool.get_new_blocks(2)
    pool.unpin_blocks(iter(blocks), told.append)
    pool.get_new_blocks(5)
    assert told == []
    got = pool.get_new_blocks(2)
    assert len(told) == 2
    assert all(one is other for one, other in zip(told, got, strict=True))
    pool.free_blocks(got)
    pool.get_new_blocks(2)
    assert len(told) == 2


def test_a_watcher_is_told_of_ids_that_are_handed_out_too(pool: BlockPool) -> None:
    told: list[KVCacheBlock] = []
    pool.unpin_blocks(pool.get_new_blocks(1), told.append)
    pool.get_new_block_ids(7)
    assert ids(told) == [1]


def test_the_last_of_several_watchers_is_told(pool: BlockPool) -> None:
    told: list[str] = []
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.unpin_blocks([block], lambda _: told.append("first"))
    assert block.ref_cnt == 1
    pool.unpin_blocks([block], lambda _: told.append("second"))
    pool.get_new_blocks(7)
    assert told == ["second"]


def test_watchers_are_told_when_the_cache_is_reset(pool: BlockPool) -> None:
    told: list[KVCacheBlock] = []
    pool.unpin_blocks(cached(pool, 1, 2), told.append)
    assert pool.reset_prefix_cache()
    assert ids(told) == [1, 2]
    pool.get_new_blocks(7)
    assert ids(told) == [1, 2]


def test_blocks_are_unpinned_all_or_none(make: MakePool) -> None:
    pool, other = make(), make()
    used, _ = pool.get_new_blocks(2)
    for bad, error in (
        (pool.null_block, ValueError),
        (pool.blocks[5], ValueError),
        (used, ValueError),
        (other.get_new_blocks(1)[0], ValueError),
        (KVCacheBlock(3, ref_cnt=1), ValueError),
        (None, TypeError),
    ):
        with refused(error, pool, other):
            pool.unpin_blocks([used, bad], print)
    assert dict(pool._reuse_watchers) == {}


@pytest.mark.parametrize("watcher", [None, 3, "print"])
def test_a_watcher_must_be_callable(pool: BlockPool, watcher: object) -> None:
    blocks = pool.get_new_blocks(1)
    with refused(TypeError, pool):
        pool.unpin_blocks(blocks, watcher)


# -- get_cached_block, match_prefix -----------------------------------------------


def test_a_hash_is_found_in_every_group_or_not_at_all(pool: BlockPool) -> None:
    cached(pool, 1, group=0)
    cached(pool, 1, group=5)
    assert ids(pool.get_cached_block(hash_of(1), [0, 5])) == [1, 2]
    assert ids(pool.get_cached_block(hash_of(1), [5, 0, 5])) == [2, 1, 2]
    assert pool.get_cached_block(hash_of(1), [0, 1]) is None
    assert pool.get_cached_block(hash_of(2), [0]) is None


def test_a_hash_is_found_in_no_group_trivially(pool: BlockPool) -> None:
    assert pool.get_cached_block(hash_of(1), []) == []


def test_group_ids_are_told_apart_up_to_four_bytes(make: MakePool) -> None:
    pool = make(40)
    groups = [0, *(1 << shift for shift in range(32)), 2**32 - 1]
    for group in groups:
        cached(pool, 1, group=group)
    assert [hit(pool, 1, group) for group in groups] == list(range(1, 35))
    assert hit(pool, 1, 3) is None


def test_looking_up_changes_nothing(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2))
    before = walk(pool)
    pool.get_cached_block(hash_of(1), [0])
    pool.match_prefix(hashes_of(1, 2), [0])
    assert walk(pool) == before
    assert pool.blocks[1].ref_cnt == 0


@pytest.mark.parametrize("length", [1, 8, 16, 20, 31, 32])
def test_a_hash_has_1_to_32_bytes(pool: BlockPool, length: int) -> None:
    (block,) = pool.get_new_blocks(1)
    request = SimpleNamespace(block_hashes=[hash_of(1, length)])
    pool.cache_full_blocks(request, [block], 0, 1, UNIT, 0)
    assert block.block_hash == hash_of(1, length) + bytes(4)
    assert pool.get_cached_block(hash_of(1, length), [0])[0] is block


bad_hashes = pytest.mark.parametrize(
    ("digest", "error"),
    [
        (b"", ValueError),
        (b"x" * 33, ValueError),
        ("x", TypeError),
        (bytearray(b"x"), TypeError),
        (1, TypeError),
        (None, TypeError),
    ],
    ids=["empty", "33", "str", "bytearray", "int", "None"],
)


@bad_hashes
def test_what_is_no_hash_is_not_looked_up(
    pool: BlockPool, digest: object, error: type[Exception]
) -> None:
    with refused(error, pool):
        pool.get_cached_block(digest, [0])
    with refused(error, pool):
        pool.match_prefix([digest], [0])


bad_groups = pytest.mark.parametrize(
    ("group", "error"),
    [(-1, ValueError), (2**32, ValueError), ("0", TypeError), (0.0, TypeError)],
)


@bad_groups
def test_a_group_id_is_an_int_of_four_bytes(
    pool: BlockPool, group: object, error: type[Exception]
) -> None:
    (block,) = pool.get_new_blocks(1)
    for call in (
        lambda: pool.get_cached_block(hash_of(1), [group]),
        lambda: pool.match_prefix(hashes_of(1), [0, group]),
        lambda: pool.cache_full_blocks(request_of(1), [block], 0, 1, UNIT, group),
        lambda: pool.cache_partial_block(request_of(1), block, UNIT, group, UNIT),
    ):
        with refused(error, pool, match="kv_cache_group_id"):
            call()


def test_the_longest_cached_prefix_is_matched(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    for stop in range(4):
        (found,) = pool.match_prefix(hashes_of(1, 2, 3, 4)[:stop], [0])
        assert ids(found) == ids(blocks[:stop])
    assert ids(pool.match_prefix(hashes_of(1, 2, 3, 4), [0])[0]) == [1, 2, 3]


def test_a_match_ends_at_the_first_hole(pool: BlockPool) -> None:
    cached(pool, 1, 2, 3)
    pool.evict_blocks([2])
    assert ids(pool.match_prefix(hashes_of(1, 2, 3), [0])[0]) == [1]
    pool.evict_blocks([1])
    assert pool.match_prefix(hashes_of(1, 2, 3), [0]) == [[]]


def test_a_match_is_as_long_as_its_shortest_group(pool: BlockPool) -> None:
    cached(pool, 1, 2, 3, group=0)
    cached(pool, 1, 2, group=1)
    for groups, expected in (
        ([0], [[1, 2, 3]]),
        ([0, 1], [[1, 2], [4, 5]]),
        ([1, 0], [[4, 5], [1, 2]]),
        ([0, 2], [[], []]),
        ([], []),
    ):
        found = pool.match_prefix(hashes_of(1, 2, 3), groups)
        assert [ids(blocks) for blocks in found] == expected


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 100])
def test_a_match_may_have_any_length(make: MakePool, length: int) -> None:
    pool = make(101)
    blocks = cached(pool, *range(length))
    found = pool.match_prefix(hashes_of(*range(100)), [0])
    assert ids(found[0]) == ids(blocks)


# -- cache_full_blocks ------------------------------------------------------------


def test_full_blocks_are_cached_under_their_requests_hashes(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request_of(1, 2, 3), blocks, 0, 3, UNIT, 7)
    assert [block.block_hash for block in blocks] == [
        hash_of(number) + b"\0\0\0\7" for number in (1, 2, 3)
    ]
    assert [block.block_hash_num_tokens for block in blocks] == [4, 8, 12]
    assert [hit(pool, number, 7) for number in (1, 2, 3)] == [1, 2, 3]


def test_many_blocks_are_cached_alike_in_a_pool_whose_index_is_far_from_the_cache() -> (
    None
):
    pool = BlockPool(40_000, True, UNIT)
    numbers = range(1, 41)
    blocks = pool.get_new_blocks(40)
    pool.cache_full_blocks(request_of(*numbers), blocks, 0, 40, UNIT, 0)
    assert [hit(pool, number) for number in numbers] == list(range(1, 41))
    hashes = [hash_of(number) for number in range(41, 81)]
    ids = pool.get_new_block_ids(40)
    pool.cache_block_ids(ids, hashes)
    assert pool.match_prefix_ids(hashes).tolist() == ids.tolist()
    pool.check()


def test_blocks_that_were_cached_before_are_left_alone(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request_of(1, 2, 3), blocks, 1, 2, UNIT, 0)
    assert [hit(pool, number) for number in (1, 2, 3)] == [None, 2, None]
    assert blocks[1].block_hash_num_tokens == 8


@pytest.mark.parametrize(("cached_", "full"), [(0, 0), (2, 2), (2, 1), (5, 0)])
def test_where_no_block_is_newly_full_nothing_is_read_or_done(
    pool: BlockPool, cached_: int, full: int
) -> None:
    pool.cache_full_blocks(None, None, cached_, full, UNIT, 0)
    assert len(pool.cached_block_hash_to_block) == 0


def test_with_events_off_only_the_hashes_of_a_request_are_read(
    pool: BlockPool,
) -> None:
    class Request:
        __slots__ = ("block_hashes",)

    request = Request()
    request.block_hashes = hashes_of(1)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, 1, UNIT, 0)
    pool.cache_partial_block(request, blocks[0], UNIT, 1, UNIT)
    assert (hit(pool, 1, 0), hit(pool, 1, 1)) == (1, 1)


def test_null_blocks_in_a_table_are_skipped_with_their_hashes(pool: BlockPool) -> None:
    null = pool.null_block
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request_of(1, 2, 3), [null, null, block], 0, 3, UNIT, 0)
    assert [hit(pool, number) for number in (1, 2, 3)] == [None, None, 1]
    assert block.block_hash_num_tokens == 12
    assert null == KVCacheBlock(0, is_null=True)


def test_a_null_block_needs_no_hash(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request_of(1), [block, pool.null_block], 0, 2, UNIT, 0)
    assert hit(pool, 1) == 1


def test_masked_blocks_are_skipped_with_their_hashes(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(
        request_of(1, 2, 3, 4), blocks, 1, 4, UNIT, 0, block_mask=[True, False, True]
    )
    assert [hit(pool, number) for number in (1, 2, 3, 4)] == [None, 2, None, 4]


def test_a_masked_block_may_carry_a_hash(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool.cache_full_blocks(request_of(1), [block], 0, 1, UNIT, 0, block_mask=[False])
    assert block.block_hash == key_of(1)


@pytest.mark.parametrize("mask", [[], [True], [True, False, True]])
def test_a_mask_has_an_entry_for_each_new_block(
    pool: BlockPool, mask: list[bool]
) -> None:
    blocks = pool.get_new_blocks(2)
    with refused(BlockStateError, pool):
        pool.cache_full_blocks(request_of(1, 2), blocks, 0, 2, UNIT, 0, mask)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_block_of_several_hashes_has_the_last_of_them(
    pool: BlockPool, factor: int
) -> None:
    blocks = pool.get_new_blocks(2)
    request = request_of(*range(6))
    pool.cache_full_blocks(request, blocks, 0, 2, factor * UNIT, 0)
    assert [block.block_hash for block in blocks] == [
        key_of(factor - 1),
        key_of(2 * factor - 1),
    ]
    assert [block.block_hash_num_tokens for block in blocks] == [
        factor * UNIT,
        2 * factor * UNIT,
    ]


def test_hashes_may_come_as_a_view_in_the_blocks_own_size(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(3)
    view = BlockHashListWithBlockSize(hashes_of(*range(6)), UNIT, 2 * UNIT)
    request = SimpleNamespace(block_hashes=view)
    pool.cache_full_blocks(request, blocks, 1, 3, 2 * UNIT, 0)
    assert [hit(pool, number) for number in range(6)] == [None, None, None, 2, None, 3]


def test_a_view_in_another_size_than_the_blocks_is_refused(pool: BlockPool) -> None:
    blocks = pool.get_new_blocks(1)
    view = BlockHashListWithBlockSize(hashes_of(*range(8)), UNIT, 4 * UNIT)
    with refused(ValueError, pool):
        pool.cache_full_blocks(
            SimpleNamespace(block_hashes=view), blocks, 0, 1, 2 * UNIT, 0
        )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_full_blocks": 3}, ValueError),
        ({"num_cached_blocks": -1}, ValueError),
        ({"num_cached_blocks": 0.0}, TypeError),
        ({"num_full_blocks": 2**31}, ValueError),
        ({"num_full_blocks": 2**31 - 2}, ValueError),
        ({"num_full_blocks": "2"}, TypeError),
        ({"block_size": 0}, ValueError),
        ({"block_size": -UNIT}, ValueError),
        ({"block_size": UNIT + 1}, ValueError),
        ({"block_size": 2 * UNIT}, ValueError),
        ({"block_size": "4"}, TypeError),
        ({"block_mask": 3}, TypeError),
        ({"blocks": None}, TypeError),
        ({"blocks": [KVCacheBlock(1)]}, ValueError),
        ({"request": request_of(1)}, ValueError),
        ({"request": SimpleNamespace(block_hashes=None)}, TypeError),
        ({"request": SimpleNamespace(block_hashes=[hash_of(1), "x"])}, TypeError),
        ({"request": SimpleNamespace(block_hashes=[hash_of(1), b""])}, ValueError),
        ({"request": SimpleNamespace(block_hashes=[b"x" * 33] * 2)}, ValueError),
        ({"request": object()}, AttributeError),
    ],
)
@pytest.mark.parametrize("events", [False, True])
def test_what_cannot_be_cached_is_refused_whole(
    make: MakePool, events: bool, arguments: dict[str, Any], error: type[Exception]
) -> None:
    pool = make(enable_kv_cache_events=events)
    if "request" in arguments:
        spare = full_request_of(1, 2)
        for name, value in vars(spare).items():
            if isinstance(arguments["request"], SimpleNamespace):
                vars(arguments["request"]).setdefault(name, value)
    right = {
        "request": full_request_of(1, 2),
        "blocks": pool.get_new_blocks(2),
        "num_cached_blocks": 0,
        "num_full_blocks": 2,
        "block_size": UNIT,
        "kv_cache_group_id": 0,
    }
    with refused(error, pool):
        pool.cache_full_blocks(**{**right, **arguments})


@pytest.mark.parametrize("thing", [3, None, "block", object()])
@pytest.mark.parametrize("events", [False, True])
def test_what_is_no_block_is_not_cached(
    make: MakePool, events: bool, thing: object
) -> None:
    pool = make(enable_kv_cache_events=events)
    (block,) = pool.get_new_blocks(1)
    with refused(TypeError, pool):
        pool.cache_full_blocks(full_request_of(1, 2), [block, thing], 0, 2, UNIT, 0)


def test_a_block_of_another_pool_is_not_cached(make: MakePool) -> None:
    pool, other = make(), make()
    (ours,), (theirs,) = pool.get_new_blocks(1), other.get_new_blocks(1)
    with refused(ValueError, pool, other, match="block 1"):
        pool.cache_full_blocks(request_of(1, 2), [ours, theirs], 0, 2, UNIT, 0)
    with refused(ValueError, pool, other, match="block 1"):
        pool.cache_partial_block(request_of(1), theirs, UNIT, 0, UNIT)
    with refused(ValueError, pool, other, match="block 1"):
        pool._insert_block_hash(key_of(1), theirs, UNIT)


def test_the_ends_of_the_queue_are_not_cached() -> None:
    printed = run_apart("""
pool = BlockPool(8, True, 16)
end = pool.free_block_queue.fake_free_list_tail
request = SimpleNamespace(block_hashes=[b"x" * 32])
pool._insert_block_hash(b"key", pool.blocks[1], 16)
pool._insert_block_hash(b"alias", pool.blocks[1], 16)
for call in (
    lambda: pool.cache_full_blocks(request, [end], 0, 1, 16, 0),
    lambda: pool.cache_partial_block(request, end, 16, 0, 16),
    lambda: pool._insert_block_hash(b"other", end, 16),
    lambda: pool._maybe_evict_cached_block(end),
    lambda: pool.move_block_hashes(pool.blocks[1], end),
):
    try:
        call()
    except ValueError:
        pass
    pool.check()
print(len(pool.cached_block_hash_to_block), end.block_hash)
""")
    assert printed == "2 None"


FULL_REQUEST = """
class Request:
    block_hashes = [b"%04d" % number for number in range(1000)]
    all_token_ids = list(range(16_000))
    lora_request = session_id = cache_salt = prompt_embeds = None
    mm_features = ()

pool = BlockPool(2000, True, 16, enable_kv_cache_events=True)
blocks = pool.get_new_blocks(1000)

def attempt(call):
    before = pool.blocks.as_array().tobytes()
    try:
        call()
    except (TypeError, ValueError, IndexError):
        assert pool.blocks.as_array().tobytes() == before
        assert pool.take_events() == []
    pool.check()
"""


def test_a_table_that_shrinks_while_its_request_is_read_does_no_harm() -> None:
    printed = run_apart(f"""{FULL_REQUEST}
class Shrinking(Request):
    @property
    def all_token_ids(self):
        blocks.clear()
        return list(range(16_000))

attempt(lambda: pool.cache_full_blocks(Shrinking(), blocks, 999, 1000, 16, 0))
print("done")
""")
    assert printed == "done"


def test_hashes_that_are_fewer_than_they_say_do_no_harm() -> None:
    printed = run_apart(f"""{FULL_REQUEST}
class Boasting:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return [] if isinstance(index, slice) else b"hash"

class Request(Request):
    block_hashes = Boasting()

for events in (False, True):
    pool.enable_kv_cache_events = events
    attempt(lambda: pool.cache_full_blocks(Request(), blocks, 0, 1000, 16, 0))
print("done")
""")
    assert printed == "done"


def test_hashes_that_go_while_the_group_is_read_are_missing(pool: BlockPool) -> None:
    hashes = [hash_of(1), hash_of(2)]

    class Group:
        def __index__(self) -> int:
            hashes.clear()
            return 0

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # There a list is copied before anything foreign runs.
        assert pool.match_prefix_ids(hashes, Group()).size == 0
        return
    with refused(ValueError, pool, match="shrank during the call"):
        pool.match_prefix_ids(hashes, Group())


def test_hashes_that_shrink_while_the_event_is_made_do_no_harm() -> None:
    printed = run_apart(f"""{FULL_REQUEST}
class Shrinking:
    def __init__(self, **fields):
        hashes.clear()

use_event_classes(EventClasses(Shrinking, BlockRemoved, AllBlocksCleared))
for ids in ([block.block_id for block in blocks], [1] * 1000):
    hashes = list(Request.block_hashes)
    attempt(lambda: pool.cache_block_ids(ids, hashes))
    pool.evict_block_ids(ids)
    pool.take_events()
print("done")
""")
    assert printed == "done"


def test_hashes_that_give_fewer_than_they_have_are_refused(pool: BlockPool) -> None:
    class Short(list[bytes]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)[1:]

    request = SimpleNamespace(block_hashes=Short(hashes_of(1, 2)))
    blocks = pool.get_new_blocks(2)
    with refused(ValueError, pool, match="1 block hashes for 2 blocks"):
        pool.cache_full_blocks(request, blocks, 0, 2, UNIT, 0)


def test_two_blocks_may_hold_the_same_content_and_the_first_answers(
    pool: BlockPool,
) -> None:
    first, second = cached(pool, 1) + cached(pool, 1)
    assert hit(pool, 1) == first.block_id
    pool.evict_blocks([first.block_id])
    assert hit(pool, 1) == second.block_id
    pool.evict_blocks([second.block_id])
    assert hit(pool, 1) is None


@pytest.mark.parametrize("number", [1, 2])
def test_a_block_with_a_hash_of_as_many_tokens_takes_no_other(
    pool: BlockPool, number: int
) -> None:
    (block,) = cached(pool, 1)
    with refused(BlockStateError, pool, match="block 1") as _:
        pool.cache_full_blocks(request_of(number), [block], 0, 1, UNIT, 0)


def test_the_refusal_of_a_second_hash_names_both(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    with pytest.raises(BlockStateError) as error:
        pool.cache_full_blocks(request_of(2), [block], 0, 1, UNIT, 0)
    assert repr(key_of(1)) in str(error.value)
    assert repr(hash_of(2)) in str(error.value)


def test_a_block_with_a_hash_of_unknown_tokens_takes_no_other(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.set_block_hash(key_of(1))
    with refused(BlockStateError, pool, match="block 1"):
        pool.cache_full_blocks(request_of(2), [block], 0, 1, UNIT, 0)


def test_a_longer_hash_promotes_a_block(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    request = request_of(1, 2)
    pool.cache_partial_block(request, block, UNIT, 0, 2 * UNIT)
    pool.cache_full_blocks(request, [block], 0, 1, 2 * UNIT, 0)
    assert block.block_hash == key_of(2)
    assert block.block_hash_num_tokens == 2 * UNIT
    assert (hit(pool, 1), hit(pool, 2)) == (None, 1)


def test_a_promoted_block_loses_its_further_keys_too(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool._insert_block_hash(key_of(5), block, UNIT)
    pool.cache_full_blocks(request_of(1, 2), [pool.null_block, block], 1, 2, UNIT, 0)
    assert hit(pool, 1) is hit(pool, 5) is None
    assert hit(pool, 2) == 1


def test_a_hand_made_block_can_be_cached_in_a_pool_as_in_vllm(pool: BlockPool) -> None:
    block = KVCacheBlock(100)
    pool.cache_full_blocks(request_of(1), [block], 0, 1, UNIT, 0)
    assert pool.get_cached_block(hash_of(1), [0])[0] is block
    assert block.block_hash == key_of(1)
    assert pool._maybe_evict_cached_block(block)
    assert hit(pool, 1) is None
    assert block == KVCacheBlock(100)


# -- cache_partial_block ----------------------------------------------------------


def test_a_partial_hash_is_the_own_hash_of_a_block_without_one(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    key = pool.cache_partial_block(request_of(1, 2), block, 2 * UNIT, 3, 4 * UNIT)
    assert key == key_of(2, group=3) == block.block_hash
    assert block.block_hash_num_tokens == 2 * UNIT
    assert (hit(pool, 1, 3), hit(pool, 2, 3)) == (None, 1)


def test_a_shorter_partial_hash_becomes_a_further_key(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    request = request_of(1, 2)
    pool.cache_full_blocks(request, [block], 0, 1, 2 * UNIT, 0)
    assert pool.cache_partial_block(request, block, UNIT, 0, 2 * UNIT) == key_of(1)
    assert block.block_hash == key_of(2)
    assert (hit(pool, 1), hit(pool, 2)) == (1, 1)
    assert pool.cached_block_hashes_by_block == {1: {key_of(1)}}


def test_a_longer_partial_hash_replaces_all_keys(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool._insert_block_hash(key_of(5), block, UNIT)
    pool.cache_partial_block(request_of(1, 2), block, 2 * UNIT, 0, 4 * UNIT)
    assert hit(pool, 1) is hit(pool, 5) is None
    assert hit(pool, 2) == 1
    assert not pool.cached_block_hashes_by_block


def test_a_partial_hash_that_is_there_is_not_added_again(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    request = request_of(1, 2)
    pool.cache_full_blocks(request, [block], 0, 1, 2 * UNIT, 0)
    for _ in range(3):
        for tokens in (UNIT, 2 * UNIT):
            pool.cache_partial_block(request, block, tokens, 0, 2 * UNIT)
    assert len(pool.cached_block_hash_to_block) == 2
    assert pool.cached_block_hashes_by_block == {1: {key_of(1)}}


def test_replaced_content_loses_all_its_keys(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request_of(1, 2), [block], 0, 1, 2 * UNIT, 0)
    pool.cache_partial_block(request_of(1, 2), block, UNIT, 0, 2 * UNIT)
    key = pool.cache_partial_block(
        request_of(3), block, UNIT, 0, 2 * UNIT, replace_existing_hashes=True
    )
    assert key == block.block_hash == key_of(3)
    assert block.block_hash_num_tokens == UNIT
    assert [hit(pool, number) for number in (1, 2, 3)] == [None, None, 1]


def test_content_replaced_by_the_same_keeps_its_one_key(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool.cache_partial_block(
        request_of(1), block, UNIT, 0, UNIT, replace_existing_hashes=True
    )
    assert block.block_hash == key_of(1)
    assert len(pool.cached_block_hash_to_block) == 1


def test_a_block_made_by_hand_takes_a_partial_hash(pool: BlockPool) -> None:
    block = KVCacheBlock(5)
    name = pool.cache_partial_block(request_of(1), block, UNIT, 0, 2 * UNIT)
    assert pool.cached_block_hash_to_block.get_one_block(name) is block
    assert block.block_hash_num_tokens == UNIT


def test_the_null_block_takes_no_partial_hash(pool: BlockPool) -> None:
    assert pool.cache_partial_block(request_of(1), pool.null_block, UNIT, 0, 8) is None
    assert hit(pool, 1) is None


@pytest.mark.parametrize("tokens", [0, 1, UNIT - 1, UNIT + 1, 3 * UNIT])
def test_a_partial_hash_ends_where_a_hash_of_the_request_ends(
    pool: BlockPool, tokens: int
) -> None:
    (block,) = pool.get_new_blocks(1)
    with refused(BlockStateError, pool, match=f"{tokens} tokens"):
        pool.cache_partial_block(request_of(1, 2), block, tokens, 0, 4 * UNIT)
    assert issubclass(BlockStateError, AssertionError)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_tokens": -UNIT}, ValueError),
        ({"num_tokens": 4.0}, TypeError),
        ({"block_size": UNIT + 1}, ValueError),
        ({"block_size": 0}, ValueError),
        ({"block_size": "4"}, TypeError),
        ({"block": 1}, TypeError),
        ({"block": None}, TypeError),
        ({"request": object()}, AttributeError),
        ({"request": SimpleNamespace(block_hashes=["x"])}, TypeError),
        ({"request": SimpleNamespace(block_hashes=[b""])}, ValueError),
    ],
)
def test_a_partial_hash_that_cannot_be_is_refused(
    pool: BlockPool, arguments: dict[str, Any], error: type[Exception]
) -> None:
    right = {
        "request": request_of(1),
        "block": pool.get_new_blocks(1)[0],
        "num_tokens": UNIT,
        "kv_cache_group_id": 0,
        "block_size": UNIT,
    }
    with refused(error, pool):
        pool.cache_partial_block(**{**right, **arguments})


# -- further keys, moving them ----------------------------------------------------


def test_further_keys_are_shown_as_a_dict_of_sets(pool: BlockPool) -> None:
    assert pool.cached_block_hashes_by_block == {}
    assert not pool.cached_block_hashes_by_block
    one, two = cached(pool, 1, 2)
    for number in (5, 6):
        pool._insert_block_hash(key_of(number), two, UNIT)
    further = pool.cached_block_hashes_by_block
    assert further == {2: {key_of(5), key_of(6)}}
    assert further[two.block_id] == {key_of(5), key_of(6)}
    assert one.block_id not in further
    assert list(further) == [2]
    assert len(further) == 1
    with pytest.raises(KeyError):
        further[1]


@pytest.mark.parametrize("block_id", [8, -1, 2**40, "2", None])
def test_what_is_no_block_has_no_further_keys(
    pool: BlockPool, block_id: object
) -> None:
    assert block_id not in pool.cached_block_hashes_by_block
    with pytest.raises(KeyError):
        pool.cached_block_hashes_by_block[block_id]


def test_the_view_of_further_keys_is_live(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    further = pool.cached_block_hashes_by_block
    pool._insert_block_hash(key_of(5), block, UNIT)
    assert further == {1: {key_of(5)}}
    pool.evict_blocks([1])
    assert further == {}


def test_a_key_is_inserted_as_own_first_and_then_as_further_one(
    pool: BlockPool,
) -> None:
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(key_of(1), block, None)
    pool._insert_block_hash(key_of(2), block, 8)
    assert (block.block_hash, block.block_hash_num_tokens) == (key_of(1), None)
    assert pool.cached_block_hashes_by_block == {1: {key_of(2)}}


@pytest.mark.parametrize(
    ("key", "tokens", "error"),
    [
        (b"", UNIT, ValueError),
        (b"x" * 37, UNIT, ValueError),
        ("key", UNIT, TypeError),
        (b"key", -1, ValueError),
        (b"key", "4", TypeError),
    ],
)
def test_what_is_no_key_is_not_inserted(
    pool: BlockPool, key: object, tokens: object, error: type[Exception]
) -> None:
    (block,) = pool.get_new_blocks(1)
    with refused(error, pool):
        pool._insert_block_hash(key, block, tokens)


def test_the_null_block_takes_no_key(pool: BlockPool) -> None:
    with refused(ValueError, pool):
        pool._insert_block_hash(key_of(1), pool.null_block, UNIT)


def test_moved_keys_answer_with_the_other_block(pool: BlockPool) -> None:
    source, target = cached(pool, 1) + pool.get_new_blocks(1)
    pool._insert_block_hash(key_of(5), source, UNIT)
    pool.move_block_hashes(source, target)
    assert (hit(pool, 1), hit(pool, 5)) == (2, 2)
    assert source == KVCacheBlock(1, 1)
    assert target == KVCacheBlock(2, 1, key_of(1), UNIT)
    assert pool.cached_block_hashes_by_block == {2: {key_of(5)}}


def test_a_moved_key_is_the_youngest_copy(pool: BlockPool) -> None:
    first, second = cached(pool, 1) + cached(pool, 1)
    (target,) = pool.get_new_blocks(1)
    pool.move_block_hashes(first, target)
    assert hit(pool, 1) == second.block_id
    pool.evict_blocks([second.block_id])
    assert hit(pool, 1) == target.block_id


def test_moving_from_a_block_without_keys_moves_nothing(pool: BlockPool) -> None:
    source, target = pool.get_new_blocks(2)
    pool.move_block_hashes(source, target)
    pool.move_block_hashes(pool.null_block, target)
    assert target.block_hash is None


def test_keys_are_not_moved_where_keys_are(make: MakePool) -> None:
    pool, other = make(), make()
    source, target = cached(pool, 1, 2)
    for bad, error in (
        (target, BlockStateError),
        (source, BlockStateError),
        (pool.null_block, ValueError),
        (other.blocks[3], ValueError),
        (KVCacheBlock(3), ValueError),
        (3, TypeError),
    ):
        with refused(error, pool, other):
            pool.move_block_hashes(source, bad)
    with refused(TypeError, pool):
        pool.move_block_hashes(None, pool.blocks[3])
    with refused(ValueError, pool, other):
        pool.move_block_hashes(other.blocks[3], pool.blocks[3])


def test_keys_are_not_moved_to_a_block_with_a_further_key_only(pool: BlockPool) -> None:
    source, target = cached(pool, 1, 2)
    pool._insert_block_hash(key_of(5), target, UNIT)
    pool.cached_block_hash_to_block.pop(key_of(2), target.block_id)
    with refused(BlockStateError, pool, match="block 2"):
        pool.move_block_hashes(source, target)


# -- is_block_writable ------------------------------------------------------------


def test_a_block_is_writable_with_one_user_and_no_hash(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    assert pool.is_block_writable(block) is True
    pool.touch([block])
    assert pool.is_block_writable(block) is False
    pool.free_blocks([block])
    assert pool.is_block_writable(block) is True
    pool.cache_full_blocks(request_of(1), [block], 0, 1, UNIT, 0)
    assert pool.is_block_writable(block) is False
    assert pool.is_block_writable(pool.blocks[5]) is False
    assert pool.is_block_writable(pool.null_block) is False


def test_what_is_no_block_of_the_pool_is_not_asked_about(make: MakePool) -> None:
    pool, other = make(), make()
    with refused(ValueError, pool, other, match="block 3"):
        pool.is_block_writable(other.blocks[3])
    with refused(TypeError, pool):
        pool.is_block_writable(3)


# -- evict_blocks -----------------------------------------------------------------


def test_an_evicted_free_block_stays_where_it_stands(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2, 3))
    before = walk(pool)
    pool.evict_blocks({2})
    assert walk(pool) == before
    assert [hit(pool, number) for number in (1, 2, 3)] == [1, None, 3]


def test_an_evicted_block_in_use_stays_in_use(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool.evict_blocks({1})
    assert block == KVCacheBlock(1, ref_cnt=1)
    pool.free_blocks([block])
    assert walk(pool)[0] == 1


@pytest.mark.parametrize(
    "batch",
    [{3}, [3, 3], (3, 0), iter([3]), np.array([3]), {3: None}, range(3, 4), []],
    ids=["set", "twice", "with null", "iterator", "array", "dict", "range", "empty"],
)
def test_blocks_without_content_are_skipped(pool: BlockPool, batch: object) -> None:
    cached(pool, 1)
    pool.evict_blocks(batch)
    assert hit(pool, 1) == 1


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (-1, ValueError),
        (8, ValueError),
        (2**31, ValueError),
        ("3", TypeError),
        (1.0, TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_ids_are_evicted_all_or_none(
    pool: BlockPool, bad: object, error: type[Exception]
) -> None:
    cached(pool, 1)
    with refused(error, pool, match=str(bad)):
        pool.evict_blocks([1, bad])


def test_evicting_a_block_tells_whether_it_was_cached(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    assert pool._maybe_evict_cached_block(block) is True
    assert pool._maybe_evict_cached_block(block) is False
    assert pool._maybe_evict_cached_block(pool.null_block) is False


# -- reset_prefix_cache -----------------------------------------------------------


def test_a_reset_forgets_every_content_and_keeps_the_queue(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    pool._insert_block_hash(key_of(5), blocks[0], UNIT)
    pool.free_blocks(reversed(blocks))
    order = walk(pool)
    assert pool.reset_prefix_cache() is True
    assert walk(pool) == order
    assert [hit(pool, number) for number in (1, 2, 3, 5)] == [None] * 4
    assert all(block.block_hash is None for block in pool.blocks)
    assert len(pool.cached_block_hash_to_block) == 0
    assert not pool.cached_block_hashes_by_block
    assert pool.get_usage() == 0.0


def test_a_reset_forgets_what_was_set_or_inserted_by_hand(pool: BlockPool) -> None:
    block, other = pool.get_new_blocks(2)
    block.set_block_hash(key_of(1))
    pool.cached_block_hash_to_block.insert(key_of(2), other)
    pool.cached_block_hash_to_block.insert(key_of(3), KVCacheBlock(100))
    pool.free_blocks([block, other])
    assert pool.reset_prefix_cache() is True
    assert block.block_hash is None
    assert hit(pool, 2) is None
    assert pool.get_cached_block(hash_of(3), [0]) is None


def test_a_reset_is_refused_while_a_block_is_in_use(
    pool: BlockPool, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = cached(pool, 1, 2)
    pool.free_blocks(blocks[:1])
    with caplog.at_level(logging.WARNING, logger="kvcache"):
        assert pool.reset_prefix_cache() is False
    assert "1 blocks are in use" in caplog.text
    assert (hit(pool, 1), hit(pool, 2)) == (1, 2)
    pool.free_blocks(blocks[1:])
    assert pool.reset_prefix_cache() is True


def test_a_pool_can_be_used_again_after_a_reset(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2))
    pool.reset_prefix_cache()
    blocks = cached(pool, 1, 2)
    assert (hit(pool, 1), hit(pool, 2)) == tuple(ids(blocks))


# -- counting ---------------------------------------------------------------------


def test_usage_is_the_share_of_blocks_in_use(make: MakePool) -> None:
    pool = make(9)
    assert pool.get_usage() == 0.0
    blocks = pool.get_new_blocks(2)
    assert pool.get_usage() == 0.25
    assert pool.get_num_free_blocks() == 6
    pool.get_new_blocks(6)
    assert pool.get_usage() == 1.0
    pool.free_blocks(blocks)
    assert pool.get_usage() == 0.75


def test_taking_events_returns_each_of_them_once(make: MakePool) -> None:
    pool = make(enable_kv_cache_events=True)
    cached(pool, 1)
    queue = pool.kv_event_queue
    assert pool.take_events() is queue
    assert len(queue) == 1
    assert pool.take_events() == []


def test_with_events_off_there_are_none(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1))
    pool.reset_prefix_cache()
    assert pool.take_events() == pool.kv_event_queue == []


def test_events_can_be_switched_on_later(pool: BlockPool) -> None:
    pool.enable_kv_cache_events = True
    cached(pool, 1)
    assert len(pool.take_events()) == 1


# -- subclasses -------------------------------------------------------------------


class SharedQueuePool(BlockPool):
    """Appends to the queue of another pool, which replaces it at each drain."""

    def __init__(self, *arguments: Any, event_owner: BlockPool) -> None:
        self.event_owner = event_owner
        super().__init__(*arguments, enable_kv_cache_events=True)

    @property
    def kv_event_queue(self) -> list[Any]:
        return self.event_owner.kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[Any]) -> None:
        assert not events


def test_a_subclass_may_append_to_another_pools_queue(make: MakePool) -> None:
    owner = make(enable_kv_cache_events=True)
    pool = SharedQueuePool(8, True, UNIT, event_owner=owner)
    for number in (1, 2, 3):
        cached(pool, number)
        cached(owner, number)
        assert len(owner.take_events()) == 2
    pool.free_blocks(pool.blocks[1:4])
    pool.get_new_blocks(7)
    assert len(owner.take_events()) == 3
    pool.free_blocks(pool.blocks[1:])
    pool.reset_prefix_cache()
    assert owner.take_events() == [AllBlocksCleared()]
    assert pool.kv_event_queue == []


def test_what_a_subclasss_queue_raises_does_not_stop_the_call(
    unraisable: list[BaseException],
) -> None:
    class Pool(BlockPool):
        def __init__(self) -> None:
            super().__init__(8, True, UNIT, enable_kv_cache_events=True)

        @property
        def kv_event_queue(self) -> list[Any]:
            raise KeyError("queue")

        @kv_event_queue.setter
        def kv_event_queue(self, events: list[Any]) -> None:
            pass

    pool = Pool()
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(full_request_of(1), [block], 0, 1, UNIT, 0)
    assert hit(pool, 1) == 1
    pool.evict_blocks([1])
    assert hit(pool, 1) is None
    assert [type(error) for error in unraisable] == [KeyError, KeyError]
    pool.check()


def test_a_subclass_may_override_get_cached_block() -> None:
    class Pool(BlockPool):
        def get_cached_block(
            self, block_hash: bytes, kv_cache_group_ids: list[int]
        ) -> list[KVCacheBlock] | None:
            found = super().get_cached_block(block_hash, kv_cache_group_ids)
            return None if found is None else found[::-1]

    pool = Pool(8, True, UNIT)
    cached(pool, 1, group=0)
    cached(pool, 1, group=1)
    assert ids(pool.get_cached_block(hash_of(1), [0, 1])) == [2, 1]
    assert pool.get_cached_block(hash_of(2), [0, 1]) is None


def test_a_subclass_has_attributes_of_its_own() -> None:
    class Pool(BlockPool):
        pass

    pool = Pool(8, True, UNIT)
    pool.colour = "red"
    assert vars(pool) == {"colour": "red"}
    with pytest.raises(AttributeError):
        BlockPool(8, True, UNIT).colour = "red"


def test_blocks_of_a_subclasss_pool_are_freed_through_it() -> None:
    class Pool(BlockPool):
        freed: list[list[int]] = []  # noqa: RUF012

        def free_blocks(self, ordered_blocks: list[KVCacheBlock]) -> None:
            self.freed.append(ids(ordered_blocks))
            super().free_blocks(ordered_blocks)

    pool, other = Pool(8, True, UNIT), BlockPool(8, True, UNIT)
    other.free_blocks(pool.get_new_blocks(2))
    assert pool.freed == [[1, 2]]
    assert pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize(
    "tie",
    [
        lambda pool: setattr(pool, "metrics_collector", SimpleNamespace(pool=pool)),
        lambda pool: setattr(pool, "metrics_collector", pool),
        lambda pool: setattr(pool, "medium", [pool]),
        lambda pool: pool.kv_event_queue.append(pool),
        lambda pool: pool.unpin_blocks(pool.get_new_blocks(1), lambda block: pool),
        lambda pool: setattr(pool, "medium", pool),
        lambda pool: setattr(pool, "kv_event_queue", pool),
        lambda pool: setattr(pool, "medium", BlockPool(2, True, UNIT, False, pool)),
    ],
    ids=[
        "collector",
        "itself",
        "medium",
        "queue",
        "watcher",
        "medium itself",
        "queue itself",
        "two pools",
    ],
)
def test_a_pool_in_a_circle_of_references_is_collected(
    tie: Callable[[BlockPool], object], derived: bool
) -> None:
    pool = type("Pool", (BlockPool,), {})(8, True, UNIT) if derived else None
    pool = pool or BlockPool(8, True, UNIT)
    view, witness = pool.blocks[3], weakref.ref(pool)
    tie(pool)
    del pool
    gc.collect()
    assert witness() is None
    # A weak reference goes when the collector finds the circle, a view's pool when the
    # pool itself does.
    assert view.pool is None


def test_a_pool_that_is_its_own_attribute_is_collected() -> None:
    class Pool(BlockPool):
        pass

    pool = Pool(8, True, UNIT)
    view, witness = pool.blocks[3], weakref.ref(pool)
    pool.me, pool.view = pool, view
    del pool
    gc.collect()
    assert witness() is None
    assert view == KVCacheBlock(3)


# -- hooks ------------------------------------------------------------------------


def test_a_collector_is_told_of_evictions_before_allocations(make: MakePool) -> None:
    collector = Recorder()
    pool = make(metrics_collector=collector)
    pool.get_new_blocks(2)
    assert collector.told == [
        ("evicted", 1),
        ("allocated", 1),
        ("evicted", 2),
        ("allocated", 2),
    ]


def test_with_caching_off_a_collector_is_told_of_allocations_alone(
    make: MakePool,
) -> None:
    collector = Recorder()
    pool = make(caching=False, metrics_collector=collector)
    pool.get_new_blocks(2)
    assert collector.told == [("allocated", 1), ("allocated", 2)]


def test_a_collector_is_told_of_every_touch_but_the_null_blocks(make: MakePool) -> None:
    collector = Recorder()
    pool = make(metrics_collector=collector)
    pool.touch([pool.blocks[3], pool.null_block, pool.blocks[2], pool.blocks[3]])
    assert collector.told == [("accessed", 3), ("accessed", 2), ("accessed", 3)]


def test_a_collector_is_told_of_blocks_evicted_by_id(make: MakePool) -> None:
    collector = Recorder()
    pool = make(metrics_collector=collector)
    pool.evict_blocks([3, 2])
    pool._maybe_evict_cached_block(pool.blocks[5])
    assert collector.told == [("evicted", 3), ("evicted", 2), ("evicted", 5)]


def test_a_collector_is_told_of_a_reset_and_of_no_refused_one(make: MakePool) -> None:
    collector = Recorder()
    pool = make(metrics_collector=collector)
    pool.touch([pool.blocks[3]])
    assert not pool.reset_prefix_cache()
    pool.free_blocks([pool.blocks[3]])
    assert pool.reset_prefix_cache()
    assert collector.told == [("accessed", 3), "reset"]


def test_a_collector_can_be_given_later(pool: BlockPool) -> None:
    pool.get_new_blocks(1)
    pool.metrics_collector = collector = Recorder()
    pool.get_new_blocks(1)
    pool.metrics_collector = None
    pool.get_new_blocks(1)
    assert collector.told == [("evicted", 2), ("allocated", 2)]


def test_watchers_are_told_before_the_collector(make: MakePool) -> None:
    collector = Recorder()
    pool = make(3, metrics_collector=collector)
    pool.unpin_blocks(
        pool.get_new_blocks(2),
        lambda block: collector.told.append(("reused", block.block_id)),
    )
    collector.told.clear()
    pool.get_new_blocks(2)
    assert collector.told[:3] == [("reused", 1), ("reused", 2), ("evicted", 1)]


def test_what_a_collector_raises_does_not_stop_the_call(
    make: MakePool, unraisable: list[BaseException]
) -> None:
    collector = BrokenRecorder()
    pool = make(metrics_collector=collector)
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    pool.evict_blocks([5])
    pool.free_blocks(blocks + blocks)
    assert pool.reset_prefix_cache()
    assert len(collector.told) == 4 + 2 + 1 + 1
    assert [error.args[0] for error in unraisable] == [1, 1, 2, 2, 1, 2, 5, "reset"]


def test_what_a_watcher_raises_stops_neither_the_call_nor_the_other_watchers(
    pool: BlockPool, unraisable: list[BaseException]
) -> None:
    told = []

    def watcher(block: KVCacheBlock) -> None:
        told.append(block.block_id)
        raise KeyError(block.block_id)

    pool.unpin_blocks(pool.get_new_blocks(3), watcher)
    assert len(pool.get_new_blocks(7)) == 7
    assert told == [1, 2, 3]
    assert [error.args[0] for error in unraisable] == [1, 2, 3]


def test_a_collector_without_a_hook_is_an_error_nobody_sees(
    pool: BlockPool, unraisable: list[BaseException]
) -> None:
    pool.metrics_collector = object()
    assert ids(pool.get_new_blocks(1)) == [1]
    assert {type(error) for error in unraisable} == {AttributeError}


def test_a_hook_that_calls_back_sees_the_finished_state(make: MakePool) -> None:
    seen = []

    class Curious(Recorder):
        def on_block_allocated(self, block: KVCacheBlock) -> None:
            pool.check()
            seen.append((block.block_id, block.ref_cnt, pool.get_num_free_blocks()))

        def on_block_evicted(self, block: KVCacheBlock) -> None:
            pool.check()
            seen.append((block.block_id, hit(pool, 1), block.block_hash))

        def on_block_accessed(self, block: KVCacheBlock) -> None:
            pool.check()
            seen.append((block.block_id, pool.blocks[2].ref_cnt))

        def reset(self) -> None:
            pool.check()
            seen.append(len(pool.cached_block_hash_to_block))

    pool = make(3)
    pool.free_blocks(cached(pool, 1))
    pool.metrics_collector = Curious()
    blocks = pool.get_new_blocks(2)
    assert seen == [(2, None, None), (2, 1, 0), (1, None, None), (1, 1, 0)]
    seen.clear()
    pool.touch([pool.blocks[1], pool.blocks[2]])
    assert seen == [(1, 2), (2, 2)]
    seen.clear()
    pool.free_blocks(blocks + blocks)
    pool.reset_prefix_cache()
    assert seen == [0]


def test_a_watcher_may_take_blocks_itself(pool: BlockPool) -> None:
    taken: list[KVCacheBlock] = []

    def watcher(block: KVCacheBlock) -> None:
        taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        pool.check()

    pool.unpin_blocks(pool.get_new_blocks(2), watcher)
    pool.free_blocks(pool.get_new_blocks(5))
    blocks = pool.get_new_blocks(6)
    assert ids(blocks) == [3, 4, 5, 6, 7, 1]
    assert ids(taken) == [2]
    assert pool.get_num_free_blocks() == 0


def test_a_collector_may_free_the_blocks_it_is_told_of(make: MakePool) -> None:
    class Refuser(Recorder):
        def on_block_allocated(self, block: KVCacheBlock) -> None:
            pool.free_blocks([block])

    pool = make(metrics_collector=Refuser())
    pool.get_new_blocks(7)
    assert sorted(walk(pool)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_failed_call_tells_no_hook(make: MakePool) -> None:
    collector = Recorder()
    pool = make(metrics_collector=collector)
    with refused(NoFreeBlocksError, pool):
        pool.get_new_blocks(8)
    with refused(TypeError, pool):
        pool.touch([pool.blocks[3], None])
    with refused(ValueError, pool):
        pool.evict_blocks([3, 8])
    assert collector.told == []


def test_a_view_made_during_a_call_cannot_upset_it(make: MakePool) -> None:
    # Views are made as blocks are handed out; the collector may run meanwhile.
    pool = make(200)
    taken: list[int] = []

    def take(phase: str, info: object) -> None:
        if phase == "start" and pool.get_num_free_blocks() > 150:
            taken.extend(pool.get_new_block_ids(1).tolist())

    threshold = gc.get_threshold()
    gc.callbacks.append(take)
    gc.set_threshold(1)
    try:
        blocks = pool.get_new_blocks(100)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(take)
    handed_out = ids(blocks) + taken
    assert len(set(handed_out)) == len(handed_out)
    assert pool.get_num_free_blocks() == 199 - len(handed_out)
    assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in handed_out)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the collector waits for the call to end"
)
def test_blocks_that_are_taken_meanwhile_are_missing(make: MakePool) -> None:
    pool = make(200)
    taken: list[int] = []

    def take(phase: str, info: object) -> None:
        if phase == "start" and not taken:
            taken.extend(pool.get_new_block_ids(150).tolist())

    threshold = gc.get_threshold()
    try:
        with pytest.raises(NoFreeBlocksError, match="49 are free"):
            gc.callbacks.append(take)  # here, for the call to be what it interrupts
            gc.set_threshold(1)
            pool.get_new_blocks(100)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(take)
    assert len(taken) == 150
    assert pool.get_num_free_blocks() == 49


def test_a_view_that_is_asked_for_while_it_is_made_is_made_once(
    pool: BlockPool,
) -> None:
    views: list[KVCacheBlock] = []

    def ask(phase: str, info: object) -> None:
        views.append(pool.blocks[3])

    threshold = gc.get_threshold()
    gc.callbacks.append(ask)
    gc.set_threshold(1)
    try:
        views.append(pool.blocks[3])
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(ask)
    assert all(view is views[0] for view in views)
    assert pool.blocks[3] is views[0]


# -- check ------------------------------------------------------------------------


def test_check_of_a_sound_pool_says_nothing(pool: BlockPool) -> None:
    assert pool.check() is None
    pool.free_blocks(cached(pool, 1, 2))
    assert pool.check() is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("next_free_block", 5),
        ("prev_free_block", 5),
        ("next_free_block", -2),
        ("next_free_block", 100),
        ("ref_cnt", 1),
        ("ref_cnt", -1),
        ("flags", 1),
        ("flags", 64),
    ],
)
def test_check_finds_a_damaged_free_block(field: str, value: int) -> None:
    # The array is read-only: damage takes another way to the same memory.
    printed = run_apart(f"""
import ctypes
pool = BlockPool(8, True, 4)
rows = pool.blocks.as_array()
offset = rows.dtype.fields[{field!r}][1]
kind = ctypes.c_uint8 if {field!r} == "flags" else ctypes.c_int32
address = rows.__array_interface__["data"][0] + 3 * 64 + offset
pool.check()
kind.from_address(address).value = {value}
try:
    pool.check()
except AssertionError as error:
    print("found", error)
""")
    assert printed.startswith("found")
    assert "3" in printed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("next_copy", 4),
        ("next_copy", 100),
        ("prev_copy", 7),
        ("block_hash", 255),
        ("block_hash_len", 0),
        ("flags", 0),
        ("ref_cnt", 0),
    ],
)
def test_check_finds_a_damaged_cached_block(field: str, value: int) -> None:
    printed = run_apart(f"""
import ctypes
pool = BlockPool(8, True, 4)
ids = pool.get_new_block_ids(3)
pool.cache_block_ids(ids, [b"x" * 32, b"x" * 32, b"y" * 32])
rows = pool.blocks.as_array()
offset = rows.dtype.fields[{field!r}][1]
small = {field!r} in ("flags", "block_hash", "block_hash_len")
kind = ctypes.c_uint8 if small else ctypes.c_int32
address = rows.__array_interface__["data"][0] + 1 * 64 + offset
pool.check()
kind.from_address(address).value = {value}
try:
    pool.check()
except AssertionError as error:
    print("found", error)
""")
    assert printed.startswith("found")
