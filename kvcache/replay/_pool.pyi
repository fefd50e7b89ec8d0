from typing_extensions import disjoint_base

from kvcache.manager import KVCacheManager

@disjoint_base
class ReplayedPool:
    @property
    def manager(self) -> KVCacheManager: ...
