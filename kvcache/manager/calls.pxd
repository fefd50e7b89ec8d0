# A manager's operations for compiled callers: arguments checked, no GIL.
#
# Each returns BAD_ARGUMENT or BAD_STATE, with nothing changed, where the Python face
# would raise ValueError. NO_MEMORY likewise. RAISED comes with a Python exception: what
# a pool with events or metrics raised.
from libc.stdint cimport int32_t, int64_t, uint8_t

from kvcache.manager.manager_state cimport ManagerState, Slots

cdef enum CallError:
    BAD_ARGUMENT = -1       # a row, a count or a length that cannot be
    BAD_STATE = -2          # not while the request is as it is
    NO_MEMORY = -3
    RAISED = -4


# Make a request known: the row it has. The digests, digest_length bytes each, are
# copied. BAD_STATE: there is no row left, or the pool records events or metrics, which
# need a request's content. Python's append, truncate and fork do not know the request.
cdef int32_t manager_add_request(
    ManagerState* m, int64_t num_tokens, const uint8_t* digests, Py_ssize_t num_hashes,
    Py_ssize_t digest_length,
) noexcept nogil
# It has generated so many tokens, and these blocks are full now; 0.
cdef int manager_append(
    ManagerState* m, int32_t row, int64_t num_tokens, const uint8_t* digests,
    Py_ssize_t num_hashes,
) noexcept nogil
# Tokens at the start of a request, which does not run, that are cached in every group:
# at most max_length, all but the last one if that is negative.
cdef int64_t manager_match(
    ManagerState* m, int32_t row, int64_t max_length
) noexcept nogil
# A `Served`: see slots.pxd. BAD_STATE: what `manager_match` found is not cached now.
cdef int manager_allocate_slots(
    ManagerState* m, int32_t row, const Slots* slots
) except RAISED nogil
# How many leading requests were served: see `finish_step` in step.pxd. `starts` has
# room for n * num_groups + 1; `step_ids` then writes the ids.
cdef Py_ssize_t manager_allocate_step(
    ManagerState* m, const int32_t* rows, const int32_t* num_new, Py_ssize_t n,
    int64_t num_lookahead, int32_t* starts,
) except RAISED nogil
# A running request gives its blocks back and waits; 0.
cdef int manager_preempt(ManagerState* m, int32_t row) noexcept nogil
# A request is done: its blocks go back, the row is vacant; 0.
cdef int manager_free(ManagerState* m, int32_t row) noexcept nogil
# A request's block ids in a group: *num_blocks of them, valid until it is next served
# or freed; NULL for a row or a group that is none.
cdef const int32_t* manager_block_ids(
    const ManagerState* m, int32_t row, int32_t group, int32_t* num_blocks
) noexcept nogil
# Where the KV values of each request's last num_new[i] computed tokens go, block id *
# block size + offset; how many slots were written. BAD_ARGUMENT: one has not so many.
cdef Py_ssize_t manager_slot_mapping(
    const ManagerState* m, const int32_t* rows, const int32_t* num_new, Py_ssize_t n,
    int32_t group, int64_t* slots,
) noexcept nogil
# Rows whose tables changed since the last call, in order of change; how many.
cdef int32_t manager_take_changed_rows(ManagerState* m, int32_t* rows) noexcept nogil
