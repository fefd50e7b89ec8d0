"""The requests of a manager: a row each, their tokens and block hashes.

Stores: a row in C for each request there may be, its content (request_content.py), its
digests one behind the other.
Invariant: a row is vacant or has a content; there is a digest for each full hash block
whose hash is known, and none for a token that was taken back.
Costs: O(1) a token and a hash. Threads: as the manager.
"""
cimport cython
cimport numpy as cnp
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from kvcache._args cimport as_ids, as_int
from kvcache._types cimport MAX_BLOCKS, MAX_DIGEST_BYTES
from kvcache.hashing.block_hasher cimport BlockHasher
from kvcache.manager.block_caching cimport tail_is_cached
from kvcache.manager.manager_state cimport (
    UNUSED,
    WAITING,
    Content,
    Group,
    Progress,
    Request,
    fills_at,
    lazily,
)

from kvcache.errors import BlockStateError
from kvcache.manager.request_content import RequestContent

cnp.import_array()


@cython.no_gc_clear
cdef class Requests:
    """What a `KVCacheManager` knows of its requests; not to be made itself."""

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds room for no request.
        self.contents, self.hashers, self.vacant = [], [], []
        self.state.hash_block_size = self.state.alignment = 1

    def __dealloc__(self):
        cdef int32_t i
        if self.state.content != NULL:
            for i in range(self.state.max_requests):
                PyMem_RawFree(self.state.content[i].digests)
        PyMem_RawFree(self.state.requests)
        PyMem_RawFree(self.state.content)
        PyMem_RawFree(self.state.progress)
        PyMem_RawFree(self.state.changed)
        PyMem_RawFree(self.state.busy)
        PyMem_RawFree(self.state.took)

    cdef int make_rows(self, Py_ssize_t count) except -1:
        """Memory for so many requests."""
        self.state.requests = <Request*> lazily(count, sizeof(Request), "requests")
        self.state.content = <Content*> lazily(count, sizeof(Content), "requests")
        self.state.progress = <Progress*> lazily(
            count + 1, sizeof(Progress), "requests"
        )
        self.state.changed = <int32_t*> lazily(count, sizeof(int32_t), "requests")
        self.state.busy = <int32_t*> lazily(count + 1, sizeof(int32_t), "requests")
        self.state.took = <int32_t*> lazily(count, sizeof(int32_t), "requests")
        self.state.max_requests = <int32_t> count
        self.contents, self.hashers = [None] * count, [None] * count
        self.vacant = list(range(count - 1, -1, -1))
        return 0

    cdef int check_not_serving(self) except -1:
        if self.state.serving:  # half of a request may be served
            raise BlockStateError("a hook cannot call its manager")
        return 0

    cdef int check_row(self, Py_ssize_t row) except -1:
        self.check_not_serving()
        if (
            not 0 <= row < self.state.max_requests
            or self.state.progress[row].status == UNUSED
        ):
            raise ValueError(f"row {row} is no request's")
        return 0

    cdef int32_t find_row(self, object row) except -1:
        cdef Py_ssize_t i = as_int(row, "row", -(2**31), 2**31 - 1)
        self.check_row(i)
        return <int32_t> i

    cdef cnp.ndarray as_rows(self, object rows):
        """Rows of requests as int32, checked."""
        cdef cnp.ndarray array = as_ids(rows)
        cdef int32_t* data = <int32_t*> cnp.PyArray_DATA(array)
        cdef Py_ssize_t i
        for i in range(cnp.PyArray_DIM(array, 0)):
            self.check_row(data[i])
        return array

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
        cdef int32_t row = self.next_row(count)
        self.add_hashes(row, made.block_hashes)
        self.state.requests[row].skip_lookup = skip_reading_prefix_cache
        return self.open_row(row, made)

    cdef int32_t open_request(
        self, int64_t num_tokens, const uint8_t* digests, Py_ssize_t num_hashes,
        Py_ssize_t length,
    ) except -1:
        """`add_request` for compiled callers; the digests are copied.

        No Python object is made. Of Python's methods, `append`, `truncate` and `fork`
        do not know such a request, nor do events.
        """
        cdef int32_t row = self.next_row(num_tokens)
        self.state.digest_length = <int32_t> length
        self.state.requests[row].skip_lookup = False
        self.append_digests(row, digests, num_hashes)
        return self.open_row(row, None)

    cdef int append_digests(
        self, int32_t row, const uint8_t* digests, Py_ssize_t count
    ) except -1:
        """`count` more block hashes, one behind the other."""
        cdef Content* content = &self.state.content[row]
        cdef Py_ssize_t length = self.state.digest_length
        self.reserve_digests(row, count)
        memcpy(content.digests + content.num_hashes * length, digests, count * length)
        content.num_hashes += <int32_t> count
        self.wake(row)
        return 0

    cdef void wake(self, int32_t row) noexcept:
        """There are more hashes: blocks may be cached that could not be."""
        cdef Progress* progress = &self.state.progress[row]
        cdef Group* group
        cdef int32_t g
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            progress.idle_until = <int32_t> min(
                <int64_t> progress.idle_until, fills_at(&self.state, group, row) - 1
            )
            if not tail_is_cached(&self.state, group, row):
                progress.idle_until = 0

    cdef int32_t next_row(self, int64_t num_tokens) except -1:
        """The row that a request of so many tokens would have, vacant as yet."""
        if not self.vacant:
            raise ValueError(
                f"there are {self.state.max_requests} requests already"
            )
        cdef int32_t row = self.vacant[len(self.vacant) - 1]
        self.state.content[row].num_tokens = <int32_t> num_tokens
        self.state.content[row].num_hashes = 0
        return row

    cdef int32_t open_row(self, int32_t row, object content) except -1:
        """The next row is a request's from now on."""
        cdef Request* request = &self.state.requests[row]
        cdef Progress* progress = &self.state.progress[row]
        request.num_prompt = self.state.content[row].num_tokens
        request.num_in_flight = request.hit_length = request.num_preemptions = 0
        request.matched = False
        progress.num_computed = progress.idle_until = 0
        progress.status = WAITING
        self.contents[row] = content
        self.hashers[row] = None if content is None else content.hasher
        self.vacant.pop()
        return row

    cdef int reserve_digests(self, int32_t row, Py_ssize_t count) except -1:
        """Room for `count` more block hashes."""
        cdef Content* content = &self.state.content[row]
        cdef Request* request = &self.state.requests[row]
        cdef Py_ssize_t capacity
        cdef uint8_t* bigger
        if content.num_hashes + count > request.hash_capacity:
            # A prompt is there as a whole; what comes behind it comes bit by bit.
            capacity = content.num_hashes + count
            if content.num_hashes:
                capacity = 2 * capacity + 8
            bigger = <uint8_t*> PyMem_RawRealloc(
                content.digests, capacity * MAX_DIGEST_BYTES
            )
            if bigger == NULL:
                raise MemoryError(f"cannot keep {capacity} block hashes")
            content.digests = bigger
            request.hash_capacity = <int32_t> capacity
        return 0

    cdef int add_hashes(self, int32_t row, object hashes) except -1:
        """Append block hashes to a request's; `num_tokens` says how many fit."""
        cdef Content* content = &self.state.content[row]
        cdef Py_ssize_t have = content.num_hashes, count = len(hashes), length
        if count == 0:
            return 0
        if have + count > content.num_tokens // self.state.hash_block_size:
            raise ValueError(
                f"{have + count} block hashes of {self.state.hash_block_size} tokens"
                f" each for a request of {content.num_tokens}"
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
        self.reserve_digests(row, count)
        self.state.digest_length = <int32_t> length
        for digest in hashes:
            memcpy(content.digests + have * length, <char*> <bytes> digest, length)
            have += 1
        content.num_hashes = <int32_t> have
        self.wake(row)
        return 0

    cdef int forget(self, int32_t row) except -1:
        self.state.progress[row].status = UNUSED
        self.contents[row] = self.hashers[row] = None
        self.vacant.append(row)
        return 0

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
        made = self.contents[at]
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
        content.num_tokens += <int32_t> count
        try:
            self.add_hashes(at, fresh)
        except BaseException:
            content.num_tokens -= <int32_t> count
            raise
        made.block_hashes += fresh

    cdef int grow(self, int32_t row, object tokens, Py_ssize_t count) except -1:
        """Add tokens; their hashes follow."""
        cdef object content = self.contents[row]
        cdef int64_t before = self.state.content[row].num_tokens
        if self.keep_token_ids:
            fresh = content.append(tokens)
        else:
            fresh = (<BlockHasher> self.hashers[row]).append(tokens)
        if self.contents[row] is not content:
            raise BlockStateError(f"request {row} went away during the call")
        self.state.content[row].num_tokens = <int32_t> (before + count)
        if fresh:
            try:
                self.add_hashes(row, fresh)
            except BaseException:
                self.cut(row, before)
                raise
        return 0

    cdef int cut(self, int32_t row, int64_t num_tokens) except -1:
        """Forget all tokens but the first, and the hashes that cover others."""
        cdef Content* content = &self.state.content[row]
        content.num_tokens = <int32_t> num_tokens
        content.num_hashes = min(
            content.num_hashes, <int32_t> (num_tokens // self.state.hash_block_size)
        )
        self.contents[row].truncate(num_tokens, content.num_hashes)
        return 0

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

    def num_tokens(self, row):
        """Number of a request's tokens that are known."""
        return self.state.content[self.find_row(row)].num_tokens

    @property
    def num_requests(self):
        """Number of requests, waiting ones included."""
        return self.state.max_requests - len(self.vacant)
