"""Keys and the blocks that answer to them, in maps made by hand and in a pool's."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from pools import (
    UNIT,
    cached,
    hash_of,
    hit,
    ids,
    key_of,
    refused,
    request_of,
    run_apart,
)

from kvcache import BlockHashToBlockMap, BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8, True, UNIT)
    yield pool
    pool.check()


def filled(*block_ids: int, key: bytes = b"key") -> BlockHashToBlockMap:
    index = BlockHashToBlockMap()
    for block_id in block_ids:
        index.insert(key, KVCacheBlock(block_id))
    return index


def drain(index: BlockHashToBlockMap, key: bytes = b"key") -> list[int]:
    """Ids of a key's blocks, oldest first, each of which is taken out."""
    drained = []
    while (block := index.get_one_block(key)) is not None:
        drained.append(block.block_id)
        assert index.pop(key, block.block_id) is block
    return drained


# -- a map made by hand -----------------------------------------------------------


def test_a_new_map_is_empty() -> None:
    index = BlockHashToBlockMap()
    assert len(index) == 0
    assert index.get_one_block(b"key") is None
    assert index.contain(b"key", 3) is False
    assert index.pop(b"key", 3) is None


def test_a_block_is_found_under_its_key() -> None:
    index, block = BlockHashToBlockMap(), KVCacheBlock(3)
    assert index.insert(b"key", block) is None
    assert index.get_one_block(b"key") is block
    assert index.contain(b"key", 3) is True
    assert index.contain(b"key", 4) is False
    assert index.contain(b"kez", 3) is False
    assert len(index) == 1


def test_inserting_a_block_does_not_set_its_hash() -> None:
    index, block = BlockHashToBlockMap(), KVCacheBlock(3)
    index.insert(b"key", block)
    assert block == KVCacheBlock(3)


def test_pop_returns_the_block_and_forgets_it() -> None:
    index, block = BlockHashToBlockMap(), KVCacheBlock(3)
    index.insert(b"key", block)
    assert index.pop(b"key", 3) is block
    assert index.get_one_block(b"key") is None
    assert index.pop(b"key", 3) is None
    assert len(index) == 0


@pytest.mark.parametrize(("key", "block_id"), [(b"key", 4), (b"kez", 3), (b"key", -3)])
def test_pop_of_what_is_not_there_changes_nothing(key: bytes, block_id: int) -> None:
    index = filled(3)
    assert index.pop(key, block_id) is None
    assert drain(index) == [3]


def test_a_block_may_answer_to_several_keys() -> None:
    index, block = BlockHashToBlockMap(), KVCacheBlock(3)
    for key in (b"one", b"two"):
        index.insert(key, block)
    assert index.pop(b"one", 3) is block
    assert index.get_one_block(b"two") is block


@pytest.mark.parametrize("block_id", [-(2**31), -1, 0, 2**31 - 1])
def test_a_block_of_any_id_is_found_by_it(block_id: int) -> None:
    index = filled(block_id)
    assert index.contain(b"key", block_id)
    assert index.pop(b"key", block_id).block_id == block_id


def test_a_block_in_a_queue_can_be_mapped() -> None:
    index, block = BlockHashToBlockMap(), KVCacheBlock(3)
    queue = FreeKVCacheBlockQueue([block])
    index.insert(b"key", block)
    assert queue.popleft() is index.get_one_block(b"key") is block


def test_a_pools_block_can_be_mapped_by_hand(pool: BlockPool) -> None:
    index = BlockHashToBlockMap()
    index.insert(b"key", pool.blocks[3])
    assert index.get_one_block(b"key") is pool.blocks[3]
    assert len(pool.cached_block_hash_to_block) == 0


def test_a_map_made_by_hand_keeps_its_blocks_alive() -> None:
    index = filled(3)
    noise = [KVCacheBlock(9) for _ in range(100)]
    assert index.get_one_block(b"key") == KVCacheBlock(3)
    assert len(noise) == 100


# -- keys -------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 37))
def test_keys_of_any_length_up_to_36_are_told_apart(length: int) -> None:
    index = BlockHashToBlockMap()
    keys = [bytes([value]) * length for value in (0, 1, 255)]
    for block_id, key in enumerate(keys):
        index.insert(key, KVCacheBlock(block_id))
    assert [index.get_one_block(key).block_id for key in keys] == [0, 1, 2]


def test_keys_that_begin_alike_are_told_apart_by_their_length() -> None:
    index = BlockHashToBlockMap()
    keys = [b"\0" * length for length in range(1, 37)]
    for key in keys:
        index.insert(key, KVCacheBlock(len(key)))
    assert len(index) == 36
    assert [drain(index, key) for key in keys] == [[n] for n in range(1, 37)]


@pytest.mark.parametrize("place", range(36))
def test_every_byte_of_a_key_counts(place: int) -> None:
    key = bytearray(36)
    index = filled(3, key=bytes(key))
    key[place] = 1
    assert index.get_one_block(bytes(key)) is None


bad_keys = pytest.mark.parametrize(
    ("key", "error"),
    [
        (b"", ValueError),
        (b"x" * 37, ValueError),
        (b"x" * 10_000, ValueError),
        ("key", TypeError),
        (bytearray(b"key"), TypeError),
        (memoryview(b"key"), TypeError),
        (3, TypeError),
        (None, TypeError),
    ],
    ids=["empty", "37", "10000", "str", "bytearray", "memoryview", "int", "None"],
)


@bad_keys
def test_what_is_no_key_is_refused_everywhere(
    key: object, error: type[Exception]
) -> None:
    index = filled(3)
    for call in (
        lambda: index.insert(key, KVCacheBlock(4)),
        lambda: index.get_one_block(key),
        lambda: index.contain(key, 3),
        lambda: index.pop(key, 3),
    ):
        with pytest.raises(error):
            call()
    assert len(index) == 1
    assert drain(index) == [3]


@pytest.mark.parametrize("block", [3, None, "block", [KVCacheBlock(3)]])
def test_what_is_no_block_is_not_inserted(block: object) -> None:
    index = filled(3)
    with pytest.raises(TypeError):
        index.insert(b"key", block)
    with pytest.raises(TypeError):
        index.insert(b"new", block)
    assert len(index) == 1


@pytest.mark.parametrize("block_id", ["3", 3.0, None, True])
def test_a_block_id_that_is_no_int_is_refused(block_id: object) -> None:
    index = filled(3, 1)
    with pytest.raises(TypeError):
        index.contain(b"key", block_id)
    with pytest.raises(TypeError):
        index.pop(b"key", block_id)
    assert drain(index) == [3, 1]


# -- copies of one key ------------------------------------------------------------


def test_of_several_blocks_the_one_inserted_first_answers() -> None:
    index = filled(5, 3, 4)
    assert len(index) == 1
    assert all(index.contain(b"key", block_id) for block_id in (3, 4, 5))
    assert drain(index) == [5, 3, 4]


@pytest.mark.parametrize("removed", [5, 3, 4])
def test_removing_one_copy_removes_no_other(removed: int) -> None:
    index = filled(5, 3, 4)
    assert index.pop(b"key", removed).block_id == removed
    assert not index.contain(b"key", removed)
    assert drain(index) == [block_id for block_id in (5, 3, 4) if block_id != removed]


def test_a_copy_that_returns_is_the_youngest() -> None:
    index = filled(5, 3, 4)
    index.insert(b"key", index.pop(b"key", 5))
    assert drain(index) == [3, 4, 5]


def test_inserting_a_copy_again_leaves_it_in_its_place() -> None:
    index = filled(5, 3)
    index.insert(b"key", index.get_one_block(b"key"))
    assert drain(index) == [5, 3]


def test_another_block_of_the_same_id_takes_its_place() -> None:
    index, block = filled(5, 3), KVCacheBlock(5, ref_cnt=7)
    index.insert(b"key", block)
    assert index.get_one_block(b"key") is block
    assert drain(index) == [5, 3]


@pytest.mark.parametrize("block_id", [1, 2, 3])
def test_a_pools_block_takes_the_place_of_a_hand_made_one_of_its_id(
    pool: BlockPool, block_id: int
) -> None:
    index = pool.cached_block_hash_to_block
    for each in (1, 2, 3):
        index.insert(key_of(1), KVCacheBlock(each))
    index.insert(key_of(1), pool.blocks[block_id])
    pool.check()
    assert index.pop(key_of(1), block_id) is pool.blocks[block_id]
    assert drain(index, key_of(1)) == [each for each in (1, 2, 3) if each != block_id]


@pytest.mark.parametrize("block_id", [1, 2, 3])
def test_a_hand_made_block_takes_the_place_of_a_pools_one_of_its_id(
    pool: BlockPool, block_id: int
) -> None:
    index, block = pool.cached_block_hash_to_block, KVCacheBlock(block_id)
    for each in (1, 2, 3):
        index.insert(key_of(1), pool.blocks[each])
    index.insert(key_of(1), block)
    pool.check()
    assert index.pop(key_of(1), block_id) is block
    assert drain(index, key_of(1)) == [each for each in (1, 2, 3) if each != block_id]


def test_copies_of_other_keys_are_not_touched() -> None:
    index = filled(5, 3)
    for block_id in (3, 5):
        index.insert(b"other", KVCacheBlock(block_id))
    assert drain(index) == [5, 3]
    assert len(index) == 1
    assert drain(index, b"other") == [3, 5]


def test_ten_thousand_copies_go_in_and_out_in_any_order() -> None:
    order = list(range(10_000))
    random.Random(1).shuffle(order)
    index = filled(*order)
    assert len(index) == 1
    leavers = order[:5_000]
    random.Random(2).shuffle(leavers)
    for block_id in leavers:
        assert index.pop(b"key", block_id).block_id == block_id
    assert drain(index) == order[5_000:]


# -- growth -----------------------------------------------------------------------


def test_a_map_grows_and_finds_everything_again() -> None:
    index, empty = BlockHashToBlockMap(), BlockHashToBlockMap()
    keys = [hash_of(number) for number in range(20_000)]
    for block_id, key in enumerate(keys):
        index.insert(key, KVCacheBlock(block_id))
    assert len(index) == 20_000
    assert index.nbytes > empty.nbytes
    assert all(
        index.get_one_block(key).block_id == block_id
        for block_id, key in enumerate(keys)
    )
    random.Random(1).shuffle(keys)
    for count, key in enumerate(keys):
        assert len(index) == 20_000 - count
        assert index.pop(key, index.get_one_block(key).block_id) is not None
    assert len(index) == 0


def test_what_leaves_a_map_makes_room_for_what_comes() -> None:
    index = BlockHashToBlockMap()
    sizes = set()
    for number in range(10_000):
        index.insert(hash_of(number), KVCacheBlock(number))
        if number >= 100:
            assert index.pop(hash_of(number - 100), number - 100) is not None
            sizes.add(index.nbytes)
    assert len(index) == 100
    assert len(sizes) <= 2


# -- the map of a pool ------------------------------------------------------------


def test_a_pools_map_names_the_blocks_that_are_cached(pool: BlockPool) -> None:
    index = pool.cached_block_hash_to_block
    blocks = cached(pool, 1, 2)
    assert len(index) == 2
    assert index.get_one_block(key_of(2)) is blocks[1]
    assert index.contain(key_of(1), 1)
    assert not index.contain(key_of(1), 2)
    assert not index.contain(key_of(1, group=1), 1)


@pytest.mark.parametrize("block_id", [-1, 8, 2**31 - 1])
def test_a_pools_map_contains_no_block_that_the_pool_has_not(
    pool: BlockPool, block_id: int
) -> None:
    cached(pool, 1)
    assert not pool.cached_block_hash_to_block.contain(key_of(1), block_id)
    assert pool.cached_block_hash_to_block.pop(key_of(1), block_id) is None


def test_pop_on_a_pools_map_changes_the_entry_and_not_the_block(
    pool: BlockPool,
) -> None:
    (block,) = cached(pool, 1)
    assert pool.cached_block_hash_to_block.pop(key_of(1), 1) is block
    assert hit(pool, 1) is None
    assert block.block_hash == key_of(1)


def test_insert_on_a_pools_map_changes_the_entries_and_not_the_block(
    pool: BlockPool,
) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cached_block_hash_to_block.insert(key_of(1), block)
    assert hit(pool, 1) == 1
    assert block.block_hash is None


def test_an_entry_inserted_by_hand_goes_when_the_block_is_reused(
    pool: BlockPool,
) -> None:
    blocks = pool.get_new_blocks(7)
    for number in (1, 2):
        pool.cached_block_hash_to_block.insert(key_of(number), blocks[3])
    pool.free_blocks([blocks[3]])
    assert ids(pool.get_new_blocks(1)) == [4]
    assert hit(pool, 1) is hit(pool, 2) is None
    assert len(pool.cached_block_hash_to_block) == 0


def test_a_hash_set_by_hand_answers_once_it_is_inserted(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.set_block_hash(key_of(1), UNIT)
    pool.cached_block_hash_to_block.insert(key_of(1), block)
    assert hit(pool, 1) == 1
    assert pool._maybe_evict_cached_block(block)
    assert hit(pool, 1) is None
    assert block.block_hash is None


def test_an_entry_inserted_before_its_hash_is_set_is_evicted_with_it() -> None:
    pool = BlockPool(8, True, UNIT, enable_kv_cache_events=True)
    (block,) = pool.get_new_blocks(1)
    pool.cached_block_hash_to_block.insert(key_of(1), block)
    block.set_block_hash(key_of(1), UNIT)
    assert pool._maybe_evict_cached_block(block)
    assert len(pool.take_events()) == 1
    assert hit(pool, 1) is None


def test_a_hand_made_block_can_be_inserted_into_a_pools_map(pool: BlockPool) -> None:
    block = KVCacheBlock(3)
    pool.cached_block_hash_to_block.insert(key_of(1), block)
    assert pool.get_cached_block(hash_of(1), [0])[0] is block
    assert pool.match_prefix_ids([hash_of(1)]).tolist() == []
    assert pool.cached_block_hash_to_block.pop(key_of(1), 3) is block


def test_a_block_of_another_pool_is_not_inserted(pool: BlockPool) -> None:
    other = BlockPool(8, True, UNIT)
    cached(pool, 1)
    with refused(ValueError, pool, other, match="block 3"):
        pool.cached_block_hash_to_block.insert(key_of(2), other.blocks[3])


def test_the_ends_of_a_pools_queue_are_not_inserted_into_its_map() -> None:
    printed = run_apart("""
pool = BlockPool(8, True, 16)
index = pool.cached_block_hash_to_block
for end in (
    pool.free_block_queue.fake_free_list_head,
    pool.free_block_queue.fake_free_list_tail,
):
    for number in range(50):
        try:
            index.insert(b"%d" % number, end)
        except ValueError:
            pass
pool.check()
print(len(index))
""")
    assert printed == "0"


def test_two_pools_do_not_see_each_others_keys(pool: BlockPool) -> None:
    other = BlockPool(8, True, UNIT)
    cached(pool, 1)
    assert hit(other, 1) is None
    cached(other, 2)
    assert hit(pool, 2) is None


@pytest.mark.parametrize("evicted", [0, 1, 2])
def test_evicting_one_of_a_pools_copies_evicts_no_other(
    pool: BlockPool, evicted: int
) -> None:
    blocks = pool.get_new_blocks(3)
    order = [blocks[i] for i in (2, 0, 1)]
    for block in order:
        pool.cache_full_blocks(request_of(1), [block], 0, 1, UNIT, 0)
    pool.evict_blocks([order[evicted].block_id])
    del order[evicted]
    for block in order:
        assert hit(pool, 1) == block.block_id
        pool.evict_blocks([block.block_id])
    assert hit(pool, 1) is None


def rows_that_differ(before: np.ndarray, after: np.ndarray) -> int:
    return int(
        (before.view(np.uint8) != after.view(np.uint8)).reshape(-1, 64).any(1).sum()
    )


def test_one_of_ten_thousand_copies_comes_and_goes_by_writing_three_rows() -> None:
    pool = BlockPool(10_002, True, UNIT)
    rows = pool.blocks.as_array()
    block_ids = pool.get_new_block_ids(10_001)
    pool.cache_block_ids(block_ids[:-1], [hash_of(1)] * 10_000)
    before = rows.copy()
    pool.cache_block_ids(block_ids[-1:], [hash_of(1)])
    assert 1 <= rows_that_differ(before, rows) <= 3
    order = block_ids.copy()
    np.random.default_rng(1).shuffle(order)
    for block_id in order[:200]:
        before = rows.copy()
        pool.evict_block_ids([block_id])
        assert 1 <= rows_that_differ(before, rows) <= 3
    pool.evict_block_ids(order[200:])
    assert hit(pool, 1) is None
    pool.check()


def test_a_hundred_thousand_copies_come_and_go() -> None:
    # Were one step to look at all copies, this would take five billion looks.
    pool = BlockPool(100_001, True, UNIT)
    block_ids = pool.get_new_block_ids(100_000)
    pool.cache_block_ids(block_ids, [hash_of(1)] * 100_000)
    order = block_ids.copy()
    np.random.default_rng(1).shuffle(order)
    pool.evict_block_ids(order[:50_000])
    left = set(order[50_000:].tolist())
    assert hit(pool, 1) == min(left)
    pool.check()
    pool.evict_block_ids(order[50_000:])
    assert len(pool.cached_block_hash_to_block) == 0


@pytest.mark.parametrize("num_blocks", [2, 3, 8, 100, 10_000])
def test_a_pools_table_does_not_grow_for_the_blocks_own_hashes(num_blocks: int) -> None:
    pool = BlockPool(num_blocks, True, UNIT)
    index = pool.cached_block_hash_to_block
    size = index.nbytes
    for first in (0, 1_000_000):
        block_ids = pool.get_new_block_ids(num_blocks - 1)
        hashes = [hash_of(first + number) for number in range(num_blocks - 1)]
        pool.cache_block_ids(block_ids, hashes)
        assert len(index) == num_blocks - 1
        pool.free_block_ids(block_ids)
    assert index.nbytes == size
    pool.check()


@pytest.mark.parametrize("num_blocks", [10_000, 100_000, 1_000_000])
def test_a_pools_table_takes_at_most_16_bytes_a_block(num_blocks: int) -> None:
    pool = BlockPool(num_blocks, True, UNIT)
    assert pool.cached_block_hash_to_block.nbytes <= 16 * num_blocks


def test_a_pool_without_caching_has_next_to_no_table() -> None:
    pool = BlockPool(100_000, False, UNIT)
    assert pool.cached_block_hash_to_block.nbytes < 1_000


def test_a_pools_table_grows_for_further_keys_and_keeps_them_all() -> None:
    pool = BlockPool(8, True, UNIT)
    index = pool.cached_block_hash_to_block
    size = index.nbytes
    blocks = cached(pool, *range(7))
    for number in range(7, 700):
        pool._insert_block_hash(key_of(number), blocks[number % 7], UNIT)
    assert len(index) == 700
    assert index.nbytes > size
    assert [hit(pool, number) for number in range(700)] == [
        1 + number % 7 for number in range(700)
    ]
    pool.check()
    pool.evict_blocks([3])
    assert [hit(pool, number) for number in range(14)] == [
        None if number % 7 == 2 else 1 + number % 7 for number in range(14)
    ]
    assert len(index) == 600
    pool.check()


def test_a_map_may_outlive_its_pool() -> None:
    pool = BlockPool(8, True, UNIT)
    (block,) = cached(pool, 1)
    index = pool.cached_block_hash_to_block
    del pool
    assert index.get_one_block(key_of(1)) is block
    assert index.pop(key_of(1), 1) is block
    assert len(index) == 0


def test_a_block_reset_after_its_pool_is_gone_leaves_the_map_sound() -> None:
    printed = run_apart("""
pool = BlockPool(8, True, 16)
blocks = pool.get_new_blocks(2)
for number, block in enumerate(blocks):
    pool._insert_block_hash(b"key %d" % number, block, 16)
index = pool.cached_block_hash_to_block
del pool
try:
    blocks[0].reset_hash()
    blocks[0].set_block_hash(b"new")
except ValueError:
    pass  # it may also refuse
found = [key for key in (b"key 0", b"key 1", b"new") if index.get_one_block(key)]
print(len(found) == len(index))
for key in found:
    block = index.get_one_block(key)
    print(index.contain(key, block.block_id), index.pop(key, block.block_id) is block)
print(len(index))
""")
    lines = printed.splitlines()
    assert (lines[0], lines[-1]) == ("True", "0")
    assert set(lines[1:-1]) == {"True True"}
