from collections.abc import Iterable
from typing import final

@final
class BlockIds:
    @property
    def count(self) -> int: ...
    def __new__(
        cls, block_ids: Iterable[int], num_blocks: int | None = None
    ) -> BlockIds: ...
