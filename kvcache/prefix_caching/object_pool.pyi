from collections.abc import Iterable
from typing import Any, final

from kvcache.prefix_caching.interfaces import BlockId

@final
class BlockPool:
    def __init__(
        self, block_size: int, create_block: Any, allocator: Any, pool_size: int
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    def increase_pool(self) -> None: ...
    def init_block(
        self,
        prev_block: Any,
        token_ids: Iterable[int],
        block_size: int,
        physical_block_id: BlockId | None,
        extra_hash: int | None = None,
    ) -> Any: ...
    def free_block(self, block: object) -> None: ...
