"""What identifies the content of a block: its hash, its key, its extra keys."""

from kvcache.hashing.block_hashes import (
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvcache.hashing.extra_keys import (
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    to_event_extra_keys,
)

__all__ = [
    "BlockHashListWithBlockSize",
    "generate_block_hash_extra_keys",
    "generate_lookahead_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "make_block_hash_with_group_id",
    "to_event_extra_keys",
]
