from collections.abc import Iterable

from kvcache.prefix_caching.interfaces import PrefixHash

NONE_HASH: int

def hash_block_tokens(
    is_first_block: bool,
    prev_block_hash: PrefixHash | None,
    cur_block_token_ids: Iterable[int],
    extra_hash: int | None = None,
) -> PrefixHash: ...
def hash_token_blocks(
    prev_block_hash: PrefixHash | None,
    token_ids: Iterable[int],
    block_size: int,
    extra_hash: int | None = None,
) -> list[PrefixHash]: ...
