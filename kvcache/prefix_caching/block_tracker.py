"""What the prefix-caching allocator knows of a physical block that is in use.

Stores: whether it is in use, when it was last used, whether it is computed.
Invariant: a block that is not in use was never accessed and is not computed.
Costs: the allocator keeps this in C and makes a `BlockTracker` for who asks.
Threads: each call is atomic.
"""

from kvcache.errors import BlockStateError

# As a time: not since the block was taken.
_NEVER_ACCESSED = -1.0


class BlockTracker:
    """State of a physical block, as vLLM 0.8.5 shows it.

    Attributes:
        active: Whether the block is in use.
        last_accessed: When it was last used, in the caller's clock; -1 if never.
        computed: Whether its KV values are there.
    """

    __slots__ = ("active", "computed", "last_accessed")

    def __init__(self) -> None:
        self.active = False
        self.reset()

    @classmethod
    def of(cls, active: bool, last_accessed: float, computed: bool) -> "BlockTracker":
        """One with this state."""
        tracker = cls()
        tracker.active = active
        tracker.last_accessed = last_accessed
        tracker.computed = computed
        return tracker

    def reset(self) -> None:
        """Forget when the block was used and whether it is computed."""
        self.last_accessed = _NEVER_ACCESSED
        self.computed = False

    def enable(self) -> None:
        """The block is taken.

        Raises:
            BlockStateError: It is in use already.
        """
        if self.active:
            raise BlockStateError("the block is in use already")
        self.active = True
        self.reset()

    def disable(self) -> None:
        """The block is free.

        Raises:
            BlockStateError: It is free already.
        """
        if not self.active:
            raise BlockStateError("the block is free already")
        self.active = False
        self.reset()
