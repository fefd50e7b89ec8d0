"""`PrefixCachingBlock`: tokens, their hash once it is full, and the physical block."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from doubles import Index, refused, snapshot

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import (
    NaiveBlock,
    PrefixCachingBlock,
    assert_prefix_caching_block_or_none,
)
from kvcache.prefix_caching.interfaces import Block
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.prefix_hash import NONE_HASH, hash_block_tokens

SIZE = 4
LOWEST, HIGHEST = -(2**63), 2**63 - 1


def mock_allocator() -> MagicMock:
    return MagicMock(spec=PrefixCachingBlockAllocator)


def mock_block(content_hash: object, tokens: int = SIZE) -> MagicMock:
    block = MagicMock(spec=PrefixCachingBlock)
    block.content_hash, block.num_tokens_total = content_hash, tokens
    return block


def block_of(*tokens: Any, **arguments: Any) -> PrefixCachingBlock:
    """A block whose allocator is a mock."""
    arguments = {
        "prev_block": None,
        "block_size": SIZE,
        "allocator": mock_allocator(),
        **arguments,
    }
    return PrefixCachingBlock(token_ids=tokens, **arguments)


@pytest.fixture
def allocator() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(8, SIZE)


def test_a_block_shows_what_it_was_made_from() -> None:
    before, allocator = block_of(*range(4)), mock_allocator()
    block = PrefixCachingBlock(before, [1, 2, 3], 4, allocator, 7, True, 9)
    assert block.prev_block is before
    assert block.token_ids == [1, 2, 3]
    assert block.block_size == 4
    assert block._allocator is allocator
    assert block.block_id == 7
    assert block.computed is True
    assert block.extra_hash == 9
    assert block.last_accessed == -1
    assert repr(block) == "PrefixCachingBlock(block_id=7, num_tokens=3 of 4)"
    assert isinstance(block, Block)


@pytest.mark.parametrize("count", range(5))
def test_a_block_is_full_when_no_more_tokens_fit(count: int) -> None:
    block = block_of(*range(count))
    assert block.num_empty_slots == SIZE - count
    assert block.is_full == (count == SIZE)


def test_tokens_are_counted_from_the_start_of_the_sequence() -> None:
    one = block_of(1, 2, 3, 4)
    two = block_of(5, prev_block=one)
    assert [one.num_tokens_total, two.num_tokens_total] == [4, 5]
    two.append_token_ids([6, 7])
    assert two.num_tokens_total == 7
    assert block_of(8, prev_block=mock_block(5, tokens=100)).num_tokens_total == 101


def test_tokens_that_the_block_before_got_meanwhile_are_counted_too() -> None:
    """As when blocks are allocated ahead: it decides which is evicted first."""
    allocator = PrefixCachingBlockAllocator(8, SIZE)
    one = allocator.allocate_mutable_block(None)
    one.append_token_ids([1])
    two = allocator.allocate_mutable_block(one)
    one.append_token_ids([2, 3, 4])
    two.append_token_ids([5, 6, 7, 8])
    assert two.num_tokens_total == 8
    assert [block.num_tokens_total for block in allocator.fork(two)] == [4, 8]
    allocator.free(two)
    allocator.free(allocator.fork(one)[0])
    assert allocator.get_num_free_blocks() == 6


def test_appended_tokens_are_counted_with_those_of_a_fork(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    one = allocator.allocate_mutable_block(None)
    two = allocator.allocate_mutable_block(one)
    one.append_token_ids([1, 2])
    assert [block.num_tokens_total for block in allocator.fork(two)] == [2, 2]


# -- content hash --------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, 0, -7, 2**70])
def test_a_full_first_block_has_the_hash_of_its_tokens(extra: int | None) -> None:
    block = block_of(1, 2, 3, extra_hash=extra)
    assert block.content_hash is None
    block.append_token_ids([4])
    assert block.content_hash == hash_block_tokens(True, None, [1, 2, 3, 4], extra)


@pytest.mark.parametrize("before", [0, 5, -1, 2**127, 2**200])
def test_a_full_block_has_a_hash_with_that_of_the_block_before(before: int) -> None:
    expected = hash_block_tokens(False, before, [1, 2, 3, 4])
    assert block_of(1, 2, 3, 4, prev_block=mock_block(before)).content_hash == expected
    grown = block_of(1, 2, prev_block=mock_block(before))
    grown.append_token_ids([3, 4])
    assert grown.content_hash == expected


@pytest.mark.parametrize("before", [None, NONE_HASH])
def test_a_full_block_behind_one_without_a_hash_has_none(before: int | None) -> None:
    assert block_of(1, 2, 3, 4, prev_block=mock_block(before)).content_hash is None
    assert block_of(1, 2, 3, 4, prev_block=block_of(1)).content_hash is None


def test_it_gets_no_hash_either_when_the_one_before_gets_its() -> None:
    before = block_of(1)
    block = block_of(1, 2, 3, 4, prev_block=before)
    before.append_token_ids([2, 3, 4])
    assert before.content_hash is not None
    assert block.content_hash is None
    assert block_of(1, prev_block=block).content_hash is None


@pytest.mark.parametrize("before", ["5", 5.0, True, MagicMock()])
def test_a_block_before_with_an_odd_hash_is_refused(before: Any) -> None:
    with pytest.raises(TypeError):
        block_of(1, 2, 3, 4, prev_block=mock_block(before))
    block = block_of(1, 2, 3, prev_block=mock_block(before))
    with pytest.raises(TypeError):
        block.append_token_ids([4])
    assert block.token_ids == [1, 2, 3]


def test_two_chains_of_the_same_tokens_have_the_same_hashes() -> None:
    def chain() -> list[int | None]:
        before, hashes = None, []
        for i in range(5):
            before = block_of(*range(i, i + 4), prev_block=before)
            hashes.append(before.content_hash)
        return hashes

    assert chain() == chain()
    assert len(set(chain())) == 5


# -- an allocator of another class --------------------------------------------------


def test_a_block_asks_its_allocator_for_a_copy_and_for_promotion() -> None:
    allocator = mock_allocator()
    allocator.cow_block_if_not_appendable.return_value = 8
    allocator.promote_to_immutable_block.return_value = 9
    block = block_of(1, allocator=allocator, block_id=7)
    block.append_token_ids([2])
    assert block.block_id == 8
    allocator.promote_to_immutable_block.assert_not_called()
    block.append_token_ids([3, 4])
    assert block.block_id == 9
    allocator.promote_to_immutable_block.assert_called_once_with(block)
    assert allocator.cow_block_if_not_appendable.call_count == 2


def test_it_asks_for_nothing_when_nothing_is_appended() -> None:
    allocator = mock_allocator()
    block_of(1, allocator=allocator, block_id=7).append_token_ids([])
    assert allocator.mock_calls == []


@pytest.mark.parametrize("allocator", [None, 1, "allocator", object(), MagicMock()])
def test_its_allocator_is_a_prefix_caching_one(allocator: Any) -> None:
    with pytest.raises(TypeError, match="allocator must be"):
        block_of(allocator=allocator)
    naive = NaiveBlockAllocator(NaiveBlock, 1, SIZE)
    with pytest.raises(TypeError, match="allocator must be"):
        block_of(allocator=naive)


# -- one of kvcache's ----------------------------------------------------------------


def test_a_block_behind_one_of_another_class_is_shared_when_it_is_full() -> None:
    allocator = PrefixCachingBlockAllocator(8, SIZE)
    first = MagicMock(spec=PrefixCachingBlock)
    first.content_hash, first.num_tokens_total = 123, SIZE
    blocks = [allocator.allocate_mutable_block(first) for _ in range(2)]
    for block in blocks:
        block.append_token_ids([7])
        block.append_token_ids(list(range(1, SIZE)))
    assert blocks[0].block_id == blocks[1].block_id
    assert blocks[0].content_hash == blocks[1].content_hash is not None
    assert allocator.get_num_free_blocks() == 7
    allocator.check()


def test_a_block_of_an_allocator_of_kvcaches_gets_its_id_from_it_alone(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    for value in (None, 0, 1):
        with refused(BlockStateError, "by its allocator", allocator):
            block.block_id = value
    with refused(BlockStateError, "by its allocator", allocator):
        block_of(allocator=allocator, block_id=1)


def test_a_full_block_is_cached_as_it_becomes_full(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1, 2, 3])
    assert allocator._cached_blocks == {}
    block.append_token_ids([4])
    assert allocator._cached_blocks == {block.content_hash: block.block_id}
    assert not block.computed


def test_a_full_block_takes_the_cached_one_with_its_content(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    cached = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    block = allocator.allocate_mutable_block(None)
    assert block.block_id == 1
    block.append_token_ids([1, 2, 3, 4])
    assert block.block_id == cached.block_id == 0
    assert block.computed
    assert allocator.get_num_free_blocks() == 7


def test_writing_to_a_shared_block_takes_a_copy(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1])
    [forked] = allocator.fork(block)
    forked.append_token_ids([2])
    block.append_token_ids([3])
    assert [block.block_id, forked.block_id] == [0, 1]
    assert [block.token_ids, forked.token_ids] == [[1, 3], [1, 2]]
    assert allocator.clear_copy_on_writes() == [(0, 1)]


def test_without_a_free_block_a_shared_one_is_not_written_to() -> None:
    allocator = PrefixCachingBlockAllocator(1, SIZE)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1])
    [forked] = allocator.fork(block)
    with refused(NoFreeBlocksError, "1 blocks are needed", allocator):
        forked.append_token_ids([2])
    assert forked.token_ids == [1]
    assert allocator.clear_copy_on_writes() == []


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3, 4]])
def test_a_freed_block_is_not_written_to(
    allocator: PrefixCachingBlockAllocator, tokens: list[int]
) -> None:
    block = allocator.allocate_mutable_block(None)
    allocator.free(block)
    if tokens:
        with refused(BlockStateError, "was freed", allocator):
            block.append_token_ids(tokens)
    else:
        block.append_token_ids(tokens)
    assert block.token_ids == []


def test_a_block_that_is_freed_while_its_tokens_are_read_is_not_written_to(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    tokens: list[Any] = [1, 2, 3, Index(4, lambda: allocator.free(block))]
    with pytest.raises(BlockStateError, match="was freed"):
        block.append_token_ids(tokens)
    allocator.check()
    assert allocator.get_num_free_blocks() == 8
    assert allocator._cached_blocks == {}


def test_a_block_that_fills_while_its_tokens_are_read_takes_no_more(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    tokens: list[Any] = [Index(9, lambda: block.append_token_ids([1] * 4))]
    with pytest.raises(BlockStateError, match="immutable"):
        block.append_token_ids(tokens)
    assert block.token_ids == [1] * 4
    allocator.check()


def test_a_block_that_is_forked_while_its_tokens_are_read_is_copied(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    block = allocator.allocate_mutable_block(None)
    forked: list[PrefixCachingBlock] = []
    tokens: list[Any] = [Index(9, lambda: forked.extend(allocator.fork(block)))]
    block.append_token_ids(tokens)
    assert [block.block_id, forked[0].block_id] == [1, 0]
    assert [block.token_ids, forked[0].token_ids] == [[9], []]


class Before:
    """Stands for a block; asking for its hash does something."""

    __class__ = PrefixCachingBlock  # type: ignore[assignment]
    num_tokens_total = SIZE
    hook: Callable[[], object] = staticmethod(lambda: None)

    @property
    def content_hash(self) -> int:
        self.hook()
        return 5


def no_hash() -> None:
    raise KeyError("no hash")


def test_a_block_that_is_freed_while_the_hash_before_is_read_is_not_cached(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    before: Any = Before()
    block = allocator.allocate_mutable_block(before)
    block.append_token_ids([1, 2, 3])
    before.hook = lambda: allocator.free(block)
    with pytest.raises(BlockStateError, match="was freed"):
        block.append_token_ids([4])
    allocator.check()
    assert allocator._cached_blocks == {}
    assert allocator.get_num_free_blocks() == 8


def test_a_hash_before_that_cannot_be_read_leaves_the_block_as_it_is(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    before: Any = Before()
    block = allocator.allocate_mutable_block(before)
    allocator.fork(allocator.allocate_mutable_block(None))
    before.hook = no_hash
    with refused(KeyError, "no hash", allocator):
        block.append_token_ids([1, 2, 3, 4])
    assert block.token_ids == []
    with refused(KeyError, "no hash", allocator):
        allocator.allocate_immutable_block(before, [1, 2, 3, 4])


# -- mistakes ------------------------------------------------------------------------


def test_a_block_with_a_hash_is_immutable() -> None:
    block = block_of(1, 2, 3, 4)
    for tokens in ([], [5]):
        with pytest.raises(BlockStateError, match="immutable"):
            block.append_token_ids(tokens)
    with pytest.raises(AssertionError):  # as in vLLM
        block.append_token_ids([5])


def test_a_computed_block_is_immutable() -> None:
    block = block_of(1, computed=True)
    with pytest.raises(BlockStateError, match="immutable"):
        block.append_token_ids([2])
    block.computed = False
    block.append_token_ids([2])
    assert block.token_ids == [1, 2]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1] * 100])
def test_more_tokens_than_fit_are_refused(tokens: list[int]) -> None:
    block = block_of(8, 9)
    with pytest.raises(BlockStateError, match=f"{len(tokens)} more tokens do not fit"):
        block.append_token_ids(tokens)
    assert block.token_ids == [8, 9]
    assert block.num_tokens_total == 2
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


def test_tokens_that_raise_midway_are_not_written() -> None:
    def tokens() -> Iterator[int]:
        yield 1
        raise LookupError("midway")

    block = block_of(8)
    with pytest.raises(LookupError, match="midway"):
        block.append_token_ids(tokens())
    assert block.token_ids == [8]


@pytest.mark.parametrize(
    "before", [1, "block", object(), NaiveBlock(None, [], 4, None)]
)
def test_the_block_before_is_a_prefix_caching_one(before: Any) -> None:
    with pytest.raises(TypeError, match="expected a PrefixCachingBlock or None"):
        block_of(prev_block=before)
    with pytest.raises(TypeError, match="expected a PrefixCachingBlock or None"):
        assert_prefix_caching_block_or_none(before)


def test_a_mock_of_a_block_or_none_may_stand_before_it() -> None:
    for before in (None, block_of(), mock_block(5)):
        assert_prefix_caching_block_or_none(before)


@pytest.mark.parametrize("total", [-1, 2**63, 2**200, 1.5, "1", None, True])
def test_a_block_before_with_an_odd_number_of_tokens_is_refused(total: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        block_of(prev_block=mock_block(5, tokens=total))


@pytest.mark.parametrize("extra", [True, 1.0, "1", b"1", (1,)])
def test_an_extra_hash_is_an_int_or_none(extra: Any) -> None:
    with pytest.raises(TypeError, match="extra_hash"):
        block_of(extra_hash=extra)


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 4.0, "4", None])
def test_a_block_has_room_for_one_token_or_more(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size"):
        block_of(block_size=size)


@pytest.mark.parametrize("block_id", [-1, 2**63, True, 1.0, "1"])
def test_an_id_is_an_int_of_63_bits_or_none(block_id: Any) -> None:
    block = block_of(block_id=7)
    with pytest.raises((TypeError, ValueError), match="block_id"):
        block.block_id = block_id
    assert block.block_id == 7
    with pytest.raises((TypeError, ValueError), match="block_id"):
        block_of(block_id=block_id)


@pytest.mark.parametrize("when", [0, 1.5, -3, float("inf")])
def test_the_time_of_its_last_use_can_be_set(when: float) -> None:
    block = block_of()
    block.last_accessed = when
    assert block.last_accessed == when


@pytest.mark.parametrize("when", [float("nan"), "1", None, [1]])
def test_a_time_is_a_number(when: Any) -> None:
    block = block_of()
    with pytest.raises((TypeError, ValueError)):
        block.last_accessed = when
    assert block.last_accessed == -1


def test_computed_is_a_truth_value() -> None:
    class Unsure:
        def __bool__(self) -> bool:
            raise LookupError("unsure")

    block = block_of()
    block.computed = 5  # type: ignore[assignment]
    assert block.computed is True
    with pytest.raises(LookupError):
        block.computed = Unsure()  # type: ignore[assignment]
    assert block.computed is True
    with pytest.raises(LookupError):
        block_of(computed=Unsure())


def test_a_block_is_made_once(allocator: PrefixCachingBlockAllocator) -> None:
    block = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    with refused(BlockStateError, "already made", allocator):
        block.__init__(None, [3], 400, allocator)
    assert block.token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["size", "tokens before"])
def test_a_block_that_is_made_while_its_arguments_are_read_is_not_made_again(
    what: str,
) -> None:
    block = PrefixCachingBlock.__new__(PrefixCachingBlock)

    def make() -> None:
        block.__init__(None, [1], 2, mock_allocator())

    before: Any = None
    size: Any = 10_000
    if what == "size":
        size = Index(size, make)
    else:
        before = mock_block(5, tokens=Index(4, make))  # type: ignore[arg-type]
    with pytest.raises(BlockStateError, match="already made"):
        block.__init__(before, [7] * 9_000, size, mock_allocator())
    assert block.token_ids == [1]
    assert block.block_size == 2
    assert block.prev_block is None


def test_a_block_that_was_never_made_is_empty_and_takes_nothing() -> None:
    block = PrefixCachingBlock.__new__(PrefixCachingBlock)
    assert block.token_ids == []
    assert block.block_id is block.prev_block is block.content_hash is None
    with pytest.raises(BlockStateError, match="do not fit"):
        block.append_token_ids([1])


@pytest.mark.parametrize(
    "name",
    [
        *["token_ids", "block_size", "prev_block", "is_full", "num_empty_slots"],
        *["num_tokens_total", "content_hash", "extra_hash", "another"],
    ],
)
def test_nothing_else_can_be_set(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(block_of(), name, 1)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_block_is_not_copied(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError):
        duplicate(block_of(1))


# -- lifetime ------------------------------------------------------------------------


def test_the_collector_does_not_track_blocks(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    assert not gc.is_tracked(allocator.allocate_mutable_block(None))
    assert not gc.is_tracked(allocator.allocate_immutable_block(None, [1] * 4))


def test_a_block_keeps_the_blocks_before_it_and_its_allocator() -> None:
    blocks = PrefixCachingBlockAllocator(8, SIZE).allocate_immutable_blocks(
        None, [[1] * 4, [2] * 4]
    )
    block = blocks.pop()
    del blocks
    gc.collect()
    assert block.prev_block.token_ids == [1] * 4
    block._allocator.free(block.prev_block)
    block._allocator.check()


def test_a_block_that_goes_unfreed_leaves_its_physical_one_in_use(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    """As in vLLM: only `free` gives a physical block back."""
    before = snapshot(allocator)
    block = allocator.allocate_mutable_block(None)
    del block
    gc.collect()
    assert allocator.get_num_free_blocks() == 7
    assert snapshot(allocator) != before
