"""What identifies the content of a block: its hash, its key, its extra keys."""

from typing import Any

from kvcache.hashing import functions
from kvcache.hashing.block_hasher import BlockHasher, get_request_block_hasher
from kvcache.hashing.block_hashes import (
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from kvcache.hashing.blocks import hash_block_tokens, hash_blocks
from kvcache.hashing.extra_keys import (
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    to_event_extra_keys,
)
from kvcache.hashing.functions import (
    get_hash_fn_by_name,
    init_none_hash,
    keyed,
    resolve_none_hash_seed,
    sha256,
    sha256_cbor,
    xxhash,
    xxhash_cbor,
)
from kvcache.hashing.keyed_hash import Keyed

__all__ = [
    "BlockHashListWithBlockSize",
    "BlockHasher",
    "Keyed",
    "generate_block_hash_extra_keys",
    "generate_lookahead_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "hash_blocks",
    "init_none_hash",
    "keyed",
    "make_block_hash_with_group_id",
    "resolve_none_hash_seed",
    "sha256",
    "sha256_cbor",
    "to_event_extra_keys",
    "xxhash",
    "xxhash_cbor",
]


def __getattr__(name: str) -> Any:
    # The root as it is now: `init_none_hash` may have chosen another.
    if name == "NONE_HASH":
        return functions.NONE_HASH
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
