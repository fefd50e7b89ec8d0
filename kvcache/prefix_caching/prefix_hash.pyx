"""Content hashes of the prefix-caching allocator, and the tokens that go into them.

Stores: one secret key for the process; hashes are of no use outside it.
Invariant: blocks with the same tokens, extra hash and prefix have the same hash; two
others do by chance only, n^2 / 2^129 after n blocks (see hashing/keyed_hash.pyx).
vLLM 0.8.5 takes Python's 64-bit `hash` of a tuple, for which -1 and -2 are the same.
Costs: 20 ns for 16 tokens. Threads: the key never changes.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport INT64_MAX, INT64_MIN
from libc.string cimport memset

from kvcache._args cimport PyLong_AsLongLongAndOverflow, as_int
from kvcache._lock cimport KVC_NO_GIL, unshared
from kvcache._memory cimport kvc_prefetch
from kvcache._types cimport make_key
from kvcache.hashing.keyed_hash cimport Keyed, keyed_block
from kvcache.hashing.tokens cimport kvc_small_int

cdef extern from *:
    """
    static inline int kvc_read_128(PyObject* value, unsigned char* bytes) {
    #if PY_VERSION_HEX >= 0x030D0000
        Py_ssize_t needed = PyLong_AsNativeBytes(
            value, bytes, 16,
            Py_ASNATIVEBYTES_LITTLE_ENDIAN | Py_ASNATIVEBYTES_UNSIGNED_BUFFER);
        if (needed < 0) PyErr_Clear();
        return needed >= 0 && needed <= 16;
    #else
        if (_PyLong_AsByteArray((PyLongObject*)value, bytes, 16, 1, 0) == 0) return 1;
        PyErr_Clear();
        return 0;
    #endif
    }
    static inline PyObject* kvc_from_128(const unsigned char* bytes) {
    #if PY_VERSION_HEX >= 0x030D0000
        return PyLong_FromUnsignedNativeBytes(
            bytes, 16, Py_ASNATIVEBYTES_LITTLE_ENDIAN);
    #else
        return _PyLong_FromByteArray(bytes, 16, 1, 0);
    #endif
    }
    """
    bint kvc_read_128(object value, unsigned char* bytes)
    object kvc_from_128(const unsigned char* bytes)

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)

# What stands for "no block before" in Python: vLLM's value, which its tests use.
NONE_HASH = hash("None")

cdef Keyed hasher = Keyed()


cdef bytes signed_bytes(object number):
    """An int as bytes; no two are alike."""
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


cdef bytes encode_extra(object extra_hash):
    if extra_hash is None:
        return None
    if type(extra_hash) is not int:
        raise TypeError(f"extra_hash must be an int or None, got {extra_hash!r}")
    return b"extra" + signed_bytes(extra_hash)


cdef void digest_block(
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    bytes extra,
    uint8_t* digest,
):
    if parent == NULL:
        parent = &hasher.hasher.root[0]
    keyed_block(
        &hasher.hasher,
        parent,
        tokens,
        num_tokens,
        <const uint8_t*> PyBytes_AS_STRING(extra) if extra is not None else NULL,
        PyBytes_GET_SIZE(extra) if extra is not None else 0,
        digest,
    )


cdef int digest_after(
    bint is_first_block,
    object prev_block_hash,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    bytes extra,
    uint8_t* digest,
) except -1:
    cdef uint8_t[DIGEST_BYTES] parent
    if prev_block_hash is not None and type(prev_block_hash) is not int:
        raise TypeError(
            f"prev_block_hash must be an int or None, got {prev_block_hash!r}"
        )
    if is_first_block and (prev_block_hash is None or prev_block_hash == NONE_HASH):
        digest_block(NULL, tokens, num_tokens, extra, digest)
        return 0
    if (
        not is_first_block
        and prev_block_hash is not None
        and read_prefix_hash(prev_block_hash, parent)
    ):
        digest_block(parent, tokens, num_tokens, extra, digest)
        return 0
    # No hash of a block: what it is goes in with the extra bytes, told apart by a word.
    memset(parent, 0, DIGEST_BYTES)
    before = b"none" if prev_block_hash is None else signed_bytes(prev_block_hash)
    extra = b"%s %d:%s%s" % (
        b"first" if is_first_block else b"later",
        len(before), before, b"" if extra is None else extra,
    )
    digest_block(parent, tokens, num_tokens, extra, digest)
    return 0


cdef object prefix_hash_of(const uint8_t* digest):
    """A digest as an int, little-endian."""
    return kvc_from_128(digest)


cdef bint read_prefix_hash(object value, uint8_t* digest) except -1:
    """Write the digest that an int stands for; False if it is negative or too large."""
    if not PyLong_CheckExact(value):
        raise TypeError(f"a content hash must be an int, got {value!r}")
    return kvc_read_128(value, digest)


cdef void key_of_digest(Key* key, const uint8_t* digest) noexcept nogil:
    make_key(key, digest, DIGEST_BYTES, 0)


cdef object exact_tokens(object token_ids):
    """Tokens as a list or tuple of exact ints that fit 64 bits.

    Raises:
        TypeError: They are no ints, or no sequence of them.
        ValueError: One does not fit 64 bits, its sign included.
    """
    cdef Py_ssize_t i
    cdef PyObject** items
    token_ids = unshared(token_ids)
    if PyList_CheckExact(token_ids) or PyTuple_CheckExact(token_ids):
        items = PySequence_Fast_ITEMS(token_ids)
        for i in range(PySequence_Fast_GET_SIZE(token_ids)):
            if kvc_small_int(<object> items[i]) < 0:
                break
        else:
            return token_ids
    elif isinstance(token_ids, (str, bytes, bytearray)):
        raise TypeError(f"tokens must be ints, got {token_ids!r}")
    return [
        as_int(token, "a token id", INT64_MIN, INT64_MAX) for token in list(token_ids)
    ]


cdef void copy_tokens(object tokens, int64_t* into) noexcept:
    """Write what `exact_tokens` gave; there is room."""
    cdef PyObject** items = PySequence_Fast_ITEMS(tokens)
    cdef Py_ssize_t i
    cdef int overflow = 0
    for i in range(PySequence_Fast_GET_SIZE(tokens)):
        into[i] = kvc_small_int(<object> items[i])
        if into[i] < 0:
            into[i] = PyLong_AsLongLongAndOverflow(<object> items[i], &overflow)


cdef void prefetch_tokens(object token_ids) noexcept:
    cdef PyObject** items
    cdef Py_ssize_t i, n
    if KVC_NO_GIL or not PyList_CheckExact(token_ids):
        return  # another thread may take the items away
    items = PySequence_Fast_ITEMS(token_ids)
    n = PySequence_Fast_GET_SIZE(token_ids)
    for i in range(n):
        kvc_prefetch(items[i])


cdef bint copy_small_tokens(object token_ids, Py_ssize_t n, int64_t* into) noexcept:
    cdef PyObject** items = PySequence_Fast_ITEMS(token_ids)
    cdef Py_ssize_t i
    cdef int64_t signs = 0
    for i in range(n):
        into[i] = kvc_small_int(<object> items[i])
        signs |= into[i]
    return signs >= 0


def hash_block_tokens(
    is_first_block, prev_block_hash, cur_block_token_ids, extra_hash=None
):
    """`PrefixCachingBlock.hash_block_tokens`."""
    cdef object tokens = exact_tokens(cur_block_token_ids)
    cdef Py_ssize_t n = len(tokens)
    cdef uint8_t[DIGEST_BYTES] digest
    cdef bytes memory = bytes(n * sizeof(int64_t))
    cdef int64_t* data = <int64_t*> PyBytes_AS_STRING(memory)
    copy_tokens(tokens, data)
    digest_after(
        is_first_block, prev_block_hash, data, n, encode_extra(extra_hash), digest
    )
    return prefix_hash_of(digest)


def hash_token_blocks(prev_block_hash, token_ids, block_size, extra_hash=None):
    """Content hashes of the full blocks of a sequence's further tokens, chained.

    Args:
        prev_block_hash: Hash of the block before them, None if they come first.
        token_ids: Ints of 64 bits, sign included, in a list or another sequence.
        block_size: Tokens a block, at least 1.
        extra_hash: Int that also identifies the blocks, or None.

    Returns:
        A list of ints of 128 bits, one for each full block.
    """
    cdef Py_ssize_t size = as_int(block_size, "block_size", 1, 2**31 - 1)
    cdef object tokens = exact_tokens(token_ids)
    cdef Py_ssize_t count = len(tokens) // size
    cdef bytes extra = encode_extra(extra_hash)
    cdef bytes memory = bytes(len(tokens) * sizeof(int64_t))
    cdef int64_t* data = <int64_t*> PyBytes_AS_STRING(memory)
    cdef uint8_t[DIGEST_BYTES] digest
    cdef list hashes = []
    cdef Py_ssize_t i
    copy_tokens(tokens, data)
    for i in range(count):
        if i == 0:
            digest_after(
                prev_block_hash is None, prev_block_hash, data, size, extra, digest
            )
        else:
            digest_block(digest, data + i * size, size, extra, digest)
        hashes.append(prefix_hash_of(digest))
    return hashes
