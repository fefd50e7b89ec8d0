"""What a pool shows of itself as a Python collection, read live and never copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.hash_index import BlockHashToBlockMap


class AliasesByBlock(Mapping[int, set[bytes]]):
    """Block id -> the keys it answers to beside its own; only blocks that have some."""

    def __init__(self, index: BlockHashToBlockMap) -> None:
        self._index = index

    def __getitem__(self, block_id: int) -> set[bytes]:
        try:
            keys = self._index._aliases_of(block_id)
        except (TypeError, ValueError):
            raise KeyError(block_id) from None
        if not keys:
            raise KeyError(block_id)
        return keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._index._aliased_blocks())

    def __len__(self) -> int:
        return len(self._index._aliased_blocks())

    def __repr__(self) -> str:
        return repr(dict(self))
