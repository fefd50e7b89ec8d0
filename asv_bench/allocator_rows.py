"""The rows of the side-by-side table about the prefix-caching allocators, and floors.

Stores nothing. A row is one line of `allocator_rows`, as in pool_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import allocator_sides as sides
from allocator_sides import BLOCK_SIZE, GROWN, LONG, POOL, REQUEST
from measure import Row, TimeRow
from vllm_v0 import RELEASE, Allocators

import kvcache
from kvcache import prefix_caching

NOTES = (
    f"v0: against the allocators of vLLM {RELEASE}, of {POOL:,} blocks; requests of"
    f" {REQUEST} blocks of {BLOCK_SIZE} tokens, hashing included, freed by a call a"
    " block. Free: nobody uses them any more; shared: somebody else does. A request"
    f" that grows does it by {GROWN} tokens, one a call. Stock finds a cached prefix"
    " by bisection, which sees no hole."
)


def allocator_rows(stock: Allocators) -> list[Row]:
    """The rows.

    Args:
        stock: vLLM's classes.
    """
    names = [name for name in Allocators._fields if name != "version"]
    ours = Allocators(
        *(getattr(prefix_caching, name) for name in names), version=kvcache.__version__
    )

    def row(work: str, floor: float | None, side: Callable, *args: Any) -> TimeRow:
        """Both sides make the same calls."""
        mine, theirs = (partial(side, of, *args) for of in (ours, stock))
        return TimeRow(f"v0: {work}", floor, mine, theirs, against=f"vLLM {RELEASE}")

    allocate, free = "allocate_immutable_blocks", "free, a call a block"
    return [
        row(f"{allocate}, miss", 10, sides.allocate_missing),
        row(f"{allocate}, hit, free", 10, sides.allocate_cached, False),
        row(f"{allocate}, hit, shared", 10, sides.allocate_cached, True),
        row(f"{allocate}, with eviction", 10, sides.allocate_evicting),
        row("fork", 10, sides.fork),
        row(f"{free}, the last user", 10, sides.free, False),
        row(f"{free}, shared", 10, sides.free, True),
        row("BlockTable, a cached prompt + free", None, sides.table_allocate_and_free),
        row("BlockTable, append, a token", None, sides.table_append),
        row("swap, out and in", None, sides.swap),
        row("mark_blocks_as_accessed", None, sides.mark_accessed),
        row(f"find_cached_blocks_prefix, {REQUEST}", None, sides.find_prefix, REQUEST),
        row(f"find_cached_blocks_prefix, {LONG:,}", None, sides.find_prefix, LONG),
        row("LRUEvictor, evict + add", None, sides.evict_and_add),
    ]
