"""The errors of kvcache's own; all others are plain ValueError or TypeError.

A failed call changes nothing: whoever catches one of these may go on.
"""


class NoFreeBlocksError(ValueError):
    """Fewer blocks are free than were asked for (vLLM v1 raises ValueError here)."""


class BlockStateError(ValueError, AssertionError):
    """A block is not in the state the call needs.

    Also an AssertionError, because that is what vLLM raises in these places and what
    its callers catch.
    """


LACK_OF_MEMORY = (MemoryError, SystemError)
"""What a lack of memory raises in other code: CPython 3.11 has a SystemError, "error
return without exception set", where it finds none for a Python function's frame."""
