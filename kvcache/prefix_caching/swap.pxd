# A swap between two of kvcache's own allocators.
from kvcache.prefix_caching.blocks cimport BlockOwner

# Give blocks of one allocator physical blocks of another: all, or none and an error.
# `mapping` and `swaps` have the old ids as keys, and get the new ones.
cdef int swap_own(
    list moving, list old_ids, BlockOwner source, BlockOwner destination, dict mapping,
    dict swaps,
) except -1
