"""One row of metadata per block, and `KVCacheBlock`, the Python view of a row.

Stores: `BlockMeta` rows in C, indexed by block id, shown as a NumPy structured array
without a copy. A pool's store has a fixed number of rows; a hand-made queue's store
takes blocks in (`adopt`) and gives them back (`release`).
Invariant: a row has at most one view, and a view reads the row where it is now.
Cost: 64 bytes a block; a view is made when first asked for, 8 bytes + one object.
Threads: none of this is locked; the GIL or the caller's lock guards it.
"""
cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

import os
from collections.abc import Sequence

import numpy as np

from kvcache._args cimport as_int, no_copy, read_key
from kvcache._lock cimport kvc_lend, kvc_try_incref
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport (
    ANCHOR,
    FLAG_NULL,
    MAX_BLOCKS,
    MAX_KEY_BYTES,
    MAX_REF_CNT,
    NO_NUM_TOKENS,
    NOT_LINKED,
    NULL_BLOCK,
    BlockMeta,
    Key,
    block_id_t,
    clear_hash,
)

from kvcache.errors import BlockStateError

cnp.import_array()

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()
    Py_ssize_t PyNumber_AsSsize_t(object, object) except? -1
    Py_ssize_t Py_REFCNT(PyObject*) nogil
    void PyObject_GC_Track(PyObject*)
    void PyObject_GC_UnTrack(void*)
    bint PyObject_GC_IsTracked(PyObject*)

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(
        PyTypeObject*, cnp.dtype, int, cnp.npy_intp*, cnp.npy_intp*, void*, int,
        PyObject*
    )
    int PyArray_SetBaseObject(cnp.ndarray, object) except -1
    void PyArray_CLEARFLAGS(cnp.ndarray, int)
    int NPY_ARRAY_WRITEABLE

# What a block reads whose row is nowhere: never written.
cdef BlockMeta blank
memset(&blank, 0, sizeof(BlockMeta))
blank.prev_free_block = blank.next_free_block = NOT_LINKED
blank.block_hash_num_tokens = NO_NUM_TOKENS

# Derived from the struct, so that the two cannot drift.
BLOCK_META_DTYPE = np.asarray(<BlockMeta[:1]> &blank).dtype

cdef size_t physical_memory = 2**63 - 1
if hasattr(os, "sysconf"):
    physical_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


cdef void* row_memory(Py_ssize_t capacity) except NULL:
    """Zeroed memory for capacity rows and the anchor, wherever a cache line begins."""
    cdef size_t count = <size_t> capacity + 2
    # The kernel may promise more than the machine has and kill us on first use.
    if count > physical_memory // sizeof(BlockMeta):
        raise MemoryError(
            f"{capacity} blocks need {int(count) * sizeof(BlockMeta)} bytes,"
            f" this machine has {physical_memory}"
        )
    return allocate(count, sizeof(BlockMeta), f"{capacity} blocks")


cdef BlockMeta* first_row(void* memory) noexcept:
    """Row 0 in such memory; row -1 is the anchor."""
    return <BlockMeta*> ((<uintptr_t> memory + 63) & ~<uintptr_t> 63) + 1


@cython.final
@cython.no_gc_clear
cdef class BlockStore:
    """The rows of a pool, as a sequence of `KVCacheBlock` and as a NumPy array.

    `store[i]`, slices (a list), `len`, iteration and unpacking work as on a list.

    Args:
        num_blocks: Number of rows, 0 to 2,147,483,646.

    Raises:
        MemoryError: There is not that much memory.
    """

    def __cinit__(self, num_blocks=0):
        cdef Py_ssize_t n = as_int(num_blocks, "num_blocks", 0, MAX_BLOCKS)
        cdef block_id_t i
        cdef BlockMeta* row
        self.memory = row_memory(n)
        self.rows = first_row(self.memory)
        self.num_blocks = <block_id_t> n
        kvc_lend(<PyObject*> self)
        for i in range(ANCHOR, self.num_blocks):
            row = &self.rows[i]
            row.block_hash_num_tokens = NO_NUM_TOKENS
            row.prev_free_block = row.next_free_block = NOT_LINKED
        self.rows[ANCHOR].prev_free_block = ANCHOR
        self.rows[ANCHOR].next_free_block = ANCHOR

    def __dealloc__(self):
        with cython.critical_section(self):
            self.tear_down()

    def __reduce__(self):
        raise no_copy(self)

    cdef void tear_down(self) noexcept:
        """Give live views rows of their own, and the memory back."""
        cdef block_id_t i
        # Leaving blocks a row of their own makes objects, which could run the
        # collector, and that any code, while the store is half gone.
        cdef bint collecting = PyGC_Disable()
        if self.views != NULL:
            for i in range(self.num_blocks):
                if self.views[i] != NULL:
                    if Py_REFCNT(self.views[i]) > 1:
                        self.abandon(<KVCacheBlock> self.views[i])
                    Py_DECREF(<object> self.views[i])
            deallocate(self.views)
        if self.adopted is not None:
            for block in self.adopted:
                if block is not None:
                    self.abandon(<KVCacheBlock> block)
        deallocate(self.vacant)
        deallocate(self.memory)
        if collecting:
            PyGC_Enable()

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C: the rows, and 8 a block once views were asked for.

        In a hand-made queue's store 4 a row in place of the latter.
        """
        cdef size_t size = (<size_t> self.num_blocks + 2) * sizeof(BlockMeta)
        if self.views != NULL:
            size += <size_t> self.num_blocks * sizeof(PyObject*)
        if self.vacant != NULL:
            size += <size_t> self.num_blocks * sizeof(block_id_t)
        return size

    @cython.critical_section
    def as_array(self):
        """The rows as a read-only structured array, shape (num_blocks,), no copy.

        Its dtype is `BLOCK_META_DTYPE`, made from the C struct. Only a pool's store
        has one: a queue's rows move when it grows.
        """
        if self.adopted is not None:
            raise ValueError("the rows of a hand-made queue cannot be an array")
        cdef cnp.npy_intp length = self.num_blocks
        cdef object dtype = BLOCK_META_DTYPE
        Py_INCREF(dtype)  # the call below takes one reference
        cdef cnp.ndarray array = PyArray_NewFromDescr(
            <PyTypeObject*> np.ndarray, <cnp.dtype> dtype,
            1, &length, NULL, self.rows, 0, NULL,
        )
        PyArray_SetBaseObject(array, self)
        Py_INCREF(self)
        PyArray_CLEARFLAGS(array, NPY_ARRAY_WRITEABLE)
        return array

    @cython.critical_section
    def __len__(self):
        return self.num_blocks

    @cython.critical_section
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self.view(i) for i in range(*index.indices(self.num_blocks))]
        cdef Py_ssize_t i = PyNumber_AsSsize_t(index, IndexError)
        if not -self.num_blocks <= i < self.num_blocks:
            raise IndexError(f"block {index} of {self.num_blocks}")
        return self.view(<block_id_t> (i + self.num_blocks if i < 0 else i))

    def __iter__(self):
        cdef block_id_t i
        for i in range(self.num_blocks):
            yield self.view(i)

    @cython.critical_section
    def __reversed__(self):
        return reversed(self[:])

    @cython.critical_section
    def __contains__(self, block):
        return type(block) is KVCacheBlock and (
            (<KVCacheBlock> block).store == <PyObject*> self
            and not (<KVCacheBlock> block).is_end()
        )

    @cython.critical_section
    def count(self, block):
        """1 if the block is one of these, else 0."""
        return int(block in self)

    @cython.critical_section
    def index(self, block):
        """Where the block stands, which is its id.

        Raises:
            ValueError: It is none of these.
        """
        if block not in self:
            raise ValueError(f"{block!r} is not one of these blocks")
        return (<KVCacheBlock> block).index

    cdef KVCacheBlock view(self, block_id_t index):
        """The view of a row; it is made once and lives as long as the store."""
        if self.adopted is not None:
            return <KVCacheBlock> self.adopted[index]
        if self.views == NULL:
            self.views = <PyObject**> allocate(
                self.num_blocks, sizeof(PyObject*), "views"
            )
        if self.views[index] != NULL:
            return <KVCacheBlock> self.views[index]
        cdef KVCacheBlock block = KVCacheBlock.__new__(KVCacheBlock)
        # Making an object may run the collector, and that any code.
        if self.views[index] != NULL:
            return <KVCacheBlock> self.views[index]
        block.row = &self.rows[index]
        block.store = <PyObject*> self
        block.index = block.id = index
        Py_INCREF(block)
        self.views[index] = <PyObject*> block
        self.num_views += index != NULL_BLOCK
        return block

    cdef int reserve(self, Py_ssize_t extra) except -1:
        """Make sure that the next `extra` blocks can be adopted without failing."""
        cdef Py_ssize_t old, new
        cdef list spare
        if self.adopted is None:
            self.adopted = []
        while self.num_vacant < extra:
            old = self.num_blocks
            new = old + max(extra - self.num_vacant, old)
            if new > MAX_BLOCKS:
                raise MemoryError(f"a queue cannot hold {new} blocks")
            spare = [None] * (new - old)
            # Making a list may run the collector, and that any code.
            if old == self.num_blocks:
                self.grow(<block_id_t> new, spare)
        return 0

    cdef int grow(self, block_id_t new, list spare) except -1:
        """Have so many rows, of a hand-made queue, or as many as before."""
        cdef block_id_t old = self.num_blocks, i
        cdef void* memory = NULL
        cdef BlockMeta* rows = self.rows
        cdef block_id_t* vacant = <block_id_t*> allocate(
            new, sizeof(block_id_t), "vacant rows"
        )
        try:
            memory = row_memory(new)
            self.adopted.extend(spare)
        except MemoryError:
            deallocate(vacant)
            deallocate(memory)
            raise
        # The new ones go when those that there were are gone, the lowest first.
        for i in range(new - old):
            vacant[i] = new - 1 - i
        if self.num_vacant:
            memcpy(
                vacant + (new - old), self.vacant, self.num_vacant * sizeof(block_id_t)
            )
        self.rows = first_row(memory)
        memcpy(&self.rows[ANCHOR], &rows[ANCHOR], (old + 1) * sizeof(BlockMeta))
        deallocate(self.vacant)
        deallocate(self.memory)
        self.vacant, self.memory = vacant, memory
        self.num_vacant += new - old
        self.num_blocks = new
        for block in self.adopted:
            if block is not None:
                (<KVCacheBlock> block).row = &self.rows[(<KVCacheBlock> block).index]
        if self.head != NULL:
            (<KVCacheBlock> self.head).row = &self.rows[ANCHOR]
            (<KVCacheBlock> self.tail).row = &self.rows[ANCHOR]
        return 0

    cdef void adopt(self, KVCacheBlock block) noexcept:
        """Move a loose block's row in here. `reserve` has made room."""
        self.num_vacant -= 1
        cdef block_id_t index = self.vacant[self.num_vacant]
        self.adopted[index] = block
        self.rows[index] = block.loose.row
        block.row = &self.rows[index]
        block.store = <PyObject*> self
        block.index = index
        block.loose.prev_free_block = block.loose.next_free_block = None

    cdef void release(self, KVCacheBlock block) noexcept:
        """Give an adopted block its own row back."""
        cdef block_id_t index = block.index
        block.loose.row = self.rows[index]
        block.loose.row.prev_free_block = block.loose.row.next_free_block = NOT_LINKED
        block.row = &block.loose.row
        block.store = NULL
        self.vacant[self.num_vacant] = index
        self.num_vacant += 1
        self.adopted[index] = None

    cdef void abandon(self, KVCacheBlock block) noexcept:
        """The store goes first: leave the block a private copy of its row."""
        cdef BlockMeta copy = block.row[0]
        copy.prev_free_block = copy.next_free_block = NOT_LINKED
        block.row = &blank
        block.store = NULL
        if block.loose is None:
            block.loose = Loose.__new__(Loose)
            block.loose.orphan = True
        block.loose.row = copy
        block.row = &block.loose.row


@cython.final
cdef class Loose:
    """What a hand-made block owns: its row while it is in no queue, its links, pool."""


cdef object borrowed(PyObject* thing):
    """What a borrowed pointer names, or None if it is gone or just being torn down."""
    if thing == NULL or not kvc_try_incref(thing):
        return None
    found = <object> thing
    Py_DECREF(found)
    return found


cdef KVCacheBlock new_block(block_id_t block_id):
    """A hand-made block in its initial state."""
    cdef KVCacheBlock block = KVCacheBlock.__new__(KVCacheBlock)
    block.loose = Loose.__new__(Loose)
    block.loose.row = blank
    block.row = &block.loose.row
    block.id = block_id
    return block


@cython.final
cdef class KVCacheBlock:
    """One block's metadata, as vLLM's `KVCacheBlock` shows it.

    A pool's block is a view of the pool's row: it is made when first asked for, keeps
    its identity, and holds no reference to the pool. One made by hand owns its row.
    Blocks compare by their fields (neighbours by id) and cannot be hashed or pickled.

    Args:
        block_id: Any int32.
        ref_cnt: Number of users, 0 or more.
        _block_hash: Key (digest + 4-byte group id), 1 to 36 bytes, or None.
        _block_hash_num_tokens: Prefix tokens the hash covers, or None.
        prev_free_block: Neighbour, as long as the block is in no queue.
        next_free_block: Likewise.
        is_null: Whether it is a null block.
        pool: Where `BlockPool.free_blocks` sends the block.

    Raises:
        ValueError, TypeError: A field is out of range or of the wrong type.
    """

    def __cinit__(self):
        # A view refers to nothing that the collector needs to know.
        PyObject_GC_UnTrack(<void*> self)
        self.row = &blank

    @cython.critical_section
    def __init__(
        self,
        block_id,
        ref_cnt=0,
        _block_hash=None,
        _block_hash_num_tokens=None,
        prev_free_block=None,
        next_free_block=None,
        is_null=False,
        *,
        pool=None,
    ):
        if self.row != &blank:
            raise ValueError(f"block {self.id} is already made")
        cdef KVCacheBlock made = new_block(
            <block_id_t> as_int(block_id, "block_id", -2**31, 2**31 - 1)
        )
        made.ref_cnt = ref_cnt
        if _block_hash is not None or _block_hash_num_tokens is not None:
            made.set_block_hash(_block_hash, _block_hash_num_tokens)
        made.is_null = is_null
        self.id, self.loose = made.id, made.loose
        self.row = &self.loose.row
        self.set_neighbour(False, prev_free_block)
        self.set_neighbour(True, next_free_block)
        self.loose.pool = pool
        if pool is not None and not PyObject_GC_IsTracked(<PyObject*> self):
            PyObject_GC_Track(<PyObject*> self)

    def __reduce__(self):
        raise no_copy(self)

    cdef bint is_end(self) noexcept:
        """Whether this is the fake head or tail of a queue."""
        return self.store != NULL and self.index == ANCHOR

    cdef int require_loose(self, str what) except -1:
        if self.loose is None:
            raise ValueError(f"{what} of block {self.id} is its pool's to set")
        if self.store != NULL:
            raise ValueError(f"{what} of block {self.id} is its queue's to set")
        return 0

    @property
    @cython.critical_section
    def block_id(self):
        """Id of the block; writable on a hand-made block that is in no queue."""
        return self.id

    @block_id.setter
    @cython.critical_section
    def block_id(self, value):
        self.require_loose("block_id")
        self.id = as_int(value, "block_id", -2**31, 2**31 - 1)

    @property
    @cython.critical_section
    def ref_cnt(self):
        """Number of users.

        On a pool's block it may be set from one positive number to another: taking
        the first reference and giving back the last one are the pool's to do.
        """
        return self.row.ref_cnt

    @ref_cnt.setter
    @cython.critical_section
    def ref_cnt(self, value):
        cdef Py_ssize_t new = as_int(value, "ref_cnt", 0, MAX_REF_CNT)
        if self.loose is None and (new == 0 or self.row.ref_cnt == 0):
            raise ValueError(
                f"ref_cnt of block {self.id} cannot be set from {self.row.ref_cnt} to"
                f" {new}: crossing zero is its pool's to do"
            )
        self.row.ref_cnt = <int> new

    @property
    @cython.critical_section
    def is_null(self):
        """Whether this is a null block, which holds no content."""
        return bool(self.row.flags & FLAG_NULL)

    @is_null.setter
    @cython.critical_section
    def is_null(self, value):
        self.require_loose("is_null")
        self.row.flags = FLAG_NULL if value else 0

    @property
    @cython.critical_section
    def pool(self):
        """The block's pool, or None once it is gone."""
        if self.loose is not None:
            return self.loose.pool
        if self.store == NULL:
            return None
        return borrowed((<BlockStore> self.store).owner)

    @property
    @cython.critical_section
    def block_hash(self):
        """Primary key of the cached content: digest + 4-byte group id, or None."""
        if self.row.block_hash_len == 0:
            return None
        return (<char*> self.row.block_hash)[: self.row.block_hash_len]

    @property
    @cython.critical_section
    def _block_hash(self):
        return self.block_hash

    @_block_hash.setter
    @cython.critical_section
    def _block_hash(self, value):
        # vLLM's dataclass has this as a plain field, and its tests set it.
        cdef Key key
        if value is not None:
            read_key(value, &key)
        self.reset_hash()
        if value is not None:
            self.set_block_hash(value)

    @property
    @cython.critical_section
    def block_hash_num_tokens(self):
        """Prefix tokens that `block_hash` covers, or None."""
        if self.row.block_hash_num_tokens == NO_NUM_TOKENS:
            return None
        return self.row.block_hash_num_tokens

    @property
    @cython.critical_section
    def _block_hash_num_tokens(self):
        return self.block_hash_num_tokens

    @cython.critical_section
    def set_block_hash(self, block_hash, num_tokens=None):
        """Set the hash field alone, as in vLLM; no lookup answers with it.

        Raises:
            BlockStateError: The block has a hash already.
            ValueError: The key is not 1 to 36 bytes long.
        """
        cdef block_id_t tokens = NO_NUM_TOKENS
        cdef Key key
        read_key(block_hash, &key)
        if num_tokens is not None:
            tokens = <block_id_t> as_int(num_tokens, "num_tokens", 0, MAX_BLOCKS)
        if self.row.block_hash_len or self.row.block_hash_num_tokens != NO_NUM_TOKENS:
            raise BlockStateError(
                f"block {self.id} already has the hash {self.block_hash!r},"
                f" it cannot take {block_hash!r}"
            )
        if self.row == &blank:
            raise ValueError("the block was not initialised")
        memcpy(self.row.block_hash, key.words, MAX_KEY_BYTES)
        self.row.block_hash_len = <unsigned char> key.length
        self.row.block_hash_num_tokens = tokens

    @cython.critical_section
    def reset_hash(self):
        """Drop the hash, and on a pool's block every entry that names the block."""
        index = None
        if self.loose is None and self.store != NULL:
            index = borrowed((<BlockStore> self.store).map)
        if index is not None:
            index._drop_block(self.index)
        elif self.row != &blank:
            clear_hash(self.row)

    cdef object neighbour(self, bint forward):
        cdef block_id_t link
        if self.store == NULL:
            if self.loose is None:
                return None
            if forward:
                return self.loose.next_free_block
            return self.loose.prev_free_block
        # It may be going: then it waits for the lock, to leave this block its own row.
        found = borrowed(self.store)
        if found is None:
            return None
        cdef BlockStore store = <BlockStore> found
        cdef PyObject* me = <PyObject*> self
        if forward:
            if me == store.tail:
                return None
            link = self.row.next_free_block
        else:
            if me == store.head or (me == store.tail and store.tail_unlinked):
                return None
            link = self.row.prev_free_block
        if link == NOT_LINKED:
            return None
        if link != ANCHOR:
            return store.view(link)
        me = store.tail if forward else store.head
        return borrowed(me)

    cdef int set_neighbour(self, bint forward, object block) except -1:
        if block is not None and type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock or None, got {block!r}")
        cdef str name = "next_free_block" if forward else "prev_free_block"
        if self.store != NULL and block is None and not forward:
            if <PyObject*> self == (<BlockStore> self.store).tail:
                if (<BlockStore> self.store).owner == NULL:
                    (<BlockStore> self.store).tail_unlinked = True
                    return 0
        self.require_loose(name)
        if forward:
            self.loose.next_free_block = block
        else:
            self.loose.prev_free_block = block
        # Only such a link can close a cycle of references.
        if block is not None and not PyObject_GC_IsTracked(<PyObject*> self):
            PyObject_GC_Track(<PyObject*> self)
        return 0

    @property
    @cython.critical_section
    def prev_free_block(self):
        """The block before this one in its free queue, or None."""
        return self.neighbour(False)

    @prev_free_block.setter
    @cython.critical_section
    def prev_free_block(self, block):
        self.set_neighbour(False, block)

    @property
    @cython.critical_section
    def next_free_block(self):
        """The block after this one in its free queue, or None."""
        return self.neighbour(True)

    @next_free_block.setter
    @cython.critical_section
    def next_free_block(self, block):
        self.set_neighbour(True, block)

    @cython.critical_section
    def _fields(self):
        before, after = self.neighbour(False), self.neighbour(True)
        return (
            self.id,
            self.row.ref_cnt,
            self.block_hash,
            self.block_hash_num_tokens,
            None if before is None else before.block_id,
            None if after is None else after.block_id,
            self.is_null,
        )

    @cython.critical_section
    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is not KVCacheBlock:
            return NotImplemented
        return self._fields() == (<KVCacheBlock> other)._fields()

    @cython.critical_section
    def __repr__(self):
        block_id, ref_cnt, block_hash, num_tokens, before, after, _ = self._fields()
        return (
            f"KVCacheBlock(block_id={block_id}, ref_cnt={ref_cnt},"
            f" _block_hash={block_hash!r}, _block_hash_num_tokens={num_tokens},"
            f" prev_free_block={before}, next_free_block={after})"
        )


Sequence.register(BlockStore)
