"""The per-request layer above a pool: which request holds which blocks.

Stores: a row a request and a table row a group (manager_state.pxd), the content of each
request (request_content.py), the pool.
Invariant: a request that is not running holds nothing; the references of the pool's
blocks are those of the tables (`check()`). A failed call changes nothing.
Costs: a request that needs no block costs O(groups), all others O(1) a block. Memory: 4
bytes a block of max_model_len for each request and group, taken as it is used.
Threads: one at a time; each call is atomic.
"""
cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset

from math import lcm

import numpy as np

from kvcache._args cimport as_ids, as_int, new_ids
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._types cimport MAX_BLOCKS, NULL_BLOCK
from kvcache.hashing.block_hasher cimport BlockHasher
from kvcache.manager.block_caching cimport to_be_cached
from kvcache.manager.calls cimport manager_match, manager_preempt
from kvcache.manager.manager_state cimport (
    CROSS_ATTENTION,
    MAMBA,
    RUNNING,
    UNUSED,
    Group,
    GroupRow,
    ManagerState,
    Progress,
    Request,
    note_change,
    table_row,
)
from kvcache.manager.prefix_match cimport hits_hold
from kvcache.manager.plan cimport new_blocks
from kvcache.manager.slots cimport (
    NO_ROOM,
    Served,
    give_back,
    is_idle,
    serve,
    settle,
)
from kvcache.manager.step cimport (
    begin_step,
    blocks_of_step,
    drop_step,
    finish_step,
    next_step,
    step_ids,
)

from kvcache import hashing
from kvcache.errors import BlockStateError
from kvcache.manager import block_tables
from kvcache.manager import groups as kinds
from kvcache.manager.stats import PrefixCacheStats

cnp.import_array()


@cython.final
@cython.no_gc_clear
cdef class KVCacheManager(BlockTables):
    """Block tables of all requests, over one pool.

    What it does is what vLLM 0.33's KVCacheManager, its coordinators and single-type
    managers do: the same block ids in the same order, hits and free counts. A request
    is an int, the row that `add_request` gives. The call order is add_request, match,
    allocate_slots (again and again, with append between), free.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        groups: The model's KV cache groups, see `kvcache.manager.groups`.
        hash_block_size: Tokens that each block hash adds; divides all block sizes. The
            smallest block size if None.
        max_model_len: Most tokens of a request.
        max_num_requests: Most requests at a time, waiting ones included; at most 2**20.
        max_in_flight_tokens: Most tokens in steps under way; max_model_len if None.
        enable_caching: Whether blocks are found again by their content.
        watermark: Share of the blocks that admission leaves free, 0.0 to 1.0.
        use_eagle: Whether a draft model needs the last block of a hit again, in the
            groups that say so, or in all if none does.
        enable_kv_cache_events: Whether to record events for `take_events`.
        metrics_collector: As `BlockPool`'s.
        hash_fn: What hashes tokens (`kvcache.hashing`), where no hashes are given.

    Raises:
        TypeError, ValueError: An argument is of the wrong type or range, or groups do
            not go together.
        MemoryError: There is not that much memory.
    """

    def __cinit__(self, *args, **kwargs):
        # Whatever happens to __init__, what follows finds a manager of no requests.
        self.block_pool = BlockPool(1, False, 1)
        self.groups, self.no_blocks = (), ()
        self.state.pool = &self.block_pool.state

    @cython.critical_section
    def __init__(
        self,
        num_blocks,
        groups,
        *,
        hash_block_size=None,
        max_model_len,
        max_num_requests,
        max_in_flight_tokens=None,
        enable_caching=True,
        watermark=0.0,
        use_eagle=False,
        enable_kv_cache_events=False,
        metrics_collector=None,
        hash_fn=hashing.keyed,
    ):
        if self.state.groups != NULL:
            raise ValueError("the manager is already made")
        cdef tuple held = tuple(groups)
        for group in held:
            if type(group) not in block_tables.KINDS:
                raise TypeError(f"expected a KV cache group, got {group!r}")
        if not held:
            raise ValueError("a manager needs a KV cache group")
        sizes = [
            as_int(group.block_size, "block_size", 1, MAX_BLOCKS) for group in held
        ]
        if hash_block_size is None:
            hash_block_size = min(sizes)
        unit = as_int(hash_block_size, "hash_block_size", 1, MAX_BLOCKS)
        cdef bint caching = enable_caching, eagle = use_eagle
        cdef double share = watermark
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"watermark must be from 0.0 to 1.0, got {watermark}")
        if caching:
            self.check_cacheable(held, unit, eagle)
        longest = as_int(max_model_len, "max_model_len", 1, MAX_BLOCKS)
        in_flight = longest if max_in_flight_tokens is None else as_int(
            max_in_flight_tokens, "max_in_flight_tokens", 1, MAX_BLOCKS
        )
        cdef BlockPool pool = BlockPool(
            num_blocks, caching, unit, enable_kv_cache_events, metrics_collector
        )
        self.state.max_model_len = longest
        self.state.use_eagle = eagle
        self.state.hash_block_size = unit
        self.state.alignment = <int32_t> as_int(
            lcm(*sizes), "the least common multiple of the block sizes", 1, MAX_BLOCKS
        )
        self.state.enable_caching = caching
        self.state.watermark_blocks = <int32_t> (share * pool.num_gpu_blocks)
        no_blocks = tuple([new_ids(0) for _ in held])
        try:
            self.build(held, max_num_requests)
            self.read_groups(held, in_flight)
        except BaseException:
            self.free_tables()
            self.free_rows()
            raise
        self.block_pool, self.groups, self.hash_fn = pool, held, hash_fn
        self.state.pool = &pool.state
        self.state.owner = <PyObject*> self
        self.state.cache_full, self.state.cache_partial = cache_full, cache_partial
        if pool.enable_kv_cache_events or metrics_collector is not None:
            self.state.loud = <PyObject*> pool
        self.keep_token_ids = pool.enable_kv_cache_events
        self.no_blocks = no_blocks

    @staticmethod
    def check_cacheable(groups, hash_block_size, use_eagle):
        """Refuse groups that vLLM 0.33 cannot cache together.

        Raises:
            ValueError: Names the first group, and why.
        """
        hash_block_size = as_int(hash_block_size, "hash_block_size", 1, MAX_BLOCKS)
        for group in groups:
            if isinstance(group, (kinds.Mamba, kinds.CrossAttention)):
                raise ValueError(f"{group} goes with enable_caching=False only")
            if group.block_size % hash_block_size:
                raise ValueError(
                    f"the block size of {group} is no multiple of hash_block_size"
                    f" {hash_block_size}"
                )
            if isinstance(group, kinds.ChunkedLocal):
                if use_eagle:
                    raise ValueError(f"{group} does not go with EAGLE")
                if any(other.block_size != group.block_size for other in groups):
                    raise ValueError(
                        f"{group} needs groups of its block size, got {groups}"
                    )
        if len(groups) == 1 and groups[0].block_size != hash_block_size:
            raise ValueError(
                f"with one group hash_block_size is its block size"
                f" {groups[0].block_size}, got {hash_block_size}"
            )

    # -- arguments ---------------------------------------------------------------

    cdef int check_slots(self, int32_t row, const Slots* slots) except -1:
        """Prove that a request may ask for this."""
        cdef Progress* progress = &self.state.progress[row]
        cdef Request* request = &self.state.requests[row]
        cdef int64_t hits = request.hit_length
        cdef int64_t total = progress.num_computed + hits + slots.num_external
        if slots.num_new == 0 and slots.num_external == 0 and hits == 0:
            raise ValueError(f"request {row} asks for no token and brings none")
        if total + slots.num_new > self.state.max_model_len:
            raise ValueError(
                f"request {row} would have {total + slots.num_new} tokens, the limit is"
                f" {self.state.max_model_len}"
            )
        if slots.num_external and progress.status == RUNNING:
            raise BlockStateError(f"request {row} runs: its tokens come from no cache")
        return 0

    # -- match and allocate ------------------------------------------------------

    @cython.critical_section
    def match(self, row, max_length=None):
        """Find the longest prefix of a request that is cached in every group.

        Nothing is held yet: `allocate_slots` takes the blocks, and checks that they are
        still there. A prefix never has the last token, which must be computed.

        Args:
            row: A request that is not running.
            max_length: Most tokens to find, num_tokens - 1 if None.

        Returns:
            The length in tokens.

        Raises:
            BlockStateError: The request is running.
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef int32_t at = self.find_row(row)
        cdef int64_t limit = -1
        if max_length is not None:
            limit = as_int(max_length, "max_length", 0, MAX_BLOCKS)
        if self.state.progress[at].status == RUNNING:
            raise BlockStateError(f"request {row} is running")
        return manager_match(&self.state, at, limit)

    @cython.critical_section
    def allocate_slots(
        self,
        row,
        num_new_tokens,
        *,
        num_lookahead_tokens=0,
        num_external_computed_tokens=0,
        num_encoder_tokens=0,
        delay_cache_blocks=False,
        full_sequence_must_fit=False,
        reserved_blocks=0,
        has_scheduled_requests=True,
    ):
        """Give a request slots for its next tokens, and cache what they fill.

        Afterwards the tokens count as computed. Blocks outside the window are given
        back first, also where the rest does not fit. What there is no memory to cache
        is left for the request's next call.

        Args:
            row: The request.
            num_new_tokens: Tokens to compute now.
            num_lookahead_tokens: Slots more, for drafts.
            num_external_computed_tokens: Tokens behind the prefix that was found whose
                KV values a connector brings.
            num_encoder_tokens: Length of the encoder's output.
            delay_cache_blocks: Whether `cache_blocks` will be called later, when the KV
                values have come.
            full_sequence_must_fit: Whether to refuse unless all tokens of the request
                would fit.
            reserved_blocks: Free blocks to leave to others.
            has_scheduled_requests: Whether others run, so that the watermark counts for
                a request that does not yet.

        Returns:
            The new block ids, int32: one array a group; None if they do not fit. Hits,
            and blocks for tokens that a connector brings, are not among them.

        Raises:
            BlockStateError: The prefix that was found is not cached any more: match
                again.
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef int32_t at, g, num_new
        cdef Request* request
        cdef Served served
        cdef GroupRow* held
        cdef tuple made = self.no_blocks
        cdef Slots slots
        cdef bint first
        cdef int64_t hits
        slots.num_new = as_int(num_new_tokens, "num_new_tokens", 0, MAX_BLOCKS)
        slots.num_lookahead = as_int(
            num_lookahead_tokens, "num_lookahead_tokens", 0, MAX_BLOCKS
        )
        slots.num_external = as_int(
            num_external_computed_tokens, "num_external_computed_tokens", 0, MAX_BLOCKS
        )
        slots.num_encoder = as_int(
            num_encoder_tokens, "num_encoder_tokens", 0, self.state.max_model_len
        )
        slots.reserved_blocks = <int32_t> as_int(
            reserved_blocks, "reserved_blocks", 0, MAX_BLOCKS
        )
        slots.delay_cache = delay_cache_blocks
        slots.must_fit = full_sequence_must_fit
        slots.has_scheduled = has_scheduled_requests
        while True:
            at = self.find_row(row)
            self.check_slots(at, &slots)
            if is_idle(&self.state, at, &slots) or self.has_room_for(made, at, &slots):
                break
            made = self.arrays_for(at, &slots)  # which may run foreign code
        request = &self.state.requests[at]
        if request.matched and not hits_hold(&self.state, at):
            raise BlockStateError(
                f"the prefix found for request {row} is not cached now: match again"
            )
        first = self.state.progress[at].status != RUNNING
        hits = request.hit_length
        self.state.serving = self.state.loud != NULL
        try:
            served = serve(&self.state, at, &slots)
        finally:
            self.state.serving = False
        if served == NO_ROOM:
            return None
        if first:
            self.record(at, hits)
        if made is self.no_blocks:
            return made
        for g in range(self.state.num_groups):
            held = &self.state.groups[g].rows[at]
            # Hits, and blocks whose tokens a connector brings, come before.
            num_new = held.num_blocks - held.first_new
            memcpy(
                cnp.PyArray_DATA(<cnp.ndarray> made[g]),
                table_row(&self.state.groups[g], at) + held.first_new,
                num_new * sizeof(int32_t),
            )
        return made

    cdef bint has_room_for(self, tuple made, int32_t row, const Slots* slots) noexcept:
        """Whether arrays have the sizes that `serve` will need."""
        cdef int32_t g
        for g in range(self.state.num_groups):
            if cnp.PyArray_DIM(<cnp.ndarray> made[g], 0) != new_blocks(
                &self.state, g, row, slots
            ):
                return False
        return True

    cdef tuple arrays_for(self, int32_t row, const Slots* slots):
        cdef int32_t g
        return tuple([
            new_ids(new_blocks(&self.state, g, row, slots))
            for g in range(self.state.num_groups)
        ])

    cdef void record(self, int32_t row, int64_t num_hits) noexcept:
        cdef Request* request = &self.state.requests[row]
        cdef Admissions* sums = &self.fresh
        if self.state.enable_caching and not request.skip_lookup:
            if request.num_preemptions > 0:
                sums = &self.resumed
            sums.requests += 1
            sums.queries += self.state.content[row].num_tokens
            sums.hits += num_hits

    @cython.critical_section
    def allocate_step(self, rows, num_new_tokens, *, num_lookahead_tokens=0):
        """Give the running requests of a step their slots, in order.

        It stops before the first that does not fit, so that the caller can preempt one
        and go on with the rest. With events or metrics it also stops before one, but
        for the first, where there is no memory to tell of its blocks.

        Args:
            rows: The requests, int32, shape (n,), all running, none twice.
            num_new_tokens: Tokens to compute for each, shape (n,), at least 1.
            num_lookahead_tokens: Slots more for each, for drafts.

        Returns:
            (num_served, new_block_ids, indptr): how many leading requests were served;
            their new block ids, int32; and where those of each request and group begin,
            int32 of num_served * num_groups + 1, group by group within a request.

        Raises:
            TypeError, ValueError: An argument is of the wrong type or range, or a
                request is not running. Nobody was served.
        """
        cdef cnp.ndarray array = as_ids(rows), counts = as_ids(num_new_tokens)
        if self.state.loud != NULL:  # a hook may write to the caller's arrays
            array, counts = array.copy(), counts.copy()
        cdef const int32_t* data = <int32_t*> cnp.PyArray_DATA(array)
        cdef const int32_t* news = <int32_t*> cnp.PyArray_DATA(counts)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0), served, count
        cdef int64_t lookahead, needed
        cdef cnp.ndarray ids = None, indptr
        cdef int32_t* starts
        cdef list numbers = None
        cdef tuple result
        if cnp.PyArray_DIM(counts, 0) != n:
            raise ValueError(f"{len(counts)} numbers of tokens for {n} requests")
        lookahead = as_int(num_lookahead_tokens, "num_lookahead_tokens", 0, MAX_BLOCKS)
        indptr = new_ids(n * self.state.num_groups + 1)
        starts = <int32_t*> cnp.PyArray_DATA(indptr)
        self.check_not_serving()
        if not begin_step(&self.state, data, news, n, lookahead):
            self.refuse_step(data, news, n)
        try:
            needed = blocks_of_step(&self.state, data, news, lookahead)
            number = n
            if self.state.loud != NULL or needed > self.state.pool.queue.num_free:
                numbers = list(range(n + 1))  # it need not be n
            ids = new_ids(min(needed, <int64_t> self.state.pool.num_blocks))
            result = PyTuple_New(3)
        except BaseException:
            drop_step(&self.state, data, news, n)
            raise
        # From here on a lack of memory stops the first request, or none.
        served = finish_step(&self.state, data, news, n, lookahead, starts)
        count = served * self.state.num_groups
        step_ids(&self.state, data, <int32_t*> cnp.PyArray_DATA(ids))
        shrink(ids, starts[count])
        shrink(indptr, count + 1)
        if numbers is not None:
            number = numbers[served]
        Py_INCREF(number)
        PyTuple_SET_ITEM(result, 0, number)
        Py_INCREF(ids)
        PyTuple_SET_ITEM(result, 1, ids)
        Py_INCREF(indptr)
        PyTuple_SET_ITEM(result, 2, indptr)
        return result

    cdef int refuse_step(
        self, const int32_t* rows, const int32_t* news, Py_ssize_t n
    ) except -1:
        """Say which request a step cannot have, and why."""
        cdef uint32_t step = next_step(&self.state)
        cdef Progress* progress
        cdef Py_ssize_t i
        for i in range(n):
            self.check_row(rows[i])
            progress = &self.state.progress[rows[i]]
            if progress.status != RUNNING:
                raise BlockStateError(f"request {rows[i]} is not running")
            if progress.step == step:
                raise ValueError(f"request {rows[i]} is listed more than once")
            if news[i] < 1:
                raise ValueError(f"request {rows[i]} asks for {news[i]} new tokens")
            total = <int64_t> progress.num_computed + news[i]
            if total > self.state.max_model_len:
                raise ValueError(
                    f"request {rows[i]} would have {total} tokens, the limit is"
                    f" {self.state.max_model_len}"
                )
            progress.step = step

    @cython.critical_section
    def cache_blocks(self, row, num_computed_tokens):
        """Cache a request's full blocks, for instance once a connector has filled them.

        Args:
            row: A running request.
            num_computed_tokens: Tokens at its start whose KV values are there.

        Raises:
            MemoryError: There is none to cache all of them; those that were cached
                stay so, and the request's next call caches the others.
            TypeError, ValueError: An argument is of the wrong type or range.
        """
        cdef int32_t at = self.find_row(row)
        cdef Progress* progress = &self.state.progress[at]
        cdef Py_ssize_t tokens = as_int(
            num_computed_tokens, "num_computed_tokens", 0,
            min(progress.num_computed, self.state.content[at].num_tokens),
        )
        if progress.status != RUNNING:
            raise BlockStateError(f"request {row} is not running")
        self.state.starved = False
        progress.idle_until = settle(&self.state, at, tokens)
        if self.state.starved:
            raise MemoryError(f"cannot cache all blocks of request {row}")

    # -- finish ------------------------------------------------------------------

    @cython.critical_section
    def free(self, row):
        """A request is done: its blocks go back, last ones first; the row is vacant."""
        cdef int32_t at = self.find_row(row)
        give_back(&self.state, at)
        self.forget(at)

    @cython.critical_section
    def preempt(self, row):
        """Take a running request's blocks; it waits, and computes its tokens again.

        Raises:
            BlockStateError: It is not running.
        """
        cdef int32_t at = self.find_row(row)
        if self.state.progress[at].status != RUNNING:
            raise BlockStateError(f"request {row} is not running")
        manager_preempt(&self.state, at)

    @cython.critical_section
    def pop_block_ids(self, row):
        """A request is done, but its blocks are still read: they stay in use.

        Returns:
            Their ids, int32, to be given to `block_pool.free_block_ids`, last first.
        """
        cdef int32_t at = self.find_row(row)
        cdef Py_ssize_t g, n = 0
        cdef Group* group
        cdef GroupRow* held
        cdef cnp.ndarray popped
        cdef int32_t* ids
        for g in range(self.state.num_groups):
            held = &self.state.groups[g].rows[at]
            n += held.num_blocks - held.num_nulls
        popped = new_ids(n)
        ids = <int32_t*> cnp.PyArray_DATA(popped)
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            held = &group.rows[at]
            n = held.num_blocks - held.num_nulls
            memcpy(ids, table_row(group, at) + held.num_nulls, n * sizeof(int32_t))
            ids += n
            held.num_blocks = held.num_nulls = 0
        give_back(&self.state, at)
        self.forget(at)
        return popped

    @cython.critical_section
    def fork(self, row):
        """A request that continues a running one: beams, or several samples.

        They share all blocks but those that are not full, of which the new one has
        copies of its own. Its next tokens are its own.

        Args:
            row: A running request, made with tokens or hashes.

        Returns:
            (row, copies): the new request, and the copies to make before it is run,
            int32 of shape (n, 2): source and destination block id. None if the copies
            do not fit.

        Raises:
            BlockStateError: The request is not running.
            ValueError: There are max_num_requests already.
        """
        cdef int32_t at = self.find_row(row), child
        cdef Py_ssize_t num_shared, num_copies
        cdef cnp.ndarray shared = new_ids(0), fresh = shared, copies = None
        self.count_fork(at, &num_shared, &num_copies)
        if num_copies > self.state.pool.queue.num_free:
            return None
        old = self.content_of(at)
        extra = {
            "lora_request": old.lora_request,
            "mm_features": old.mm_features,
            "cache_salt": old.cache_salt,
            "prompt_embeds": old.prompt_embeds,
            "session_id": old.session_id,
        }
        if old.hasher is None:
            child = self.add_request(
                hashes=old.block_hashes, num_tokens=self.state.content[at].num_tokens,
                **extra,
            )
        else:
            child = self.add_request(old.hasher.token_ids, **extra)
        try:
            while True:
                self.find_row(row)
                self.count_fork(at, &num_shared, &num_copies)
                if copies is not None and (
                    len(shared) == num_shared and len(fresh) == num_copies
                ):
                    break
                shared, fresh = new_ids(num_shared), new_ids(num_copies)
                copies = np.empty((num_copies, 2), np.int32)  # may run foreign code
                result = (child, copies)
            self.list_shared(at, <int32_t*> cnp.PyArray_DATA(shared))
            self.state.serving = True
            self.block_pool.touch_and_get(
                <int32_t*> cnp.PyArray_DATA(shared), num_shared,
                <int32_t*> cnp.PyArray_DATA(fresh), num_copies,
            )
        except BaseException:
            self.forget(child)
            raise
        finally:
            self.state.serving = False
        self.copy_row(
            at, child, <int32_t*> cnp.PyArray_DATA(fresh),
            <int32_t*> cnp.PyArray_DATA(copies),
        )
        return result

    cdef int count_fork(
        self, int32_t row, Py_ssize_t* num_shared, Py_ssize_t* num_copies
    ) except -1:
        """How many blocks a fork of a request shares, and how many it copies."""
        cdef Group* group
        cdef Py_ssize_t g, full, i
        if self.state.progress[row].status != RUNNING:
            raise BlockStateError(f"request {row} is not running")
        num_shared[0] = num_copies[0] = 0
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            full = shared_blocks(&self.state, group, row)
            num_shared[0] += full
            for i in range(full, group.rows[row].num_blocks):
                num_copies[0] += table_row(group, row)[i] != NULL_BLOCK
        return 0

    cdef void list_shared(self, int32_t row, int32_t* into) noexcept:
        """Write the ids of the blocks that a fork shares."""
        cdef Group* group
        cdef Py_ssize_t g, full
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            full = shared_blocks(&self.state, group, row)
            memcpy(into, table_row(group, row), full * sizeof(int32_t))
            into += full

    cdef void copy_row(
        self, int32_t source, int32_t target, const int32_t* fresh, int32_t* copies
    ) noexcept:
        """Have a request that was just made continue a running one.

        Args:
            fresh: Its own blocks, one for each that it does not share.
            copies: Gets pairs of source and destination.
        """
        cdef Request* old = &self.state.requests[source]
        cdef Request* new = &self.state.requests[target]
        cdef Progress* running = &self.state.progress[target]
        cdef Group* group
        cdef Py_ssize_t g, full, i
        cdef int32_t* ids
        cdef int32_t* into
        new.num_prompt, new.num_in_flight = old.num_prompt, old.num_in_flight
        new.skip_lookup = old.skip_lookup
        running.num_computed = self.state.progress[source].num_computed
        running.status = RUNNING
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            ids, into = table_row(group, source), table_row(group, target)
            full = shared_blocks(&self.state, group, source)
            group.rows[target] = group.rows[source]
            memcpy(into, ids, full * sizeof(int32_t))
            for i in range(full, group.rows[source].num_blocks):
                into[i] = NULL_BLOCK
                if ids[i] != NULL_BLOCK:
                    into[i] = fresh[0]
                    copies[0], copies[1] = ids[i], fresh[0]
                    fresh += 1
                    copies += 2
        note_change(&self.state, target)

    @cython.critical_section
    def evict_blocks(self, block_ids):
        """Take blocks' content out of the cache; see `BlockPool.evict_blocks`.

        Through the manager, since a request caches the end of its prompt again.
        """
        cdef int32_t row
        self.block_pool.evict_blocks(block_ids)
        for row in range(self.state.max_requests):
            self.state.progress[row].idle_until = 0

    @cython.critical_section
    def reset_prefix_cache(self):
        """Forget all cached content; whether it was done: not while blocks are used."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.was_reset = True
        return True

    # -- state -------------------------------------------------------------------

    @property
    @cython.critical_section
    def usage(self):
        """Share of the pool's blocks that is in use: 0.0 to 1.0."""
        return self.block_pool.get_usage()

    @property
    @cython.critical_section
    def prefix_cache_stats(self):
        """The statistics since they were last taken."""
        return PrefixCacheStats(
            self.fresh.requests, self.fresh.queries, self.fresh.hits,
            self.resumed.requests, self.resumed.queries, self.resumed.hits,
            bool(self.was_reset),
        )

    @cython.critical_section
    def take_prefix_cache_stats(self):
        """The statistics since the last call."""
        stats = self.prefix_cache_stats
        memset(&self.fresh, 0, sizeof(Admissions))
        memset(&self.resumed, 0, sizeof(Admissions))
        self.was_reset = False
        return stats

    @cython.critical_section
    def take_events(self):
        """The pool's events since the last call, oldest first; [] if they are off."""
        for event in self.block_pool.kv_event_queue:
            # vLLM's manager adds what the pool does not know.
            group_id = getattr(event, "group_idx", None)
            if group_id is not None and hasattr(event, "kv_cache_spec_kind"):
                group = self.groups[group_id]
                event.kv_cache_spec_kind = group.kind
                event.kv_cache_spec_sliding_window = getattr(group, "window", None)
        return self.block_pool.take_events()

    @property
    @cython.critical_section
    def nbytes(self):
        """Bytes held in C, the pool's included, as far as they are reserved."""
        cdef Py_ssize_t tokens = 0
        for hasher in self.hashers:
            if hasher is not None:
                tokens += (<BlockHasher> hasher).nbytes
        return self.block_pool.nbytes + self.table_bytes() + tokens

    @cython.critical_section
    def check(self):
        """Prove every invariant of the manager and its pool, in O(n).

        Raises:
            AssertionError: Names the first one that fails, and where.
        """
        cdef Py_ssize_t row, g, i
        cdef Group* group
        cdef GroupRow* held
        cdef int32_t* ids
        used = {}
        self.block_pool.check()
        vacant = {
            self.state.vacant[row] for row in range(self.state.num_vacant)
        }
        for row in range(self.state.max_requests):
            status = self.state.progress[row].status
            if (status == UNUSED) != (row in vacant):
                raise AssertionError(f"row {row} is wrongly vacant or not")
            for g in range(self.state.num_groups):
                group = &self.state.groups[g]
                held = &group.rows[row]
                ids = table_row(group, <int32_t> row)
                if status != RUNNING and held.num_blocks:
                    raise AssertionError(f"request {row} does not run and holds blocks")
                if not 0 <= held.num_nulls <= held.num_blocks <= group.width:
                    raise AssertionError(f"request {row} has {held.num_blocks} blocks")
                if status == RUNNING and group.kind != CROSS_ATTENTION and (
                    <int64_t> held.num_blocks * group.block_size
                    < self.state.progress[row].num_computed
                ):
                    raise AssertionError(f"request {row} lacks slots for its tokens")
                for i in range(held.num_blocks):
                    if ids[i] != NULL_BLOCK:
                        used[ids[i]] = used.get(ids[i], 0) + 1
                    if i < held.num_nulls and ids[i] != NULL_BLOCK:
                        raise AssertionError(f"request {row} still holds {ids[i]}")
        for block, count in used.items():
            if self.block_pool.state.rows[<Py_ssize_t> block].ref_cnt < count:
                raise AssertionError(f"block {block} is held {count} times")


cdef int cache_full(
    PyObject* owner, int32_t row, int32_t g, int32_t start, int32_t stop
) except -1:
    cdef KVCacheManager manager = <KVCacheManager> owner
    cdef Group* group = &manager.state.groups[g]
    cdef int32_t* ids = table_row(group, row)
    cdef int32_t i
    manager.block_pool.cache_full_blocks(
        manager.contents[row],
        [manager.block_pool.blocks[ids[i]] for i in range(stop)],
        start,
        stop,
        group.block_size,
        g,
        [to_be_cached(&manager.state, group, row, i) for i in range(start, stop)],
    )
    return 0


cdef int cache_partial(
    PyObject* owner, int32_t row, int32_t g, int32_t i, int64_t num_tokens
) except -1:
    cdef KVCacheManager manager = <KVCacheManager> owner
    cdef Group* group = &manager.state.groups[g]
    manager.block_pool.cache_partial_block(
        manager.contents[row],
        manager.block_pool.blocks[table_row(group, row)[i]],
        num_tokens,
        g,
        group.block_size,
    )
    return 0


cdef int shrink(cnp.ndarray array, Py_ssize_t length) except -1:
    """Give back what an array of our own has too much: in place, without an object."""
    cdef cnp.npy_intp shape = length
    cdef cnp.PyArray_Dims dims
    dims.ptr, dims.len = &shape, 1
    if cnp.PyArray_DIM(array, 0) > length:
        cnp.PyArray_Resize(array, &dims, 0, cnp.NPY_CORDER)
    return 0


cdef Py_ssize_t shared_blocks(
    const ManagerState* m, const Group* group, int32_t row
) noexcept:
    """Blocks at a request's start that its next tokens do not change."""
    # Drafts behind the known tokens may be rejected, and others come in their place.
    cdef int32_t full = min(m.progress[row].num_computed, m.content[row].num_tokens)
    full //= group.block_size
    if group.kind == MAMBA:
        return 0
    if group.kind == CROSS_ATTENTION:
        return group.rows[row].num_blocks
    return min(full, group.rows[row].num_blocks)
