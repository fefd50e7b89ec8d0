"""What tests of the allocators share: what can be seen of one, and stand-ins."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)


def snapshot(allocator: Any) -> object:
    """All that can be seen of an allocator, of either kind."""
    seen = [allocator.get_num_free_blocks(), allocator._refcounter._refcounts]
    if not isinstance(allocator, PrefixCachingBlockAllocator):
        return [*seen, allocator._free_block_indices]
    return [
        *seen,
        allocator._hashless_allocator._free_block_indices,
        allocator._cached_blocks,
        allocator._touched_blocks,
        [
            (block, data.content_hash, data.num_hashed_tokens, data.last_accessed)
            for block, data in allocator.evictor.free_table.items()
        ],
        [
            (block, state.active, state.last_accessed, state.computed)
            for block, state in allocator._block_tracker.items()
        ],
        allocator.get_prefix_cache_hit_rate(),
    ]


@contextmanager
def refused(
    error: type[Exception] | tuple[type[Exception], ...], match: str, *allocators: Any
) -> Iterator[None]:
    """The call inside raises this, and changes none of the allocators."""
    before = [snapshot(allocator) for allocator in allocators]
    with pytest.raises(error, match=match):
        yield
    for allocator in allocators:
        allocator.check()
    assert [snapshot(allocator) for allocator in allocators] == before


def nothing(*args: object) -> None:
    """A hook that does nothing."""


class Index:
    """An integer of another class, which may do something when it is read."""

    def __init__(self, value: int, hook: Callable[[], object] = nothing) -> None:
        self.value, self.hook = value, hook

    def __index__(self) -> int:
        self.hook()
        return self.value


class PlainBlock:
    """A block class of one's own, with a hook for what its `block_id` is set to."""

    def __init__(
        self,
        prev_block: Any,
        token_ids: Iterable[int],
        block_size: int,
        allocator: Any,
        block_id: int | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None:
        self.prev_block, self.token_ids = prev_block, list(token_ids)
        self.block_size, self.allocator = block_size, allocator
        self.hook: Callable[[int | None], object] = nothing
        self._block_id = block_id

    @property
    def block_id(self) -> int | None:
        return self._block_id

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        hook, self.hook = self.hook, nothing
        hook(value)
        self._block_id = value

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) == self.block_size
