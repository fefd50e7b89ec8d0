"""The rows of the side-by-side table about block hashes, and their floors.

Stores nothing. A row is one line of `hashing_rows`, as in pool_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hashing_sides as sides
from hashing_sides import CHAIN, REQUEST_TOKENS
from measure import LimitRow, Pace, Result, Row, Side, TimeRow

from kvcache import hashing

NOTES = (
    f"Hashing: blocks of 16 random tokens, a chain of {CHAIN:,} in one call against a"
    " loop of stock's hash_block_tokens over a list, also where ours is given an array;"
    " the digests are compared first. A request hashed in one call is against stock's"
    " get_request_block_hasher called once, an appended one against the same called"
    " after each token. Hash + match: from an int32 array of tokens (stock: a list) to"
    " block ids, all hits; again: the same prompt each time; in turns: all prompts that"
    " half a pool holds, in random places. sha256 is against stock's request hasher and"
    " a loop of its get_cached_block. vLLM has nothing like keyed: its floor is in"
    " nanoseconds, and it is against SGLang's compiled radix tree, if that is there,"
    " with the same prompts in it, in pages of 16 tokens. The tree is given 64-bit"
    " tokens, as it wants them, and gives a slot a token; less slots: it only says how"
    " many tokens match and at which node, while ours gives the block ids. By kept"
    " tokens: as keyed, in a pool that keeps each block's tokens and compares them."
)
LOOKUPS = [(63, False), (2_000, False), (63, True), (2_000, True)]  # blocks, in turns


@dataclass
class BesideRow(LimitRow):
    """A limit on ours, which takes turns with another engine's where there is one."""

    theirs: Callable[[], Side] | None = None

    def measure(self, pace: Pace) -> Result:
        if self.theirs is None:
            return super().measure(pace)
        row = TimeRow(self.work, None, self.ours, self.theirs, against="SGLang")
        result = row.measure(pace)
        if self.limit and result.ours and result.stock:
            result.floor = f"<= {self.limit:g} ns"
            result.least = result.stock / self.limit
            result.reached = result.ours <= self.limit
        return result


def hashing_rows(stock: Any, sglang: Any) -> list[Row]:
    """The rows.

    Args:
        stock: vLLM's modules, as `side_by_side.import_vllm` gives them.
        sglang: As `sglang_tree.import_sglang` gives it, or None.
    """

    def chain(name: str, kind: str, floor: float | None) -> TimeRow:
        return TimeRow(
            f"block hash, {name}, {kind}",
            floor,
            partial(sides.hash_chain, stock, name, kind),
            partial(sides.hash_chain_by_stock, stock, name),
        )

    def one_a_call(name: str) -> TimeRow:
        return TimeRow(
            f"block hash, {name}, one call a block",
            None,
            partial(sides.hash_one_a_call, hashing, hashing, name),
            partial(sides.hash_one_a_call, stock.utils, stock.hashing, name),
        )

    def request(kind: str) -> TimeRow:
        return TimeRow(
            f"hash {REQUEST_TOKENS:,} tokens, sha256, {kind}",
            None,
            partial(sides.hash_request, stock, kind),
            partial(sides.hash_request_by_stock, stock),
        )

    def appended(how: str, ours: Any) -> TimeRow:
        work = f"hash {REQUEST_TOKENS:,} tokens, sha256, appended, {how}"
        return TimeRow(work, None, ours, partial(sides.append_to_stock_request, stock))

    def keyed(blocks: int, limit: float | None, cold: bool, ids: bool = True) -> Row:
        less = "" if ids else " (SGLang less slots)"
        return BesideRow(
            f"hash + match, keyed, {blocks:,} blocks, {asked(cold)}{less}",
            limit,
            partial(sides.match_tokens_keyed, blocks, cold),
            sglang and partial(sides.match_tokens_by_sglang, sglang, blocks, cold, ids),
        )

    def kept(blocks: int, cold: bool) -> Row:
        return BesideRow(
            f"match by kept tokens, {blocks:,} blocks, {asked(cold)}",
            None,
            partial(sides.match_tokens_keyed, blocks, cold, True),
            sglang and partial(sides.match_tokens_by_sglang, sglang, blocks, cold),
        )

    def sha256(blocks: int, cold: bool) -> TimeRow:
        return TimeRow(
            f"hash + match, sha256, {blocks:,} blocks, {asked(cold)}",
            None,
            partial(sides.match_tokens_sha256, blocks, cold),
            partial(sides.match_tokens_by_stock, stock, blocks, cold),
        )

    return [
        chain("sha256", "list", 5),
        chain("sha256", "int32 array", 7),
        chain("sha256_cbor", "list", 10),
        chain("sha256_cbor", "int32 array", 10),
        chain("xxhash", "list", None),
        chain("xxhash", "int32 array", None),
        chain("xxhash_cbor", "list", None),
        chain("xxhash_cbor", "int32 array", None),
        one_a_call("sha256"),
        one_a_call("sha256_cbor"),
        one_a_call("xxhash"),
        one_a_call("xxhash_cbor"),
        request("list"),
        request("int32 array"),
        appended("BlockHasher", sides.append_to_hasher),
        appended("get_request_block_hasher", sides.append_to_our_request),
        keyed(63, 40, False),
        keyed(2_000, 45, False),
        keyed(63, None, True),
        keyed(2_000, None, True),
        *(keyed(n, None, cold, False) for n, cold in LOOKUPS if sglang),
        *(kept(n, cold) for n, cold in LOOKUPS),
        sha256(63, False),
        sha256(2_000, False),
        sha256(63, True),
        sha256(2_000, True),
    ]


def asked(cold: bool) -> str:
    return "in turns" if cold else "again"
