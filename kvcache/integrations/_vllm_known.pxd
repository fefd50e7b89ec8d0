# vLLM's classes and own methods, and what is asked of both; set by `use`.
cdef dict stock                 # vLLM's own methods, by class and name
cdef object manager_class       # KVCacheManager
cdef object unitary             # the coordinators
cdef object hybrid
cdef object full_attention      # managers of groups
cdef object sliding_window
cdef object full_spec
cdef object window_spec
cdef object running             # of RequestStatus
cdef object waiting
cdef object preempted

cdef int tell(str call, str why) except -1
cdef bint is_known(object coordinator, str call) except -1
cdef Py_ssize_t num_skipped(object group, Py_ssize_t num_tokens) except? -1
cdef object as_blocks(object manager, tuple groups)


cdef inline Py_ssize_t cdiv(Py_ssize_t n, Py_ssize_t size) noexcept:
    return (n + size - 1) // size
