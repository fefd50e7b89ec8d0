# check(): every invariant of a pool, in O(n).
from kvcache.hash_index cimport BlockHashToBlockMap
from kvcache.pool_state cimport PoolState

cdef int check_pool(PoolState* pool, BlockHashToBlockMap map) except -1
