"""What a block manager remembers of sequences."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcache import BlockStateError
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.trackers import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
)

UNIT = 4


@dataclass
class Request:
    """A sequence, as far as trackers look at it."""

    token_ids: list[int]
    seq_id: Any = 0
    adapter: int | None = None
    prefill: bool = False

    def get_token_ids(self) -> list[int]:
        return self.token_ids

    def extra_hash(self) -> int | None:
        return self.adapter

    def is_prefill(self) -> bool:
        return self.prefill


@dataclass
class Cache:
    """Says that so many blocks are cached; keeps what it was told."""

    num_cached: int = 0
    asked: list[list[int]] = field(default_factory=list)
    told: list[tuple[list[int], float]] = field(default_factory=list)

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        self.asked.append(list(block_hashes))
        return block_hashes[: self.num_cached]

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        self.told.append((list(block_ids), now))


def computed(
    allocator: PrefixCachingBlockAllocator, tokens: list[int], **of: Any
) -> None:
    """Have the full blocks of these tokens cached and computed."""
    blocks = [tokens[i : i + UNIT] for i in range(0, len(tokens) - UNIT + 1, UNIT)]
    allocator.allocate_immutable_blocks(None, blocks, **of)
    allocator.mark_blocks_as_computed([])


@pytest.fixture
def allocator() -> PrefixCachingBlockAllocator:
    return PrefixCachingBlockAllocator(num_blocks=16, block_size=UNIT)


# -- computed blocks ---------------------------------------------------------------


def test_cached_tokens_are_those_of_whole_computed_blocks(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    tokens = list(range(11))
    tracker = ComputedBlocksTracker(allocator, UNIT, enable_caching=True)
    computed(allocator, tokens)
    assert tracker.get_num_cached_tokens(Request(tokens)) == 8


def test_blocks_that_are_not_computed_yet_do_not_count(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    tokens = list(range(8))
    tracker = ComputedBlocksTracker(allocator, UNIT, enable_caching=True)
    allocator.allocate_immutable_blocks(None, [tokens[:4], tokens[4:]])
    assert tracker.get_num_cached_tokens(Request(tokens)) == 0
    allocator.mark_blocks_as_computed([])
    assert tracker.get_num_cached_tokens(Request(tokens)) == 8


def test_the_allocator_may_be_one_of_two_devices() -> None:
    both = CpuGpuBlockAllocator.create("prefix_caching", 16, 16, UNIT)
    tokens = list(range(8))
    computed(both._allocators[next(iter(both._allocators))], tokens)  # the CPU's
    tracker = ComputedBlocksTracker(both, UNIT, enable_caching=True)
    assert tracker.get_num_cached_tokens(Request(tokens)) == 0
    computed(list(both._allocators.values())[1], tokens)
    assert tracker.get_num_cached_tokens(Request(tokens)) == 8


def test_another_adapter_shares_no_block(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    tokens = list(range(8))
    tracker = ComputedBlocksTracker(allocator, UNIT, enable_caching=True)
    computed(allocator, tokens, extra_hash=1)
    requests = [Request(tokens, seq_id=i, adapter=i or None) for i in range(3)]
    assert [tracker.get_num_cached_tokens(one) for one in requests] == [0, 8, 0]


def test_blocks_are_hashed_once_and_as_tokens_come(
    allocator: PrefixCachingBlockAllocator,
) -> None:
    cache = Cache()
    tracker = ComputedBlocksTracker(cache, UNIT, enable_caching=True)
    request = Request([])
    for token in range(3 * UNIT):
        request.token_ids.append(token)
        tracker.get_num_cached_tokens(request)
    at_once = ComputedBlocksTracker(cache, UNIT, enable_caching=True)
    at_once.get_num_cached_tokens(request)
    assert [len(hashes) for hashes in cache.asked[:12]] == [
        0,
        0,
        0,
        *[1] * 4,
        *[2] * 4,
        3,
    ]
    assert cache.asked[-1] == cache.asked[-2]
    chain = allocator.allocate_immutable_blocks(
        None, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    )
    assert [block.content_hash for block in chain] == cache.asked[-1]


def test_a_sequence_in_prefill_keeps_what_was_found_first() -> None:
    cache = Cache(num_cached=1)
    tracker = ComputedBlocksTracker(cache, UNIT, enable_caching=True)
    request = Request(list(range(8)), prefill=True)
    assert tracker.get_num_cached_tokens(request) == 4
    cache.num_cached = 2
    assert tracker.get_num_cached_tokens(request) == 4
    request.prefill = False
    assert tracker.get_num_cached_tokens(request) == 8


def test_a_sequence_that_was_removed_starts_anew() -> None:
    cache = Cache(num_cached=2)
    tracker = ComputedBlocksTracker(cache, UNIT, enable_caching=True)
    request = Request(list(range(8)), prefill=True)
    assert tracker.get_num_cached_tokens(request) == 8
    tracker.remove_seq(request.seq_id)
    cache.num_cached = 0
    request.token_ids = [1]
    assert tracker.get_num_cached_tokens(request) == 0


def test_without_caching_nothing_is_cached_or_remembered() -> None:
    cache = Cache(num_cached=2)
    tracker = ComputedBlocksTracker(cache, UNIT, enable_caching=False)
    assert tracker.get_num_cached_tokens(Request(list(range(8)))) == 0
    assert cache.asked == []
    tracker.remove_seq(0)


def test_a_sequence_that_became_shorter_is_refused_by_name() -> None:
    tracker = ComputedBlocksTracker(Cache(), UNIT, enable_caching=True)
    request = Request(list(range(9)), seq_id="short")
    tracker.get_num_cached_tokens(request)
    request.token_ids = [1, 2, 3]
    with pytest.raises(BlockStateError, match="'short' has 3 tokens, but 2 full"):
        tracker.get_num_cached_tokens(request)
    request.token_ids = list(range(8))  # all that is hashed of it is still there
    assert tracker.get_num_cached_tokens(request) == 0


def test_removing_an_unknown_sequence_is_refused_by_name() -> None:
    tracker = ComputedBlocksTracker(Cache(), UNIT, enable_caching=True)
    with pytest.raises(BlockStateError, match="sequence 'nobody'"):
        tracker.remove_seq("nobody")
    with pytest.raises(AssertionError):  # what vLLM raises
        tracker.remove_seq("nobody")


def test_tokens_that_cannot_be_hashed_leave_no_trace() -> None:
    tracker = ComputedBlocksTracker(Cache(), UNIT, enable_caching=True)
    request = Request([1, 2, 3, 4, 5, 6, 7, "8"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        tracker.get_num_cached_tokens(request)
    with pytest.raises(BlockStateError):
        tracker.remove_seq(request.seq_id)


def test_a_sequence_can_be_removed_after_its_lookup_failed() -> None:
    class Broken:
        def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
            raise OSError

    tracker = ComputedBlocksTracker(Broken(), UNIT, enable_caching=True)
    with pytest.raises(OSError):
        tracker.get_num_cached_tokens(Request(list(range(8))))
    tracker.remove_seq(0)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        ComputedBlocksTracker(Cache(), block_size, enable_caching=True)


# -- last access -------------------------------------------------------------------


def test_the_allocator_is_told_when_a_sequence_was_used_last() -> None:
    cache = Cache()
    tracker = LastAccessBlocksTracker(cache)
    tracker.add_seq(0)
    tracker.update_last_access(0, 1.5)
    tracker.update_last_access(0, 2.5)
    assert cache.told == []
    tracker.update_seq_blocks_last_access(0, [3, 4])
    assert cache.told == [([3, 4], 2.5)]


def test_the_time_zero_is_a_time() -> None:
    cache = Cache()
    tracker = LastAccessBlocksTracker(cache)
    tracker.add_seq(0)
    tracker.update_last_access(0, 0.0)
    tracker.update_seq_blocks_last_access(0, [1])
    assert cache.told == [([1], 0.0)]


def test_a_sequence_never_used_is_not_told_of() -> None:
    cache = Cache()
    tracker = LastAccessBlocksTracker(cache)
    tracker.add_seq(0)
    tracker.update_seq_blocks_last_access(0, [3, 4])
    assert cache.told == []


def test_a_sequence_may_come_back_after_it_was_removed() -> None:
    cache = Cache()
    tracker = LastAccessBlocksTracker(cache)
    tracker.add_seq(0)
    tracker.update_last_access(0, 1.0)
    tracker.remove_seq(0)
    tracker.add_seq(0)
    tracker.update_seq_blocks_last_access(0, [1])
    assert cache.told == []


def test_the_time_reaches_the_blocks(allocator: PrefixCachingBlockAllocator) -> None:
    tracker = LastAccessBlocksTracker(allocator)
    [old] = allocator.allocate_immutable_blocks(None, [[1] * UNIT])
    [new] = allocator.allocate_immutable_blocks(None, [[2] * UNIT])
    both: list[tuple[int, Any, float]] = [(1, old, 5.0), (2, new, 7.0)]
    for seq_id, block, time in both:
        tracker.add_seq(seq_id)
        tracker.update_last_access(seq_id, time)
        tracker.update_seq_blocks_last_access(seq_id, [block.block_id])
    first_out = old.block_id
    allocator.free(new)
    allocator.free(old)
    taken = [allocator.allocate_mutable_block(None).block_id for _ in range(15)]
    assert taken[-1] == first_out


@pytest.mark.parametrize(
    "call",
    [
        lambda tracker: tracker.remove_seq("x"),
        lambda tracker: tracker.update_last_access("x", 1.0),
        lambda tracker: tracker.update_seq_blocks_last_access("x", [1]),
    ],
)
def test_a_sequence_that_is_not_tracked_is_refused_by_name(call: Any) -> None:
    with pytest.raises(BlockStateError, match="sequence 'x' is not tracked"):
        call(LastAccessBlocksTracker(Cache()))


def test_a_sequence_is_tracked_once() -> None:
    tracker = LastAccessBlocksTracker(Cache())
    tracker.add_seq("x")
    tracker.update_last_access("x", 3.0)
    with pytest.raises(BlockStateError, match="sequence 'x' is tracked already"):
        tracker.add_seq("x")
    assert tracker._seq_last_access == {"x": 3.0}
