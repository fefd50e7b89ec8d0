# Caching a request's blocks as vLLM's coordinators do, for allocate_slots.
cdef int cache(object coordinator, object request, object num_computed) except -1
