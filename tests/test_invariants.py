"""`check()` proves something: each invariant, once broken, is named.

The state machines rely on it. Nothing that Python can call breaks an invariant, so a
compiled helper shows the core's memory as arrays, and the tests write to them.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcache import BlockPool, KVCacheBlock
from kvcache.hashing.keyed_hash import Keyed
from kvcache.manager import FullAttention, KVCacheManager
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.evictor import LRUEvictor
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

NULL, INDEXED, KEPT = 1, 2, 4  # flags of a row
NOT_LINKED = -2
SIZE = 4
HASHER = Keyed(bytes(16))
Memory = dict[str, Any]
Broken = tuple[Callable[[Memory], object], str]


def set_to(
    name: str, at: Any, field: str | None, value: Any
) -> Callable[[Memory], None]:
    def write(memory: Memory) -> None:
        (memory[name] if field is None else memory[name][field])[at] = value

    return write


def expect(thing: Any, memory: Memory, broken: Broken) -> None:
    thing.check()
    broken[0](memory)
    with pytest.raises(AssertionError, match=broken[1]):
        thing.check()


# -- pool ------------------------------------------------------------------------------

FREE, USED, FIRST, SECOND, THIRD, ALONE, ALIASED = 9, 1, 2, 3, 4, 5, 6
"""Blocks of the pool below."""


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def make_pool() -> BlockPool:
    """7 of 11 blocks are used: three copies of one content, one alone, one aliased."""
    pool = BlockPool(12, True, SIZE)
    pool.get_new_block_ids(7)
    for block in (FIRST, SECOND, THIRD):
        pool.cache_block_ids([block], [digest(1)])
    pool.cache_block_ids([ALONE, ALIASED], [digest(2), digest(3)])
    for number in (4, 5):
        key = digest(number) + bytes(4)
        pool._insert_block_hash(key, pool.blocks[ALIASED], None)
    return pool


def slot_of(memory: Memory, block: int) -> int:
    """Where the table names a block as the oldest of its key."""
    [at] = np.flatnonzero(memory["slots"]["head"] == block + 1)
    return int(at)


def write_slot(block: int, field: str, change: Callable[[int], int]) -> Any:
    def write(memory: Memory) -> None:
        at = slot_of(memory, block)
        memory["slots"][field][at] = change(int(memory["slots"][field][at]))

    return write


def move_slot(memory: Memory) -> None:
    """Away from where its key is looked for."""
    at, slots = slot_of(memory, ALONE), memory["slots"]
    [other, *_] = [
        (at + far) % len(slots)
        for far in range(2, len(slots))
        if not slots["head"][(at + far - 1) % len(slots)]
        and not slots["head"][(at + far) % len(slots)]
    ]
    slots[other] = slots[at]
    slots["head"][at] = 0


def run_in_a_circle(memory: Memory) -> None:
    k = memory["first_side"][ALIASED]
    memory["side"]["next_of_block"][k - 1] = k


def vacate(memory: Memory) -> None:
    """A side entry that a slot names is said to be in no use."""
    memory["side"]["kind"][memory["first_side"][ALIASED] - 1] = 0


def swap_hash(memory: Memory) -> None:
    """A copy hangs on the slot of a key that is not its own."""
    memory["rows"]["block_hash"][THIRD][:4] = 9


POOL: dict[str, Broken] = {
    "linked to none": (
        set_to("rows", FREE, "next_free_block", 99),
        "block 9 is linked to 99, which is no block",
    ),
    "not linked back": (
        set_to("rows", FREE, "prev_free_block", 11),
        "block 9 follows 8 but does not link back to it",
    ),
    "used and queued": (
        set_to("rows", FREE, "ref_cnt", 1),
        "block 9 is in the free queue and not free",
    ),
    "miscounted": (
        set_to("num_free", 0, None, 5),
        "the free queue holds 4 blocks and counts 5",
    ),
    "a second null block": (set_to("rows", USED, "flags", NULL), "block 1 is null"),
    "no null block": (set_to("rows", 0, "flags", 0), "block 0 is not null"),
    "an unknown flag": (set_to("rows", USED, "flags", 64), "block 1 has the flags 64"),
    "a negative count": (
        set_to("rows", USED, "ref_cnt", -1),
        "block 1 has the reference count -1",
    ),
    "free and not queued": (
        set_to("rows", USED, "ref_cnt", 0),
        "block 1 with 0 references is not in the free queue",
    ),
    "indexed without a hash": (
        set_to("rows", USED, "flags", INDEXED),
        "block 1 is in the index and has no hash",
    ),
    "kept without a hash": (
        set_to("rows", USED, "flags", KEPT),
        "block 1 has its tokens kept and is not in the index",
    ),
    "kept where none are": (
        set_to("rows", ALONE, "flags", INDEXED | KEPT),
        "block 5 has its tokens kept in a pool that keeps none",
    ),
    "a wrong tag": (
        write_slot(ALONE, "tag", lambda tag: tag ^ 1),
        "the slot of entry 6 has a tag that is not its key's",
    ),
    "an entry of no block": (
        write_slot(ALONE, "head", lambda head: 99),
        "the index names block 98",
    ),
    "an entry of no side entry": (
        write_slot(ALONE, "head", lambda head: -9_999),
        "the index names the vacant side entry 9999",
    ),
    "a block that knows nothing of it": (
        set_to("rows", ALONE, "flags", 0),
        "the index names block 5, which does not know of it",
    ),
    "a vacant side entry": (vacate, "the index names the vacant side entry"),
    "another key's copy": (swap_hash, "entry 5 hangs on another key's slot"),
    "a copy not linked back": (
        set_to("rows", THIRD, "prev_copy", FIRST + 1),
        "entry 5 does not link back to the copy before it",
    ),
    "copies in a circle": (
        set_to("rows", THIRD, "next_copy", FIRST + 1),
        "the copies of entry 3 run in a circle",
    ),
    "an unknown youngest": (
        set_to("rows", FIRST, "prev_copy", SECOND + 1),
        "entry 3 does not know its youngest copy",
    ),
    "a slot that is not found": (move_slot, "is not found in its slot"),
    "keys miscounted": (set_to("num_keys", 0, None, 9), "holds 5 keys and counts 9"),
    "an entry that is missing": (
        write_slot(ALONE, "head", lambda head: 0),
        # Another key may have been found past it.
        "the index holds 4 keys and counts 5|is not found in its slot",
    ),
    "entries miscounted": (
        set_to("num_side", 0, None, 3),
        "the index holds 7 entries, 8 are made",
    ),
    "another block's side entry": (
        lambda memory: memory["first_side"].__setitem__(
            ALONE, memory["first_side"][ALIASED]
        ),
        "block 5 lists a side entry that is not its own",
    ),
    "a side entry out of range": (
        set_to("first_side", ALONE, None, 9_999),
        "block 5 lists a side entry that is not its own",
    ),
    "side entries in a circle": (
        run_in_a_circle,
        "the side entries of block 6 run in a circle",
    ),
    "a side entry that is not listed": (
        set_to("first_side", ALIASED, None, 0),
        "0 side entries are listed and 2 counted",
    ),
    "an object too many": (
        lambda memory: memory["entries"].update(dict.fromkeys(range(3))),
        "the map holds more hand-made blocks than side entries",
    ),
}


@pytest.mark.parametrize("name", POOL)
def test_what_is_wrong_in_a_pool_is_named(probe: ModuleType, name: str) -> None:
    pool = make_pool()
    expect(pool, probe.pool_memory(pool), POOL[name])


def test_a_map_of_more_hand_made_blocks_than_it_counts_is_wrong(
    probe: ModuleType,
) -> None:
    pool = BlockPool(4, True, SIZE)
    pool.cached_block_hash_to_block.insert(digest(1), KVCacheBlock(1))
    memory = probe.pool_memory(pool)
    expect(
        pool,
        memory,
        (lambda _: memory["side"]["block"].fill(2), "side entries are listed"),
    )


def make_keeping_pool() -> BlockPool:
    """Blocks 1 and 2 hold a prompt, 3 a copy of 1, 4 a hash that is not keyed's."""
    pool = BlockPool(8, True, SIZE, keep_tokens=True)
    tokens = np.arange(2 * SIZE, dtype=np.int32)
    ids = pool.get_new_block_ids(4)
    pool.cache_block_tokens(ids[:2], tokens, HASHER)
    pool.cache_block_tokens(ids[2:3], tokens[:SIZE], HASHER)
    pool.cache_block_ids(ids[3:], [digest(1)])
    return pool


KEEPING: dict[str, Broken] = {
    "another hash": (
        set_to("rows", 4, "flags", INDEXED | KEPT),
        "block 4 has its tokens kept and another hash than keyed's",
    ),
    "a serial not given out": (
        set_to("prefixes", 2, "serial", 9),
        "block 2 has the serial 9 behind 1, 2 are given out",
    ),
    "a parent not older": (
        set_to("prefixes", 2, "parent", 2),
        "block 2 has the serial 2 behind 2, 2 are given out",
    ),
    "a serial of another": (
        set_to("prefixes", 1, "serial", 2),
        "block 2 has the serial 2 of another content",
    ),
    "a copy with another serial": (
        set_to("prefixes", 3, "serial", 2),
        "block 3 has the serial 2 of another content",
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_wrong_with_kept_tokens_is_named(probe: ModuleType, name: str) -> None:
    pool = make_keeping_pool()
    expect(pool, probe.pool_memory(pool), KEEPING[name])


def test_copies_with_different_serials_are_wrong(probe: ModuleType) -> None:
    pool = make_keeping_pool()
    memory = probe.pool_memory(pool)
    memory["last_serial"][0] = 9
    broken = set_to("prefixes", 3, "serial", 8), "block 3 has another serial than its"
    expect(pool, memory, broken)


# -- manager ---------------------------------------------------------------------------


def make_manager() -> KVCacheManager:
    """Row 0 runs, with two blocks; row 1 waits; rows 2 and 3 are vacant."""
    manager = KVCacheManager(
        12, [FullAttention(SIZE)], max_model_len=32, max_num_requests=4
    )
    for _ in range(2):
        manager.add_request(range(2 * SIZE))
    manager.allocate_slots(0, 2 * SIZE)
    return manager


UNUSED, WAITING = 0, 1
MANAGER: dict[str, Broken] = {
    "vacant and waiting": (
        set_to("progress", 2, "status", WAITING),
        "row 2 is wrongly vacant or not",
    ),
    "unused and not vacant": (
        set_to("progress", 1, "status", UNUSED),
        "row 1 is wrongly vacant or not",
    ),
    "waiting with blocks": (
        set_to("progress", 0, "status", WAITING),
        "request 0 does not run and holds blocks",
    ),
    "more null blocks than blocks": (
        set_to("group", 0, "num_nulls", 3),
        "request 0 has 2 blocks",
    ),
    "too few slots": (
        set_to("progress", 0, "num_computed", 2 * SIZE + 1),
        "request 0 lacks slots for its tokens",
    ),
    "a block given back and held": (
        set_to("group", 0, "num_nulls", 1),
        "request 0 still holds 1",
    ),
    "a block held twice": (set_to("table", 1, None, 1), "block 1 is held 2 times"),
}


@pytest.mark.parametrize("name", MANAGER)
def test_what_is_wrong_in_a_manager_is_named(probe: ModuleType, name: str) -> None:
    manager = make_manager()
    expect(manager, probe.manager_memory(manager), MANAGER[name])


# -- v0's allocators -------------------------------------------------------------------


def make_naive() -> tuple[NaiveBlockAllocator, Any]:
    """Block 0 is in use, and held; 1 to 3 are free."""
    allocator = NaiveBlockAllocator(NaiveBlock, 4, SIZE)
    return allocator, allocator.allocate_mutable_block(None)


NAIVE: dict[str, Broken] = {
    "used and queued": (set_to("rows", 2, "ref_cnt", 1), "block 2 is wrongly queued"),
    "not linked back": (
        set_to("rows", 2, "prev_free_block", 3),
        "block 2 is wrongly queued",
    ),
    "miscounted": (set_to("num_free", 0, None, 2), "3 blocks are queued, 2 counted"),
    "free and not queued": (
        set_to("rows", 0, "ref_cnt", 0),
        "block 0 has 0 references and is wrongly in or out of the queue",
    ),
}


@pytest.mark.parametrize("name", NAIVE)
def test_what_is_wrong_in_a_naive_allocator_is_named(
    probe: ModuleType, name: str
) -> None:
    allocator, _held = make_naive()
    expect(allocator, probe.naive_memory(allocator), NAIVE[name])


def make_cached() -> tuple[PrefixCachingBlockAllocator, Any]:
    """Block 0 is used and cached, 1 free and cached, 2 and 3 are free and empty."""
    allocator = PrefixCachingBlockAllocator(4, SIZE)
    blocks = allocator.allocate_immutable_blocks(None, [[0] * SIZE, [1] * SIZE])
    allocator.free(blocks.pop())
    return allocator, blocks


CACHED: dict[str, Broken] = {
    "empty and not queued": (
        set_to("rows", 1, "flags", 0),
        "block 1 is wrongly in or out of the queue",
    ),
    "used and evictable": (
        set_to("rows", 1, "ref_cnt", 1),
        "block 1 is wrongly in or out of the heap",
    ),
    "free and computed": (
        set_to("tracked", 2, "computed", 1),
        "block 2 is free and tracked",
    ),
    "touched and not listed": (
        set_to("tracked", 0, "listed", 0),
        "block 0 is touched and unknown",
    ),
    "not found": (
        lambda memory: memory["rows"]["block_hash"][0].fill(7),
        "block 0 is not found by its hash",
    ),
    "keys miscounted": (
        set_to("num_keys", 0, None, 3),
        "2 blocks are cached, the index has 3",
    ),
    "entries out of range": (set_to("count", 0, None, 9), "9 evictable blocks in room"),
    "an entry elsewhere": (
        set_to("place", 1, None, 2),
        "block 1 at 0 has row 1, which is elsewhere",
    ),
    "no time": (
        set_to("entries", 0, "last_accessed", np.nan),
        "block 1 was last accessed at NaN",
    ),
    "added in the future": (
        set_to("added", 1, None, 9),
        "block 1 was added in the future",
    ),
    "a place too many": (
        set_to("place", 3, None, 2),
        "2 rows have a place, 1 are evictable",
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_what_is_wrong_in_a_prefix_caching_allocator_is_named(
    probe: ModuleType, name: str
) -> None:
    allocator, _held = make_cached()
    expect(allocator, probe.cached_memory(allocator), CACHED[name])


def make_evictor() -> LRUEvictor:
    evictor = LRUEvictor()
    for block in range(3):
        evictor.add(block, 100 + block, 0, block)
    return evictor


def forget_one(memory: Memory) -> None:
    """Two block ids share a row, so one row is nobody's."""
    memory["rows"][2] = memory["rows"][1]


EVICTOR: dict[str, Broken] = {
    "out of order": (
        set_to("entries", 2, "last_accessed", -1.0),
        "block 2 at 2 goes before block 0 above it",
    ),
    "an id too few": (
        lambda memory: memory["rows"].pop(1),
        "2 block ids, 3 evictable blocks",
    ),
    "an id of no block": (
        set_to("rows", 1, None, 9),
        "block 1 is not in the heap",
    ),
    "an id of another block": (forget_one, "block 2 has the row of block 1"),
    "an id without a hash": (
        set_to("hashes", 1, None, None),
        "block 1 has row 1, which is vacant",
    ),
    "a vacant row twice": (
        set_to("entries", 4, "row", 3),
        "a vacant row is noted twice",
    ),
}


@pytest.mark.parametrize("name", EVICTOR)
def test_what_is_wrong_in_an_evictor_is_named(probe: ModuleType, name: str) -> None:
    evictor = make_evictor()
    expect(evictor, probe.evictor_memory(evictor), EVICTOR[name])
