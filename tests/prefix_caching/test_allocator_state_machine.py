"""Two allocators and their models (`reference_allocator`) make the same random calls.

After each, `check()` proves the allocators' invariants, and all that can be seen of
them and of their blocks is compared. Refused calls are part of the game: allocator and
model raise alike, and the comparison afterwards shows that nothing changed.

Where vLLM 0.8.5 can be imported the same rules run with its allocator in our place,
but for what it does not do: refuse a call and change nothing; promote a block twice;
leave a full block behind one that is not full without a hash; let go of a block that is
still to be marked as computed; have a swapped block belong to where it went; see that a
prefix has a hole. Before each call the heap of its evictor is made anew, because
entries that `update` and `remove` leave in it make it lose blocks, or evict one under a
hash that it had before.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import isclose
from typing import Any, cast

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
from reference_allocator import (
    Content,
    ReferenceAllocator,
    ReferenceBlock,
    Tokens,
)

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import NaiveBlock, PrefixCachingBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

MOST_BLOCKS = 16  # that a machine remembers

ID_FORMS: dict[str, Callable[[int], list[int] | None]] = {
    "default": lambda n: None,
    "offset": lambda n: list(range(7, 7 + n)),
    "reversed": lambda n: list(range(n))[::-1],
    "shuffled": lambda n: sorted(range(n), key=lambda i: (i * 5 + 3) % 7),
    "with gaps": lambda n: [i * i for i in range(2, 2 + n)],
    "shuffled with gaps": lambda n: [3 + (i * 5 + 3) % 11 * 10 for i in range(n)],
    "huge": lambda n: [2**63 - 1 - i for i in range(n)],
}


@dataclass(eq=False)
class Pair:
    """A block and its model."""

    model: ReferenceBlock
    real: Any
    home: "Side"  # whose call made it


class Side:
    """An allocator and its model."""

    def __init__(self, real_class: Any, count: int, size: int, form: str) -> None:
        ids = ID_FORMS[form](count)
        self.model = ReferenceAllocator(range(count) if ids is None else ids, size)
        self.real = real_class(count, size, ids)
        self.ids = list(self.model.refs)


def shared(lists: list[list[int]]) -> list[int]:
    """What lists have in common from their start on."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False))
    return [column[0] for column in columns]


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the class of what it raises."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        return type(error)


which_side = st.sampled_from([0, 0, 1])
counts = st.sampled_from([3, 4, 4, 5, 6, 8, 2, 1, 0])
forms = st.sampled_from(list(ID_FORMS))
times = st.integers(-2, 3) | st.sampled_from([0.5, float("inf"), float("-inf"), -0.0])


class AllocatorMachine(RuleBasedStateMachine):
    is_vllm = False
    token = st.sampled_from([0, 0, 0, 1, 1, -1, -2, 2**63 - 1, -(2**63)])
    extra = st.sampled_from([None, None, None, 0, -1, -2, 2**200])

    def __init__(self, real_class: Any = PrefixCachingBlockAllocator) -> None:
        super().__init__()
        self.real_class = real_class
        self.pairs: list[Pair] = []
        self.hashes: dict[Content, int] = {}  # of each content seen so far

    @initialize(
        size=st.integers(1, 3),
        sides=st.lists(st.tuples(counts, forms), min_size=2, max_size=2),
    )
    def make_two_allocators(self, size: int, sides: list[tuple[int, str]]) -> None:
        self.size = size
        self.sides = [Side(self.real_class, n, size, form) for n, form in sides]

    # -- comparison --------------------------------------------------------------

    @invariant()
    def allocators_and_models_are_equal(self) -> None:
        self.forget_blocks()
        for pair in self.pairs:
            self.compare_blocks(pair.model, pair.real)
        assert len(set(self.hashes.values())) == len(self.hashes)
        for side in self.sides:
            self.compare_allocators(side.model, side.real)

    def forget_blocks(self) -> None:
        """But not those in use: they can be freed still."""
        idle = [pair for pair in self.pairs if pair.model.id is None]
        for pair in idle[: max(0, len(self.pairs) - MOST_BLOCKS)]:
            self.pairs.remove(pair)

    def compare_blocks(self, model: ReferenceBlock, real: Any) -> None:
        assert real.block_id == model.id
        assert real.token_ids == list(model.tokens)
        assert real.computed == model.computed
        assert real.extra_hash == model.extra
        assert real.block_size == self.size
        assert real.num_empty_slots == self.size - len(model.tokens)
        assert real.is_full == model.is_full
        assert real.num_tokens_total == model.total
        assert real.last_accessed == -1
        assert (real.prev_block is None) == (model.prev is None)
        if model.content is None:
            assert real.content_hash is None
        else:
            known = self.hashes.setdefault(model.content, real.content_hash)
            assert real.content_hash == known

    def compare_allocators(self, model: ReferenceAllocator, real: Any) -> None:
        real.check()
        assert real.get_num_free_blocks() == model.num_free
        assert real.get_num_total_blocks() == len(model.refs)
        assert isclose(real.get_prefix_cache_hit_rate(), model.hit_rate)
        assert real._refcounter._refcounts == model.refs
        assert list(real._hashless_allocator._free_block_indices) == model.queue
        assert real._cached_blocks == {
            self.hashes[content]: block for content, block in model.cached.items()
        }
        assert real.evictor.num_blocks == len(model.evictable)
        for (block, data), known in zip(
            real.evictor.free_table.items(), model.evictable.items(), strict=True
        ):
            assert (block, (data.last_accessed, data.num_hashed_tokens)) == known
            assert real._cached_blocks[data.content_hash] == block
        for block, state in real._block_tracker.items():
            assert state.active == (model.refs[block] > 0)
            if state.active:
                assert state.last_accessed == model.accessed.get(block, -1)
                assert state.computed == (block in model.computed)
            assert real.block_is_computed(block) == model.is_computed(block)
        if not self.is_vllm:
            assert real._touched_blocks == model.touched
        for pair in self.pairs:
            if content := pair.model.content:
                self.compare_lookups(model, real, content, pair.real)

    def compare_lookups(
        self, model: ReferenceAllocator, real: Any, content: Content, block: Any
    ) -> None:
        assert real.is_block_cached(block) == (content in model.cached)
        chain = [content[:end] for end in range(1, len(content) + 1)]
        hashes = [self.hashes[prefix] for prefix in chain if prefix in self.hashes]
        found = model.find_cached_prefix(content)
        has_hole = any(prefix in model.cached for prefix in chain[found:])
        if len(hashes) == len(chain) and not (self.is_vllm and has_hole):
            assert real.find_cached_blocks_prefix(hashes) == hashes[:found]

    def agree(
        self, modelled: Callable[[], Any], actual: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Make a call on both sides: they return, or both raise the same.

        Returns:
            What they returned, or twice the class of what they raised.
        """
        self.prepare()
        expected = outcome(modelled)
        if self.is_refusal(expected) and self.is_vllm:
            return expected, expected
        found = outcome(actual)
        if self.is_refusal(expected) or self.is_refusal(found):
            assert found == expected
        return expected, found

    def prepare(self) -> None:
        """Before each call."""

    def prepare_to_let_go(self, side: Side) -> None:
        """Before blocks are let go of."""

    def is_refusal(self, result: object) -> bool:
        return isinstance(result, type)

    def agree_on_blocks(self, side: Side, modelled: Any, actual: Any) -> bool:
        """The same, and blocks are what they return: whether they do."""
        models, reals = self.agree(modelled, actual)
        if not self.is_refusal(models):
            for model, real in zip(models, reals, strict=True):
                self.pairs.append(Pair(model, real, side))
        return not self.is_refusal(models)

    def draw(self, data: st.DataObject) -> Pair | None:
        """One of the blocks, in use more often than not."""
        in_use = [pair for pair in self.pairs if pair.model.id is not None]
        known = in_use * 3 + self.pairs
        return data.draw(st.sampled_from(known), label="block") if known else None

    def draw_with_side(self, data: st.DataObject) -> tuple[Side, Pair] | None:
        """A block, and its allocator; the other one now and then."""
        pair = self.draw(data)
        if pair is None:
            return None
        is_other = data.draw(st.sampled_from([False] * 7 + [True]), label="other")
        [side] = [s for s in self.sides if (s.model is pair.model.owner) != is_other]
        return side, pair

    def draw_several(self, data: st.DataObject, pairs: list[Pair]) -> list[Pair]:
        """In any order, and one of them twice now and then."""
        order = data.draw(st.permutations(pairs), label="blocks")
        order = order[data.draw(st.integers(0, max(0, len(order) - 1)), label="kept") :]
        twice = data.draw(st.sampled_from([0, 0, 0, 1]), label="twice")
        return order + order[:twice]

    # -- allocate and free -------------------------------------------------------

    @rule(data=st.data(), i=which_side, num_blocks=st.integers(0, 4), one=st.booleans())
    def allocate_immutable_blocks(
        self, data: st.DataObject, i: int, num_blocks: int, one: bool
    ) -> None:
        prev = self.draw_prev(data)
        lengths = st.sampled_from([self.size] * 12 + [self.size - 1, self.size + 1])
        tokens = [self.draw_tokens(data, lengths) for _ in range(num_blocks)]
        extra = data.draw(self.extra, label="extra")
        if one:
            tokens = tokens[:1] or [(0,) * self.size]
        self.allocate_immutable(self.sides[i], prev, tokens, extra)

    def allocate_immutable(
        self, side: Side, prev: Pair | None, tokens: list[Tokens], extra: int | None
    ) -> bool:
        """Whether they were; one by the call for one."""
        model, real = (prev.model, prev.real) if prev else (None, None)
        lists = [list(one) for one in tokens]

        def actual() -> list[Any]:
            if len(lists) == 1:
                return [side.real.allocate_immutable_block(real, *lists, extra)]
            return list(side.real.allocate_immutable_blocks(real, lists, extra))

        return self.agree_on_blocks(
            side, lambda: side.model.allocate_immutable(model, tokens, extra), actual
        )

    @rule(data=st.data(), i=which_side, num_full=st.integers(0, 3))
    def allocate_blocks(self, data: st.DataObject, i: int, num_full: int) -> None:
        """Full ones, and one that may have room: vLLM has no such call."""
        if not self.is_vllm:
            side, prev = self.sides[i], self.draw_prev(data)
            lengths = [*[st.just(self.size)] * num_full, st.integers(0, self.size)]
            tokens = [self.draw_tokens(data, n) for n in lengths]
            extra = data.draw(self.extra, label="extra")
            model, real = (prev.model, prev.real) if prev else (None, None)
            self.agree_on_blocks(
                side,
                lambda: side.model.allocate_immutable(model, tokens, extra, tail=True),
                lambda: side.real.allocate_blocks(real, tokens, extra),
            )

    @rule(data=st.data(), i=which_side)
    def allocate_mutable_block(self, data: st.DataObject, i: int) -> None:
        extra = data.draw(self.extra, label="extra")
        self.allocate_mutable(self.sides[i], self.draw_prev(data), extra)

    def allocate_mutable(
        self, side: Side, prev: Pair | None, extra: int | None
    ) -> bool:
        model, real = (prev.model, prev.real) if prev else (None, None)
        return self.agree_on_blocks(
            side,
            lambda: [side.model.allocate_mutable(model, extra)],
            lambda: [side.real.allocate_mutable_block(real, extra)],
        )

    @rule(data=st.data(), i=which_side)
    def serve_a_request(self, data: st.DataObject, i: int) -> None:
        """Some full blocks, and one for the tokens after them."""
        side, full = self.sides[i], st.just(self.size)
        n = data.draw(st.integers(1, 3), label="full blocks")
        tokens = [self.draw_tokens(data, full) for _ in range(n)]
        if self.allocate_immutable(side, None, tokens, None):
            rest = self.draw_tokens(data, st.integers(0, self.size))
            if self.allocate_mutable(side, self.pairs[-1], None):
                self.append_in_both(self.pairs[-1], rest)

    def draw_prev(self, data: st.DataObject) -> Pair | None:
        if data.draw(st.booleans(), label="first"):
            return None
        return self.draw(data)

    def draw_tokens(
        self, data: st.DataObject, lengths: st.SearchStrategy[int]
    ) -> Tokens:
        return (data.draw(self.token, label="token"),) * data.draw(lengths, label="n")

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        pair = self.draw(data)
        if pair is not None:
            self.append_in_both(
                pair, self.draw_tokens(data, st.integers(0, self.size + 1))
            )

    def append_in_both(self, pair: Pair, tokens: Tokens) -> None:
        if self.may_append(pair, tokens):
            self.agree(
                lambda: pair.model.append(tokens),
                lambda: pair.real.append_token_ids(list(tokens)),
            )

    def may_append(self, pair: Pair, tokens: Tokens) -> bool:
        return True

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if drawn := self.draw_with_side(data):
            self.free_in_both(*drawn)

    def free_in_both(self, side: Side, pair: Pair) -> None:
        self.prepare_to_let_go(side)
        self.agree(
            lambda: side.model.free(pair.model), lambda: self.free_real(side, pair)
        )

    def free_real(self, side: Side, pair: Pair) -> None:
        side.real.free(pair.real)

    @rule(data=st.data())
    def free_a_sequence(self, data: st.DataObject) -> None:
        """Tail first, as far as it is in use."""
        if drawn := self.draw_with_side(data):
            side, last = drawn
            for model in reversed(last.model.chain()):
                for pair in [one for one in self.pairs if one.model is model]:
                    self.free_in_both(side, pair)

    @rule(data=st.data(), write=st.booleans(), count=st.none() | st.integers(0, 3))
    def fork(self, data: st.DataObject, write: bool, count: int | None) -> None:
        """And write to the last block of the new sequence, or of the old one."""
        drawn = self.draw_with_side(data)
        if drawn and len(self.pairs) < 2 * MOST_BLOCKS:
            side, last = drawn
            some = () if self.is_vllm or count is None else (count,)
            forked = self.agree_on_blocks(
                side,
                lambda: side.model.fork(last.model, *some),
                lambda: side.real.fork(last.real, *some),
            )
            if forked and write:
                pair = data.draw(st.sampled_from([last, self.pairs[-1]]), label="block")
                tokens = self.draw_tokens(data, st.integers(0, self.size))
                self.append_in_both(pair, tokens)

    # -- copy-on-write, promotion, swap ------------------------------------------

    @rule(data=st.data())
    def make_writable(self, data: st.DataObject) -> None:
        drawn = self.draw_with_side(data)
        if drawn:
            side, pair = drawn
            expected, found = self.agree(
                lambda: side.model.cow(pair.model), lambda: self.cow_real(side, pair)
            )
            assert found == expected

    def cow_real(self, side: Side, pair: Pair) -> object:
        return side.real.cow_block_if_not_appendable(pair.real)

    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        drawn = self.draw_with_side(data)
        if drawn and not self.is_vllm:
            side, pair = drawn
            expected, found = self.agree(
                lambda: side.model.promote(pair.model),
                lambda: side.real.promote_to_immutable_block(pair.real),
            )
            assert found == expected

    @rule(i=which_side)
    def clear_copy_on_writes(self, i: int) -> None:
        side = self.sides[i]
        assert side.real.clear_copy_on_writes() == side.model.copies
        side.model.copies = []

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            for i in range(2):
                self.clear_copy_on_writes(i)

    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        if drawn := self.draw_with_side(data):
            side, _ = drawn
            ours = [one for one in self.pairs if one.model.owner is side.model]
            in_use = [one for one in ours if one.model.id is not None]
            self.swap("out", side, self.draw_several(data, in_use))

    @rule(data=st.data(), i=which_side)
    def swap_in(self, data: st.DataObject, i: int) -> None:
        idle = [pair for pair in self.pairs if pair.model.id is None]
        if idle:
            self.swap("in", self.sides[i], self.draw_several(data, idle))

    @rule(data=st.data(), back=st.booleans())
    def swap_a_sequence(self, data: st.DataObject, back: bool) -> None:
        """To the other allocator, and back."""
        if drawn := self.draw_with_side(data):
            side, last = drawn
            [other] = [one for one in self.sides if one is not side]
            chain = last.model.chain()
            pairs = [one for one in self.pairs if one.model in chain]
            if self.swap("out", side, pairs) and self.swap("in", other, pairs) and back:
                self.swap("out", other, pairs)
                self.swap("in", side, pairs)

    def swap(self, way: str, side: Side, pairs: list[Pair]) -> bool:
        """Whether it was done."""
        models, reals = [one.model for one in pairs], [one.real for one in pairs]
        touched = side.model.num_full_blocks_touched(models)
        no_hash = any(one.is_full and one.content is None for one in models)
        if not (self.is_vllm and no_hash):
            assert side.real.get_num_full_blocks_touched(reals) == touched
        if way == "out":
            self.prepare_to_let_go(side)
        for name in [f"check_swap_{way}", f"swap_{way}"]:
            result, _ = self.agree(
                partial(getattr(side.model, name), models),
                partial(getattr(side.real, name, list), reals),
            )
        return not self.is_refusal(result)

    # -- marks and lookups -------------------------------------------------------

    @rule(data=st.data(), i=which_side, now=times)
    def mark_blocks_as_accessed(self, data: st.DataObject, i: int, now: float) -> None:
        side = self.sides[i]
        known = st.sampled_from([*side.ids, 0, -1, 2**64])
        ids = data.draw(st.lists(known, max_size=4), label="ids")
        self.agree(
            lambda: side.model.mark_accessed(ids, now),
            lambda: side.real.mark_blocks_as_accessed(ids, now),
        )

    @rule(i=which_side)
    def mark_blocks_as_computed(self, i: int) -> None:
        self.sides[i].model.mark_computed()
        self.sides[i].real.mark_blocks_as_computed([])

    @rule(i=which_side, data=st.data())
    def get_common_computed_block_ids(self, i: int, data: st.DataObject) -> None:
        side = self.sides[i]
        ids = st.lists(st.sampled_from(side.ids[:2] or [0]), max_size=3)
        lists = data.draw(st.lists(ids, max_size=3), label="lists")
        common = side.real.get_common_computed_block_ids(lists)
        alone = len(lists) == 1
        expected = lists[0] if alone else shared([one for one in lists if one])
        assert list(common) == list(expected)

    @rule(i=which_side, free_all=st.sampled_from([False, False, True]))
    def reset_prefix_cache(self, i: int, free_all: bool) -> None:
        side = self.sides[i]
        for pair in self.pairs[::-1] if free_all else []:
            if pair.model.owner is side.model and pair.model.id is not None:
                self.free_in_both(side, pair)
        expected, found = self.agree(side.model.reset, side.real.reset_prefix_cache)
        assert found == expected

    # -- mistakes ----------------------------------------------------------------

    @rule(i=which_side)
    def make_every_mistake(self, i: int) -> None:
        if self.is_vllm:
            return
        side, other = self.sides[i], self.sides[1 - i]
        for error, method, *arguments in mistakes(side, other, self.pairs):
            result = outcome(partial(getattr(side.real, method), *arguments))
            assert result is error, (method, arguments, result)


def mistakes(side: Side, other: Side, pairs: list[Pair]) -> Iterator[tuple[Any, ...]]:
    """Calls that are refused in any state: the error, the method, its arguments.

    Batches begin well and end in the mistake.
    """
    real, size = side.real, side.model.size
    ours = [
        one.real
        for one in pairs
        if one.model.owner is side.model and one.model.id is not None
    ]
    full, known = [0] * size, [i for i in side.ids if i not in side.model.queue]
    idle = PrefixCachingBlock(None, [], size, real)
    naive = NaiveBlock(None, [], size, real)
    foreign = PrefixCachingBlock(None, [], size, other.real)
    odd_size = PrefixCachingBlock(None, [], size + 1, real)

    for prev in (1, naive, real, "prev"):
        yield TypeError, "allocate_mutable_block", prev
        yield TypeError, "allocate_immutable_block", prev, full
        yield TypeError, "allocate_immutable_blocks", prev, [full]
        yield TypeError, "allocate_blocks", prev, [full]
    for extra in (True, 1.0, "1", b"1", [1]):
        yield TypeError, "allocate_mutable_block", None, extra
        yield TypeError, "allocate_immutable_block", None, full, extra
        yield TypeError, "allocate_immutable_blocks", None, [full], extra
    for device in (0, "gpu"):
        yield ValueError, "allocate_mutable_block", None, None, device
        yield ValueError, "allocate_immutable_block", None, full, None, device
        yield ValueError, "allocate_immutable_blocks", None, [full], None, device
        yield ValueError, "get_num_free_blocks", device
    for error, tokens in [
        (TypeError, [*full[1:], 1.0]),
        (TypeError, [*full[1:], True]),
        (TypeError, [*full[1:], None]),
        (TypeError, "1" * size),
        (TypeError, b"1" * size),
        (TypeError, None),
        (TypeError, 1),
        (ValueError, [*full[1:], 2**63]),
        (ValueError, [*full[1:], -(2**63) - 1]),
        (BlockStateError, [*full, 0]),
        (BlockStateError, full[1:]),
    ]:
        yield error, "allocate_immutable_block", None, tokens
        yield error, "allocate_immutable_blocks", None, [full, tokens]
        yield error, "allocate_blocks", None, [full, tokens, full]
    yield BlockStateError, "allocate_immutable_block", idle, full
    yield TypeError, "allocate_immutable_blocks", None, None
    too_many = [[2**40 + i] * size for i in range(side.model.num_free + 1)]
    yield NoFreeBlocksError, "allocate_immutable_blocks", None, too_many
    yield NoFreeBlocksError, "allocate_blocks", None, [*too_many[1:], []]
    for count in (0, -1, 2**64):
        yield ValueError, "fork", idle, count
    for some in (True, 1.0, "1"):
        yield TypeError, "fork", idle, some

    for error, block in [
        (BlockStateError, idle),
        (ValueError, foreign),
        (BlockStateError, odd_size),
        (TypeError, naive),
        (TypeError, None),
        (TypeError, 0),
    ]:
        yield error, "free", block
        yield error, "fork", block
        yield error, "promote_to_immutable_block", block
        yield error, "cow_block_if_not_appendable", block
        yield error, "swap_out", [*ours, block]
        yield error, "check_swap_out", [*ours, block]
    for block in (naive, None, 0):
        yield TypeError, "swap_in", [idle, block]
        yield TypeError, "check_swap_in", [idle, block]
        yield TypeError, "get_num_full_blocks_touched", [idle, block]
        yield TypeError, "is_block_cached", block
    yield ValueError, "swap_in", [idle, odd_size]
    yield ValueError, "swap_in", [idle, idle]
    yield BlockStateError, "is_block_cached", idle

    for error, block_id in [
        (ValueError, -1),
        (ValueError, 2**63),
        (ValueError, 10**6),
        (TypeError, "1"),
        (TypeError, True),
        (TypeError, 1.0),
        (TypeError, None),
        (TypeError, idle),
    ]:
        yield error, "mark_blocks_as_accessed", [*known, block_id], 1.0
        yield error, "block_is_computed", block_id
        yield error, "get_physical_block_id", block_id
    yield ValueError, "mark_blocks_as_accessed", known, float("nan")
    yield TypeError, "mark_blocks_as_accessed", known, "1"
    yield TypeError, "mark_blocks_as_accessed", known, None
    yield TypeError, "mark_blocks_as_accessed", None, 1.0
    if side.model.queue:
        mixed = [*known, side.model.queue[0]]
        yield ValueError, "mark_blocks_as_accessed", mixed, 1.0
    for hashes in (["1"], [1.0], [True], None, 1):
        yield TypeError, "find_cached_blocks_prefix", hashes
    for lists in (None, 1):
        yield TypeError, "get_common_computed_block_ids", lists
    if side.ids:
        yield ValueError, "__init__", len(side.ids), size


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that is refused is logged."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


def run(machine: Callable[[], RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        cast(type[RuleBasedStateMachine], machine),
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=200,
            stateful_step_count=50,
        ),
    )


def test_allocators_do_what_their_models_do() -> None:
    run(AllocatorMachine)


# -- vLLM 0.8.5 in our place ---------------------------------------------------------


class VllmMachine(AllocatorMachine):
    is_vllm = True
    token = st.sampled_from([0, 0, 0, 1, 1, 2])  # its hashes of -1 and -2 are the same
    extra = st.sampled_from([None, None, None, 0, 1, 2**40])

    def compare_allocators(self, model: ReferenceAllocator, real: Any) -> None:
        real.check = list
        super().compare_allocators(model, real)

    def prepare(self) -> None:
        for side in self.sides:
            side.real.evictor._cleanup()

    def prepare_to_let_go(self, side: Side) -> None:
        self.mark_blocks_as_computed(self.sides.index(side))

    def may_append(self, pair: Pair, tokens: Tokens) -> bool:
        model = pair.model
        is_full = len(model.tokens) + len(tokens) == self.size
        has_hash = model.prev is None or model.prev.content is not None
        return model.owner is pair.home.model and (has_hash or not is_full)

    def free_real(self, side: Side, pair: Pair) -> None:
        """Its object is another block's from then on: so nobody may look at it.

        Nor may the pool of objects of an allocator that did not make it take it.
        """
        self.pairs.remove(pair)
        is_prev = any(pair.model in one.model.chain() for one in self.pairs)
        keep = is_prev or side is not pair.home
        side.real.free(pair.real, keep_block_object=keep)

    def cow_real(self, side: Side, pair: Pair) -> object:
        """It leaves to the block to hold what it returns."""
        pair.real.block_id = side.real.cow_block_if_not_appendable(pair.real)
        return pair.real.block_id


MACHINES: dict[str, Callable[[], RuleBasedStateMachine]] = {
    "allocator": AllocatorMachine
}
try:
    stock = importlib.import_module("vllm.core.block.prefix_caching_block")
except ImportError:
    stock = None
else:
    MACHINES["allocator, vLLM 0.8.5's"] = partial(
        VllmMachine, stock.PrefixCachingBlockAllocator
    )


@pytest.mark.skipif(stock is None, reason="vLLM 0.8.5 is not importable here")
def test_vllms_allocator_does_what_the_model_does() -> None:
    """So it does what ours does."""
    run(MACHINES["allocator, vLLM 0.8.5's"])
