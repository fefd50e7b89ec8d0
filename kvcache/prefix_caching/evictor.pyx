"""Which free block gives up its content next: `LRUEvictor` and what makes one.

Stores: an entry per block in an `EvictionHeap`, its row by block id, its content hash.
Invariant: a block has one entry or none; the entry is moved when the block is accessed
and taken out when it is used again, so nothing stale is ever met.
Costs: every step O(log n); memory for the most blocks held at once.
Threads: none of this is locked; each call from Python is atomic.
"""
cimport cython
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_Check
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS, block_id_t
from kvcache.prefix_caching.eviction_heap cimport (
    EvictionEntry,
    heap_add,
    heap_check,
    heap_contains,
    heap_free,
    heap_grow,
    heap_init,
    heap_nbytes,
    heap_remove,
    heap_update,
)

import enum
import operator
from abc import ABC, abstractmethod
from types import MappingProxyType

cdef enum:
    FIRST_ROWS = 16         # room that an LRUEvictor makes at first


cdef double as_time(object value) except? -1:
    """A time in the caller's unit, an int or a float; NaN has no place in an order."""
    cdef double time
    if not PyFloat_Check(value):
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"last_accessed must be an int or a float, got {value!r}")
        try:
            return operator.index(value)
        except OverflowError:
            raise ValueError("last_accessed is an int too large for a float") from None
    time = PyFloat_AS_DOUBLE(value)
    if time != time:
        raise ValueError("last_accessed is NaN")
    return time


cdef object as_hash(object value):
    """A content hash, an int of any size, and of no class derived from int."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"content_hash must be an int, got {value!r}")
    return operator.index(value)


class EvictionPolicy(enum.Enum):
    """Which evictor `make_evictor` makes (vLLM's name and member)."""

    LRU = enum.auto()


class Evictor(ABC):
    """Picks the free cached block that gives up its content next (vLLM's interface)."""

    @abstractmethod
    def __init__(self): ...

    @abstractmethod
    def __contains__(self, block_id): ...

    @abstractmethod
    def evict(self):
        """Take out the block to go: (block id, content hash)."""

    @abstractmethod
    def add(self, block_id, content_hash, num_hashed_tokens, last_accessed):
        """Take in a block that nobody uses any more."""

    @abstractmethod
    def update(self, block_id, last_accessed):
        """Set when the content of a block in it was last accessed."""

    @abstractmethod
    def remove(self, block_id):
        """Take out a block whose content is used again."""

    @property
    @abstractmethod
    def num_blocks(self):
        """How many blocks could be evicted."""


@cython.final
@cython.no_gc
cdef class BlockMetaData:
    """What an evictor knows of a block: a snapshot, read-only.

    Args:
        content_hash: Hash of the block's tokens and of all before them.
        num_hashed_tokens: Tokens in the prefix that ends with the block.
        last_accessed: When its content was last accessed, in the caller's unit.
    """

    def __cinit__(self, content_hash, num_hashed_tokens, last_accessed):
        self.content_hash = as_hash(content_hash)
        self.num_hashed_tokens = as_int(
            num_hashed_tokens, "num_hashed_tokens", 0, INT64_MAX
        )
        self.last_accessed = as_time(last_accessed)

    @cython.critical_section
    def __eq__(self, other):
        if not isinstance(other, BlockMetaData):
            return NotImplemented
        return (self.content_hash, self.num_hashed_tokens, self.last_accessed) == (
            other.content_hash, other.num_hashed_tokens, other.last_accessed
        )

    @cython.critical_section
    def __repr__(self):
        return (
            f"BlockMetaData(content_hash={self.content_hash},"
            f" num_hashed_tokens={self.num_hashed_tokens},"
            f" last_accessed={self.last_accessed})"
        )

    @cython.critical_section
    def __reduce__(self):
        return BlockMetaData, (
            self.content_hash, self.num_hashed_tokens, self.last_accessed
        )


@cython.final
@cython.no_gc
cdef class LRUEvictor:
    """Evicts the least recently accessed block; among equals the one deepest in its
    prefix, then the one with the lowest id.

    As vLLM 0.8.5's, and right after any number of `update` and `remove`, where that one
    loses blocks. A call that fails changes nothing.
    """

    # What it holds are plain ints: no cycle goes through it, and letting go of one runs
    # no code. Finalisers run where an object that the collector tracks is made, and may
    # call back: nothing is read before such a place and relied on behind it.

    def __cinit__(self, *args):
        if args:
            raise TypeError(f"LRUEvictor takes no arguments, got {len(args)}")
        self.rows = {}
        self.hashes = []
        heap_init(&self.heap, 0)

    def __dealloc__(self):
        heap_free(&self.heap)

    def __reduce__(self):
        raise no_copy(self)

    cdef block_id_t row_of(self, object block_id) except -1:
        row = self.rows.get(as_int(block_id, "block_id", INT64_MIN, INT64_MAX))
        if row is None:
            raise ValueError(f"block {block_id} is not in the evictor")
        return row

    cdef int reserve_row(self) except -1:
        """Make sure that a row is vacant.

        Vacant rows are noted in the unused entries: entries[count:capacity].row.
        """
        cdef block_id_t row
        cdef Py_ssize_t capacity
        cdef list spare
        while self.heap.count == self.heap.capacity:
            row = self.heap.capacity
            if row == MAX_BLOCKS:
                raise ValueError(f"an evictor holds at most {MAX_BLOCKS} blocks")
            capacity = min(max(2 * <Py_ssize_t> row, FIRST_ROWS), MAX_BLOCKS)
            spare = [None] * (capacity - len(self.hashes))
            if row == self.heap.capacity:
                self.hashes.extend(spare)
                heap_grow(&self.heap, capacity)
                for row in range(row, self.heap.capacity):
                    self.heap.entries[row].row = row
        return 0

    @cython.critical_section
    def __contains__(self, block_id):
        return block_id in self.rows

    @property
    @cython.critical_section
    def num_blocks(self):
        """How many blocks could be evicted."""
        return self.heap.count

    @property
    @cython.critical_section
    def free_table(self):
        """Read-only mapping of block id to `BlockMetaData`, in the order of adding.

        A block that is added again keeps its place. It is made when asked for, O(n),
        and shows the blocks of that moment.
        """
        cdef EvictionEntry entry
        cdef block_id_t row
        cdef dict table = {}
        for block_id in list(self.rows):
            row = self.rows.get(block_id, -1)
            if row >= 0:
                entry = self.heap.entries[self.heap.place[row]]
                table[block_id] = BlockMetaData(
                    self.hashes[row], entry.num_tokens, entry.last_accessed
                )
        return MappingProxyType(table)

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes of C memory; the ids and hashes are Python's ints beside it."""
        return heap_nbytes(&self.heap)

    @cython.critical_section
    def add(self, block_id, content_hash, num_hashed_tokens, last_accessed):
        """Take in a block that nobody uses any more.

        Args:
            block_id: Any int of 64 bits. One that is in it is described anew.
            content_hash: Any int.
            num_hashed_tokens: Tokens in the prefix that ends with the block, from 0 on.
            last_accessed: A time in any unit, an int or a float; kept as a float.

        Raises:
            TypeError, ValueError: An argument is none of these.
        """
        cdef object id = as_int(block_id, "block_id", INT64_MIN, INT64_MAX)
        cdef object content = as_hash(content_hash)
        cdef int64_t num_tokens = as_int(
            num_hashed_tokens, "num_hashed_tokens", 0, INT64_MAX
        )
        cdef double time = as_time(last_accessed)
        cdef block_id_t row
        if id not in self.rows:
            self.reserve_row()
        row = self.rows.get(id, -1)
        if row >= 0:
            heap_remove(&self.heap, row)
        else:
            row = self.heap.entries[self.heap.count].row
            self.rows[id] = row
        self.hashes[row] = content
        heap_add(&self.heap, row, id, num_tokens, time)

    @cython.critical_section
    def update(self, block_id, last_accessed):
        """Set when the content of a block was last accessed.

        Raises:
            TypeError, ValueError: No such block is in it (vLLM raises KeyError), or
                the time is not an int or a float, or is NaN.
        """
        cdef double time = as_time(last_accessed)
        heap_update(&self.heap, self.row_of(block_id), time)

    @cython.critical_section
    def remove(self, block_id):
        """Take out a block whose content is used again.

        Raises:
            TypeError, ValueError: No such block is in it.
        """
        self.take(self.row_of(block_id))

    @cython.critical_section
    def evict(self):
        """Take out the block to go: (block id, content hash).

        Raises:
            ValueError: None is left.
        """
        if self.heap.count == 0:
            raise ValueError("no block is left to evict")
        return self.take(self.heap.entries[0].row)

    cdef tuple take(self, block_id_t row):
        cdef object block_id = self.heap.entries[self.heap.place[row]].block_id
        cdef object content_hash = self.hashes[row]
        del self.rows[block_id]
        self.hashes[row] = None
        heap_remove(&self.heap, row)
        self.heap.entries[self.heap.count].row = row
        return block_id, content_hash

    @cython.critical_section
    def check(self):
        """Prove every invariant in O(n); for tests.

        Raises:
            AssertionError: One does not hold.
        """
        cdef block_id_t i
        cdef EvictionEntry* entry
        heap_check(&self.heap)
        cdef set vacant = {
            self.heap.entries[i].row for i in range(self.heap.count, self.heap.capacity)
        }
        if len(self.rows) != self.heap.count:
            raise AssertionError(
                f"{len(self.rows)} block ids, {self.heap.count} evictable blocks"
            )
        for block_id, row in self.rows.items():
            if not heap_contains(&self.heap, row):
                raise AssertionError(f"block {block_id} is not in the heap")
            entry = &self.heap.entries[self.heap.place[<block_id_t> row]]
            if entry.block_id != block_id:
                raise AssertionError(
                    f"block {block_id} has the row of block {entry.block_id}"
                )
            if type(self.hashes[row]) is not int or row in vacant:
                raise AssertionError(f"block {block_id} has row {row}, which is vacant")
        if len(vacant) + self.heap.count != self.heap.capacity:
            raise AssertionError("a vacant row is noted twice")


Evictor.register(LRUEvictor)


def make_evictor(eviction_policy):
    """An empty evictor for a policy.

    Raises:
        ValueError: It is not a member of `EvictionPolicy`.
    """
    if eviction_policy is not EvictionPolicy.LRU:
        raise ValueError(f"unknown eviction policy: {eviction_policy!r}")
    return LRUEvictor()
