"""One step of many running requests: each gets slots for its next tokens.

Stores: nothing; works on `ManagerState` and its pool.
Invariant: the arguments are proven while they are read, and what was counted by then is
taken back if they are bad. Requests behind one that does not fit are as they were.
Costs: some 24 instructions for a request that needs nothing, which is most of them: it
is counted as it is read. Others as slots.pyx has it; where the free list is in random
order, each block that is taken also waits for its row, whose address is in the row
before: 2.8 us a step become 4.8. Walking the list ahead of the takers only moves that.
Threads: one at a time on one manager; the caller sees to it.
"""
from libc.stdint cimport INT32_MAX

from kvcache.manager.block_caching cimport prefetch_events
from kvcache.manager.manager_state cimport (
    RUNNING,
    Group,
    GroupRow,
    Progress,
    table_row,
)
from kvcache.manager.plan cimport blocks_lacking, slots_needed
from kvcache.manager.slots cimport EXTENDED, NO_ROOM, Served, advance

from kvcache.errors import LACK_OF_MEMORY


cdef bint begin_step(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    Py_ssize_t n,
    int64_t num_lookahead,
) noexcept nogil:
    if n > m.max_requests:
        return False
    if not count_idle(m, rows, news, n, num_lookahead):
        take_back(m, rows, news, 0, n)
        return False
    prefetch_events(m, rows)
    m.serving = True
    return True


cdef int64_t blocks_of_step(
    const ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    int64_t num_lookahead,
) noexcept nogil:
    cdef const Group* group
    cdef int64_t needed, count = 0
    cdef int32_t k, g, row
    for k in range(m.num_busy):
        row = rows[m.busy[k]]
        needed = <int64_t> m.progress[row].num_computed + news[m.busy[k]]
        needed = min(needed + num_lookahead, m.max_model_len)
        for g in range(m.num_groups):
            group = &m.groups[g]
            count += blocks_lacking(group, row, slots_needed(group, needed, 0))
    return count


cdef Py_ssize_t finish_step(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    Py_ssize_t n,
    int64_t num_lookahead,
    int32_t* starts,
) except -2 nogil:
    cdef Py_ssize_t served = 0
    starts[0] = 0
    try:
        serve_busy(m, rows, news, n, num_lookahead, starts, &served)
    finally:
        m.serving = False
        if served < n:
            take_back(m, rows, news, served, n)
    return served


cdef void drop_step(
    ManagerState* m, const int32_t* rows, const int32_t* news, Py_ssize_t n
) noexcept nogil:
    m.serving = False
    take_back(m, rows, news, 0, n)


# Apart, since a function that has Python variables takes the GIL whenever it returns.
cdef Served advance_loudly(
    ManagerState* m, int32_t row, int64_t num_new, int64_t num_lookahead, bint first
) except? NO_ROOM with gil:
    """As `advance`, but there is no room either where there is no memory for events."""
    try:
        return advance(m, row, num_new, num_lookahead)
    except LACK_OF_MEMORY:
        if first:
            raise
        return NO_ROOM


cdef inline bint count_idle(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    Py_ssize_t n,
    int64_t num_lookahead,
) noexcept nogil:
    """Serve those who have their slots, list the others; whether all may be served."""
    cdef uint32_t nobody = <uint32_t> m.max_requests, row, step = next_step(m)
    cdef int32_t* busy = m.busy
    cdef Progress* all = m.progress
    cdef Progress* one
    cdef int32_t least = INT32_MAX
    cdef int64_t total
    cdef bint idle, bad = False
    cdef Py_ssize_t num_busy = 0, i
    all[nobody].step = step
    # Without a branch on what differs from request to request.
    for i in range(n):
        row = min(<uint32_t> rows[i], nobody)
        one = &all[row]
        bad |= one.step == step
        one.step = step
        least = min(least, news[i])
        total = <int64_t> one.num_computed + news[i]
        idle = total + num_lookahead <= one.idle_until
        one.num_computed = <int32_t> total if idle else one.num_computed
        busy[num_busy] = <int32_t> i
        num_busy += not idle
    m.num_busy = <int32_t> num_busy
    for i in range(num_busy):
        one = &all[min(<uint32_t> rows[busy[i]], nobody)]
        bad |= one.status != RUNNING
        bad |= <int64_t> one.num_computed + news[busy[i]] > m.max_model_len
    return not bad and least >= 1


cdef inline int serve_busy(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    Py_ssize_t n,
    int64_t num_lookahead,
    int32_t* starts,
    Py_ssize_t* served,
) except -1 nogil:
    """Serve those whom `count_idle` has listed, up to the first that does not fit."""
    cdef Py_ssize_t at = 1, i
    cdef int32_t num_ids = 0, k, g
    cdef GroupRow* held
    cdef Served how
    m.num_took = 0
    for k in range(m.num_busy):
        i = m.busy[k]
        served[0] = i
        if m.loud == NULL:
            how = advance(m, rows[i], news[i], num_lookahead)
        else:
            how = advance_loudly(m, rows[i], news[i], num_lookahead, i == 0)
        if how == EXTENDED:
            m.took[m.num_took] = <int32_t> i
            m.num_took += 1
            for at in range(at, i * m.num_groups + 1):
                starts[at] = num_ids
            at = i * m.num_groups + 1
            for g in range(m.num_groups):
                held = &m.groups[g].rows[rows[i]]
                num_ids += held.num_blocks - held.first_new
                starts[at + g] = num_ids
            at += m.num_groups
        elif how == NO_ROOM:
            n = i
            break
    for at in range(at, n * m.num_groups + 1):
        starts[at] = num_ids
    served[0] = n
    return 0


cdef void take_back(
    ManagerState* m,
    const int32_t* rows,
    const int32_t* news,
    Py_ssize_t start,
    Py_ssize_t stop,
) noexcept nogil:
    """Those from `start` on who had their slots are not served after all."""
    cdef uint32_t nobody = <uint32_t> m.max_requests
    cdef Progress* one
    cdef Py_ssize_t i
    cdef int32_t k = 0
    for i in range(stop):
        if k < m.num_busy and m.busy[k] == i:
            k += 1
        elif i >= start:
            one = &m.progress[min(<uint32_t> rows[i], nobody)]
            # Bad numbers may have gone round; so they come back.
            one.num_computed = <int32_t> (
                <uint32_t> one.num_computed - <uint32_t> news[i]
            )


cdef void step_ids(
    const ManagerState* m, const int32_t* rows, int32_t* ids
) noexcept nogil:
    cdef GroupRow* held
    cdef int32_t* cells
    cdef int32_t row, g, i, k
    for k in range(m.num_took):
        row = rows[m.took[k]]
        for g in range(m.num_groups):
            held = &m.groups[g].rows[row]
            cells = table_row(&m.groups[g], row)
            for i in range(held.first_new, held.num_blocks):
                ids[0] = cells[i]
                ids += 1


cdef uint32_t next_step(ManagerState* m) noexcept nogil:
    cdef int32_t row
    m.step += 1
    if m.step == 0:  # after 2**32 of them
        for row in range(m.max_requests):
            m.progress[row].step = 0
        m.step = 1
    return m.step
