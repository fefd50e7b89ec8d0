"""`keyed`: a 128-bit keyed hash over a chain of token blocks, for one process's cache.

Stores: SipHash's state under the key and the root; nothing of what was hashed.
Invariant: every path gives the same digests; a parent is a digest, 16 bytes, never more
of the hash's state.
Costs: O(tokens), without an allocation; 16 tokens take 8 to 22 ns, see below.
Threads: a `Keyed` never changes once made, so any number may use it at once.
"""
# Security: SipHash (Aumasson and Bernstein 2012) is designed as a PRF: without its key
# two prompts share a digest by chance only, n^2 / 2^129 after n blocks. The best
# published characteristic of SipHash-2-4 (Dobraunig, Mendel and Schlaffer 2014) has a
# probability of 2^-236.3; 1-3, which CPython and Rust hash with, rests on the same
# design with less margin and on digests that are not shown to those who send prompts.
# Where they are, 2-4 is a change of the two constants in _keyed.h.
#
# The parent comes last in a message, so a block's tokens are absorbed, eight blocks
# side by side, before its parent is known. ns for 16 tokens in one run of a C loop on
# a server CPU of 2023, one block after the other / all parents known:
#   SipHash-1-3-128   parent first                          23.6
#                     parent last                           21.6
#                     and eight side by side, AVX2          15.3 /  8.6   taken
#                     the same, AVX-512                     15.3 /  7.0
#                     the same, compiler's own vectors      32   / 33
#   SipHash-2-4-128   parent last                           35.8
#                     and eight side by side, AVX2          24.4 / 14.7
#   HighwayHash-128   AVX2, rounds only                     22.5
#   AES-128(parent ^ multilinear hash in GF(2^128))         11.4 / 11.1
# The last (universal hash, then a PRP) has a proof, but where there are no AES and
# carry-less multiply instructions it needs tables, whose cache misses tell of the key;
# and with all parents known, as in most of a match, it is slower. AVX-512 is not worth
# a second body.
cimport cython
cimport numpy as cnp
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

import os
import pickle

import numpy as np

from kvcache._args cimport as_int
from kvcache.hashing.chain cimport CompiledHash
from kvcache.hashing.tokens cimport TokenSource
from kvcache.hashing.tokens cimport as_tokens as describe_tokens

cnp.import_array()

cdef extern from "_keyed.h":
    cdef enum:
        KVC_LANES
        KVC_PORTABLE
        KVC_AVX2
    ctypedef struct kvc_sip:
        uint64_t[4] v
    ctypedef struct kvc_sips:
        pass
    void kvc_sip_init(kvc_sip*, const uint8_t* key) nogil
    void kvc_sip_word(kvc_sip*, uint64_t word) nogil
    void kvc_sip_end(kvc_sip*, uint64_t tail, uint8_t* digest) nogil
    uint64_t kvc_sip_tail(uint64_t num_bytes) nogil
    void kvc_absorb(kvc_sip*, const int32_t*, size_t) nogil
    void kvc_absorb_wide(kvc_sip*, const int64_t*, size_t) nogil
    void kvc_absorb_narrowed(kvc_sip*, const int64_t*, size_t) nogil
    void kvc_absorb_bytes(kvc_sip*, const uint8_t*, size_t) nogil
    void kvc_finish(kvc_sip*, const uint8_t* parent, uint64_t tail, uint8_t*) nogil
    int kvc_best_path() nogil
    void kvc_absorb_lanes(
        int, const kvc_sip*, const int32_t*, size_t num_tokens, kvc_sips*
    ) nogil
    void kvc_finish_lane(
        const kvc_sips*, int lane, const uint8_t* parent, uint64_t tail, uint8_t*
    ) nogil
    void kvc_finish_lanes(
        int, const kvc_sips*, const uint8_t** parents, uint64_t tail, uint8_t*
    ) nogil

cdef enum:
    MAX_BLOCK_SIZE = 2147483647
    MAX_EXTRA = 2147483647

PATHS = ("avx2", "portable") if kvc_best_path() == KVC_AVX2 else ("portable",)


cdef void keyed_init(KeyedHash* hasher, const uint8_t* key, int path) noexcept nogil:
    cdef kvc_sip state
    kvc_sip_init(&state, key)
    memcpy(hasher.start, state.v, sizeof(hasher.start))
    hasher.path = path
    kvc_sip_end(&state, kvc_sip_tail(0), hasher.root)


cdef inline uint64_t begin(
    const KeyedHash* hasher,
    Py_ssize_t num_tokens,
    bint wide,
    Py_ssize_t num_extra,
    kvc_sip* state,
) noexcept nogil:
    """Absorb the header; the word that will end the message."""
    cdef Py_ssize_t words = num_tokens if wide else (num_tokens + 1) // 2
    memcpy(state.v, hasher.start, sizeof(hasher.start))
    kvc_sip_word(
        state,
        <uint64_t> num_tokens | <uint64_t> wide << 32 | <uint64_t> num_extra << 33,
    )
    return kvc_sip_tail(8 + 8 * (words + (num_extra + 7) // 8) + KEYED_BYTES)


cdef void keyed_chain(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil:
    cdef kvc_sip start, state
    cdef kvc_sips states
    cdef uint64_t tail = begin(hasher, block_size, False, 0, &start)
    cdef Py_ssize_t i = 0
    cdef int lane
    while hasher.path != KVC_PORTABLE and i + KVC_LANES <= count:
        kvc_absorb_lanes(
            hasher.path, &start, tokens + i * block_size, block_size, &states
        )
        for lane in range(KVC_LANES):
            kvc_finish_lane(&states, lane, parent, tail, digests + i * KEYED_BYTES)
            parent = digests + i * KEYED_BYTES
            i += 1
    while i < count:
        state = start
        kvc_absorb(&state, tokens + i * block_size, block_size)
        kvc_finish(&state, parent, tail, digests + i * KEYED_BYTES)
        parent = digests + i * KEYED_BYTES
        i += 1


cdef void keyed_each(
    const KeyedHash* hasher,
    const uint8_t** parents,
    const int32_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil:
    cdef kvc_sip start, state
    cdef kvc_sips states
    cdef uint64_t tail = begin(hasher, block_size, False, 0, &start)
    cdef Py_ssize_t i = 0
    if hasher.path != KVC_PORTABLE and count >= KVC_LANES:
        while i < count:
            # The last eight overlap those before: cheaper than one at a time.
            i = min(i, count - KVC_LANES)
            kvc_absorb_lanes(
                hasher.path, &start, tokens + i * block_size, block_size, &states
            )
            kvc_finish_lanes(
                hasher.path, &states, parents + i, tail, digests + i * KEYED_BYTES
            )
            i += KVC_LANES
    while i < count:
        state = start
        kvc_absorb(&state, tokens + i * block_size, block_size)
        kvc_finish(&state, parents[i], tail, digests + i * KEYED_BYTES)
        i += 1


cdef void keyed_chain_wide(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t block_size,
    Py_ssize_t count,
    uint8_t* digests,
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        keyed_block(
            hasher, parent, tokens + i * block_size, block_size, NULL, 0,
            digests + i * KEYED_BYTES,
        )
        parent = digests + i * KEYED_BYTES


cdef void keyed_block(
    const KeyedHash* hasher,
    const uint8_t* parent,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
    const uint8_t* extra,
    Py_ssize_t num_extra,
    uint8_t* digest,
) noexcept nogil:
    cdef kvc_sip state
    cdef uint64_t tail
    cdef bint wide = any_bits(tokens, num_tokens) > <uint64_t> 0x7FFFFFFF
    tail = begin(hasher, num_tokens, wide, num_extra, &state)
    if wide:
        kvc_absorb_wide(&state, tokens, num_tokens)
    else:
        kvc_absorb_narrowed(&state, tokens, num_tokens)
    kvc_absorb_bytes(&state, extra, num_extra)
    kvc_finish(&state, parent, tail, digest)


cdef inline uint64_t any_bits(const int64_t* tokens, Py_ssize_t n) noexcept nogil:
    """All tokens or-ed: above 2^31 - 1 if one is, above 2^63 - 1 if one is negative."""
    cdef uint64_t bits = 0
    cdef Py_ssize_t i
    for i in range(n):
        bits |= <uint64_t> tokens[i]
    return bits


cdef object as_tokens(object tokens):
    """Tokens as a C-contiguous array, shape (n,): int32, or int64 if one needs it.

    Raises: as `kvcache.hashing.tokens`.
    """
    cdef TokenSource source
    held = describe_tokens(tokens, &source)
    if source.count == 0:
        return np.empty(0, np.int32)
    if source.width == sizeof(int32_t):
        return held
    if isinstance(held, bytes):
        held = np.frombuffer(held, np.int64)
    wide = any_bits(<const int64_t*> source.data, source.count) >> 31
    return held if wide else held.astype(np.int32)


cdef const uint8_t* as_parent(object parent, const KeyedHash* hasher) except NULL:
    """Where the parent's digest lies; None stands for the root."""
    if parent is None:
        return hasher.root
    if not isinstance(parent, bytes):
        raise TypeError(f"a parent must be bytes, got {parent!r}")
    if PyBytes_GET_SIZE(parent) != KEYED_BYTES:
        raise ValueError(
            f"a parent must have {KEYED_BYTES} bytes, got {len(parent)}: {parent!r}"
        )
    return <const uint8_t*> PyBytes_AS_STRING(parent)


cdef void chain_of_source(
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
    """`keyed_chain` as `CompiledHash` has it."""
    cdef const KeyedHash* hasher = <const KeyedHash*> state
    if source.width == sizeof(int32_t):
        keyed_chain(
            hasher, parent, <const int32_t*> source.data + first, block_size,
            num_blocks, digests,
        )
    else:
        keyed_chain_wide(
            hasher, parent, <const int64_t*> source.data + first, block_size,
            num_blocks, digests,
        )


cdef size_t no_scratch(size_t parent_length, size_t block_size) noexcept nogil:
    return 0


@cython.final
cdef class Keyed(CompiledHash):
    """The hash `keyed` under one key: SipHash-1-3 with 128-bit digests.

    Digests of two keys have nothing to do with each other. The key cannot be read back.
    A hash function as the others are: called with (parent, tokens, extra keys) it gives
    the block's digest, extra keys going in as pickle writes them; called with any other
    object, the digest of that object's pickle.

    Args:
        key: 16 secret bytes; from `os.urandom` if None.
        path: One of `PATHS`, the first (the fastest here) if None. All agree.

    Raises:
        TypeError: The key is not bytes.
        ValueError: It has not 16 bytes, or this machine does not have the path.
    """

    def __cinit__(self, key=None, *, path=None):
        if key is None:
            key = os.urandom(KEYED_BYTES)
        if not isinstance(key, bytes):
            raise TypeError(f"a key must be bytes, got a {type(key).__name__}")
        if PyBytes_GET_SIZE(key) != KEYED_BYTES:
            raise ValueError(f"a key must have {KEYED_BYTES} bytes, got {len(key)}")
        if path is None:
            path = PATHS[0]
        if path not in PATHS:
            raise ValueError(f"path must be one of {PATHS}, got {path!r}")
        keyed_init(
            &self.hasher,
            <const uint8_t*> PyBytes_AS_STRING(key),
            KVC_AVX2 if path == "avx2" else KVC_PORTABLE,
        )
        self.hash_chain = chain_of_source
        self.scratch_bytes = no_scratch
        self.state = &self.hasher
        self.digest_length = self.parent_length = KEYED_BYTES
        # CompiledHash's field; the property below is what Python reads.
        (<CompiledHash> self).root = PyBytes_FromStringAndSize(
            <char*> self.hasher.root, KEYED_BYTES
        )

    def __call__(self, value, /):
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], bytes):
            parent, tokens, extra_keys = value
            extra = b"" if extra_keys is None else pickle.dumps(extra_keys, 5)
            return self.hash_block(tokens, parent, extra)
        return self.hash_block((), None, pickle.dumps(value, 5))

    def __reduce__(self):
        raise TypeError("a Keyed holds a secret and cannot be pickled or copied")

    @property
    def root(self):
        """Parent of a first block: 16 bytes, derived from the key."""
        return PyBytes_FromStringAndSize(<char*> self.hasher.root, KEYED_BYTES)

    @property
    def path(self):
        """How blocks are hashed: one of `PATHS`."""
        return "avx2" if self.hasher.path == KVC_AVX2 else "portable"

    def hash_blocks(self, tokens, block_size, parent=None):
        """Digests of the full blocks of a prompt, uint8, shape (n, 16).

        Args:
            tokens: Ints from 0 to 2**63 - 1: an array, shape (m,), or a sequence. Those
                behind the last full block are checked and left out.
            block_size: Tokens a block, at least 1.
            parent: Digest of the block before them, 16 bytes, or None for the first.

        Raises:
            TypeError, ValueError: An argument is not of its type or range.
        """
        cdef Py_ssize_t size = as_int(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        cdef const uint8_t* before = as_parent(parent, &self.hasher)
        cdef cnp.ndarray held = as_tokens(tokens)
        cdef cnp.npy_intp[2] shape
        shape[0] = cnp.PyArray_DIM(held, 0) // size
        shape[1] = KEYED_BYTES
        cdef cnp.ndarray digests = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_UINT8)
        cdef void* data = cnp.PyArray_DATA(held)
        cdef uint8_t* out = <uint8_t*> cnp.PyArray_DATA(digests)
        if cnp.PyArray_TYPE(held) == cnp.NPY_INT32:
            keyed_chain(
                &self.hasher, before, <const int32_t*> data, size, shape[0], out
            )
        else:
            keyed_chain_wide(
                &self.hasher, before, <const int64_t*> data, size, shape[0], out
            )
        return digests

    def hash_block(self, tokens, parent=None, extra=b""):
        """Digest of one block, 16 bytes.

        Args:
            tokens: As `hash_blocks`; all of them are the block.
            parent: As `hash_blocks`.
            extra: Bytes that identify the block besides its tokens, such as encoded
                extra keys. Empty ones count as none.

        Raises:
            TypeError, ValueError: An argument is not of its type or range.
        """
        cdef const uint8_t* before = as_parent(parent, &self.hasher)
        if not isinstance(extra, bytes):
            raise TypeError(f"extra must be bytes, got {extra!r}")
        if PyBytes_GET_SIZE(extra) > MAX_EXTRA:
            raise ValueError(f"extra must have at most {MAX_EXTRA} bytes")
        cdef cnp.ndarray held = np.asarray(as_tokens(tokens), np.int64)
        cdef Py_ssize_t n = cnp.PyArray_DIM(held, 0)
        if n > MAX_BLOCK_SIZE:
            raise ValueError(f"a block has at most {MAX_BLOCK_SIZE} tokens, got {n}")
        cdef uint8_t[KEYED_BYTES] digest
        keyed_block(
            &self.hasher, before, <const int64_t*> cnp.PyArray_DATA(held), n,
            <const uint8_t*> PyBytes_AS_STRING(extra), PyBytes_GET_SIZE(extra), digest,
        )
        return PyBytes_FromStringAndSize(<char*> digest, KEYED_BYTES)
