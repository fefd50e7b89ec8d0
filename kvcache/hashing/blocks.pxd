# Tokens in, chained block hashes out; objects on either side. The C form of the work
# itself is in chain.pxd.
from kvcache.hashing.chain cimport CompiledHash
from kvcache.hashing.tokens cimport TokenSource

cdef enum:
    MAX_BLOCK_SIZE = 2147483647


cdef CompiledHash compiled_form(object hash_fn)
cdef object checked_parent(object parent, object hash_fn, CompiledHash compiled)
cdef list hash_range(
    object hash_fn,
    CompiledHash compiled,
    object parent,
    const TokenSource* source,
    Py_ssize_t first,
    Py_ssize_t block_size,
    Py_ssize_t num_blocks,
    Py_ssize_t num_lookahead,
    list extra_keys,
    bint keep_gil,
)
