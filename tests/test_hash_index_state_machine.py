"""The hash index against dicts: made by hand, and as a pool's map of its blocks.

By hand it holds objects: a key's blocks by id, oldest first. In a pool the entries are
the pool's rows and what is inserted beside them; there `check()` proves after each step
that every entry is found where its key belongs, in tables full to the brim and in
tables that have grown.
"""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvcache import BlockHashToBlockMap, BlockPool, BlockStateError, KVCacheBlock

# Keys that differ in length alone, or in one byte at either end of the longest.
KEYS = [
    *[bytes(length) for length in (1, 2, 8, 9, 35, 36)],
    b"a",
    b"a\0",
    b"k" * 35,
    b"k" * 36,
    b"k" * 35 + b"l",
    b"l" + b"k" * 35,
]
keys = st.sampled_from(KEYS) | st.binary(min_size=1, max_size=36)
COPY = b"copy"  # a digest that many blocks hold
few_keys = st.sampled_from(KEYS[:3])
OTHER_POOL = BlockPool(2, True, 16)


def call_refused(index: BlockHashToBlockMap, block: KVCacheBlock) -> None:
    """Calls that are refused in any state."""
    for error, key in [
        (ValueError, b""),
        (ValueError, b"k" * 37),
        (TypeError, "k"),
        (TypeError, bytearray(b"k")),
        (TypeError, None),
    ]:
        with pytest.raises(error):
            index.get_one_block(key)
        with pytest.raises(error):
            index.contain(key, 1)
        with pytest.raises(error):
            index.insert(key, block)
        with pytest.raises(error):
            index.pop(key, 1)
    for error, block_id in [
        (ValueError, 2**63),
        (ValueError, -(2**31) - 1),
        (TypeError, "1"),
        (TypeError, True),
        (TypeError, None),
        (TypeError, block),
    ]:
        with pytest.raises(error):
            index.contain(KEYS[0], block_id)
        with pytest.raises(error):
            index.pop(KEYS[0], block_id)
    for no_block in (1, None, index):
        with pytest.raises(TypeError):
            index.insert(KEYS[0], no_block)


class HandMadeMapMachine(RuleBasedStateMachine):
    """Two blocks of every id: the later one takes the place of the earlier one."""

    ids = range(-1, 8)

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockHashToBlockMap()
        self.model: dict[bytes, dict[int, KVCacheBlock]] = {}
        self.pool = BlockPool(8, True, 16)
        self.blocks = [KVCacheBlock(i) for i in self.ids] + list(self.pool.blocks)

    @invariant()
    def the_map_holds_what_the_model_holds(self):
        assert len(self.index) == len(self.model)
        for key in {*KEYS, *self.model}:
            held = self.model.get(key, {})
            oldest = next(iter(held.values()), None)
            assert self.index.get_one_block(key) is oldest
            found = [i for i in self.ids if self.index.contain(key, i)]
            assert found == sorted(held)

    @rule(data=st.data(), key=few_keys | keys)
    def insert(self, data, key):
        block = data.draw(st.sampled_from(self.blocks), label="block")
        self.index.insert(key, block)
        self.model.setdefault(key, {})[block.block_id] = block

    @rule(data=st.data(), some=st.lists(keys, min_size=20, max_size=60, unique=True))
    def insert_one_block_under_many_keys(self, data, some):
        block = data.draw(st.sampled_from(self.blocks), label="block")
        for key in some:
            self.index.insert(key, block)
            self.model.setdefault(key, {})[block.block_id] = block

    @rule(key=keys)
    def insert_every_block_under_one_key(self, key):
        for block in self.blocks:
            self.index.insert(key, block)
            self.model.setdefault(key, {})[block.block_id] = block

    def pop_both(self, key: bytes, block_id: int) -> None:
        held = self.model.get(key, {})
        assert self.index.pop(key, block_id) is held.pop(block_id, None)
        if not held:
            self.model.pop(key, None)

    @rule(key=few_keys | keys, block_id=st.sampled_from(ids) | st.integers(-9, 99))
    def pop(self, key, block_id):
        self.pop_both(key, block_id)

    @rule(data=st.data())
    def pop_many(self, data):
        entries = [(key, i) for key, held in self.model.items() for i in held]
        order = data.draw(st.randoms(use_true_random=False), label="order")
        for key, block_id in order.sample(entries, len(entries) * 3 // 4):
            self.pop_both(key, block_id)

    @rule(data=st.data())
    def make_mistakes(self, data):
        call_refused(self.index, data.draw(st.sampled_from(self.blocks)))


def test_a_map_made_by_hand_does_what_dicts_do() -> None:
    run_state_machine_as_test(
        HandMadeMapMachine,
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=60,
            stateful_step_count=30,
        ),
    )


class PoolMapMachine(RuleBasedStateMachine):
    """A pool's map: rows, the pool's further keys, and the caller's own entries."""

    @initialize(num_blocks=st.integers(2, 40))
    def make_a_pool(self, num_blocks):
        self.pool = BlockPool(num_blocks, True, 16)
        self.index = self.pool.cached_block_hash_to_block
        self.ids = range(1, num_blocks)
        self.entries: dict[bytes, list[int]] = {}  # key -> blocks, oldest first
        self.own: dict[int, bytes] = {}
        self.further: dict[int, set[bytes]] = {}
        self.num_digests = 0

    def new_digests(self, n: int) -> list[bytes]:
        """Digests not used before, of every length in turn."""
        new = range(self.num_digests, self.num_digests + n)
        self.num_digests += n
        return [b"%d" % i + bytes(i % 26) for i in new]

    def draw_blocks(self, data) -> list[int]:
        order = data.draw(st.permutations(self.ids), label="blocks")
        return order[: data.draw(st.integers(1, len(order)), label="of which")]

    @invariant()
    def the_map_holds_what_the_model_holds(self):
        self.pool.check()
        blocks = self.pool.blocks
        held = {key: ids for key, ids in self.entries.items() if ids}
        assert len(self.index) == len(held)
        for key in {*KEYS, *self.entries}:
            oldest = self.index.get_one_block(key)
            assert oldest is (blocks[held[key][0]] if key in held else None)
            if key in held:
                found = [i for i in self.ids if self.index.contain(key, i)]
                assert found == sorted(held[key])
        assert {i: blocks[i].block_hash for i in self.ids if blocks[i].block_hash} == (
            self.own
        )
        assert self.pool.cached_block_hashes_by_block == {
            block: keys for block, keys in self.further.items() if keys
        }

    # -- what the pool enters ----------------------------------------------------

    @rule(data=st.data(), distinct=st.booleans())
    def cache_blocks(self, data, distinct):
        """Under a key each, or as copies of one content."""
        ids = [i for i in self.draw_blocks(data) if i not in self.own]
        digests = self.new_digests(len(ids)) if distinct else [COPY] * len(ids)
        self.pool.cache_block_ids(ids, digests)
        for block, digest in zip(ids, digests, strict=True):
            self.add(digest + bytes(4), block)

    def add(self, key: bytes, block: int) -> None:
        """What the pool adds is the block's own key, or a further one if it has one."""
        held = self.entries.setdefault(key, [])
        if self.own.get(block) == key or block in held:
            return
        if self.own.setdefault(block, key) != key:
            self.further.setdefault(block, set()).add(key)
        held.append(block)

    @rule(data=st.data(), key=few_keys | keys)
    def give_blocks_a_key(self, data, key):
        for block in self.draw_blocks(data):
            self.pool._insert_block_hash(key, self.pool.blocks[block], None)
            self.add(key, block)

    @rule(data=st.data(), n=st.integers(20, 50))
    def give_a_block_many_keys(self, data, n):
        block = data.draw(st.sampled_from(self.ids), label="block")
        for digest in self.new_digests(n):
            self.pool._insert_block_hash(
                digest + bytes(4), self.pool.blocks[block], None
            )
            self.add(digest + bytes(4), block)

    def forget(self, ids: Iterable[int]) -> None:
        """Whoever made an entry, it goes with its block, and no copy goes with it."""
        for block in ids:
            self.own.pop(block, None)
            self.further.pop(block, None)
            for held in self.entries.values():
                if block in held:
                    held.remove(block)

    @rule(data=st.data())
    def evict_blocks(self, data):
        ids = self.draw_blocks(data)
        self.pool.evict_block_ids(ids)
        self.forget(ids)

    @rule(data=st.data())
    def reuse_blocks(self, data):
        n = data.draw(st.integers(1, len(self.ids)), label="n")
        ids = self.pool.get_new_block_ids(n)
        self.forget(ids.tolist())
        self.pool.free_block_ids(ids)

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache()
        self.entries.clear()
        self.own.clear()
        self.further.clear()

    # -- what the caller enters --------------------------------------------------

    @rule(data=st.data(), key=few_keys | keys | st.just(COPY + bytes(4)))
    def insert(self, data, key):
        """Entries alone: no block's own hash changes."""
        for block in self.draw_blocks(data)[:3]:
            self.index.insert(key, self.pool.blocks[block])
            held = self.entries.setdefault(key, [])
            if block not in held:
                held.append(block)

    @rule(data=st.data())
    def pop(self, data):
        entries = [(key, i) for key, held in self.entries.items() for i in held]
        entries += [(KEYS[0], i) for i in (-1, 0, 1, len(self.ids) + 1)]
        key, block = data.draw(st.sampled_from(entries), label="entry")
        if block in self.entries.get(key, []):
            assert self.index.pop(key, block) is self.pool.blocks[block]
            self.entries[key].remove(block)
            self.further.get(block, set()).discard(key)
        else:
            assert self.index.pop(key, block) is None

    @rule()
    def make_mistakes(self):
        call_refused(self.index, self.pool.blocks[1])
        with pytest.raises(ValueError):
            self.index.insert(b"other", OTHER_POOL.blocks[1])
        if self.own:
            with pytest.raises(BlockStateError):
                self.pool.cache_block_ids([*self.own], [b"new"] * len(self.own))


def test_a_map_of_a_pool_does_what_dicts_do() -> None:
    run_state_machine_as_test(
        PoolMapMachine,
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=100,
            stateful_step_count=30,
        ),
    )


MACHINES = {"map by hand": HandMadeMapMachine, "map of a pool": PoolMapMachine}


def digest_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def cached(pool: BlockPool, numbers: Iterable[int]) -> list[int]:
    """Which of the contents the pool finds, each looked up alone."""
    return [n for n in numbers if len(pool.match_prefix_ids([digest_of(n)]))]


@pytest.mark.parametrize("num_blocks", [*range(2, 40), 1000, 4099])
def test_a_table_full_of_keys_loses_none_while_others_are_evicted(
    num_blocks: int,
) -> None:
    pool = BlockPool(num_blocks, True, 16)
    ids = list(range(1, num_blocks))
    pool.cache_block_ids(ids, [digest_of(i) for i in ids])
    random = Random(num_blocks)
    for number in range(1, 4):
        gone = random.sample(ids, len(ids) // 2)
        pool.evict_block_ids(gone)
        pool.check()
        assert cached(pool, ids) == sorted(set(ids) - set(gone))
        pool.cache_block_ids(gone, [digest_of(i) for i in gone])
        pool.check()
        assert cached(pool, ids) == ids, number
    assert len(pool.cached_block_hash_to_block) == len(ids)


def test_a_block_cached_under_a_key_inserted_by_hand_has_one_entry_there() -> None:
    pool = BlockPool(3, True, 16)
    index, block = pool.cached_block_hash_to_block, pool.blocks[1]
    index.insert(b"h" + bytes(4), block)
    pool.cache_block_ids([1], [b"h"])
    assert index.pop(b"h" + bytes(4), 1) is block
    assert index.get_one_block(b"h" + bytes(4)) is None


def test_another_pools_block_is_refused_where_one_of_its_id_is_held() -> None:
    pool = BlockPool(2, True, 16)
    pool.cached_block_hash_to_block.insert(b"key", pool.blocks[1])
    with pytest.raises(ValueError):
        pool.cached_block_hash_to_block.insert(b"key", OTHER_POOL.blocks[1])


def test_a_block_that_took_the_place_of_a_hand_made_one_goes_with_its_content() -> None:
    pool = BlockPool(2, True, 16)
    index = pool.cached_block_hash_to_block
    index.insert(b"key", KVCacheBlock(block_id=1))
    index.insert(b"key", pool.blocks[1])
    assert index.get_one_block(b"key") is pool.blocks[1]
    pool.evict_blocks({1})
    assert index.get_one_block(b"key") is None
