"""The rows of the side-by-side table beside other engines than vLLM; no floors.

Stores nothing. A row is one line of `peer_rows`, as in pool_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lmdeploy_engine
import numpy as np
import peer_sides as sides
import tokenspeed_engine
from hashing_sides import CHAIN
from lmdeploy_engine import LMDeploy
from measure import Row, TimeRow
from peer_sides import TAIL, OurEngine
from pool_sides import BLOCK_SIZE, POOL, get_and_free_ids
from tokenspeed_engine import TokenSpeed

from kvcache import hashing

sha256_chain = partial(
    hashing.hash_blocks, block_size=BLOCK_SIZE, hash_fn=hashing.sha256
)
SIZES = (63, 2_000)  # blocks of a prompt
NOTES = (
    f"TokenSpeed, LMDeploy: nanoseconds a block of a prompt, {BLOCK_SIZE} tokens each"
    f" and {TAIL} more, served from tokens to block ids, one token generated, freed;"
    " ours by KVCacheManager, one request at a time. Insert: nothing of it is cached,"
    " and there is room; match: all of it, what half a pool holds in turns; evict:"
    " nothing of it, and every block holds something else. TokenSpeed's C++ scheduler"
    " is called as a whole, as it cannot be in parts, and plans input ids too; lists"
    " of tokens, SHA-256 on both sides. LMDeploy: its NumPy block manager and its trie"
    " in Python, less its scheduler; int64 arrays of tokens, which its trie compares,"
    " while ours goes by keyed. LMDeploy allocates ids of a pool of which half is in"
    " use, ours of one of which half is cached."
)


def peer_rows(tokenspeed: TokenSpeed | None, lmdeploy: LMDeploy | None) -> list[Row]:
    """The rows of those that are there."""
    rows: list[Row] = []
    works = {"insert": sides.insert, "match": sides.match, "evict": sides.evict}

    def served(name: str, form: Callable, hash_fn: Any, engine: Callable) -> list[Row]:
        """Both sides get the same prompts in the same form."""
        ours, theirs = partial(OurEngine, hash_fn), partial(engine, POOL, BLOCK_SIZE)
        return [
            TimeRow(
                f"{name}: {work} a prompt, {blocks:,} blocks",
                None,
                partial(side, ours, form, blocks),
                partial(side, theirs, form, blocks),
                against=name,
            )
            for work, side in works.items()
            for blocks in SIZES
        ]

    if tokenspeed:
        engine = partial(tokenspeed_engine.Engine, tokenspeed)
        rows += served("TokenSpeed", np.ndarray.tolist, hashing.sha256, engine)
        rows.append(
            TimeRow(
                f"TokenSpeed: hash {CHAIN:,} blocks, sha256, list",
                None,
                partial(sides.hash_list, sha256_chain),
                lambda: sides.hash_list(
                    tokenspeed_engine.hash_chain(tokenspeed, BLOCK_SIZE)
                ),
                against="TokenSpeed",
            )
        )
    if lmdeploy:
        engine = partial(lmdeploy_engine.Engine, lmdeploy)
        rows += served("LMDeploy", np.ascontiguousarray, hashing.keyed, engine)
        rows += [
            TimeRow(
                f"LMDeploy: allocate + free, ids, n = {n}",
                None,
                partial(get_and_free_ids, n),
                lambda n=n: sides.allocate_and_free(
                    lmdeploy_engine.allocator(lmdeploy, POOL), n
                ),
                against="LMDeploy",
            )
            for n in (10, 100, 1000)
        ]
    return rows
