"""Who owns what: block tables of all requests over one pool, a step in one call."""

from kvcache.manager.groups import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Group,
    Mamba,
    SlidingWindow,
)
from kvcache.manager.kv_cache_manager import KVCacheManager
from kvcache.manager.stats import PrefixCacheStats

__all__ = [
    "ChunkedLocal",
    "CrossAttention",
    "FullAttention",
    "Group",
    "KVCacheManager",
    "Mamba",
    "PrefixCacheStats",
    "SlidingWindow",
]
