# The one way to get memory, copy it and give it back; and to have memory brought to the
# cache before it is needed.
from libc.string cimport memcpy

cdef extern from *:
    """
    #if defined(_MSC_VER)
    #include <intrin.h>
    #define kvc_prefetch(p) _mm_prefetch((const char*)(p), _MM_HINT_T0)
    #else
    #define kvc_prefetch(p) __builtin_prefetch(p)
    #endif
    """
    void kvc_prefetch(const void* address) nogil

# Each returns NULL if there is no such amount of memory, or the product overflows; what
# it was given is then as it was. `deallocate` gives back what any of them returned.
cdef void* zeroed(size_t count, size_t size) noexcept nogil
# As `zeroed`, but only what is touched is ever there: no huge pages.
cdef void* zeroed_lazily(size_t count, size_t size) noexcept nogil
# In place of `memory`, whose first so many bytes go over; the others are not set.
cdef void* moved(void* memory, size_t kept, size_t count, size_t size) noexcept nogil
cdef void deallocate(void* memory) noexcept nogil

# As the two above, or MemoryError that names the bytes.
cdef void* allocate(size_t count, size_t size, str what) except NULL
cdef void* lazily(size_t count, size_t size, str what) except NULL


cdef inline void copy_bytes(void* to, const void* source, size_t n) noexcept nogil:
    """memcpy, but of nothing also from or to NULL, which memcpy leaves undefined."""
    if n:
        memcpy(to, source, n)
