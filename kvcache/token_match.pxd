# From the tokens of a request to the blocks of its prefix: found, or cached.
cimport numpy as cnp
from libc.stdint cimport int32_t, uint8_t, uint64_t

from kvcache._types cimport block_id_t
from kvcache.hash_index cimport HashIndex
from kvcache.hashing.keyed_hash cimport KeyedHash
from kvcache.pool_state cimport PoolState

# What blocks that are to be cached stand behind.
cdef struct TokenParent:
    block_id_t block        # the block before the first; 0 = there is none
    uint8_t[16] digest      # its digest, or the root
    uint64_t serial         # in a pool that keeps tokens: of the prefix up to here


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
# Tokens as `keyed_hash.as_tokens` gives them, without the leading `skip`.
cdef cnp.ndarray tokens_behind(object tokens, Py_ssize_t skip)
# Read a block as the parent of others, or say why it is none. Its tokens are compared
# with its record in a pool that keeps them.
cdef int read_parent(
    const PoolState* pool, block_id_t block, unsigned int group_id,
    const int32_t* tokens, Py_ssize_t block_size, TokenParent* parent,
) except -1
# Digests of so many blocks of tokens from `skip` on, 16 bytes each.
cdef bytes hash_behind(
    const KeyedHash* hasher, const TokenParent* parent, cnp.ndarray tokens,
    Py_ssize_t skip, Py_ssize_t block_size, Py_ssize_t count,
)
# Cache blocks under digests; in a pool that keeps tokens, with these. `num_tokens` end
# with the block before the first. All was checked, and the index has room.
cdef void cache_tokens(
    PoolState* pool, const TokenParent* parent, const block_id_t* ids,
    const uint8_t* digests, const int32_t* tokens, Py_ssize_t block_size,
    Py_ssize_t count, uint64_t suffix, int32_t num_tokens,
) noexcept nogil
