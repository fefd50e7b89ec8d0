from typing import ClassVar, final

@final
class CacheMetricData:
    __hash__: ClassVar[None]  # type: ignore[assignment]
    num_completed_blocks: int
    completed_block_cache_hit_rate: float
    num_incompleted_block_queries: int
    num_incompleted_block_hit: int
    def __init__(
        self,
        num_completed_blocks: int = 0,
        completed_block_cache_hit_rate: float = 0.0,
        num_incompleted_block_queries: int = 0,
        num_incompleted_block_hit: int = 0,
        block_size: int = 1000,
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    def query(self, hit: bool) -> None: ...
    def get_hit_rate(self) -> float: ...
    def __eq__(self, other: object, /) -> bool: ...
