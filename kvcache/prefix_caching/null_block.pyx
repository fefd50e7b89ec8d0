"""The placeholder for blocks that a sliding window has dropped.

Stores: the ordinary, empty block that gives it a physical id.
Invariant: nothing done to it changes anything: writing raises, freeing passes it over.
Costs: one physical block an allocator. Threads: it never changes.
"""
cimport cython

from kvcache._args cimport no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache.prefix_caching.interfaces import Block


cdef object refuse():
    return ValueError("a null block cannot be changed")


@cython.final
cdef class NullBlock:
    """Shows a block, and lets nobody change it.

    Args:
        proxy: The block. Whoever makes the null block keeps others from using it.
    """

    @cython.critical_section
    def __init__(self, proxy):
        if self._proxy is not None:
            raise refuse()
        if isinstance(proxy, NullBlock) or not isinstance(proxy, Block):
            raise TypeError(f"proxy must be an ordinary block, got {proxy!r}")
        self._proxy = proxy

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def __repr__(self):
        return f"NullBlock(block_id={self.block_id})"

    @cython.critical_section
    def append_token_ids(self, token_ids):
        """Raises ValueError, always."""
        raise refuse()

    @property
    @cython.critical_section
    def block_id(self):
        """Id of its physical block; setting it raises ValueError."""
        return self._proxy.block_id

    @block_id.setter
    @cython.critical_section
    def block_id(self, value):
        raise refuse()

    @property
    @cython.critical_section
    def token_ids(self):
        """The tokens, of which there are none; a new list."""
        return list(self._proxy.token_ids)

    @property
    @cython.critical_section
    def num_tokens_total(self):
        """Raises NotImplementedError: a placeholder is in no sequence."""
        raise NotImplementedError("a null block is in no sequence")

    @property
    @cython.critical_section
    def num_empty_slots(self):
        """As the block's; but no token may be appended."""
        return self._proxy.num_empty_slots

    @property
    @cython.critical_section
    def is_full(self):
        """As the block's: False."""
        return self._proxy.is_full

    @property
    @cython.critical_section
    def prev_block(self):
        """As the block's: None."""
        return self._proxy.prev_block

    @property
    @cython.critical_section
    def extra_hash(self):
        """None."""
        return None

    @property
    @cython.critical_section
    def computed(self):
        """As the block's; setting it raises ValueError."""
        return self._proxy.computed

    @computed.setter
    @cython.critical_section
    def computed(self, value):
        raise refuse()

    @property
    @cython.critical_section
    def last_accessed(self):
        """As the block's; setting it raises ValueError."""
        return self._proxy.last_accessed

    @last_accessed.setter
    @cython.critical_section
    def last_accessed(self, last_accessed_ts):
        raise refuse()

    @property
    @cython.critical_section
    def content_hash(self):
        """As the block's: None."""
        return self._proxy.content_hash


Block.register(NullBlock)
