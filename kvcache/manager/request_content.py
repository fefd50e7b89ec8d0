"""What identifies a request's content, and what its events say about it.

Stores: tokens through a `BlockHasher`, or hashes that the caller made; LoRA adapter,
multimodal items, cache salt and prompt embeddings, as vLLM's requests have them.
Invariant: `block_hashes` are those of the tokens there are.
Costs: 8 bytes a token where tokens are kept. Threads: as the manager that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcache.hashing import BlockHasher
from kvcache.hashing.extra_keys import check_mm_features, generate_block_hash_extra_keys


class RequestContent:
    """The content of one request; `BlockPool` reads it as it reads vLLM's requests.

    Args:
        hash_block_size: Tokens that each block hash adds.
        hash_fn: What makes the hashes of tokens.
        tokens: Prompt tokens; None if the caller gives hashes.
        hashes: Block hashes of the prompt, where it does.
        for_events: Whether events will tell the tokens: they are then kept as a list.
        lora_request: Has `adapter_id`, `name` and `path`, or None.
        mm_features: Multimodal items, see kvcache.hashing.extra_keys.
        cache_salt: Text that keeps the request's blocks to those with the same.
        prompt_embeds: Prompt embeddings, or None.
        session_id: What events say.
    """

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "cache_salt",
        "hasher",
        "lora_request",
        "mm_features",
        "prompt_embeds",
        "session_id",
    )

    def __init__(
        self,
        hash_block_size: int,
        hash_fn: Callable[[Any], bytes],
        tokens: Any = None,
        hashes: Iterable[bytes] = (),
        *,
        for_events: bool = False,
        lora_request: Any = None,
        mm_features: Sequence[Any] = (),
        cache_salt: str | None = None,
        prompt_embeds: Any = None,
        session_id: str | None = None,
    ) -> None:
        check_mm_features(mm_features)
        self.lora_request = lora_request
        self.mm_features = mm_features
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds
        self.session_id = session_id
        self.all_token_ids: list[int] | None = [] if for_events else None
        self.hasher: BlockHasher | None = None
        self.block_hashes: list[bytes] = []
        if tokens is None:
            self.block_hashes = list(hashes)
            return
        plain = not (lora_request or mm_features or cache_salt)
        extra_keys = None if plain and prompt_embeds is None else self._extra_keys
        self.hasher = BlockHasher(hash_block_size, hash_fn, extra_keys=extra_keys)
        self.block_hashes = self.hasher.block_hashes
        if not hasattr(tokens, "__len__"):
            raise TypeError(f"a prompt must be a sequence of tokens, got {tokens!r}")
        self.append(tokens)

    def _extra_keys(self, start: int, end: int) -> Any:
        return generate_block_hash_extra_keys(self, start, end, 0)[0]

    def append(self, tokens: Any) -> list[bytes]:
        """Add tokens; the hashes of blocks that became full."""
        assert self.hasher is not None
        before = self.hasher.num_tokens
        fresh = self.hasher.append(tokens)
        if self.all_token_ids is not None:
            try:
                self.all_token_ids += self.hasher.token_ids[before:].tolist()
            except BaseException:
                self.hasher.truncate(before)
                raise
        return fresh

    def truncate(self, num_tokens: int, num_hashes: int) -> None:
        """Forget all tokens but the first, and the hashes that cover others."""
        if self.hasher is None:
            del self.block_hashes[num_hashes:]
            return
        cut = []
        if self.all_token_ids is not None:
            cut = self.all_token_ids[num_tokens:]
            del self.all_token_ids[num_tokens:]
        try:
            self.hasher.truncate(num_tokens)
        except BaseException:
            if self.all_token_ids is not None:
                self.all_token_ids += cut
            raise
