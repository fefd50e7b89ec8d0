# The free blocks that hold content, next to go first: an indexed heap.
#
# Order: least recently accessed, then deepest in its prefix, then lowest block id; no
# two entries are equal, so the order in which blocks go never depends on the heap's
# shape. Entries lie in a 4-ary heap; `place` tells where a row's entry is, so that a
# block whose content is used again leaves from the middle, and nothing stale stays.
# Costs: all O(log n); adding with a time not below the others' O(1).
# These trust their caller, and need the caller's lock.
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcache._types cimport block_id_t

cdef struct EvictionEntry:
    double last_accessed    # never NaN
    int64_t num_tokens      # of the prefix that ends with the block
    int64_t block_id        # what the caller calls it
    block_id_t row          # the caller's handle, from 0 to capacity - 1

cdef struct EvictionHeap:
    EvictionEntry* entries  # capacity of them, count in use; [0] goes first
    int32_t* place          # per row: index in entries, or -1
    uint64_t* added         # per row in the heap: num_added when it came in
    uint64_t num_added      # calls of heap_add so far
    block_id_t count
    block_id_t capacity
# Invariant: entries[place[row]].row == row, and no entry goes before its parent.


cdef inline bint heap_contains(
    const EvictionHeap* heap, block_id_t row
) noexcept nogil:
    return heap.place[row] >= 0


cdef int heap_init(EvictionHeap* heap, Py_ssize_t capacity) except -1
cdef int heap_grow(EvictionHeap* heap, Py_ssize_t capacity) except -1
cdef void heap_free(EvictionHeap* heap) noexcept nogil
# The row is not in the heap.
cdef void heap_add(
    EvictionHeap* heap,
    block_id_t row,
    int64_t block_id,
    int64_t num_tokens,
    double last_accessed,
) noexcept nogil
# The row is in the heap.
cdef void heap_remove(EvictionHeap* heap, block_id_t row) noexcept nogil
cdef void heap_update(
    EvictionHeap* heap, block_id_t row, double last_accessed
) noexcept nogil
# The heap is not empty.
cdef block_id_t heap_pop(EvictionHeap* heap) noexcept nogil
# The rows that go first, in order, up to n of them; how many.
cdef Py_ssize_t heap_first(
    EvictionHeap* heap, Py_ssize_t n, block_id_t* rows
) except -1
cdef Py_ssize_t heap_nbytes(const EvictionHeap* heap) noexcept nogil
cdef list heap_rows(const EvictionHeap* heap)
cdef int heap_check(const EvictionHeap* heap) except -1
