"""kvcache: the compiled KV-cache block manager for LLM inference engines."""

import os

from kvcache._memory import tracemalloc_domain
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
    "get_include",
    "tracemalloc_domain",
    "use_event_classes",
]


def get_include() -> str:
    """Folder of `kvcache.h`, for C and C++ that call kvcache through its capsule.

    Cython modules need it not: they `cimport kvcache`. Build scripts that ask
    pkg-config find the same as `kvcache`, with `kvcache/lib/pkgconfig` in
    PKG_CONFIG_PATH.
    """
    return os.path.join(os.path.dirname(__file__), "include")
