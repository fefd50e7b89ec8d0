# A block as the serialisers write it: (parent, tuple of tokens, None) as pickle,
# protocol 5, and as canonical CBOR. `out` has room for `encoded_bound` bytes.
from libc.stdint cimport uint8_t

from kvcache.hashing.tokens cimport TokenSource, token_t


cdef inline size_t encoded_bound(size_t parent_length, size_t count) noexcept nogil:
    """At least what either encoding takes, and room for a word written past its end."""
    # A token takes 10 bytes at most, a frame of 64 KiB begins with 9 more.
    return 64 + parent_length + parent_length // 4096 + 11 * count


cdef size_t encode_pickle(
    const uint8_t* parent,
    size_t parent_length,
    const token_t* tokens,
    size_t count,
    uint8_t* out,
) noexcept nogil

cdef size_t encode_cbor(
    const uint8_t* parent,
    size_t parent_length,
    const token_t* tokens,
    size_t count,
    uint8_t* out,
) noexcept nogil

cdef size_t encode_source(
    bint cbor,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t count,
    uint8_t* out,
) noexcept nogil
