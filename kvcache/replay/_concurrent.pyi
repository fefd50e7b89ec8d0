from typing_extensions import disjoint_base

from kvcache.replay._pool import ReplayedPool
from kvcache.replay.arrivals import Arrivals

@disjoint_base
class ConcurrentReplay(ReplayedPool):
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        arrivals: Arrivals,
        concurrency: int,
        step_ms: float,
        *,
        record_assignment: bool = True,
    ) -> None: ...
    def advance(self, max_steps: int) -> bool: ...
    def result(self) -> dict[str, int | float | str]: ...
