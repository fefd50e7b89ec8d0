# cython: language_level=3, boundscheck=False, wraparound=False
"""A scheduler of its own over kvcache's C surface: no GIL from first request to last.

As a user would write it, compiled against the installed package. It logs every block id
that it is given, in order; `schedule.py` does the same through the Python face.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvcache cimport (
    KEYED_BYTES,
    NO_ROOM,
    KVCacheManager,
    ManagerState,
    Slots,
    manager_add_request,
    manager_allocate_slots,
    manager_allocate_step,
    manager_append,
    manager_block_ids,
    manager_free,
    manager_match,
    manager_preempt,
    step_ids,
)

cdef struct Job:
    int32_t row
    int64_t num_tokens      # so far
    int64_t goal
    int64_t num_prompt
    const uint8_t* digests  # of all its full blocks, in the end

cdef struct Engine:
    ManagerState* m
    int64_t block_size
    Job* jobs
    int32_t* waiting        # jobs, the next one last
    int32_t num_waiting
    int32_t* running
    int32_t num_running
    int32_t* rows
    int32_t* ones
    int32_t* starts
    int32_t* log
    int64_t num_logged
    int64_t preemptions


cdef int admit(Engine* e, Py_ssize_t most_running) except -1 nogil:
    cdef Slots slots
    cdef Job* job
    cdef const int32_t* ids
    cdef int32_t n, i
    cdef int64_t hits
    memset(&slots, 0, sizeof(slots))
    slots.must_fit = True
    while e.num_waiting and e.num_running < most_running:
        job = &e.jobs[e.waiting[e.num_waiting - 1]]
        if job.row < 0:
            job.row = manager_add_request(
                e.m, job.num_tokens, job.digests, job.num_tokens // e.block_size,
                KEYED_BYTES,
            )
            if job.row < 0:
                with gil:
                    raise ValueError(f"no row: {job.row}")
        hits = manager_match(e.m, job.row, -1)
        slots.num_new = job.num_tokens - hits
        if manager_allocate_slots(e.m, job.row, &slots) <= NO_ROOM:
            return 0
        ids = manager_block_ids(e.m, job.row, 0, &n)
        for i in range(n):
            e.log[e.num_logged + i] = ids[i]
        e.num_logged += n
        e.num_waiting -= 1
        e.running[e.num_running] = e.waiting[e.num_waiting]
        e.num_running += 1
    return 0


cdef int decode(Engine* e) except -1 nogil:
    """A token for each running request; the newest one gives way where room lacks."""
    cdef Py_ssize_t done = 0, served
    cdef int32_t i
    for i in range(e.num_running):
        e.rows[i] = e.jobs[e.running[i]].row
        e.ones[i] = 1
    while done < e.num_running:
        served = manager_allocate_step(
            e.m, e.rows + done, e.ones + done, e.num_running - done, 0, e.starts
        )
        if served < 0:
            with gil:
                raise ValueError("a step that cannot be")
        step_ids(e.m, e.rows + done, e.log + e.num_logged)
        e.num_logged += e.starts[served]
        done += served
        if done < e.num_running:
            e.num_running -= 1
            e.waiting[e.num_waiting] = e.running[e.num_running]
            e.num_waiting += 1
            e.preemptions += 1
            if manager_preempt(e.m, e.rows[e.num_running]):
                with gil:
                    raise ValueError("what runs can be preempted")
    return 0


cdef int take_tokens(Engine* e) except -1 nogil:
    """Each has generated a token; those that are done leave."""
    cdef int32_t i, kept = 0
    cdef int64_t blocks
    cdef Job* job
    for i in range(e.num_running):
        job = &e.jobs[e.running[i]]
        if job.num_tokens == job.goal:
            manager_free(e.m, job.row)
            continue
        job.num_tokens += 1
        blocks = job.num_tokens // e.block_size
        if manager_append(
            e.m, job.row, 1, job.digests + (blocks - 1) * KEYED_BYTES,
            job.num_tokens % e.block_size == 0,
        ):
            with gil:
                raise ValueError("no token more")
        e.running[kept] = e.running[i]
        kept += 1
    e.num_running = kept
    return 0


def run(
    KVCacheManager manager not None,
    int64_t block_size,
    const int64_t[::1] prompts,
    const int64_t[::1] goals,
    const uint8_t[:, ::1] digests,
    const int64_t[::1] starts,
    Py_ssize_t most_running,
    int32_t[::1] log,
):
    """Serve all requests: (ids logged, preemptions)."""
    cdef Engine e
    cdef Py_ssize_t n = prompts.shape[0], i
    memset(&e, 0, sizeof(e))
    e.m, e.block_size, e.log = &manager.state, block_size, &log[0]
    e.jobs = <Job*> malloc(n * sizeof(Job))
    e.waiting = <int32_t*> malloc(5 * n * sizeof(int32_t))
    e.running, e.rows = e.waiting + n, e.waiting + 2 * n
    e.ones, e.starts = e.waiting + 3 * n, e.waiting + 4 * n
    for i in range(n):
        e.jobs[i] = Job(-1, prompts[i], goals[i], prompts[i], &digests[starts[i], 0])
        e.waiting[n - 1 - i] = <int32_t> i
    e.num_waiting = <int32_t> n
    with nogil:
        while e.num_waiting or e.num_running:
            admit(&e, most_running)
            take_tokens(&e)
            decode(&e)
    free(e.jobs)
    free(e.waiting)
    return e.num_logged, e.preemptions
