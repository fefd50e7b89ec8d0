"""Two contents under one hash: a pool that keeps tokens never takes one for the other.

No two prompts are known whose 128-bit digests are equal, so a compiled helper puts the
index in the state that such a pair would: it takes a block's hash and gives it another
one, as if what the block holds had that digest. Nothing else of the block changes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compiled import build

from kvcache import BlockPool
from kvcache.hashing.keyed_hash import Keyed

SOURCE = """
# cython: language_level=3
from libc.stdint cimport uint8_t

from kvcache._types cimport Key, key_from_bytes
from kvcache.block_pool cimport BlockPool
from kvcache.hash_index cimport index_add_row, index_remove


def collide(BlockPool pool, int block, const uint8_t[::1] key):
    cdef Key wanted
    cdef uint8_t flags = pool.state.rows[block].flags
    key_from_bytes(&wanted, &key[0], key.shape[0])
    index_remove(pool.state.index, block + 1)
    index_add_row(pool.state.index, block, &wanted, -1)
    pool.state.rows[block].flags = flags
"""

UNIT = 4
HASHER = Keyed(bytes(range(16)))


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("collisions")
    return build(folder, "collisions.pyx", SOURCE, "-O0")


def pool_of(keep_tokens: bool) -> BlockPool:
    return BlockPool(60, True, UNIT, keep_tokens=keep_tokens)


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = pool_of(True)
    yield pool
    pool.check()


def prompt(blocks: int, seed: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, 2**31, blocks * UNIT)
    return tokens.astype(np.int32)


def key_of(tokens: np.ndarray) -> bytes:
    return HASHER.hash_blocks(tokens, UNIT)[-1].tobytes() + bytes(4)


def cached(pool: BlockPool, tokens: np.ndarray) -> list[int]:
    """New blocks, in use, that hold these tokens; none is looked up."""
    blocks = pool.get_new_block_ids(len(tokens) // UNIT)
    pool.cache_block_tokens(blocks, tokens, HASHER)
    return blocks.tolist()


def grown(pool: BlockPool, table: list[int], tokens: np.ndarray) -> list[int]:
    """The table, with new blocks for the tokens behind it."""
    new = pool.get_new_block_ids(len(tokens) // UNIT - len(table)).tolist()
    pool.cache_block_tokens([*table, *new], tokens, HASHER, len(table))
    return [*table, *new]


def match(pool: BlockPool, tokens: np.ndarray) -> list[int]:
    return pool.match_prefix_tokens(tokens, HASHER).tolist()


MINE, THEIRS, TAIL = prompt(1, 1), prompt(1, 2), prompt(3, 3)


def test_a_block_is_not_taken_for_another_content_of_its_hash(
    helper: Any, pool: BlockPool
) -> None:
    plain = pool_of(False)
    for some in (plain, pool):
        [block] = cached(some, MINE)
        helper.collide(some, block, key_of(THEIRS))
        some.check()
    # By the hash alone the wrong block is the answer: the collision is real.
    assert match(plain, THEIRS) == [block]
    assert match(pool, THEIRS) == []


def test_both_contents_of_a_hash_are_found_each_by_its_own_tokens(
    helper: Any, pool: BlockPool
) -> None:
    """Theirs, cached after mine, is a copy by its hash and none by its tokens."""
    [mine] = cached(pool, MINE)
    helper.collide(pool, mine, key_of(THEIRS))
    [theirs] = cached(pool, THEIRS)
    [again] = cached(pool, THEIRS)
    pool.check()
    assert match(pool, THEIRS) == [theirs]
    pool.evict_block_ids([theirs])
    assert match(pool, THEIRS) == [again]
    # And with the hash of mine, which theirs now collides with, mine is found.
    helper.collide(pool, mine, key_of(MINE))
    helper.collide(pool, again, key_of(MINE))
    assert match(pool, MINE) == [mine]
    assert match(pool, THEIRS) == []


@pytest.mark.parametrize("older", [0, 1])
def test_what_stands_behind_one_content_is_not_found_behind_the_other(
    helper: Any, pool: BlockPool, older: int
) -> None:
    """The tails have the same tokens and the same hashes, and are different blocks."""
    both = [MINE, THEIRS]
    first, second = both[older], both[1 - older]
    tables = []
    for head in (first, second):
        tables.append(cached(pool, np.concatenate([head, TAIL])))
    for i in range(4):
        key = key_of(np.concatenate([second, TAIL])[: (i + 1) * UNIT])
        helper.collide(pool, tables[0][i], key)
        # Back in their order: the first is the older copy of every hash.
        helper.collide(pool, tables[1][i], key)
    pool.check()
    assert match(pool, np.concatenate([second, TAIL])) == tables[1]
    pool.evict_block_ids(tables[1][1:])
    # The older tail is still there, under the very hashes that are looked up.
    assert match(pool, np.concatenate([second, TAIL])) == tables[1][:1]


def test_a_hash_that_collides_deep_in_a_prompt_ends_the_match_there(
    helper: Any,
) -> None:
    for num_blocks in (60, 262_200):  # with chain hints and without
        pool = BlockPool(num_blocks, True, UNIT, keep_tokens=True)
        theirs = prompt(20, 4)
        mine = theirs.copy()
        mine[12 * UNIT + 1] ^= 1
        table = cached(pool, theirs[: 12 * UNIT])
        table = grown(pool, table, mine)
        for i in range(12, 20):
            helper.collide(pool, table[i], key_of(theirs[: (i + 1) * UNIT]))
        hashes = HASHER.hash_blocks(theirs, UNIT)
        assert pool.match_prefix_ids(hashes).tolist() == table
        assert match(pool, theirs) == table[:12]
        new = grown(pool, table[:12], theirs)
        assert match(pool, theirs) == new
        assert pool.match_prefix_ids(hashes).tolist() == table
        pool.check()


def test_a_request_that_grows_behind_a_collision_takes_its_own_side(
    helper: Any, pool: BlockPool
) -> None:
    [mine] = cached(pool, MINE)
    helper.collide(pool, mine, key_of(THEIRS))
    [theirs] = cached(pool, THEIRS)
    # The digests of both tables are the same from here on.
    my_table = grown(pool, [mine], np.concatenate([MINE, TAIL]))
    their_table = grown(pool, [theirs], np.concatenate([THEIRS, TAIL]))
    rows = pool.blocks.as_array()
    hashes = [rows[table]["block_hash"].tolist() for table in (my_table, their_table)]
    assert hashes[0] == hashes[1]
    pool.check()
    assert match(pool, np.concatenate([THEIRS, TAIL])) == their_table
    with pytest.raises(ValueError, match="holds other tokens"):
        grown(pool, [mine], np.concatenate([THEIRS, TAIL]))
