"""A manager's operations for compiled callers: arguments checked, no GIL.

Stores: nothing; works on `ManagerState` and its pool.
Invariant: a call that returns an error has changed nothing, but for RAISED.
Costs: as the operations, and a comparison or two an argument.
Threads: one at a time on one manager; the caller sees to it.
"""
from kvcache._memory cimport copy_bytes
from kvcache._types cimport MAX_BLOCKS, MAX_DIGEST_BYTES
from kvcache.manager.manager_state cimport (
    PREEMPTED,
    RUNNING,
    Content,
    Group,
    Request,
    table_row,
)
from kvcache.manager.prefix_match cimport hits_hold, match_request
from kvcache.manager.request_rows cimport (
    close_row,
    is_request,
    next_row,
    open_row,
    reserve_digests,
    wake,
)
from kvcache.manager.slots cimport give_back, serve
from kvcache.manager.step cimport begin_step, finish_step


cdef int32_t manager_add_request(
    ManagerState* m,
    int64_t num_tokens,
    const uint8_t* digests,
    Py_ssize_t num_hashes,
    Py_ssize_t digest_length,
) noexcept nogil:
    cdef int32_t row
    cdef int bad
    if m.loud != NULL or m.serving:
        return BAD_STATE
    if not 0 < num_tokens <= m.max_model_len or not (
        0 < digest_length <= MAX_DIGEST_BYTES
    ):
        return BAD_ARGUMENT
    if m.digest_length and digest_length != m.digest_length:
        return BAD_ARGUMENT
    row = next_row(m, num_tokens)
    if row < 0:
        return BAD_STATE
    bad = add_digests(m, row, num_tokens, digests, num_hashes, digest_length)
    if bad:
        return bad
    open_row(m)
    return row


cdef int add_digests(
    ManagerState* m,
    int32_t row,
    int64_t num_tokens,
    const uint8_t* digests,
    Py_ssize_t num_hashes,
    Py_ssize_t length,
) noexcept nogil:
    """More block hashes of a request that has so many tokens."""
    cdef Content* content = &m.content[row]
    if not 0 <= num_hashes <= num_tokens // m.hash_block_size - content.num_hashes:
        return BAD_ARGUMENT
    if not reserve_digests(m, row, num_hashes):
        return NO_MEMORY
    copy_bytes(
        content.digests + content.num_hashes * length, digests, num_hashes * length
    )
    content.num_hashes += <int32_t> num_hashes
    m.digest_length = <int32_t> length
    return 0


cdef int manager_append(
    ManagerState* m,
    int32_t row,
    int64_t num_tokens,
    const uint8_t* digests,
    Py_ssize_t num_hashes,
) noexcept nogil:
    cdef int64_t total
    cdef int bad
    if not is_request(m, row) or not 0 <= num_tokens <= MAX_BLOCKS:
        return BAD_ARGUMENT
    if m.serving or m.requests[row].has_object:
        return BAD_STATE
    total = m.content[row].num_tokens + num_tokens
    if total > m.max_model_len or (num_hashes and not m.digest_length):
        return BAD_ARGUMENT
    bad = add_digests(m, row, total, digests, num_hashes, m.digest_length)
    if bad:
        return bad
    m.content[row].num_tokens = <int32_t> total
    if num_hashes:
        wake(m, row)
    return 0


cdef int64_t manager_match(
    ManagerState* m, int32_t row, int64_t max_length
) noexcept nogil:
    cdef Request* request
    cdef int64_t num_tokens
    if not is_request(m, row):
        return BAD_ARGUMENT
    if m.serving or m.progress[row].status == RUNNING:
        return BAD_STATE
    request = &m.requests[row]
    request.hit_length = 0
    if m.enable_caching and not request.skip_lookup:
        num_tokens = m.content[row].num_tokens
        max_length = num_tokens - 1 if max_length < 0 else min(max_length, num_tokens)
        request.hit_length = <int32_t> match_request(m, row, max_length)
        request.matched = True
    return request.hit_length


cdef int manager_allocate_slots(
    ManagerState* m, int32_t row, const Slots* slots
) except RAISED nogil:
    if not is_request(m, row):
        return BAD_ARGUMENT
    if m.serving or (m.requests[row].matched and not hits_hold(m, row)):
        return BAD_STATE
    if not asks_well(m, row, slots):
        return BAD_ARGUMENT
    return serve(m, row, slots)


cdef bint asks_well(
    const ManagerState* m, int32_t row, const Slots* slots
) noexcept nogil:
    cdef int64_t hits = m.requests[row].hit_length
    cdef int64_t total = m.progress[row].num_computed + hits
    if not (
        0 <= slots.num_new <= MAX_BLOCKS
        and 0 <= slots.num_lookahead <= MAX_BLOCKS
        and 0 <= slots.num_external <= MAX_BLOCKS
        and 0 <= slots.num_encoder <= m.max_model_len
        and slots.reserved_blocks >= 0
    ):
        return False
    if slots.num_external and m.progress[row].status == RUNNING:
        return False
    return slots.num_new + slots.num_external + hits > 0 and (
        total + slots.num_external + slots.num_new <= m.max_model_len
    )


cdef Py_ssize_t manager_allocate_step(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* num_new,
    Py_ssize_t n,
    int64_t num_lookahead,
    int32_t* starts,
) except RAISED nogil:
    if m.serving:
        return BAD_STATE
    if n < 0 or not 0 <= num_lookahead <= MAX_BLOCKS:
        return BAD_ARGUMENT
    if not begin_step(m, rows, num_new, n, num_lookahead):
        return BAD_ARGUMENT
    return finish_step(m, rows, num_new, n, num_lookahead, starts)


cdef int manager_preempt(ManagerState* m, int32_t row) noexcept nogil:
    if not is_request(m, row):
        return BAD_ARGUMENT
    if m.serving or m.progress[row].status != RUNNING:
        return BAD_STATE
    give_back(m, row)
    m.requests[row].num_in_flight = 0
    m.requests[row].num_preemptions += 1
    m.progress[row].num_computed = 0
    m.progress[row].status = PREEMPTED
    return 0


cdef int manager_free(ManagerState* m, int32_t row) noexcept nogil:
    if not is_request(m, row):
        return BAD_ARGUMENT
    if m.serving:
        return BAD_STATE
    give_back(m, row)
    close_row(m, row)
    return 0


cdef const int32_t* manager_block_ids(
    const ManagerState* m, int32_t row, int32_t group, int32_t* num_blocks
) noexcept nogil:
    if not is_request(m, row) or not 0 <= group < m.num_groups:
        return NULL
    num_blocks[0] = m.groups[group].rows[row].num_blocks
    return table_row(&m.groups[group], row)


cdef Py_ssize_t manager_slot_mapping(
    const ManagerState* m,
    const int32_t* rows,
    const int32_t* num_new,
    Py_ssize_t n,
    int32_t group,
    int64_t* slots,
) noexcept nogil:
    cdef const Group* its
    cdef const int32_t* ids
    cdef int64_t computed, token
    cdef Py_ssize_t i, at = 0
    if not 0 <= group < m.num_groups:
        return BAD_ARGUMENT
    its = &m.groups[group]
    for i in range(n):
        if not is_request(m, rows[i]):
            return BAD_ARGUMENT
        computed = m.progress[rows[i]].num_computed
        if not 0 <= num_new[i] <= computed or computed > (
            <int64_t> its.rows[rows[i]].num_blocks * its.block_size
        ):
            return BAD_ARGUMENT
    for i in range(n):
        computed = m.progress[rows[i]].num_computed
        ids = table_row(its, rows[i])
        for token in range(computed - num_new[i], computed):
            slots[at] = (
                <int64_t> ids[token // its.block_size] * its.block_size
                + token % its.block_size
            )
            at += 1
    return at


cdef int32_t manager_take_changed_rows(ManagerState* m, int32_t* rows) noexcept nogil:
    cdef int32_t i, n = m.num_changed
    for i in range(n):
        rows[i] = m.changed[i]
        m.progress[rows[i]].changed = False
    m.num_changed = 0
    return n
