from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvcache.block_pool import BlockPool
from kvcache.manager.block_tables import BlockTables
from kvcache.manager.groups import Group
from kvcache.manager.requests import _Rows
from kvcache.manager.stats import PrefixCacheStats

@final
class KVCacheManager(BlockTables):
    def __init__(
        self,
        num_blocks: int,
        groups: Iterable[Group],
        *,
        hash_block_size: int | None = None,
        max_model_len: int,
        max_num_requests: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        watermark: float = 0.0,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        hash_fn: Callable[[Any], bytes] = ...,
    ) -> None: ...
    @staticmethod
    def check_cacheable(
        groups: Sequence[Group], hash_block_size: int, use_eagle: bool
    ) -> None: ...
    @property
    def block_pool(self) -> BlockPool: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...
    @property
    def prefix_cache_stats(self) -> PrefixCacheStats: ...
    def match(self, row: int, max_length: int | None = None) -> int: ...
    def allocate_slots(
        self,
        row: int,
        num_new_tokens: int,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_requests: bool = True,
    ) -> tuple[NDArray[np.int32], ...] | None: ...
    def allocate_step(
        self, rows: _Rows, num_new_tokens: _Rows, *, num_lookahead_tokens: int = 0
    ) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]: ...
    def cache_blocks(self, row: int, num_computed_tokens: int) -> None: ...
    def free(self, row: int) -> None: ...
    def preempt(self, row: int) -> None: ...
    def pop_block_ids(self, row: int) -> NDArray[np.int32]: ...
    def fork(self, row: int) -> tuple[int, NDArray[np.int32]] | None: ...
    def evict_blocks(
        self, block_ids: NDArray[np.integer[Any]] | Iterable[int]
    ) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    @property
    def usage(self) -> float: ...
    def take_prefix_cache_stats(self) -> PrefixCacheStats: ...
    def take_events(self) -> list[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def check(self) -> None: ...
