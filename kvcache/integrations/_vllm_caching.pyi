from typing import Any

def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None: ...
def free(self: Any, request_id: str) -> None: ...
def get_computed_blocks(
    self: Any, request: Any, max_cache_hit_length: int | None = None
) -> tuple[Any, int, int]: ...
def find_full(
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
) -> Any: ...
def find_window(
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
) -> Any: ...
