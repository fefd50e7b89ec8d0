# A keyed 128-bit hash over a chain of token blocks, in C.
#
# digest = SipHash-1-3-128(key, header || tokens || extra || parent), in 64-bit words:
#   header   number of tokens | wide << 32 | number of extra bytes << 33
#   tokens   two int32 a word, little-endian; one a word (wide) if any needs more bits
#   extra    bytes that also identify the block, usually none
#   parent   the digest before, or the root, which is the hash of the empty message
# Tokens and extra are padded to whole words. The header tells them apart, so no two
# (tokens, extra, parent) give the same message.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from kvcache.hashing.chain cimport CompiledHash

cdef enum:
    KEYED_BYTES = 16            # of a digest, and of a key

cdef struct KeyedHash:
    uint64_t[4] start           # SipHash's state under the key, nothing absorbed yet
    uint8_t[16] root            # parent of a first block
    int path                    # how eight blocks are hashed side by side


cdef void keyed_init(KeyedHash* hasher, const uint8_t* key, int path) noexcept nogil
# Digests of consecutive blocks, each the parent of the next; room for count of them.
cdef void keyed_chain(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil
# The same digests from int64 tokens, of which some may not fit int32.
cdef void keyed_chain_wide(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil
# Digests of consecutive blocks whose parents are all known: none waits for another.
cdef void keyed_each(
    const KeyedHash* hasher,
    const uint8_t** parents,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil
# One block, with the extra bytes that identify it besides its tokens.
cdef void keyed_block(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    const uint8_t* extra,
    Py_ssize_t num_extra,
    uint8_t* digest,
) noexcept nogil
# Tokens as a C-contiguous array of int32, or of int64 if one needs it; all checked.
cdef object as_tokens(object tokens)


cdef class Keyed(CompiledHash):
    cdef KeyedHash hasher
