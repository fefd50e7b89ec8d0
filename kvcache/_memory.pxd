# The one way to get memory: zeroed, overflow-checked, named in its MemoryError.
# PyMem_Raw* reports every byte to tracemalloc and may be called without the GIL.
from cpython.mem cimport PyMem_RawCalloc
from libc.stdint cimport SIZE_MAX


cdef inline void* zeroed(size_t count, size_t size) noexcept nogil:
    """NULL if there is no such amount of memory, or the product overflows."""
    if size and count > SIZE_MAX // size:
        return NULL
    return PyMem_RawCalloc(count if count else 1, size)


cdef inline void* allocate(size_t count, size_t size, str what) except NULL:
    """Zeroed memory, or MemoryError that names the bytes."""
    cdef void* memory = zeroed(count, size)
    if memory == NULL:
        raise MemoryError(f"cannot allocate {int(count) * size} bytes for {what}")
    return memory
