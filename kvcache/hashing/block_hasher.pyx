"""The block hashes of requests that grow.

Stores: a `BlockHasher` the tokens of one request (8 bytes each) and the hashes of its
full blocks; a `RequestBlockHasher` nothing, the request keeps both.
Invariant: the hashes are those that `hash_blocks` gives for the tokens there are now: a
hash that covered a removed token is gone before another token comes. A failed call
changes nothing.
Costs: O(1) a token, and a hash a block; to truncate, O(hashes withdrawn).
Threads: one at a time; each call is atomic.
"""
cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int32_t

from kvcache._args cimport as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport copy_bytes, deallocate, moved
from kvcache.hashing.blocks cimport (
    MAX_BLOCK_SIZE,
    checked_parent,
    compiled_form,
    hash_range,
)
from kvcache.hashing.tokens cimport as_token, as_tokens

from kvcache.errors import BlockStateError
from kvcache.hashing.extra_keys import blocks_extra_keys
from kvcache.hashing.functions import sha256

cnp.import_array()


@cython.final
cdef class BlockHasher:
    """The block hashes of a prompt that grows and may be cut.

    Args:
        block_size: Tokens a block.
        hash_fn: Any function of an object to bytes.
        parent: Hash of the block before the first; None if that begins the prompt.
        extra_keys: Called with the first token of a block and the end of what its hash
            covers, lookahead included; returns its extra keys, or None.
        num_lookahead_tokens: See `hash_blocks`.

    Raises:
        TypeError, ValueError: See `hash_blocks`.
    """

    def __cinit__(self):
        self.block_size = 1  # a divisor, even if __init__ never runs
        self.hashes = []

    @cython.critical_section
    def __init__(
        self,
        block_size,
        hash_fn=sha256,
        *,
        parent=None,
        extra_keys=None,
        num_lookahead_tokens=0,
    ):
        if self.hash_fn is not None:
            raise BlockStateError("a BlockHasher cannot be initialised twice")
        self.block_size = as_int(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        self.num_lookahead_tokens = as_int(
            num_lookahead_tokens, "num_lookahead_tokens", 0, MAX_BLOCK_SIZE
        )
        if extra_keys is not None and not callable(extra_keys):
            raise TypeError(f"extra_keys must be callable, got {extra_keys!r}")
        self.compiled = compiled_form(hash_fn)
        self.parent = checked_parent(parent, hash_fn, self.compiled)
        self.extra_keys = extra_keys
        self.hash_fn = hash_fn

    def __dealloc__(self):
        deallocate(self.tokens)

    def __reduce__(self):
        raise no_copy(self)

    @property
    @cython.critical_section
    def block_hashes(self):
        """The hashes of all full blocks: one list, which grows and shrinks."""
        return self.hashes

    @property
    @cython.critical_section
    def token_ids(self):
        """The tokens, int64, shape (num_tokens,), a copy."""
        cdef cnp.npy_intp shape = self.num_tokens
        cdef cnp.ndarray ids = cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_INT64)
        copy_bytes(
            cnp.PyArray_DATA(ids), self.tokens, self.num_tokens * sizeof(int64_t)
        )
        return ids

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes of the tokens kept."""
        return self.capacity * sizeof(int64_t)

    @cython.critical_section
    def append(self, tokens):
        """Add tokens at the end.

        Args:
            tokens: One token id, or several in any form that `hash_blocks` takes.

        Returns:
            The hashes of the blocks that became full, a list of bytes.

        Raises:
            TypeError, ValueError: See `hash_blocks`. Nothing was added.
        """
        cdef TokenSource source
        cdef int64_t token
        cdef object _alive = None
        self._must_be_idle()
        if PyLong_CheckExact(tokens):
            token = as_token(tokens)
            source.count = 1
            source.width = sizeof(int64_t)
            source.data = <const char*> &token
        else:
            _alive = as_tokens(tokens, &source)
        cdef Py_ssize_t count = self.num_tokens + source.count
        self._reserve(count)
        self._copy(&source)
        cdef list fresh = self._new_hashes(count)
        if fresh:
            self.hashes += fresh
        self.num_tokens = count
        return fresh

    @cython.critical_section
    def truncate(self, num_tokens):
        """Keep the first num_tokens tokens.

        Returns:
            The hashes that covered others, and are withdrawn, a list of bytes.

        Raises:
            ValueError: There are not so many tokens.
        """
        self._must_be_idle()
        cdef Py_ssize_t count = as_int(num_tokens, "num_tokens", 0, self.num_tokens)
        cdef Py_ssize_t kept = self._num_blocks(count)
        cdef list withdrawn = self.hashes[kept:]
        del self.hashes[kept:]
        self.num_tokens = count
        return withdrawn

    cdef Py_ssize_t _num_blocks(self, Py_ssize_t num_tokens) noexcept:
        """Blocks whose hash covers none but the first num_tokens tokens."""
        return max(num_tokens - self.num_lookahead_tokens, 0) // self.block_size

    cdef int _must_be_idle(self) except -1:
        if self.busy:
            raise BlockStateError(
                "a BlockHasher was called back by its own hash_fn or extra_keys"
            )
        return 0

    cdef int _reserve(self, Py_ssize_t count) except -1:
        """Room for count tokens."""
        cdef Py_ssize_t capacity = max(count, 2 * self.capacity, 64)
        cdef void* memory
        if count > self.capacity:
            memory = moved(
                self.tokens, self.num_tokens * sizeof(int64_t), capacity,
                sizeof(int64_t),
            )
            if memory == NULL:
                raise MemoryError(
                    f"cannot allocate {capacity * sizeof(int64_t)} bytes for tokens"
                )
            self.tokens = <int64_t*> memory
            self.capacity = capacity
        return 0

    cdef void _copy(self, const TokenSource* source) noexcept:
        """Write tokens behind the last, where there is room for them."""
        cdef int64_t* out = self.tokens + self.num_tokens
        cdef const int32_t* narrow = <const int32_t*> source.data
        cdef Py_ssize_t i
        if source.width == sizeof(int64_t):
            copy_bytes(out, source.data, source.count * sizeof(int64_t))
        else:
            for i in range(source.count):
                out[i] = narrow[i]

    cdef list _new_hashes(self, Py_ssize_t count):
        """Hashes that the tokens up to `count` add; nothing is changed."""
        cdef Py_ssize_t known = len(self.hashes)
        cdef Py_ssize_t first = known * self.block_size
        cdef Py_ssize_t start, covered = self.block_size + self.num_lookahead_tokens
        cdef TokenSource source
        cdef list keys = None
        if count < first + covered:  # the usual case, without a division
            return []
        cdef Py_ssize_t fresh = self._num_blocks(count) - known
        source.count = count
        source.width = sizeof(int64_t)
        source.data = <const char*> self.tokens
        self.busy = True
        try:
            if self.extra_keys is not None:
                keys = []
                for start in range(
                    first, first + fresh * self.block_size, self.block_size
                ):
                    keys.append(self.extra_keys(start, start + covered))
            return hash_range(
                self.hash_fn,
                self.compiled,
                self.hashes[known - 1] if known else self.parent,
                &source,
                first,
                self.block_size,
                fresh,
                self.num_lookahead_tokens,
                keys,
                True,
            )
        finally:
            self.busy = False


@cython.final
cdef class RequestBlockHasher:
    """What `get_request_block_hasher` makes: called with a request."""

    def __cinit__(self):
        self.hash_block_size = 1  # a divisor, even if __init__ never runs

    @cython.critical_section
    def __init__(self, hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0):
        self.hash_block_size = as_int(
            hash_block_size, "hash_block_size", 1, MAX_BLOCK_SIZE
        )
        self.num_hash_lookahead_tokens = as_int(
            num_hash_lookahead_tokens, "num_hash_lookahead_tokens", 0, MAX_BLOCK_SIZE
        )
        self.compiled = compiled_form(caching_hash_fn)
        self.caching_hash_fn = caching_hash_fn

    def __reduce__(self):
        raise no_copy(self)

    @cython.critical_section
    def __call__(self, request, /):
        """Hashes of the request's full blocks that it has none for, a list of bytes.

        Args:
            request: Has `block_hashes`, `num_tokens`, `all_token_ids`, and what extra
                keys are made of (see extra_keys.py).

        Raises:
            TypeError, ValueError: A token, the last hash or a multimodal item is
                unusable.
        """
        cdef Py_ssize_t size = self.hash_block_size
        cdef Py_ssize_t ahead = self.num_hash_lookahead_tokens
        hashes = request.block_hashes
        cdef Py_ssize_t known = len(hashes)
        cdef Py_ssize_t num_tokens = request.num_tokens
        cdef Py_ssize_t first = known * size
        cdef Py_ssize_t fresh = (num_tokens - ahead - first) // size
        if num_tokens - ahead < first + size:
            return []
        cdef TokenSource source
        tokens = request.all_token_ids[first : first + fresh * size + ahead]
        cdef object _alive = as_tokens(tokens, &source)
        if source.count != fresh * size + ahead:
            raise ValueError(
                f"the request has num_tokens = {num_tokens}, but all_token_ids ends at"
                f" {first + source.count}"
            )
        keys = blocks_extra_keys(request, first, size, fresh, ahead)
        parent = hashes[known - 1] if known else None
        return hash_range(
            self.caching_hash_fn,
            self.compiled,
            checked_parent(parent, self.caching_hash_fn, self.compiled),
            &source,
            0,
            size,
            fresh,
            ahead,
            keys,
            False,
        )


def get_request_block_hasher(
    hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0
):
    """A function from a request to the hashes of blocks that it has none for.

    The signature and the hashes are vLLM 0.33's (v1/core/kv_cache_utils.py).

    Args:
        hash_block_size: Tokens a block.
        caching_hash_fn: Any function of an object to bytes.
        num_hash_lookahead_tokens: Tokens behind each block that its hash covers too.

    Raises:
        TypeError, ValueError: An argument is none of that.
    """
    return RequestBlockHasher(
        hash_block_size, caching_hash_fn, num_hash_lookahead_tokens
    )
