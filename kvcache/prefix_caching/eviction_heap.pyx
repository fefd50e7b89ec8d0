"""An indexed heap of the free blocks that hold content, in C.

Stores: one entry per such block in a 4-ary heap, and where each row's entry lies.
Invariant: `heap_check` proves it. Costs: adding with a time not below the others' O(1),
all else O(log n); 44 bytes a row. Threads: none of this is locked; the GIL or the
caller's lock guards it.
"""
from libc.string cimport memset

from kvcache._memory cimport allocate, copy_bytes, deallocate

cdef enum:
    # A node has 1 << SHIFT children. A pop and an add of the latest, 1,000 / 100,000
    # entries: 39 / 66 ns with four, 58 / 80 with two, 48 / 67 with eight.
    SHIFT = 2


cdef int heap_init(EvictionHeap* heap, Py_ssize_t capacity) except -1:
    """An empty heap for the rows from 0 to capacity - 1; free it, also after an error.

    Raises:
        MemoryError: There is no room for it.
    """
    memset(heap, 0, sizeof(EvictionHeap))
    return heap_grow(heap, capacity)


cdef int heap_grow(EvictionHeap* heap, Py_ssize_t capacity) except -1:
    """Make room for the rows up to capacity - 1, no fewer than before.

    Raises:
        MemoryError: There is no room for it; the heap is as it was.
    """
    cdef EvictionEntry* entries = NULL
    cdef int32_t* place = NULL
    cdef uint64_t* added = NULL
    try:
        entries = <EvictionEntry*> allocate(
            capacity, sizeof(EvictionEntry), "evictable blocks"
        )
        place = <int32_t*> allocate(capacity, sizeof(int32_t), "evictable blocks")
        added = <uint64_t*> allocate(capacity, sizeof(uint64_t), "evictable blocks")
    except MemoryError:
        deallocate(entries)
        deallocate(place)
        raise
    memset(place, 0xFF, capacity * sizeof(int32_t))  # -1 in every one
    copy_bytes(entries, heap.entries, heap.capacity * sizeof(EvictionEntry))
    copy_bytes(place, heap.place, heap.capacity * sizeof(int32_t))
    copy_bytes(added, heap.added, heap.capacity * sizeof(uint64_t))
    deallocate(heap.entries)
    deallocate(heap.place)
    deallocate(heap.added)
    heap.entries, heap.place, heap.added = entries, place, added
    heap.capacity = <block_id_t> capacity
    return 0


cdef void heap_free(EvictionHeap* heap) noexcept nogil:
    deallocate(heap.entries)
    deallocate(heap.place)
    deallocate(heap.added)
    memset(heap, 0, sizeof(EvictionHeap))


cdef inline bint goes_before(
    const EvictionEntry* a, const EvictionEntry* b
) noexcept nogil:
    if a.last_accessed != b.last_accessed:
        return a.last_accessed < b.last_accessed
    if a.num_tokens != b.num_tokens:
        return a.num_tokens > b.num_tokens
    return a.block_id < b.block_id


cdef inline void put(
    EvictionHeap* heap, size_t at, const EvictionEntry* entry
) noexcept nogil:
    heap.entries[at] = entry[0]
    heap.place[entry.row] = <int32_t> at


cdef inline void rise(
    EvictionHeap* heap, size_t at, const EvictionEntry* entry
) noexcept nogil:
    """Fill the hole at `at`, or one on the way from it to the top, with an entry."""
    cdef size_t parent
    while at:
        parent = (at - 1) >> SHIFT
        if not goes_before(entry, &heap.entries[parent]):
            break
        put(heap, at, &heap.entries[parent])
        at = parent
    put(heap, at, entry)


cdef void settle(
    EvictionHeap* heap, size_t at, const EvictionEntry* entry
) noexcept nogil:
    """Fill the hole at `at` with an entry from anywhere.

    The hole goes all the way down first, since an entry that fills one was at the
    bottom nearly always: that saves comparing with it at every level.
    """
    cdef size_t count = heap.count
    cdef size_t child, first, last, i
    while True:
        first = (at << SHIFT) + 1
        if first >= count:
            break
        last = min(first + (1 << SHIFT), count)
        child = first
        for i in range(first + 1, last):
            if goes_before(&heap.entries[i], &heap.entries[child]):
                child = i
        put(heap, at, &heap.entries[child])
        at = child
    rise(heap, at, entry)


cdef void heap_add(
    EvictionHeap* heap,
    block_id_t row,
    int64_t block_id,
    int64_t num_tokens,
    double last_accessed,
) noexcept nogil:
    cdef EvictionEntry entry
    entry.last_accessed = last_accessed
    entry.num_tokens = num_tokens
    entry.block_id = block_id
    entry.row = row
    heap.added[row] = heap.num_added
    heap.num_added += 1
    heap.count += 1
    rise(heap, heap.count - 1, &entry)


cdef void heap_remove(EvictionHeap* heap, block_id_t row) noexcept nogil:
    cdef block_id_t at = heap.place[row]
    cdef EvictionEntry last
    heap.place[row] = -1
    heap.count -= 1
    if at != heap.count:
        last = heap.entries[heap.count]
        settle(heap, at, &last)


cdef void heap_update(
    EvictionHeap* heap, block_id_t row, double last_accessed
) noexcept nogil:
    cdef size_t at = heap.place[row]
    cdef EvictionEntry entry = heap.entries[at]
    entry.last_accessed = last_accessed
    settle(heap, at, &entry)


cdef block_id_t heap_pop(EvictionHeap* heap) noexcept nogil:
    """Take out the entry that goes first; its row."""
    cdef block_id_t row = heap.entries[0].row
    heap_remove(heap, row)
    return row


cdef Py_ssize_t heap_first(
    EvictionHeap* heap, Py_ssize_t n, block_id_t* rows
) except -1:
    cdef EvictionEntry* taken
    cdef Py_ssize_t i
    n = min(n, <Py_ssize_t> heap.count)
    if n <= 0:
        return 0
    taken = <EvictionEntry*> allocate(n, sizeof(EvictionEntry), "evictable blocks")
    for i in range(n):
        taken[i] = heap.entries[0]
        rows[i] = heap_pop(heap)
    for i in range(n - 1, -1, -1):
        heap.count += 1
        rise(heap, heap.count - 1, &taken[i])
    deallocate(taken)
    return n


cdef Py_ssize_t heap_nbytes(const EvictionHeap* heap) noexcept nogil:
    return heap.capacity * <Py_ssize_t> (
        sizeof(EvictionEntry) + sizeof(int32_t) + sizeof(uint64_t)
    )


cdef list heap_rows(const EvictionHeap* heap):
    """The rows in the heap, in the order in which they were added; O(n log n)."""
    cdef block_id_t i
    cdef list rows = [heap.entries[i].row for i in range(heap.count)]
    cdef dict added = {row: heap.added[<block_id_t> row] for row in rows}
    return sorted(rows, key=added.__getitem__)


cdef int heap_check(const EvictionHeap* heap) except -1:
    """Prove the heap's invariant in O(n).

    Raises:
        AssertionError: It does not hold; the message says where.
    """
    cdef block_id_t i, row, parent
    cdef const EvictionEntry* entry
    cdef Py_ssize_t placed = 0
    if not 0 <= heap.count <= heap.capacity:
        raise AssertionError(
            f"{heap.count} evictable blocks in room for {heap.capacity}"
        )
    for i in range(heap.count):
        entry = &heap.entries[i]
        if not 0 <= entry.row < heap.capacity or heap.place[entry.row] != i:
            raise AssertionError(
                f"block {entry.block_id} at {i} has row {entry.row}, which is elsewhere"
            )
        if entry.last_accessed != entry.last_accessed:
            raise AssertionError(f"block {entry.block_id} was last accessed at NaN")
        parent = (i - 1) >> SHIFT if i else 0
        if goes_before(entry, &heap.entries[parent]):
            raise AssertionError(
                f"block {entry.block_id} at {i} goes before"
                f" block {heap.entries[parent].block_id} above it"
            )
        if heap.added[entry.row] >= heap.num_added:
            raise AssertionError(f"block {entry.block_id} was added in the future")
    for row in range(heap.capacity):
        placed += heap.place[row] >= 0
    if placed != heap.count:
        raise AssertionError(f"{placed} rows have a place, {heap.count} are evictable")
    return 0
