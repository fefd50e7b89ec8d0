"""Hashing a chain of blocks in C.

Stores: for each hash function that has a C form, the function to call and its state.
Invariant: the C form gives the digest that calling the hash function with the object
(parent, tuple of tokens, None) gives.
Costs: a block is one pass over its tokens and the hash; no Python object.
Threads: the C functions are reentrant and need no GIL; a `CompiledHash` never changes.
"""
from kvcache._memory cimport deallocate, moved
from kvcache.hashing.encoding cimport encode_source, encoded_bound
from kvcache.hashing.sha2 cimport sha256_digest

cdef enum:
    STACK_BYTES = 1024     # scratch for usual blocks
    GIL_BLOCKS = 64        # fewer blocks are done before another thread could start


cdef class CompiledHash:
    """A hash function that has a C form; what Python makes of it has none."""


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
) except -1:
    """Hash a chain; the tokens exist, and unless keep_gil nobody may move them.

    Raises:
        MemoryError: There is none for the scratch.
    """
    cdef uint8_t[STACK_BYTES] stack
    cdef uint8_t* scratch = stack
    cdef size_t longest = max(parent_length, <size_t> compiled.digest_length)
    cdef size_t room = compiled.scratch_bytes(longest, block_size)
    cdef hash_chain_t hash_chain = compiled.hash_chain
    cdef const void* state = compiled.state
    if room > STACK_BYTES:
        scratch = <uint8_t*> moved(NULL, 0, room, 1)
        if scratch == NULL:
            raise MemoryError(f"cannot allocate {room} bytes to hash a block")
    if keep_gil or num_blocks < GIL_BLOCKS:
        hash_chain(
            state, parent, parent_length, source, first, block_size, num_blocks,
            scratch, digests,
        )
    else:
        with nogil:
            hash_chain(
                state, parent, parent_length, source, first, block_size, num_blocks,
                scratch, digests,
            )
    if scratch != stack:
        deallocate(scratch)
    return 0


cdef inline void _sha256_chain(
    bint cbor,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t block_size,
    size_t num_blocks,
    uint8_t* scratch,
    uint8_t* digests,
) noexcept nogil:
    cdef size_t length, _i
    for _i in range(num_blocks):
        length = encode_source(
            cbor, parent, parent_length, source, first, block_size, scratch
        )
        sha256_digest(scratch, length, digests)
        parent = digests
        parent_length = 32
        digests += 32
        first += block_size


cdef void sha256_chain(
    const void* state,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t block_size,
    size_t num_blocks,
    uint8_t* scratch,
    uint8_t* digests,
) noexcept nogil:
    _sha256_chain(
        False, parent, parent_length, source, first, block_size, num_blocks, scratch,
        digests,
    )


cdef void sha256_cbor_chain(
    const void* state,
    const uint8_t* parent,
    size_t parent_length,
    const TokenSource* source,
    Py_ssize_t first,
    size_t block_size,
    size_t num_blocks,
    uint8_t* scratch,
    uint8_t* digests,
) noexcept nogil:
    _sha256_chain(
        True, parent, parent_length, source, first, block_size, num_blocks, scratch,
        digests,
    )


cdef size_t _encoded_bound(size_t parent_length, size_t block_size) noexcept nogil:
    return encoded_bound(parent_length, block_size)


cdef CompiledHash _new(hash_chain_t hash_chain):
    cdef CompiledHash compiled = CompiledHash.__new__(CompiledHash)
    compiled.hash_chain = hash_chain
    compiled.scratch_bytes = _encoded_bound
    compiled.digest_length = 32
    return compiled


SHA256 = _new(sha256_chain)
SHA256_CBOR = _new(sha256_cbor_chain)
