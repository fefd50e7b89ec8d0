"""Content hashes: what goes into them, and what does not."""

import random
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any
from unittest.mock import MagicMock

import pytest
from doubles import Index
from pools import run_apart

from kvcache.prefix_caching.blocks import PrefixCachingBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.prefix_hash import (
    NONE_HASH,
    hash_block_tokens,
    hash_token_blocks,
)

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def test_a_hash_is_an_int_of_128_bits() -> None:
    hashes = [hash_block_tokens(True, None, [token]) for token in range(1000)]
    assert all(0 <= one < 2**128 for one in hashes)
    for bit in range(128):
        assert 300 < sum(one >> bit & 1 for one in hashes) < 700


def test_the_same_content_has_the_same_hash_in_a_process() -> None:
    assert hash_block_tokens(True, None, [1, 2]) == hash_block_tokens(
        True, None, [1, 2]
    )


def test_another_process_has_other_hashes() -> None:
    value = run_apart(
        "from kvcache.prefix_caching.prefix_hash import hash_block_tokens\n"
        "print(hash_block_tokens(True, None, [1]))"
    )
    assert int(value) != hash_block_tokens(True, None, [1])


def test_no_two_blocks_share_a_hash_that_differ_in_anything() -> None:
    """Place, hash before, tokens and their number, extra hash."""
    tokens = [
        *([], [0], [0, 0], [0, 1], [1, 0], [-1], [-2], [256], [1, 1]),
        *([LOWEST], [HIGHEST], [2**61 - 1], [2**32], [2**31], [-(2**31)]),
    ]
    before = [None, NONE_HASH + 1, -1, -2, 0, 1, 2**61 - 1, 2**127, 2**128, -(2**130)]
    extra = [None, 0, 1, -1, -2, 255, 256, -256, 2**61 - 1, 2**64, 2**200, -(2**200)]
    seen: dict[int, object] = {}
    for is_first, parent, ids, key in product([True, False], before, tokens, extra):
        content = (is_first, parent, ids, key)
        value = hash_block_tokens(is_first, parent, ids, key)
        assert value not in seen, (content, seen[value])
        seen[value] = content


def test_a_first_block_has_none_before_it_or_what_stands_for_none() -> None:
    assert hash_block_tokens(True, None, [1]) == hash_block_tokens(True, NONE_HASH, [1])
    assert hash_block_tokens(False, None, [1]) != hash_block_tokens(True, None, [1])
    assert NONE_HASH == hash("None") == PrefixCachingBlock._none_hash
    assert PrefixCachingBlockAllocator._none_hash == NONE_HASH


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), range(1, 3), iter([1, 2])], ids=str)
def test_tokens_come_in_any_iterable(tokens: Any) -> None:
    assert hash_block_tokens(True, None, tokens) == hash_block_tokens(
        True, None, [1, 2]
    )


def test_tokens_may_be_integers_of_another_class() -> None:
    tokens: list[Any] = [Index(1), Index(-(2**40))]
    expected = hash_block_tokens(True, None, [1, -(2**40)])
    assert hash_block_tokens(True, None, tokens) == expected


@pytest.mark.parametrize("token", [True, 1.0, "1", b"1", None, [1], float("nan")])
def test_a_token_is_an_int(token: Any) -> None:
    """`True` and `1.0` would else have the hash of 1 (B53)."""
    for ids in ([token], [1, token], (token,)):
        with pytest.raises(TypeError):
            hash_block_tokens(True, None, ids)
        with pytest.raises(TypeError):
            hash_token_blocks(None, ids, 1)


@pytest.mark.parametrize("tokens", [None, 1, "12", b"12", bytearray(b"12"), "", b""])
def test_tokens_are_no_text_and_no_number(tokens: Any) -> None:
    with pytest.raises(TypeError):
        hash_block_tokens(True, None, tokens)


@pytest.mark.parametrize("token", [LOWEST - 1, HIGHEST + 1, 2**200, -(2**200)])
def test_a_token_has_64_bits(token: int) -> None:
    with pytest.raises(ValueError, match=str(token)):
        hash_block_tokens(True, None, [1, token])


@pytest.mark.parametrize("extra", [True, 1.0, "1", b"1", (1,)])
def test_an_extra_hash_is_an_int_or_none(extra: Any) -> None:
    with pytest.raises(TypeError, match="extra_hash"):
        hash_block_tokens(True, None, [1], extra)
    with pytest.raises(TypeError, match="extra_hash"):
        hash_token_blocks(None, [1], 1, extra)


@pytest.mark.parametrize("before", [True, 1.0, "1", MagicMock()])
def test_the_hash_before_is_an_int_or_none(before: Any) -> None:
    for is_first in (True, False):
        with pytest.raises(TypeError):
            hash_block_tokens(is_first, before, [1])


def test_tokens_that_raise_midway_are_the_callers_to_hear_of() -> None:
    def tokens() -> Iterator[int]:
        yield 1
        raise LookupError("midway")

    with pytest.raises(LookupError, match="midway"):
        hash_block_tokens(True, None, tokens())


def test_a_token_that_changes_the_list_it_is_in_does_no_harm() -> None:
    tokens: list[Any] = [1, 2, 3] * 100
    tokens[1] = Index(2, tokens.clear)
    expected = hash_block_tokens(True, None, [1, 2, 3] * 100)
    assert hash_block_tokens(True, None, tokens) == expected


# -- several at once -----------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, 0, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("before", [None, 5])
def test_hashes_of_a_sequence_are_those_of_its_blocks_one_by_one(
    before: int | None, size: int, extra: int | None
) -> None:
    tokens = [random.Random(size).randint(LOWEST, HIGHEST) for _ in range(50)]
    hashes = hash_token_blocks(before, tokens, size, extra)
    assert len(hashes) == 50 // size
    for i, (parent, value) in enumerate(pairwise([before, *hashes])):
        block = tokens[i * size : (i + 1) * size]
        assert value == hash_block_tokens(parent is None, parent, block, extra)


def test_hashes_of_a_sequence_go_on_from_where_it_was_cut() -> None:
    tokens = list(range(40))
    head = hash_token_blocks(None, tokens[:12], 4)
    assert head + hash_token_blocks(head[-1], tokens[12:], 4) == hash_token_blocks(
        None, tokens, 4
    )


@pytest.mark.parametrize("size", [0, -1, 2**31, True, 1.0, None, "4"])
def test_a_block_has_one_token_or_more(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size"):
        hash_token_blocks(None, [1], size)


def test_tokens_that_fill_no_block_have_no_hash() -> None:
    assert hash_token_blocks(None, [1, 2, 3], 4) == hash_token_blocks(None, [], 4) == []


# -- the hashes of blocks ------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, 7])
def test_a_chain_of_blocks_has_the_hashes_of_its_tokens(extra: int | None) -> None:
    allocator = PrefixCachingBlockAllocator(8, 2)
    tokens = [[1, 2], [3, 4], [5, 6]]
    blocks = allocator.allocate_immutable_blocks(None, tokens, extra)
    flat = [token for one in tokens for token in one]
    expected = hash_token_blocks(None, flat, 2, extra)
    assert [block.content_hash for block in blocks] == expected
    of_class = PrefixCachingBlock.hash_block_tokens(True, None, [1, 2], extra)
    assert of_class == expected[0]
