"""The rows of the side-by-side table about a manager of requests, and their floors.

Stores nothing. A row is one line of `manager_rows`, as in pool_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import manager_sides as sides
from manager_sides import FREED, PROMPT, RUNNING, STEPS, WINDOW, OurEngine, StockEngine
from measure import LimitRow, Row, Side, TimeRow
from pool_sides import BIG_POOL, BLOCK_SIZE

from kvcache import hashing

MANY = 4_096  # requests
BETWEEN = (False, False, RUNNING, 1)
NOTES = (
    "Manager: nanoseconds a request, hashes given, against vLLM's KVCacheManager and"
    f" Request in a pool as above. A step decodes one token each of {RUNNING} requests"
    f" of {PROMPT * BLOCK_SIZE:,} to {PROMPT * BLOCK_SIZE + STEPS:,} tokens, of which"
    " a 16th caches a block and a 16th takes one; counting tokens, adding requests and"
    " tokens is not in the time, on either side. Free blocks come out in the order of"
    " their ids, or, where scattered, at random. Tokens are added each 16 steps; tokens"
    " between: before each, so that a step finds little in the near caches. Admission:"
    " a prompt of"
    f" {PROMPT} cached blocks and some tokens, match + allocate_slots; with window:"
    f" full attention and a sliding window of {WINDOW} tokens. Free: of {FREED} blocks,"
    " with the content that ours keeps. Arrays: ours is a view, stock's get_block_ids +"
    f" np.array. {MANY:,} requests are in a pool of {BIG_POOL:,} blocks."
)


def manager_rows(stock: Any) -> list[Row]:
    """The rows.

    Args:
        stock: vLLM's modules, as `side_by_side.import_vllm` gives them.
    """
    stock_engine = partial(StockEngine, stock)

    def same(
        work: str, floor: float | None, side: Callable[..., Side], *args: Any
    ) -> TimeRow:
        """A row whose two sides make the same calls."""
        ours, theirs = (partial(side, of, *args) for of in (OurEngine, stock_engine))
        return TimeRow(f"manager: {work}", floor, ours, theirs)

    def step(work: str, floor: float | None, *args: Any) -> TimeRow:
        """All requests in one call, against a call each."""
        return TimeRow(
            f"manager: {work}",
            floor,
            partial(sides.decode_in_one_call, *args),
            partial(sides.decode_one_by_one, stock_engine, *args),
        )

    def in_c(work: str, *scattered: bool) -> TimeRow:
        """The same in compiled code: what is left is what a call from Python costs."""
        return TimeRow(
            f"manager: {work}",
            None,
            partial(sides.decode_in_c, *scattered),
            partial(sides.decode_one_by_one, stock_engine, False, *scattered),
        )

    def append(name: str) -> TimeRow:
        return TimeRow(
            f"manager: append_step, {name}",
            None,
            partial(sides.append_step, getattr(hashing, name)),
            partial(sides.append_to_stock_requests, stock),
        )

    one_by_one, admit, free = sides.decode_one_by_one, sides.admit, sides.free
    return [
        same("decode, allocate_slots", 30, one_by_one),
        same("decode, allocate_slots, scattered", None, one_by_one, False, True),
        same("decode, allocate_slots, window", None, one_by_one, True),
        same("decode, allocate_slots, tokens between", None, one_by_one, *BETWEEN),
        step("decode, allocate_step", 300),
        step("decode, allocate_step, scattered", None, False, True),
        step("decode, allocate_step, window", None, True),
        step(f"decode, allocate_step, {MANY:,}", None, False, False, MANY),
        step("decode, allocate_step, tokens between", None, *BETWEEN),
        in_c("decode, allocate_step in C"),
        in_c("decode, allocate_step in C, scattered", True),
        same("admission of a hit", 30, admit),
        same("admission of a hit, scattered", None, admit, False, True),
        same("admission of a hit, window", None, admit, True),
        same(f"free of {FREED} blocks", 20, free),
        same(f"free of {FREED} blocks, scattered", None, free, False, True),
        same(f"free of {FREED} blocks, window", None, free, True),
        same("free, made with tokens", None, sides.free_with_tokens),
        same("block ids as an array", 10, sides.block_arrays),
        same("preempt + resume", None, sides.preempt_and_resume),
        append("keyed"),
        append("sha256"),
        LimitRow("manager: slot_mapping of a step", None, sides.map_slots),
    ]
