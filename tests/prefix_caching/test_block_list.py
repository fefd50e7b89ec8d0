"""The blocks of a sequence beside their ids, and the chain they form."""

import pytest

from kvcache import BlockStateError
from kvcache.prefix_caching.block_list import BlockList, get_all_blocks_recursively
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator

UNIT = 4


@pytest.fixture
def allocator() -> NaiveBlockAllocator:
    return NaiveBlockAllocator(NaiveBlock, num_blocks=10, block_size=UNIT)


@pytest.fixture
def blocks(allocator: NaiveBlockAllocator) -> list[NaiveBlock]:
    """Three blocks, of which the last has room."""
    return allocator.allocate_immutable_blocks(None, [[1] * UNIT, [2] * UNIT, [3]])


class Link:
    """As little of a block as a chain needs."""

    def __init__(self, prev_block: object = None, block_id: int | None = 0) -> None:
        self.prev_block = prev_block
        self.block_id = block_id


# -- the list ----------------------------------------------------------------------


def test_it_keeps_the_ids_of_its_blocks(blocks: list[NaiveBlock]) -> None:
    kept = BlockList(blocks)
    assert kept.list() == blocks
    assert kept.ids() == [0, 1, 2]
    assert len(kept) == 3


def test_it_may_start_empty() -> None:
    kept = BlockList([])
    assert (kept.list(), kept.ids(), len(kept)) == ([], [], 0)


def test_it_does_not_change_the_list_it_was_made_from(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock]
) -> None:
    kept = BlockList(blocks)
    kept.append(allocator.allocate_mutable_block(blocks[-1]))
    assert len(blocks) == 3


def test_a_block_is_appended_with_its_id(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock]
) -> None:
    kept = BlockList(blocks)
    block = allocator.allocate_mutable_block(blocks[-1])
    kept.append(block)
    assert kept[3] is block
    assert kept.ids() == [0, 1, 2, 3]


def test_an_index_counts_from_either_end(blocks: list[NaiveBlock]) -> None:
    kept = BlockList(blocks)
    assert kept[0] is kept[-3] is blocks[0]
    assert kept[2] is kept[-1] is blocks[2]


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_is_refused(blocks: list[NaiveBlock], index: int) -> None:
    kept = BlockList(blocks)
    with pytest.raises(IndexError, match=str(index)):
        kept[index]
    with pytest.raises(IndexError, match=str(index)):
        kept[index] = blocks[0]
    with pytest.raises(IndexError, match=str(index)):
        kept.append_token_ids(index, [1])


@pytest.mark.parametrize("index", [1, -2])
def test_a_block_is_replaced_with_its_id(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock], index: int
) -> None:
    kept = BlockList(blocks)
    block = allocator.allocate_mutable_block(None)
    kept[index] = block
    assert kept.list() == [blocks[0], block, blocks[2]]
    assert kept.ids() == [0, 3, 2]


def test_it_follows_the_id_of_a_block_it_appends_tokens_to(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock]
) -> None:
    forked = BlockList(allocator.fork(blocks[-1]))
    assert forked.ids() == [0, 1, 2]
    forked.append_token_ids(2, [4])  # shared, so it gets a copy
    assert forked.ids() == [0, 1, 3]
    assert forked[2].token_ids == [3, 4]


def test_it_follows_the_id_of_a_block_that_fails_halfway() -> None:
    class Moody(Link):
        def append_token_ids(self, token_ids: list[int]) -> None:
            self.block_id = 7
            raise RuntimeError("not today")

    kept = BlockList([Moody()])
    with pytest.raises(RuntimeError):
        kept.append_token_ids(0, [1])
    assert kept.ids() == [7]


def test_an_update_reads_all_ids_again(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock]
) -> None:
    kept = BlockList(blocks)
    allocator.swap_out(kept.list())
    allocator.allocate_mutable_block(None)
    allocator.swap_in(kept.list())
    kept.update(kept.list())
    assert kept.list() == blocks
    assert kept.ids() == [block.block_id for block in blocks]


def test_a_reset_leaves_it_empty(blocks: list[NaiveBlock]) -> None:
    kept = BlockList(blocks)
    kept.reset()
    assert (kept.list(), kept.ids(), len(kept)) == ([], [], 0)
    assert len(blocks) == 3


def test_a_block_without_an_id_is_refused_and_nothing_changed(
    allocator: NaiveBlockAllocator, blocks: list[NaiveBlock]
) -> None:
    kept = BlockList(blocks[:2])
    allocator.free(blocks[2])
    with pytest.raises(BlockStateError, match="at 2 has no physical block"):
        kept.append(blocks[2])
    with pytest.raises(BlockStateError, match="at 0"):
        kept[0] = blocks[2]
    with pytest.raises(BlockStateError, match="at 2"):
        kept.update(blocks)
    with pytest.raises(AssertionError):  # what vLLM raises
        BlockList(blocks)
    assert kept.list() == blocks[:2]
    assert kept.ids() == [0, 1]


@pytest.mark.parametrize("wrong", [None, 3, "block"])
def test_what_is_no_block_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a block at 0"):
        BlockList([wrong])


# -- the chain ---------------------------------------------------------------------


def test_a_chain_is_listed_from_its_first_block(blocks: list[NaiveBlock]) -> None:
    assert get_all_blocks_recursively(blocks[2]) == blocks
    assert get_all_blocks_recursively(blocks[0]) == blocks[:1]


def test_a_chain_of_200_000_blocks_needs_no_recursion() -> None:
    chain: list[Link] = []
    for _ in range(200_000):
        chain.append(Link(chain[-1] if chain else None))
    assert get_all_blocks_recursively(chain[-1]) == chain
    while chain:
        chain.pop()  # from the end: their own destruction is recursive


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("lead", [0, 1, 5])
def test_a_chain_that_leads_back_into_itself_is_refused(length: int, lead: int) -> None:
    circle = [Link() for _ in range(length)]
    for i, link in enumerate(circle):
        link.prev_block = circle[i - 1]
    last = circle[0]
    for _ in range(lead):
        last = Link(last)
    with pytest.raises(BlockStateError, match="leads back into itself"):
        get_all_blocks_recursively(last)
    for link in circle:
        link.prev_block = None


def test_something_else_in_a_chain_is_refused() -> None:
    with pytest.raises(TypeError, match="17 in the chain is no block"):
        get_all_blocks_recursively(Link(17))
    with pytest.raises(TypeError, match="None in the chain"):
        get_all_blocks_recursively(None)
