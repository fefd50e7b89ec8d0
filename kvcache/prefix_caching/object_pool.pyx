"""Block objects of any class, kept for reuse.

Stores: the objects that were given back, up to pool_size of them.
Invariant: an object is handed out again only when nobody else holds it, so a block that
was freed never turns into another sequence's under the hands of who kept it, and
giving one back twice is harmless. (vLLM 0.8.5 hands it out at once.)
Costs: O(1); objects are made when they are needed, not ahead.
Threads: each call is atomic.
"""
cimport cython
from cpython.object cimport PyObject

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS
from kvcache.prefix_caching.blocks cimport TokenBlock

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*) nogil


@cython.final
cdef class BlockPool:
    """Makes block objects, again from old ones where it can.

    Not `kvcache.BlockPool`, whose blocks are the physical ones.

    Args:
        block_size: Number of tokens that a full block has, at least 1.
        create_block: The block class, or what makes a block from the same arguments.
        allocator: Passed on to each block.
        pool_size: How many objects to keep at most, from 0 on.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range.
    """

    def __cinit__(self, *args, **kwargs):
        self.spare = []

    @cython.critical_section
    def __init__(self, block_size, create_block, allocator, pool_size):
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        if not callable(create_block):
            raise TypeError(f"create_block must be callable, got {create_block!r}")
        self.pool_size = as_int(pool_size, "pool_size", 0, 2**62)
        self.block_size, self.create_block = size, create_block
        self.allocator = allocator

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def increase_pool(self):
        """Keep twice as many objects."""
        self.pool_size = 2 * min(self.pool_size, 2**61)

    @cython.critical_section
    def init_block(
        self, prev_block, token_ids, block_size, physical_block_id, extra_hash=None
    ):
        """A block made from these arguments; see the block class."""
        cdef object block = None
        while block is None and self.spare:
            block = self.spare.pop()
            if Py_REFCNT(<PyObject*> block) > 1:
                block = None  # somebody looks at it still
        arguments = {
            "prev_block": prev_block,
            "token_ids": token_ids,
            "block_size": block_size,
            "allocator": self.allocator,
            "block_id": physical_block_id,
            "extra_hash": extra_hash,
        }
        if block is None:
            return self.create_block(**arguments)
        block.__init__(**arguments)
        return block

    @cython.critical_section
    def free_block(self, block):
        """Take an object back; its physical block is the allocator's business."""
        # kvcache's own are made once, and CPython keeps their memory.
        if len(self.spare) < self.pool_size and not isinstance(block, TokenBlock):
            self.spare.append(block)
