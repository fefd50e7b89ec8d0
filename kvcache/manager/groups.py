"""Which layers share a block table: the KV cache groups of a model.

Each class is one kind of attention and says how a request's blocks are kept: all of
them, those in a window, or the state alone. They store their arguments; a manager reads
them once. The behaviour is that of vLLM 0.33's specs of the same kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

# Tokens a block and a window: what a block table of 32-bit ids can still hold.
_LIMIT = 2**31 - 2


@dataclass(frozen=True)
class Group:
    """What all kinds have in common.

    Attributes:
        block_size: Tokens a block, at least 1.
        kind: What events call it.
    """

    kind: ClassVar[str]
    block_size: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                if type(value) is not int:
                    raise TypeError(f"{field.name} must be an int, got {value!r}")
                low = 0 if field.name.startswith(("extra_", "num_")) else 1
                if not low <= value <= _LIMIT:
                    raise ValueError(
                        f"{field.name} must be from {low} to {_LIMIT}, got {value}"
                    )
            elif field.type == "bool" and type(value) is not bool:
                raise TypeError(f"{field.name} must be a bool, got {value!r}")


@dataclass(frozen=True)
class FullAttention(Group):
    """Every token attends to all before it: all blocks are kept.

    Attributes:
        eagle: Whether an EAGLE draft model reads this group, so that the last block of
            a hit is computed again.
    """

    kind: ClassVar[str] = "full_attention"
    eagle: bool = False


@dataclass(frozen=True)
class SlidingWindow(Group):
    """A token attends to itself and the window - 1 before it.

    Attributes:
        window: Tokens in the window, at least 1.
        eagle: As FullAttention's.
        extra_retained_tokens: How many more are kept before the window, for drafts
            that compute the last ones again.
    """

    kind: ClassVar[str] = "sliding_window"
    window: int
    eagle: bool = False
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class ChunkedLocal(Group):
    """A token attends to those before it in its chunk.

    Attributes:
        chunk: Tokens a chunk, at least 1.
    """

    kind: ClassVar[str] = "chunked_local_attention"
    chunk: int


@dataclass(frozen=True)
class Mamba(Group):
    """A state stands for all tokens before it; not with prefix caching.

    Attributes:
        mode: vLLM's mamba_cache_mode: "none" (one state; block_size is then the longest
            sequence) or "all" (a state at the end of each block).
        num_speculative_blocks: Blocks for the states of draft tokens.
    """

    kind: ClassVar[str] = "mamba"
    mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("none", "all"):
            raise ValueError(f"mode must be 'none' or 'all', got {self.mode!r}")


@dataclass(frozen=True)
class CrossAttention(Group):
    """Tokens attend to the encoder's output; not with prefix caching."""

    kind: ClassVar[str] = "cross_attention"
