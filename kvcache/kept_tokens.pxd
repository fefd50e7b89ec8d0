# The tokens of cached blocks, kept so that a match is proved and not only likely.
#
# Equal tokens in a block are not enough: what it holds depends on all tokens before it.
# So each record has a serial that names its verified prefix, and the serial of the
# prefix before it: a block's record is that of a prompt if its tokens are the prompt's
# and its `parent` is the serial of the block that matched just before.
from libc.stdint cimport int32_t, uint8_t, uint64_t

from kvcache._types cimport FLAG_TOKENS_KEPT, BlockMeta, Key, block_id_t
from kvcache.hash_index cimport HashIndex
from kvcache.hashing.keyed_hash cimport KeyedHash

cdef struct KeptPrefix:
    uint64_t serial         # of the tokens up to the block's end, from 1 on
    uint64_t parent         # of those before the block; 0 = there are none

cdef struct KeptTokens:     # all zero in a pool that keeps none
    KeptPrefix* prefixes    # per row; valid while FLAG_TOKENS_KEPT
    int32_t* tokens         # block_size a row, 16 of them in one cache line; likewise
    void* memory            # what `tokens` was cut from
    block_id_t num_rows
    Py_ssize_t block_size
    uint64_t last_serial    # given out
# Invariant: rows have the same serial if and only if they have the same key, parent and
# tokens. A serial is never given out again.


cdef inline bint same_tokens(
    const int32_t* a, const int32_t* b, Py_ssize_t count
) noexcept nogil:
    cdef int32_t differ = 0
    cdef Py_ssize_t i
    for i in range(count):  # without a branch, so that it is vectorised
        differ |= a[i] ^ b[i]
    return differ == 0


cdef inline bint kept_is(
    const KeptTokens* kept,
    const BlockMeta* row,
    block_id_t block,
    uint64_t parent,
    const int32_t* tokens,
    Py_ssize_t block_size,
) noexcept nogil:
    """Whether a row's record is of these tokens behind that prefix."""
    return (
        row.flags & FLAG_TOKENS_KEPT
        and kept.prefixes[block].parent == parent
        and same_tokens(kept.tokens + block * block_size, tokens, block_size)
    )


cdef int kept_init(
    KeptTokens* kept, block_id_t num_rows, Py_ssize_t block_size
) except -1
cdef void kept_free(KeptTokens* kept) noexcept
cdef size_t kept_bytes(const KeptTokens* kept) noexcept nogil
# Record the tokens of a row that has just been given its key, behind a prefix; the
# serial of both. `copy` is a row with such a record (see kept_find), or 0.
cdef uint64_t kept_store(
    KeptTokens* kept, BlockMeta* rows, block_id_t block, uint64_t parent,
    const int32_t* tokens, block_id_t copy,
) noexcept nogil
# Another row now holds what this one held, under the same key.
cdef void kept_move(
    KeptTokens* kept, BlockMeta* rows, block_id_t source, block_id_t target
) noexcept nogil
# The oldest row of a key whose record is of these tokens behind that prefix; or 0.
cdef block_id_t kept_find(
    const KeptTokens* kept, const HashIndex* index, const Key* key, uint64_t parent,
    const int32_t* tokens,
) noexcept nogil
# As `match_tokens`, but a block counts only if its record is of the prompt's tokens.
cdef Py_ssize_t kept_match(
    const KeptTokens* kept, const HashIndex* index, const KeyedHash* hasher,
    const int32_t* tokens, Py_ssize_t count, uint64_t suffix, block_id_t* blocks,
) noexcept nogil
