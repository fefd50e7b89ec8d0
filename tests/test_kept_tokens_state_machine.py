"""Pools that keep tokens, and a model that knows them by heart, are used at random.

The model notes for each block all tokens up to its end, in a tuple, and searches every
block for each answer. After each call `check()` proves the pool's invariants, and every
prompt is looked up in every group on both sides. Few tokens and small pools: prompts
share prefixes, blocks have copies, hints grow stale.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
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

from kvcache import BlockPool
from kvcache.hashing.keyed_hash import Keyed

GROUPS = (0, 2**32 - 1)
HASHER = Keyed(bytes(16))
# All prompts of three blocks, of which each has one of two contents.
PROMPTS = list(product([0, 1], repeat=3))


class Content:
    """What some blocks hold: a group, and all tokens up to the block's end.

    Made anew when no block holds it; `behind` is the content that it was cached behind.
    """

    def __init__(self, group: int, tokens: tuple[int, ...], behind: Any) -> None:
        self.group, self.tokens, self.behind = group, tokens, behind


class Model:
    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.holds: dict[int, Content] = {}
        """By block, in the order in which they were cached."""

    def copies(
        self, group: int, tokens: tuple[int, ...], behind: Content | None
    ) -> Iterator[int]:
        for block, content in self.holds.items():
            same = (content.group, content.tokens) == (group, tokens)
            if same and content.behind is behind:
                yield block

    def prefixes(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        ends = range(self.unit, len(tokens) + 1, self.unit)
        return [tokens[:end] for end in ends]

    def match(self, group: int, tokens: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        behind = None
        for prefix in self.prefixes(tokens):
            block = next(self.copies(group, prefix, behind), None)
            if block is None:
                break
            found.append(block)
            behind = self.holds[block]
        return found

    def cache(
        self, group: int, table: list[int], tokens: tuple[int, ...], start: int
    ) -> bool:
        """Whether it can be done; then it is."""
        behind = None
        prefixes = self.prefixes(tokens)
        if start:
            behind = self.holds.get(table[start - 1])
            if behind is None or behind.group != group:
                return False
            if behind.tokens[-self.unit :] != prefixes[start - 1][-self.unit :]:
                return False
        for block, prefix in zip(table[start:], prefixes[start:], strict=True):
            own = prefix[-self.unit :]
            whole = own if behind is None else behind.tokens + own
            copy = next(self.copies(group, whole, behind), None)
            content = Content(group, whole, behind)
            self.holds[block] = content if copy is None else self.holds[copy]
            behind = self.holds[block]
        return True

    def drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holds.pop(block, None)


class KeptTokensMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14), unit=st.sampled_from([1, 2, 16]), data=st.data()
    )
    def make_a_pool(self, num_blocks, unit, data):
        self.pool = BlockPool(num_blocks, True, unit, keep_tokens=True)
        self.model = Model(unit)
        self.prompts = [
            tuple(
                kind + 5 * (i % unit == unit - 1) for kind in kinds for i in range(unit)
            )
            for kinds in PROMPTS
        ]
        self.tables: list[tuple[int, list[int], tuple[int, ...]]] = []
        """Requests that run: group, block table, tokens that are cached."""
        self.spare: list[int] = []
        """Blocks in use that are in no table."""

    @invariant()
    def every_prompt_finds_what_the_model_finds(self):
        self.pool.check()
        for tokens in self.prompts:
            for group in GROUPS:
                found = self.pool.match_prefix_tokens(tokens, HASHER, group).tolist()
                assert found == self.model.match(group, tokens)
        kept = (self.pool.blocks.as_array()["flags"] & 4).nonzero()[0].tolist()
        assert kept == sorted(self.model.holds)

    def get(self, n: int) -> list[int]:
        """New blocks; what they held is gone."""
        new = self.pool.get_new_block_ids(n).tolist()
        self.model.drop(new)
        return new

    def cache(self, group, table, tokens, start) -> bool:
        done = self.model.cache(group, table, tokens, start)
        if done:
            self.pool.cache_block_tokens(table, tokens, HASHER, start, group)
        else:
            with pytest.raises(ValueError):
                self.pool.cache_block_tokens(table, tokens, HASHER, start, group)
        return done

    prompt = st.tuples(st.sampled_from(range(len(PROMPTS))), st.integers(1, 3))

    @rule(prompt=prompt, group=st.sampled_from(GROUPS), look_up=st.booleans())
    def serve(self, prompt, group, look_up):
        """A request arrives; one that does not look up makes copies."""
        number, blocks = prompt
        tokens = self.prompts[number][: blocks * self.model.unit]
        hits = self.model.match(group, tokens) if look_up else []
        self.pool.touch_block_ids(hits)
        if self.pool.get_num_free_blocks() < blocks - len(hits):
            self.pool.free_block_ids(hits)
            return
        table = hits + self.get(blocks - len(hits))
        assert self.cache(group, table, tokens, len(hits))
        self.tables.append((group, table, tokens))

    @rule(data=st.data(), number=st.sampled_from(range(len(PROMPTS))))
    def grow(self, data, number):
        """A request grows; its tokens may not be those of its last block."""
        if not self.tables or not self.pool.get_num_free_blocks():
            return
        group, table, tokens = self.tables.pop(
            data.draw(st.integers(0, len(self.tables) - 1), label="request")
        )
        start = len(table)
        asked = data.draw(st.sampled_from([group, group, *GROUPS]), label="group")
        if data.draw(st.booleans(), label="right tokens"):
            longer = tokens + self.prompts[number][: self.model.unit]
        else:
            longer = (self.prompts[number] * 4)[: (start + 1) * self.model.unit]
        [new] = self.get(1)
        if self.cache(asked, [*table, new], longer, start):
            self.tables.append((asked, [*table, new], longer))
        else:
            self.tables.append((group, table, tokens))
            self.spare.append(new)

    @rule(data=st.data())
    def finish(self, data):
        if self.tables:
            place = data.draw(st.integers(0, len(self.tables) - 1), label="request")
            _, table, _ = self.tables.pop(place)
            self.pool.free_block_ids(table[::-1])

    @rule(n=st.integers(1, 4), keep=st.booleans())
    def take_blocks(self, n, keep):
        if n <= self.pool.get_num_free_blocks():
            new = self.get(n)
            if keep:
                self.spare += new
            else:
                self.pool.free_block_ids(new)

    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def cache_without_tokens(self, data, group):
        """Under the right hashes: these blocks must not be believed."""
        tokens = data.draw(st.sampled_from(self.prompts), label="prompt")
        hashes = HASHER.hash_blocks(tokens, self.model.unit)
        first = data.draw(st.integers(0, 2), label="first")
        if self.pool.get_num_free_blocks() >= len(hashes) - first:
            new = self.get(len(hashes) - first)
            self.pool.cache_block_ids(new, hashes[first:], group)
            self.pool.free_block_ids(new[::-1])

    @rule(
        data=st.data(), how=st.sampled_from(["evict", "reset_hash", "pop", "reinsert"])
    )
    def lose_the_hash(self, data, how):
        last = self.pool.num_gpu_blocks - 1
        block = data.draw(st.integers(1, last), label="block")
        view = self.pool.blocks[block]
        key = view.block_hash
        if how == "evict":
            self.pool.evict_block_ids([block])
        elif how == "reset_hash":
            view.reset_hash()
        elif key is not None:
            self.pool.cached_block_hash_to_block.pop(key, block)
            if how == "reinsert":
                self.pool.cached_block_hash_to_block.insert(key, view)
        self.model.drop([block])

    @rule(data=st.data(), group=st.sampled_from(GROUPS))
    def add_a_further_key(self, data, group):
        """Of any prompt: as if the hash collided with what the block holds."""
        block = data.draw(st.integers(1, self.pool.num_gpu_blocks - 1), label="block")
        tokens = data.draw(st.sampled_from(self.prompts), label="prompt")
        hashes = HASHER.hash_blocks(tokens, self.model.unit)
        digest = data.draw(
            st.sampled_from([bytes(row) for row in hashes]), label="hash"
        )
        key = digest + group.to_bytes(4, "big")
        self.pool._insert_block_hash(key, self.pool.blocks[block], None)

    @rule(data=st.data())
    def move(self, data):
        if not self.spare:
            return
        source = data.draw(st.integers(1, self.pool.num_gpu_blocks - 1), label="source")
        target = data.draw(st.sampled_from(self.spare), label="target")
        view = self.pool.blocks[target]
        if source == target or view.block_hash is not None:
            return
        if self.pool.cached_block_hashes_by_block.get(target):
            return
        self.pool.move_block_hashes(self.pool.blocks[source], view)
        if source in self.model.holds:
            self.model.holds[target] = self.model.holds.pop(source)

    @rule()
    def reset(self):
        if not self.tables and not self.spare:
            assert self.pool.reset_prefix_cache()
            self.model.drop(list(self.model.holds))

    @rule(data=st.data())
    def free_the_spare_blocks(self, data):
        order = data.draw(st.permutations(self.spare), label="order")
        self.pool.free_block_ids(order)
        self.spare = []


MACHINES = {"kept tokens": KeptTokensMachine}


def test_random_use_finds_what_the_model_finds() -> None:
    run_state_machine_as_test(
        KeptTokensMachine,
        settings=settings(max_examples=120, stateful_step_count=50, deadline=None),
    )


def test_the_model_tells_contents_apart() -> None:
    model = Model(2)
    assert model.cache(0, [1, 2], (1, 2, 3, 4), 0)
    assert model.match(0, (1, 2, 3, 4, 5, 6)) == [1, 2]
    assert model.match(1, (1, 2, 3, 4)) == model.match(0, (3, 4)) == []
    assert model.cache(0, [3], (1, 2), 0)
    assert model.match(0, (1, 2, 3, 4)) == [1, 2]
    model.drop([1])
    assert model.match(0, (1, 2, 3, 4)) == [3, 2]
    model.drop([3])
    assert model.cache(0, [4], (1, 2), 0)
    assert model.match(0, (1, 2, 3, 4)) == [4]
    assert not model.cache(0, [4, 5], (1, 3, 3, 4), 1)
    assert not model.cache(1, [4, 5], (1, 2, 3, 4), 1)


def test_random_long_prompts_find_what_the_model_finds() -> None:
    """Over many blocks, and behind hints in runs; fewer steps, without hypothesis."""
    draw = np.random.default_rng(5)
    for unit in (1, 4, 16):
        pool = BlockPool(400, True, unit, keep_tokens=True)
        model = Model(unit)
        prompts: list[tuple[int, ...]] = []
        for _ in range(60):
            base = prompts[draw.integers(len(prompts))] if prompts else ()
            kept = base[: draw.integers(len(base) + 1)]
            fresh = draw.integers(0, 2, draw.integers(1, 60 * unit)).tolist()
            tokens = (*kept, *fresh)[: 100 * unit]
            prompts.append(tokens)
            full = len(tokens) // unit
            hits = model.match(0, tokens) if draw.random() < 0.8 else []
            pool.touch_block_ids(hits)
            new = pool.get_new_block_ids(full - len(hits)).tolist()
            model.drop(new)
            table = hits + new
            whole = tokens[: full * unit]
            assert model.cache(0, table, whole, len(hits))
            pool.cache_block_tokens(table, tokens, HASHER, len(hits))
            pool.free_block_ids(table[::-1])
            if draw.random() < 0.3:
                gone = draw.integers(1, 400, 5).tolist()
                pool.evict_block_ids(gone)
                model.drop(gone)
            for tokens in prompts[-6:]:
                found = pool.match_prefix_tokens(tokens, HASHER).tolist()
                assert found == model.match(0, tokens)
        pool.check()
