from collections.abc import Iterable
from typing import Any, Never, final

from kvcache.prefix_caching.evictor import BlockMetaData
from kvcache.prefix_caching.interfaces import BlockId

@final
class CachedBlocks:
    def __new__(
        cls,
        num_blocks: int = 0,
        block_size: int = 1,
        block_ids: Iterable[BlockId] | None = None,
    ) -> CachedBlocks: ...

@final
class AllocatorEvictor:
    def __new__(cls, blocks: CachedBlocks) -> AllocatorEvictor: ...
    def __contains__(self, block_id: BlockId, /) -> bool: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def free_table(self) -> dict[BlockId, BlockMetaData]: ...
    def refuse(self, *args: Any, **kwargs: Any) -> Never: ...
    add = refuse
    update = refuse
    remove = refuse
    evict = refuse
