"""`PrefixCachingBlockAllocator`: full blocks' content is found again.

What it does call for call is compared in `test_allocator_state_machine`; here each rule
is told once, and everything that can be passed to it wrongly is.
"""

import copy
import gc
import logging
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from doubles import Index, refused, snapshot

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import NaiveBlock, PrefixCachingBlock
from kvcache.prefix_caching.evictor import BlockMetaData, EvictionPolicy, Evictor
from kvcache.prefix_caching.interfaces import BlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

SIZE = 2
Blocks = list[PrefixCachingBlock]


@pytest.fixture
def allocator() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(6, SIZE)


def tokens_of(*contents: int) -> list[list[int]]:
    return [[content] * SIZE for content in contents]


def sequence(
    allocator: PrefixCachingBlockAllocator, *contents: int, extra: int | None = None
) -> Blocks:
    """Full blocks behind each other."""
    return allocator.allocate_immutable_blocks(None, tokens_of(*contents), extra)


def partial(allocator: PrefixCachingBlockAllocator, *tokens: int) -> PrefixCachingBlock:
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids(tokens)
    return block


def free(allocator: PrefixCachingBlockAllocator, blocks: Blocks) -> None:
    """Tail first."""
    for block in reversed(blocks):
        allocator.free(block)


def ids(blocks: Blocks) -> list[int | None]:
    return [block.block_id for block in blocks]


def hashes(blocks: Blocks) -> list[int]:
    return [block.content_hash for block in blocks if block.content_hash is not None]


def take(allocator: PrefixCachingBlockAllocator, count: int) -> list[int | None]:
    return [allocator.allocate_mutable_block(None).block_id for _ in range(count)]


# -- allocate ------------------------------------------------------------------------


def test_new_blocks_go_in_the_order_of_their_ids() -> None:
    allocator = PrefixCachingBlockAllocator(3, SIZE, [7, 2, 9])
    assert ids(sequence(allocator, 1, 2)) == [7, 2]
    assert allocator.allocate_mutable_block(None).block_id == 9


def test_blocks_stand_behind_each_other(allocator: PrefixCachingBlockAllocator) -> None:
    one, two = sequence(allocator, 1, 2)
    three = allocator.allocate_immutable_block(two, [3, 3], 5)
    four = allocator.allocate_mutable_block(three, 6)
    assert [b.prev_block for b in (one, two, three, four)] == [None, one, two, three]
    assert [b.extra_hash for b in (one, two, three, four)] == [None, None, 5, 6]
    assert all(b._allocator is allocator for b in (one, two, three, four))
    assert all(b.block_size == SIZE for b in (one, two, three, four))
    assert allocator.allocate_immutable_blocks(four, []) == []


def test_full_blocks_with_the_same_prefix_share_physical_ones(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    assert ids(sequence(allocator, 1, 2, 3)) == [0, 1, 2]
    assert ids(sequence(allocator, 1, 2, 4)) == [0, 1, 3]
    assert ids(sequence(allocator, 2)) == [4]
    assert allocator.get_num_free_blocks() == 1


def test_content_is_told_apart_by_its_extra_hash(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    found = [sequence(allocator, 1, extra=extra) for extra in (None, 0, 1, None, 1)]
    assert [ids(one) for one in found] == [[0], [1], [2], [0], [2]]


def test_a_block_that_was_cached_already_is_computed(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    assert [block.computed for block in sequence(allocator, 1, 2)] == [False, False]
    assert [block.computed for block in sequence(allocator, 1, 3)] == [True, False]


def test_a_mutable_block_is_empty_and_its_own(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one, two = (allocator.allocate_mutable_block(None) for _ in range(2))
    assert ids([one, two]) == [0, 1]
    assert one.token_ids == []
    assert one.content_hash is None
    assert not one.computed


def test_blocks_without_content_go_first_last_freed_first(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    free(allocator, sequence(allocator, 1))
    one, two = partial(allocator, 1), partial(allocator, 1)
    allocator.free(one)
    allocator.free(two)
    assert take(allocator, 6) == [2, 1, 3, 4, 5, 0]


def test_without_a_free_block_only_cached_content_is_allocated(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    sequence(allocator, *range(6))
    with refused(NoFreeBlocksError, "1 blocks are needed, 0 of 6", allocator):
        allocator.allocate_mutable_block(None)
    with refused(NoFreeBlocksError, "1 blocks are needed, 0 of 6", allocator):
        sequence(allocator, 0, 1, 7)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        sequence(allocator, 7)
    assert ids(sequence(allocator, *range(6))) == list(range(6))


def test_an_immutable_block_is_full_and_behind_a_full_one(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    for tokens in ([], [1]):
        with refused(BlockStateError, "needs 2 tokens", allocator):
            allocator.allocate_immutable_block(None, tokens)
    with refused(BlockStateError, "do not fit", allocator):
        allocator.allocate_immutable_block(None, [1, 2, 3])
    before = partial(allocator, 1)
    with refused(BlockStateError, "a full block before it", allocator):
        allocator.allocate_immutable_block(before, [1, 1])


def test_a_last_block_that_is_not_full_is_mutable(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    full, part = allocator.allocate_blocks(None, [[1, 1], [2]], 7)
    assert part.prev_block is full
    assert hashes([full, part]) == hashes(sequence(allocator, 1, extra=7))
    part.append_token_ids([2])
    assert ids(sequence(allocator, 1, 2, extra=7)) == ids([full, part]) == [0, 1]
    assert ids(allocator.allocate_blocks(None, [[1, 1], []], 7)) == [0, 2]
    assert allocator.allocate_blocks(part, []) == []


def test_only_the_last_block_may_have_room(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    with refused(BlockStateError, "is not the last", allocator):
        allocator.allocate_blocks(None, [[1, 1], [2], [3]])
    before = partial(allocator, 1)
    with refused(BlockStateError, "is not the last", allocator):
        allocator.allocate_blocks(before, [[1, 1], [2]])
    with refused(BlockStateError, "do not fit", allocator):
        allocator.allocate_blocks(None, [[1, 1], [2, 2, 2]])


def test_a_batch_with_a_tail_that_does_not_fit_takes_nothing(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    with refused(NoFreeBlocksError, "7 blocks are needed, 6 of 6", allocator):
        allocator.allocate_blocks(None, [*tokens_of(*range(6)), [1]])


# -- free and evict ------------------------------------------------------------------


def test_a_freed_block_holds_no_physical_one_and_its_content_stays_cached(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = sequence(allocator, 1, 2)
    free(allocator, blocks)
    assert ids(blocks) == [None, None]
    assert allocator.get_num_free_blocks() == 6
    assert all(allocator.is_block_cached(block) for block in blocks)
    again = sequence(allocator, 1, 2)
    assert ids(again) == [0, 1]
    assert [block.computed for block in again] == [True, True]


def test_evicted_content_is_gone(allocator: PrefixCachingBlockAllocator) -> None:
    blocks = sequence(allocator, 1, 2)
    free(allocator, blocks)
    assert take(allocator, 5) == [2, 3, 4, 5, 1]
    assert [allocator.is_block_cached(block) for block in blocks] == [True, False]
    assert allocator.find_cached_blocks_prefix(hashes(blocks)) == hashes(blocks[:1])
    allocator.check()


def test_the_least_recently_accessed_goes_first_then_the_deepest_then_the_lowest_id(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = (
        sequence(allocator, 1, 2) + sequence(allocator, 3) + sequence(allocator, 4, 5)
    )
    allocator.mark_blocks_as_accessed([0, 1, 2], 5.0)
    allocator.mark_blocks_as_accessed([3, 4], 4.0)
    free(allocator, blocks)
    assert take(allocator, 6) == [5, 4, 3, 1, 0, 2]


def test_a_free_cached_block_can_be_accessed_too(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    free(allocator, sequence(allocator, 1, 2))
    allocator.mark_blocks_as_accessed([1], 9.0)
    allocator.mark_blocks_as_accessed([1, 1], 3.0)
    assert take(allocator, 6) == [2, 3, 4, 5, 0, 1]


def test_an_access_is_forgotten_when_a_block_is_let_go_of(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    free(allocator, sequence(allocator, 1, 2))
    allocator.mark_blocks_as_accessed([0], 9.0)
    free(allocator, sequence(allocator, 1, 2))
    data = allocator.evictor.free_table
    assert [data[block].last_accessed for block in (0, 1)] == [-1, -1]


def test_a_block_that_is_shared_is_free_when_the_last_lets_go(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one, two = sequence(allocator, 1), sequence(allocator, 1)
    free(allocator, one)
    assert allocator.get_num_free_blocks() == 5
    free(allocator, two)
    assert allocator.get_num_free_blocks() == 6


def test_it_makes_no_difference_whether_the_object_is_kept(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one, two = sequence(allocator, 1, 2)
    allocator.free(one, keep_block_object=True)
    allocator.free(two, False)
    assert [one.token_ids, two.token_ids] == [[1, 1], [2, 2]]


def test_a_block_is_not_freed_twice(allocator: PrefixCachingBlockAllocator) -> None:
    sequence(allocator, 1)
    for block in [*sequence(allocator, 1), partial(allocator, 1)]:
        allocator.free(block)
        with refused(BlockStateError, "was freed", allocator):
            allocator.free(block)


def test_an_older_view_of_a_block_does_not_turn_into_another(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """vLLM makes the freed object another sequence's."""
    old = partial(allocator, 1)
    allocator.free(old)
    new = partial(allocator, 2)
    assert new.block_id == 0
    assert [old.block_id, old.token_ids] == [None, [1]]


# -- fork, copy-on-write, promotion --------------------------------------------------


def test_a_fork_shares_all_physical_blocks(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = sequence(allocator, 1, 2)
    blocks.append(allocator.allocate_mutable_block(blocks[-1], 7))
    blocks[-1].append_token_ids([3])
    forked = allocator.fork(blocks[-1])
    assert ids(forked) == ids(blocks)
    assert hashes(forked) == hashes(blocks)
    assert [one.token_ids for one in forked] == [one.token_ids for one in blocks]
    assert [one.extra_hash for one in forked] == [None, None, 7]
    assert [one.computed for one in forked] == [False] * 3
    assert [one.prev_block for one in forked] == [None, *forked[:-1]]
    assert allocator._refcounter._refcounts == {0: 2, 1: 2, 2: 2, 3: 0, 4: 0, 5: 0}
    free(allocator, blocks)
    assert allocator.get_num_free_blocks() == 3
    free(allocator, forked)
    assert allocator.get_num_free_blocks() == 6
    allocator.check()


def test_a_fork_outlives_the_sequence_it_was_forked_from(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = sequence(allocator, 1, 2)
    forked = allocator.fork(blocks[-1])
    free(allocator, blocks)
    del blocks
    gc.collect()
    assert [block.token_ids for block in forked] == tokens_of(1, 2)


def test_a_sequence_with_a_freed_block_is_not_forked(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one, two = sequence(allocator, 1, 2)
    allocator.free(one)
    with refused(BlockStateError, "was freed", allocator):
        allocator.fork(two)


def test_the_last_blocks_alone_can_be_forked(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """When those before were freed, as they left a sliding window."""
    gone, *rest = sequence(allocator, 1, 2, 3)
    allocator.free(gone)
    forked = allocator.fork(rest[-1], 2)
    assert ids(forked) == ids(rest)
    assert hashes(forked) == hashes(rest)
    assert [block.num_tokens_total for block in forked] == [4, 6]
    for count in (3, None):
        with refused(BlockStateError, "was freed", allocator):
            allocator.fork(rest[-1], count)
    for count in (0, -1, 4, 2**63):
        with refused(ValueError, ".", allocator):
            allocator.fork(rest[-1], count)
    wrong: list[Any] = [True, 1.0, "1"]
    for count in wrong:
        with refused(TypeError, "num_blocks", allocator):
            allocator.fork(rest[-1], count)


def test_the_fork_of_a_last_block_is_not_the_first_of_another_sequence(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """Its hash is that of its whole sequence, of which the start may be free."""
    full, part = allocator.allocate_blocks(None, [[1, 1], [2]])
    allocator.free(full)
    [forked] = allocator.fork(part, 1)
    forked.append_token_ids([3])
    assert forked.num_tokens_total == 4
    assert forked.content_hash != hashes(allocator.allocate_blocks(None, [[2, 3]]))[0]
    assert allocator.get_num_free_blocks() == 3


def test_forks_that_become_full_with_the_same_content_share_again(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = partial(allocator, 1)
    [forked] = allocator.fork(block)
    forked.append_token_ids([2])
    block.append_token_ids([2])
    assert ids([block, forked]) == [1, 1]
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert allocator.get_num_free_blocks() == 5


def test_a_shared_block_is_made_writable_by_a_copy(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = partial(allocator, 1)
    [forked] = allocator.fork(block)
    assert allocator.cow_block_if_not_appendable(forked) == forked.block_id == 1
    assert allocator.cow_block_if_not_appendable(forked) == 1
    assert allocator.cow_block_if_not_appendable(block) == block.block_id == 0
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert allocator.clear_copy_on_writes() == []


def test_a_copy_may_evict(allocator: PrefixCachingBlockAllocator) -> None:
    free(allocator, sequence(allocator, *range(5)))
    block = allocator.allocate_mutable_block(None)
    [forked] = allocator.fork(block)
    forked.append_token_ids([1])
    assert allocator.clear_copy_on_writes() == [(5, 4)]
    allocator.check()


def test_cached_content_is_not_written_to(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    [block] = sequence(allocator, 1)
    with refused(BlockStateError, "immutable", allocator):
        allocator.cow_block_if_not_appendable(block)


def test_promoting_a_full_block_again_changes_nothing(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """In vLLM it frees the block that is in use."""
    one, two = [*sequence(allocator, 1), *sequence(allocator, 1)]
    before = snapshot(allocator)
    for block in (one, two, one):
        assert allocator.promote_to_immutable_block(block) == 0
    assert snapshot(allocator) == before


def test_a_block_without_a_hash_is_not_promoted(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    part = partial(allocator, 1)
    full = allocator.allocate_mutable_block(part)
    full.append_token_ids([1, 1])
    for block in (part, full):
        with refused(BlockStateError, "no hash yet", allocator):
            allocator.promote_to_immutable_block(block)


# -- swap ----------------------------------------------------------------------------


@pytest.fixture
def cpu() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(4, SIZE, range(10, 14))


def swap(
    source: PrefixCachingBlockAllocator,
    target: PrefixCachingBlockAllocator,
    blocks: Blocks,
) -> None:
    source.check_swap_out(blocks)
    target.check_swap_in(blocks)
    source.swap_out(blocks)
    target.swap_in(blocks)


def test_swapped_blocks_move_to_another_allocator_and_back(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    blocks = sequence(allocator, 1, 2)
    blocks.append(allocator.allocate_mutable_block(blocks[-1]))
    blocks[-1].append_token_ids([3])
    swap(allocator, cpu, blocks)
    assert ids(blocks) == [10, 11, 12]
    assert [allocator.get_num_free_blocks(), cpu.get_num_free_blocks()] == [6, 1]
    assert [one.token_ids for one in blocks] == [[1, 1], [2, 2], [3]]
    swap(cpu, allocator, blocks)
    assert ids(blocks) == [0, 1, 2]
    cpu.check()
    allocator.check()


def test_swapped_blocks_share_content_where_they_go(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    there = sequence(cpu, 1, 2)
    free(cpu, there[1:])
    blocks = sequence(allocator, 1, 2)
    assert cpu.get_num_full_blocks_touched(blocks) == 1
    swap(allocator, cpu, blocks)
    assert ids(blocks) == [10, 11]
    assert cpu._refcounter._refcounts == {10: 2, 11: 1, 12: 0, 13: 0}
    assert cpu.get_prefix_cache_hit_rate() == 0.5


def test_two_sequences_with_the_same_content_swap_into_one(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    one, two = sequence(allocator, 1, 2), sequence(allocator, 1, 2)
    swap(allocator, cpu, one + two)
    assert ids(one) == ids(two) == [10, 11]
    assert cpu.get_num_free_blocks() == 2


def test_a_swapped_block_belongs_to_where_it_went(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    """vLLM's still asks the allocator that made it for copies."""
    block = partial(allocator, 1)
    swap(allocator, cpu, [block])
    with refused(ValueError, "does not belong", allocator, cpu):
        allocator.free(block)
    [forked] = cpu.fork(block)
    forked.append_token_ids([2])
    assert cpu.clear_copy_on_writes() == [(10, 11)]
    assert cpu.is_block_cached(forked)
    assert not allocator.is_block_cached(forked)


@pytest.mark.parametrize("name", ["swap_out", "check_swap_out"])
def test_blocks_are_swapped_out_all_or_none(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator, name: str
) -> None:
    one, two, gone = sequence(allocator, 1, 2, 3)
    [foreign] = sequence(cpu, 1)
    allocator.free(gone)
    cases: list[tuple[type[Exception], str, list[Any]]] = [
        (BlockStateError, "was freed", [one, two, gone]),
        (ValueError, "does not belong", [one, two, foreign]),
        (ValueError, "more than once", [one, two, one]),
        (TypeError, "expected a PrefixCachingBlock", [one, two, None]),
        (TypeError, "expected a PrefixCachingBlock", [one, NaiveBlock(None, [], 2, 0)]),
    ]
    for error, match, blocks in cases:
        with refused(error, match, allocator, cpu):
            getattr(allocator, name)(blocks)
        with refused(error, match, allocator, cpu):
            getattr(allocator, name)(iter(blocks))


def test_blocks_are_swapped_in_all_or_none(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    held, *idle = sequence(allocator, 1, 2, 3, 4, 5, 6)
    allocator.swap_out(idle)
    bigger = PrefixCachingBlock(None, [], SIZE + 1, allocator)
    cases: list[tuple[type[Exception], str, list[Any]]] = [
        (NoFreeBlocksError, "5 blocks are needed, 4 of 4", idle),
        (ValueError, "more than once", [idle[0], idle[1], idle[0]]),
        (ValueError, "has not 2 tokens", [idle[0], bigger]),
        (TypeError, "expected a PrefixCachingBlock", [idle[0], None]),
        (TypeError, "expected a PrefixCachingBlock", [NaiveBlock(None, [], 2, 0)]),
    ]
    for error, match, blocks in cases:
        for swap_in in (cpu.swap_in, cpu.check_swap_in):
            with refused(error, match, allocator, cpu):
                swap_in(blocks)
    with refused(BlockStateError, "holds a physical block", allocator, cpu):
        cpu.swap_in([idle[0], held])
    cpu.check_swap_in([idle[0], held])
    assert ids(idle) == [None] * 5
    assert all(block._allocator is allocator for block in idle)


# -- marks ---------------------------------------------------------------------------


def test_a_block_is_computed_once_the_step_that_cached_it_is_done(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = sequence(allocator, 1, 2)
    assert not allocator.block_is_computed(0)
    assert allocator.find_cached_blocks_prefix(hashes(blocks)) == []
    allocator.mark_blocks_as_computed([])
    assert allocator.block_is_computed(0)
    assert allocator.find_cached_blocks_prefix(hashes(blocks)) == hashes(blocks)


def test_a_free_block_is_computed_while_it_holds_content(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    free(allocator, [*sequence(allocator, 1), partial(allocator, 1)])
    assert [allocator.block_is_computed(block) for block in range(3)] == [
        *[True, False, False]
    ]


def test_a_block_that_was_freed_and_taken_again_is_not_marked(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """vLLM marks it."""
    free(allocator, sequence(allocator, 1))
    assert take(allocator, 6)[-1] == 0
    allocator.mark_blocks_as_computed([])
    assert not allocator.block_is_computed(0)


def test_a_prefix_ends_at_the_first_hash_that_is_not_there(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    blocks = hashes(sequence(allocator, 1, 2, 3))
    allocator.mark_blocks_as_computed([])
    find = allocator.find_cached_blocks_prefix
    assert find([]) == []
    assert find(iter(blocks)) == find(tuple(blocks)) == blocks
    for strange in (0, -1, 2**128, 2**200, -(2**200)):
        assert find([*blocks[:2], strange, blocks[2]]) == blocks[:2]


def test_the_ids_that_lists_start_with_are_common() -> None:
    common = PrefixCachingBlockAllocator(6, SIZE).get_common_computed_block_ids
    assert common([]) == common([[], []]) == []
    assert common([[1, 2, 3]]) == [1, 2, 3]
    assert common([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1, 2]
    assert common([[1, 2], [], [1, 3]]) == [1]
    assert common([[1], [2]]) == []


# -- state ---------------------------------------------------------------------------


def test_blocks_are_counted(allocator: PrefixCachingBlockAllocator) -> None:
    free(allocator, sequence(allocator, 1))
    sequence(allocator, 2, 3)
    assert allocator.get_num_free_blocks() == 4
    assert allocator.get_num_total_blocks() == 6
    assert allocator.all_block_ids == frozenset(range(6))
    assert repr(allocator) == "PrefixCachingBlockAllocator(4 of 6 blocks free)"
    assert isinstance(allocator, BlockAllocator)
    assert allocator.block_size == SIZE
    assert allocator.eviction_policy is EvictionPolicy.LRU


def test_the_hit_rate_is_the_share_of_full_blocks_that_were_cached(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    sequence(allocator, 1, 2)
    partial(allocator, 1)
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    sequence(allocator, 1, 2)
    assert allocator.get_prefix_cache_hit_rate() == 0.5


def test_full_blocks_that_are_not_in_use_are_touched_by_a_swap(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator
) -> None:
    blocks = [*sequence(allocator, 1, 2, 3), partial(allocator, 4)]
    touched = cpu.get_num_full_blocks_touched
    assert touched([]) == touched(blocks[3:]) == 0
    assert touched(blocks) == touched(iter(blocks)) == 3
    sequence(cpu, 1)
    free(cpu, sequence(cpu, 1, 2)[1:])
    assert touched(blocks) == 2


def test_the_cache_is_reset_when_no_block_is_in_use(
    allocator: PrefixCachingBlockAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = sequence(allocator, 1, 2, 3)
    allocator.free(blocks.pop())
    with caplog.at_level(logging.WARNING):
        before = snapshot(allocator)
        assert allocator.reset_prefix_cache() is False
        assert snapshot(allocator) == before
    assert "2 blocks are in use" in caplog.text
    free(allocator, blocks)
    assert allocator.reset_prefix_cache() is True
    allocator.check()
    assert allocator._cached_blocks == {}
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    assert allocator.find_cached_blocks_prefix(hashes(blocks)) == []
    # The last one evicted is the first one taken.
    assert take(allocator, 6) == [0, 1, 2, 3, 4, 5]


def test_the_evictor_shows_the_free_blocks_with_content(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one, two = sequence(allocator, 1, 2)
    allocator.mark_blocks_as_accessed([1], 3.5)
    free(allocator, [one, two])
    evictor = allocator.evictor
    assert isinstance(evictor, Evictor)
    assert evictor.num_blocks == 2
    assert list(evictor.free_table.items()) == [
        (1, BlockMetaData(hashes([two])[0], 2 * SIZE, 3.5)),
        (0, BlockMetaData(hashes([one])[0], SIZE, -1)),
    ]
    assert [block in evictor for block in (0, 1, 2, 6, 99)] == [
        *[True, True, False, False, False]
    ]


@pytest.mark.parametrize("method", ["add", "update", "remove", "evict"])
def test_the_evictor_of_an_allocator_changes_nothing(
    allocator: PrefixCachingBlockAllocator, method: str
) -> None:
    free(allocator, sequence(allocator, 1))
    for arguments in [(), (0,), (0, 1.0), (0, 1, 2, 3.0)]:
        with refused(ValueError, "through their allocator", allocator):
            getattr(allocator.evictor, method)(*arguments)


def test_what_it_shows_is_the_callers(allocator: PrefixCachingBlockAllocator) -> None:
    sequence(allocator, 1)
    before = snapshot(allocator)
    allocator._cached_blocks.clear()
    allocator._refcounter._refcounts.clear()
    allocator._touched_blocks.clear()
    allocator._block_tracker[0].disable()
    allocator.evictor.free_table.clear()
    allocator._hashless_allocator._free_block_indices.clear()
    assert snapshot(allocator) == before


# -- mistakes ------------------------------------------------------------------------


def hostile_calls(
    allocator: PrefixCachingBlockAllocator,
) -> dict[str, Callable[[Any], object]]:
    """A call for each argument that a block may be."""
    return {
        "free": allocator.free,
        "fork": allocator.fork,
        "promote_to_immutable_block": allocator.promote_to_immutable_block,
        "cow_block_if_not_appendable": allocator.cow_block_if_not_appendable,
    }


@pytest.mark.parametrize("name", hostile_calls(PrefixCachingBlockAllocator(0, 1)))
def test_a_block_of_nobody_or_another_is_refused(
    allocator: PrefixCachingBlockAllocator, cpu: PrefixCachingBlockAllocator, name: str
) -> None:
    call = hostile_calls(allocator)[name]
    behind_foreign = allocator.allocate_mutable_block(sequence(cpu, 1)[0])
    foreign = [*sequence(cpu, 2), partial(cpu, 1)]
    for block in foreign + ([behind_foreign] if name == "fork" else []):
        with refused(ValueError, "does not belong", allocator, cpu):
            call(block)
    for thing in (None, 0, "block", object(), allocator, NaiveBlock(None, [], 2, None)):
        with refused(TypeError, "expected a PrefixCachingBlock", allocator, cpu):
            call(thing)
    with refused(BlockStateError, "was freed", allocator):
        call(PrefixCachingBlock(None, [1, 1], SIZE, allocator))
    with refused(ValueError, "does not belong", allocator):
        call(PrefixCachingBlock.__new__(PrefixCachingBlock))


@pytest.mark.parametrize(
    "block_tokens",
    [
        None,
        1,
        [None],
        [[1, 1], 1],
        [[1, 1], [1.0, 1]],
        [[1, 1], [True, 1]],
        [[1, 1], "11"],
        [[1, 1], b"11"],
        [[1, 1], [2**63, 1]],
        [[1, 1], [1]],
        [[1, 1], [1, 1, 1]],
    ],
    ids=str,
)
def test_tokens_that_are_none_take_no_block(
    allocator: PrefixCachingBlockAllocator, block_tokens: Any
) -> None:
    with refused((TypeError, ValueError), ".", allocator):
        allocator.allocate_immutable_blocks(None, block_tokens)


def test_tokens_that_raise_midway_take_no_block(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    def lists() -> Iterator[list[int]]:
        yield [1, 1]
        raise LookupError("midway")

    with refused(LookupError, "midway", allocator):
        allocator.allocate_immutable_blocks(None, lists())


def test_tokens_that_allocate_as_they_are_read_are_counted(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    taken: list[int | None] = []

    def lists() -> Iterator[list[int]]:
        for content in range(3):
            taken.extend(take(allocator, 1))
            yield [content, content]

    assert ids(allocator.allocate_immutable_blocks(None, lists())) == [3, 4, 5]
    assert taken == [0, 1, 2]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_immutable_blocks(None, lists())
    allocator.check()


def test_tokens_that_cache_themselves_as_they_are_read_are_found(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    found: Blocks = []
    tokens: list[Any] = [1, Index(1, lambda: found.extend(sequence(allocator, 1)))]
    [block] = allocator.allocate_immutable_blocks(None, [tokens])
    assert [block.block_id, found[0].block_id] == [0, 0]
    allocator.check()


def test_ids_that_free_blocks_as_they_are_read_are_marked_as_they_are_then(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block, part = [*sequence(allocator, 1), partial(allocator, 1)]
    marked: list[Any] = [0, Index(0, lambda: allocator.free(block))]
    allocator.mark_blocks_as_accessed(marked, 3.0)
    assert allocator.evictor.free_table[0].last_accessed == 3.0
    marked = [1, Index(0, lambda: allocator.free(part))]
    with pytest.raises(ValueError, match="block 1 is neither"):
        allocator.mark_blocks_as_accessed(marked, 4.0)
    allocator.check()


@pytest.mark.parametrize("now", [float("nan"), "1", None, [1.0], 1j])
def test_a_time_is_a_number(allocator: PrefixCachingBlockAllocator, now: Any) -> None:
    sequence(allocator, 1)
    with refused((TypeError, ValueError), ".", allocator):
        allocator.mark_blocks_as_accessed([0], now)


@pytest.mark.parametrize("now", [0, 2**60, float("inf"), float("-inf"), True])
def test_any_other_number_is_a_time(
    allocator: PrefixCachingBlockAllocator, now: float
) -> None:
    sequence(allocator, 1)
    allocator.mark_blocks_as_accessed([0], now)
    assert allocator._block_tracker[0].last_accessed == now


@pytest.mark.parametrize(
    "block_ids", [None, 0, [0, "0"], [0, None], [0, 9], [0, -1], [0, 5]]
)
def test_blocks_are_marked_all_or_none(
    allocator: PrefixCachingBlockAllocator, block_ids: Any
) -> None:
    sequence(allocator, 1)
    with refused((TypeError, ValueError), ".", allocator):
        allocator.mark_blocks_as_accessed(block_ids, 1.0)


@pytest.mark.parametrize("wanted", [[1.0], ["1"], [True], [b"1"], None, 1])
def test_hashes_are_ints(allocator: PrefixCachingBlockAllocator, wanted: Any) -> None:
    with refused(TypeError, ".", allocator):
        allocator.find_cached_blocks_prefix(wanted)


@pytest.mark.parametrize("extra", [True, 1.0, "1", b"1", (1,)])
def test_an_extra_hash_is_an_int_or_none(
    allocator: PrefixCachingBlockAllocator, extra: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sequence(allocator, 1, extra=extra),
        lambda: allocator.allocate_mutable_block(None, extra),
    ]
    for call in calls:
        with refused(TypeError, "extra_hash", allocator):
            call()


@pytest.mark.parametrize(
    "before", [1, "block", object(), NaiveBlock(None, [], 2, None)]
)
def test_the_block_before_is_a_prefix_caching_one(
    allocator: PrefixCachingBlockAllocator, before: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: allocator.allocate_mutable_block(before),
        lambda: allocator.allocate_immutable_block(before, [1, 1]),
        lambda: allocator.allocate_immutable_blocks(before, [[1, 1]]),
    ]
    for call in calls:
        with refused(TypeError, "expected a PrefixCachingBlock or None", allocator):
            call()


@pytest.mark.parametrize("device", [0, "gpu", object()])
def test_it_has_one_device(allocator: PrefixCachingBlockAllocator, device: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: allocator.allocate_mutable_block(None, None, device),
        lambda: allocator.allocate_immutable_block(None, [1, 1], None, device),
        lambda: allocator.allocate_immutable_blocks(None, [[1, 1]], None, device),
        lambda: allocator.get_num_free_blocks(device),
    ]
    for call in calls:
        with refused(ValueError, "one device", allocator):
            call()


def test_a_block_without_a_hash_is_not_cached_or_not(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    with refused(BlockStateError, "has no hash", allocator):
        allocator.is_block_cached(partial(PrefixCachingBlockAllocator(1, SIZE), 1))
    things: list[Any] = [None, 0, NaiveBlock(None, [], 2, None)]
    for thing in things:
        with refused(TypeError, "expected a PrefixCachingBlock", allocator):
            allocator.is_block_cached(thing)
        with refused(TypeError, "expected a PrefixCachingBlock", allocator):
            allocator.get_num_full_blocks_touched([thing])


@pytest.mark.parametrize("count", [-1, 2**31, 2**64, True, 1.0, "1", None])
def test_the_number_of_blocks_is_an_int_from_0_on(count: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_blocks"):
        PrefixCachingBlockAllocator(count, SIZE)


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 1.0, "1", None])
def test_a_block_has_one_token_or_more(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size"):
        PrefixCachingBlockAllocator(2, size)


@pytest.mark.parametrize("policy", [None, 1, "LRU", EvictionPolicy])
def test_the_only_policy_is_lru(policy: Any) -> None:
    with pytest.raises(ValueError, match="eviction_policy"):
        PrefixCachingBlockAllocator(2, SIZE, None, policy)


def test_an_allocator_is_made_once(allocator: PrefixCachingBlockAllocator) -> None:
    sequence(allocator, 1)
    with refused(ValueError, "already made", allocator):
        allocator.__init__(100, SIZE)


def test_an_allocator_that_was_never_made_has_no_blocks() -> None:
    allocator = PrefixCachingBlockAllocator.__new__(PrefixCachingBlockAllocator)
    allocator.check()
    assert allocator.get_num_total_blocks() == 0
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)
    allocator.__init__(1, SIZE)
    assert take(allocator, 1) == [0]


def test_an_allocator_of_no_blocks_is_always_out_of_them() -> None:
    allocator = PrefixCachingBlockAllocator(0, SIZE)
    allocator.check()
    assert allocator.reset_prefix_cache()
    with refused(NoFreeBlocksError, "0 of 0 are free", allocator):
        sequence(allocator, 1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_allocator_is_not_copied(
    allocator: PrefixCachingBlockAllocator, duplicate: Callable[[object], object]
) -> None:
    for thing in (allocator, allocator.evictor):
        with pytest.raises(TypeError):
            duplicate(thing)


# -- memory --------------------------------------------------------------------------


def test_an_allocator_has_no_object_for_a_physical_block() -> None:
    gc.collect()
    before = len(gc.get_objects())
    small = PrefixCachingBlockAllocator(10, SIZE)
    between = len(gc.get_objects())
    big = PrefixCachingBlockAllocator(100_000, SIZE)
    after = len(gc.get_objects())
    assert after - between <= between - before
    assert small.get_num_free_blocks() + big.get_num_free_blocks() == 100_010


def test_the_collector_has_nothing_to_do_with_blocks_in_use() -> None:
    allocator = PrefixCachingBlockAllocator(10_000, SIZE)
    while gc.collect():  # what goes may leave garbage of its own
        pass
    before = len(gc.get_objects())
    blocks = sequence(allocator, *range(10_000))
    assert len(gc.get_objects()) - before < 10
    del blocks
    assert gc.collect() == 0


def test_a_physical_block_takes_152_bytes() -> None:
    PrefixCachingBlockAllocator(10, SIZE)
    tracemalloc.start()
    allocator = PrefixCachingBlockAllocator(2**16, SIZE)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 2**16 < 153
    assert allocator.get_num_total_blocks() == 2**16


def test_the_memory_of_an_allocator_goes_with_it_and_its_blocks() -> None:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    allocator = PrefixCachingBlockAllocator(2**16, SIZE)
    block, *_ = sequence(allocator, 1, 2)
    evictor, counter = allocator.evictor, allocator._refcounter
    del allocator
    held, _ = tracemalloc.get_traced_memory()
    assert held - before > 2**16 * 100
    del block, _, evictor, counter
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000


def test_serving_100_000_blocks_leaves_nothing_behind(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    def churn(first: int, last: int) -> None:
        for i in range(first, last):
            blocks = sequence(allocator, 0, i)
            tail = allocator.allocate_mutable_block(blocks[-1])
            tail.append_token_ids([1])
            forked = allocator.fork(tail)
            forked[-1].append_token_ids([2])
            free(allocator, [*blocks, tail])
            free(allocator, forked)
            allocator.mark_blocks_as_accessed([0], i)
            allocator.mark_blocks_as_computed([])
            allocator.clear_copy_on_writes()

    churn(0, 10)
    tracemalloc.start()
    first, _ = tracemalloc.get_traced_memory()
    churn(10, 15_000)
    last, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last - first < 10_000
    allocator.check()
    assert allocator.get_num_free_blocks() == 6
