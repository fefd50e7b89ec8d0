"""The ids of an allocator's blocks: any ints, and their places in ascending order."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from doubles import Index

from kvcache.prefix_caching.block_ids import BlockIds
from kvcache.prefix_caching.blocks import PrefixCachingBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

LARGEST = 2**63 - 1


def allocator_of(ids: Any, count: int | None = None) -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(len(ids) if count is None else count, 4, ids)


def handed_out(allocator: PrefixCachingBlockAllocator) -> list[int | None]:
    blocks = [
        allocator.allocate_mutable_block(None)
        for _ in range(allocator.get_num_total_blocks())
    ]
    return [block.block_id for block in blocks]


id_lists = pytest.mark.parametrize(
    "ids",
    [
        [],
        [0],
        [5, 6, 7],
        [7, 6, 5],
        [3, 0, 9],
        [2, 5, 100, 10**12],
        [LARGEST, 0],
        [LARGEST - 1, LARGEST],
        range(4, 9),
        range(9, 4, -2),
        range(LARGEST - 2, LARGEST + 1),
    ],
    ids=str,
)


@id_lists
def test_blocks_are_first_handed_out_in_the_order_their_ids_were_given(
    ids: list[int],
) -> None:
    assert handed_out(allocator_of(ids)) == list(ids)


@id_lists
def test_a_physical_id_is_the_place_of_an_id_in_ascending_order(
    ids: list[int],
) -> None:
    allocator = allocator_of(ids)
    places = [allocator.get_physical_block_id(one) for one in sorted(ids)]
    assert places == list(range(len(ids)))


@id_lists
def test_all_block_ids_is_a_frozenset_of_them(ids: list[int]) -> None:
    allocator = allocator_of(ids)
    assert allocator.all_block_ids == frozenset(ids)
    assert type(allocator.all_block_ids) is frozenset
    assert allocator.all_block_ids is allocator.all_block_ids


def test_without_ids_they_are_counted_from_0() -> None:
    assert handed_out(PrefixCachingBlockAllocator(3, 4)) == [0, 1, 2]


def test_ids_may_come_from_an_iterator() -> None:
    allocator = PrefixCachingBlockAllocator(2, 4, iter([8, 3]))
    assert handed_out(allocator) == [8, 3]


def test_ids_may_be_integers_of_another_class() -> None:
    assert handed_out(allocator_of([Index(8), Index(3)])) == [8, 3]


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], [3, 1, 7], range(3)], ids=["contiguous", "gaps", "range"]
)
def test_count_is_the_number_of_ids(ids: Iterable[int]) -> None:
    assert BlockIds(ids, 3).count == 3


def test_a_repeated_id_counts_once_where_no_number_is_expected() -> None:
    assert BlockIds([4, 4, 9, 4]).count == 2


@pytest.mark.parametrize("ids", [[4, 9, 4], [4, 4, 9], [1, 2, 1]])
def test_a_repeated_id_is_refused_by_name_where_a_number_is_expected(
    ids: list[int],
) -> None:
    with pytest.raises(ValueError, match=f"block id {ids[0]} is listed more than once"):
        BlockIds(ids, 3)


def test_a_repeated_id_is_found_at_once_among_many() -> None:
    many = list(range(200_000))
    with pytest.raises(ValueError, match="block id 199999 is listed"):
        BlockIds([*many, 199_999], 200_001)


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3], range(5)], ids=str)
def test_the_ids_must_be_as_many_as_the_blocks(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(ids)} block ids for 2 blocks"):
        BlockIds(ids, 2)


@pytest.mark.parametrize(
    "ids",
    [
        [1, -1],
        [1, LARGEST + 1],
        [2**200, 1],
        range(-1, 1),
        range(LARGEST, LARGEST + 2),
        range(2**64),
        range(10**30),
    ],
    ids=str,
)
def test_an_id_has_64_bits_and_is_not_negative(ids: Any) -> None:
    with pytest.raises(ValueError):
        PrefixCachingBlockAllocator(2, 4, ids)


@pytest.mark.parametrize(
    "ids", [[1, 2.0], [1, "2"], [1, True], [1, None], [1, b"2"], "12", 12, 1.5, object]
)
def test_an_id_is_an_int(ids: Any) -> None:
    with pytest.raises(TypeError):
        PrefixCachingBlockAllocator(2, 4, ids)


def test_more_blocks_than_32_bits_count_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="too many"):
        BlockIds(range(2**31))
    with pytest.raises(ValueError, match="num_blocks"):
        PrefixCachingBlockAllocator(2**31, 4, range(2**31))


def test_an_iterator_that_raises_midway_makes_no_allocator() -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise LookupError("midway")

    allocator = PrefixCachingBlockAllocator.__new__(PrefixCachingBlockAllocator)
    with pytest.raises(LookupError, match="midway"):
        allocator.__init__(2, 4, ids())
    assert allocator.get_num_total_blocks() == 0
    allocator.check()


def test_an_allocator_that_is_made_while_its_ids_are_read_keeps_its_blocks() -> None:
    allocator = PrefixCachingBlockAllocator.__new__(PrefixCachingBlockAllocator)
    blocks: list[PrefixCachingBlock] = []

    def ids() -> Iterator[int]:
        allocator.__init__(100, 1)
        blocks.extend(allocator.allocate_mutable_block(None) for _ in range(100))
        yield 7

    with pytest.raises(ValueError, match="made"):
        allocator.__init__(1, 1, ids())
    for block in blocks:
        allocator.free(block)
    allocator.check()
    assert allocator.get_num_free_blocks() == 100


@pytest.mark.parametrize("block_id", [-1, 2, 4, 2**63, 2**200])
def test_an_id_that_no_block_has_is_refused_by_name(block_id: int) -> None:
    allocator = allocator_of([1, 3, 5])
    with pytest.raises(ValueError, match=str(block_id)):
        allocator.get_physical_block_id(block_id)


@pytest.mark.parametrize("block_id", [1.0, "1", True, None, [1]])
def test_a_block_is_asked_for_by_an_int(block_id: Any) -> None:
    with pytest.raises(TypeError):
        allocator_of([1, 3, 5]).get_physical_block_id(block_id)


def test_an_integer_of_another_class_is_an_id_too() -> None:
    asked: Any = Index(5)
    assert allocator_of([1, 3, 5]).get_physical_block_id(asked) == 2
