# Token ids as C reads them: checked, in one piece, 4 or 8 bytes each.
from libc.stdint cimport int32_t, int64_t

ctypedef fused token_t:
    int32_t
    int64_t

cdef struct TokenSource:
    Py_ssize_t count
    Py_ssize_t width        # bytes of a token: 4 (int32_t) or 8 (int64_t)
    const char* data        # count * width bytes, every token >= 0

cdef extern from *:
    """
    #if PY_VERSION_HEX < 0x030B0000
    #include <longintrepr.h>
    #endif
    /* Value of an exact int of one digit, not negative; else -1. Sets no error. */
    static inline int64_t kvc_small_int(PyObject* o) {
        if (!PyLong_CheckExact(o)) return -1;
    #if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact((PyLongObject*)o)) return -1;
        return (int64_t)PyUnstable_Long_CompactValue((PyLongObject*)o);
    #else
        if (Py_SIZE(o) == 1) return (int64_t)((PyLongObject*)o)->ob_digit[0];
        return Py_SIZE(o) == 0 ? 0 : -1;
    #endif
    }
    """
    int64_t kvc_small_int(object) noexcept


cdef int64_t slow_token(object token) except -1

cdef inline int64_t as_token(object token) except -1:
    """A token id from 0 to 2**63 - 1; only an exact int is one."""
    cdef int64_t value = kvc_small_int(token)
    return value if value >= 0 else slow_token(token)

cdef bint is_buffer(object tokens) noexcept
cdef object as_tokens(object tokens, TokenSource* source)
cdef tuple token_tuple(const TokenSource* source, Py_ssize_t start, Py_ssize_t count)
