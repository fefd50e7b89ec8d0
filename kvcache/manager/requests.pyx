"""The requests of a manager: a row each, their tokens and block hashes.

Stores: a row in C for each request there may be, its content (request_content.py), its
digests one behind the other.
Invariant: a row is vacant or has a content; there is a digest for each full hash block
whose hash is known, and none for a token that was taken back.
Costs: O(1) a token and a hash. Threads: as the manager.
"""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memcpy

from kvcache._args cimport as_ids, as_int, no_copy
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport deallocate, lazily
from kvcache._types cimport MAX_BLOCKS, MAX_DIGEST_BYTES
from kvcache.hashing.block_hasher cimport BlockHasher
from kvcache.manager.manager_state cimport Content, Progress, Request
from kvcache.manager.request_rows cimport (
    close_row,
    is_request,
    next_row,
    open_row,
    reserve_digests,
    wake,
)

from kvcache.errors import BlockStateError
from kvcache.manager.request_content import RequestContent

cnp.import_array()


@cython.no_gc_clear
cdef class Requests:
    """What a `KVCacheManager` knows of its requests; not to be made itself."""

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds room for no request.
        self.contents, self.hashers = [], []
        self.state.hash_block_size = self.state.alignment = 1

    def __dealloc__(self):
        self.free_rows()

    cdef void free_rows(self) noexcept:
        """Have no memory for requests, and none."""
        cdef int32_t i
        for i in range(self.state.max_requests):
            deallocate(self.state.content[i].digests)
        deallocate(self.state.requests)
        deallocate(self.state.content)
        deallocate(self.state.progress)
        deallocate(self.state.changed)
        deallocate(self.state.busy)
        deallocate(self.state.took)
        deallocate(self.state.vacant)
        self.state.requests, self.state.content = NULL, NULL
        self.state.progress, self.state.changed = NULL, NULL
        self.state.busy, self.state.took, self.state.vacant = NULL, NULL, NULL
        self.state.max_requests = self.state.num_vacant = 0

    def __reduce__(self):
        raise no_copy(self)

    cdef int make_rows(self, Py_ssize_t count) except -1:
        """Memory for so many requests; after an error `free_rows` is to be called."""
        cdef Py_ssize_t i
        self.contents, self.hashers = [None] * count, [None] * count
        self.state.requests = <Request*> lazily(count, sizeof(Request), "requests")
        self.state.content = <Content*> lazily(count, sizeof(Content), "requests")
        self.state.progress = <Progress*> lazily(
            count + 1, sizeof(Progress), "requests"
        )
        self.state.changed = <int32_t*> lazily(count, sizeof(int32_t), "requests")
        self.state.busy = <int32_t*> lazily(count + 1, sizeof(int32_t), "requests")
        self.state.took = <int32_t*> lazily(count, sizeof(int32_t), "requests")
        self.state.max_requests = <int32_t> count
        self.state.vacant = <int32_t*> lazily(count, sizeof(int32_t), "requests")
        for i in range(count):
            self.state.vacant[i] = <int32_t> (count - 1 - i)
        self.state.num_vacant = <int32_t> count
        return 0

    cdef int check_not_serving(self) except -1:
        if self.state.serving:  # half of a request may be served
            raise BlockStateError("a hook cannot call its manager")
        return 0

    cdef int check_row(self, Py_ssize_t row) except -1:
        self.check_not_serving()
        if not is_request(&self.state, row):
            raise ValueError(f"row {row} is no request's")
        return 0

    cdef int32_t find_row(self, object row) except -1:
        cdef Py_ssize_t i = as_int(row, "row", -(2**31), 2**31 - 1)
        self.check_row(i)
        return <int32_t> i

    cdef object as_rows(self, object rows):
        """Rows of requests as int32, checked."""
        cdef cnp.ndarray array = as_ids(rows)
        cdef int32_t* data = <int32_t*> cnp.PyArray_DATA(array)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(array, 0)):
            self.check_row(data[i])
        return array

    @cython.critical_section
    def add_request(
        self,
        tokens=None,
        *,
        hashes=(),
        num_tokens=None,
        skip_reading_prefix_cache=False,
        **content,
    ):
        """Make a request known; it holds nothing yet.

        Args:
            tokens: Its prompt, ints from 0 to 2**63 - 1 in an array or a sequence; the
                manager then makes and keeps its hashes.
            hashes: Or the block hashes of its prompt, bytes of one length, and
            num_tokens: the length of the prompt.
            skip_reading_prefix_cache: Whether the whole prompt is to be computed.
            content: lora_request, mm_features, cache_salt, prompt_embeds, session_id:
                see `RequestContent`.

        Returns:
            Its row, an int from 0 to max_num_requests - 1.

        Raises:
            ValueError: There are max_num_requests already, the prompt is empty or too
                long, there are more hashes than full blocks, or one has another length.
            TypeError: An argument is of the wrong type.
        """
        cdef Py_ssize_t count
        if (tokens is None) == (num_tokens is None):
            raise TypeError("a request has either tokens, or num_tokens and hashes")
        made = RequestContent(
            self.state.hash_block_size, self.hash_fn, tokens, hashes,
            for_events=self.keep_token_ids, **content,
        )
        if tokens is None:
            count = as_int(num_tokens, "num_tokens", 1, self.state.max_model_len)
        else:
            count = made.hasher.num_tokens
            if not 1 <= count <= self.state.max_model_len:
                raise ValueError(
                    f"a prompt has 1 to {self.state.max_model_len} tokens, got {count}"
                )
        cdef bint skip = skip_reading_prefix_cache
        cdef int32_t row = self.vacant_row(count)
        self.reserve_hashes(row, made.block_hashes, count)
        if made.block_hashes:
            self.write_hashes(row, made.block_hashes)
        open_row(&self.state)
        self.state.requests[row].skip_lookup = skip
        self.state.requests[row].has_object = True
        self.contents[row], self.hashers[row] = made, made.hasher
        return row

    cdef int32_t vacant_row(self, int64_t num_tokens) except -1:
        cdef int32_t row = next_row(&self.state, num_tokens)
        if row < 0:
            raise ValueError(f"there are {self.state.max_requests} requests already")
        return row

    cdef object content_of(self, int32_t row):
        """What Python knows of a request."""
        if not self.state.requests[row].has_object:
            raise BlockStateError(f"request {row} was made by compiled code")
        return self.contents[row]

    cdef int reserve_hashes(
        self, int32_t row, object hashes, int64_t num_tokens
    ) except -1:
        """Prove that a request of so many tokens can have these hashes more."""
        cdef Content* content = &self.state.content[row]
        cdef Py_ssize_t have = content.num_hashes, count = len(hashes), length
        if count == 0:
            return 0
        if have + count > num_tokens // self.state.hash_block_size:
            raise ValueError(
                f"{have + count} block hashes of {self.state.hash_block_size} tokens"
                f" each for a request of {num_tokens}"
            )
        length = self.state.digest_length
        for digest in hashes:
            if type(digest) is not bytes:
                raise TypeError(f"a block hash must be bytes, got {digest!r}")
            if length == 0:
                length = len(digest)
            if len(digest) != length or not 0 < length <= MAX_DIGEST_BYTES:
                raise ValueError(
                    f"block hashes here have {length} bytes of 1 to {MAX_DIGEST_BYTES},"
                    f" got {len(digest)}: {digest!r}"
                )
        if not reserve_digests(&self.state, row, count):
            raise MemoryError(f"cannot keep {have + count} block hashes")
        return 0

    cdef void write_hashes(self, int32_t row, object hashes) noexcept:
        """Append block hashes, for which there is room, to a request's."""
        cdef Content* content = &self.state.content[row]
        cdef Py_ssize_t length
        for digest in <list> hashes:
            length = PyBytes_GET_SIZE(digest)
            self.state.digest_length = <int32_t> length
            memcpy(
                content.digests + content.num_hashes * length,
                PyBytes_AS_STRING(digest), length,
            )
            content.num_hashes += 1
        wake(&self.state, row)

    cdef int forget(self, int32_t row) except -1:
        close_row(&self.state, row)
        self.contents[row] = self.hashers[row] = None
        return 0

    @cython.critical_section
    def append(self, row, tokens=None, *, num_tokens=None, hashes=()):
        """Add tokens that a request has generated, or those of a next turn.

        Args:
            row: The request.
            tokens: A token id or several, where the manager makes the hashes.
            num_tokens: Else how many there are more, and
            hashes: the hashes of blocks that became full.

        Raises:
            TypeError, ValueError: An argument is of the wrong type or range, or the
                request has the other kind of content. Nothing was added.
        """
        cdef int32_t at = self.find_row(row)
        cdef Content* content = &self.state.content[at]
        cdef Py_ssize_t count
        made = self.content_of(at)
        if (tokens is None) != (made.hasher is None):
            raise TypeError(
                f"request {row} was made with"
                f" {'hashes' if made.hasher is None else 'tokens'}"
            )
        if tokens is None:
            count = as_int(num_tokens, "num_tokens", 0, MAX_BLOCKS)
        else:
            if not hasattr(tokens, "__len__"):
                tokens = as_int(tokens, "a token id", 0, INT64_MAX)
            count = 1 if isinstance(tokens, int) else len(tokens)
        if content.num_tokens + count > self.state.max_model_len:
            raise ValueError(
                f"request {row} would have {content.num_tokens + count} tokens, the"
                f" limit is {self.state.max_model_len}"
            )
        if tokens is not None:
            self.grow(at, tokens, count)
            return
        fresh = list(hashes)
        self.reserve_hashes(at, fresh, content.num_tokens + count)
        (<list> made.block_hashes).extend(fresh)
        content.num_tokens += <int32_t> count
        if fresh:
            self.write_hashes(at, fresh)

    cdef int grow(self, int32_t row, object tokens, Py_ssize_t count) except -1:
        """Add tokens; their hashes follow."""
        cdef object content = self.content_of(row)
        cdef int64_t before = self.state.content[row].num_tokens
        if self.keep_token_ids:
            fresh = content.append(tokens)
        else:
            fresh = (<BlockHasher> self.hashers[row]).append(tokens)
        if self.contents[row] is not content:
            raise BlockStateError(f"request {row} went away during the call")
        if fresh:
            try:
                self.reserve_hashes(row, fresh, before + count)
            except BaseException:
                content.truncate(before, self.state.content[row].num_hashes)
                raise
        self.state.content[row].num_tokens = <int32_t> (before + count)
        if fresh:
            self.write_hashes(row, fresh)
        return 0

    cdef int cut(self, int32_t row, int64_t num_tokens) except -1:
        """Forget all tokens but the first, and the hashes that cover others."""
        cdef Content* content = &self.state.content[row]
        cdef int32_t num_hashes = min(
            content.num_hashes, <int32_t> (num_tokens // self.state.hash_block_size)
        )
        self.content_of(row).truncate(num_tokens, num_hashes)
        content.num_tokens, content.num_hashes = <int32_t> num_tokens, num_hashes
        return 0

    @cython.critical_section
    def append_step(self, rows, tokens):
        """Add one token to each of several requests; all made with tokens.

        Args:
            rows: The requests, int32, shape (n,), none twice.
            tokens: Their token ids, shape (n,).

        Raises:
            TypeError, ValueError: As `append`; nothing was added.
        """
        # A copy: what makes extra keys may write to the caller's array.
        cdef cnp.ndarray array = self.as_rows(rows).copy()
        cdef int32_t* data = <int32_t*> cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0), i
        cdef list ids = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        if len(ids) != n:
            raise ValueError(f"{len(ids)} tokens for {n} requests")
        for i in range(n):
            ids[i] = as_int(ids[i], "a token id", 0, INT64_MAX)
            self.content_of(data[i])
            if self.hashers[data[i]] is None:
                raise TypeError(f"request {data[i]} was made with hashes")
            if self.state.content[data[i]].num_tokens >= self.state.max_model_len:
                raise ValueError(
                    f"request {data[i]} has {self.state.max_model_len} tokens already"
                )
        if len(set(array.tolist())) != n:
            raise ValueError("a request is listed more than once")
        i = 0
        try:
            for i in range(n):
                self.grow(data[i], ids[i], 1)
        except BaseException:
            for i in range(i):
                self.cut(data[i], self.state.content[data[i]].num_tokens - 1)
            raise

    @cython.critical_section
    def num_tokens(self, row):
        """Number of a request's tokens that are known."""
        return self.state.content[self.find_row(row)].num_tokens

    @property
    @cython.critical_section
    def num_requests(self):
        """Number of requests, waiting ones included."""
        return self.state.max_requests - self.state.num_vacant
