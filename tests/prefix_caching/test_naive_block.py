"""`NaiveBlock`: tokens, and the physical block they are in."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from doubles import Index, refused

from kvcache import BlockStateError
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.interfaces import Block
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def block_of(*tokens: Any, size: int = 4, **arguments: Any) -> NaiveBlock:
    """A block of no allocator of kvcache's."""
    arguments = {"prev_block": None, "allocator": MagicMock(), **arguments}
    return NaiveBlock(token_ids=tokens, block_size=size, **arguments)


@pytest.fixture
def allocator() -> NaiveBlockAllocator:
    return NaiveBlockAllocator(NaiveBlock, 8, 4)


def test_a_block_shows_what_it_was_made_from() -> None:
    before, allocator = block_of(), MagicMock()
    block = NaiveBlock(before, [1, 2, 3], 4, allocator, 7)
    assert block.prev_block is before
    assert block.token_ids == [1, 2, 3]
    assert block.block_size == 4
    assert block._allocator is allocator
    assert block.block_id == 7
    assert repr(block) == "NaiveBlock(block_id=7, num_tokens=3 of 4)"
    assert isinstance(block, Block)


def test_a_block_needs_no_physical_one() -> None:
    assert block_of().block_id is None


@pytest.mark.parametrize("count", range(5))
def test_a_block_is_full_when_no_more_tokens_fit(count: int) -> None:
    block = block_of(*range(count))
    assert block.num_empty_slots == 4 - count
    assert block.is_full == (count == 4)


@pytest.mark.parametrize("tokens", [[], [0], [LOWEST, HIGHEST, -1, 2**30, 2**31]])
def test_tokens_are_ints_of_64_bits(tokens: list[int]) -> None:
    assert block_of(*tokens, size=8).token_ids == tokens


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), range(1, 3), iter([1, 2])], ids=str)
def test_tokens_come_in_any_iterable(tokens: Any) -> None:
    assert NaiveBlock(None, tokens, 4, MagicMock()).token_ids == [1, 2]


def test_tokens_may_be_integers_of_another_class() -> None:
    assert block_of(Index(1), Index(2)).token_ids == [1, 2]


def test_the_list_of_tokens_is_the_callers() -> None:
    block = block_of(1, 2)
    block.token_ids.append(3)
    assert block.token_ids == [1, 2]


def test_tokens_are_appended_behind_those_in_it() -> None:
    block = block_of(1)
    block.append_token_ids([2])
    block.append_token_ids([])
    block.append_token_ids((3, 4))
    assert block.token_ids == [1, 2, 3, 4]


# -- an allocator of another class --------------------------------------------------


def test_a_block_asks_its_allocator_for_a_copy_when_it_is_written_to() -> None:
    allocator = MagicMock()
    allocator.cow_block_if_not_appendable.return_value = 9
    block = block_of(allocator=allocator, block_id=7)
    block.append_token_ids([1])
    allocator.cow_block_if_not_appendable.assert_called_once_with(block)
    assert block.block_id == 9


def test_it_names_another_block_to_the_allocator_where_it_is_told_to() -> None:
    allocator, target = MagicMock(), object()
    allocator.cow_block_if_not_appendable.return_value = 9
    block_of(allocator=allocator, block_id=7, _cow_target=target).append_token_ids([1])
    allocator.cow_block_if_not_appendable.assert_called_once_with(target)


def test_a_block_without_a_physical_one_asks_for_none() -> None:
    allocator = MagicMock()
    block_of(allocator=allocator).append_token_ids([1])
    allocator.cow_block_if_not_appendable.assert_not_called()


@pytest.mark.parametrize("answer", [-1, 2**63, "9", 1.0, True])
def test_an_allocator_that_answers_with_no_id_is_heard_of(answer: Any) -> None:
    allocator = MagicMock()
    allocator.cow_block_if_not_appendable.return_value = answer
    block = block_of(allocator=allocator, block_id=7)
    with pytest.raises((TypeError, ValueError), match="block_id"):
        block.append_token_ids([1])
    assert block.block_id == 7


@pytest.mark.parametrize("value", [0, 5, HIGHEST, None])
def test_its_id_can_be_set(value: int | None) -> None:
    block = block_of(block_id=7)
    block.block_id = value
    assert block.block_id == value


@pytest.mark.parametrize("value", [-1, HIGHEST + 1, True, 1.0, "1"])
def test_an_id_is_an_int_of_63_bits_or_none(value: Any) -> None:
    block = block_of(block_id=7)
    with pytest.raises((TypeError, ValueError), match="block_id"):
        block.block_id = value
    assert block.block_id == 7
    with pytest.raises((TypeError, ValueError), match="block_id"):
        block_of(block_id=value)


# -- one of kvcache's ----------------------------------------------------------------


def test_a_block_of_an_allocator_of_kvcaches_gets_its_id_from_it_alone(
    allocator: NaiveBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    for value in (None, 0, 1):
        with refused(BlockStateError, "by its allocator", allocator):
            block.block_id = value
    with pytest.raises(BlockStateError, match="by its allocator"):
        NaiveBlock(None, [], 4, allocator, 1)


def test_a_freed_block_is_not_written_to(allocator: NaiveBlockAllocator) -> None:
    block = allocator.allocate_mutable_block(None)
    allocator.free(block)
    with refused(BlockStateError, "was freed", allocator):
        block.append_token_ids([1])
    assert block.token_ids == []


def test_a_block_that_is_freed_while_its_tokens_are_read_is_not_written_to(
    allocator: NaiveBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    with pytest.raises(BlockStateError, match="was freed"):
        block.append_token_ids([1, Index(2, lambda: allocator.free(block))])
    allocator.check()
    assert allocator.get_num_free_blocks() == 8


def test_a_block_that_fills_while_its_tokens_are_read_takes_no_more(
    allocator: NaiveBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    with pytest.raises(BlockStateError, match="do not fit"):
        block.append_token_ids([Index(9, lambda: block.append_token_ids([1] * 4))])
    assert block.token_ids == [1] * 4


# -- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1] * 100])
def test_more_tokens_than_fit_are_refused(tokens: list[int]) -> None:
    block = block_of(8, 9)
    with pytest.raises(BlockStateError, match=f"{len(tokens)} more tokens do not fit"):
        block.append_token_ids(tokens)
    with pytest.raises(AssertionError):  # as in vLLM
        block.append_token_ids(tokens)
    assert block.token_ids == [8, 9]
    with pytest.raises(BlockStateError, match="do not fit"):
        block_of(*range(5))


@pytest.mark.parametrize("token", [True, 1.0, "1", b"1", None, [1], float("nan")])
def test_a_token_is_an_int(token: Any) -> None:
    block = block_of(8)
    with pytest.raises(TypeError):
        block.append_token_ids([1, token])
    assert block.token_ids == [8]
    with pytest.raises(TypeError):
        block_of(1, token)


@pytest.mark.parametrize("token", [LOWEST - 1, HIGHEST + 1, 2**200])
def test_a_token_that_does_not_fit_64_bits_is_named(token: int) -> None:
    block = block_of(8)
    with pytest.raises(ValueError, match=str(token)):
        block.append_token_ids([1, token])
    assert block.token_ids == [8]


@pytest.mark.parametrize("tokens", [None, 1, "12", b"12", "", MagicMock])
def test_tokens_are_no_text_and_no_number(tokens: Any) -> None:
    with pytest.raises(TypeError):
        block_of().append_token_ids(tokens)
    with pytest.raises(TypeError):
        NaiveBlock(None, tokens, 4, None)


def test_tokens_that_raise_midway_are_not_written() -> None:
    def tokens() -> Iterator[int]:
        yield 1
        raise LookupError("midway")

    block = block_of(8)
    with pytest.raises(LookupError, match="midway"):
        block.append_token_ids(tokens())
    assert block.token_ids == [8]


def test_a_token_that_changes_the_list_it_is_in_does_no_harm() -> None:
    tokens: list[Any] = [1, 2, 3]
    tokens[1] = Index(2, tokens.clear)
    block = block_of()
    block.append_token_ids(tokens)
    assert block.token_ids == [1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 4.0, "4", None])
def test_a_block_has_room_for_one_token_or_more(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size"):
        NaiveBlock(None, [], size, None)


def test_a_block_is_made_once() -> None:
    block = block_of(1, 2)
    with pytest.raises(BlockStateError, match="already made"):
        block.__init__(None, [3], 400, None)
    assert block.token_ids == [1, 2]
    assert block.block_size == 4


def test_a_block_that_is_made_while_its_size_is_read_is_not_made_again() -> None:
    block = NaiveBlock.__new__(NaiveBlock)
    make: Callable[..., None] = block.__init__
    with pytest.raises(BlockStateError, match="already made"):
        make(None, [7] * 1000, Index(1000, lambda: make(None, [1], 1, None)), None)
    assert block.token_ids == [1]


def test_a_block_that_was_never_made_is_empty_and_takes_nothing() -> None:
    block = NaiveBlock.__new__(NaiveBlock)
    assert block.token_ids == []
    assert block.block_id is block.prev_block is block._allocator is None
    with pytest.raises(BlockStateError, match="do not fit"):
        block.append_token_ids([1])
    block.append_token_ids([])


@pytest.mark.parametrize("name", ["computed", "last_accessed", "num_tokens_total"])
def test_what_only_a_cache_needs_is_not_implemented(name: str) -> None:
    with pytest.raises(NotImplementedError):
        getattr(block_of(), name)
    if name != "num_tokens_total":
        with pytest.raises(NotImplementedError):
            setattr(block_of(), name, 1)


def test_it_has_no_hash() -> None:
    block = block_of(1, 2, 3, 4, extra_hash=5)
    assert block.content_hash is block.extra_hash is None


@pytest.mark.parametrize(
    "name", ["token_ids", "block_size", "prev_block", "is_full", "num_empty_slots", "x"]
)
def test_nothing_else_can_be_set(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(block_of(), name, 1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_block_is_not_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError):
        duplicate(block_of(1))


def test_the_collector_does_not_track_blocks(allocator: NaiveBlockAllocator) -> None:
    assert not gc.is_tracked(allocator.allocate_mutable_block(None))
