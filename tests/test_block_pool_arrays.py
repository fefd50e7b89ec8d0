"""The block pool through arrays: the same pool, block ids in place of objects."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pools import (
    UNIT,
    cached,
    hash_of,
    hashes_of,
    hit,
    ids,
    key_of,
    refused,
    request_of,
    snapshot,
    walk,
)

from kvcache import (
    BlockPool,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    KVCacheBlock,
    NoFreeBlocksError,
)


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8, True, UNIT)
    yield pool
    pool.check()


def rows_of(*numbers: int, length: int = 32) -> np.ndarray:
    """Block hashes as an array, shape (n, length)."""
    digests = b"".join(hash_of(number, length) for number in numbers)
    return np.frombuffer(digests, np.uint8).reshape(-1, length)


# -- what ids may be --------------------------------------------------------------

ID_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "int8": lambda ids: np.array(ids, np.int8),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big-endian": lambda ids: np.array(ids, ">i4"),
    "strided": lambda ids: np.repeat(np.array(ids, np.int32), 3)[::3],
    "reversed": lambda ids: np.array(ids[::-1], np.int32)[::-1],
    "column": lambda ids: np.array([ids, ids], np.int32).T[:, 0],
    "unaligned": lambda ids: np.frombuffer(
        b"\0" + np.array(ids, np.int32).tobytes(), np.uint8
    )[1:].view(np.int32),
    "read-only": lambda ids: np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32),
    "numpy ints": lambda ids: [np.int64(one) for one in ids],
    "memmap": lambda ids: np.array(ids, np.int32).view(np.memmap),
}

id_forms = pytest.mark.parametrize("form", ID_FORMS.values(), ids=ID_FORMS)


@id_forms
def test_ids_may_be_any_integers_in_a_row(
    pool: BlockPool, form: Callable[[list[int]], Any]
) -> None:
    pool.get_new_blocks(5)
    pool.touch_block_ids(form([4, 2]))
    assert [block.ref_cnt for block in pool.blocks[:6]] == [0, 1, 2, 1, 2, 1]
    pool.cache_block_ids(form([4, 2]), hashes_of(1, 2))
    assert (hit(pool, 1), hit(pool, 2)) == (4, 2)
    pool.evict_block_ids(form([2]))
    assert (hit(pool, 1), hit(pool, 2)) == (4, None)
    pool.free_block_ids(form([4, 2, 2]))
    assert [block.ref_cnt for block in pool.blocks[:6]] == [0, 1, 0, 1, 1, 1]
    assert walk(pool) == [2, 6, 7]


@pytest.mark.parametrize("name", ["list", "int32", "int64", "strided", "big-endian"])
def test_the_callers_ids_are_not_written(pool: BlockPool, name: str) -> None:
    pool.get_new_blocks(5)
    given, before = ID_FORMS[name]([4, 2]), [4, 2]
    pool.touch_block_ids(given)
    pool.free_block_ids(given)
    assert list(given) == before


BAD_IDS: dict[str, tuple[Any, type[Exception]]] = {
    "an int": (1, TypeError),
    "None": (None, TypeError),
    "a str": ("12", TypeError),
    "bytes": (b"12", TypeError),
    "strs": (["1"], TypeError),
    "floats": ([1.0], TypeError),
    "bools": ([True], TypeError),
    "a None": ([None], TypeError),
    "blocks": ([KVCacheBlock(1)], TypeError),
    "lists": ([[1]], TypeError),
    "a float array": (np.array([1.0]), TypeError),
    "an empty float array": (np.array([]), TypeError),
    "a bool array": (np.array([True]), TypeError),
    "a str array": (np.array(["1"]), TypeError),
    "an object array": (np.array([1], object), TypeError),
    "a date array": (np.array([1], "M8[s]"), TypeError),
    "no dimension": (np.array(1), ValueError),
    "two dimensions": (np.array([[1]]), ValueError),
    "a negative id": ([1, -1], ValueError),
    "the queue's end": (np.array([1, -1], np.int32), ValueError),
    "an id too many": ([1, 8], ValueError),
    "the largest int32": (np.array([1, 2**31 - 1], np.int32), ValueError),
    "the smallest int32": (np.array([1, -(2**31)], np.int32), ValueError),
    "more than int32": ([1, 2**31], ValueError),
    "less than int32": ([1, -(2**31) - 1], ValueError),
    "an int64 that wraps to 1": (np.array([1, 2**32 + 1]), ValueError),
    "a uint64 that wraps to 1": (np.array([1, 2**63 + 1], np.uint64), ValueError),
    "a huge int": ([1, 2**100], ValueError),
}


@pytest.mark.parametrize(("bad", "error"), BAD_IDS.values(), ids=BAD_IDS)
@pytest.mark.parametrize(
    "name", ["free_block_ids", "touch_block_ids", "evict_block_ids", "cache_block_ids"]
)
def test_what_are_no_ids_of_the_pool_is_refused_whole(
    pool: BlockPool, name: str, bad: object, error: type[Exception]
) -> None:
    pool.get_new_blocks(2)
    hashes = ([hash_of(1), hash_of(2)],) if name == "cache_block_ids" else ()
    with refused(error, pool):
        getattr(pool, name)(bad, *hashes)


@pytest.mark.parametrize("bad", [-1, 8, 100])
@pytest.mark.parametrize(
    "name", ["free_block_ids", "touch_block_ids", "evict_block_ids"]
)
def test_the_refusal_of_an_id_names_it_and_the_pools_size(
    pool: BlockPool, name: str, bad: int
) -> None:
    with pytest.raises(ValueError, match=rf"block id {bad} .* 8\b"):
        getattr(pool, name)([3, bad] if name != "free_block_ids" else [bad])


@pytest.mark.parametrize(
    "name", ["free_block_ids", "touch_block_ids", "evict_block_ids", "cache_block_ids"]
)
@pytest.mark.parametrize("empty", [[], np.array([], np.int32), np.array([], np.int64)])
def test_no_ids_are_fine(pool: BlockPool, name: str, empty: object) -> None:
    before = snapshot(pool)
    getattr(pool, name)(empty, *([[]] if name == "cache_block_ids" else []))
    assert snapshot(pool) == before


# -- get, free, touch, evict ------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_new_ids_are_an_int32_array_of_the_callers_own(
    pool: BlockPool, count: int
) -> None:
    block_ids = pool.get_new_block_ids(count)
    assert type(block_ids) is np.ndarray
    assert block_ids.dtype == np.int32
    assert block_ids.shape == (count,)
    assert block_ids.flags.writeable
    assert block_ids.flags.owndata
    assert block_ids.tolist() == list(range(1, count + 1))
    block_ids[:] = 0
    assert [block.ref_cnt for block in pool.blocks] == [0] + [1] * count + [0] * (
        7 - count
    )


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (8, NoFreeBlocksError),
        (2**31 - 2, NoFreeBlocksError),
        (-1, ValueError),
        (2**70, ValueError),
        (1.0, TypeError),
        (True, TypeError),
        ("1", TypeError),
    ],
)
def test_ids_that_cannot_be_had_are_refused(
    pool: BlockPool, count: object, error: type[Exception]
) -> None:
    cached(pool, 1)
    with refused(error, pool):
        pool.get_new_block_ids(count)


def test_a_count_may_be_a_numpy_int(pool: BlockPool) -> None:
    assert pool.get_new_block_ids(np.int64(2)).tolist() == [1, 2]


def test_getting_ids_evicts_what_the_blocks_held() -> None:
    pool = BlockPool(3, True, UNIT)
    pool.free_block_ids(ids(cached(pool, 1, 2))[::-1])
    assert pool.get_new_block_ids(1).tolist() == [2]
    assert (hit(pool, 1), hit(pool, 2)) == (1, None)


def test_an_id_listed_k_times_counts_k_references(pool: BlockPool) -> None:
    pool.get_new_blocks(1)
    pool.touch_block_ids([1, 3, 1, 3, 3])
    assert (pool.blocks[1].ref_cnt, pool.blocks[3].ref_cnt) == (3, 3)
    pool.free_block_ids([3, 1, 3, 1, 1])
    assert (pool.blocks[1].ref_cnt, pool.blocks[3].ref_cnt) == (0, 1)
    assert walk(pool) == [1, 2, 4, 5, 6, 7]


def test_id_0_is_skipped(pool: BlockPool) -> None:
    pool.get_new_block_ids(2)
    pool.touch_block_ids([0, 1, 0])
    pool.cache_block_ids([0, 1, 0, 2], hashes_of(7, 1, 7, 2))
    pool.evict_block_ids([0])
    assert [hit(pool, number) for number in (7, 1, 2)] == [None, 1, 2]
    pool.free_block_ids([0, 1, 1, 2, 0])
    assert pool.null_block == KVCacheBlock(0, is_null=True)
    assert pool.get_num_free_blocks() == 7


def test_ids_without_a_reference_to_give_are_refused_whole(pool: BlockPool) -> None:
    pool.get_new_blocks(2)
    for batch, culprit in (([1, 3], 3), ([1, 2, 1], 1), ([2, 2], 2)):
        with refused(ValueError, pool, match=f"block {culprit} "):
            pool.free_block_ids(np.array(batch, np.int32))


def test_a_batch_that_would_overrun_a_count_is_refused_whole(pool: BlockPool) -> None:
    pool.get_new_blocks(1)
    pool.blocks[1].ref_cnt = 2**31 - 2
    with refused(ValueError, pool, match="block 1 "):
        pool.touch_block_ids([3, 1, 1])


# -- cache ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 32, 1, 20])
def test_hashes_are_rows_of_their_own_length(pool: BlockPool, length: int) -> None:
    block_ids = pool.get_new_block_ids(2)
    pool.cache_block_ids(block_ids, rows_of(1, 2, length=length), 3)
    assert pool.blocks[2].block_hash == hash_of(2, length) + b"\0\0\0\3"
    assert pool.blocks[2].block_hash_num_tokens is None
    assert pool.get_cached_block(hash_of(1, length), [3])[0].block_id == 1
    assert pool.match_prefix_ids(rows_of(1, 2, length=length), 3).tolist() == [1, 2]


def test_a_short_hash_is_not_a_padded_long_one(pool: BlockPool) -> None:
    pool.cache_block_ids(pool.get_new_block_ids(1), np.zeros((1, 16), np.uint8))
    assert pool.match_prefix_ids(np.zeros((1, 16), np.uint8)).tolist() == [1]
    assert pool.match_prefix_ids(np.zeros((1, 32), np.uint8)).tolist() == []
    assert pool.match_prefix_ids(np.zeros((1, 20), np.uint8)).tolist() == []


HASH_FORMS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "array": lambda numbers: rows_of(*numbers),
    "list": lambda numbers: hashes_of(*numbers),
    "tuple": lambda numbers: tuple(hashes_of(*numbers)),
    "iterator": lambda numbers: iter(hashes_of(*numbers)),
    "strided": lambda numbers: np.repeat(rows_of(*numbers), 2, axis=0)[::2],
    "reversed": lambda numbers: rows_of(*numbers[::-1])[::-1],
    "columns first": lambda numbers: np.asfortranarray(rows_of(*numbers)),
    "every other byte": lambda numbers: np.repeat(rows_of(*numbers), 2, axis=1)[:, ::2],
    "part of wider rows": lambda numbers: np.pad(rows_of(*numbers), ((0, 0), (5, 3)))[
        :, 5:37
    ],
    "mixed lengths": lambda numbers: [
        hash_of(number, 16 if number == 3 else 32) for number in numbers
    ],
}


@pytest.mark.parametrize("form", HASH_FORMS.values(), ids=HASH_FORMS)
def test_hashes_may_be_an_array_in_any_layout_or_a_sequence_of_bytes(
    pool: BlockPool, form: Callable[[tuple[int, ...]], Any]
) -> None:
    pool.cache_block_ids(pool.get_new_block_ids(4), form((1, 2, 3, 4)))
    assert [hit(pool, number) for number in (1, 2, 4)] == [1, 2, 4]
    assert pool.match_prefix_ids(form((1, 2, 3, 4, 5))).tolist() == [1, 2, 3, 4]
    assert ids(pool.match_prefix(form((1, 2, 3, 4, 5)), [0])[0]) == [1, 2, 3, 4]


BAD_HASHES: dict[str, tuple[Any, type[Exception]]] = {
    "None": (None, TypeError),
    "an int": (3, TypeError),
    "bytes": (b"xx", TypeError),
    "a str": ("xx", TypeError),
    "strs": (["x", "y"], TypeError),
    "ints": ([1, 2], TypeError),
    "a None": ([hash_of(1), None], TypeError),
    "a bytearray": ([hash_of(1), bytearray(b"x")], TypeError),
    "an empty hash": ([hash_of(1), b""], ValueError),
    "33 bytes": ([hash_of(1), b"x" * 33], ValueError),
    "int8 rows": (np.zeros((2, 32), np.int8), TypeError),
    "int64 rows": (np.zeros((2, 32), np.int64), TypeError),
    "float rows": (np.zeros((2, 32)), TypeError),
    "bool rows": (np.zeros((2, 32), bool), TypeError),
    "an S32 array": (np.array(hashes_of(1, 2)), TypeError),
    "one dimension": (np.zeros(2, np.uint8), ValueError),
    "three dimensions": (np.zeros((2, 2, 16), np.uint8), ValueError),
    "rows of 0 bytes": (np.zeros((2, 0), np.uint8), ValueError),
    "rows of 33 bytes": (np.zeros((2, 33), np.uint8), ValueError),
}


@pytest.mark.parametrize(("bad", "error"), BAD_HASHES.values(), ids=BAD_HASHES)
def test_what_are_no_hashes_is_refused_whole(
    pool: BlockPool, bad: object, error: type[Exception]
) -> None:
    cached(pool, 1)
    block_ids = pool.get_new_block_ids(2)
    with refused(error, pool):
        pool.cache_block_ids(block_ids, bad)
    with refused(error, pool):
        pool.match_prefix_ids(bad)
    with refused(error, pool):
        pool.match_prefix(bad, [0])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_are_as_many_hashes_as_ids(pool: BlockPool, count: int) -> None:
    block_ids = pool.get_new_block_ids(2)
    for hashes in (hashes_of(1, 2, 3)[:count], rows_of(1, 2, 3)[:count]):
        with refused(ValueError, pool, match=f"{count} block hashes for 2"):
            pool.cache_block_ids(block_ids, hashes)


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (-1, ValueError),
        (2**32, ValueError),
        (0.0, TypeError),
        ("0", TypeError),
        ([0], TypeError),
    ],
)
def test_a_group_id_is_an_int_of_four_bytes(
    pool: BlockPool, group: object, error: type[Exception]
) -> None:
    block_ids = pool.get_new_block_ids(1)
    with refused(error, pool, match="kv_cache_group_id"):
        pool.cache_block_ids(block_ids, hashes_of(1), group)
    with refused(error, pool, match="kv_cache_group_id"):
        pool.match_prefix_ids(hashes_of(1), group)


@pytest.mark.parametrize("batch", [[2, 1], [2, 3, 3], [3, 2, 0, 3]])
def test_a_block_is_cached_once_and_a_refused_batch_caches_none(
    pool: BlockPool, batch: list[int]
) -> None:
    cached(pool, 1)
    pool.get_new_block_ids(3)
    culprit = 1 if 1 in batch else 3
    with refused(BlockStateError, pool, match=f"block {culprit} "):
        pool.cache_block_ids(batch, hashes_of(*range(10, 10 + len(batch))))


def test_free_blocks_can_be_cached_and_stay_where_they_stand(pool: BlockPool) -> None:
    pool.cache_block_ids([3], hashes_of(1))
    assert hit(pool, 1) == 3
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_one_content_may_be_cached_in_several_blocks_of_a_batch(
    pool: BlockPool,
) -> None:
    pool.cache_block_ids(pool.get_new_block_ids(3), hashes_of(1, 1, 1))
    assert hit(pool, 1) == 1
    pool.evict_block_ids([1])
    assert hit(pool, 1) == 2


def test_a_block_cached_by_id_is_not_promoted(pool: BlockPool) -> None:
    # Nobody said how many tokens its hash covers.
    pool.cache_block_ids([1], hashes_of(1))
    with refused(BlockStateError, pool, match="block 1 "):
        pool.cache_full_blocks(request_of(1, 2, 3), [pool.blocks[1]], 0, 1, 3 * UNIT, 0)


# -- match ------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [0, 1, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("held", [0, 1, 31, 32, 33, 64, 65, 100])
def test_the_longest_cached_prefix_is_matched(asked: int, held: int) -> None:
    pool = BlockPool(101, True, UNIT)
    block_ids = pool.get_new_block_ids(held)
    pool.cache_block_ids(block_ids, hashes_of(*range(held)))
    for hashes in (hashes_of(*range(asked)), rows_of(*range(asked))):
        found = pool.match_prefix_ids(hashes)
        assert found.dtype == np.int32
        assert found.flags.owndata
        assert found.tolist() == block_ids[:asked].tolist()


@pytest.mark.parametrize("hole", [0, 1, 31, 32, 50])
def test_a_match_ends_at_the_first_hole(hole: int) -> None:
    pool = BlockPool(101, True, UNIT)
    block_ids = pool.get_new_block_ids(60)
    pool.cache_block_ids(block_ids, hashes_of(*range(60)))
    pool.evict_block_ids(block_ids[hole : hole + 1])
    found = pool.match_prefix_ids(hashes_of(*range(60)))
    assert found.tolist() == block_ids[:hole].tolist()


def test_a_match_changes_nothing(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2))
    before = snapshot(pool)
    pool.match_prefix_ids(hashes_of(1, 2, 3))
    assert snapshot(pool) == before


def test_a_match_looks_in_one_group(pool: BlockPool) -> None:
    cached(pool, 1, 2, group=0)
    cached(pool, 1, group=2**32 - 1)
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1, 2]
    assert pool.match_prefix_ids(hashes_of(1, 2), 2**32 - 1).tolist() == [3]
    assert pool.match_prefix_ids(hashes_of(1, 2), 1).tolist() == []


# A pool remembers which block was cached behind which, and tries that one first. What
# it remembers may be out of date; an answer never is.


def test_a_chain_whose_block_moved_is_matched_where_it_is_now(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    (target,) = pool.get_new_blocks(1)
    pool.move_block_hashes(blocks[1], target)
    assert pool.match_prefix_ids(hashes_of(1, 2, 3)).tolist() == [1, 4, 3]


def test_a_chain_whose_block_was_cached_anew_is_matched_where_it_is_now(
    pool: BlockPool,
) -> None:
    cached(pool, 1, 2, 3)
    pool.evict_block_ids([2])
    assert pool.match_prefix_ids(hashes_of(1, 2, 3)).tolist() == [1]
    cached(pool, 2)
    assert pool.match_prefix_ids(hashes_of(1, 2, 3)).tolist() == [1, 4, 3]
    pool.cache_block_ids([2], hashes_of(7))
    assert pool.match_prefix_ids(hashes_of(1, 2, 3)).tolist() == [1, 4, 3]
    assert pool.match_prefix_ids(hashes_of(1, 7)).tolist() == [1, 2]


def test_chains_that_fork_are_matched_on_either_side(pool: BlockPool) -> None:
    trunk = cached(pool, 1)
    for number in (2, 3):
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_blocks(request_of(1, number), [*trunk, block], 1, 2, UNIT, 0)
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1, 2]
    assert pool.match_prefix_ids(hashes_of(1, 3)).tolist() == [1, 3]


def test_of_two_copies_in_a_chain_the_older_is_matched(pool: BlockPool) -> None:
    cached(pool, 1, 2)
    cached(pool, 1, 2)
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1, 2]
    pool.evict_block_ids([1])
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [3, 2]


def test_a_block_reused_in_another_group_is_not_matched_in_the_old_one(
    pool: BlockPool,
) -> None:
    cached(pool, 1, 2)
    pool.evict_block_ids([2])
    pool.cache_block_ids([2], hashes_of(2), 1)
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1]
    pool.evict_block_ids([2])
    pool.cache_block_ids([2], [hash_of(2, 16)])
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1]


def test_a_key_popped_by_hand_is_not_matched(pool: BlockPool) -> None:
    cached(pool, 1, 2)
    pool.cached_block_hash_to_block.pop(key_of(2), 2)
    assert pool.blocks[2].block_hash == key_of(2)
    assert pool.match_prefix_ids(hashes_of(1, 2)).tolist() == [1]


@pytest.mark.parametrize("length", [16, 20, 32])
def test_whatever_happened_a_match_is_what_single_lookups_give(length: int) -> None:
    random = np.random.default_rng(length)
    pool = BlockPool(200, True, UNIT)
    digests = [hash_of(number, length) for number in range(300)]
    longest = 0
    for _ in range(300):
        start = int(random.integers(0, 250))
        chain = digests[start : start + int(random.integers(1, 90))]
        found = pool.match_prefix_ids(chain)
        expected = []
        for digest in chain:
            block = pool.get_cached_block(digest, [0])
            if block is None:
                break
            expected += ids(block)
        assert found.tolist() == expected
        longest = max(longest, len(expected))
        pool.touch_block_ids(found)
        fresh = pool.get_new_block_ids(len(chain) - len(found))
        pool.cache_block_ids(fresh, chain[len(found) :])
        pool.free_block_ids(np.concatenate([found, fresh])[::-1])
        pool.evict_block_ids(random.integers(0, 200, 3))
    assert longest > 32
    pool.check()


# -- both faces are one pool ------------------------------------------------------


def act(pool: BlockPool, by_id: bool) -> list[Any]:
    """The same work through either face, and what it returned."""
    got: list[Any] = []

    def get(count: int) -> list[int]:
        if by_id:
            return pool.get_new_block_ids(count).tolist()
        return ids(pool.get_new_blocks(count))

    def call(name: str, block_ids: list[int]) -> None:
        if by_id:
            getattr(pool, f"{name}_block_ids")(np.array(block_ids, np.int32))
        else:
            name = {"free": "free_blocks", "touch": "touch"}[name]
            getattr(pool, name)([pool.blocks[block_id] for block_id in block_ids])

    def match(*numbers: int) -> list[int]:
        if by_id:
            return pool.match_prefix_ids(rows_of(*numbers)).tolist()
        return ids(pool.match_prefix(hashes_of(*numbers), [0])[0])

    got.append(get(4))
    pool.cache_block_ids(got[0][:3], hashes_of(1, 2, 3))
    call("touch", [1, 0, 6])
    call("free", [4, 3, 2, 1, 0])
    got.append(match(1, 2, 3))
    got.append(get(3))
    call("free", got[-1])
    pool.evict_blocks([2])
    got.append(match(1, 2, 3))
    call("touch", [1, 2, 3, 3])
    call("free", [3, 1, 1])
    got.append(get(2))
    return got


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_work_by_id_and_by_object_leaves_the_same_pool(caching: bool) -> None:
    pools = [BlockPool(8, caching, UNIT, True) for _ in range(2)]
    assert act(pools[0], by_id=False) == act(pools[1], by_id=True)
    assert snapshot(pools[0]) == snapshot(pools[1])
    assert pools[0].take_events() == pools[1].take_events()
    for pool in pools:
        pool.check()


def test_blocks_taken_by_id_are_given_back_as_objects_and_the_reverse(
    pool: BlockPool,
) -> None:
    block_ids = pool.get_new_block_ids(2)
    pool.free_blocks([pool.blocks[block_id] for block_id in block_ids])
    pool.free_block_ids(ids(pool.get_new_blocks(2)))
    assert walk(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_working_by_id_makes_no_view(pool: BlockPool) -> None:
    size = BlockPool(8, True, UNIT).blocks.nbytes
    pool.cache_block_ids(pool.get_new_block_ids(3), hashes_of(1, 2, 3))
    pool.touch_block_ids([1, 2, 5])
    pool.match_prefix_ids(hashes_of(1, 2, 3))
    pool.free_block_ids([1, 2, 3, 1, 2, 5])
    pool.evict_block_ids([2])
    assert pool.blocks.nbytes == size
    _ = pool.blocks[0]
    assert pool.blocks.nbytes > size  # a view does show in the count


# -- events and hooks -------------------------------------------------------------


def test_caching_by_id_is_told_without_tokens_and_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    pool = BlockPool(8, True, UNIT, enable_kv_cache_events=True, medium="CPU")
    for hashes in (hashes_of(1, 2, 3), rows_of(1, 2, 3)):
        pool.cache_block_ids([1, 0, 3], hashes, 5)
        assert pool.take_events() == [
            BlockStored(
                block_hashes=hashes_of(1, 3),
                parent_block_hash=None,
                token_ids=[],
                block_size=UNIT,
                lora_id=None,
                medium="CPU",
                lora_name=None,
                group_idx=5,
            )
        ]
        pool.evict_block_ids([3, 1])
        assert pool.take_events() == [
            BlockRemoved([hash_of(number)], "CPU", 5) for number in (3, 1)
        ]


def test_caching_no_ids_tells_nothing() -> None:
    pool = BlockPool(8, True, UNIT, enable_kv_cache_events=True)
    pool.cache_block_ids([], [])
    assert pool.take_events() == []


def test_getting_ids_tells_of_what_was_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    pool = BlockPool(4, True, UNIT, enable_kv_cache_events=True)
    pool.free_blocks(cached(pool, 1, 2, 3)[::-1])
    pool.take_events()
    pool.get_new_block_ids(2)
    assert pool.take_events() == [
        BlockRemoved([hash_of(number)], "GPU", 0) for number in (3, 2)
    ]


def test_hooks_are_told_of_blocks_taken_by_id() -> None:
    told: list[Any] = []

    class Collector:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda block: told.append((name, block.block_id))

    pool = BlockPool(8, True, UNIT, metrics_collector=Collector())
    pool.get_new_block_ids(1)
    pool.touch_block_ids([1, 0, 1])
    pool.evict_block_ids(np.array([1]))
    assert told == [
        ("on_block_evicted", 1),
        ("on_block_allocated", 1),
        ("on_block_accessed", 1),
        ("on_block_accessed", 1),
        ("on_block_evicted", 1),
    ]


def test_the_key_is_digest_and_group_on_both_faces(pool: BlockPool) -> None:
    by_id, by_object = pool.get_new_blocks(2)
    pool.cache_block_ids([by_id.block_id], rows_of(1), 258)
    pool.cache_full_blocks(request_of(1), [by_object], 0, 1, UNIT, 258)
    assert by_id.block_hash == by_object.block_hash == key_of(1, group=258)
    assert by_id.block_hash[-4:] == b"\0\0\1\2"


def test_ids_that_lie_at_an_odd_address_are_copied_to_an_even_one() -> None:
    pool = BlockPool(8, True, UNIT)
    memory = np.zeros(4 * 3 + 1, np.uint8)
    ids = memory[1:].view(np.int32)
    ids[:] = pool.get_new_block_ids(3)
    assert not ids.flags.aligned
    pool.touch_block_ids(ids)
    pool.free_block_ids(ids)
    pool.free_block_ids(ids)
    pool.check()
    assert pool.get_num_free_blocks() == 7
