"""Residency of sampled blocks, by a clock that the tests wind."""

import random
import time
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
from pools import UNIT, cached

from kvcache import BlockPool, KVCacheBlock, KVCacheEvictionEvent
from kvcache import KVCacheMetricsCollector as Collector
from kvcache.metrics import BlockMetricsState


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> int:
        return round(self.seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


def everything() -> Collector:
    return Collector(sample_rate=1.0)


# -- which blocks are sampled -----------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.0001, 2])
def test_a_sample_rate_is_above_0_and_at_most_1(rate: float) -> None:
    with pytest.raises(ValueError, match=str(rate)):
        Collector(rate)


def test_one_block_in_a_hundred_is_sampled_by_default() -> None:
    assert Collector().sample_rate == 0.01


@pytest.mark.parametrize(("drawn", "sampled"), [(0.0, 1), (0.24, 1), (0.25, 0)])
def test_a_block_is_sampled_if_the_draw_is_below_the_rate(
    monkeypatch: pytest.MonkeyPatch, drawn: float, sampled: int
) -> None:
    monkeypatch.setattr(random, "random", lambda: drawn)
    collector = Collector(0.25)
    collector.on_block_allocated(KVCacheBlock(3))
    assert len(collector.block_metrics) == sampled
    assert collector.should_sample_block() == bool(sampled)


def test_with_the_rate_1_every_block_is_sampled() -> None:
    collector = everything()
    for block_id in range(100):
        collector.on_block_allocated(KVCacheBlock(block_id))
    assert sorted(collector.block_metrics) == list(range(100))


def test_a_block_is_all_that_has_a_block_id() -> None:
    collector = everything()
    collector.on_block_allocated(SimpleNamespace(block_id=3))
    assert list(collector.block_metrics) == [3]


def test_what_is_not_sampled_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.99)
    collector, block = Collector(0.5), KVCacheBlock(3)
    collector.on_block_allocated(block)
    collector.on_block_accessed(block)
    collector.on_block_evicted(block)
    assert collector.drain_events() == []
    assert collector.block_metrics == {}


# -- what a record tells ----------------------------------------------------------


def test_a_record_begins_when_the_block_is_allocated(clock: Clock) -> None:
    state = BlockMetricsState()
    assert state.birth_time_ns == state.last_access_ns == clock()
    assert list(state.access_history) == []
    clock.seconds += 5.5
    assert state.get_lifetime_seconds() == 5.5
    assert state.get_idle_time_seconds() == 5.5
    assert state.get_reuse_gaps_seconds() == []


def test_idle_time_runs_from_the_last_use(clock: Clock) -> None:
    state = BlockMetricsState()
    clock.seconds += 2
    state.record_access()
    clock.seconds += 3
    assert state.get_idle_time_seconds() == 3
    assert state.get_lifetime_seconds() == 5


@pytest.mark.parametrize(
    ("waits", "gaps"),
    [
        ([], []),
        ([1], []),
        ([1, 2], [2]),
        ([1, 2, 0.5], [2, 0.5]),
        ([1, 2, 3, 4], [2, 3, 4]),
        ([1, 2, 3, 4, 5], [3, 4, 5]),
        ([1, 2, 3, 4, 5, 6, 7], [5, 6, 7]),
    ],
)
def test_gaps_are_those_between_the_last_four_uses(
    clock: Clock, waits: list[float], gaps: list[float]
) -> None:
    state = BlockMetricsState()
    for wait in waits:
        clock.seconds += wait
        state.record_access()
    assert state.get_reuse_gaps_seconds() == gaps
    assert len(state.access_history) == min(len(waits), 4)


def test_an_eviction_reports_the_blocks_life(clock: Clock) -> None:
    collector, block = everything(), KVCacheBlock(3)
    collector.on_block_allocated(block)
    for wait in (1, 2, 4):
        clock.seconds += wait
        collector.on_block_accessed(block)
    clock.seconds += 8
    collector.on_block_evicted(block)
    assert collector.drain_events() == [
        KVCacheEvictionEvent(
            lifetime_seconds=15, idle_seconds=8, reuse_gaps_seconds=(2, 4)
        )
    ]


def test_an_eviction_event_is_a_frozen_record() -> None:
    event = KVCacheEvictionEvent(1.0, 0.5, (0.25,))
    assert event == KVCacheEvictionEvent(1.0, 0.5, (0.25,))
    assert hash(event) == hash(KVCacheEvictionEvent(1.0, 0.5, (0.25,)))
    with pytest.raises(FrozenInstanceError):
        event.idle_seconds = 1.0


# -- what a collector keeps -------------------------------------------------------


def test_a_block_is_reported_once(clock: Clock) -> None:
    collector, block = everything(), KVCacheBlock(3)
    collector.on_block_allocated(block)
    collector.on_block_evicted(block)
    collector.on_block_evicted(block)
    collector.on_block_accessed(block)
    assert len(collector.drain_events()) == 1
    assert collector.block_metrics == {}


def test_a_new_allocation_begins_a_new_record(clock: Clock) -> None:
    collector, block = everything(), KVCacheBlock(3)
    collector.on_block_allocated(block)
    collector.on_block_accessed(block)
    clock.seconds += 5
    collector.on_block_allocated(block)
    clock.seconds += 1
    collector.on_block_evicted(block)
    assert collector.drain_events() == [KVCacheEvictionEvent(1, 1, ())]


def test_draining_returns_each_event_once_and_in_order(clock: Clock) -> None:
    collector = everything()
    for block_id in range(3):
        collector.on_block_allocated(KVCacheBlock(block_id))
    for block_id in (1, 0):
        clock.seconds += 1
        collector.on_block_evicted(KVCacheBlock(block_id))
    assert [event.lifetime_seconds for event in collector.drain_events()] == [1, 2]
    assert collector.drain_events() == []
    assert list(collector.block_metrics) == [2]


def test_a_reset_forgets_records_and_events() -> None:
    collector = everything()
    for block_id in range(3):
        collector.on_block_allocated(KVCacheBlock(block_id))
    collector.on_block_evicted(KVCacheBlock(0))
    collector.reset()
    assert collector.drain_events() == []
    assert collector.block_metrics == {}
    collector.on_block_evicted(KVCacheBlock(1))
    assert collector.drain_events() == []


# -- in a pool --------------------------------------------------------------------


def test_a_pools_blocks_are_reported_from_allocation_to_reuse(clock: Clock) -> None:
    collector = everything()
    pool = BlockPool(2, True, UNIT, metrics_collector=collector)
    blocks = cached(pool, 1)
    clock.seconds += 1
    pool.free_blocks(blocks)
    clock.seconds += 2
    pool.touch(blocks)
    pool.free_blocks(blocks)
    clock.seconds += 4
    assert collector.drain_events() == []
    pool.get_new_blocks(1)
    assert collector.drain_events() == [KVCacheEvictionEvent(7, 4, ())]
    assert list(collector.block_metrics) == [1]


def test_a_pools_blocks_are_reported_when_they_are_evicted_by_id(clock: Clock) -> None:
    collector = everything()
    pool = BlockPool(4, True, UNIT, metrics_collector=collector)
    cached(pool, 1, 2)
    clock.seconds += 3
    pool.evict_blocks([2])
    assert collector.drain_events() == [KVCacheEvictionEvent(3, 3, ())]
    assert list(collector.block_metrics) == [1]


def test_a_pools_reset_resets_its_collector() -> None:
    collector = everything()
    pool = BlockPool(4, True, UNIT, metrics_collector=collector)
    pool.free_blocks(cached(pool, 1, 2))
    pool.reset_prefix_cache()
    assert collector.block_metrics == {}
    assert collector.drain_events() == []
