"""The doubly linked queue of free blocks, front evicted first.

Stores: links inside `BlockMeta`; the anchor is row -1. A pool's queue threads the
pool's rows; a queue made by hand keeps its blocks' rows in a small store of its own.
Invariant: walking either way from the anchor meets each linked row once, num_free in
all. Costs: every step O(1), no Python object moved for a pool.
Threads: none of this is locked; the GIL or the caller's lock guards it.
"""
cimport cython
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport kvc_lend
from kvcache._types cimport MAX_BLOCKS
from kvcache.block_store cimport new_block

from kvcache.errors import BlockStateError, NoFreeBlocksError


@cython.final
@cython.no_gc_clear
cdef class FreeKVCacheBlockQueue:
    """vLLM's queue of free blocks, for blocks made by hand.

    The queue of a pool (`BlockPool.free_block_queue`) can be read; it changes through
    the pool alone, so that a block is linked if and only if nobody uses it.

    Args:
        blocks: Hand-made blocks in eviction order; none in a queue, none twice.

    Raises:
        TypeError, ValueError: An element is no such block.
    """

    def __cinit__(self, *args, **kwargs):
        self.stand_on(BlockStore())

    @cython.critical_section
    def __init__(self, blocks):
        if self.queue.num_free:
            raise ValueError("the queue is already made")
        self.append_n(blocks)

    def __dealloc__(self):
        if self.fake_free_list_tail is None:  # it was never made whole
            return
        # Both ends may outlive the queue; they then stand alone.
        with cython.critical_section(self):
            self.store.head = self.store.tail = NULL
            self.store.abandon(self.fake_free_list_head)
            self.store.abandon(self.fake_free_list_tail)

    def __reduce__(self):
        raise no_copy(self)

    @staticmethod
    cdef FreeKVCacheBlockQueue for_pool(BlockStore store):
        """The queue over a pool's rows, empty."""
        cdef FreeKVCacheBlockQueue made = FreeKVCacheBlockQueue.__new__(
            FreeKVCacheBlockQueue
        )
        made.of_pool = True
        made.stand_on(store)
        return made

    cdef int stand_on(self, BlockStore store) except -1:
        cdef KVCacheBlock head = new_block(-1), tail = new_block(-1)
        # From here on nothing fails: the ends are always of the store.
        self.fake_free_list_head, self.fake_free_list_tail = head, tail
        self.store = store
        self.queue.rows = self.store.rows
        head.index = tail.index = ANCHOR
        head.row = tail.row = &self.store.rows[ANCHOR]
        head.store = tail.store = <PyObject*> self.store
        self.store.head, self.store.tail = <PyObject*> head, <PyObject*> tail
        kvc_lend(self.store.head)
        kvc_lend(self.store.tail)
        return 0

    cdef int check_own(self) except -1:
        if self.of_pool:
            raise ValueError(
                "a pool's free queue changes through the pool: get_new_blocks,"
                " free_blocks, touch"
            )
        if self.store.tail_unlinked:
            raise BlockStateError("the fake tail of the queue was unlinked by hand")
        return 0

    cdef int check_holds(self, Py_ssize_t count) except -1:
        """Prove that so many blocks can be popped."""
        self.check_own()
        if count > self.queue.num_free:
            raise BlockStateError(
                f"cannot pop {count} blocks from a queue of {self.queue.num_free}"
            )
        return 0

    cdef KVCacheBlock take(self, block_id_t row):
        """Unlink a row and give its block back to itself."""
        cdef KVCacheBlock block = self.store.view(row)
        queue_unlink(&self.queue, row)
        self.store.release(block)
        return block

    cdef list adopt_all(self, object blocks):
        """Take blocks into the store, unlinked: all of them, or none and an error."""
        cdef list made = list(blocks)
        cdef set met = set()
        cdef KVCacheBlock block
        self.check_own()
        self.store.reserve(len(made))
        self.queue.rows = self.store.rows
        # From here on nothing runs that could change the queue.
        for item in made:
            if type(item) is not KVCacheBlock:
                raise TypeError(f"expected a KVCacheBlock, got {item!r}")
            block = item
            if block.loose is None:
                raise ValueError(f"block {block.id} belongs to a pool")
            if block.store != NULL:
                raise ValueError(f"block {block.id} is already in a queue")
            if id(item) in met:
                raise ValueError(f"block {block.id} is listed twice")
            met.add(id(item))
        for block in made:
            self.store.adopt(block)
        return made

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C: 68 a block there is room for, and 128. A pool's has none."""
        return 0 if self.of_pool else self.store.nbytes

    @property
    @cython.critical_section
    def num_free_blocks(self):
        """Length of the queue."""
        return self.queue.num_free

    @cython.critical_section
    def popleft(self):
        """Remove and return the first block.

        Raises:
            NoFreeBlocksError: The queue is empty.
        """
        self.check_own()
        if self.queue.num_free == 0:
            raise NoFreeBlocksError("No free blocks available")
        return self.take(self.queue.rows[ANCHOR].next_free_block)

    @cython.critical_section
    def popleft_n(self, n):
        """Remove and return the first n blocks.

        Raises:
            BlockStateError: n is more than the queue holds (vLLM asserts this).
            ValueError, TypeError: n is not an int from 0 on.
        """
        cdef Py_ssize_t count = as_int(n, "n", 0, MAX_BLOCKS), i
        cdef list taken
        cdef KVCacheBlock block
        self.check_holds(count)
        taken = PyList_New(count)
        self.check_holds(count)  # making the list may have run foreign code
        # From here on nothing fails.
        for i in range(count):
            block = self.take(self.queue.rows[ANCHOR].next_free_block)
            Py_INCREF(block)
            PyList_SET_ITEM(taken, i, block)
        return taken

    @cython.critical_section
    def remove(self, block):
        """Remove a block from wherever it stands in the queue.

        Raises:
            TypeError: It is no KVCacheBlock.
            ValueError: It is not in this queue.
        """
        self.check_own()
        if type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock, got {block!r}")
        cdef KVCacheBlock ours = block
        if ours.store != <PyObject*> self.store or ours.index == ANCHOR:
            raise ValueError(f"block {ours.id} is not in this queue")
        self.take(ours.index)

    @cython.critical_section
    def append(self, block):
        """Put a block at the back."""
        self.append_n([block])

    @cython.critical_section
    def append_n(self, blocks):
        """Put blocks at the back, in the order given.

        Raises:
            TypeError, ValueError: One is not a hand-made block outside any queue;
                nothing was appended.
            BlockStateError: The queue's fake tail was unlinked by hand.
        """
        cdef KVCacheBlock block
        for block in self.adopt_all(blocks):
            queue_push_back(&self.queue, block.index)

    @cython.critical_section
    def prepend_n(self, blocks):
        """Put blocks at the front; the first of them becomes the first of all.

        Raises: as `append_n`.
        """
        cdef KVCacheBlock block
        cdef block_id_t at = ANCHOR
        for block in self.adopt_all(blocks):
            queue_insert_after(&self.queue, at, block.index)
            at = block.index

    @cython.critical_section
    def get_all_free_blocks(self):
        """The blocks from front to back."""
        return list(self.iter_blocks_after(None))

    @cython.critical_section
    def iter_blocks_after(self, cursor):
        """Iterate over the blocks behind `cursor`, or over all if it is None.

        It reads the queue as it goes: it ends early when the block it stands on leaves
        the queue, as in vLLM.

        Raises:
            TypeError: cursor is neither a KVCacheBlock nor None.
            ValueError: cursor belongs to another queue.
        """
        if cursor is None:
            cursor = self.fake_free_list_head
        elif type(cursor) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock or None, got {cursor!r}")
        elif (<KVCacheBlock> cursor).store not in (NULL, <PyObject*> self.store):
            raise ValueError(f"block {cursor.block_id} belongs to another queue")
        return self._walk(cursor)

    def _walk(self, KVCacheBlock block not None):
        while True:
            block = block.neighbour(True)
            if block is None or block is self.fake_free_list_tail:
                return
            yield block
