"""KV-cache events: what a pool says it stored, removed or cleared.

Plain records with vLLM's fields and meanings (vllm.distributed.kv_events, 0.33). A pool
appends them to its `kv_event_queue`; `take_events` drains it.
`use_event_classes` puts other classes in their place, such as vLLM's own.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

ExternalBlockHash = bytes | int

MEDIUM_GPU = "GPU"


class KVCacheEvent:
    """Base of all events; equal and hashed by fields."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((type(self), _frozen(astuple(self))))  # type: ignore[call-overload]


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return value


@dataclass(slots=True)
class BlockStored(KVCacheEvent):
    """Blocks that a request cached, or reuses, in the order of its tokens.

    Attributes:
        block_hashes: External hash of each block (see `external_hash`).
        parent_block_hash: External hash of the block before the first, or None.
        token_ids: Tokens from the first block to the last; as in vLLM they also span
            blocks that were skipped, which have no hash here.
        block_size: Tokens a block.
        lora_id: Adapter id, or None.
        medium: Where the blocks are, such as "GPU".
        lora_name: Adapter name, or None.
        extra_keys: For each block what its hash covers beside tokens, or None.
        group_idx: KV-cache group.
        kv_cache_spec_kind: Set by an engine that knows it.
        kv_cache_spec_sliding_window: Likewise.
        locality: Likewise.
        ownership: Likewise.
        session_id: Session of the request, or None.
        lookahead_token_ids: For each block the tokens after it that its hash covers.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    __hash__ = KVCacheEvent.__hash__


@dataclass(slots=True)
class BlockRemoved(KVCacheEvent):
    """Hashes that a block lost. Another block may still hold the same content."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    __hash__ = KVCacheEvent.__hash__


@dataclass(slots=True)
class AllBlocksCleared(KVCacheEvent):
    """The whole cache was reset."""

    __hash__ = KVCacheEvent.__hash__


class EventClasses(NamedTuple):
    """The classes that pools build their events from."""

    stored: type[Any]
    removed: type[Any]
    cleared: type[Any]


OWN_EVENT_CLASSES = EventClasses(BlockStored, BlockRemoved, AllBlocksCleared)
_classes = OWN_EVENT_CLASSES


def event_classes() -> EventClasses:
    """The classes in use."""
    return _classes


def use_event_classes(classes: EventClasses) -> None:
    """Build all further events, of every pool, from these classes.

    Raises:
        TypeError: They are not three callables.
    """
    global _classes
    chosen = EventClasses(*classes)
    for one in chosen:
        if not callable(one):
            raise TypeError(f"an event class makes events, got {one!r}")
    _classes = chosen


def external_hashes(block_hashes: list[bytes]) -> list[ExternalBlockHash]:
    """Block hashes as events carry them.

    With `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` (default 1) the low 64 bits of each
    digest, read big-endian, as an unsigned int; else the digests themselves.
    """
    if not int(os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")):
        return list(block_hashes)
    return [int.from_bytes(one[-8:], "big") for one in block_hashes]
