"""How a pool words its events: from a request and hashes to records.

Holds no state and changes none: a pool calls these before it writes, so that a request
that cannot be read leaves the pool as it was. The event stream is vLLM 0.33's, event
for event: a Removed is emitted although another copy stays, and token_ids span blocks
that were skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.events import event_classes, external_hashes
from kvcache.hashing.block_hashes import get_block_hash, get_group_id
from kvcache.hashing.extra_keys import (
    first_mm_index,
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    to_event_extra_keys,
)


def _extra_keys(
    request: Any, start: int, end: int, lookahead: int, mm_idx: int
) -> tuple[Any, int]:
    if lookahead:
        return generate_lookahead_block_hash_extra_keys(
            request, start, end, end + lookahead, mm_idx
        )
    return generate_block_hash_extra_keys(request, start, end, mm_idx)


def stored_event(
    pool: Any,
    request: Any,
    *,
    block_hashes: list[bytes],
    parent: bytes | None,
    starts: Sequence[int],
    token_range: tuple[int, int],
    block_size: int,
    group_id: int,
) -> Any:
    """A BlockStored event for blocks of a request.

    Args:
        pool: Whose medium and lookahead count.
        request: As vLLM's: `all_token_ids`, `lora_request`, `session_id`, and what
            extra keys are made of.
        block_hashes: Digests of the blocks.
        parent: Digest of the block before the first, or None.
        starts: First token of each of the blocks.
        token_range: The tokens the event carries.
        block_size: Tokens a block.
        group_id: KV-cache group.
    """
    lookahead = pool.num_hash_lookahead_tokens
    # A scan that starts inside the request skips the items that end before it.
    mm_idx = first_mm_index(request, starts[0]) if starts and starts[0] else 0
    extra_keys: list[Any] = []
    for start in starts:
        keys, mm_idx = _extra_keys(
            request, start, start + block_size, lookahead, mm_idx
        )
        extra_keys.append(keys)
    tokens = request.all_token_ids
    lora = request.lora_request
    behind = {}
    if lookahead:  # vLLM 0.32's class has no such field
        behind["lookahead_token_ids"] = [
            tokens[start + block_size : start + block_size + lookahead]
            for start in starts
        ]
    return event_classes().stored(
        block_hashes=external_hashes(block_hashes),
        parent_block_hash=None if parent is None else external_hashes([parent])[0],
        token_ids=tokens[token_range[0] : token_range[1]],
        block_size=block_size,
        lora_id=lora.adapter_id if lora else None,
        medium=pool.medium,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=group_id,
        session_id=request.session_id,
        **behind,
    )


def stored_event_of_ids(
    pool: Any,
    block_hashes: list[bytes],
    group_id: int,
    *,
    parent: bytes | None = None,
    token_ids: Sequence[int] = (),
) -> Any:
    """A BlockStored event for blocks cached by id: of no request, with what is known.

    Args:
        pool: Whose medium and hash block size.
        block_hashes: Digests of the blocks.
        group_id: KV-cache group.
        parent: Digest of the block before the first, if known.
        token_ids: Tokens of the blocks, if known.
    """
    return event_classes().stored(
        block_hashes=external_hashes(block_hashes),
        parent_block_hash=None if parent is None else external_hashes([parent])[0],
        token_ids=list(token_ids),
        block_size=pool.hash_block_size,
        lora_id=None,
        medium=pool.medium,
        lora_name=None,
        group_idx=group_id,
    )


def removed_events(pool: Any, keys: list[bytes]) -> list[Any]:
    """A BlockRemoved event for each key that a block lost."""
    removed = event_classes().removed
    hashes = external_hashes([get_block_hash(key) for key in keys])
    return [
        removed(block_hashes=[one], medium=pool.medium, group_idx=get_group_id(key))
        for one, key in zip(hashes, keys, strict=True)
    ]
