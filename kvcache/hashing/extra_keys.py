"""Extra keys: what a block's hash covers beside its tokens.

In order: the LoRA adapter's name and path, the multimodal items that overlap the block
with their offset in it, the cache salt (first block only), the digest of prompt
embeddings. Each is tagged with its source, so that no two sources can collide. The
values, their order and the tags are vLLM 0.33's (v1/core/kv_cache_utils.py).

A request is duck-typed: `mm_features` (each with `identifier` and `mm_position.offset`
and `.length`, sorted by offset, not overlapping), `lora_request`, `cache_salt`,
`prompt_embeds`. Items that are out of order, overlap or have no length are refused: a
search among them could miss one, and the block would pass for plain text.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, SupportsIndex

ExtraKeys = tuple[Any, ...]


def check_mm_features(features: Any) -> None:
    """Refuse multimodal items whose places in the prompt are not usable.

    Args:
        features: All items of a request, or None.

    Raises:
        TypeError: An offset or a length is not an int.
        ValueError: An item has no length, begins before the prompt or before the end of
            the one before it.
    """
    end = 0
    for index, feature in enumerate(features or ()):
        position = feature.mm_position
        offset = getattr(position, "offset", None)
        length = getattr(position, "length", None)
        if offset is None or length is None:
            missing = "offset" if offset is None else "length"
            raise ValueError(f"multimodal item {index} has no {missing}")
        for name, value in (("offset", offset), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                raise TypeError(
                    f"the {name} of multimodal item {index} must be an int,"
                    f" got {value!r}"
                )
        if length < 1:
            raise ValueError(f"multimodal item {index} has the length {length}")
        if offset < end:
            raise ValueError(
                f"multimodal item {index} begins at token {offset}, before token {end}"
                f" where {'the one before it ends' if index else 'the prompt begins'}"
            )
        end = offset + length


def first_mm_index(request: Any, start: int) -> int:
    """Index of the first multimodal item that ends behind token `start`."""
    features = request.mm_features
    if not features:
        return 0
    return bisect_right(
        features, start, key=lambda f: f.mm_position.offset + f.mm_position.length
    )


def needs_extra_keys(request: Any, start: int) -> bool:
    """Whether a block that begins at token `start` or behind it may have extra keys."""
    if request.lora_request or request.prompt_embeds is not None:
        return True
    if start == 0 and request.cache_salt:
        return True
    features = request.mm_features
    if not features:
        return False
    last = features[-1].mm_position
    return bool(last.offset + last.length > start)


def blocks_extra_keys(
    request: Any, start: int, block_size: int, num_blocks: int, num_lookahead: int
) -> list[ExtraKeys | None] | None:
    """Extra keys of consecutive blocks, or None if none has any.

    Raises:
        TypeError, ValueError: See `check_mm_features`.
    """
    check_mm_features(request.mm_features)
    if not needs_extra_keys(request, start):
        return None
    mm_index = first_mm_index(request, start)
    keys: list[ExtraKeys | None] = []
    for block_start in range(start, start + num_blocks * block_size, block_size):
        if not needs_extra_keys(request, block_start):
            break
        end = block_start + block_size
        block_keys, mm_index = lookahead_extra_keys(
            request, block_start, end, end + num_lookahead, mm_index
        )
        keys.append(block_keys)
    return keys + [None] * (num_blocks - len(keys))


def _mm_keys(
    request: Any, start: int, end: int, index: int
) -> tuple[list[tuple[str, str, int]], int]:
    """Items from `index` on that overlap [start, end), and the index to go on with."""
    keys: list[tuple[str, str, int]] = []
    features = request.mm_features
    if not features:
        return keys, index
    last = features[-1].mm_position
    if last.offset + last.length <= start:
        return keys, index
    if index < 0:  # counted from the last item
        if -index > len(features):
            raise ValueError(f"no multimodal item {index}: there are {len(features)}")
        index += len(features)
    while index < len(features):
        position = features[index].mm_position
        item_end = position.offset + position.length
        if end <= position.offset:
            break
        if start < item_end:
            # The offset tells apart one item at two places in equal placeholders.
            identifier = features[index].identifier
            if identifier is None:
                raise ValueError(f"multimodal item {index} has no identifier")
            keys.append(("mm", identifier, position.offset - start))
            if end < item_end:
                break
        index += 1
    return keys, index


def _raw_bytes(tensor: Any) -> bytes:
    """The bytes of a NumPy array, or of a torch tensor of any dtype."""
    if hasattr(tensor, "tobytes"):
        return bytes(tensor.tobytes())
    torch = sys.modules["torch"]
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _prompt_embeds_keys(request: Any, start: int, end: int) -> list[tuple[str, bytes]]:
    if request.prompt_embeds is None:
        return []
    digests = request._prompt_embeds_per_block_hashes
    digest = digests.get((start, end))
    if digest is None:
        digest = hashlib.sha256(_raw_bytes(request.prompt_embeds[start:end])).digest()
        digests[start, end] = digest
    return [("prompt_embeds", digest)]


def block_extra_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys | None, int]:
    """`generate_block_hash_extra_keys` of a request whose items have been checked."""
    mm_keys, next_mm_idx = _mm_keys(
        request, start_token_idx, end_token_idx, start_mm_idx
    )
    keys: list[Any] = []
    lora = request.lora_request
    if lora:
        # The path too: a name can be pointed at another adapter.
        keys.append(("lora", lora.lora_name, lora.lora_path))
    keys += mm_keys
    if start_token_idx == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    keys += _prompt_embeds_keys(request, start_token_idx, end_token_idx)
    return (tuple(keys) if keys else None), next_mm_idx


def generate_block_hash_extra_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys | None, int]:
    """Extra keys of the block of tokens [start_token_idx, end_token_idx).

    Args:
        request: See the module.
        start_token_idx: First token of the block.
        end_token_idx: One past its last token.
        start_mm_idx: First multimodal item to look at; negative counts from the last.

    Returns:
        The keys, or None if there are none, and the item to look at first for the
        block after this one.

    Raises:
        TypeError, ValueError: See `check_mm_features`.
    """
    check_mm_features(request.mm_features)
    return block_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)


def lookahead_extra_keys(
    request: Any,
    start_token_idx: int,
    end_token_idx: int,
    hash_end_token_idx: int,
    start_mm_idx: int,
) -> tuple[ExtraKeys | None, int]:
    """The lookahead form for a request whose items have been checked."""
    keys, mm_idx = block_extra_keys(
        request, start_token_idx, hash_end_token_idx, start_mm_idx
    )
    while mm_idx > 0:
        position = request.mm_features[mm_idx - 1].mm_position
        if position.offset + position.length <= end_token_idx:
            break
        mm_idx -= 1
    return keys, mm_idx


def generate_lookahead_block_hash_extra_keys(
    request: Any,
    start_token_idx: int,
    end_token_idx: int,
    hash_end_token_idx: int,
    start_mm_idx: int,
) -> tuple[ExtraKeys | None, int]:
    """As `generate_block_hash_extra_keys`, for a hash that covers lookahead tokens.

    The keys cover tokens up to hash_end_token_idx; the returned item is the first one
    that reaches behind end_token_idx, because the next block overlaps it too.
    """
    check_mm_features(request.mm_features)
    return lookahead_extra_keys(
        request, start_token_idx, end_token_idx, hash_end_token_idx, start_mm_idx
    )


def to_event_extra_keys(
    extra_keys: Iterable[ExtraKeys | None] | None,
) -> list[ExtraKeys | None] | None:
    """Extra keys as events carry them, one entry a block: without their tags.

    A multimodal key becomes (identifier, offset), any other its first value alone.
    None if there are no blocks.
    """
    return [
        None
        if keys is None
        else tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
        for keys in extra_keys or ()
    ] or None
