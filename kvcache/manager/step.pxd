# The slots of a whole step's requests.
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcache.manager.manager_state cimport ManagerState


# A step is begun, then finished or dropped.
#
# Prove that each request of a step may ask for news[i] tokens, and serve those who have
# their slots already. False and nothing done if a row is not a running request's or is
# listed twice, or one asks for less than a token or for too many.
cdef bint begin_step(
    ManagerState* m, const int32_t* rows, const int32_t* news, Py_ssize_t n,
    int64_t num_lookahead,
) noexcept nogil
# Blocks that it takes if all are served.
cdef int64_t blocks_of_step(
    const ManagerState* m, const int32_t* rows, const int32_t* news,
    int64_t num_lookahead,
) noexcept nogil
# How many leading requests were served: the first that does not fit, or for whose
# events there is no memory, stops the step; if that is the very first, the latter
# raises. starts[i * num_groups + g] is where the ids begin that request i has taken in
# group g, of those that `step_ids` writes; the entry behind those of the last one
# served is their number.
cdef Py_ssize_t finish_step(
    ManagerState* m, const int32_t* rows, const int32_t* news, Py_ssize_t n,
    int64_t num_lookahead, int32_t* starts,
) except -2 nogil
# Nobody was served.
cdef void drop_step(
    ManagerState* m, const int32_t* rows, const int32_t* news, Py_ssize_t n
) noexcept nogil
# Write the ids that the requests of the last step have taken.
cdef void step_ids(
    const ManagerState* m, const int32_t* rows, int32_t* ids
) noexcept nogil
# A number that no request was listed under; never 0.
cdef uint32_t next_step(ManagerState* m) noexcept nogil
