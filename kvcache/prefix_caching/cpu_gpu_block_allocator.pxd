# The blocks of a GPU and of a CPU, and the way between them.


cdef class CpuGpuBlockAllocator:
    cdef object cpu, gpu
    cdef object null                    # the null block, or None
    cdef readonly dict _swap_mapping    # old id -> new id, since last asked

    cdef object on(self, object device)
    cdef object owner_of(self, object block)
