"""Pools and their models (`reference_pool`) make the same random calls and stay equal.

Every call goes through a face chosen at random: objects, or ids in one of their forms.
After each, `check()` proves the pool's invariants, and all that can be seen of it is
compared. Refused calls are part of the game: pool and model raise alike, and the
comparison afterwards shows that nothing changed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import cycle, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from reference_pool import ReferencePool

from kvcache import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStateError,
    BlockStored,
    KVCacheBlock,
    NoFreeBlocksError,
)

UNIT = 2  # tokens that a block hash adds
GROUPS = (0, 2**32 - 1)


def key_of(digest: bytes, group: int) -> bytes:
    return digest + group.to_bytes(4, "big")


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


class Request:
    """What a pool reads of a request when it records events."""

    lora_request = session_id = cache_salt = prompt_embeds = None
    mm_features = ()

    def __init__(self, tokens: Sequence[int], *lengths: int) -> None:
        """With digests of these lengths in turn."""
        self.all_token_ids = list(tokens)
        ends = range(UNIT, len(tokens) + 1, UNIT)
        self.block_hashes = [
            sha256(repr(self.all_token_ids[:end]).encode()).digest()[:length]
            for end, length in zip(ends, cycle(lengths))
        ]

    def chain(self, group: int) -> list[bytes]:
        return [key_of(digest, group) for digest in self.block_hashes]


# Two prompts that share three hashes, and two that stand apart.
REQUESTS = [
    Request([1, 2, 3, 4, 5, 6, 7, 8, 9], 32),
    Request([1, 2, 3, 4, 5, 6, 17, 18], 32),
    Request(range(30, 42), 16),
    Request(range(50, 60), 32, 32, 9, 16),
]
DIGESTS = sorted({one for request in REQUESTS for one in request.block_hashes})
KEYS = [key_of(digest, group) for digest in DIGESTS for group in GROUPS]


def hash_array(digests: list[bytes]) -> Any:
    """Hashes of one length as an array; of several they can only be a list."""
    lengths = {len(digest) for digest in digests} or {32}
    if len(lengths) > 1:
        return digests
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, *lengths)


BLOCK_FORMS: dict[str, Callable] = {"blocks": list, "iterator of blocks": iter}
ID_FORMS: dict[str, Callable] = {
    "ids": list,
    "iterator of ids": iter,
    "int32 array": partial(np.array, dtype=np.int32),
    "int64 array": partial(np.array, dtype=np.int64),
    "strided array": lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
}
HASH_FORMS: dict[str, Callable] = {
    "list": list,
    "tuple": tuple,
    "array": hash_array,
}

which_pool = st.sampled_from([0, 0, 0, 1])
forms = st.sampled_from([*BLOCK_FORMS, *ID_FORMS])
hash_forms = st.sampled_from(list(HASH_FORMS))
requests = st.sampled_from(REQUESTS)
groups = st.sampled_from(GROUPS)
digests = st.sampled_from(DIGESTS)


Call = Callable[[], object]


class Pair:
    """A pool and its model, and the pool's calls by face."""

    def __init__(self, num_blocks: int, caching: bool, events: bool) -> None:
        self.pool = BlockPool(num_blocks, caching, UNIT, events)
        self.model = ReferencePool(num_blocks, caching, UNIT)
        self.num_blocks = num_blocks
        self.told: list[tuple[str, int]] = []
        # For each event of the model, the request and the group it speaks of.
        self.subjects: list[tuple[Request | None, int]] = []

    def blocks(self, ids: list[int]) -> list[KVCacheBlock]:
        return [self.pool.blocks[i] for i in ids]

    def references(self) -> list[int]:
        """Every block as often as it is referenced."""
        return [b for b, count in enumerate(self.model.refs) for _ in range(count)]

    def for_pool(self, request: Request) -> Any:
        """With events off a pool may read nothing but the hashes of a request."""
        if self.pool.enable_kv_cache_events:
            return request
        return SimpleNamespace(block_hashes=request.block_hashes)

    def get(self, n: int, form: str) -> list[int]:
        if form in BLOCK_FORMS:
            return ids_of(self.pool.get_new_blocks(n))
        return self.pool.get_new_block_ids(n).tolist()

    def call(self, verb: str, ids: list[int], form: str) -> None:
        """`free` or `touch`."""
        if form in BLOCK_FORMS:
            method = {"free": self.pool.free_blocks, "touch": self.pool.touch}[verb]
            method(BLOCK_FORMS[form](self.blocks(ids)))
        else:
            getattr(self.pool, f"{verb}_block_ids")(ID_FORMS[form](ids))

    def lookup(self, digest: bytes, group_ids: list[int]) -> list[int] | None:
        found = self.pool.get_cached_block(digest, group_ids)
        return None if found is None else ids_of(found)

    def is_indexed(self, block: int) -> bool:
        """Whether a block's own key answers lookups."""
        own = self.model.keys[block][0]
        return block in self.model.index.get(own, [])

    def aliases_need_order(self, block: int) -> bool:
        """Of several keys it is only specified which one is the block's own.

        So a block whose own key was set by hand, and is not indexed, gets one alias.
        """
        return len(self.model.keys[block]) > 1 and not self.is_indexed(block)

    # Calls on the model and on the pool, to be compared.

    def caching(
        self,
        request: Request,
        table: list[int],
        span: range,
        factor: int,
        group: int,
        mask: list[bool] | None,
    ) -> tuple[Call, Call]:
        """`cache_full_blocks` of blocks of `factor` hashes each."""
        return (
            lambda: self.model.cache_full(
                request.chain(group),
                table,
                span,
                factor * UNIT,
                mask or [True] * len(span),
            ),
            lambda: self.pool.cache_full_blocks(
                self.for_pool(request),
                self.blocks(table),
                span.start,
                span.stop,
                factor * UNIT,
                group,
                mask,
            ),
        )

    def caching_partially(
        self, request: Request, block: int, tokens: int, group: int, replace: bool
    ) -> tuple[Call, Call]:
        """`cache_partial_block` of a block of two hashes."""
        return (
            lambda: self.model.cache_partial(
                request.chain(group), block, tokens, replace
            ),
            lambda: self.pool.cache_partial_block(
                self.for_pool(request),
                self.pool.blocks[block],
                tokens,
                group,
                2 * UNIT,
                replace,
            ),
        )

    # -- comparison --------------------------------------------------------------

    def expected_events(self) -> Iterator[list]:
        """What the pool must have recorded: for each event of the model, one or more.

        The order in which a block loses its further keys is not specified.
        """
        for (kind, *fields), (request, group) in zip(
            self.model.events, self.subjects, strict=True
        ):
            if kind == "cleared":
                yield [AllBlocksCleared()]
            elif kind == "removed":
                own, *further = fields[0]
                yield [removed(own), *in_any_order([removed(key) for key in further])]
            else:
                yield [stored(request, group, *fields)]

    def compare_events(self) -> None:
        recorded = list(self.pool.kv_event_queue)
        for expected in self.expected_events():
            found, recorded = recorded[: len(expected)], recorded[len(expected) :]
            assert found[:1] + in_any_order(found[1:]) == expected
        assert recorded == []

    def compare(self) -> None:
        pool, model = self.pool, self.model
        pool.check()
        rows = pool.blocks.as_array()
        assert rows["ref_cnt"].tolist() == model.refs
        assert walk(rows) == model.queue
        assert pool.get_num_free_blocks() == len(model.queue)
        assert pool.get_usage() == 1 - len(model.queue) / (self.num_blocks - 1)
        own = [bytes(row["block_hash"])[: row["block_hash_len"]] for row in rows]
        assert own == [keys[0] if keys else b"" for keys in model.keys]
        tokens = rows["block_hash_num_tokens"].tolist()
        assert tokens == [-1 if n is None else n for n in model.tokens]
        assert pool.cached_block_hashes_by_block == {
            block: set(keys[1:]) for block, keys in enumerate(model.keys) if keys[1:]
        }
        index = pool.cached_block_hash_to_block
        assert len(index) == sum(1 for blocks in model.index.values() if blocks)
        for key in KEYS:
            holders = model.index.get(key, [])
            held_by = [b for b in range(self.num_blocks) if index.contain(key, b)]
            assert held_by == sorted(holders)
            found = pool.match_prefix_ids([key[:-4]], group_of(key)).tolist()
            assert found == holders[:1]
        for request in REQUESTS:
            for group in GROUPS:
                found = pool.match_prefix_ids(request.block_hashes, group)
                assert found.tolist() == model.match_prefix(request.chain(group))
        assert list(pool._reuse_watchers) == list(model.watchers)
        assert self.told == model.told
        if pool.enable_kv_cache_events:
            self.compare_events()
        else:
            assert pool.kv_event_queue == []


def walk(rows: np.ndarray) -> list[int]:
    """The ids of the free queue, from the rows' links; -1 is the anchor."""
    behind = rows["next_free_block"].tolist()
    front = rows["prev_free_block"].tolist()
    at = front.index(-1) if -1 in front else -1
    order = []
    while at != -1:
        order.append(at)
        at = behind[at]
    return order


def external(key: bytes) -> int:
    """A key's block hash as events carry it."""
    return int.from_bytes(key[:-4][-8:], "big")


def removed(key: bytes) -> BlockRemoved:
    return BlockRemoved([external(key)], medium="GPU", group_idx=group_of(key))


def stored(
    request: Request | None,
    group: int,
    keys: list[bytes],
    parent: bytes | None,
    span: range,
    size: int,
) -> BlockStored:
    tokens: list[int] = []
    if request is not None:
        tokens = request.all_token_ids[span.start * size : span.stop * size]
    return BlockStored(
        block_hashes=[external(key) for key in keys],
        parent_block_hash=None if parent is None else external(parent),
        token_ids=tokens,
        block_size=size,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * len(keys) if keys and request is not None else None,
        group_idx=group,
    )


def in_any_order(events: list[BlockRemoved]) -> list[BlockRemoved]:
    return sorted(events, key=lambda event: (event.block_hashes, event.group_idx))


def outcome(call: Callable, *arguments: object) -> object:
    """What a call returns, or the class of what it raises."""
    try:
        return call(*arguments)
    except (ValueError, TypeError) as error:
        return type(error)


def ids_of(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self, caching: bool, events: bool) -> None:
        super().__init__()
        self.caching, self.events = caching, events

    @initialize(num_blocks=st.tuples(st.integers(2, 12), st.integers(2, 5)))
    def make_two_pools(self, num_blocks):
        self.pairs = [Pair(n, self.caching, self.events) for n in num_blocks]

    @invariant()
    def pools_and_models_are_equal(self):
        for pair in self.pairs:
            pair.compare()

    def agree(self, pair, modelled, actual, request=None, group=0) -> bool:
        """Make a call on both sides: they return, or raise, the same.

        Returns:
            Whether the call was accepted.
        """
        expected = outcome(modelled)
        new = len(pair.model.events) - len(pair.subjects)
        pair.subjects += [(request, group)] * new
        assert outcome(actual) == expected
        return not isinstance(expected, type)

    def draw_id(self, data, pair, lowest=0) -> int:
        return data.draw(st.integers(lowest, pair.num_blocks - 1), label="block")

    def draw_ids(self, data, pair, min_size=0, max_size=6) -> list[int]:
        ids = st.integers(0, pair.num_blocks - 1)
        return data.draw(
            st.lists(ids, min_size=min_size, max_size=max_size), label="ids"
        )

    def draw_references(self, data, pair, null=0) -> list[int]:
        """Blocks to give references back of; now and then one too many."""
        held = [0] * null + pair.references()
        order = data.draw(st.permutations(held), label="held")
        ids = order[data.draw(st.integers(0, len(order)), label="kept") :]
        extra = data.draw(st.sampled_from([0, 0, 0, 1]), label="extra")
        return ids + self.draw_ids(data, pair, min_size=extra, max_size=extra)

    # -- allocate and free -------------------------------------------------------

    @rule(i=which_pool, n=st.integers(0, 4), form=forms)
    def get(self, i, n, form):
        pair = self.pairs[i]
        self.agree(pair, lambda: pair.model.get(n), lambda: pair.get(n, form))

    @rule(data=st.data(), i=which_pool, form=forms)
    def free(self, data, i, form):
        pair = self.pairs[i]
        ids = self.draw_references(data, pair, null=1)
        self.agree(
            pair, lambda: pair.model.free(ids), lambda: pair.call("free", ids, form)
        )

    @rule(data=st.data(), i=which_pool)
    def free_blocks_of_several_owners(self, data, i):
        """Each block goes to its own pool, and one made by hand goes nowhere."""
        asked, other = self.pairs[i], self.pairs[1 - i]
        ours, theirs = (
            self.draw_references(data, pair, null=1) for pair in (asked, other)
        )
        hand_made = KVCacheBlock(1, ref_cnt=1)
        blocks = [*asked.blocks(ours), hand_made, *other.blocks(theirs)]
        mixed = data.draw(st.permutations(blocks), label="mixed")
        ours, theirs = (
            ids_of([block for block in mixed if block.pool is pair.pool])
            for pair in (asked, other)
        )

        def free_in_models():
            other.model.check(theirs, references=1)
            asked.model.free(ours)
            other.model.free(theirs)

        freed = self.agree(asked, free_in_models, lambda: asked.pool.free_blocks(mixed))
        assert hand_made.ref_cnt == (0 if freed else 1)

    @rule(data=st.data(), i=which_pool, form=forms)
    def touch(self, data, i, form):
        pair = self.pairs[i]
        ids = self.draw_ids(data, pair, max_size=3)
        self.agree(
            pair, lambda: pair.model.touch(ids), lambda: pair.call("touch", ids, form)
        )

    @rule(data=st.data(), i=which_pool, name=st.sampled_from(["ann", "bob"]))
    def unpin(self, data, i, name):
        pair = self.pairs[i]
        self.unpin_in_both(pair, self.draw_references(data, pair), name)

    def unpin_in_both(self, pair, ids, name):
        self.agree(
            pair,
            lambda: pair.model.unpin(ids, name),
            lambda: pair.pool.unpin_blocks(
                pair.blocks(ids), lambda block: pair.told.append((name, block.block_id))
            ),
        )

    @rule(data=st.data(), i=which_pool, count=st.integers(0, 3))
    def set_the_count_of_references(self, data, i, count):
        pair = self.pairs[i]
        refs = pair.model.refs
        block = data.draw(st.sampled_from([0, 1, *pair.references()]), label="block")

        def set_in_model():
            if count == 0 or refs[block] == 0:
                raise ValueError
            refs[block] = count

        self.agree(
            pair,
            set_in_model,
            lambda: setattr(pair.pool.blocks[block], "ref_cnt", count),
        )

    # -- cache and look up -------------------------------------------------------

    @rule(
        data=st.data(),
        i=which_pool,
        request=requests,
        group=groups,
        factor=st.integers(1, 2),
    )
    def cache_full_blocks(self, data, i, request, group, factor):
        pair = self.pairs[i]
        most = len(request.block_hashes) // factor
        lowest = data.draw(st.sampled_from([1, 1, 0]), label="lowest block")
        ids = st.permutations(range(lowest, pair.num_blocks))
        table = data.draw(ids, label="table")
        table += self.draw_ids(data, pair, min_size=most, max_size=most)
        stop = most - data.draw(st.integers(0, most - 1), label="not full")
        start = data.draw(st.integers(0, stop - 1), label="cached")
        masks = st.lists(st.booleans(), min_size=stop - start, max_size=stop - start)
        mask = data.draw(st.none() | masks, label="block_mask")
        self.cache_in_both(
            pair, request, table, range(start, stop), factor, group, mask
        )

    @rule(data=st.data(), i=which_pool, request=requests)
    def cache_a_prompt(self, data, i, request):
        """As far as there are blocks without a hash: long chains, often twice."""
        pair = self.pairs[i]
        fresh = [b for b in range(1, pair.num_blocks) if not pair.model.keys[b]]
        table = data.draw(st.permutations(fresh), label="table")
        stop = min(len(table), len(request.block_hashes))
        if stop:
            self.cache_in_both(pair, request, table, range(stop), 1, 0, None)

    def cache_in_both(self, pair, request, table, span, factor, group, mask):
        calls = pair.caching(request, table, span, factor, group, mask)
        self.agree(pair, *calls, request, group)

    @rule(
        data=st.data(),
        i=which_pool,
        request=requests,
        group=groups,
        tokens=st.integers(0, 7 * UNIT) | st.sampled_from([2, 4, 6, 8]),
        replace=st.booleans(),
    )
    def cache_partial_block(self, data, i, request, group, tokens, replace):
        pair = self.pairs[i]
        block = self.draw_id(data, pair, lowest=1)
        assume(not pair.aliases_need_order(block))
        calls = pair.caching_partially(request, block, tokens, group, replace)
        self.agree(pair, *calls, request, group)

    @rule(
        data=st.data(),
        i=which_pool,
        key=st.sampled_from(KEYS),
        tokens=st.none() | st.integers(0, 12),
    )
    def insert_block_hash(self, data, i, key, tokens):
        pair = self.pairs[i]
        block = self.draw_id(data, pair)

        def insert_in_model():
            if block == 0:
                raise ValueError
            pair.model.add_key(key, block, tokens)

        assume(not pair.aliases_need_order(block))
        self.agree(
            pair,
            insert_in_model,
            lambda: pair.pool._insert_block_hash(key, pair.pool.blocks[block], tokens),
        )

    @rule(
        data=st.data(),
        i=which_pool,
        key=st.sampled_from(KEYS),
        tokens=st.none() | st.integers(0, 12),
    )
    def set_block_hash_by_hand(self, data, i, key, tokens):
        pair = self.pairs[i]
        block = self.draw_id(data, pair, lowest=1)
        model = pair.model

        def set_in_model():
            if model.keys[block]:
                raise BlockStateError
            model.keys[block], model.tokens[block] = [key], tokens

        self.agree(
            pair,
            set_in_model,
            lambda: pair.pool.blocks[block].set_block_hash(key, tokens),
        )

    @rule(
        data=st.data(),
        i=which_pool,
        group=groups,
        form=st.sampled_from(list(ID_FORMS)),
        hash_form=hash_forms,
    )
    def cache_block_ids(self, data, i, group, form, hash_form):
        pair = self.pairs[i]
        ids = self.draw_ids(data, pair, min_size=1, max_size=3)
        ones = data.draw(
            st.lists(digests, min_size=len(ids), max_size=len(ids)), label="hashes"
        )
        self.agree(
            pair,
            lambda: pair.model.cache_ids(ids, [key_of(one, group) for one in ones]),
            lambda: pair.pool.cache_block_ids(
                ID_FORMS[form](ids), HASH_FORMS[hash_form](ones), group
            ),
            None,
            group,
        )

    @rule(data=st.data(), i=which_pool)
    def move_block_hashes(self, data, i):
        pair = self.pairs[i]
        source = self.draw_id(data, pair)
        target = self.draw_id(data, pair, lowest=1)
        self.agree(
            pair,
            lambda: pair.model.move(source, target),
            lambda: pair.pool.move_block_hashes(
                pair.pool.blocks[source], pair.pool.blocks[target]
            ),
        )

    @rule(data=st.data(), i=which_pool, form=st.sampled_from(["set", *ID_FORMS]))
    def evict(self, data, i, form):
        pair = self.pairs[i]
        ids = self.draw_ids(data, pair, max_size=3)
        if form == "set":
            given = set(ids)
            ids = list(given)
            evict = pair.pool.evict_blocks
        else:
            given = ID_FORMS[form](ids)
            evict = pair.pool.evict_block_ids
        self.agree(pair, lambda: pair.model.evict(ids), lambda: evict(given))

    @rule(data=st.data(), i=which_pool, silent=st.booleans())
    def evict_one_as_vllms_managers_do(self, data, i, silent):
        pair = self.pairs[i]
        block = self.draw_id(data, pair)
        if silent:
            pair.model.drop_keys(block)
            pair.pool.blocks[block].reset_hash()
            return

        def evict_in_model():
            before = len(pair.model.events)
            pair.model.evict([block])
            return len(pair.model.events) > before

        self.agree(
            pair,
            evict_in_model,
            lambda: pair.pool._maybe_evict_cached_block(pair.pool.blocks[block]),
        )

    @rule(i=which_pool, unpin_all=st.booleans())
    def reset_prefix_cache(self, i, unpin_all):
        pair = self.pairs[i]
        if unpin_all:
            self.unpin_in_both(pair, pair.references(), "reset")
        self.agree(pair, pair.model.reset, pair.pool.reset_prefix_cache)

    @rule(
        i=which_pool,
        ones=st.lists(digests, max_size=3) | requests.map(lambda r: r.block_hashes),
        group_ids=st.lists(groups, max_size=3),
        hash_form=hash_forms,
    )
    def match_prefix(self, i, ones, group_ids, hash_form):
        pair = self.pairs[i]
        rows = [
            pair.model.match_prefix([key_of(one, group) for one in ones])
            for group in group_ids
        ]
        shortest = min(map(len, rows), default=0)
        hashes = HASH_FORMS[hash_form](ones)
        assert [
            ids_of(blocks) for blocks in pair.pool.match_prefix(hashes, group_ids)
        ] == [row[:shortest] for row in rows]
        for group, row in zip(group_ids, rows, strict=True):
            assert pair.pool.match_prefix_ids(hashes, group).tolist() == row
        for one in ones:
            firsts = [pair.model.match_prefix([key_of(one, g)]) for g in group_ids]
            expected = [row[0] for row in firsts] if all(firsts) else None
            assert pair.lookup(one, group_ids) == expected

    # -- events and views --------------------------------------------------------

    @rule(i=which_pool, request=requests, group=groups, n=st.integers(0, 4))
    def emit_cached_block_events(self, i, request, group, n):
        pair = self.pairs[i]

        def record_in_model():
            if n:
                chain = request.chain(group)[:n]
                pair.model.events.append(("stored", chain, None, range(n), UNIT))

        self.agree(
            pair,
            record_in_model,
            lambda: pair.pool.emit_cached_block_events(
                pair.for_pool(request), n, UNIT, group
            ),
            request,
            group,
        )

    @rule(i=which_pool)
    def take_events(self, i):
        pair = self.pairs[i]
        expected = list(pair.pool.kv_event_queue)
        assert pair.pool.take_events() == expected
        assert pair.pool.take_events() == []
        pair.model.events.clear()
        pair.subjects.clear()

    @rule(i=which_pool)
    def look_at_every_block(self, i):
        pair = self.pairs[i]
        pool, model = pair.pool, pair.model
        queue = pool.free_block_queue
        head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
        ring = [head, *pair.blocks(model.queue), tail]
        assert ids_of(queue.get_all_free_blocks()) == model.queue
        for before, after in pairwise(ring):
            assert before.next_free_block is after
            assert after.prev_free_block is before
        for block_id, block in enumerate(pool.blocks):
            assert block is pool.blocks[block_id]
            assert block.pool is pool
            assert block.block_id == block_id
            assert block.ref_cnt == model.refs[block_id]
            assert block.is_null == (block_id == 0)
            assert block.block_hash == next(iter(model.keys[block_id]), None)
            assert block.block_hash_num_tokens == model.tokens[block_id]
            if block_id not in model.queue:
                assert block.prev_free_block is None
                assert block.next_free_block is None
            assert pool.is_block_writable(block) == (
                model.refs[block_id] == 1 and not model.keys[block_id]
            )

    # -- mistakes ----------------------------------------------------------------

    @rule(i=which_pool)
    def make_every_mistake(self, i):
        for error, method, *arguments in mistakes(self.pairs[i], self.pairs[1 - i]):
            call = getattr(self.pairs[i].pool, method)
            assert outcome(call, *arguments) is error, (method, arguments)


def mistakes(pair: Pair, other: Pair) -> Iterator[tuple]:
    """Calls that are refused in any state: the error, the method, its arguments.

    Batches begin well and end in the mistake.
    """
    pool, n, held = pair.pool, pair.num_blocks, pair.references()
    null, request = pool.null_block, REQUESTS[0]
    blocks = pair.blocks(held)
    end = pool.free_block_queue.fake_free_list_head
    one, foreign, hand_made = pool.blocks[1], other.pool.blocks[1], KVCacheBlock(1)

    for error, count in [
        (ValueError, -1),
        (NoFreeBlocksError, n),
        (ValueError, 2**64),
        (TypeError, "1"),
        (TypeError, True),
        (TypeError, 1.0),
        (TypeError, None),
    ]:
        yield error, "get_new_blocks", count
        yield error, "get_new_block_ids", count

    for error, ids in [
        (ValueError, [*held, n]),
        (ValueError, [*held, -1]),
        (ValueError, [*held, 2**31]),
        (ValueError, np.array([*held, 2**31])),
        (ValueError, np.array([[*held, 0]], np.int32)),
        (TypeError, [*held, "1"]),
        (TypeError, [*held, True]),
        (TypeError, [*held, 1.0]),
        (TypeError, [*held, one]),
        (TypeError, np.array([*held, 1.0])),
        (TypeError, np.array([True])),
        (TypeError, "1"),
        (TypeError, 1),
        (TypeError, None),
    ]:
        yield error, "free_block_ids", ids
        yield error, "touch_block_ids", ids
        yield error, "evict_block_ids", ids
    for error, block in [
        (ValueError, n),
        (ValueError, -1),
        (ValueError, 2**31),
        (TypeError, "1"),
        (TypeError, True),
        (TypeError, one),
    ]:
        yield error, "cache_block_ids", [0, block], DIGESTS[:2]

    for error, batch in [
        (ValueError, [*blocks, foreign]),
        (ValueError, [*blocks, hand_made]),
        (ValueError, [*blocks, end]),
        (TypeError, [*blocks, 0]),
        (TypeError, [*blocks, None]),
        (TypeError, None),
    ]:
        yield error, "touch", batch
        yield error, "unpin_blocks", batch, print
    yield ValueError, "free_blocks", [*blocks, end]
    yield TypeError, "free_blocks", [*blocks, 0]
    yield TypeError, "free_blocks", [*blocks, foreign, None]
    yield TypeError, "free_blocks", None
    yield ValueError, "unpin_blocks", [*blocks, null], print
    yield TypeError, "unpin_blocks", blocks, None
    yield ValueError, "is_block_writable", foreign
    yield ValueError, "move_block_hashes", one, foreign
    yield ValueError, "move_block_hashes", foreign, one
    yield ValueError, "move_block_hashes", one, null

    for error, hashes in [
        (ValueError, [b"h" * 33]),
        (ValueError, [b""]),
        (ValueError, np.zeros(32, np.uint8)),
        (ValueError, np.zeros((1, 33), np.uint8)),
        (TypeError, ["h"]),
        (TypeError, np.zeros((1, 4), np.int32)),
        (TypeError, b"h" * 32),
        (TypeError, None),
    ]:
        yield error, "cache_block_ids", [0], hashes
        yield error, "match_prefix_ids", hashes
        yield error, "match_prefix", hashes, [0]
    yield ValueError, "cache_block_ids", [0], DIGESTS[:2]
    yield ValueError, "_insert_block_hash", b"k" * 37, one, None

    for error, group in [(ValueError, -1), (ValueError, 2**32), (TypeError, "0")]:
        yield error, "cache_block_ids", [0], DIGESTS[:1], group
        yield error, "match_prefix_ids", DIGESTS[:1], group
        yield error, "match_prefix", DIGESTS[:1], [group]
        yield error, "get_cached_block", DIGESTS[0], [group]
        yield error, "cache_full_blocks", request, [null], 0, 1, UNIT, group
        yield error, "cache_partial_block", request, one, UNIT, group, UNIT

    table = [null, null, null, null, one]
    yield ValueError, "cache_full_blocks", request, table, 0, 1, 0, 0
    yield ValueError, "cache_full_blocks", request, table, 0, 1, UNIT + 1, 0
    yield ValueError, "cache_full_blocks", request, table, -1, 1, UNIT, 0
    yield ValueError, "cache_full_blocks", request, table, 0, 5, UNIT, 0
    yield ValueError, "cache_full_blocks", request, table[:3], 0, 4, UNIT, 0
    yield BlockStateError, "cache_full_blocks", request, table, 0, 2, UNIT, 0, [True]
    yield ValueError, "cache_full_blocks", request, [null, foreign], 0, 2, UNIT, 0
    yield TypeError, "cache_full_blocks", request, [null, 0], 0, 2, UNIT, 0
    yield BlockStateError, "cache_partial_block", request, one, 0, 0, UNIT
    yield BlockStateError, "cache_partial_block", request, one, UNIT + 1, 0, UNIT
    yield BlockStateError, "cache_partial_block", request, one, 5 * UNIT, 0, UNIT
    yield BlockStateError, "cache_partial_block", request, one, UNIT, 0, UNIT + 1
    yield ValueError, "cache_partial_block", request, foreign, UNIT, 0, UNIT
    yield ValueError, "__init__", n, True, UNIT


MACHINES = {
    f"pools{', caching' * caching}{', events' * events}": partial(
        PoolMachine, caching, events
    )
    for caching in (False, True)
    for events in (False, True)
}


@pytest.mark.parametrize("events", [False, True], ids=["silent", "events"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
def test_pools_do_what_their_models_do(caching: bool, events: bool) -> None:
    run_state_machine_as_test(
        partial(PoolMachine, caching, events),
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=100,
            stateful_step_count=40,
        ),
    )


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_hashes=st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 100, 150]),
    lengths=st.sampled_from([(32,), (16,), (9,), (32, 16), (32,) * 30 + (16,) * 9]),
    hash_form=hash_forms,
)
def test_a_long_prefix_matches_as_in_the_model(seed, num_hashes, lengths, hash_form):
    """Whatever was cached twice, in whatever order, and evicted since."""
    pair = Pair(301, caching=True, events=False)
    request = Request(range(num_hashes * UNIT), *lengths)
    random = Random(seed)
    for _ in range(random.randint(1, 3)):
        fresh = [block for block in range(1, 301) if not pair.model.keys[block]]
        table = random.sample(fresh, min(len(fresh), num_hashes))
        if table:
            span = range(random.choice([0, 0, len(table) // 2]), len(table))
            mask = [True] * len(span)
            pair.model.cache_full(request.chain(0), table, span, UNIT, mask)
            pair.pool.cache_full_blocks(
                request, pair.blocks(table), span.start, span.stop, UNIT, 0
            )
        gone = random.sample(table, min(len(table), random.choice([0, 1, 1, 5])))
        pair.model.evict(gone)
        pair.pool.evict_block_ids(gone)
    hashes = HASH_FORMS[hash_form](request.block_hashes)
    expected = pair.model.match_prefix(request.chain(0))
    assert pair.pool.match_prefix_ids(hashes).tolist() == expected
    assert [ids_of(blocks) for blocks in pair.pool.match_prefix(hashes, [0])] == [
        expected
    ]


def test_an_unpinned_block_joins_the_back_when_its_last_reference_goes() -> None:
    pool = BlockPool(3, True, UNIT)
    one, two = pool.get_new_blocks(2)
    pool.touch([two])
    pool.unpin_blocks([two, one, two], print)
    assert ids_of(pool.free_block_queue.get_all_free_blocks()) == [1, 2]


def test_a_hash_set_by_hand_is_no_hit_where_it_once_stood_in_a_chain() -> None:
    pair = Pair(3, caching=True, events=False)
    request = REQUESTS[0]
    pair.pool.cache_full_blocks(request, pair.blocks([1, 2]), 0, 2, UNIT, 0)
    pair.pool.evict_blocks({2})
    pair.pool.blocks[2].set_block_hash(request.chain(0)[1], 2 * UNIT)
    assert pair.pool.match_prefix_ids(request.block_hashes).tolist() == [1]
    pair.pool.check()
