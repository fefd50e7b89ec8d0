"""What the plugin makes for the vLLM that is there: functions around its own.

Holds no state. kvcache's hashing refuses what has no meaning, such as a negative token
id or a hash function that gives no bytes; vLLM's takes it. So what is refused goes to
vLLM's function, which was there before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import kvcache
from kvcache import events, hashing
from kvcache.hashing import functions

UTILS = "vllm.v1.core.kv_cache_utils"


class BlockPool032(kvcache.BlockPool):
    """`BlockPool` as vLLM 0.32 makes it: without `num_hash_lookahead_tokens`."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = events.MEDIUM_GPU,
    ) -> None:
        """See `BlockPool`."""
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            medium=medium,
        )


def hash_block_tokens_or(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`hash_block_tokens`, or vLLM's."""

    def hash_block_tokens(
        hash_function: Any,
        parent_block_hash: Any,
        curr_block_token_ids: Any,
        extra_keys: Any = None,
    ) -> Any:
        given = hash_function, parent_block_hash, curr_block_token_ids, extra_keys
        try:
            return hashing.hash_block_tokens(*given)
        except (TypeError, ValueError):
            return theirs(*given)

    return hash_block_tokens


def get_request_block_hasher_or(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`get_request_block_hasher`, or vLLM's."""

    def get_request_block_hasher(
        hash_block_size: int, caching_hash_fn: Any, num_hash_lookahead_tokens: Any = 0
    ) -> Callable[[Any], list[bytes]]:
        # vLLM 0.32 knows no lookahead; a bool, as its callers may pass, is an int.
        lookahead = int(num_hash_lookahead_tokens)
        behind = (lookahead,) if lookahead else ()
        stock = theirs(hash_block_size, caching_hash_fn, *behind)
        ours = hashing.get_request_block_hasher(
            hash_block_size, caching_hash_fn, lookahead
        )

        def request_block_hasher(request: Any) -> Any:
            try:
                return ours(request)
            except (TypeError, ValueError):
                return stock(request)

        return request_block_hasher

    return get_request_block_hasher


def init_none_hash_as(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    """`init_none_hash`: kvcache's root of hashes is vLLM's then."""

    def init_none_hash(hash_fn: Any) -> None:
        theirs(hash_fn)
        functions.NONE_HASH = importlib.import_module(UTILS).NONE_HASH

    return init_none_hash


AROUND = {
    "hash_block_tokens": hash_block_tokens_or,
    "get_request_block_hasher": get_request_block_hasher_or,
    "init_none_hash": init_none_hash_as,
}
