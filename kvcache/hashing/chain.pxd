# Hashing a chain of blocks in C, and what a hash function must be for it.
#
# A hash function that has a C form is a `CompiledHash`: it is called with an object,
# as the others are, and beside that fills in the fields below. The functions sha256
# and sha256_cbor have one each, SHA256 and SHA256_CBOR; `keyed` is one itself.
from libc.stdint cimport uint8_t

from kvcache.hashing.tokens cimport TokenSource

# The digests of num_blocks blocks of block_size tokens that begin at token `first`,
# the first block's parent being `parent`, each other's the digest before it. They are
# written one after the other. `scratch` has room for `scratch_bytes`.
ctypedef void (*hash_chain_t)(
    const void* state,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t block_size,
    size_t num_blocks,
    uint8_t* scratch,
    uint8_t* digests,
) noexcept nogil

# Bytes of scratch for blocks of that size and a first parent of that length.
ctypedef size_t (*scratch_bytes_t)(
    size_t parent_length, size_t block_size
) noexcept nogil


cdef class CompiledHash:
    cdef hash_chain_t hash_chain          # set by __cinit__ of whoever derives
    cdef scratch_bytes_t scratch_bytes    # likewise
    cdef const void* state                # passed to hash_chain; the object owns it
    cdef Py_ssize_t digest_length         # bytes; at most MAX_DIGEST_BYTES
    cdef Py_ssize_t parent_length         # bytes a parent must have; 0: any number
    cdef bytes root                       # parent of a first block; None: root_hash


cdef CompiledHash SHA256
cdef CompiledHash SHA256_CBOR

cdef int fill_chain(
    CompiledHash compiled,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t block_size,
    size_t num_blocks,
    uint8_t* digests,
    bint keep_gil,
) except -1
