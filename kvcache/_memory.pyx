"""Memory in C: overflow-checked, named in its MemoryError, seen by tracemalloc.

Stores: nothing.
Invariant: every byte that kvcache holds in C was taken here and not given back, and
tracemalloc has it under `tracemalloc_domain`, with the size that was asked for.
Costs: those of calloc and free; where tracemalloc does not run, two calls that return
at once. Threads: as CPython's raw allocator, any, and without the GIL.
"""
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport SIZE_MAX, uintptr_t
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

    #define KVC_DOMAIN 0x6B7663     /* "kvc" */

    #ifdef KVCACHE_FAIL_ALLOCATIONS
    #define KVC_FAILS 1
    static Py_ssize_t kvc_until_failure = 0;    /* allocations; 0: none fails */
    #define kvc_fails() (kvc_until_failure > 0 && --kvc_until_failure == 0)
    #else
    #define KVC_FAILS 0
    static Py_ssize_t kvc_until_failure;
    #define kvc_fails() 0
    #endif
    """
    void kvc_use_huge_pages(void* memory, size_t bytes) nogil
    const unsigned int KVC_DOMAIN
    const bint KVC_FAILS
    Py_ssize_t kvc_until_failure
    bint kvc_fails() nogil

cdef extern from "Python.h":
    int PyTraceMalloc_Track(unsigned int, uintptr_t, size_t) nogil
    int PyTraceMalloc_Untrack(unsigned int, uintptr_t) nogil

tracemalloc_domain = KVC_DOMAIN


cdef inline bint impossible(size_t count, size_t size) noexcept nogil:
    return (size and count > SIZE_MAX // size) or kvc_fails()


cdef inline void* traced(void* memory, size_t size) noexcept nogil:
    """Have tracemalloc count memory, got from the raw allocator, as kvcache's."""
    if memory != NULL:
        PyTraceMalloc_Untrack(0, <uintptr_t> memory)
        PyTraceMalloc_Track(KVC_DOMAIN, <uintptr_t> memory, size)
    return memory


cdef void* zeroed(size_t count, size_t size) noexcept nogil:
    cdef void* memory = zeroed_lazily(count, size)
    if memory != NULL:
        kvc_use_huge_pages(memory, count * size)
    return memory


cdef void* zeroed_lazily(size_t count, size_t size) noexcept nogil:
    if impossible(count, size):
        return NULL
    return traced(PyMem_RawCalloc(count, size), count * size)


cdef void* moved(void* memory, size_t kept, size_t count, size_t size) noexcept nogil:
    cdef void* made
    if impossible(count, size):
        return NULL
    made = traced(PyMem_RawMalloc(count * size), count * size)
    if made != NULL:
        if kept:
            memcpy(made, memory, kept)
        deallocate(memory)
    return made


cdef void deallocate(void* memory) noexcept nogil:
    if memory != NULL:
        PyTraceMalloc_Untrack(KVC_DOMAIN, <uintptr_t> memory)
        PyMem_RawFree(memory)


cdef void* allocate(size_t count, size_t size, str what) except NULL:
    return named(zeroed(count, size), count, size, what)


cdef void* lazily(size_t count, size_t size, str what) except NULL:
    return named(zeroed_lazily(count, size), count, size, what)


cdef inline void* named(
    void* memory, size_t count, size_t size, str what
) except NULL:
    if memory == NULL:
        raise MemoryError(f"cannot allocate {int(count) * size} bytes for {what}")
    return memory


if KVC_FAILS:
    def fail_allocation(Py_ssize_t n):
        """Have the n-th allocation from now on fail, counted from 1; none for 0.

        Only builds with KVCACHE_FAIL_ALLOCATIONS have it.

        Returns:
            Whether the one that was asked for last is still to come.
        """
        global kvc_until_failure
        pending = kvc_until_failure > 0
        kvc_until_failure = n
        return pending
