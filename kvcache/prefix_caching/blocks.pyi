from collections.abc import Iterable
from typing import Any, final

from typing_extensions import disjoint_base

from kvcache.prefix_caching.interfaces import BlockId, PrefixHash

@disjoint_base
class BlockOwner:
    @property
    def block_size(self) -> int: ...

@disjoint_base
class TokenBlock:
    @property
    def block_id(self) -> BlockId | None: ...
    @block_id.setter
    def block_id(self, value: BlockId | None) -> None: ...
    @property
    def _allocator(self) -> Any: ...
    @property
    def block_size(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_empty_slots(self) -> int: ...
    @property
    def is_full(self) -> bool: ...
    # A block, of kvcache's or of another class.
    @property
    def prev_block(self) -> Any: ...

@final
class NaiveBlock(TokenBlock):
    def __init__(
        self,
        prev_block: Any,
        token_ids: Iterable[int],
        block_size: int,
        allocator: Any,
        block_id: BlockId | None = None,
        _cow_target: Any = None,
        extra_hash: int | None = None,
    ) -> None: ...
    def append_token_ids(self, token_ids: Iterable[int]) -> None: ...
    @property
    def computed(self) -> bool: ...
    @computed.setter
    def computed(self, value: bool) -> None: ...
    @property
    def last_accessed(self) -> float: ...
    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None: ...
    @property
    def num_tokens_total(self) -> int: ...
    @property
    def extra_hash(self) -> None: ...
    @property
    def content_hash(self) -> None: ...

@final
class PrefixCachingBlock(TokenBlock):
    _none_hash: int
    def __init__(
        self,
        prev_block: Any,
        token_ids: Iterable[int],
        block_size: int,
        allocator: Any,
        block_id: BlockId | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None: ...
    def append_token_ids(self, token_ids: Iterable[int]) -> None: ...
    @property
    def computed(self) -> bool: ...
    @computed.setter
    def computed(self, value: bool) -> None: ...
    @property
    def last_accessed(self) -> float: ...
    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None: ...
    @property
    def num_tokens_total(self) -> int: ...
    @property
    def extra_hash(self) -> int | None: ...
    @property
    def content_hash(self) -> PrefixHash | None: ...
    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: PrefixHash | None,
        cur_block_token_ids: Iterable[int],
        extra_hash: int | None = None,
    ) -> PrefixHash: ...

def assert_prefix_caching_block_or_none(block: object) -> None: ...
