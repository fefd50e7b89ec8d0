"""The rows of the side-by-side table that a block pool alone decides, and their floors.

Stores nothing. A row is one line of `pool_rows`: its name, the least ratio that the
project has set itself (None: shown, not judged) and what either side does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pool_sides as sides
from measure import BytesRow, Row, TimeRow
from pool_sides import BIG_POOL, HALF, POOL, MakePool

import kvcache

NOTES = (
    f"Pools of {POOL:,} blocks, {HALF:,} of them cached; 32-byte hashes, all hits."
    f" Scattered: in random places. Cold: scattered in a pool of {BIG_POOL:,}, other"
    " blocks each call. By ids and in C is against stock's objects at n = 100,"
    " match_* against a loop of its get_cached_block."
)


def pool_rows(stock_pool: MakePool) -> list[Row]:
    """The rows.

    Args:
        stock_pool: vLLM's BlockPool.
    """
    ours_pool = kvcache.BlockPool

    def same(
        work: str, floor: float | None, side: Callable, *args: Any, **options: Any
    ) -> TimeRow:
        """A row whose two sides make the same calls."""
        ours, stock = (partial(side, pool, *args) for pool in (ours_pool, stock_pool))
        return TimeRow(work, floor, ours, stock, **options)

    def against(
        work: str, floor: float | None, stock: Callable, ours: Callable, *args: Any
    ) -> TimeRow:
        """A row for a call that stock does not have, against what does its job."""
        return TimeRow(work, floor, partial(ours, *args), partial(stock, stock_pool))

    def big(objects: bool) -> list[Callable[[], Any]]:
        return [partial(sides.big_pool, pool, objects) for pool in pools]

    pools = (ours_pool, stock_pool)
    get_free, touch_free = sides.get_and_free, sides.touch_and_free
    get_free_100 = partial(get_free, n=100)
    get_free_100_scattered = partial(get_free, n=100, scattered=True)
    match = sides.match_by_loop
    match_scattered = partial(match, scattered=True)
    by_ids, in_c = sides.get_and_free_ids, sides.get_and_free_in_c
    match_objects, match_ids = sides.match_objects, sides.match_ids
    match_cold, match_cold_ids = sides.match_cold_by_loop, sides.match_cold_ids
    cache, life, make = sides.cache_full, sides.life_in_full_pool, sides.make_big
    made = f"{BIG_POOL:,} blocks"
    return [
        same("get + free, objects, n = 1", 10, get_free, 1),
        same("get + free, objects, n = 10", 28, get_free, 10),
        same("get + free, objects, n = 100", 35, get_free, 100),
        same("get + free, objects, n = 100, scattered", None, get_free, 100, True),
        against("get + free, ids, n = 1000", 45, get_free_100, by_ids, 1000),
        against(
            "get + free, ids, n = 1000, scattered",
            None,
            get_free_100_scattered,
            by_ids,
            1000,
            True,
        ),
        against("get + free, in C, n = 100", 65, get_free_100, in_c, 100),
        against("match_prefix, 2000 hashes", 40, match, match_objects),
        against(
            "match_prefix, 2000 hashes, scattered",
            None,
            match_scattered,
            match_objects,
            True,
        ),
        against("match_prefix_ids, 2000 hashes", 100, match, match_ids),
        against(
            "match_prefix_ids, 2000 hashes, scattered",
            None,
            match_scattered,
            match_ids,
            True,
        ),
        against("match_prefix_ids, 2000 hashes, in C", None, match, sides.match_in_c),
        against("match_prefix_ids, 100 hashes, cold", None, match_cold, match_cold_ids),
        same("get_cached_block, one call a hash", 3, sides.get_cached),
        same("touch + free, cached free blocks, n = 100", 20, touch_free),
        same("touch + free, n = 100, scattered", None, touch_free, True),
        same("touch + free, n = 100, cold", None, sides.touch_and_free_cold),
        same("cache_full_blocks, n = 100", 8, cache),
        same("cache_full_blocks, n = 100, scattered", None, cache, True),
        same("get (all evict) + cache + free, n = 100", None, life),
        same("get (all evict) + cache + free, n = 100, scattered", None, life, True),
        # The collector runs while stock makes its objects, as it would in an engine.
        same(f"{made} made", 50, make, long=True, collector=True),
        same(f"{made} made, collector off", None, make, long=True),
        same(f"{made} made, with their objects", None, make, True, long=True),
        BytesRow(f"{made}, memory", 80, *big(objects=False), BIG_POOL),
        BytesRow(f"{made}, memory, with their objects", None, *big(True), BIG_POOL),
    ]
