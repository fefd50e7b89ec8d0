"""The rows of a manager's requests in C: given out, filled with hashes, taken back.

Stores: nothing; works on `ManagerState`.
Invariant: a row is vacant or a request's; `vacant` lists the former, the next one last.
Costs: O(1) a row and a hash.
Threads: one at a time on one manager; the caller sees to it.
"""
from libc.stdint cimport uint8_t

from kvcache._memory cimport moved
from kvcache._types cimport MAX_DIGEST_BYTES
from kvcache.manager.block_caching cimport tail_is_cached
from kvcache.manager.manager_state cimport (
    WAITING,
    Content,
    Group,
    Progress,
    Request,
    fills_at,
)


cdef int32_t next_row(ManagerState* m, int64_t num_tokens) noexcept nogil:
    cdef int32_t row
    if m.num_vacant == 0:
        return -1
    row = m.vacant[m.num_vacant - 1]
    m.content[row].num_tokens = <int32_t> num_tokens
    m.content[row].num_hashes = 0
    return row


cdef void open_row(ManagerState* m) noexcept nogil:
    cdef int32_t row = m.vacant[m.num_vacant - 1]
    cdef Request* request = &m.requests[row]
    cdef Progress* progress = &m.progress[row]
    m.num_vacant -= 1
    request.num_prompt = m.content[row].num_tokens
    request.num_in_flight = request.hit_length = request.num_preemptions = 0
    request.matched = request.skip_lookup = request.has_object = False
    progress.num_computed = progress.idle_until = 0
    progress.status = WAITING


cdef void close_row(ManagerState* m, int32_t row) noexcept nogil:
    m.progress[row].status = UNUSED
    m.vacant[m.num_vacant] = row
    m.num_vacant += 1


cdef bint reserve_digests(
    ManagerState* m, int32_t row, Py_ssize_t count
) noexcept nogil:
    cdef Content* content = &m.content[row]
    cdef Request* request = &m.requests[row]
    cdef Py_ssize_t capacity = content.num_hashes + count
    cdef uint8_t* bigger
    if capacity > request.hash_capacity:
        # A prompt is there as a whole; what comes behind it comes bit by bit.
        if content.num_hashes:
            capacity = 2 * capacity + 8
        bigger = <uint8_t*> moved(
            content.digests, <size_t> content.num_hashes * m.digest_length, capacity,
            MAX_DIGEST_BYTES,
        )
        if bigger == NULL:
            return False
        content.digests = bigger
        request.hash_capacity = <int32_t> capacity
    return True


cdef void wake(ManagerState* m, int32_t row) noexcept nogil:
    cdef Progress* progress = &m.progress[row]
    cdef Group* group
    cdef int32_t g
    for g in range(m.num_groups):
        group = &m.groups[g]
        progress.idle_until = <int32_t> min(
            <int64_t> progress.idle_until, fills_at(m, group, row) - 1
        )
        if not tail_is_cached(m, group, row):
            progress.idle_until = 0
