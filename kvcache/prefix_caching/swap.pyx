"""A swap between two of kvcache's own allocators.

Stores: nothing.
Invariant: what it returns is an object for each new id, and an object takes memory: all
that may be wanted are made before the first block moves.
Costs: O(n log m) for n blocks and m evictable ones.
Threads: each call is atomic.
"""
from libc.stdlib cimport qsort

from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport block_id_t
from kvcache.prefix_caching.blocks cimport NO_ROW, TokenBlock

from kvcache.errors import BlockStateError


cdef int ascending(const void* a, const void* b) noexcept nogil:
    cdef block_id_t one = (<const block_id_t*> a)[0], other = (<const block_id_t*> b)[0]
    return (one > other) - (one < other)


cdef Py_ssize_t place_of(
    const block_id_t* rows, Py_ssize_t count, block_id_t row
) noexcept:
    """Where a row stands among ascending ones; it is there."""
    cdef Py_ssize_t low = 0, high = count - 1, middle
    while low < high:
        middle = (low + high) // 2
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


cdef int swap_own(
    list moving, list old_ids, BlockOwner source, BlockOwner destination, dict mapping,
    dict swaps,
) except -1:
    cdef Py_ssize_t n = len(moving), count, i
    cdef list numbers = []
    cdef set seen = set()
    cdef TokenBlock block
    cdef block_id_t* rows = <block_id_t*> allocate(3 * n, sizeof(block_id_t), "rows")
    try:
        # From here on nothing runs that could change an allocator.
        for i in range(n):
            block = <TokenBlock> moving[i]
            if block.allocator is not source or block.row == NO_ROW:
                raise BlockStateError(f"{block!r} changed during the call")
        destination.require_places(moving, seen)
        count = destination.choices(moving, rows)
        qsort(rows, count, sizeof(block_id_t), ascending)
        for i in range(count):
            numbers.append(destination.ids.id_of(rows[i]))
        # From here on nothing fails.
        source.release_all(moving)
        destination.place_all(moving, False)
        for i in range(n):
            block = <TokenBlock> moving[i]
            number = numbers[place_of(rows, count, block.row)]
            mapping[old_ids[i]] = swaps[old_ids[i]] = number
    finally:
        deallocate(rows)
    return 0
