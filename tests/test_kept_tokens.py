"""Blocks cached with their tokens: found by what they hold, whatever their hashes say.

`cache_block_tokens` is tested here in pools of both kinds; where two contents share a
hash, see test_kept_tokens_collisions.py.
"""

import array
import tracemalloc
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pools import hash_of, ids, refused

from kvcache import (
    BlockPool,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    KVCacheBlock,
)
from kvcache.hashing.keyed_hash import Keyed

UNIT = 4
"""Tokens a block here."""

HASHER = Keyed(bytes(range(16)))


def pool_of(num_blocks: int = 40, **options: Any) -> BlockPool:
    return BlockPool(num_blocks, True, UNIT, **options)


@pytest.fixture
def pool() -> Iterable[BlockPool]:
    pool = pool_of(keep_tokens=True)
    yield pool
    pool.check()


@pytest.fixture(params=[False, True], ids=["hashes", "tokens"])
def either_pool(request: pytest.FixtureRequest) -> Iterable[BlockPool]:
    pool = pool_of(keep_tokens=request.param)
    yield pool
    pool.check()


def prompt(blocks: int, seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, 2**31, blocks * UNIT)
    return tokens.astype(np.int32)


def cached(pool: BlockPool, tokens: Any, group: int = 0) -> list[int]:
    """New blocks, in use, that hold these tokens; none is looked up."""
    blocks = pool.get_new_block_ids(len(tokens) // UNIT)
    pool.cache_block_tokens(blocks, tokens, HASHER, 0, group)
    return blocks.tolist()


def served(pool: BlockPool, tokens: Any, group: int = 0) -> list[int]:
    """The block table of a request: its cached prefix, and new blocks for the rest."""
    hits = pool.match_prefix_tokens(tokens, HASHER, group)
    pool.touch_block_ids(hits)
    new = pool.get_new_block_ids(len(tokens) // UNIT - len(hits))
    table = np.concatenate([hits, new])
    pool.cache_block_tokens(table, tokens, HASHER, len(hits), group)
    return table.tolist()


def match(pool: BlockPool, tokens: Any, group: int = 0) -> list[int]:
    return pool.match_prefix_tokens(tokens, HASHER, group).tolist()


def key_of(tokens: Any, group: int = 0) -> bytes:
    """The key of the last of these blocks."""
    last = HASHER.hash_blocks(tokens, UNIT)[-1]
    return last.tobytes() + group.to_bytes(4, "big")


# -- what is cached is found ------------------------------------------------------


def test_blocks_are_cached_under_the_digests_of_their_tokens(
    either_pool: BlockPool,
) -> None:
    tokens = prompt(9)
    blocks = cached(either_pool, tokens)
    assert match(either_pool, tokens) == blocks
    hashes = HASHER.hash_blocks(tokens, UNIT)
    assert either_pool.match_prefix_ids(hashes).tolist() == blocks
    rows = either_pool.blocks.as_array()[blocks]
    assert rows["block_hash_num_tokens"].tolist() == list(range(UNIT, 9 * UNIT + 1, 4))


def test_a_prompt_matches_up_to_the_first_token_that_differs(
    either_pool: BlockPool,
) -> None:
    tokens = prompt(30)
    blocks = cached(either_pool, tokens)
    for place in (0, 3, 4, 57, 119):
        other = tokens.copy()
        other[place] ^= 1
        assert match(either_pool, other) == blocks[: place // UNIT]
    for length in (0, 1, 3, 4, 5, 119, 120):
        assert match(either_pool, tokens[:length]) == blocks[: length // UNIT]


# With chain hints and, past 262,144 blocks, without; 16 tokens a block are usual.
@pytest.mark.parametrize("num_blocks", [1_000, 300_000])
@pytest.mark.parametrize("unit", [1, 3, 16, 33])
def test_pools_of_any_size_and_block_size_match_alike(
    num_blocks: int, unit: int
) -> None:
    pool = BlockPool(num_blocks, True, unit, keep_tokens=True)
    tokens = np.random.default_rng(1).integers(0, 2**31, 200 * unit, dtype=np.int32)
    blocks = np.random.default_rng(2).permutation(pool.get_new_block_ids(200))
    pool.cache_block_tokens(blocks[:150], tokens[: 150 * unit], HASHER)
    for n in [0, 1, 2, 3, 8, 9, 32, 33, 34, 65, 149, 150, 151, 200]:
        found = pool.match_prefix_tokens(tokens[: n * unit], HASHER)
        assert found.tolist() == blocks[: min(n, 150)].tolist()
    for place in (0, 1, 40, 149):
        other = tokens.copy()
        other[place * unit + unit - 1] ^= 1
        assert len(pool.match_prefix_tokens(other, HASHER)) == place


def test_a_request_that_grows_is_cached_block_by_block(either_pool: BlockPool) -> None:
    tokens = prompt(12)
    blocks = either_pool.get_new_block_ids(12)
    done = 0
    for length in (3, 4, 9, 30, 31, 48):
        either_pool.cache_block_tokens(blocks, tokens[:length], HASHER, done)
        done = length // UNIT
        assert match(either_pool, tokens) == blocks[:done].tolist()
    hashes = HASHER.hash_blocks(tokens, UNIT)
    assert either_pool.match_prefix_ids(hashes).tolist() == blocks.tolist()


def test_of_the_cached_blocks_only_the_last_is_read(either_pool: BlockPool) -> None:
    tokens = prompt(6)
    blocks = cached(either_pool, tokens[: 3 * UNIT])
    new = either_pool.get_new_block_ids(3).tolist()
    for some in (tokens.copy(), tokens.tolist(), tuple(tokens.tolist())):
        table = [0, -5, blocks[2], *new]
        either_pool.cache_block_tokens(table, some, HASHER, 3)
        assert match(either_pool, tokens) == blocks + new
        either_pool.evict_block_ids(new)


def test_requests_share_blocks_and_fork(either_pool: BlockPool) -> None:
    stem = prompt(5)
    tables = [
        served(either_pool, np.concatenate([stem, prompt(4, seed)]))
        for seed in (1, 2, 3)
    ]
    assert len({tuple(table[:5]) for table in tables}) == 1
    assert len({block for table in tables for block in table}) == 5 + 3 * 4
    for seed, table in zip((1, 2, 3), tables, strict=True):
        assert match(either_pool, np.concatenate([stem, prompt(4, seed)])) == table
        # The right tokens behind the wrong prefix are no match.
        assert match(either_pool, np.concatenate([prompt(4, seed), stem])) == []


def test_every_kind_of_tokens_is_cached_and_matched_alike(
    either_pool: BlockPool,
) -> None:
    tokens = prompt(4)
    kinds: list[Callable[[np.ndarray], Any]] = [
        lambda some: some.astype(np.int64),
        lambda some: some.astype(np.uint64),
        lambda some: some.astype(">i4"),
        lambda some: np.repeat(some, 2)[::2],
        lambda some: some.tolist(),
        lambda some: tuple(some.tolist()),
        lambda some: array.array("q", some.tolist()),
        lambda some: memoryview(some),
    ]
    for kind in kinds:
        blocks = either_pool.get_new_block_ids(4)
        either_pool.cache_block_tokens(blocks[:2], kind(tokens[:8]), HASHER)
        either_pool.cache_block_tokens(blocks, kind(tokens), HASHER, 2)
        assert match(either_pool, kind(tokens)) == blocks.tolist()
        either_pool.evict_block_ids(blocks)


def test_groups_and_hashers_are_kept_apart(either_pool: BlockPool) -> None:
    tokens = prompt(5)
    blocks = [cached(either_pool, tokens, group) for group in (0, 7, 2**32 - 1)]
    assert [match(either_pool, tokens, group) for group in (0, 7, 2**32 - 1)] == blocks
    assert match(either_pool, tokens, 1) == []
    assert either_pool.match_prefix_tokens(tokens, Keyed()).tolist() == []


def test_a_pool_says_whether_it_keeps_tokens() -> None:
    assert not pool_of().keep_tokens
    assert not pool_of(keep_tokens=False).keep_tokens
    assert pool_of(keep_tokens=True).keep_tokens


def test_whether_to_keep_tokens_is_asked_once() -> None:
    class Fickle:
        asked = 0

        def __bool__(self) -> bool:
            self.asked += 1
            return self.asked % 2 == 1

    pool = BlockPool(4, Fickle(), UNIT, keep_tokens=Fickle())  # type: ignore[arg-type]
    assert pool.keep_tokens and pool.enable_caching
    assert match(pool, prompt(2)) == []


def test_tokens_are_not_kept_where_nothing_is_cached() -> None:
    with pytest.raises(ValueError, match="enable_caching"):
        BlockPool(4, False, UNIT, keep_tokens=True)


# -- tokens of more than 31 bits --------------------------------------------------


def test_tokens_over_int32_are_cached_where_none_are_kept() -> None:
    pool, tokens = pool_of(), prompt(6).astype(np.int64)
    tokens[9] += 2**40
    blocks = pool.get_new_block_ids(6)
    pool.cache_block_tokens(blocks, tokens[:16], HASHER)
    pool.cache_block_tokens(blocks, tokens, HASHER, 4)
    assert match(pool, tokens) == blocks.tolist()
    tokens[9] -= 2**40
    assert match(pool, tokens) == blocks[:2].tolist()


def test_tokens_over_int32_are_refused_where_tokens_are_kept(pool: BlockPool) -> None:
    blocks = pool.get_new_block_ids(2)
    for token in (2**31, 2**40, 2**63 - 1):
        with refused(ValueError, pool, match=f"token {token} does not fit int32"):
            pool.cache_block_tokens(blocks, [1, 2, 3, 4, 5, token, 7, 8], HASHER)


def test_a_prompt_matches_up_to_its_first_token_over_int32(pool: BlockPool) -> None:
    tokens = prompt(6)
    blocks = cached(pool, tokens)
    for place in (0, 3, 4, 13, 23):
        wide = tokens.astype(np.int64)
        wide[place] += 2**32
        assert match(pool, wide) == blocks[: place // UNIT]
        assert match(pool, wide.tolist()) == blocks[: place // UNIT]


# -- only what was compared counts ------------------------------------------------


def test_blocks_cached_without_tokens_are_not_matched_by_tokens(
    pool: BlockPool,
) -> None:
    tokens = prompt(4)
    hashes = HASHER.hash_blocks(tokens, UNIT)
    blocks = pool.get_new_block_ids(4)
    pool.cache_block_ids(blocks, hashes)
    assert pool.match_prefix_ids(hashes).tolist() == blocks.tolist()
    assert match(pool, tokens) == []
    # Younger blocks with tokens are found behind them.
    copies = cached(pool, tokens)
    assert match(pool, tokens) == copies
    assert pool.match_prefix_ids(hashes).tolist() == blocks.tolist()


def test_a_further_key_of_a_block_does_not_answer_for_tokens(pool: BlockPool) -> None:
    mine, theirs = prompt(1, 1), prompt(1, 2)
    [block] = cached(pool, mine)
    plain = pool_of()
    [other] = cached(plain, mine)
    for some, number in ((pool, block), (plain, other)):
        some._insert_block_hash(key_of(theirs), some.blocks[number], None)
    # Their hash now names a block that holds mine: what a collision looks like.
    assert match(plain, theirs) == [other]
    assert match(pool, theirs) == []
    assert match(pool, mine) == [block]
    new = cached(pool, theirs)
    assert match(pool, theirs) == new


def test_a_further_key_in_another_group_does_not_answer_there(pool: BlockPool) -> None:
    tokens = prompt(3)
    blocks = cached(pool, tokens)
    for i, block in enumerate(blocks):
        key = key_of(tokens[: (i + 1) * UNIT], group=1)
        pool._insert_block_hash(key, pool.blocks[block], None)
    assert match(pool, tokens, group=1) == []


def test_a_hint_to_the_same_tokens_behind_another_prefix_is_not_believed(
    pool: BlockPool,
) -> None:
    """Block 1 held the first prefix, then holds another; what followed it is still
    noted behind it, with the very tokens that are asked for.
    """
    first, second, tail = prompt(1, 1), prompt(1, 2), prompt(1, 3)
    before, behind = cached(pool, np.concatenate([first, tail]))
    pool.move_block_hashes(pool.blocks[before], pool.get_new_blocks(1)[0])
    pool.cache_block_tokens([before], second, HASHER)
    assert match(pool, np.concatenate([second, tail])) == [before]
    assert match(pool, np.concatenate([first, tail]))[1:] == [behind]


def test_a_block_is_found_only_behind_the_prefix_it_was_cached_behind(
    pool: BlockPool,
) -> None:
    """When all copies of the prefix are gone, what stood behind it is not found."""
    tokens = prompt(3)
    blocks = cached(pool, tokens)
    pool.evict_block_ids(blocks[:1])
    assert match(pool, tokens) == []
    [again] = cached(pool, tokens[:UNIT])
    assert match(pool, tokens) == [again]
    assert served(pool, tokens)[0] == again
    assert len(match(pool, tokens)) == 3


def test_a_block_made_by_hand_does_not_hide_those_cached_behind_it(
    pool: BlockPool,
) -> None:
    tokens = prompt(4)
    for n in (1, 3):
        key = key_of(tokens[: n * UNIT])
        pool.cached_block_hash_to_block.insert(key, KVCacheBlock(39))
    assert match(pool, tokens) == []
    blocks = cached(pool, tokens)
    assert match(pool, tokens) == blocks


# -- copies -----------------------------------------------------------------------


def test_the_oldest_copy_answers_and_what_follows_any_is_found(
    pool: BlockPool,
) -> None:
    tokens = prompt(6)
    first, second = cached(pool, tokens[: 3 * UNIT]), cached(pool, tokens)
    assert match(pool, tokens) == first + second[3:]
    pool.evict_block_ids(first[1:2])
    assert match(pool, tokens) == [first[0], second[1], first[2], *second[3:]]
    pool.evict_block_ids([first[0], first[2]])
    assert match(pool, tokens) == second


def test_a_copy_takes_the_place_of_the_block_it_outlives(pool: BlockPool) -> None:
    tokens = prompt(3)
    blocks = cached(pool, tokens)
    [copy] = cached(pool, tokens[:UNIT])
    pool.evict_block_ids(blocks[:1])
    assert match(pool, tokens) == [copy, *blocks[1:]]


# -- what ends a record -----------------------------------------------------------


def hand_out(pool: BlockPool, block: int) -> None:
    pool.free_block_ids([block])
    while block not in pool.get_new_block_ids(1):
        pass


def reset(pool: BlockPool, block: int) -> None:
    pool.free_block_ids([block])
    assert pool.reset_prefix_cache()


def pop_and_insert(pool: BlockPool, block: int) -> None:
    key = pool.blocks[block].block_hash
    assert key is not None
    popped = pool.cached_block_hash_to_block.pop(key, block)
    assert popped is not None
    pool.cached_block_hash_to_block.insert(key, popped)


def promote(pool: BlockPool, block: int) -> None:
    class Request:
        block_hashes = (hash_of(1), hash_of(2))

    pool.cache_full_blocks(Request, [None, pool.blocks[block]], 1, 2, UNIT, 0)


def replace(pool: BlockPool, block: int) -> None:
    key = pool.blocks[block].block_hash
    assert key is not None
    pool.cached_block_hash_to_block.insert(key, KVCacheBlock(block))
    assert pool.cached_block_hash_to_block.pop(key, block) is not pool.blocks[block]


@pytest.mark.parametrize(
    "end",
    [
        hand_out,
        reset,
        pop_and_insert,
        promote,
        replace,
        lambda pool, block: pool.evict_block_ids([block]),
        lambda pool, block: pool.blocks[block].reset_hash(),
        lambda pool, block: pool._maybe_evict_cached_block(pool.blocks[block]),
        lambda pool, block: pool._remove_cached_block_hashes(pool.blocks[block]),
        lambda pool, block: setattr(
            pool.blocks[block], "_block_hash", pool.blocks[block].block_hash
        ),
    ],
)
def test_whatever_takes_a_blocks_hash_ends_its_record(
    pool: BlockPool, end: Callable[[BlockPool, int], object]
) -> None:
    tokens = prompt(1)
    [block] = cached(pool, tokens)
    key = pool.blocks[block].block_hash
    assert key is not None
    end(pool, block)
    pool.check()
    assert match(pool, tokens) == []
    # Not even the same hash brings it back.
    pool.blocks[block].reset_hash()
    pool.cache_block_ids([block], [key[:-4]])
    assert pool.match_prefix_ids([key[:-4]]).tolist() == [block]
    assert match(pool, tokens) == []


def test_moved_hashes_take_the_tokens_along(pool: BlockPool) -> None:
    tokens = prompt(4)
    blocks = cached(pool, tokens)
    [target] = pool.get_new_blocks(1)
    pool.move_block_hashes(pool.blocks[blocks[1]], target)
    assert match(pool, tokens) == [blocks[0], target.block_id, *blocks[2:]]
    pool.cache_block_tokens([blocks[1]], prompt(1, 5), HASHER)
    assert match(pool, tokens) == [blocks[0], target.block_id, *blocks[2:]]
    assert match(pool, prompt(1, 5)) == [blocks[1]]


def test_hashes_moved_without_tokens_have_none_where_they_go(pool: BlockPool) -> None:
    mine, theirs = prompt(1, 1), prompt(1, 2)
    source, target = pool.get_new_block_ids(2).tolist()
    pool.cache_block_tokens([target], mine, HASHER)
    pool.evict_block_ids([target])
    pool.cache_block_ids([source], HASHER.hash_blocks(theirs, UNIT))
    pool.move_block_hashes(pool.blocks[source], pool.blocks[target])
    assert match(pool, theirs) == match(pool, mine) == []


def test_an_entry_made_through_the_map_gives_way_to_the_blocks_own(
    either_pool: BlockPool,
) -> None:
    tokens = prompt(3)
    blocks = either_pool.get_new_blocks(3)
    for i, block in enumerate(blocks):
        key = key_of(tokens[: (i + 1) * UNIT])
        either_pool.cached_block_hash_to_block.insert(key, block)
    either_pool.cache_block_tokens(ids(blocks), tokens, HASHER)
    assert match(either_pool, tokens) == ids(blocks)
    assert len(either_pool.cached_block_hash_to_block) == 3
    # There is one entry a block, not two.
    last = either_pool.cached_block_hash_to_block.pop(key, blocks[2].block_id)
    assert last is blocks[2]
    assert not either_pool.cached_block_hash_to_block.contain(key, blocks[2].block_id)
    assert match(either_pool, tokens) == ids(blocks[:2])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_several_entries_made_through_the_map_its_own_key_gives_way(
    either_pool: BlockPool, place: int
) -> None:
    tokens, index = prompt(1), either_pool.cached_block_hash_to_block
    [block] = either_pool.get_new_blocks(1)
    keys = [b"one" + bytes(4), b"other" + bytes(4)]
    keys.insert(place, key_of(tokens))
    for key in keys:
        index.insert(key, block)
    either_pool.cache_block_tokens([block.block_id], tokens, HASHER)
    assert match(either_pool, tokens) == [block.block_id]
    assert all(index.contain(key, block.block_id) for key in keys)
    assert index.pop(key_of(tokens), block.block_id) is block
    assert not index.contain(key_of(tokens), block.block_id)


# -- what is refused --------------------------------------------------------------


def test_tokens_of_more_blocks_than_there_can_be_are_refused(
    either_pool: BlockPool,
) -> None:
    tokens = np.broadcast_to(np.int32(0), 2**31)  # takes no memory
    num_cached = 2**31 // UNIT - 1
    with refused(ValueError, either_pool, match="are too many"):
        either_pool.cache_block_tokens([1], tokens, HASHER, num_cached)


def test_a_parent_must_carry_a_digest_of_the_group(either_pool: BlockPool) -> None:
    tokens = prompt(3)
    blocks = either_pool.get_new_block_ids(3)
    with refused(ValueError, either_pool, match=f"block {blocks[0]}, the parent"):
        either_pool.cache_block_tokens(blocks, tokens, HASHER, 1)
    either_pool.cache_block_tokens(blocks[:1], tokens[:UNIT], HASHER)
    with refused(ValueError, either_pool, match="in group 3"):
        either_pool.cache_block_tokens(blocks, tokens, HASHER, 1, 3)
    either_pool.cache_block_ids(blocks[1:2], [hash_of(1)])
    with refused(ValueError, either_pool, match="16 bytes"):
        either_pool.cache_block_tokens(blocks, tokens, HASHER, 2)
    with refused(ValueError, either_pool, match="null block"):
        either_pool.cache_block_tokens([0, *blocks[2:]], tokens[:8], HASHER, 1)
    for foreign in (-1, 40, 2**31 - 1, -(2**31)):
        with refused(ValueError, either_pool, match=f"block id {foreign} is not"):
            either_pool.cache_block_tokens([foreign, blocks[2]], tokens[:8], HASHER, 1)


def test_a_parent_must_hold_the_tokens_given(pool: BlockPool) -> None:
    tokens = prompt(3)
    blocks = pool.get_new_block_ids(4)
    pool.cache_block_tokens(blocks[:1], tokens[:UNIT], HASHER)
    other = tokens.copy()
    other[3] ^= 1
    with refused(ValueError, pool, match=f"block {blocks[0]}, the parent, holds other"):
        pool.cache_block_tokens(blocks, other, HASHER, 1)
    pool.cache_block_ids(blocks[3:], HASHER.hash_blocks(tokens[:UNIT], UNIT))
    with refused(ValueError, pool, match=f"of block {blocks[3]}, the parent, no"):
        pool.cache_block_tokens(blocks[[3, 1, 2]], tokens, HASHER, 1)


def test_a_parent_cached_without_tokens_will_do_where_none_are_kept() -> None:
    pool, tokens = pool_of(), prompt(3)
    blocks = pool.get_new_block_ids(3)
    pool.cache_block_ids(blocks[:2], HASHER.hash_blocks(tokens[:8], UNIT))
    pool.cache_block_tokens(blocks, tokens, HASHER, 2)
    assert match(pool, tokens) == blocks.tolist()


def test_blocks_that_carry_a_hash_are_refused(either_pool: BlockPool) -> None:
    tokens = prompt(4)
    blocks = either_pool.get_new_block_ids(4)
    either_pool.cache_block_tokens(blocks[:2], tokens[:8], HASHER)
    for some, start in ((blocks, 0), (blocks, 1), (blocks[[2, 3, 0, 1]], 0)):
        with refused(BlockStateError, either_pool, match="carries the hash"):
            either_pool.cache_block_tokens(some, tokens, HASHER, start)
    with refused(BlockStateError, either_pool, match="listed twice"):
        either_pool.cache_block_tokens(blocks[[0, 1, 2, 2]], tokens, HASHER, 2)
    with refused(BlockStateError, either_pool):
        either_pool.cache_block_tokens(blocks[[0, 1, 2, 1]], tokens, HASHER, 2)


def test_null_and_foreign_blocks_are_refused(either_pool: BlockPool) -> None:
    tokens = prompt(3)
    blocks = either_pool.get_new_block_ids(3).tolist()
    with refused(ValueError, either_pool, match="null block"):
        either_pool.cache_block_tokens([*blocks[:2], 0], tokens, HASHER)
    for foreign in (-1, -2, 40, 2**31 - 1, -(2**31)):
        with refused(ValueError, either_pool, match=f"block id {foreign} is not"):
            either_pool.cache_block_tokens([*blocks[:2], foreign], tokens, HASHER)
    # Beyond the full blocks the table may hold anything.
    either_pool.cache_block_tokens([*blocks[:2], 0, -7, 99], tokens[:11], HASHER)
    assert match(either_pool, tokens) == blocks[:2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"ids": [1, 2]}, ValueError),
        ({"ids": []}, ValueError),
        ({"ids": None}, TypeError),
        ({"ids": "123"}, TypeError),
        ({"ids": [1, 2, 3.0]}, TypeError),
        ({"ids": [1, 2, True]}, TypeError),
        ({"ids": [1, 2, 2**31]}, ValueError),
        ({"ids": np.ones((3, 1), np.int32)}, ValueError),
        ({"tokens": None}, TypeError),
        ({"tokens": 5}, TypeError),
        ({"tokens": b"0123456789ab"}, TypeError),
        ({"tokens": "0123456789ab"}, TypeError),
        ({"tokens": {0: 1}}, TypeError),
        ({"tokens": [*range(11), -1]}, ValueError),
        ({"tokens": [*range(11), 2**63]}, ValueError),
        ({"tokens": [*range(11), 1.0]}, TypeError),
        ({"tokens": [*range(11), True]}, TypeError),
        ({"tokens": np.arange(12.0)}, TypeError),
        ({"tokens": -np.arange(12)}, ValueError),
        ({"tokens": np.ones((12, 1), np.int32)}, ValueError),
        ({"tokens": np.array(3)}, ValueError),
        ({"hasher": None}, TypeError),
        ({"hasher": hash}, TypeError),
        ({"hasher": Keyed}, TypeError),
        ({"hasher": bytes(16)}, TypeError),
        ({"num_cached_blocks": -1}, ValueError),
        ({"num_cached_blocks": 4}, ValueError),
        ({"num_cached_blocks": 2**31}, ValueError),
        ({"num_cached_blocks": 2**70}, ValueError),
        ({"num_cached_blocks": None}, TypeError),
        ({"num_cached_blocks": True}, TypeError),
        ({"num_cached_blocks": 1.0}, TypeError),
        ({"kv_cache_group_id": -1}, ValueError),
        ({"kv_cache_group_id": 2**32}, ValueError),
        ({"kv_cache_group_id": "0"}, TypeError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("start", [0, 2])
def test_arguments_of_the_wrong_type_or_range_change_nothing(
    either_pool: BlockPool,
    arguments: dict[str, Any],
    error: type[Exception],
    start: int,
) -> None:
    blocks = either_pool.get_new_block_ids(3).tolist()
    tokens = prompt(3)
    either_pool.cache_block_tokens(blocks, tokens[: start * UNIT], HASHER)
    given = {
        "ids": blocks,
        "tokens": tokens,
        "hasher": HASHER,
        "num_cached_blocks": start,
        **arguments,
    }
    with refused(error, either_pool):
        either_pool.cache_block_tokens(**given)
    either_pool.cache_block_tokens(blocks, tokens, HASHER, start)
    assert match(either_pool, tokens) == blocks


def test_nothing_to_cache_is_fine(either_pool: BlockPool) -> None:
    either_pool.cache_block_tokens([], [], HASHER)
    either_pool.cache_block_tokens([], [1, 2, 3], HASHER)
    either_pool.cache_block_tokens([9, -1], [1, 2, 3], HASHER)
    blocks = cached(either_pool, prompt(2))
    either_pool.cache_block_tokens(blocks, prompt(2), HASHER, 2)
    assert match(either_pool, prompt(2)) == blocks


# -- events -----------------------------------------------------------------------


def external(digest: np.ndarray) -> int:
    return int.from_bytes(digest.tobytes()[-8:], "big")


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_an_event_tells_the_tokens_and_the_parent(keep_tokens: bool) -> None:
    pool = pool_of(enable_kv_cache_events=True, keep_tokens=keep_tokens)
    tokens = prompt(4)
    digests = [external(digest) for digest in HASHER.hash_blocks(tokens, UNIT)]
    blocks = pool.get_new_block_ids(4)
    pool.cache_block_tokens(blocks[:1], tokens[:7], HASHER, 0, 5)
    pool.cache_block_tokens(blocks[:1], tokens[:7], HASHER, 1, 5)  # nothing new
    pool.cache_block_tokens(blocks, tokens, HASHER, 1, 5)
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 5}
    assert pool.take_events() == [
        BlockStored(digests[:1], None, tokens[:4].tolist(), UNIT, **fields),
        BlockStored(digests[1:], digests[0], tokens[4:].tolist(), UNIT, **fields),
    ]
    pool.evict_block_ids(blocks[3:])
    assert pool.take_events() == [BlockRemoved(digests[3:], "GPU", 5)]
    with refused(ValueError, pool):
        pool.cache_block_tokens(blocks[:3], tokens, HASHER, 3, 5)
    assert pool.take_events() == []


def test_an_event_that_cannot_be_made_leaves_the_pool_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_of(enable_kv_cache_events=True, keep_tokens=True)
    blocks = pool.get_new_block_ids(2)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "neither")
    with refused(ValueError, pool):
        pool.cache_block_tokens(blocks, prompt(2), HASHER)
    assert match(pool, prompt(2)) == []


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_parent_that_goes_while_the_event_is_made_is_noticed(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    pool = pool_of(enable_kv_cache_events=True, keep_tokens=True)
    tokens = prompt(2)
    blocks = pool.get_new_block_ids(2)
    pool.cache_block_tokens(blocks[:1], tokens[:UNIT], HASHER)

    def evict_parent(*args: Any, **fields: Any) -> BlockStored:
        pool.enable_kv_cache_events = False
        pool.evict_block_ids(blocks[:1])
        if comes_back:  # with the same tokens, and nothing cached behind it
            pool.cache_block_tokens(blocks[:1], tokens[:UNIT], HASHER)
        return BlockStored(*args, **fields)

    classes = SimpleNamespace(stored=evict_parent)
    monkeypatch.setattr("kvcache.pool_events.event_classes", lambda: classes)
    message = "changed during the call" if comes_back else "the parent"
    with pytest.raises(ValueError, match=message):
        pool.cache_block_tokens(blocks, tokens, HASHER, 1)
    pool.check()
    assert match(pool, tokens) == blocks[:1].tolist() * comes_back


# -- memory -----------------------------------------------------------------------


def test_kept_tokens_take_80_bytes_a_block_of_16_tokens() -> None:
    for unit, size in ((16, 80), (1, 20), (64, 272)):
        plain = BlockPool(100_000, True, unit)
        keeping = BlockPool(100_000, True, unit, keep_tokens=True)
        extra = keeping.nbytes - plain.nbytes
        assert size * 100_000 <= extra < size * 100_000 + 100


@pytest.mark.parametrize("num_blocks", [2, 1_000, 1_000_000])
def test_kept_tokens_are_reported_to_tracemalloc_and_given_back(
    num_blocks: int,
) -> None:
    BlockPool(2, True, 16, keep_tokens=True)  # whatever is made once and kept
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pool = BlockPool(num_blocks, True, 16, keep_tokens=True)
        traced = tracemalloc.get_traced_memory()[0] - before
        assert 0 <= traced - pool.nbytes < 3_000
        del pool
        assert tracemalloc.get_traced_memory()[0] - before < 100
    finally:
        tracemalloc.stop()


def test_more_tokens_than_memory_has_room_for_are_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="kept tokens"):
        BlockPool(2**17, True, 2**31 - 3, keep_tokens=True)
