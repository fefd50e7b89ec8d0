"""Faults that users of LLM engines met in the field, as what a pool does instead.

Each docstring begins with the number of its case. After every step of a case the
invariants I1 to I5 are proved twice, by `check()` and by a walk over the objects (I6,
that a refused call changes nothing, by `refused`), and where no content is held twice
the events so far are replayed (I7): they name what lookups find.

Case B98 is about the statistics of requests, which a pool does not keep.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import pairwise, permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from pools import (
    UNIT,
    cached,
    full_request_of,
    hash_of,
    hit,
    ids,
    key_of,
    refused,
    walk,
)

from kvcache import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheMetricsCollector,
    NoFreeBlocksError,
)

MakePool = Callable[..., "ProvenPool"]


class ProvenPool(BlockPool):
    """A pool that proves its invariants after each step, also one that fails."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken: list[Any] = []
        self.held_copies = False

    def take_events(self) -> list[Any]:
        events = super().take_events()
        self.taken += events
        return events

    def prove(self) -> None:
        self.check()
        queue = self.free_block_queue
        ring = [queue.fake_free_list_head]
        while ring[-1] is not queue.fake_free_list_tail:
            ring.append(ring[-1].next_free_block)
        for before, after in pairwise(ring):
            assert after.prev_free_block is before
        free = ids(ring[1:-1])
        used = [block.block_id for block in self.blocks if block.ref_cnt > 0]
        assert self.get_num_free_blocks() == len(free) == len(set(free))  # I1
        unused = [b.block_id for b in self.blocks if b.ref_cnt == 0 and not b.is_null]
        assert sorted(free) == unused  # I2
        assert all(block.ref_cnt >= 0 for block in self.blocks)  # I3
        keys = self.keys_by_block()
        entries = [(key, block_id) for block_id in keys for key in keys[block_id]]
        index = self.cached_block_hash_to_block
        assert all(index.contain(key, block_id) for key, block_id in entries)  # I4
        present = {key for key, _ in entries}
        assert len(index) == len(present)  # I4
        assert len(used) + len(free) + 1 == self.num_gpu_blocks  # I5
        # Stock's events lose track of content that several blocks hold (B75).
        self.held_copies |= len(entries) > len(present)
        if self.enable_kv_cache_events and not self.held_copies:
            seen = replayed([*self.taken, *self.kv_event_queue])
            assert seen == {external(key) for key in present}  # I7

    def keys_by_block(self) -> dict[int, set[bytes]]:
        further = self.cached_block_hashes_by_block
        return {
            block.block_id: {block.block_hash, *further.get(block.block_id, ())}
            for block in self.blocks
            if block.block_hash is not None
        }


def proving(name: str) -> Callable[..., Any]:
    """The method of that name, and a proof behind it."""

    def method(self: ProvenPool, *args: Any, **options: Any) -> Any:
        try:
            return getattr(BlockPool, name)(self, *args, **options)
        finally:
            self.prove()

    return method


for _name in [
    "cache_block_ids",
    "cache_full_blocks",
    "cache_partial_block",
    "evict_block_ids",
    "evict_blocks",
    "free_block_ids",
    "free_blocks",
    "get_new_block_ids",
    "get_new_blocks",
    "reset_prefix_cache",
    "touch",
    "touch_block_ids",
]:
    setattr(ProvenPool, _name, proving(_name))


def external(key: bytes) -> tuple[int, int]:
    """How events name a key: the end of its hash, and its group."""
    return int.from_bytes(key[:-4][-8:], "big"), int.from_bytes(key[-4:], "big")


def replayed(events: Iterable[Any]) -> set[tuple[int, int]]:
    """What a listener to these events takes to be in the cache."""
    present: set[tuple[int, int]] = set()
    for event in events:
        if isinstance(event, BlockStored):
            present |= {(one, event.group_idx) for one in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            present -= {(one, event.group_idx) for one in event.block_hashes}
        else:
            present.clear()
    return present


def told(events: Iterable[Any]) -> list[tuple[str, list[int]]]:
    """Events in short: their class, and the hashes they name."""
    return [
        (type(event).__name__, list(getattr(event, "block_hashes", ())))
        for event in events
    ]


def event_hash(number: int) -> int:
    """How events name the content of that number."""
    return external(key_of(number))[0]


@pytest.fixture
def make() -> MakePool:
    def make(
        num_blocks: int = 8,
        caching: bool = True,
        *,
        events: bool = True,
        collector: Any = None,
    ) -> ProvenPool:
        return ProvenPool(num_blocks, caching, UNIT, events, collector)

    return make


@pytest.fixture
def pool(make: MakePool) -> ProvenPool:
    return make()


def cache(pool: BlockPool, block: KVCacheBlock, number: int, **options: Any) -> None:
    """Cache a block as the first of a request."""
    request = full_request_of(number, unit=pool.hash_block_size)
    pool.cache_full_blocks(request, [block], 0, 1, pool.hash_block_size, 0)


def free_by_objects(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    pool.free_blocks(blocks)


def free_by_ids(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    pool.free_block_ids(ids(blocks))


both_faces = pytest.mark.parametrize("free", [free_by_objects, free_by_ids])
caching_on_and_off = pytest.mark.parametrize("caching", [True, False])

# -- A. Free queue, reference counts, capacity ---------------------------------------


@both_faces
@caching_on_and_off
def test_a_block_listed_twice_in_one_free_needs_two_references(
    make: MakePool, caching: bool, free: Callable[..., None]
) -> None:
    """B01: the free count rose by two for one block, whose count went to -1."""
    pool = make(8, caching)
    (block,) = pool.get_new_blocks(1)
    with refused(ValueError, pool, match="block 1 "):
        free(pool, [block, block])
    assert block.ref_cnt == 1
    assert pool.get_num_free_blocks() == 6
    pool.touch([block])
    free(pool, [block, block])
    assert block.ref_cnt == 0
    assert walk(pool).count(block.block_id) == 1
    assert pool.get_num_free_blocks() == 7


@both_faces
@caching_on_and_off
def test_a_block_is_freed_once_and_the_second_free_is_refused(
    make: MakePool, caching: bool, free: Callable[..., None]
) -> None:
    """B03: the second free was silent, and the count of -1 was met far from it."""
    pool = make(8, caching)
    (block,) = pool.get_new_blocks(1)
    free(pool, [block])
    with refused(ValueError, pool, match="block 1 .*ref_cnt 0"):
        free(pool, [block])
    assert sorted(ids(pool.get_new_blocks(7))) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("get", ["get_new_blocks", "get_new_block_ids"])
def test_a_negative_number_of_blocks_is_refused_and_the_count_stays(
    pool: ProvenPool, get: str
) -> None:
    """B05: the count grew by the blocks that were not there."""
    with refused(ValueError, pool, match="-3"):
        getattr(pool, get)(-3)
    assert pool.get_num_free_blocks() == 7
    with refused(NoFreeBlocksError, pool, match="9"):
        getattr(pool, get)(9)


def test_a_queue_pops_no_negative_number_of_blocks(pool: ProvenPool) -> None:
    """B05: the count grew by the blocks that were not there."""
    queue = FreeKVCacheBlockQueue([KVCacheBlock(1), KVCacheBlock(2)])
    for some in (queue, pool.free_block_queue):
        before = some.num_free_blocks
        with pytest.raises(ValueError):
            some.popleft_n(-1)
        assert some.num_free_blocks == before == len(some.get_all_free_blocks())


@both_faces
def test_a_pinned_block_is_in_no_queue_and_an_unpinned_one_is_there_once(
    pool: ProvenPool, free: Callable[..., None]
) -> None:
    """B09: a block that was pinned while queued was queued again, then given twice."""
    (block,) = cached(pool, 1)
    free(pool, [block])
    for _ in range(3):
        assert hit(pool, 1) == block.block_id
        pool.touch([block])
        assert block.block_id not in walk(pool)
        free(pool, [block])
        assert walk(pool).count(block.block_id) == 1
    assert sorted(ids(pool.get_new_blocks(7))) == [1, 2, 3, 4, 5, 6, 7]


@caching_on_and_off
def test_ten_thousand_requests_leak_no_block(caching: bool) -> None:
    """B12: one block leaked with each finished request."""
    pool = BlockPool(32, caching, UNIT)
    random = Random(12)
    for number in range(10_000):
        num_tokens = random.randint(1, 40)
        table = pool.get_new_blocks(-(-num_tokens // UNIT))
        for _ in range(random.randint(0, 9)):  # decoding crosses block edges
            num_tokens += 1
            if num_tokens > len(table) * UNIT:
                table += pool.get_new_blocks(1)
        if caching and num_tokens >= UNIT:
            contents = [hash_of(number * 100 + i) for i in range(num_tokens // UNIT)]
            request = SimpleNamespace(block_hashes=contents)
            pool.cache_full_blocks(request, table, 0, len(contents), UNIT, 0)
        assert pool.get_num_free_blocks() == 31 - len(table)
        pool.free_blocks(reversed(table))
        assert pool.get_num_free_blocks() == 31
        pool.check()


def admit(
    pool: BlockPool, hits: list[KVCacheBlock], num_new: int
) -> list[KVCacheBlock] | None:
    """How a caller admits a request: first the test of capacity, then the hits.

    Hits that nobody uses stand in the free queue and are not for allocation.
    """
    idle_hits = sum(1 for block in hits if block.ref_cnt == 0)
    if num_new > pool.get_num_free_blocks() - idle_hits:
        return None
    pool.touch(hits)
    return hits + pool.get_new_blocks(num_new)


def test_a_request_that_does_not_fit_leaves_its_hits_untouched(make: MakePool) -> None:
    """B14: hits stayed touched when the test of capacity failed behind them."""
    pool = make(6)
    hits = cached(pool, 1, 2)
    pool.free_blocks(reversed(hits))
    pool.get_new_blocks(2)
    before = walk(pool)
    for _ in range(50):
        assert admit(pool, hits, 3) is None
        assert [block.ref_cnt for block in hits] == [0, 0]
        assert pool.get_num_free_blocks() == 3
        assert walk(pool) == before


def test_a_caller_that_touched_its_hits_first_can_give_them_back(
    make: MakePool,
) -> None:
    """B14: hits stayed touched when the allocation behind them failed."""
    pool = make(6)
    hits = cached(pool, 1, 2)
    pool.free_blocks(reversed(hits))
    pool.get_new_blocks(2)
    for _ in range(50):
        pool.touch(hits)
        with refused(NoFreeBlocksError, pool):
            pool.get_new_blocks(3)
        pool.free_blocks(reversed(hits))
        assert [block.ref_cnt for block in hits] == [0, 0]
        assert pool.get_num_free_blocks() == 3
        assert [hit(pool, 1), hit(pool, 2)] == ids(hits)


def test_idle_hits_of_a_request_are_not_free_for_its_new_blocks(
    make: MakePool,
) -> None:
    """B15: a request's own hits were counted as free, and allocation failed midway."""
    pool = make(6)
    hits = cached(pool, 1, 2)
    pool.free_blocks(reversed(hits))
    assert pool.get_num_free_blocks() == 5
    with refused(NoFreeBlocksError, pool):
        pool.get_new_blocks(6)
    assert admit(pool, hits, 4) is None
    assert pool.get_num_free_blocks() == 5
    table = admit(pool, hits, 3)
    assert table is not None
    assert len(set(ids(table))) == 5
    assert pool.get_num_free_blocks() == 0


def test_hits_in_use_take_nothing_from_the_free_blocks(make: MakePool) -> None:
    """B15: hits that others use must not be subtracted."""
    pool = make(6)
    hits = cached(pool, 1, 2)
    table = admit(pool, hits, 3)
    assert table is not None
    assert [block.ref_cnt for block in table] == [2, 2, 1, 1, 1]


def test_an_allocation_for_several_groups_is_whole_or_not_at_all(
    make: MakePool,
) -> None:
    """B17: blocks taken before a later step failed belonged to nobody."""
    pool = make(6)
    pool.free_blocks(cached(pool, 1, 2, 3, 4, 5))
    pool.take_events()
    for get in (pool.get_new_blocks, pool.get_new_block_ids):
        with refused(NoFreeBlocksError, pool):
            get(3 + 3)
        assert pool.get_num_free_blocks() == 5
        assert [hit(pool, number) for number in range(1, 6)] == [1, 2, 3, 4, 5]
        assert pool.take_events() == []


def test_what_a_first_group_was_given_can_be_given_back(make: MakePool) -> None:
    """B17: blocks taken before a later step failed belonged to nobody."""
    pool = make(6)
    before = walk(pool)
    first = pool.get_new_blocks(3)
    with refused(NoFreeBlocksError, pool):
        pool.get_new_blocks(3)
    pool.free_blocks(first)
    assert walk(pool) == before


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 1_000_000])
def test_the_null_block_is_block_0_and_is_not_handed_out(num_blocks: int) -> None:
    """B24: the placeholder was whatever block came first, and 0 was lost."""
    pool = BlockPool(num_blocks, True, UNIT)
    for _ in range(2):
        assert pool.null_block.block_id == 0
        assert pool.null_block.is_null
        taken = pool.get_new_block_ids(num_blocks - 1)
        assert sorted(taken.tolist()) == list(range(1, num_blocks))
        pool.free_block_ids(taken)
        assert pool.reset_prefix_cache()
    pool.check()


def test_null_blocks_in_a_batch_are_skipped(pool: ProvenPool) -> None:
    """B25: tables with many placeholders were freed, touched and cached whole."""
    null = pool.null_block
    (block,) = pool.get_new_blocks(1)
    pool.touch([null])
    pool.touch_block_ids([0, 0])
    request = full_request_of(1, 2, 3)
    pool.cache_full_blocks(request, [null, null, block], 0, 3, UNIT, 0)
    assert [hit(pool, number) for number in (1, 2, 3)] == [None, None, block.block_id]
    pool.free_blocks([null] * 5 + [block])
    assert walk(pool) == [2, 3, 4, 5, 6, 7, 1]
    assert null.ref_cnt == 0
    assert null.block_hash is None


def test_evicting_the_null_block_does_nothing(pool: ProvenPool) -> None:
    """B25: the placeholder is named among the ids to evict."""
    cached(pool, 1)
    pool.evict_blocks({0})
    pool.evict_block_ids([0, 0])
    assert hit(pool, 1) == 1
    assert pool.null_block.ref_cnt == 0


def test_a_pool_of_one_block_has_none_to_use(make: MakePool) -> None:
    """B26: the placeholder silently takes the only block."""
    pool = make(1)
    assert pool.get_num_free_blocks() == 0
    usage = pool.get_usage()
    assert usage == 0.0
    assert type(usage) is float
    assert pool.get_new_blocks(0) == []
    assert pool.get_new_block_ids(0).tolist() == []
    with refused(NoFreeBlocksError, pool):
        pool.get_new_blocks(1)
    assert pool.reset_prefix_cache() is True


@pytest.mark.parametrize(
    ("num_blocks", "error"),
    [(0, ValueError), (-1, ValueError), ("8", TypeError), (True, TypeError)],
)
def test_a_pool_has_an_int_of_blocks_and_at_least_one(
    make: MakePool, num_blocks: Any, error: type[Exception]
) -> None:
    """B26: True was taken for one block."""
    with pytest.raises(error, match="num_gpu_blocks"):
        make(num_blocks)


# -- B. Hash map, stale reuse, eviction of content -----------------------------------


@pytest.mark.parametrize("get", ["get_new_blocks", "get_new_block_ids"])
def test_a_reused_block_does_not_answer_to_what_it_held(
    make: MakePool, get: str
) -> None:
    """B35: a later request with the old prompt was given another prompt's data."""
    pool = make(2)
    pool.free_blocks(cached(pool, 1))
    assert hit(pool, 1) == 1
    getattr(pool, get)(1)
    assert hit(pool, 1) is None
    cache(pool, pool.blocks[1], 2)
    assert hit(pool, 1) is None
    assert hit(pool, 2) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_block_takes_no_second_hash_of_as_many_tokens(
    make: MakePool, number: int
) -> None:
    """B37: a bare assertion; the same hash again is refused as another one is."""
    pool = make()
    (block,) = cached(pool, 1)
    pool.take_events()
    for error in (BlockStateError, ValueError, AssertionError):
        with refused(error, pool, match="block 1 "):
            cache(pool, block, number)
    with pytest.raises(BlockStateError) as caught:
        cache(pool, block, number)
    assert repr(block.block_hash) in str(caught.value)
    assert repr(hash_of(number)) in str(caught.value)
    assert hit(pool, 1) == 1
    assert pool.take_events() == []


def test_by_id_a_block_takes_no_second_hash_either(make: MakePool) -> None:
    """B37: a bare assertion for a block that carried a hash already."""
    pool = make()
    cached(pool, 1)
    pool.take_events()
    with refused(BlockStateError, pool, match="block 1 "):
        pool.cache_block_ids([2, 1], [hash_of(2), hash_of(1)])
    assert pool.take_events() == []


def test_a_hash_of_more_tokens_promotes_its_block(make: MakePool) -> None:
    """B37: unlike a second hash of as many tokens, this is no mistake."""
    pool = make()
    (block,) = cached(pool, 1)
    pool.cache_full_blocks(full_request_of(1, 2), [block], 0, 1, 2 * UNIT, 0)
    assert hit(pool, 1) is None
    assert hit(pool, 2) == 1
    assert told(pool.take_events()) == [
        ("BlockStored", [event_hash(1)]),
        ("BlockRemoved", [event_hash(1)]),
        ("BlockStored", [event_hash(2)]),
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("how", ["evicted", "reused"])
def test_copies_of_one_content_go_one_by_one(
    make: MakePool, order: tuple[int, ...], how: str
) -> None:
    """B38: a map of one block a hash dropped or hid the others."""
    pool = make(4)
    copies = pool.get_new_blocks(3)
    for block in copies:
        cache(pool, block, 1)
    left = list(copies)
    for place in order:
        assert hit(pool, 1) == left[0].block_id
        if how == "evicted":
            pool.evict_blocks({copies[place].block_id})
        else:
            pool.free_blocks([copies[place]])
            assert hit(pool, 1) == left[0].block_id
            assert pool.get_new_blocks(1) == [copies[place]]
        left.remove(copies[place])
    assert hit(pool, 1) is None


def test_a_superseded_partial_hash_that_is_cached_again_is_an_alias(
    make: MakePool,
) -> None:
    """B41: the third call registers the old boundary as a second key.

    Here vLLM 0.33 is followed, not the case, which wants the call to do nothing: the
    block does hold the shorter prefix. The key is announced again, and goes with the
    block's content.
    """
    pool = make()
    (block,) = pool.get_new_blocks(1)
    request = full_request_of(1, 2)
    pool.cache_partial_block(request, block, UNIT, 0, 2 * UNIT)
    pool.cache_full_blocks(request, [block], 0, 1, 2 * UNIT, 0)
    assert hit(pool, 1) is None
    assert pool.cache_partial_block(request, block, UNIT, 0, 2 * UNIT) == key_of(1)
    assert [hit(pool, 1), hit(pool, 2)] == [1, 1]
    assert block.block_hash == key_of(2)
    assert pool.cached_block_hashes_by_block == {1: {key_of(1)}}
    pool.evict_blocks({1})
    assert [hit(pool, 1), hit(pool, 2)] == [None, None]
    assert told(pool.take_events()) == [
        ("BlockStored", [event_hash(1)]),
        ("BlockRemoved", [event_hash(1)]),
        ("BlockStored", [event_hash(2)]),
        ("BlockStored", [event_hash(1)]),
        ("BlockRemoved", [event_hash(2)]),
        ("BlockRemoved", [event_hash(1)]),
    ]


def test_a_reset_is_refused_while_a_block_is_in_use_and_says_how_many(
    make: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    """B66: the refusal was easy to miss, and stale content lived on."""
    pool = make()
    blocks = cached(pool, 1, 2)
    pool.free_blocks(blocks[:1])
    pool.take_events()
    with caplog.at_level(logging.WARNING, "kvcache"):
        assert pool.reset_prefix_cache() is False
    assert "1 blocks are in use" in caplog.text
    in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    assert in_use == 1
    assert [hit(pool, 1), hit(pool, 2)] == [1, 2]
    assert pool.take_events() == []


class CollectorThatCountsResets(KVCacheMetricsCollector):
    resets = 0

    def reset(self) -> None:
        super().reset()
        self.resets += 1


def test_a_reset_forgets_all_content_and_says_so_once(make: MakePool) -> None:
    """B66: after the last block was freed the reset must be complete."""
    collector = CollectorThatCountsResets()
    pool = make(collector=collector)
    blocks = cached(pool, 1, 2)
    assert pool.reset_prefix_cache() is False
    assert collector.resets == 0
    pool.free_blocks(reversed(blocks))
    pool.take_events()
    assert pool.reset_prefix_cache() is True
    assert collector.resets == 1
    assert [hit(pool, 1), hit(pool, 2)] == [None, None]
    assert all(block.block_hash is None for block in pool.blocks)
    assert walk(pool) == [3, 4, 5, 6, 7, 2, 1]
    assert pool.get_usage() == 0.0
    assert pool.take_events() == [AllBlocksCleared()]


# -- C. Eviction order ---------------------------------------------------------------


def test_of_blocks_freed_together_the_tail_goes_first(make: MakePool) -> None:
    """B69: the head of a prompt was evicted and its tail could not be reached."""
    pool = make(4)
    blocks = cached(pool, 1, 2, 3)
    pool.free_blocks(reversed(blocks))
    assert pool.get_new_blocks(1) == [blocks[2]]
    assert [hit(pool, 1), hit(pool, 2), hit(pool, 3)] == [1, 2, None]


def test_blocks_freed_tail_first_stand_tail_first_behind_the_others(
    pool: ProvenPool,
) -> None:
    """B69: the order of eviction is the order of the queue."""
    pool.free_blocks(reversed(cached(pool, 1, 2, 3)))
    assert walk(pool) == [4, 5, 6, 7, 3, 2, 1]


def test_a_burst_of_uncached_blocks_evicts_no_cached_one(make: MakePool) -> None:
    """B70: partial blocks entered at the back and emptied the cache."""
    pool = make(6)
    pool.free_blocks(reversed(cached(pool, 1, 2)))
    used = set()
    for _ in range(10):
        (block,) = pool.get_new_blocks(1)
        used.add(block.block_id)
        pool.free_blocks([block])
    assert len(used) == 1
    assert [hit(pool, 1), hit(pool, 2)] == [1, 2]


def test_of_a_mixed_batch_uncached_blocks_go_to_the_front_and_cached_to_the_back(
    pool: ProvenPool,
) -> None:
    """B71: each kind keeps the order in which it was given."""
    cached_one, uncached_one, cached_two, uncached_two = pool.get_new_blocks(4)
    cache(pool, cached_one, 1)
    cache(pool, cached_two, 2)
    pool.free_blocks([cached_one, uncached_one, cached_two, uncached_two])
    assert walk(pool) == [2, 4, 5, 6, 7, 1, 3]


def test_with_caching_off_every_freed_block_goes_to_the_front(make: MakePool) -> None:
    """B71: then the order given is the order of the next allocation."""
    pool = make(8, caching=False)
    blocks = pool.get_new_blocks(4)
    cache(pool, blocks[0], 1)
    given = [blocks[2], blocks[0], blocks[3], blocks[1]]
    pool.free_blocks(given)
    assert walk(pool) == [3, 1, 4, 2, 5, 6, 7]
    assert pool.get_new_blocks(4) == given


# -- D. Events -----------------------------------------------------------------------


def test_each_copy_of_a_content_is_announced_and_so_is_the_loss_of_each(
    make: MakePool,
) -> None:
    """B75: stock's stream, kept event for event.

    A listener that wants I7 counts: the content is there as long as it was stored more
    often than removed.
    """
    pool = make()
    first, second = pool.get_new_blocks(2)
    cache(pool, first, 1)
    cache(pool, second, 1)
    stored, removed = [event_hash(1)], ("BlockRemoved", [event_hash(1)])
    assert told(pool.take_events()) == [("BlockStored", stored)] * 2
    pool.evict_blocks({first.block_id})
    assert hit(pool, 1) == second.block_id
    assert told(pool.take_events()) == [removed]
    pool.evict_blocks({second.block_id})
    assert hit(pool, 1) is None
    assert told(pool.take_events()) == [removed]


@pytest.mark.parametrize(
    ("num_cached", "num_full", "parent"),
    [(0, 1, None), (1, 2, 1), (2, 4, 2), (3, 4, 3)],
)
def test_the_parent_of_stored_blocks_is_the_block_before_them_in_the_prompt(
    make: MakePool, num_cached: int, num_full: int, parent: int | None
) -> None:
    """B76: the parent was the block emitted before, or unset."""
    pool = make()
    cached(pool, 9)  # what was emitted before
    pool.take_events()
    table = pool.get_new_blocks(4)
    request = full_request_of(1, 2, 3, 4)
    pool.cache_full_blocks(request, table, num_cached, num_full, UNIT, 0)
    (event,) = pool.take_events()
    assert event.parent_block_hash == (None if parent is None else event_hash(parent))
    new = range(num_cached + 1, num_full + 1)
    assert event.block_hashes == [event_hash(number) for number in new]


@pytest.mark.parametrize("skipped", ["null", "masked"])
def test_tokens_of_an_event_span_the_blocks_that_were_skipped(
    make: MakePool, skipped: str
) -> None:
    """B77: stock's stream, kept as it is.

    The tokens run from the first block to the last, hashes and extra keys are those of
    the blocks that were cached, and are aligned with each other.
    """
    pool = make()
    first, second = pool.get_new_blocks(2)
    table, mask = [pool.null_block, first, pool.null_block, second], None
    if skipped == "masked":
        table = [*pool.get_new_blocks(1), first, *pool.get_new_blocks(1), second]
        mask = [False, True, False, True]
    image = SimpleNamespace(
        identifier="image", mm_position=SimpleNamespace(offset=3 * UNIT, length=UNIT)
    )
    request = full_request_of(1, 2, 3, 4, mm_features=[image], cache_salt="salt")
    pool.cache_full_blocks(request, table, 0, 4, UNIT, 0, mask)
    (event,) = pool.take_events()
    assert event.token_ids == request.all_token_ids
    assert event.block_hashes == [event_hash(2), event_hash(4)]
    assert event.extra_keys == [None, (("image", 0),)]
    assert event.parent_block_hash is None


def test_only_a_reset_that_was_done_is_announced(make: MakePool) -> None:
    """B80: lookups and refused resets announced that the cache was cleared."""
    pool = make()
    blocks = cached(pool, 1)
    pool.take_events()
    for _ in range(100):
        hit(pool, 1)
        hit(pool, 2)
    assert [pool.reset_prefix_cache() for _ in range(3)] == [False] * 3
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]


def test_with_events_off_a_reset_is_not_announced(make: MakePool) -> None:
    """B80: a pool that records no events has none to give."""
    pool = make(events=False)
    assert pool.reset_prefix_cache()
    assert pool.kv_event_queue == []
    assert pool.take_events() == []


def test_events_wait_in_order_until_they_are_taken_and_are_taken_once() -> None:
    """B83: events that nobody takes are kept, all of them."""
    pool = BlockPool(2, True, UNIT, enable_kv_cache_events=True)
    for number in range(50_000):
        pool.cache_block_ids([1], [number.to_bytes(8, "big")])
        pool.evict_block_ids([1])
    events = pool.take_events()
    assert pool.take_events() == []
    assert [event.block_hashes for event in events] == [
        [number] for number in range(50_000) for _ in ("stored", "removed")
    ]
    assert {type(event) for event in events[::2]} == {BlockStored}
    assert {type(event) for event in events[1::2]} == {BlockRemoved}


# -- F. Arguments and limits ---------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error"),
    [(-1, ValueError), (8, ValueError), (2**31, ValueError), ("3", TypeError)],
)
@pytest.mark.parametrize("form", [set, list])
def test_an_id_that_is_no_blocks_evicts_nothing(
    make: MakePool, bad: Any, error: type[Exception], form: type
) -> None:
    """B96: -1 evicted the last block."""
    pool = make()
    cached(pool, 1, 2, 3, 4, 5, 6, 7)
    with refused(error, pool, match=str(bad)):
        pool.evict_blocks(form([1, bad]))
    assert hit(pool, 7) == 7


@pytest.mark.parametrize("named", [{3}, [3, 3], {3, 0}, {3, 6}])
def test_evicting_a_block_again_or_an_uncached_one_does_nothing(
    make: MakePool, named: Any
) -> None:
    """B96: ids come from workers, with repeats and blocks that hold nothing."""
    pool = make()
    cached(pool, 1, 2, 3)
    pool.take_events()
    pool.evict_blocks(named)
    pool.evict_blocks(named)
    assert [hit(pool, number) for number in (1, 2, 3)] == [1, 2, None]
    assert told(pool.take_events()) == [("BlockRemoved", [event_hash(3)])]


@pytest.mark.parametrize("num_blocks", [2**31 - 1, 2**31, 2**63, 2**64])
def test_a_pool_of_more_blocks_than_ids_is_refused(
    make: MakePool, num_blocks: int
) -> None:
    """B97: sizes beyond 31 bits must not wrap."""
    with pytest.raises(ValueError, match=str(num_blocks)):
        make(num_blocks)


def test_a_slot_computed_from_a_block_id_does_not_wrap() -> None:
    """B97: block id times tokens a block passed 2**31."""
    pool = BlockPool(200_000, True, UNIT)
    pool.get_new_block_ids(199_998)
    (block,) = pool.get_new_blocks(1)
    assert block.block_id * 16_384 + 16_383 == 199_999 * 16_384 + 16_383 > 2**31
    assert type(block.block_id) is int


def test_a_prefix_of_more_tokens_than_31_bits_count_is_refused() -> None:
    """B97: the number of tokens that a hash covers is such an index."""
    pool = BlockPool(3, True, 16_384)
    first, second = pool.get_new_blocks(2)
    request = SimpleNamespace(block_hashes=[hash_of(1)] * 131_072)
    table = [pool.null_block] * 131_070 + [first, second]
    pool.cache_full_blocks(request, table, 131_070, 131_071, 16_384, 0)
    assert first.block_hash_num_tokens == 131_071 * 16_384 == 2**31 - 16_384
    with refused(ValueError, pool, match="131072"):
        pool.cache_full_blocks(request, table, 131_071, 131_072, 16_384, 0)
    assert second.block_hash is None


@caching_on_and_off
def test_a_block_of_another_pool_is_freed_to_that_pool(
    make: MakePool, caching: bool
) -> None:
    """B102: one pool's block in another's hands."""
    ours, theirs = make(8, caching), make(8, caching)
    (block,) = theirs.get_new_blocks(1)
    held = ours.get_new_blocks(2)
    ours.free_blocks([block])
    assert block.ref_cnt == 0
    assert block.pool is theirs
    assert theirs.get_num_free_blocks() == 7
    assert ours.get_num_free_blocks() == 5
    assert [one.ref_cnt for one in held] == [1, 1]
    with refused(ValueError, ours, theirs, match="block 1 "):
        ours.free_blocks([held[0], block])


def test_a_block_of_another_pool_is_not_touched(make: MakePool) -> None:
    """B102: one pool's block in another's hands."""
    ours, theirs = make(), make()
    with refused(ValueError, ours, theirs, match="block 3 "):
        ours.touch([ours.blocks[1], theirs.blocks[3]])
