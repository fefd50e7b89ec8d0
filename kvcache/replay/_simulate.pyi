import numpy as np
from numpy.typing import NDArray

from kvcache.replay._pool import ReplayedPool

class PoolReplay(ReplayedPool):
    def __init__(
        self, num_blocks: int, block_size: int, *, record_assignment: bool = True
    ) -> None: ...
    def run(
        self,
        input_lengths: NDArray[np.int64],
        keys: NDArray[np.uint8],
        indptr: NDArray[np.int64],
    ) -> None: ...
    def result(self) -> dict[str, int | float | str]: ...
