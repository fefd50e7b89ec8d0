"""A stand-in for vLLM: its module names, and nothing more than what is replaced."""

import importlib
from typing import Any, NamedTuple

STOCK = {
    "vllm.v1.core.kv_cache_utils": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "vllm.v1.core.block_pool": ["BlockPool", "BlockHashToBlockMap"],
    "vllm.distributed.kv_events": ["BlockStored", "BlockRemoved", "AllBlocksCleared"],
    "vllm.v1.core.single_type_kv_cache_manager": [
        "FullAttentionManager",
        "SlidingWindowManager",
    ],
    "vllm.v1.core.kv_cache_coordinator": ["KVCacheCoordinator"],
    "vllm.v1.core.kv_cache_manager": ["KVCacheManager"],
    "vllm.v1.kv_cache_interface": ["SlidingWindowSpec"],
}


def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
    self.left_to_vllm = f"cache_blocks to {num_computed_tokens}"


def free(self: Any, request_id: str) -> None:
    self.left_to_vllm = f"free of {request_id}"


def hash_block_tokens(
    hash_function: Any,
    parent_block_hash: Any,
    curr_block_token_ids: Any,
    extra_keys: Any = None,
) -> None: ...


def get_request_block_hasher(hash_block_size: Any, caching_hash_fn: Any) -> None: ...


def allocate_slots(
    self: Any,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: Any = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_blocks: bool = False,
    num_encoder_tokens: int = 0,
    full_sequence_must_fit: bool = False,
    reserved_blocks: int = 0,
    has_scheduled_reqs: bool = True,
    skip_zeroing_group_ids: tuple[int, ...] = (),
) -> str:
    return "vLLM's own"


def get_computed_blocks(
    self: Any, request: Any, max_cache_hit_length: Any = None
) -> str:
    return "vLLM's own"


class Spec(NamedTuple):
    block_size: int = 4
    prefix_cacheable: bool = True


def find_longest_cache_hit(
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: list[int],
    block_pool: Any,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> str:
    return "vLLM's own"


class Blocks(NamedTuple):
    """vLLM's KVCacheBlocks."""

    blocks: tuple[Any, ...]


def held(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
