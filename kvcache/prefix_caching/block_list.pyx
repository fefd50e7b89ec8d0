"""The blocks of a sequence beside their physical ids; the chain they form.

Stores: two lists of equal length, and 8 bytes a block in C.
Invariant: an id is that which the block at its place had when it was put there or last
appended to through this list; after a swap `update` reads them all again.
Costs: O(1) a block; the ids of a whole sequence are there without a walk.
Threads: each call is atomic.
"""
cimport cython
from kvcache._args cimport no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate, copy_bytes, deallocate
from kvcache.prefix_caching.blocks cimport NO_BLOCK_ID, TokenBlock
from kvcache.prefix_caching.null_block cimport NullBlock

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


cdef bint is_ours(object block) noexcept:
    return isinstance(block, (TokenBlock, NullBlock))


cdef int64_t read_id(object block) noexcept:
    """The id of one of kvcache's own blocks."""
    if isinstance(block, NullBlock):
        block = (<NullBlock> block)._proxy
    return (<TokenBlock> block).id if isinstance(block, TokenBlock) else NO_BLOCK_ID


cdef class BlockList:
    """Blocks, and their physical ids ready to be given to the model.

    Args:
        blocks: Blocks in the order of their sequence, each with a physical block.

    Raises:
        BlockStateError: One has none.
        TypeError: One is no block.
    """

    # A block's id changes with its tokens, and the int that shows it is an object.
    # Where there is no memory for that, `known` has the id until it is asked for.

    def __cinit__(self, *args, **kwargs):
        self.reset()

    @cython.critical_section
    def __init__(self, blocks):
        self.update(blocks)

    def __dealloc__(self):
        deallocate(self.known)

    def __reduce__(self):
        raise no_copy(self)

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C."""
        return self.capacity * sizeof(int64_t)

    cdef int reserve(self, Py_ssize_t n) except -1:
        """Room for n blocks."""
        cdef Py_ssize_t capacity = n + n // 2 + 8
        cdef void* bigger
        if n > self.capacity:
            bigger = allocate(capacity, sizeof(int64_t), "block ids")
            copy_bytes(bigger, self.known, self.capacity * sizeof(int64_t))
            deallocate(self.known)
            self.known, self.capacity = <int64_t*> bigger, capacity
        return 0

    cdef int extend(self, list blocks, list holes) except -1:
        self.reserve(len(self._blocks) + len(blocks))
        self.numbers.extend(holes)
        try:
            self._blocks.extend(blocks)
        except MemoryError:
            del self.numbers[len(self._blocks) :]
            raise
        return 0

    cdef void adopt(self, list blocks, list numbers) noexcept:
        self._blocks, self.numbers = blocks, numbers
        self.first_lacking = self.end_lacking = 0
        self.note_all(0)

    cdef void note(self, Py_ssize_t index) noexcept:
        self.known[index] = read_id(self._blocks[index])
        self.numbers[index] = None
        if self.first_lacking == self.end_lacking:
            self.first_lacking = index
        self.first_lacking = min(self.first_lacking, index)
        self.end_lacking = max(self.end_lacking, index + 1)

    cdef void note_all(self, Py_ssize_t start) noexcept:
        cdef Py_ssize_t index
        for index in range(start, len(self._blocks)):
            self.note(index)
        self.try_to_fill()

    cdef int fill(self) except -1:
        """Make the ints that are lacking."""
        cdef Py_ssize_t index
        cdef Py_ssize_t end = min(self.end_lacking, <Py_ssize_t> len(self.numbers))
        for index in range(self.first_lacking, end):
            if self.numbers[index] is None:
                self.numbers[index] = self.known[index]
        self.first_lacking = self.end_lacking = 0
        return 0

    cdef void try_to_fill(self) noexcept:
        try:
            self.fill()
        except MemoryError:
            pass  # `ids` tries again

    @cython.critical_section
    def update(self, blocks):
        """Put these blocks in place of all that are there."""
        cdef list new_blocks = list(blocks)
        cdef Py_ssize_t index
        cdef list new_ids = [
            id_of(block, index) for index, block in enumerate(new_blocks)
        ]
        self.reserve(len(new_blocks))
        self._blocks, self.numbers = new_blocks, new_ids
        self.first_lacking = self.end_lacking = 0

    cdef int add(self, object block) except -1:
        block_id = id_of(block, len(self._blocks))
        self.reserve(len(self._blocks) + 1)
        self.numbers.append(block_id)
        try:
            self._blocks.append(block)
        except MemoryError:
            self.numbers.pop()
            raise
        return 0

    cdef int add_tokens(self, Py_ssize_t index, object token_ids) except -1:
        block = self._blocks[index]
        try:
            block.append_token_ids(token_ids)
        except BaseException:
            if block.block_id is not None:
                self.numbers[index] = block.block_id
            raise
        if is_ours(block):
            self.note(index)
            self.try_to_fill()
        else:
            self.numbers[index] = id_of(block, index)
        return 0

    cdef int put(self, Py_ssize_t index, object block) except -1:
        if is_ours(block) and read_id(block) != NO_BLOCK_ID:
            self._blocks[index] = block
            self.note(index)
            self.try_to_fill()
            return 0
        block_id = id_of(block, index)
        self._blocks[index] = block
        self.numbers[index] = block_id
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
        self._blocks, self.numbers = [], []
        self.first_lacking = self.end_lacking = 0

    @cython.critical_section
    def list(self):
        """The blocks: the list itself, to be read only."""
        return self._blocks

    @cython.critical_section
    def ids(self):
        """The physical ids: the list itself, to be read only."""
        self.fill()
        return self.numbers

    @property
    @cython.critical_section
    def _block_ids(self):
        return self.ids()


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
