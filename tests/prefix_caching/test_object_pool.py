"""The pool of reusable block objects."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from doubles import Index, PlainBlock, nothing

from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.object_pool import BlockPool


def make(pool: BlockPool, tokens: list[int] | None = None) -> Any:
    return pool.init_block(None, tokens or [], 4, None)


def reused(pool: BlockPool) -> int:
    """How many of 20 blocks are made from objects that the pool has kept."""
    gc.collect()
    kept = {id(one) for one in gc.get_objects() if isinstance(one, PlainBlock)}
    blocks = [make(pool) for _ in range(20)]
    return sum(id(block) in kept for block in blocks)


def given_back(pool: BlockPool, count: int) -> None:
    blocks = [make(pool) for _ in range(count)]
    while blocks:
        pool.free_block(blocks.pop())


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_a_block_is_made_from_the_arguments_it_is_asked_for_with(kept: bool) -> None:
    seen: list[dict[str, Any]] = []

    class Block(PlainBlock):
        def __init__(self, **arguments: Any) -> None:
            seen.append(arguments)
            super().__init__(**arguments)

    allocator, before = object(), object()
    pool = BlockPool(4, Block, allocator, 3)
    if kept:
        given_back(pool, 1)
    block = pool.init_block(before, [1, 2], 8, 5, 7)
    assert type(block) is Block
    assert seen[-1] == {
        "prev_block": before,
        "token_ids": [1, 2],
        "block_size": 8,
        "allocator": allocator,
        "block_id": 5,
        "extra_hash": 7,
    }


def test_a_block_that_was_given_back_is_made_anew_and_handed_out() -> None:
    pool = BlockPool(4, PlainBlock, None, 3)
    block = make(pool, [1, 2])
    address = id(block)
    pool.free_block(block)
    del block
    again = make(pool)
    assert id(again) == address
    assert again.token_ids == []


def test_a_block_that_somebody_holds_is_not_handed_out_again() -> None:
    """In vLLM it would turn into another sequence's in their hands."""
    pool = BlockPool(4, PlainBlock, None, 3)
    block = make(pool, [1, 2])
    pool.free_block(block)
    assert make(pool) is not block
    assert block.token_ids == [1, 2]


def test_a_block_that_is_given_back_twice_is_handed_out_once() -> None:
    pool = BlockPool(4, PlainBlock, None, 3)
    block = make(pool)
    pool.free_block(block)
    pool.free_block(block)
    del block
    assert make(pool) is not make(pool)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_pool_keeps_as_many_objects_as_it_is_told_to(size: int) -> None:
    pool = BlockPool(4, PlainBlock, None, size)
    given_back(pool, 10)
    assert reused(pool) == size


def test_an_increased_pool_keeps_twice_as_many() -> None:
    pool = BlockPool(4, PlainBlock, None, 3)
    pool.increase_pool()
    given_back(pool, 10)
    assert reused(pool) == 6


def test_a_pool_can_be_increased_without_end() -> None:
    pool = BlockPool(4, PlainBlock, None, 1)
    for _ in range(200):
        pool.increase_pool()
    given_back(pool, 10)
    assert reused(pool) == 10


def test_a_pool_makes_no_objects_ahead() -> None:
    made = []

    def create(**arguments: Any) -> PlainBlock:
        made.append(arguments)
        return PlainBlock(**arguments)

    pool = BlockPool(4, create, None, 1000)
    assert made == []
    make(pool)
    assert len(made) == 1


def test_any_callable_makes_blocks() -> None:
    assert make(BlockPool(4, lambda **arguments: "a block", None, 3)) == "a block"


def test_naive_blocks_are_made_by_it_too() -> None:
    pool = BlockPool(4, NaiveBlock, None, 3)
    block = make(pool, [1, 2])
    pool.free_block(block)
    assert block.token_ids == [1, 2]
    assert make(pool).token_ids == []


def test_what_create_block_raises_is_heard_and_the_pool_goes_on() -> None:
    hooks: list[Callable[[], object]] = [lambda: 1 / 0]

    def create(**arguments: Any) -> PlainBlock:
        if hooks:
            hooks.pop()()
        return PlainBlock(**arguments)

    pool = BlockPool(4, create, None, 3)
    with pytest.raises(ZeroDivisionError):
        make(pool)
    assert make(pool).token_ids == []


def test_an_object_that_cannot_be_made_anew_is_heard_of() -> None:
    class Block(PlainBlock):
        def __init__(self, token_ids: list[int], **arguments: Any) -> None:
            if 13 in token_ids:
                raise LookupError("13")
            super().__init__(token_ids=token_ids, **arguments)

    pool = BlockPool(4, Block, None, 3)
    given_back(pool, 2)
    with pytest.raises(LookupError, match="13"):
        make(pool, [13])
    assert make(pool, [1]).token_ids == [1]


def test_a_block_that_frees_others_as_it_is_made_anew_does_no_harm() -> None:
    pool: BlockPool

    class Block(PlainBlock):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            if hasattr(self, "made_before"):
                pool.free_block(PlainBlock(**arguments))
                make(pool)
            self.made_before = True

    pool = BlockPool(4, Block, None, 3)
    given_back(pool, 3)
    blocks = [make(pool) for _ in range(10)]
    assert len({id(block) for block in blocks}) == 10


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 4.0, "4", None])
def test_a_block_has_one_token_or_more(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size"):
        BlockPool(size, PlainBlock, None, 3)


@pytest.mark.parametrize("size", [-1, 2**62 + 1, True, 4.0, "4", None])
def test_the_number_of_objects_is_an_int_from_0_on(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="pool_size"):
        BlockPool(4, PlainBlock, None, size)


@pytest.mark.parametrize("create", [None, 1, "PlainBlock", [PlainBlock]])
def test_what_makes_blocks_is_callable(create: Any) -> None:
    with pytest.raises(TypeError, match="create_block"):
        BlockPool(4, create, None, 3)


def test_sizes_may_be_integers_of_another_class() -> None:
    pool = BlockPool(Index(4), PlainBlock, None, Index(3))  # type: ignore[arg-type]
    assert pool.block_size == 4


def test_a_pool_that_was_never_made_makes_nothing() -> None:
    pool = BlockPool.__new__(BlockPool)
    pool.free_block(object())
    with pytest.raises(TypeError):
        make(pool)


def test_a_pool_is_collected_with_the_blocks_that_refer_to_it() -> None:
    class Witness:
        gone = 0

        def __del__(self) -> None:
            Witness.gone += 1

    class Block(PlainBlock):
        witness: Witness
        pool: BlockPool

    pool = BlockPool(4, Block, nothing, 3)
    block = make(pool)
    block.witness, block.pool = Witness(), pool
    pool.free_block(block)
    del block, pool
    gc.collect()
    assert Witness.gone == 1


def test_20_000_blocks_made_and_given_back_leave_nothing_behind() -> None:
    pool = BlockPool(4, PlainBlock, None, 3)
    given_back(pool, 5)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(20_000):
        pool.free_block(make(pool))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000
