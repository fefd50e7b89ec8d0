"""kvcache: the compiled KV-cache block manager for LLM inference engines."""

from kvcache.block_pool import BlockPool
from kvcache.block_store import BlockStore, KVCacheBlock
from kvcache.errors import BlockStateError, NoFreeBlocksError
from kvcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventClasses,
    use_event_classes,
)
from kvcache.free_queue import FreeKVCacheBlockQueue
from kvcache.hash_index import BlockHashToBlockMap
from kvcache.metrics import KVCacheEvictionEvent, KVCacheMetricsCollector

__version__ = "0.1.0"

__all__ = [
    "AllBlocksCleared",
    "BlockHashToBlockMap",
    "BlockPool",
    "BlockRemoved",
    "BlockStateError",
    "BlockStore",
    "BlockStored",
    "EventClasses",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheEvictionEvent",
    "KVCacheMetricsCollector",
    "NoFreeBlocksError",
    "__version__",
    "use_event_classes",
]
