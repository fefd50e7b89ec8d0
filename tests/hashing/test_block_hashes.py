"""Keys made of hashes, and a chain of hashes seen in larger blocks."""

from collections.abc import Callable, Sequence

import pytest

from kvcache.hashing import (
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvcache.hashing.block_hashes import pick_block_hashes

CHAIN = [b"hash %d" % number for number in range(13)]


# -- keys -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "suffix"),
    [
        (0, b"\0\0\0\0"),
        (1, b"\0\0\0\1"),
        (258, b"\0\0\1\2"),
        (2**32 - 1, b"\xff\xff\xff\xff"),
    ],
)
def test_a_key_is_the_hash_and_four_bytes_of_group_id(
    group: int, suffix: bytes
) -> None:
    assert make_block_hash_with_group_id(b"hash", group) == b"hash" + suffix


@pytest.mark.parametrize("digest", [b"h", b"x" * 16, b"\0" * 32])
@pytest.mark.parametrize("group", [0, 7, 2**32 - 1])
def test_a_key_gives_its_parts_back(digest: bytes, group: int) -> None:
    key = make_block_hash_with_group_id(digest, group)
    assert get_block_hash(key) == digest
    assert get_group_id(key) == group


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_id_fits_four_bytes(group: int) -> None:
    with pytest.raises(ValueError):
        make_block_hash_with_group_id(b"hash", group)


# -- a chain in larger blocks -----------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 13, 14])
def test_a_larger_blocks_hash_is_that_of_its_last_small_block(factor: int) -> None:
    view = BlockHashListWithBlockSize(CHAIN, 16, 16 * factor)
    assert view.scale_factor == factor
    assert len(view) == 13 // factor
    assert list(view) == [CHAIN[(i + 1) * factor - 1] for i in range(13 // factor)]


@pytest.mark.parametrize("index", range(-4, 4))
def test_a_view_is_indexed_as_a_list_is(index: int) -> None:
    view = BlockHashListWithBlockSize(CHAIN, 4, 12)
    assert view[index] == list(view)[index]


@pytest.mark.parametrize("index", [4, -5, 100])
def test_an_index_outside_a_view_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        BlockHashListWithBlockSize(CHAIN, 4, 12)[index]


@pytest.mark.parametrize("index", ["1", 1.0, None])
def test_an_index_that_is_no_int_is_a_type_error(index: object) -> None:
    with pytest.raises(TypeError):
        BlockHashListWithBlockSize(CHAIN, 4, 12)[index]


@pytest.mark.parametrize(
    "cut", [slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(9)]
)
def test_a_slice_of_a_view_is_a_list(cut: slice) -> None:
    view = BlockHashListWithBlockSize(CHAIN, 4, 12)
    assert type(view[cut]) is list
    assert view[cut] == list(view)[cut]


def test_a_view_is_a_sequence() -> None:
    view = BlockHashListWithBlockSize(CHAIN, 4, 8)
    assert isinstance(view, Sequence)
    assert CHAIN[1] in view
    assert CHAIN[0] not in view
    assert view.index(CHAIN[3]) == 1
    assert list(reversed(view)) == list(view)[::-1]


def test_a_view_grows_with_its_chain() -> None:
    chain = CHAIN[:3]
    view = BlockHashListWithBlockSize(chain, 4, 8)
    assert len(view) == 1
    chain.append(CHAIN[3])
    assert list(view) == [CHAIN[1], CHAIN[3]]


def test_a_view_of_no_hashes_is_empty() -> None:
    view = BlockHashListWithBlockSize([], 4, 8)
    assert len(view) == 0
    assert list(view) == []


@pytest.mark.parametrize(
    ("small", "large"), [(16, 24), (16, 8), (3, 16), (0, 16), (16, 0), (-4, 8), (4, -8)]
)
def test_a_larger_block_is_a_multiple_of_the_hashed_one(small: int, large: int) -> None:
    with pytest.raises(ValueError, match=f"{large}|{small}"):
        BlockHashListWithBlockSize(CHAIN, small, large)


# -- picking hashes ---------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize(
    "numbers",
    [range(0), range(4), range(1, 3), range(3, 4), [], [0], [1, 3], [0, 1, 2, 3]],
)
def test_picked_hashes_are_those_of_the_blocks(
    factor: int, numbers: Sequence[int]
) -> None:
    expected = [CHAIN[(number + 1) * factor - 1] for number in numbers]
    assert pick_block_hashes(CHAIN, 4, 4 * factor, numbers) == expected
    view = BlockHashListWithBlockSize(CHAIN, 4, 4 * factor)
    assert pick_block_hashes(view, 4, 4 * factor, numbers) == expected


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("numbers", [range(13), list(range(13))])
def test_picked_hashes_are_a_new_list(
    kind: Callable[[list[bytes]], Sequence[bytes]], numbers: Sequence[int]
) -> None:
    chain = kind(CHAIN)
    picked = pick_block_hashes(chain, 4, 4, numbers)
    assert type(picked) is list
    assert picked == CHAIN
    assert picked is not chain


@pytest.mark.parametrize(
    ("factor", "last", "needed"), [(1, 13, 14), (2, 6, 14), (3, 4, 15)]
)
@pytest.mark.parametrize("listed", [False, True])
def test_too_few_hashes_are_refused_with_both_numbers(
    factor: int, last: int, needed: int, listed: bool
) -> None:
    numbers = [0, last] if listed else range(last + 1)
    with pytest.raises(ValueError, match=f"{needed} block hashes, .* has 13"):
        pick_block_hashes(CHAIN, 4, 4 * factor, numbers)


def test_hashes_that_are_not_picked_need_not_be_there() -> None:
    assert pick_block_hashes(CHAIN, 4, 8, [5]) == [CHAIN[11]]
    assert pick_block_hashes([], 4, 8, []) == []


@pytest.mark.parametrize("block_size", [6, 2, 1])
def test_a_block_that_is_no_multiple_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block size {block_size} "):
        pick_block_hashes(CHAIN, 4, block_size, range(1))


@pytest.mark.parametrize("block_size", [4, 8, 24])
def test_a_view_in_another_size_is_refused(block_size: int) -> None:
    view = BlockHashListWithBlockSize(CHAIN, 4, 12)
    with pytest.raises(ValueError):
        pick_block_hashes(view, 4, block_size, range(1))
