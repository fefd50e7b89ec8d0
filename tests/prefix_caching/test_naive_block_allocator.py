"""`NaiveBlockAllocator`: physical blocks by reference count, without a cache."""

import copy
import gc
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from doubles import Index, PlainBlock, nothing, refused, snapshot

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import NaiveBlock, PrefixCachingBlock
from kvcache.prefix_caching.interfaces import BlockAllocator
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.object_pool import BlockPool
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

SIZE = 4


def allocator_of(
    num_blocks: int = 6, create_block: Any = NaiveBlock, **arguments: Any
) -> NaiveBlockAllocator:
    return NaiveBlockAllocator(create_block, num_blocks, SIZE, **arguments)


def sequence(allocator: NaiveBlockAllocator, *lengths: int) -> list[Any]:
    """Blocks behind each other with so many tokens."""
    blocks = [None]
    for length in lengths:
        tokens = list(range(length))
        blocks.append(allocator.allocate_immutable_block(blocks[-1], tokens))
    return blocks[1:]


def ids(blocks: list[Any]) -> list[int | None]:
    return [block.block_id for block in blocks]


both_classes = pytest.mark.parametrize(
    "create_block", [NaiveBlock, PlainBlock], ids=["NaiveBlock", "a class of one's own"]
)


@pytest.fixture
def allocator() -> NaiveBlockAllocator:
    return allocator_of()


# -- allocate and free ---------------------------------------------------------------


@both_classes
def test_blocks_go_in_the_order_of_their_ids(create_block: Any) -> None:
    allocator = allocator_of(3, create_block, block_ids=[7, 2, 9])
    assert ids([allocator.allocate_mutable_block(None) for _ in range(3)]) == [7, 2, 9]
    allocator.check()


@both_classes
def test_a_freed_block_goes_next(create_block: Any) -> None:
    allocator = allocator_of(4, create_block)
    one, two = sequence(allocator, 0, 0)
    allocator.free(one)
    allocator.free(two)
    assert allocator._free_block_indices == [1, 0, 2, 3]
    assert ids(sequence(allocator, 0, 0, 0)) == [1, 0, 2]


def test_a_mutable_block_is_empty_and_stands_behind_another(
    allocator: NaiveBlockAllocator,
) -> None:
    before = allocator.allocate_mutable_block(None)
    block = allocator.allocate_mutable_block(before)
    assert type(block) is NaiveBlock
    assert block.prev_block is before
    assert block.token_ids == []
    assert block._allocator is allocator
    assert block.block_size == allocator.block_size == SIZE


def test_an_immutable_block_holds_its_tokens(allocator: NaiveBlockAllocator) -> None:
    assert allocator.allocate_immutable_block(None, [1, 2]).token_ids == [1, 2]


def test_immutable_blocks_stand_behind_each_other(
    allocator: NaiveBlockAllocator,
) -> None:
    before = allocator.allocate_mutable_block(None)
    one, two = allocator.allocate_immutable_blocks(before, [[1] * 4, [2, 3]])
    assert [one.prev_block, two.prev_block] == [before, one]
    assert [one.token_ids, two.token_ids] == [[1] * 4, [2, 3]]
    assert allocator.allocate_immutable_blocks(before, []) == []


def test_free_and_total_blocks_are_counted(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 0)
    assert allocator.get_num_free_blocks() == 5
    assert allocator.get_num_total_blocks() == 6
    allocator.free(block)
    assert allocator.get_num_free_blocks() == 6


def test_a_freed_block_holds_no_physical_one(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 2)
    allocator.free(block, keep_block_object=True)
    assert block.block_id is None
    assert block.token_ids == [0, 1]


def test_without_a_free_block_none_is_allocated(allocator: NaiveBlockAllocator) -> None:
    sequence(allocator, *[0] * 6)
    with refused(NoFreeBlocksError, "1 blocks are needed, 0 of 6", allocator):
        allocator.allocate_mutable_block(None)
    with pytest.raises(BlockAllocator.NoFreeBlocksError):
        allocator.allocate_immutable_block(None, [1])


@both_classes
def test_a_batch_that_does_not_fit_takes_nothing(create_block: Any) -> None:
    allocator = allocator_of(3, create_block)
    with refused(NoFreeBlocksError, "4 blocks are needed, 3 of 3", allocator):
        allocator.allocate_immutable_blocks(None, [[1]] * 4)


@both_classes
def test_a_block_is_not_freed_twice(create_block: Any) -> None:
    allocator = allocator_of(3, create_block)
    [block] = sequence(allocator, 0)
    allocator.free(block)
    with refused(BlockStateError, "was freed", allocator):
        allocator.free(block)


# -- by id ---------------------------------------------------------------------------


def test_a_reference_can_be_taken_back_by_id(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 0)
    allocator.fork(block)
    allocator.free_block_id(0)
    assert allocator.refcounter.get(0) == 1
    allocator.free_block_id(0)
    assert allocator.get_num_free_blocks() == 6
    with refused(BlockStateError, "block 0 is free already", allocator):
        allocator.free_block_id(0)


@both_classes
def test_a_block_whose_reference_went_by_id_is_not_freed_again(
    create_block: Any,
) -> None:
    allocator = allocator_of(3, create_block)
    [block] = sequence(allocator, 2)
    allocator.free_block_id(0)
    for method in ("free", "fork", "cow_block_if_not_appendable"):
        with refused(BlockStateError, "block 0 ", allocator):
            getattr(allocator, method)(block)
    with refused(BlockStateError, "block 0 ", allocator):
        allocator.swap_out([block])
    if create_block is NaiveBlock:
        with refused(BlockStateError, "block 0 ", allocator):
            block.append_token_ids([1])


@pytest.mark.parametrize("block_id", [-1, 6, 2**63, True, 1.0, "1", None])
def test_an_id_of_no_block_is_refused(
    allocator: NaiveBlockAllocator, block_id: Any
) -> None:
    for method in ("free_block_id", "get_physical_block_id"):
        with refused((TypeError, ValueError), ".", allocator):
            getattr(allocator, method)(block_id)


def test_a_block_that_is_freed_while_its_id_is_read_is_not_freed_twice(
    allocator: NaiveBlockAllocator,
) -> None:
    [block] = sequence(allocator, 0)
    asked: Any = Index(0, lambda: allocator.free(block))
    with pytest.raises(BlockStateError, match="is free already"):
        allocator.free_block_id(asked)
    allocator.check()
    assert allocator.get_num_free_blocks() == 6


# -- fork, copy-on-write -------------------------------------------------------------


@both_classes
def test_a_fork_shares_all_physical_blocks(create_block: Any) -> None:
    allocator = allocator_of(4, create_block)
    blocks = sequence(allocator, 4, 4, 2)
    forked = allocator.fork(blocks[-1])
    assert ids(forked) == ids(blocks) == [0, 1, 2]
    assert [one.token_ids for one in forked] == [one.token_ids for one in blocks]
    assert [one.prev_block for one in forked] == [None, *forked[:-1]]
    assert allocator._refcounter._refcounts == {0: 2, 1: 2, 2: 2, 3: 0}
    for block in blocks + forked:
        allocator.free(block)
    assert allocator.get_num_free_blocks() == 4
    allocator.check()


@both_classes
def test_the_last_blocks_alone_can_be_forked(create_block: Any) -> None:
    """When those before were freed, as they left a sliding window."""
    allocator = allocator_of(4, create_block)
    gone, *rest = sequence(allocator, 4, 4, 2)
    allocator.free(gone)
    forked = allocator.fork(rest[-1], 2)
    assert ids(forked) == ids(rest)
    assert [one.token_ids for one in forked] == [one.token_ids for one in rest]
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
    last: Any = Index(1)
    assert ids(allocator.fork(rest[-1], last)) == ids(rest[-1:])


@both_classes
def test_blocks_of_any_length_are_allocated_behind_each_other(
    create_block: Any,
) -> None:
    allocator = allocator_of(3, create_block)
    blocks = allocator.allocate_blocks(None, [[1] * 4, [2], []])
    assert [one.token_ids for one in blocks] == [[1] * 4, [2], []]
    assert [one.prev_block for one in blocks] == [None, *blocks[:-1]]
    with refused(NoFreeBlocksError, "1 blocks are needed", allocator):
        allocator.allocate_blocks(None, [[1]])


def test_a_fork_has_tokens_of_its_own(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 2)
    [forked] = allocator.fork(block)
    forked.append_token_ids([8])
    block.append_token_ids([9])
    assert [block.token_ids, forked.token_ids] == [[0, 1, 9], [0, 1, 8]]


@both_classes
def test_a_block_that_has_all_users_it_can_is_not_forked(
    probe: ModuleType, create_block: Any
) -> None:
    allocator = allocator_of(4, create_block)
    blocks = sequence(allocator, SIZE, 2)
    counts = probe.naive_memory(allocator)["rows"]["ref_cnt"]
    counts[1] = 2**31 - 1
    with refused(BlockStateError, "block 1 has 2147483647 references", allocator):
        allocator.fork(blocks[-1])
    counts[1] = 1


@both_classes
def test_a_sequence_with_a_freed_block_is_not_forked(create_block: Any) -> None:
    allocator = allocator_of(4, create_block)
    blocks = sequence(allocator, 4, 4, 2)
    allocator.free(blocks[1])
    with refused(BlockStateError, "was freed", allocator):
        allocator.fork(blocks[-1])


def test_writing_to_a_shared_block_takes_a_copy(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 2)
    [forked] = allocator.fork(block)
    forked.append_token_ids([8])
    block.append_token_ids([9])
    assert [block.block_id, forked.block_id] == [0, 1]
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert allocator.clear_copy_on_writes() == []


def test_appending_nothing_to_a_shared_block_takes_no_copy(
    allocator: NaiveBlockAllocator,
) -> None:
    [block] = sequence(allocator, 2)
    allocator.fork(block)
    block.append_token_ids([])
    assert allocator.clear_copy_on_writes() == []


@both_classes
def test_a_shared_block_is_made_writable_by_a_copy(create_block: Any) -> None:
    allocator = allocator_of(4, create_block)
    [block] = sequence(allocator, 2)
    [forked] = allocator.fork(block)
    assert allocator.cow_block_if_not_appendable(forked) == forked.block_id == 1
    assert allocator.cow_block_if_not_appendable(forked) == 1
    assert allocator.cow_block_if_not_appendable(block) == block.block_id == 0
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    allocator.check()


@both_classes
def test_without_a_free_block_no_copy_is_made(create_block: Any) -> None:
    allocator = allocator_of(1, create_block)
    [block] = sequence(allocator, 2)
    [forked] = allocator.fork(block)
    with refused(NoFreeBlocksError, "1 blocks are needed", allocator):
        allocator.cow_block_if_not_appendable(forked)
    assert ids([block, forked]) == [0, 0]
    if create_block is NaiveBlock:
        with refused(NoFreeBlocksError, "1 blocks are needed", allocator):
            forked.append_token_ids([1])
    assert forked.token_ids == [0, 1]
    assert allocator.clear_copy_on_writes() == []


# -- swap ----------------------------------------------------------------------------


@both_classes
def test_swapped_blocks_move_to_another_allocator(create_block: Any) -> None:
    gpu, cpu = (
        allocator_of(4, create_block),
        allocator_of(4, create_block, block_ids=range(10, 14)),
    )
    blocks = sequence(gpu, 4, 2)
    cpu.check_swap_in(blocks)
    gpu.check_swap_out(blocks)
    gpu.swap_out(blocks)
    cpu.swap_in(blocks)
    assert ids(blocks) == [10, 11]
    assert [gpu.get_num_free_blocks(), cpu.get_num_free_blocks()] == [4, 2]
    assert blocks[1].token_ids == [0, 1]
    for block in blocks:
        cpu.free(block)
    cpu.check()
    gpu.check()


def test_a_swapped_block_is_written_to_where_it_went() -> None:
    gpu, cpu = allocator_of(), allocator_of(block_ids=range(10, 16))
    [block] = sequence(gpu, 2)
    gpu.swap_out([block])
    cpu.swap_in([block])
    [forked] = cpu.fork(block)
    forked.append_token_ids([5])
    assert ids([block, forked]) == [10, 11]
    assert cpu.clear_copy_on_writes() == [(10, 11)]


@pytest.mark.parametrize("name", ["swap_out", "check_swap_out"])
def test_blocks_are_swapped_out_all_or_none(
    allocator: NaiveBlockAllocator, name: str
) -> None:
    swap_out = getattr(allocator, name)
    one, two, gone = sequence(allocator, 4, 4, 4)
    [foreign] = sequence(allocator_of(), 4)
    allocator.free(gone)
    cases: list[tuple[type[Exception], str, list[Any]]] = [
        (BlockStateError, "was freed", [one, two, gone]),
        (ValueError, "does not belong", [one, two, foreign]),
        (ValueError, "more than once", [one, two, one]),
        (TypeError, "expected a block", [one, two, None]),
        (TypeError, "expected a block", [one, two, 0]),
    ]
    for error, match, blocks in cases:
        with refused(error, match, allocator):
            swap_out(blocks)
        with refused(error, match, allocator):
            swap_out(iter(blocks))


def test_blocks_are_swapped_in_all_or_none(allocator: NaiveBlockAllocator) -> None:
    held, *idle = sequence(allocator, 4, 4, 4)
    allocator.swap_out(idle)
    sequence(allocator, 0, 0, 0)
    bigger = NaiveBlock(None, [], 8, allocator)
    caching = PrefixCachingBlockAllocator(1, SIZE).allocate_mutable_block(None)
    cases: list[tuple[type[Exception], str, list[Any]]] = [
        (NoFreeBlocksError, "3 blocks are needed", [*idle, NaiveBlock(None, [], 4, 0)]),
        (ValueError, "more than once", [idle[0], idle[0]]),
        (ValueError, "has not 4 tokens", [idle[0], bigger]),
        (TypeError, "expected a NaiveBlock", [idle[0], caching]),
        (TypeError, "expected a NaiveBlock", [idle[0], None]),
    ]
    for error, match, blocks in cases:
        for swap_in in (allocator.swap_in, allocator.check_swap_in):
            with refused(error, match, allocator):
                swap_in(blocks)
    with refused(BlockStateError, "holds a physical block", allocator):
        allocator.swap_in([idle[0], held])
    assert ids(idle) == [None, None]


# -- what only a cache has -----------------------------------------------------------


def test_there_is_no_cache(allocator: NaiveBlockAllocator) -> None:
    [block] = sequence(allocator, 4)
    allocator.mark_blocks_as_accessed([0], 1.0)
    allocator.mark_blocks_as_computed([0])
    assert allocator.get_common_computed_block_ids([[0], [0]]) == []
    assert allocator.find_cached_blocks_prefix([1]) == []
    assert allocator.get_prefix_cache_hit_rate() == -1
    assert allocator.reset_prefix_cache() is True
    with refused(NotImplementedError, "in no cache", allocator):
        allocator.promote_to_immutable_block(block)
    assert allocator.allocate_immutable_block(None, block.token_ids).block_id == 1


def test_full_blocks_are_touched_once_each(allocator: NaiveBlockAllocator) -> None:
    full, part = sequence(allocator, 4, 2)
    [forked, _] = allocator.fork(part)
    touched = allocator.get_num_full_blocks_touched
    assert touched([]) == touched([part]) == 0
    assert touched([full, full, part, forked]) == 2


# -- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["free", "fork", "cow_block_if_not_appendable"])
def test_a_block_of_nobody_or_another_is_refused(
    allocator: NaiveBlockAllocator, method: str
) -> None:
    other = allocator_of()
    [foreign] = sequence(other, 2)
    caching = PrefixCachingBlockAllocator(1, SIZE).allocate_mutable_block(None)
    call = getattr(allocator, method)
    for block in (foreign, caching, NaiveBlock(None, [], 4, None)):
        with refused((TypeError, ValueError), ".", allocator, other):
            call(block)
    for thing in (None, 0, "block", object(), allocator):
        with refused(TypeError, "expected a", allocator):
            call(thing)
    with refused(BlockStateError, "was freed", allocator):
        call(NaiveBlock(None, [], 4, allocator))


@pytest.mark.parametrize("device", [0, "gpu", allocator_of])
def test_it_has_one_device(allocator: NaiveBlockAllocator, device: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: allocator.allocate_mutable_block(None, None, device),
        lambda: allocator.allocate_immutable_block(None, [1], None, device),
        lambda: allocator.allocate_immutable_blocks(None, [[1]], None, device),
    ]
    for call in calls:
        with refused(ValueError, "one device", allocator):
            call()


@pytest.mark.parametrize(
    "block_tokens",
    [
        None,
        1,
        [None],
        [[1], 1],
        [[1], [1.0]],
        [[1], [True]],
        [[1], "1"],
        [[1], [2**63]],
    ],
    ids=str,
)
def test_tokens_that_are_none_take_no_block(
    allocator: NaiveBlockAllocator, block_tokens: Any
) -> None:
    with refused((TypeError, ValueError), ".", allocator):
        allocator.allocate_immutable_blocks(None, block_tokens)


def test_more_tokens_than_fit_take_no_block(allocator: NaiveBlockAllocator) -> None:
    with refused(BlockStateError, "do not fit", allocator):
        allocator.allocate_immutable_blocks(None, [[1], [1] * 5])


def test_tokens_that_raise_midway_take_no_block(allocator: NaiveBlockAllocator) -> None:
    def lists() -> Iterator[list[int]]:
        yield [1]
        raise LookupError("midway")

    with refused(LookupError, "midway", allocator):
        allocator.allocate_immutable_blocks(None, lists())


def test_tokens_that_allocate_as_they_are_read_are_counted(
    allocator: NaiveBlockAllocator,
) -> None:
    taken = []

    def lists() -> Iterator[list[int]]:
        for _ in range(3):
            taken.append(allocator.allocate_mutable_block(None))
            yield [1]

    assert ids(allocator.allocate_immutable_blocks(None, lists())) == [3, 4, 5]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_immutable_blocks(None, lists())
    assert ids(taken) == [0, 1, 2]
    allocator.check()


@pytest.mark.parametrize("count", [-1, 2**31, 2**64, True, 1.0, "1", None])
def test_the_number_of_blocks_is_an_int_from_0_on(count: Any) -> None:
    for create_block in (NaiveBlock, PlainBlock):
        with pytest.raises((TypeError, ValueError), match="num_blocks"):
            NaiveBlockAllocator(create_block, count, SIZE)


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 1.0, "1", None])
def test_a_block_has_one_token_or_more(size: Any) -> None:
    for create_block in (NaiveBlock, PlainBlock):
        with pytest.raises((TypeError, ValueError), match="block_size"):
            NaiveBlockAllocator(create_block, 2, size)


def test_what_makes_blocks_is_callable() -> None:
    for create_block in (None, 1, "NaiveBlock"):
        with pytest.raises(TypeError, match="create_block"):
            allocator_of(2, create_block)
    for block_pool in (0, "pool", PlainBlock):
        with pytest.raises(TypeError, match="block_pool"):
            allocator_of(2, block_pool=block_pool)


def test_an_allocator_is_made_once(allocator: NaiveBlockAllocator) -> None:
    sequence(allocator, 4)
    with refused(ValueError, "already made", allocator):
        allocator.__init__(NaiveBlock, 100, SIZE)


def test_an_allocator_that_is_made_while_its_ids_are_read_keeps_its_blocks() -> None:
    allocator = NaiveBlockAllocator.__new__(NaiveBlockAllocator)
    blocks: list[Any] = []

    def block_ids() -> Iterator[int]:
        allocator.__init__(NaiveBlock, 100, SIZE)
        blocks.extend(sequence(allocator, *[0] * 100))
        yield 7

    with pytest.raises(ValueError, match="made"):
        allocator.__init__(NaiveBlock, 1, SIZE, block_ids())
    for block in blocks:
        allocator.free(block)
    allocator.check()


def test_an_allocator_that_was_never_made_has_no_blocks() -> None:
    allocator = NaiveBlockAllocator.__new__(NaiveBlockAllocator)
    allocator.check()
    assert allocator.get_num_total_blocks() == 0
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)


def test_an_allocator_of_no_blocks_is_always_out_of_them() -> None:
    allocator = allocator_of(0)
    allocator.check()
    assert allocator.all_block_ids == frozenset()
    assert allocator.allocate_immutable_blocks(None, []) == []
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_allocator_is_not_copied(
    allocator: NaiveBlockAllocator, duplicate: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError):
        duplicate(allocator)


# -- the one in a prefix-caching allocator -------------------------------------------


def test_the_part_of_a_prefix_caching_allocator_shows_and_changes_nothing() -> None:
    owner = PrefixCachingBlockAllocator(3, SIZE)
    block, part = owner.allocate_mutable_block(None), owner._hashless_allocator
    assert part.get_num_free_blocks() == 2
    part.check()
    calls: list[Callable[[], object]] = [
        lambda: part.allocate_mutable_block(None),
        lambda: part.allocate_immutable_block(None, [1]),
        lambda: part.allocate_immutable_blocks(None, []),
        lambda: part.allocate_blocks(None, []),
        lambda: part.free(block),
        lambda: part.free_block_id(0),
        lambda: part.fork(block),
        lambda: part.cow_block_if_not_appendable(block),
        lambda: part.swap_out([]),
        lambda: part.swap_in([]),
        lambda: part.check_swap_out([]),
        lambda: part.check_swap_in([]),
    ]
    for call in calls:
        with refused(ValueError, "through their prefix-caching allocator", owner):
            call()


# -- blocks of a class of one's own --------------------------------------------------


def test_blocks_are_made_by_the_factory_with_vllms_arguments() -> None:
    seen: list[dict[str, Any]] = []

    def create(**arguments: Any) -> PlainBlock:
        seen.append(arguments)
        return PlainBlock(**arguments)

    allocator = allocator_of(2, create)
    block = allocator.allocate_immutable_block(None, [1, 2])
    assert block.block_id == 0
    [made] = seen
    assert made["allocator"] is allocator
    assert made["token_ids"] == [1, 2]
    assert made["block_size"] == SIZE
    assert made["prev_block"] is made["block_id"] is None


def test_an_object_is_used_again_once_nobody_holds_it() -> None:
    made = []

    def create(**arguments: Any) -> PlainBlock:
        made.append(1)
        return PlainBlock(**arguments)

    allocator = allocator_of(2, create)
    for _ in range(10):
        allocator.free(allocator.allocate_mutable_block(None))
    assert len(made) <= 2
    for _ in range(10):
        allocator.free(allocator.allocate_mutable_block(None), keep_block_object=True)
    assert len(made) >= 10


def test_several_allocators_may_share_a_pool_of_objects() -> None:
    pool = BlockPool(SIZE, PlainBlock, None, 10)
    one, two = (allocator_of(2, PlainBlock, block_pool=pool) for _ in range(2))
    one.free(one.allocate_mutable_block(None))
    assert two.allocate_mutable_block(None).block_id == 0


def test_a_factory_that_raises_takes_no_block() -> None:
    def create(token_ids: list[int], **arguments: Any) -> PlainBlock:
        if token_ids == [13]:
            raise LookupError("13")
        return PlainBlock(token_ids=token_ids, **arguments)

    allocator = allocator_of(4, create)
    with refused(LookupError, "13", allocator):
        allocator.allocate_immutable_blocks(None, [[1], [13]])


@pytest.mark.parametrize("thing", [None, 0, "block", object()])
def test_a_factory_that_makes_no_block_takes_none(thing: Any) -> None:
    allocator = allocator_of(4, lambda **arguments: thing)
    with refused(AttributeError, "block_id", allocator):
        allocator.allocate_mutable_block(None)


@pytest.mark.parametrize("kind", ["prefix caching", "naive"])
@pytest.mark.parametrize("held", [True, False])
def test_a_factory_that_gives_a_block_of_another_allocator_takes_none(
    kind: str, held: bool
) -> None:
    """Else it would have a physical block that its own allocator does not have."""
    other: Any = (
        allocator_of(1) if kind == "naive" else PrefixCachingBlockAllocator(1, SIZE)
    )
    block = other.allocate_mutable_block(None)
    if not held:
        other.free(block)
    allocator = allocator_of(100, lambda **arguments: block)
    with refused(ValueError, "does not belong", allocator, other):
        allocator.allocate_mutable_block(None)


def test_a_pool_that_makes_blocks_of_another_allocator_takes_none() -> None:
    owner = PrefixCachingBlockAllocator(1, SIZE)
    pool = BlockPool(SIZE, PrefixCachingBlock, owner, 10)
    allocator = allocator_of(100, block_pool=pool)
    with refused(ValueError, "does not belong", allocator, owner):
        allocator.allocate_mutable_block(None)


@both_classes
def test_a_factory_that_gives_one_block_twice_takes_none(create_block: Any) -> None:
    made: list[Any] = []

    def create(**arguments: Any) -> Any:
        made[:] = made or [create_block(**arguments)]
        return made[0]

    allocator = allocator_of(4, create)
    with refused(BlockStateError, "holds", allocator):
        allocator.allocate_immutable_blocks(None, [[1], [2]])
    made.clear()
    allocator.allocate_mutable_block(None)
    with refused(BlockStateError, "holds", allocator):
        allocator.allocate_mutable_block(None)
    allocator.free(made[0])
    allocator.check()


class HookedBlock(PlainBlock):
    """Its hooks run when a physical block is given to it."""

    hooks: tuple[Callable[[int | None], object], ...] = ()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if HookedBlock.hooks:
            self.hook, *rest = HookedBlock.hooks
            HookedBlock.hooks = tuple(rest)


def stop(value: int | None) -> None:
    raise LookupError(f"no {value}")


@pytest.fixture
def hooked() -> Iterator[NaiveBlockAllocator]:
    HookedBlock.hooks = ()
    yield allocator_of(6, HookedBlock)
    HookedBlock.hooks = ()


def test_a_block_that_keeps_its_id_has_all_of_a_swap_keep_theirs(
    hooked: NaiveBlockAllocator,
) -> None:
    blocks = sequence(hooked, 4, 4)
    blocks[1].hook = stop
    with refused(LookupError, "no None", hooked):
        hooked.swap_out(blocks)
    assert [block.block_id for block in blocks] == [0, 1]
    hooked.swap_out(blocks)
    assert hooked.get_num_free_blocks() == 6


def test_a_block_that_does_not_take_its_id_undoes_the_call(
    hooked: NaiveBlockAllocator,
) -> None:
    blocks = sequence(hooked, 4, 4)
    HookedBlock.hooks = (nothing, stop)
    with refused(LookupError, "no 3", hooked):
        hooked.allocate_immutable_blocks(None, [[1], [1], [1]])
    HookedBlock.hooks = (nothing, stop)
    with refused(LookupError, "no 1", hooked):
        hooked.fork(blocks[-1])
    hooked.fork(blocks[-1])
    blocks[-1].hook = stop
    with refused(LookupError, "no 2", hooked):
        hooked.cow_block_if_not_appendable(blocks[-1])
    blocks[-1].hook = stop
    with refused(LookupError, "no None", hooked):
        hooked.free(blocks[-1])
    assert hooked.clear_copy_on_writes() == []


def test_a_block_that_frees_and_allocates_as_it_gets_its_id_does_no_harm(
    hooked: NaiveBlockAllocator,
) -> None:
    blocks = sequence(hooked, 4, 4)

    def free_all(value: int | None) -> None:
        for block in blocks:
            if block.block_id is not None:
                hooked.free(block)

    def take_all(value: int | None) -> None:
        blocks.extend(sequence(hooked, *[0] * hooked.get_num_free_blocks()))

    HookedBlock.hooks = (free_all,)
    forked = hooked.fork(blocks[-1])
    hooked.check()
    assert hooked._refcounter._refcounts == {
        0: 1,
        1: 1,
        **dict.fromkeys(range(2, 6), 0),
    }
    [shared, _] = hooked.fork(forked[-1])
    shared.hook = take_all
    hooked.cow_block_if_not_appendable(shared)
    hooked.check()
    counts = dict.fromkeys(range(6), 1) | {1: 2}
    assert hooked._refcounter._refcounts == counts
    assert hooked.clear_copy_on_writes() == [(0, shared.block_id)]


def test_a_block_that_frees_its_id_as_it_loses_it_frees_it_once(
    hooked: NaiveBlockAllocator,
) -> None:
    [block] = sequence(hooked, 4)
    block.hook = lambda value: hooked.free_block_id(0)
    hooked.free(block)
    hooked.check()
    assert hooked._free_block_indices == [0, 1, 2, 3, 4, 5]


def test_a_block_that_frees_its_id_and_raises_as_it_gets_it_frees_it_once(
    hooked: NaiveBlockAllocator,
) -> None:
    def free_and_stop(value: int | None) -> None:
        assert value is not None
        hooked.free_block_id(value)
        stop(value)

    HookedBlock.hooks = (nothing, free_and_stop)
    with pytest.raises(LookupError):
        hooked.allocate_immutable_blocks(None, [[1], [1]])
    hooked.check()
    assert hooked.get_num_free_blocks() == 6


@pytest.mark.parametrize("value", [-1, 6, 2**63, "0", True])
def test_a_block_that_names_no_block_of_the_allocator_is_refused(
    hooked: NaiveBlockAllocator, value: Any
) -> None:
    [block] = sequence(hooked, 4)
    block.block_id = value
    for method in ("free", "fork", "cow_block_if_not_appendable"):
        with refused((TypeError, ValueError), ".", hooked):
            getattr(hooked, method)(block)


# -- memory --------------------------------------------------------------------------


def test_an_allocator_has_no_object_for_a_physical_block() -> None:
    gc.collect()
    before = len(gc.get_objects())
    small = allocator_of(10)
    between = len(gc.get_objects())
    big = allocator_of(100_000)
    after = len(gc.get_objects())
    assert after - between <= between - before
    assert small.get_num_free_blocks() + big.get_num_free_blocks() == 100_010


def test_allocating_and_freeing_leaves_nothing_behind(
    allocator: NaiveBlockAllocator,
) -> None:
    def churn(rounds: int) -> None:
        for _ in range(rounds):
            block, last = allocator.allocate_immutable_blocks(None, [[1] * 4, [2]])
            for one in [block, last, *allocator.fork(last)]:
                allocator.free(one)
            del block, last, one

    churn(10)
    before = snapshot(allocator)
    tracemalloc.start()
    first, _ = tracemalloc.get_traced_memory()
    churn(10_000)
    last, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last - first < 5_000
    assert snapshot(allocator) == before


def test_an_allocator_is_collected_with_a_factory_that_refers_to_it() -> None:
    class Witness:
        gone = 0

        def __del__(self) -> None:
            Witness.gone += 1

    def make() -> None:
        witness, others = Witness(), []

        def create(**arguments: Any) -> PlainBlock:
            assert witness is not None
            return PlainBlock(**arguments)

        allocator = allocator_of(4, create)
        others.append(allocator)
        create.__dict__["others"] = others
        blocks = sequence(allocator, 4, 4)
        allocator.free(blocks.pop())

    make()
    gc.collect()
    assert Witness.gone == 1
