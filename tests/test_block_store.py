"""Rows and the views of them: what a block shows, who may change it, what it costs."""

import copy
import gc
import pickle
import re
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pools import UNIT, cached, hash_of, ids, key_of, refused, request_of, run_apart

import kvcache
from kvcache import (
    BlockPool,
    BlockStateError,
    BlockStore,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from kvcache.block_store import BLOCK_META_DTYPE


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8, True, UNIT)
    yield pool
    pool.check()


def neighbours(block: KVCacheBlock) -> tuple[KVCacheBlock | None, KVCacheBlock | None]:
    return block.prev_free_block, block.next_free_block


# -- a block made by hand ---------------------------------------------------------


def test_a_new_block_is_unused_unhashed_and_unlinked() -> None:
    block = KVCacheBlock(block_id=3)
    assert block.block_id == 3
    assert block.ref_cnt == 0
    assert block.block_hash is None
    assert block.block_hash_num_tokens is None
    assert neighbours(block) == (None, None)
    assert block.is_null is False
    assert block.pool is None


def test_a_block_is_made_with_vllms_keywords() -> None:
    before, after = KVCacheBlock(2), KVCacheBlock(4)
    pool = object()
    block = KVCacheBlock(
        block_id=3,
        ref_cnt=2,
        _block_hash=b"key",
        _block_hash_num_tokens=16,
        prev_free_block=before,
        next_free_block=after,
        is_null=True,
        pool=pool,
    )
    assert block.block_id == 3
    assert block.ref_cnt == 2
    assert block.block_hash == block._block_hash == b"key"
    assert block.block_hash_num_tokens == block._block_hash_num_tokens == 16
    assert block.prev_free_block is before
    assert block.next_free_block is after
    assert block.is_null is True
    assert block.pool is pool


def test_a_blocks_fields_may_be_given_by_position_in_vllms_order() -> None:
    block = KVCacheBlock(3, 2, b"key", 16, None, None, True)
    assert block == KVCacheBlock(
        block_id=3, ref_cnt=2, _block_hash=b"key", _block_hash_num_tokens=16, is_null=1
    )


def test_a_blocks_pool_is_given_by_keyword_only() -> None:
    with pytest.raises(TypeError):
        KVCacheBlock(3, 0, None, None, None, None, False, object())


@pytest.mark.parametrize("block_id", [-(2**31), -1, 0, 2**31 - 1])
def test_a_block_id_is_any_int32(block_id: int) -> None:
    assert KVCacheBlock(block_id).block_id == block_id


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"block_id": 2**31}, ValueError),
        ({"block_id": -(2**31) - 1}, ValueError),
        ({"block_id": "3"}, TypeError),
        ({"block_id": 3.0}, TypeError),
        ({"block_id": True}, TypeError),
        ({"block_id": None}, TypeError),
        ({"ref_cnt": -1}, ValueError),
        ({"ref_cnt": 2**31}, ValueError),
        ({"ref_cnt": 1.0}, TypeError),
        ({"_block_hash": b""}, ValueError),
        ({"_block_hash": b"x" * 37}, ValueError),
        ({"_block_hash": "key"}, TypeError),
        ({"_block_hash": b"key", "_block_hash_num_tokens": -1}, ValueError),
        ({"_block_hash": b"key", "_block_hash_num_tokens": "4"}, TypeError),
        ({"prev_free_block": 2}, TypeError),
        ({"next_free_block": object()}, TypeError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_a_block_is_not_made_of_what_a_field_cannot_hold(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        KVCacheBlock(**{"block_id": 3, **fields})


def test_a_block_is_not_made_twice() -> None:
    block = KVCacheBlock(3)
    with pytest.raises(ValueError, match="block 3"):
        block.__init__(4)
    assert block == KVCacheBlock(3)


def test_a_pools_block_is_not_made_over(pool: BlockPool) -> None:
    with refused(ValueError, pool, match="block 3"):
        pool.blocks[3].__init__(4)


def test_a_block_that_was_never_initialised_can_be_read_and_not_written() -> None:
    block = KVCacheBlock.__new__(KVCacheBlock)
    assert block.ref_cnt == 0
    assert block.block_hash is None
    assert neighbours(block) == (None, None)
    block.reset_hash()
    for name in ("block_id", "ref_cnt", "is_null", "prev_free_block"):
        with pytest.raises(ValueError):
            setattr(block, name, None if name == "prev_free_block" else 1)
    with pytest.raises(ValueError):
        block.set_block_hash(b"key")
    with pytest.raises(ValueError):
        FreeKVCacheBlockQueue([block])
    assert KVCacheBlock.__new__(KVCacheBlock).block_hash is None


def test_a_block_has_no_dict_and_takes_no_further_attribute() -> None:
    block = KVCacheBlock(3)
    assert not hasattr(block, "__dict__")
    with pytest.raises(AttributeError):
        block.colour = "red"


@pytest.mark.parametrize("name", ["block_hash", "block_hash_num_tokens", "pool"])
def test_a_field_that_a_method_keeps_cannot_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(KVCacheBlock(3), name, None)


# -- comparison, text, copies -----------------------------------------------------


def test_a_block_that_was_not_initialised_is_nowhere() -> None:
    block = KVCacheBlock.__new__(KVCacheBlock)
    assert block.pool is block.prev_free_block is block.next_free_block is None


def test_a_block_equals_itself(pool: BlockPool) -> None:
    for block in (pool.blocks[1], KVCacheBlock(1)):
        same = block
        assert block == same


def test_blocks_with_equal_fields_are_equal() -> None:
    fields = {"ref_cnt": 1, "_block_hash": b"key", "_block_hash_num_tokens": 16}
    assert KVCacheBlock(3, **fields) == KVCacheBlock(3, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_id": 4},
        {"ref_cnt": 1},
        {"_block_hash": b"kez"},
        {"_block_hash": b"key\0"},
        {"_block_hash_num_tokens": 20},
        {"_block_hash_num_tokens": None},
        {"prev_free_block": KVCacheBlock(9)},
        {"next_free_block": KVCacheBlock(9)},
        {"is_null": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_blocks_that_differ_in_a_field_are_not_equal(fields: dict[str, Any]) -> None:
    common = {"block_id": 3, "_block_hash": b"key", "_block_hash_num_tokens": 16}
    assert KVCacheBlock(**common) != KVCacheBlock(**{**common, **fields})


def test_blocks_of_different_pools_may_be_equal(pool: BlockPool) -> None:
    other = BlockPool(8, True, UNIT)
    assert pool.blocks[3] == other.blocks[3]
    assert KVCacheBlock(3, pool=object()) == KVCacheBlock(3, pool=object())


def test_neighbours_are_compared_by_id() -> None:
    blocks = [KVCacheBlock(3), KVCacheBlock(3)]
    for block, ref_cnt in zip(blocks, (0, 1), strict=True):
        block.next_free_block = KVCacheBlock(4, ref_cnt=ref_cnt)
    assert blocks[0] == blocks[1]


def test_blocks_in_a_circle_can_be_compared_and_printed() -> None:
    blocks = [KVCacheBlock(3), KVCacheBlock(3)]
    for block in blocks:
        block.next_free_block = block.prev_free_block = block
    assert blocks[0] == blocks[1]
    assert "prev_free_block=3, next_free_block=3" in repr(blocks[0])


@pytest.mark.parametrize("other", [3, None, (3, 0), "KVCacheBlock(block_id=3)"])
def test_a_block_equals_nothing_but_blocks(other: object) -> None:
    assert KVCacheBlock(3) != other


def test_blocks_have_no_order() -> None:
    with pytest.raises(TypeError):
        sorted([KVCacheBlock(3), KVCacheBlock(4)])


def test_the_text_of_a_block_tells_its_fields_and_its_neighbours_ids() -> None:
    block = KVCacheBlock(3, 2, b"key", 16, prev_free_block=KVCacheBlock(7))
    assert repr(block) == (
        "KVCacheBlock(block_id=3, ref_cnt=2, _block_hash=b'key',"
        " _block_hash_num_tokens=16, prev_free_block=7, next_free_block=None)"
    )


@pytest.mark.parametrize("of_pool", [False, True])
def test_a_block_cannot_be_hashed(pool: BlockPool, of_pool: bool) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(pool.blocks[3] if of_pool else KVCacheBlock(3))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("of_pool", [False, True])
def test_a_block_cannot_be_copied_or_pickled(
    pool: BlockPool, of_pool: bool, duplicate: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError):
        duplicate(pool.blocks[3] if of_pool else KVCacheBlock(3))


@pytest.mark.parametrize("kind", [KVCacheBlock, BlockStore])
def test_blocks_and_stores_cannot_be_subclassed(kind: type) -> None:
    with pytest.raises(TypeError):
        type("Derived", (kind,), {})


# -- the hash ---------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 37))
def test_a_key_has_1_to_36_bytes(length: int) -> None:
    block = KVCacheBlock(3)
    key = bytes(range(200, 200 + length))
    block.set_block_hash(key, 16)
    assert block.block_hash == key
    assert block.block_hash_num_tokens == 16


@pytest.mark.parametrize("key", [b"", b"x" * 37, b"x" * 1000])
def test_a_key_of_another_length_is_refused(key: bytes) -> None:
    block = KVCacheBlock(3)
    with pytest.raises(ValueError, match=f"36 bytes, got {len(key)}"):
        block.set_block_hash(key)
    assert block == KVCacheBlock(3)


@pytest.mark.parametrize(
    "key", ["key", bytearray(b"key"), memoryview(b"key"), 3, None, np.bytes_(b"")]
)
def test_a_key_that_is_not_bytes_is_refused(key: object) -> None:
    block = KVCacheBlock(3)
    with pytest.raises((TypeError, ValueError)):
        block.set_block_hash(key)
    assert block == KVCacheBlock(3)


def test_a_keys_zeros_are_kept() -> None:
    block = KVCacheBlock(3)
    block.set_block_hash(b"\0key\0\0")
    assert block.block_hash == b"\0key\0\0"


def test_the_number_of_tokens_may_be_unknown() -> None:
    block = KVCacheBlock(3)
    block.set_block_hash(b"key")
    assert block.block_hash_num_tokens is None


def test_a_hash_may_cover_no_tokens() -> None:
    block = KVCacheBlock(3)
    block.set_block_hash(b"key", 0)
    assert block.block_hash_num_tokens == 0


@pytest.mark.parametrize("second", [b"key", b"other"])
def test_a_block_with_a_hash_takes_no_second_one(second: bytes) -> None:
    block = KVCacheBlock(3, _block_hash=b"key", _block_hash_num_tokens=16)
    with pytest.raises(BlockStateError, match="block 3") as refusal:
        block.set_block_hash(second, 20)
    assert isinstance(refusal.value, AssertionError)
    assert isinstance(refusal.value, ValueError)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"key", 16)


def test_a_block_takes_a_hash_again_after_a_reset() -> None:
    block = KVCacheBlock(3)
    block.set_block_hash(b"x" * 36, 16)
    block.reset_hash()
    assert block == KVCacheBlock(3)
    block.set_block_hash(b"y")
    assert block.block_hash == b"y"


def test_assigning_the_hash_replaces_it_and_forgets_its_tokens() -> None:
    block = KVCacheBlock(3, _block_hash=b"key", _block_hash_num_tokens=16)
    block._block_hash = b"other"
    assert block == KVCacheBlock(3, _block_hash=b"other")
    block._block_hash = None
    assert block == KVCacheBlock(3)


@pytest.mark.parametrize("key", ["key", b"", b"x" * 37, 3])
def test_assigning_what_is_no_key_leaves_the_hash(key: object) -> None:
    block = KVCacheBlock(3, _block_hash=b"key", _block_hash_num_tokens=16)
    with pytest.raises((TypeError, ValueError)):
        block._block_hash = key
    assert block == KVCacheBlock(3, _block_hash=b"key", _block_hash_num_tokens=16)


def test_assigning_a_pools_blocks_hash_leaves_no_entry(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    block._block_hash = key_of(2)
    assert block.block_hash == key_of(2)
    assert len(pool.cached_block_hash_to_block) == 0
    block._block_hash = None
    assert block.block_hash is None


def test_a_block_without_a_hash_can_be_reset() -> None:
    block = KVCacheBlock(3)
    block.reset_hash()
    assert block == KVCacheBlock(3)


def test_set_block_hash_on_a_pools_block_sets_the_field_alone(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.set_block_hash(key_of(1), UNIT)
    assert block.block_hash == key_of(1)
    assert pool.get_cached_block(hash_of(1), [0]) is None
    assert len(pool.cached_block_hash_to_block) == 0


def test_reset_hash_on_a_pools_block_removes_all_its_entries(pool: BlockPool) -> None:
    (block,) = cached(pool, 1)
    pool._insert_block_hash(key_of(2), block, UNIT)
    block.reset_hash()
    assert block.block_hash is None
    assert len(pool.cached_block_hash_to_block) == 0
    assert not pool.cached_block_hashes_by_block


# -- the count of users -----------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2**31 - 1])
def test_a_hand_made_blocks_count_may_be_set_freely(count: int) -> None:
    block = KVCacheBlock(3, ref_cnt=1)
    block.ref_cnt = count
    assert block.ref_cnt == count


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (-1, ValueError),
        (2**31, ValueError),
        (2**70, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_count_is_an_int_from_0_to_int32s_largest(
    pool: BlockPool, count: object, error: type[Exception]
) -> None:
    for block in (KVCacheBlock(3, ref_cnt=1), pool.get_new_blocks(1)[0]):
        with pytest.raises(error, match="ref_cnt"):
            block.ref_cnt = count
        assert block.ref_cnt == 1


def test_a_used_pools_block_may_get_more_users_by_hand(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt += 1
    assert block.ref_cnt == 2
    block.ref_cnt -= 1
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 7


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_free_pools_block_gets_no_user_by_hand(pool: BlockPool, count: int) -> None:
    with refused(ValueError, pool, match=rf"block 3 .* from 0 to {count}"):
        pool.blocks[3].ref_cnt = count


def test_a_used_pools_block_does_not_lose_its_last_user_by_hand(
    pool: BlockPool,
) -> None:
    (block,) = pool.get_new_blocks(1)
    with refused(ValueError, pool, match="block 1 .* from 1 to 0"):
        block.ref_cnt -= 1


# -- the links --------------------------------------------------------------------


def test_a_hand_made_blocks_links_can_be_set_and_unset() -> None:
    block, other = KVCacheBlock(3), KVCacheBlock(4)
    block.prev_free_block = block.next_free_block = other
    assert neighbours(block)[0] is neighbours(block)[1] is other
    assert neighbours(other) == (None, None)
    block.prev_free_block = block.next_free_block = None
    assert neighbours(block) == (None, None)


@pytest.mark.parametrize("name", ["prev_free_block", "next_free_block"])
@pytest.mark.parametrize("value", [3, "block", object()])
def test_a_link_leads_to_a_block_or_to_none(name: str, value: object) -> None:
    block = KVCacheBlock(3)
    with pytest.raises(TypeError):
        setattr(block, name, value)
    assert neighbours(block) == (None, None)


@pytest.mark.parametrize("name", ["prev_free_block", "next_free_block"])
@pytest.mark.parametrize("value", [None, KVCacheBlock(9)])
def test_the_links_of_a_block_in_a_queue_are_the_queues(
    name: str, value: KVCacheBlock | None
) -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = FreeKVCacheBlockQueue(blocks)
    with pytest.raises(ValueError, match="block 1"):
        setattr(blocks[1], name, value)
    assert ids(queue.get_all_free_blocks()) == [0, 1, 2]
    assert neighbours(blocks[1]) == (blocks[0], blocks[2])


@pytest.mark.parametrize("name", ["prev_free_block", "next_free_block"])
@pytest.mark.parametrize("value", [None, KVCacheBlock(9)])
@pytest.mark.parametrize("used", [False, True])
def test_the_links_of_a_pools_block_are_the_pools(
    pool: BlockPool, name: str, value: KVCacheBlock | None, used: bool
) -> None:
    block = pool.get_new_blocks(1)[0] if used else pool.blocks[3]
    with refused(ValueError, pool, match=f"{name} of block {block.block_id}"):
        setattr(block, name, value)


@pytest.mark.parametrize(("name", "value"), [("block_id", 9), ("is_null", True)])
def test_what_names_a_block_is_set_on_hand_made_blocks_outside_queues(
    pool: BlockPool, name: str, value: object
) -> None:
    block = KVCacheBlock(3)
    setattr(block, name, value)
    assert getattr(block, name) == value
    queue = FreeKVCacheBlockQueue([KVCacheBlock(3)])
    with pytest.raises(ValueError, match=f"{name} of block 3"):
        setattr(queue.get_all_free_blocks()[0], name, value)
    with refused(ValueError, pool, match=f"{name} of block 3"):
        setattr(pool.blocks[3], name, value)


def test_a_free_block_of_a_pool_shows_its_neighbours(pool: BlockPool) -> None:
    assert neighbours(pool.blocks[3]) == (pool.blocks[2], pool.blocks[4])
    assert pool.blocks[3].next_free_block is pool.blocks[4]


def test_the_outermost_free_blocks_show_the_queues_ends(pool: BlockPool) -> None:
    queue = pool.free_block_queue
    assert pool.blocks[1].prev_free_block is queue.fake_free_list_head
    assert pool.blocks[7].next_free_block is queue.fake_free_list_tail


def test_a_used_block_of_a_pool_has_no_neighbours(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    assert neighbours(block) == (None, None)
    assert neighbours(pool.null_block) == (None, None)


# -- views ------------------------------------------------------------------------


def test_a_blocks_view_is_the_same_object_wherever_it_comes_from(
    pool: BlockPool,
) -> None:
    view = pool.blocks[1]
    assert pool.free_block_queue.get_all_free_blocks()[0] is view
    assert pool.get_new_blocks(1)[0] is view
    pool.cache_full_blocks(request_of(1), [view], 0, 1, UNIT, 0)
    assert pool.get_cached_block(hash_of(1), [0])[0] is view
    assert pool.match_prefix([hash_of(1)], [0])[0][0] is view
    pool.free_blocks([view])
    assert next(block for block in pool.blocks if block.block_id == 1) is view


def test_a_view_shows_what_happens_to_its_row(pool: BlockPool) -> None:
    view = pool.blocks[1]
    assert pool.get_new_block_ids(1).tolist() == [1]
    assert view.ref_cnt == 1
    pool.cache_block_ids([1], [hash_of(1)])
    assert view.block_hash == key_of(1)


def test_a_view_knows_its_pool_and_does_not_keep_it_alive() -> None:
    pool = BlockPool(8, True, UNIT)
    view, witness = pool.blocks[3], weakref.ref(pool)
    assert view.pool is pool
    del pool
    assert witness() is None
    assert view.pool is None


def test_a_view_keeps_a_copy_of_its_row_when_the_pool_goes() -> None:
    pool = BlockPool(8, True, UNIT)
    (used,) = cached(pool, 1)
    used.ref_cnt = 3
    free, null = pool.blocks[5], pool.null_block
    del pool
    # The copies must outlive what takes the pool's memory next.
    noise = [BlockPool(8, True, UNIT) for _ in range(50)]
    assert used == KVCacheBlock(1, 3, key_of(1), UNIT)
    assert free == KVCacheBlock(5)
    assert null == KVCacheBlock(0, is_null=True)
    assert len(noise) == 50


@pytest.mark.parametrize(
    "face", ["blocks", "free_block_queue", "cached_block_hash_to_block", "as_array"]
)
def test_a_view_reads_its_row_as_long_as_a_face_of_the_pool_is_there(face: str) -> None:
    pool = BlockPool(8, True, UNIT)
    view = pool.blocks[5]
    held = pool.blocks.as_array() if face == "as_array" else getattr(pool, face)
    del pool
    assert view.next_free_block.block_id == 6
    del held
    assert view.next_free_block is None


def test_a_view_that_outlived_its_pool_can_be_hashed_over() -> None:
    pool = BlockPool(8, True, UNIT)
    (block,) = cached(pool, 1)
    del pool
    block.reset_hash()
    block.set_block_hash(b"key")
    assert block == KVCacheBlock(1, 1, b"key")


def test_a_view_that_outlived_its_pool_is_in_no_pool(pool: BlockPool) -> None:
    stranger = BlockPool(8, True, UNIT).get_new_blocks(1)[0]
    with refused(ValueError, pool, match="block 1"):
        pool.touch([stranger])
    with refused(ValueError, pool, match="block 1"):
        pool.free_blocks([stranger])


def test_a_view_has_no_pool_while_its_pool_is_being_torn_down() -> None:
    # The attributes of a subclass go before the pool itself does.
    printed = run_apart("""
class Pool(BlockPool):
    pass

class Last:
    def __init__(self, block):
        self.block = block
    def __del__(self):
        print(self.block.pool)

pool = Pool(8, True, 16)
pool.last = Last(pool.blocks[1])
del pool
""")
    assert printed == "None"


def test_a_view_can_be_reset_while_its_pool_is_being_torn_down() -> None:
    printed = run_apart("""
class Pool(BlockPool):
    pass

class Last:
    def __init__(self, block):
        self.block = block
    def __del__(self):
        self.block.reset_hash()
        print(self.block.block_hash)

pool = Pool(8, True, 16)
block = pool.get_new_blocks(1)[0]
pool._insert_block_hash(b"key", block, 16)
pool.last = Last(block)
del pool
""")
    assert printed == "None"


def test_a_view_has_no_pool_when_a_weak_reference_to_it_calls_back() -> None:
    printed = run_apart("""
class Pool(BlockPool):
    pass

for kind in (BlockPool, Pool):
    pool = kind(8, True, 16)
    block = pool.blocks[1]
    witness = weakref.ref(pool, lambda _: print(block.pool))
    del pool
""")
    assert printed.split() == ["None", "None"]


def test_a_view_asked_for_while_the_store_goes_is_left_a_row_of_its_own() -> None:
    # Copies are made as the store goes, so the collector may run, and its callbacks.
    printed = run_apart("""
pool = BlockPool(64, False, 16)
ids = pool.get_new_block_ids(63)
pool.free_block_ids([5, 63])  # neighbours, and only the second has a view
held = [pool.blocks[20], pool.blocks[63]]
made = []

def look(phase, info):
    for block in held if going else ():
        made.extend((block.prev_free_block, block.next_free_block))

going = False
gc.callbacks.append(look)
gc.set_threshold(1)
going = True
del pool
going = False
gc.set_threshold(700)
gc.callbacks.clear()
noise = [b"\\xff" * (64 * size) for size in range(60, 75)]
for block in made:
    assert block is None or block.ref_cnt == 0 and block.block_hash is None
print("done")
""")
    assert printed == "done"


# -- the sequence -----------------------------------------------------------------


def test_a_pools_blocks_are_a_sequence(pool: BlockPool) -> None:
    assert isinstance(pool.blocks, Sequence)
    assert isinstance(pool.blocks, BlockStore)
    assert len(pool.blocks) == 8


def test_blocks_are_indexed_from_either_end(pool: BlockPool) -> None:
    assert pool.blocks[3].block_id == 3
    assert pool.blocks[-1].block_id == 7
    assert pool.blocks[-8] is pool.blocks[0]
    assert pool.blocks[np.int64(3)] is pool.blocks[3]


@pytest.mark.parametrize("index", [8, -9, 2**31, 2**63, -(2**70)])
def test_an_index_out_of_range_is_an_index_error(pool: BlockPool, index: int) -> None:
    with pytest.raises(IndexError):
        pool.blocks[index]


@pytest.mark.parametrize("index", ["3", 3.0, None])
def test_an_index_that_is_no_int_is_a_type_error(
    pool: BlockPool, index: object
) -> None:
    with pytest.raises(TypeError):
        pool.blocks[index]


@pytest.mark.parametrize(
    "cut",
    [
        slice(2, 5),
        slice(None),
        slice(None, None, -1),
        slice(-3, None),
        slice(5, 2),
        slice(0, 100),
        slice(1, 7, 3),
    ],
)
def test_a_slice_is_a_list_as_of_a_list(pool: BlockPool, cut: slice) -> None:
    picked = pool.blocks[cut]
    assert type(picked) is list
    assert ids(picked) == list(range(8))[cut]


def test_blocks_can_be_iterated_reversed_and_unpacked(pool: BlockPool) -> None:
    assert ids(pool.blocks) == list(range(8))
    assert ids(reversed(pool.blocks)) == list(range(8))[::-1]
    first, *middle, last = pool.blocks
    assert (first.block_id, len(middle), last.block_id) == (0, 6, 7)


def test_blocks_contain_their_own_and_nothing_else(pool: BlockPool) -> None:
    assert pool.blocks[3] in pool.blocks
    assert pool.null_block in pool.blocks
    for stranger in (KVCacheBlock(3), BlockPool(8, True, UNIT).blocks[3], 3, None):
        assert stranger not in pool.blocks


def test_blocks_do_not_contain_the_queues_ends(pool: BlockPool) -> None:
    assert pool.free_block_queue.fake_free_list_head not in pool.blocks
    assert pool.free_block_queue.fake_free_list_tail not in pool.blocks


def test_blocks_have_the_methods_of_every_sequence(pool: BlockPool) -> None:
    assert pool.blocks.index(pool.blocks[3]) == 3
    assert pool.blocks.count(pool.blocks[3]) == 1
    with pytest.raises(ValueError):
        pool.blocks.index(BlockPool(4, True, UNIT).get_new_blocks(1)[0])


def test_blocks_cannot_be_assigned_or_deleted(pool: BlockPool) -> None:
    with pytest.raises(TypeError):
        pool.blocks[3] = KVCacheBlock(3)
    with pytest.raises(TypeError):
        del pool.blocks[3]


@pytest.mark.parametrize(
    ("num_blocks", "error"),
    [(-1, ValueError), (2**31 - 1, ValueError), (2.0, TypeError), (True, TypeError)],
)
def test_a_store_has_0_to_2147483646_blocks(
    num_blocks: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="num_blocks"):
        BlockStore(num_blocks)


def test_a_store_too_large_for_the_machine_is_a_memory_error_that_says_so() -> None:
    with pytest.raises(MemoryError, match="2147483646 blocks need 137438953472 bytes"):
        BlockStore(2**31 - 2)


def test_a_store_may_be_empty() -> None:
    store = BlockStore(0)
    assert len(store) == 0
    assert list(store) == []
    assert store.as_array().shape == (0,)


# -- the array --------------------------------------------------------------------


def test_the_array_shows_every_row_without_a_copy(pool: BlockPool) -> None:
    rows = pool.blocks.as_array()
    assert rows.shape == (8,)
    assert rows["ref_cnt"].tolist() == [0] * 8
    pool.get_new_blocks(2)
    assert rows["ref_cnt"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    again = pool.blocks.as_array()
    assert again.__array_interface__["data"] == rows.__array_interface__["data"]


def test_the_array_tells_what_the_views_tell(pool: BlockPool) -> None:
    cached(pool, 1)
    row = pool.blocks.as_array()[1]
    length = row["block_hash_len"]
    assert row["block_hash"][:length].tobytes() == pool.blocks[1].block_hash
    assert not row["block_hash"][length:].any()
    assert row["block_hash_num_tokens"] == UNIT
    rows = pool.blocks.as_array()
    assert rows["next_free_block"][2:7].tolist() == [3, 4, 5, 6, 7]
    assert rows["prev_free_block"][3:8].tolist() == [2, 3, 4, 5, 6]


def test_the_array_cannot_be_written(pool: BlockPool) -> None:
    rows = pool.blocks.as_array()
    assert not rows.flags.writeable
    with pytest.raises(ValueError):
        rows["ref_cnt"][3] = 1
    with pytest.raises(ValueError):
        rows.flags.writeable = True


def test_a_row_of_the_array_is_one_cache_line(pool: BlockPool) -> None:
    rows = pool.blocks.as_array()
    assert rows.dtype is BLOCK_META_DTYPE
    assert rows.itemsize == 64
    assert rows.strides == (64,)
    assert rows.__array_interface__["data"][0] % 64 == 0


def test_the_arrays_fields_are_those_of_the_struct_in_their_order() -> None:
    words = (Path(kvcache.__file__).parent / "_types.pxd").read_text()
    struct = re.search(r"cdef struct BlockMeta:\n((?:    .*\n)+)", words)
    declared = re.findall(r"^    (\w+) (\w+)(?:\[(\d+)\])?", struct[1], re.MULTILINE)
    sizes = {"block_id_t": 4, "int32_t": 4, "uint8_t": 1}
    assert len(declared) >= 8
    assert BLOCK_META_DTYPE.names == tuple(name for _, name, _ in declared)
    assert [BLOCK_META_DTYPE[name].itemsize for _, name, _ in declared] == [
        sizes[kind] * int(count or 1) for kind, _, count in declared
    ]


def test_the_array_keeps_its_rows_alive_and_no_longer_than_itself() -> None:
    tracemalloc.start()
    try:
        pool = BlockPool(10_000, True, UNIT)
        pool.get_new_block_ids(3)
        rows = pool.blocks.as_array()
        assert rows.base is pool.blocks
        del pool
        noise = [BlockPool(10_000, True, UNIT) for _ in range(3)]
        assert rows["ref_cnt"].sum() == 3
        held = tracemalloc.get_traced_memory()[0]
        del rows
        assert held - tracemalloc.get_traced_memory()[0] >= 64 * 10_000
        assert len(noise) == 3
    finally:
        tracemalloc.stop()


# -- what it costs ----------------------------------------------------------------


def tracked_by(make: Callable[[], object]) -> int:
    """How many objects of the collector's a value adds."""
    gc.collect()
    before = len(gc.get_objects())
    made = make()
    gc.collect()
    after = len(gc.get_objects())
    del made
    return after - before


def test_a_pool_of_a_million_blocks_adds_few_objects_to_the_collector() -> None:
    assert tracked_by(lambda: [[] for _ in range(1_000)]) > 900  # it does count
    assert tracked_by(lambda: BlockPool(1_000_000, True, UNIT)) < 100


def pool_with_all_views(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, True, UNIT)
    assert sum(1 for _ in pool.blocks) == num_blocks
    return pool


def test_views_add_nothing_to_the_collector_however_many_there_are() -> None:
    few = tracked_by(lambda: pool_with_all_views(100))
    many = tracked_by(lambda: pool_with_all_views(100_000))
    # The collector may track a dict or a tuple of its own in between.
    assert abs(many - few) < 10
    assert many < 100


def test_blocks_that_were_used_and_cached_add_nothing_to_the_collector() -> None:
    def use(num_blocks: int) -> BlockPool:
        pool = pool_with_all_views(num_blocks)
        blocks = cached(pool, *range(num_blocks - 1))
        pool.free_blocks(blocks)
        return pool

    few, many = tracked_by(lambda: use(10)), tracked_by(lambda: use(10_000))
    assert abs(many - few) < 10


def test_a_view_is_not_tracked_and_a_hand_linked_block_is(pool: BlockPool) -> None:
    assert not gc.is_tracked(pool.blocks[3])
    block = KVCacheBlock(3)
    assert not gc.is_tracked(block)
    block.next_free_block = KVCacheBlock(4)
    assert gc.is_tracked(block)


def test_a_pool_of_a_million_blocks_takes_at_most_80_bytes_a_block() -> None:
    assert BlockPool(1_000_000, True, UNIT).nbytes <= 80 * 1_000_000


@pytest.mark.parametrize("num_blocks", [2, 1_000, 1_000_000])
def test_nbytes_is_what_tracemalloc_sees_and_all_of_it_is_given_back(
    num_blocks: int,
) -> None:
    BlockPool(2, True, UNIT)  # whatever is made once and kept
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pool = BlockPool(num_blocks, True, UNIT)
        traced = tracemalloc.get_traced_memory()[0] - before
        # Beside the memory of C there are the pool's own handful of objects.
        assert 0 <= traced - pool.nbytes < 3_000
        del pool
        assert tracemalloc.get_traced_memory()[0] - before < 100
    finally:
        tracemalloc.stop()


def test_nbytes_follows_what_a_pool_does() -> None:
    tracemalloc.start()
    try:
        pool = BlockPool(10_000, True, UNIT)
        pool.get_new_block_ids(1)
        slack = tracemalloc.get_traced_memory()[0] - pool.nbytes
        size = pool.nbytes
        pool.free_block_ids(pool.get_new_block_ids(5_000))
        assert pool.nbytes == size  # ids are handed out and taken back in place
        for number in range(100):
            key = key_of(number)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[1])
        assert pool.nbytes > size
        # One view was made, and its 8 bytes a block are counted.
        traced = tracemalloc.get_traced_memory()[0]
        assert abs(traced - pool.nbytes - slack) < 5_000
    finally:
        tracemalloc.stop()


def blocks_alive(make: Callable[[], object]) -> int:
    """How many objects, of whatever kind, a value leaves behind until it is dropped."""
    make()
    gc.collect()
    before = sys.getallocatedblocks()
    made = make()
    gc.collect()
    after = sys.getallocatedblocks()
    del made
    return after - before


def thousand_queues(kept: list[object] | None = None) -> None:
    for _ in range(1_000):
        blocks = [KVCacheBlock(i) for i in range(4)]
        queue = FreeKVCacheBlockQueue(blocks)
        queue.append_n(queue.popleft_n(2))
        if kept is not None:
            kept.append(blocks)


def test_a_thousand_queues_leave_no_block_behind() -> None:
    def kept() -> list[object]:
        blocks: list[object] = []
        thousand_queues(blocks)
        return blocks

    assert blocks_alive(kept) > 4_000  # the count does see blocks
    assert blocks_alive(thousand_queues) < 50


def test_a_circle_of_hand_linked_blocks_is_collected() -> None:
    def circles() -> None:
        for _ in range(1_000):
            one, two = KVCacheBlock(1), KVCacheBlock(2)
            one.next_free_block = two.prev_free_block = two
            two.next_free_block = one.prev_free_block = one

    assert blocks_alive(circles) < 50


def test_a_circle_through_a_blocks_pool_is_collected() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.queue = FreeKVCacheBlockQueue([KVCacheBlock(i, pool=owner) for i in range(3)])
    witness = weakref.ref(owner)
    del owner
    gc.collect()
    assert witness() is None
