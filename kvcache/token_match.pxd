# From the tokens of a request to the blocks that hold its prefix, in one pass.
from libc.stdint cimport int32_t, uint64_t

from kvcache._types cimport block_id_t
from kvcache.hash_index cimport HashIndex
from kvcache.hashing.keyed_hash cimport KeyedHash


# Blocks of the leading `count` blocks of tokens that are cached; how many. The same as
# hashing them all with `keyed_chain` and looking the digests up one by one.
cdef Py_ssize_t match_tokens(
    const HashIndex* index,
    const KeyedHash* hasher,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint64_t suffix,
    block_id_t* blocks,
) noexcept nogil
