"""The block tables of a manager: a row a request, a table a group.

Stores: block ids as int32, one array a group, and how many of a row are the request's.
Invariant: the ids of a row stand in the order of their tokens; those behind num_blocks
mean nothing.
Costs: 4 bytes a block of max_model_len for each request and group, taken from the
system as it is used; views cost no copy. Threads: as the manager.
"""
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcache._args cimport as_ids, as_int, new_ids
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate, deallocate, lazily
from kvcache._types cimport MAX_BLOCKS, MAX_DIGEST_BYTES, group_suffix
from kvcache.manager.calls cimport manager_slot_mapping, manager_take_changed_rows
from kvcache.manager.manager_state cimport (
    CHUNKED_LOCAL,
    CROSS_ATTENTION,
    FULL_ATTENTION,
    MAMBA,
    MAX_REQUESTS,
    MAX_SPECS,
    NOT_TRACKED,
    RUNNING,
    SLIDING_WINDOW,
    GroupRow,
    Content,
    Progress,
    Request,
    cdiv,
    num_skipped,
    table_row,
)

from kvcache.errors import BlockStateError
from kvcache.manager import groups as kinds

cnp.import_array()

KINDS = {
    kinds.FullAttention: FULL_ATTENTION,
    kinds.SlidingWindow: SLIDING_WINDOW,
    kinds.ChunkedLocal: CHUNKED_LOCAL,
    kinds.Mamba: MAMBA,
    kinds.CrossAttention: CROSS_ATTENTION,
}


@cython.no_gc_clear
cdef class BlockTables(Requests):
    """The tables of a `KVCacheManager`; not to be made itself."""

    def __dealloc__(self):
        self.free_tables()

    cdef void free_tables(self) noexcept:
        """Have no groups."""
        cdef int32_t i
        for i in range(self.state.num_groups):
            deallocate(self.state.groups[i].table)
            deallocate(self.state.groups[i].rows)
        deallocate(self.state.groups)
        deallocate(self.state.scratch)
        deallocate(self.state.taken)
        self.state.groups, self.state.scratch, self.state.taken = NULL, NULL, NULL
        self.state.num_groups = self.state.taken_capacity = 0

    cdef int build(self, tuple groups, object max_num_requests) except -1:
        """Memory for so many requests; after an error `free_tables` is to be called."""
        cdef Py_ssize_t count = as_int(
            max_num_requests, "max_num_requests", 1, MAX_REQUESTS
        )
        cdef Py_ssize_t longest = self.state.max_model_len, width, widest = 1
        cdef Group* group
        cdef Py_ssize_t g, row
        if len(groups) > MAX_SPECS:
            raise ValueError(f"{len(groups)} groups are too many, at most {MAX_SPECS}")
        self.state.groups = <Group*> allocate(len(groups), sizeof(Group), "groups")
        self.state.num_groups = <int32_t> len(groups)
        for g in range(len(groups)):
            group = &self.state.groups[g]
            width = cdiv(longest, groups[g].block_size) + 1
            width += getattr(groups[g], "num_speculative_blocks", 0)
            if width > MAX_BLOCKS:
                raise ValueError(f"a table row of {width} blocks is too long")
            group.width = <int32_t> width
            widest = max(widest, width)
            group.table = <int32_t*> lazily(count * width, sizeof(int32_t), "tables")
            group.rows = <GroupRow*> lazily(count, sizeof(GroupRow), "requests")
        self.state.scratch = <int32_t*> lazily(widest, sizeof(int32_t), "a table row")
        self.make_rows(count)
        for g in range(len(groups)):
            for row in range(count):
                self.state.groups[g].rows[row].num_cached = NOT_TRACKED
        return 0

    cdef int read_groups(self, tuple groups, Py_ssize_t in_flight) except -1:
        cdef Py_ssize_t longest = self.state.max_model_len, tokens, g
        cdef Group* group
        specs = []
        for each in groups:
            spec = spec_of(each)
            if spec not in specs:
                specs.append(spec)
        # Full attention first: what it finds bounds the others.
        specs.sort(key=lambda spec: spec[0] is not kinds.FullAttention)
        self.state.num_specs = <int32_t> len(specs)
        eagle = {spec: False for spec in specs}
        named = any(getattr(each, "eagle", False) for each in groups)
        for each in groups:
            if self.state.use_eagle and (not named or getattr(each, "eagle", False)):
                eagle[spec_of(each)] = True
        for g in range(len(groups)):
            each = groups[g]
            group = &self.state.groups[g]
            group.kind = KINDS[type(each)]
            group.block_size = each.block_size
            group.hash_scale = max(each.block_size // self.state.hash_block_size, 1)
            if group.kind not in (FULL_ATTENTION, CROSS_ATTENTION):
                self.state.drops_blocks = True
            group.suffix = group_suffix(<unsigned int> g)
            group.spec = <int32_t> specs.index(spec_of(each))
            group.eagle = eagle[spec_of(each)]
            group.max_admission = MAX_BLOCKS
            if group.kind == SLIDING_WINDOW:
                group.window = as_int(each.window, "window", 1, MAX_BLOCKS)
                group.extra_retained = as_int(
                    each.extra_retained_tokens, "extra_retained_tokens", 0, MAX_BLOCKS
                )
                tokens = group.window - 1 + group.extra_retained + in_flight
                # One more: a window need not begin where a block does.
                group.max_admission = <int32_t> (
                    cdiv(min(tokens, longest), group.block_size) + 1
                )
            elif group.kind == CHUNKED_LOCAL:
                group.window = as_int(each.chunk, "chunk", 1, MAX_BLOCKS)
                tokens = min(group.window + in_flight, longest)
                group.max_admission = <int32_t> cdiv(tokens, group.block_size)
            elif group.kind == MAMBA:
                group.spec_blocks = each.num_speculative_blocks
        return 0

    cdef Group* group(self, object group_id) except NULL:
        return &self.state.groups[
            as_int(group_id, "kv_cache_group_id", 0, self.state.num_groups - 1)
        ]

    cdef object row_view(self, const Group* group, int32_t row):
        """A group's blocks of a request, int32, without a copy."""
        cdef cnp.npy_intp shape = group.rows[row].num_blocks
        cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(
            1, &shape, cnp.NPY_INT32, table_row(group, row)
        )
        cnp.set_array_base(array, self)
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
        return array

    cdef int check_window(self, int32_t row, int64_t num_tokens) except -1:
        """Prove that the blocks are there that the token behind so many attends to."""
        cdef Group* group
        cdef Py_ssize_t g
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            if group.rows[row].num_nulls > (
                num_skipped(group, num_tokens) // group.block_size
            ):
                raise BlockStateError(
                    f"request {row} cannot go on from {num_tokens} tokens: the window"
                    " had passed, and blocks in it were given back"
                )
        return 0

    cdef int check_unshared(self, int32_t row, int64_t num_tokens) except -1:
        """Prove that nobody else uses a block that tokens behind these will change."""
        cdef Group* group
        cdef int32_t* ids
        cdef Py_ssize_t g, i
        for g in range(self.state.num_groups):
            group = &self.state.groups[g]
            if group.kind == CROSS_ATTENTION:
                continue
            ids = table_row(group, row)
            for i in range(num_tokens // group.block_size, group.rows[row].num_blocks):
                if ids[i] and self.state.pool.rows[ids[i]].ref_cnt > 1:
                    raise BlockStateError(
                        f"request {row} cannot be cut to {num_tokens} tokens: others"
                        f" use block {ids[i]}, which holds those behind"
                    )
        return 0

    @cython.critical_section
    def set_num_computed_tokens(self, row, num_tokens):
        """Have a request compute its last tokens again.

        For instance the last one of a prompt whose KV values a connector brought whole,
        or those that it failed to bring.

        Raises:
            ValueError: So many are not computed.
            BlockStateError: Blocks that the next token attends to were given back.
        """
        cdef int32_t at = self.find_row(row)
        cdef Request* request = &self.state.requests[at]
        cdef Progress* progress = &self.state.progress[at]
        cdef Py_ssize_t count = as_int(
            num_tokens, "num_tokens", 0, progress.num_computed
        )
        self.check_window(at, count)
        progress.num_computed = <int32_t> count
        request.num_in_flight = min(request.num_in_flight, <int32_t> count)

    @cython.critical_section
    def truncate(self, row, num_tokens):
        """Take back a request's last tokens, for instance drafts that were rejected.

        Hashes that covered them are withdrawn; blocks stay the request's. Tokens of
        blocks that are cached already cannot be taken back.

        Raises:
            ValueError: There are not so many tokens.
            BlockStateError: A block that is cached or that others use holds one of
                them, or blocks that the next token attends to were given back.
        """
        cdef int32_t at = self.find_row(row)
        cdef Request* request = &self.state.requests[at]
        cdef Progress* progress = &self.state.progress[at]
        cdef int32_t keep = <int32_t> as_int(
            num_tokens, "num_tokens", 1, self.state.content[at].num_tokens
        )
        cdef Py_ssize_t g
        for g in range(self.state.num_groups):
            if keep < (
                <int64_t> self.state.groups[g].rows[at].num_cached
                * self.state.groups[g].block_size
            ):
                raise BlockStateError(
                    f"request {row} cannot be cut to {keep} tokens:"
                    f" {self.state.groups[g].rows[at].num_cached} blocks are cached"
                )
        self.check_window(at, keep)
        self.check_unshared(at, keep)
        self.cut(at, keep)
        request.num_prompt = min(request.num_prompt, keep)
        progress.num_computed = min(progress.num_computed, keep)
        request.matched = False
        request.hit_length = 0

    @cython.critical_section
    def num_computed_tokens(self, row):
        """How many of them are computed, or will be by the steps under way."""
        return self.state.progress[self.find_row(row)].num_computed

    @cython.critical_section
    def set_in_flight(self, row, num_tokens):
        """Say how many of the computed tokens are in steps still under way.

        The blocks that those steps read stay, though they are outside the window.
        """
        cdef int32_t at = self.find_row(row)
        self.state.requests[at].num_in_flight = <int32_t> as_int(
            num_tokens, "num_tokens", 0, self.state.progress[at].num_computed
        )

    cdef Py_ssize_t table_bytes(self) noexcept:
        cdef Py_ssize_t a_row = sizeof(Request) + sizeof(Content) + sizeof(Progress)
        a_row += 4 * sizeof(int32_t)  # `changed`, `busy`, `took` and `vacant`
        cdef Py_ssize_t total = 0, g, row, widest = 1
        if self.state.groups == NULL:
            return 0
        for g in range(self.state.num_groups):
            a_row += self.state.groups[g].width * sizeof(int32_t) + sizeof(GroupRow)
            widest = max(widest, <Py_ssize_t> self.state.groups[g].width)
        for row in range(self.state.max_requests):
            total += self.state.requests[row].hash_capacity * MAX_DIGEST_BYTES
        total += self.state.num_groups * sizeof(Group)
        total += (widest + self.state.taken_capacity) * sizeof(int32_t)  # `scratch`
        # Nobody's row, and nobody's place in `busy`.
        total += sizeof(Progress) + sizeof(int32_t)
        return total + self.state.max_requests * a_row

    @cython.critical_section
    def block_ids(self, row, kv_cache_group_id=0):
        """A request's block ids in a group, int32, shape (n,), read-only, not a copy.

        Null blocks (0) stand for those outside the window. It shows what the table row
        holds: copy it to keep it beyond the next call.
        """
        cdef int32_t at = self.find_row(row)
        return self.row_view(self.group(kv_cache_group_id), at)

    @cython.critical_section
    def block_table(self, kv_cache_group_id=0):
        """A group's table, int32, shape (max_num_requests, n), read-only, not a copy.

        Only the first `num_blocks(row)` ids of a row mean anything.
        """
        cdef Group* group = self.group(kv_cache_group_id)
        cdef cnp.npy_intp[2] shape
        cdef cnp.ndarray array
        shape[0], shape[1] = self.state.max_requests, group.width
        array = cnp.PyArray_SimpleNewFromData(2, shape, cnp.NPY_INT32, group.table)
        cnp.set_array_base(array, self)
        cnp.PyArray_CLEARFLAGS(array, cnp.NPY_ARRAY_WRITEABLE)
        return array

    @cython.critical_section
    def num_blocks(self, row, kv_cache_group_id=0):
        """Number of blocks in a request's table row, null blocks included."""
        return self.group(kv_cache_group_id).rows[self.find_row(row)].num_blocks

    @cython.critical_section
    def take_changed_rows(self):
        """Rows whose tables changed since the last call, int32, in order of change."""
        cdef cnp.ndarray rows = new_ids(self.state.num_changed)
        manager_take_changed_rows(&self.state, <int32_t*> cnp.PyArray_DATA(rows))
        return rows

    @cython.critical_section
    def slot_mapping(self, rows, num_new_tokens, kv_cache_group_id=0):
        """Where the KV values of a step's tokens go: block id * block size + offset.

        Args:
            rows: The requests, int32, shape (n,).
            num_new_tokens: For each, how many of its computed tokens, the last ones,
                are the step's; shape (n,).
            kv_cache_group_id: The group.

        Returns:
            int64, shape (sum of num_new_tokens,).

        Raises:
            ValueError: A request has not computed so many tokens.
        """
        cdef cnp.ndarray array = self.as_rows(rows), counts = as_ids(num_new_tokens)
        cdef int32_t* data = <int32_t*> cnp.PyArray_DATA(array)
        cdef int32_t* news = <int32_t*> cnp.PyArray_DATA(counts)
        cdef Group* group = self.group(kv_cache_group_id)
        cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0), i
        cdef cnp.npy_intp total = 0
        cdef int64_t computed
        if cnp.PyArray_DIM(counts, 0) != n:
            raise ValueError(f"{len(counts)} numbers of tokens for {n} requests")
        for i in range(n):
            computed = self.state.progress[data[i]].num_computed
            if not 0 <= news[i] <= computed or computed > (
                <int64_t> group.rows[data[i]].num_blocks * group.block_size
            ):
                raise ValueError(
                    f"request {data[i]} has slots for {computed} computed tokens, not"
                    f" for {news[i]} of them"
                )
            total += news[i]
        cdef cnp.ndarray mapping = cnp.PyArray_SimpleNew(1, &total, cnp.NPY_INT64)
        manager_slot_mapping(
            &self.state, data, news, n, <int32_t> kv_cache_group_id,
            <int64_t*> cnp.PyArray_DATA(mapping),
        )
        return mapping

    @cython.critical_section
    def occupancy(self):
        """(blocks in use, slots of theirs that hold computed tokens), of all groups.

        A block that several requests use counts its slots for each of them.
        """
        cdef Py_ssize_t row, g
        cdef int64_t slots = 0, held
        cdef Group* group
        for row in range(self.state.max_requests):
            if self.state.progress[row].status == RUNNING:
                for g in range(self.state.num_groups):
                    group = &self.state.groups[g]
                    held = (
                        <int64_t> group.rows[row].num_blocks * group.block_size
                    )
                    held = min(held, <int64_t> self.state.progress[row].num_computed)
                    held -= <int64_t> group.rows[row].num_nulls * group.block_size
                    slots += max(held, <int64_t> 0)
        return (
            self.state.pool.num_blocks - 1 - self.state.pool.queue.num_free,
            slots,
        )


cdef object spec_of(object group):
    """What groups that are looked up together have in common."""
    return (type(group), tuple(
        value for name, value in vars(group).items() if name != "eagle"
    ))
