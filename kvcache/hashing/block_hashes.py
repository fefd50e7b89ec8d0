"""Block hashes: the keys made of them, and the view of a chain in larger blocks.

A key is a digest followed by its KV-cache group id, 4 bytes, big-endian (vLLM's
BlockHashWithGroupId). A hash chains over the whole prefix, so the hash of a block of k
small blocks is the hash of its last small one: nothing is ever rehashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

GROUP_ID_BYTES = 4


def make_block_hash_with_group_id(block_hash: bytes, group_id: int) -> bytes:
    """The key of a block hash in a group.

    Raises:
        ValueError: group_id is negative or needs more than 4 bytes.
    """
    try:
        return block_hash + group_id.to_bytes(GROUP_ID_BYTES, "big")
    except OverflowError:
        raise ValueError(
            f"group_id must be from 0 to 4294967295, got {group_id}"
        ) from None


def get_block_hash(key: bytes) -> bytes:
    """The block hash in a key."""
    return key[:-GROUP_ID_BYTES]


def get_group_id(key: bytes) -> int:
    """The group id in a key."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


class BlockHashListWithBlockSize(Sequence[bytes]):
    """A chain of hashes seen in blocks that are a multiple of the hashed ones.

    Args:
        block_hashes: Hashes of consecutive blocks of hash_block_size tokens; read as it
            grows, not copied.
        hash_block_size: Tokens that each of them adds.
        target_block_size: Tokens a block of this view; a multiple of hash_block_size.

    Raises:
        ValueError: It is not a multiple.
    """

    def __init__(
        self,
        block_hashes: Sequence[bytes],
        hash_block_size: int,
        target_block_size: int,
    ) -> None:
        if hash_block_size < 1 or target_block_size < 1:
            raise ValueError(
                f"block sizes must be positive, got {hash_block_size}"
                f" and {target_block_size}"
            )
        if target_block_size % hash_block_size:
            raise ValueError(
                f"block size {target_block_size} is not a multiple of the hashed"
                f" {hash_block_size}"
            )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        picked = range(len(self))[index]
        if isinstance(picked, range):
            return [self._at(i) for i in picked]
        return self._at(picked)

    def __iter__(self) -> Iterator[bytes]:
        return (self._at(i) for i in range(len(self)))

    def _at(self, index: int) -> bytes:
        return self.block_hashes[(index + 1) * self.scale_factor - 1]


def pick_block_hashes(
    block_hashes: Sequence[bytes],
    hash_block_size: int,
    block_size: int,
    blocks: Sequence[int],
) -> list[bytes]:
    """The hashes of some blocks of block_size tokens, as a new list.

    A sequence that has a `scale_factor` (such as `BlockHashListWithBlockSize`) already
    counts in blocks of that many hashes.

    Args:
        block_hashes: Hashes of consecutive blocks of hash_block_size tokens.
        hash_block_size: Tokens that each of them adds.
        block_size: Tokens of the blocks to pick; a multiple of hash_block_size.
        blocks: Their numbers, ascending.

    Raises:
        ValueError: block_size is no multiple, the sequence counts in another size, or
            there are fewer hashes than blocks.
    """
    scale = getattr(block_hashes, "scale_factor", 1)
    if block_size % hash_block_size or (
        scale != 1 and scale * hash_block_size != block_size
    ):
        raise ValueError(
            f"block size {block_size} does not fit hashes of {hash_block_size} tokens"
            f" seen {scale} at a time"
        )
    step = block_size // hash_block_size // scale
    if blocks and (blocks[-1] + 1) * step > len(block_hashes):
        raise ValueError(
            f"block {blocks[-1]} of {block_size} tokens needs"
            f" {(blocks[-1] + 1) * step} block hashes, the request has"
            f" {len(block_hashes)}"
        )
    if step > 1:
        return [block_hashes[(i + 1) * step - 1] for i in blocks]
    if isinstance(blocks, range):
        return list(block_hashes[blocks.start : blocks.stop])
    return [block_hashes[i] for i in blocks]
