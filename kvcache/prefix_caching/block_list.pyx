"""The blocks of a sequence beside their physical ids; the chain they form.

Stores: two lists of equal length.
Invariant: an id is that which the block at its place had when it was put there or last
appended to through this list; after a swap `update` reads them all again.
Costs: O(1) a block; the ids of a whole sequence are there without a walk.
Threads: each call is atomic.
"""
cimport cython
from kvcache._args cimport no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache.errors import BlockStateError

cdef extern from "Python.h":
    Py_ssize_t PyNumber_AsSsize_t(object, object) except? -1


cdef object id_of(object block, Py_ssize_t index):
    try:
        block_id = block.block_id
    except AttributeError:
        raise TypeError(f"expected a block at {index}, got {block!r}") from None
    if block_id is None:
        raise BlockStateError(f"{block!r} at {index} has no physical block")
    return block_id


cdef class BlockList:
    """Blocks, and their physical ids ready to be given to the model.

    Args:
        blocks: Blocks in the order of their sequence, each with a physical block.

    Raises:
        BlockStateError: One has none.
        TypeError: One is no block.
    """

    def __cinit__(self, *args, **kwargs):
        self.reset()

    @cython.critical_section
    def __init__(self, blocks):
        self.update(blocks)

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def update(self, blocks):
        """Put these blocks in place of all that are there."""
        cdef list new_blocks = list(blocks)
        cdef Py_ssize_t index
        cdef list new_ids = [
            id_of(block, index) for index, block in enumerate(new_blocks)
        ]
        self._blocks, self._block_ids = new_blocks, new_ids

    cdef int add(self, object block) except -1:
        block_id = id_of(block, len(self._blocks))
        self._blocks.append(block)
        self._block_ids.append(block_id)
        return 0

    cdef int add_tokens(self, Py_ssize_t index, object token_ids) except -1:
        block = self._blocks[index]
        try:
            block.append_token_ids(token_ids)
        except BaseException:
            if block.block_id is not None:
                self._block_ids[index] = block.block_id
            raise
        self._block_ids[index] = id_of(block, index)
        return 0

    cdef int put(self, Py_ssize_t index, object block) except -1:
        block_id = id_of(block, index)
        self._blocks[index] = block
        self._block_ids[index] = block_id
        return 0

    cdef Py_ssize_t place(self, object block_index) except -1:
        """An index from the front, for one from either end."""
        cdef Py_ssize_t index = PyNumber_AsSsize_t(block_index, IndexError)
        cdef Py_ssize_t count = len(self._blocks)
        if not -count <= index < count:
            raise IndexError(f"there is no block {index} in a list of {count}")
        return index if index >= 0 else index + count

    @cython.critical_section
    def append(self, new_block):
        """Put a block behind the last."""
        self.add(new_block)

    @cython.critical_section
    def append_token_ids(self, block_index, token_ids):
        """Append tokens to one block, whose physical id may change by that."""
        self.add_tokens(self.place(block_index), token_ids)

    @cython.critical_section
    def __len__(self):
        return len(self._blocks)

    @cython.critical_section
    def __getitem__(self, block_index):
        return self._blocks[self.place(block_index)]

    @cython.critical_section
    def __setitem__(self, block_index, new_block):
        self.put(self.place(block_index), new_block)

    @cython.critical_section
    def reset(self):
        """Hold no blocks."""
        self._blocks, self._block_ids = [], []

    @cython.critical_section
    def list(self):
        """The blocks: the list itself, to be read only."""
        return self._blocks

    @cython.critical_section
    def ids(self):
        """The physical ids: the list itself, to be read only."""
        return self._block_ids


def get_all_blocks_recursively(last_block):
    """All blocks of a sequence, first to last, found through `prev_block`.

    There is no recursion: the name is vLLM's.

    Args:
        last_block: The sequence's last block.

    Raises:
        BlockStateError: The chain leads back into itself.
        TypeError: Something in it is no block.
    """
    cdef list blocks = []
    cdef Py_ssize_t compare_until = 2
    block = marked = last_block
    while True:
        blocks.append(block)
        try:
            block = block.prev_block
        except AttributeError:
            raise TypeError(f"{block!r} in the chain is no block") from None
        if block is None:
            break
        if block is marked:
            raise BlockStateError(
                f"the chain of {last_block!r} leads back into itself at {block!r}"
            )
        # A marked block that stands still for ever longer meets any circle.
        if len(blocks) == compare_until:
            marked = block
            compare_until *= 2
    blocks.reverse()
    return blocks
