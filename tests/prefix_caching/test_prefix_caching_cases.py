"""Faults that users of LLM engines met in the field, as what this allocator does.

Each docstring begins with the number of its case, as in `test_field_cases` of the pool.
`proven` is behind every step: `check()`, and a walk over what can be seen from outside:
free blocks are counted right, no count is negative, what is cached is named once.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise, permutations, product
from random import Random
from typing import Any

import pytest
from doubles import refused

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import PrefixCachingBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.prefix_hash import hash_token_blocks

SIZE = 2
Allocator = PrefixCachingBlockAllocator
Blocks = list[PrefixCachingBlock]


def proven(*allocators: Allocator) -> None:
    for allocator in allocators:
        allocator.check()
        counts = allocator._refcounter._refcounts
        unused = {block for block, count in counts.items() if count == 0}
        empty = allocator._hashless_allocator._free_block_indices
        evictable = allocator.evictor.free_table
        assert min(counts.values(), default=0) >= 0
        assert sorted([*empty, *evictable]) == sorted(unused)
        assert allocator.get_num_free_blocks() == len(unused)
        holders = list(allocator._cached_blocks.values())
        assert len(set(holders)) == len(holders)
        assert unused & set(holders) == set(evictable)


def sequence(allocator: Allocator, *contents: int, extra: int | None = None) -> Blocks:
    """Full blocks behind each other; each holds one token several times."""
    tokens = [[content] * allocator.block_size for content in contents]
    blocks = allocator.allocate_immutable_blocks(None, tokens, extra)
    proven(allocator)
    return blocks


def mutable(allocator: Allocator, count: int = 1) -> Blocks:
    blocks = [allocator.allocate_mutable_block(None) for _ in range(count)]
    proven(allocator)
    return blocks


def free(allocator: Allocator, blocks: Blocks) -> None:
    """Tail first."""
    for block in reversed(blocks):
        allocator.free(block)
        proven(allocator)


def ids(blocks: Blocks) -> list[int | None]:
    return [block.block_id for block in blocks]


def hashes(blocks: Blocks) -> list[int]:
    return [block.content_hash for block in blocks if block.content_hash is not None]


def hits(allocator: Allocator, blocks: Blocks) -> int:
    return len(allocator.find_cached_blocks_prefix(hashes(blocks)))


# -- A. References, capacity ---------------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_block_is_freed_once(full: bool, shared: bool) -> None:
    """B01, B03: a second free took a reference that somebody else had."""
    allocator = Allocator(4, SIZE)
    block, *_ = sequence(allocator, 1) if full else mutable(allocator)
    others = allocator.fork(block) if shared else []
    allocator.free(block)
    with refused(BlockStateError, "was freed", allocator):
        allocator.free(block)
    for pair in ([block, block], [*others, block], [*others, *others, block]):
        with refused(ValueError, "was freed|more than once", allocator):
            allocator.swap_out(pair)
    free(allocator, others)
    assert sorted(filter(None, ids(mutable(allocator, 4)))) == [1, 2, 3]


@pytest.mark.parametrize("fork", [True, False])
def test_no_request_leaves_a_block_behind(fork: bool) -> None:
    """B12: exactly one block leaked per request."""
    allocator, random = Allocator(64, 4), Random(12)
    for _ in range(1_500):
        tokens = [random.randint(0, 1) for _ in range(random.randint(1, 60))]
        cut = len(tokens) // 4 * 4
        full = [tokens[at : at + 4] for at in range(0, cut, 4)]
        blocks = allocator.allocate_immutable_blocks(None, full)
        blocks.append(allocator.allocate_mutable_block(blocks[-1] if blocks else None))
        blocks[-1].append_token_ids(tokens[cut:])
        others = allocator.fork(blocks[-1]) if fork else []
        for token in tokens[:6]:
            for table in filter(None, [blocks, others]):
                if table[-1].is_full:
                    table.append(allocator.allocate_mutable_block(table[-1]))
                table[-1].append_token_ids([token])
        for block in [*blocks, *others][::-1]:
            allocator.free(block)
        assert allocator.get_num_free_blocks() == 64
        allocator.mark_blocks_as_computed([])
        allocator.clear_copy_on_writes()
    proven(allocator)


def test_an_allocation_that_fails_leaves_its_hits_untouched() -> None:
    """B14: hits kept the references of requests that were not admitted."""
    allocator = Allocator(5, SIZE)
    free(allocator, sequence(allocator, 1, 2))
    mutable(allocator, 2)
    for _ in range(50):
        with refused(NoFreeBlocksError, "5 blocks are needed, 3 of 5", allocator):
            sequence(allocator, 1, 2, 3, 4, 5)
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    assert ids(sequence(allocator, 1, 2, 3)) == [0, 1, 4]


@pytest.mark.parametrize("hits_in_use", [True, False])
def test_a_requests_own_free_hits_are_no_room_for_the_rest_of_it(
    hits_in_use: bool,
) -> None:
    """B15: 5 were free, 2 of them its own hits; 4 more were promised."""
    allocator = Allocator(5 + 2 * hits_in_use, SIZE)
    blocks = sequence(allocator, 1, 2)
    if not hits_in_use:
        free(allocator, blocks)
    assert allocator.get_num_free_blocks() == 5
    room = 5 if hits_in_use else 3
    for missing in range(room + 1, 8):
        with refused(NoFreeBlocksError, "5 of", allocator):
            sequence(allocator, 1, 2, *range(10, 10 + missing))
    sequence(allocator, 1, 2, *range(10, 10 + room))
    assert allocator.get_num_free_blocks() == 0


@pytest.mark.parametrize("cached", range(5))
def test_a_batch_that_does_not_fit_takes_nothing(cached: int) -> None:
    """B17: blocks taken before the one that failed belonged to nobody."""
    allocator = Allocator(4, SIZE)
    free(allocator, sequence(allocator, *range(cached)))
    with refused(NoFreeBlocksError, "5 blocks are needed, 4 of 4", allocator):
        sequence(allocator, 0, 1, 2, 3, 4)
    assert allocator.clear_copy_on_writes() == []


@pytest.mark.parametrize("evicted", range(11))
def test_blocks_that_only_the_evictor_holds_are_needed_for_a_swap(evicted: int) -> None:
    """B19: the check counted 2 of 10, as 8 were cached still; 8 were free."""
    allocator, source = Allocator(10, SIZE), Allocator(10, SIZE)
    blocks = sequence(allocator, *range(10))
    allocator.swap_out(blocks)
    mutable(allocator, evicted)
    assert allocator.get_num_full_blocks_touched(blocks) == 10
    if evicted:
        free = 10 - evicted
        with refused(NoFreeBlocksError, f"10 blocks are needed, {free} of", allocator):
            allocator.check_swap_in(blocks)
        with refused(NoFreeBlocksError, "10 blocks are needed", allocator, source):
            allocator.swap_in(blocks)
    else:
        allocator.swap_in(blocks)
        assert ids(blocks) == list(range(10))
    proven(allocator)


def test_a_swap_in_that_was_checked_never_fails() -> None:
    """B19, in general: whatever is cached, in use, shared or listed twice."""
    random = Random(19)
    for _ in range(300):
        source, target = Allocator(12, SIZE), Allocator(random.randint(1, 6), SIZE)
        for _ in range(random.randint(0, 4)):
            contents = [random.randint(0, 1) for _ in range(random.randint(1, 3))]
            with suppress(NoFreeBlocksError):
                held = sequence(target, *contents)
                free(target, held[random.randint(0, 3) :])
        blocks: Blocks = []
        for _ in range(random.randint(1, 3)):
            blocks += sequence(source, *[random.randint(0, 1) for _ in range(2)])
        blocks += mutable(source, random.randint(0, 2))
        source.swap_out(blocks)
        try:
            target.check_swap_in(blocks)
        except NoFreeBlocksError:
            with refused(NoFreeBlocksError, "are needed", target):
                target.swap_in(blocks)
        else:
            target.swap_in(blocks)
        proven(source, target)


# -- Long chains ---------------------------------------------------------------------

LONG = 200_000


@contextmanager
def little_stack() -> Iterator[None]:
    """Not enough recursion for a chain of a hundred blocks."""
    before, depth = sys.getrecursionlimit(), len(list(frames()))
    sys.setrecursionlimit(depth + 60)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def frames() -> Iterator[Any]:
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def long_chain(allocator: Allocator, count: int) -> PrefixCachingBlock:
    """The last of so many blocks, each with one token."""
    tokens = [[token] for token in range(count)]
    return allocator.allocate_immutable_blocks(None, tokens)[-1]


@pytest.mark.parametrize("count", [1_500, LONG])
def test_long_chains_are_forked_hashed_and_freed_without_recursion(count: int) -> None:
    """B22: forks failed near 1,000 blocks."""
    allocator = Allocator(count, 1)
    with little_stack():
        last = long_chain(allocator, count)
        forked = allocator.fork(last)
        assert forked[-1].content_hash == last.content_hash
        assert last.content_hash == hash_token_blocks(None, range(count), 1)[-1]
        assert last.num_tokens_total == count
        for one in forked:
            allocator.free(one)
        block: PrefixCachingBlock | None = last
        while block is not None:
            allocator.free(block)
            block = block.prev_block
    assert allocator.get_num_free_blocks() == count
    allocator.check()


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("forked", [True, False])
def test_long_chains_are_destroyed_without_recursion(freed: bool, forked: bool) -> None:
    """B22: letting go of the last block lets go of all."""
    allocator = Allocator(LONG, 1)
    with little_stack():
        last = long_chain(allocator, LONG)
        if forked:
            last = allocator.fork(last)[-1]
        if freed:
            allocator.free(last)
        del last
        gc.collect()
    counts = allocator._refcounter._refcounts
    assert counts[0] == 1 + forked
    assert counts[LONG - 1] == 1 + forked - freed


def test_a_long_chain_is_swapped_out_and_in_without_recursion() -> None:
    """B22: swapping walked it too."""
    gpu, cpu = Allocator(LONG, 1), Allocator(LONG, 1)
    with little_stack():
        blocks = gpu.allocate_immutable_blocks(None, [[token] for token in range(LONG)])
        gpu.swap_out(blocks)
        cpu.swap_in(blocks)
        assert cpu.get_num_free_blocks() == 0
        del blocks


def test_chains_that_share_their_start_are_destroyed_one_by_one() -> None:
    """B22, in general: a block stays as long as one behind it is held."""
    allocator = Allocator(LONG + 10, 1)
    with little_stack():
        last = long_chain(allocator, LONG)
        branches = allocator.fork(last)[:: LONG // 10]
        kept = [allocator.allocate_mutable_block(branch) for branch in branches]
        del last, branches
        while kept:
            block = kept.pop()
            assert block.num_tokens_total == block.prev_block.num_tokens_total
            del block


# -- B. Content ----------------------------------------------------------------------


def test_evicted_content_does_not_answer_any_more() -> None:
    """B35: a block that was taken again was found under its old hash."""
    allocator = Allocator(1, SIZE)
    old = sequence(allocator, 1)
    free(allocator, old)
    mutable(allocator)
    assert hits(allocator, old) == 0
    assert not allocator.is_block_cached(old[0])
    assert allocator._cached_blocks == {}


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_copies_of_one_content_are_one_block(order: tuple[int, ...]) -> None:
    """B38: three sequences fill a block alike, and let go of it in any order."""
    allocator = Allocator(3, SIZE)
    blocks = mutable(allocator, 3)
    for block in blocks:
        block.append_token_ids([1, 1])
        proven(allocator)
    assert ids(blocks) == [0, 0, 0]
    for i in order:
        assert allocator.is_block_cached(blocks[i])
        allocator.free(blocks[i])
        proven(allocator)
    assert ids(sequence(allocator, 1)) == [0]


def test_an_adapter_has_content_of_its_own() -> None:
    """B48, B49: the same tokens under another extra hash were found."""
    allocator = Allocator(40, SIZE)
    extras = [None, 0, 1, -1, -2, 2**61 - 1, 2**64, -(2**64)]
    chains = [sequence(allocator, 1, 2, extra=extra) for extra in extras]
    allocator.mark_blocks_as_computed([])
    assert len({value for chain in chains for value in hashes(chain)}) == 16
    for one, two in pairwise(chains):
        assert set(ids(one)).isdisjoint(ids(two))
    for extra, chain in zip(extras, chains, strict=True):
        assert ids(sequence(allocator, 1, 2, extra=extra)) == ids(chain)


def test_tokens_minus_1_and_minus_2_are_two() -> None:
    """B53: they had the same hash in vLLM 0.8.5, so that one found the other."""
    allocator = Allocator(4, SIZE)
    one, two = sequence(allocator, -1)[0], sequence(allocator, -2)[0]
    assert one.content_hash != two.content_hash
    assert ids([one, two]) == [0, 1]


def test_no_two_contents_have_the_same_hash() -> None:
    """B53, in general: all values at which Python's own hashes repeat or wrap."""
    tokens = [
        -2,
        -1,
        0,
        1,
        2**61 - 2,
        2**61 - 1,
        2**61,
        2**63 - 1,
        -(2**63),
        2**31,
        2**32,
    ]
    allocator = Allocator(4_000, SIZE)
    seen = set()
    for pair in product(tokens, repeat=2):
        [first] = allocator.allocate_immutable_blocks(None, [pair])
        for token in tokens[:4]:
            later = allocator.allocate_immutable_block(first, [token, token])
            seen |= set(hashes([first, later]))
    assert len(seen) == len(tokens) ** 2 * 5


@pytest.mark.parametrize("token", [True, 1.0, "1", None, 2**63, -(2**63) - 1])
def test_a_token_that_is_no_int_of_64_bits_has_no_hash(token: Any) -> None:
    """B53: 1, True and 1.0 had the same."""
    allocator = Allocator(4, SIZE)
    with refused((TypeError, ValueError), ".", allocator):
        allocator.allocate_immutable_block(None, [1, token])
    [block] = mutable(allocator)
    with refused((TypeError, ValueError), ".", allocator):
        block.append_token_ids([1, token])


@pytest.mark.parametrize("hole", range(5))
def test_a_prefix_ends_at_a_hole(hole: int) -> None:
    """B59: with block 2 of 5 gone, vLLM 0.8.5's search reported all 5."""
    allocator = Allocator(5, SIZE)
    blocks = sequence(allocator, 1, 2, 3, 4, 5)
    allocator.mark_blocks_as_accessed(range(5), 2.0)
    allocator.mark_blocks_as_accessed([hole], 1.0)
    free(allocator, blocks)
    assert ids(mutable(allocator)) == [hole]
    assert hits(allocator, blocks) == hole
    cached = [allocator.is_block_cached(block) for block in blocks]
    assert cached == [i != hole for i in range(5)]


def test_a_prefix_is_as_long_as_all_before_it_is_there() -> None:
    """B59, in general: any blocks of a chain are gone, or not computed yet."""
    for gone in product([False, True], repeat=6):
        allocator = Allocator(6, SIZE)
        blocks = sequence(allocator, *range(6))
        lost = [i for i in range(6) if gone[i]]
        allocator.mark_blocks_as_accessed(range(6), 2.0)
        allocator.mark_blocks_as_accessed(lost, 1.0)
        for block in blocks:
            allocator.free(block)
        mutable(allocator, len(lost))
        assert hits(allocator, blocks) == ([*lost, 6])[0]


@pytest.mark.parametrize("way", ["allocated", "appended", "swapped in"])
def test_content_is_computed_when_its_step_is_done(way: str) -> None:
    """B61: prompts admitted in one step hit what was not written yet."""
    allocator, other = Allocator(8, SIZE), Allocator(8, SIZE)
    if way == "allocated":
        blocks = sequence(allocator, 1, 2)
    elif way == "appended":
        blocks = [allocator.allocate_mutable_block(None)]
        blocks[0].append_token_ids([1, 1])
        blocks.append(allocator.allocate_mutable_block(blocks[0]))
        blocks[1].append_token_ids([2, 2])
    else:
        blocks = sequence(other, 1, 2)
        other.swap_out(blocks)
        allocator.swap_in(blocks)
    second = sequence(allocator, 1, 2)
    assert ids(second) == ids(blocks)
    assert hits(allocator, blocks) == hits(allocator, second) == 0
    assert not any(allocator.block_is_computed(block) for block in (0, 1))
    allocator.mark_blocks_as_computed([])
    assert hits(allocator, blocks) == 2
    allocator.mark_blocks_as_computed([])
    assert all(allocator.block_is_computed(block) for block in (0, 1))


def test_a_mark_is_for_what_was_cached_in_its_step_and_is_there_still() -> None:
    """B61, in general: blocks let go of before the mark are not marked later."""
    allocator = Allocator(2, SIZE)
    free(allocator, sequence(allocator, 1, 2))
    [block, _] = mutable(allocator, 2)
    allocator.mark_blocks_as_computed([])
    block.append_token_ids([3, 3])
    assert hits(allocator, [block]) == 0
    allocator.mark_blocks_as_computed([])
    assert hits(allocator, [block]) == 1


def test_a_reset_that_is_refused_changes_nothing_and_says_so() -> None:
    """B66: False was only logged, and taken for done."""
    allocator = Allocator(4, SIZE)
    blocks = sequence(allocator, 1, 2)
    allocator.free(blocks[1])
    allocator.mark_blocks_as_computed([])
    for _ in range(3):
        assert allocator.reset_prefix_cache() is False
        assert hits(allocator, blocks) == 2
    allocator.free(blocks[0])
    assert allocator.reset_prefix_cache() is True
    proven(allocator)
    assert hits(allocator, blocks) == 0
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    assert sorted(filter(None, ids(mutable(allocator, 4)))) == [1, 2, 3]


# -- C. Eviction order ---------------------------------------------------------------


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_the_tail_is_evicted_before_the_head(order: tuple[int, ...]) -> None:
    """B69: of blocks let go of together the first went, and orphaned the rest."""
    allocator = Allocator(3, SIZE)
    blocks = sequence(allocator, 1, 2, 3)
    allocator.mark_blocks_as_accessed([0, 1, 2], 1.0)
    for i in order:
        allocator.free(blocks[i])
    for left in (2, 1, 0):
        assert ids(mutable(allocator)) == [left]
        assert hits(allocator, blocks) == left


@pytest.mark.parametrize("grown", ["before", "after"])
def test_a_tail_that_was_allocated_ahead_is_deeper_too(grown: str) -> None:
    """B69: its depth was that of the day it was allocated."""
    allocator = Allocator(2, SIZE)
    one = allocator.allocate_mutable_block(None)
    if grown == "before":
        one.append_token_ids([1, 1])
    two = allocator.allocate_mutable_block(one)
    if grown == "after":
        one.append_token_ids([1, 1])
    two.append_token_ids([2, 2])
    free(allocator, [one, two])
    assert ids(mutable(allocator, 2)) == [1, 0]


def test_blocks_that_are_not_full_push_nothing_out() -> None:
    """B70: a burst of short prompts emptied the cache."""
    allocator = Allocator(5, SIZE)
    kept = sequence(allocator, 1, 2)
    free(allocator, kept)
    for _ in range(10):
        [block] = mutable(allocator)
        block.append_token_ids([7])
        assert block.block_id == 2
        free(allocator, [block])
    assert hits(allocator, kept) == 2


def test_free_blocks_without_content_go_before_those_with_it() -> None:
    """B71: in whatever order they were let go of."""
    allocator = Allocator(4, SIZE)
    full = sequence(allocator, 1, 2)
    part = mutable(allocator, 2)
    for block in (full[0], part[0], full[1], part[1]):
        allocator.free(block)
    assert ids(mutable(allocator, 4)) == [3, 2, 1, 0]


# -- F. Arguments, limits ------------------------------------------------------------


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**32, 2**63, 2**64])
def test_absurd_sizes_are_refused_at_once(count: int) -> None:
    """B97: derived indices wrapped."""
    with pytest.raises(ValueError, match="num_blocks"):
        Allocator(count, SIZE)
    with pytest.raises(ValueError, match="block_size"):
        Allocator(2, count)


def test_tokens_are_counted_in_64_bits() -> None:
    """B97: blocks of 2 ** 31 - 2 tokens, of which none need be there."""
    allocator = Allocator(3, 2**31 - 2)
    [block] = mutable(allocator)
    assert block.num_empty_slots == 2**31 - 2
    with refused(BlockStateError, "a full block before it", allocator):
        allocator.allocate_immutable_block(block, [1])


@pytest.mark.parametrize("full", [True, False])
def test_a_block_of_another_allocator_is_refused(full: bool) -> None:
    """B102: it would have taken the reference of whoever has the same id here."""
    here, there = Allocator(4, SIZE), Allocator(4, SIZE)
    sequence(here, 1)
    block, *_ = sequence(there, 1) if full else mutable(there)
    for name in ("free", "fork", "cow_block_if_not_appendable"):
        with refused(ValueError, "does not belong", here, there):
            getattr(here, name)(block)
    for name in ("swap_out", "check_swap_out"):
        with refused(ValueError, "does not belong", here, there):
            getattr(here, name)([block])
    proven(here, there)
