# Content hashes: 16 bytes in C, an int of 128 bits in Python.
from libc.stdint cimport int64_t, uint8_t

from kvcache._types cimport Key

cdef enum:
    DIGEST_BYTES = 16

# Extra hash of a block as bytes, or None.
cdef bytes encode_extra(object extra_hash)
# Digest of a full block; `parent` is that of the block before, NULL for a first block.
cdef void digest_block(
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    bytes extra,
    uint8_t* digest,
)
# The same, the block before known by its hash alone, which may be any int, or None.
cdef int digest_after(
    bint is_first_block,
    object prev_block_hash,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    bytes extra,
    uint8_t* digest,
) except -1
cdef object prefix_hash_of(const uint8_t* digest)
# Whether an int is a digest, which is then written.
cdef bint read_prefix_hash(object value, uint8_t* digest) except -1
cdef void key_of_digest(Key* key, const uint8_t* digest) noexcept nogil
# Tokens as a list or tuple of exact ints of 64 bits: reading it runs no foreign code.
cdef object exact_tokens(object token_ids)
cdef void copy_tokens(object tokens, int64_t* into) noexcept
# Have the ints of a list on their way before they are read.
cdef void prefetch_tokens(object token_ids) noexcept
# Both at once, where all tokens are small ints in a list or tuple of n; else False.
cdef bint copy_small_tokens(object token_ids, Py_ssize_t n, int64_t* into) noexcept
