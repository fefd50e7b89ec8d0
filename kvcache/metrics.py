"""Residency metrics of sampled blocks: how long they live, idle, and between uses.

Stores one small record per sampled block that is resident, and the samples of those
that were evicted since the last drain. Records and hooks are those of vLLM 0.33
(v1/core/kv_cache_metrics.py); pass a collector to `BlockPool(metrics_collector=...)`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol


class HasBlockId(Protocol):
    """What a hook needs to know of a block."""

    @property
    def block_id(self) -> int:
        """Id of the block."""


@dataclass(frozen=True, slots=True)
class KVCacheEvictionEvent:
    """One sampled block's life, in seconds, told when it was evicted."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


@dataclass(slots=True)
class BlockMetricsState:
    """When a sampled block was allocated and last used; the last four uses."""

    birth_time_ns: int = field(default_factory=lambda: time.monotonic_ns())
    last_access_ns: int = field(default=0)
    access_history: deque[int] = field(default_factory=lambda: deque(maxlen=4))

    def __post_init__(self) -> None:
        self.last_access_ns = self.last_access_ns or self.birth_time_ns

    def record_access(self) -> None:
        """Note a use, now."""
        self.last_access_ns = time.monotonic_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        """Seconds since the block was allocated."""
        return (time.monotonic_ns() - self.birth_time_ns) / 1e9

    def get_idle_time_seconds(self) -> float:
        """Seconds since the block was last used, or allocated."""
        return (time.monotonic_ns() - self.last_access_ns) / 1e9

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Seconds between the recorded uses, oldest first."""
        uses = list(self.access_history)
        return [(b - a) / 1e9 for a, b in pairwise(uses)]


class KVCacheMetricsCollector:
    """Samples blocks as they are allocated and reports each when it is evicted.

    Args:
        sample_rate: Share of allocations that is sampled, above 0 and at most 1.

    Raises:
        ValueError: sample_rate is outside that range.
    """

    def __init__(self, sample_rate: float = 0.01) -> None:
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._eviction_events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        """Draw whether the next allocation is sampled."""
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: HasBlockId) -> None:
        """Begin a record, for a sample of the blocks."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: HasBlockId) -> None:
        """Note a use of a sampled block."""
        state = self.block_metrics.get(block.block_id)
        if state is not None:
            state.record_access()

    def on_block_evicted(self, block: HasBlockId) -> None:
        """Close the record of a sampled block."""
        state = self.block_metrics.pop(block.block_id, None)
        if state is not None:
            self._eviction_events.append(
                KVCacheEvictionEvent(
                    lifetime_seconds=state.get_lifetime_seconds(),
                    idle_seconds=state.get_idle_time_seconds(),
                    reuse_gaps_seconds=tuple(state.get_reuse_gaps_seconds()),
                )
            )

    def reset(self) -> None:
        """Forget everything: the cache was reset."""
        self.block_metrics.clear()
        self._eviction_events.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The samples since the last drain."""
        events, self._eviction_events = self._eviction_events, []
        return events
