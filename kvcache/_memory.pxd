# The one way to get memory: zeroed, overflow-checked, named in its MemoryError; and to
# have memory brought to the cache before it is needed.
# PyMem_Raw* reports every byte to tracemalloc and may be called without the GIL.
from cpython.mem cimport PyMem_RawCalloc
from libc.stdint cimport SIZE_MAX
from libc.string cimport memcpy


cdef extern from *:
    """
    #if defined(__linux__)
    #include <stdint.h>
    #include <sys/mman.h>
    /* Rows are visited at random: with 4 KiB pages each visit costs a page walk. */
    static inline void kvc_use_huge_pages(void* memory, size_t bytes) {
        uintptr_t start = ((uintptr_t)memory + 4095) & ~(uintptr_t)4095;
        uintptr_t end = ((uintptr_t)memory + bytes) & ~(uintptr_t)4095;
        if (bytes >= ((size_t)4 << 20))
            (void)madvise((void*)start, end - start, MADV_HUGEPAGE);
    }
    #else
    #define kvc_use_huge_pages(memory, bytes) ((void)0)
    #endif
    """
    void kvc_use_huge_pages(void* memory, size_t bytes) nogil

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


cdef inline void* zeroed(size_t count, size_t size) noexcept nogil:
    """NULL if there is no such amount of memory, or the product overflows."""
    cdef void* memory
    if size and count > SIZE_MAX // size:
        return NULL
    memory = PyMem_RawCalloc(count if count else 1, size)
    if memory != NULL:
        kvc_use_huge_pages(memory, count * size)
    return memory


cdef inline void* allocate(size_t count, size_t size, str what) except NULL:
    """Zeroed memory, or MemoryError that names the bytes."""
    cdef void* memory = zeroed(count, size)
    if memory == NULL:
        raise MemoryError(f"cannot allocate {int(count) * size} bytes for {what}")
    return memory


cdef inline void copy_bytes(void* to, const void* source, size_t n) noexcept nogil:
    """memcpy, but of nothing also from or to NULL, which memcpy leaves undefined."""
    if n:
        memcpy(to, source, n)
