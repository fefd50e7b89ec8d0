# Checks and conversions of what callers pass. Everything here raises before anything
# is written: TypeError for the wrong kind of thing, ValueError for the wrong value.
cimport numpy as cnp
from cpython.long cimport PyLong_CheckExact

from kvcache._lock cimport unshared
from kvcache._types cimport HashSource, Key

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1


cdef Py_ssize_t refuse_int(
    object value, str name, Py_ssize_t low, Py_ssize_t high
) except? -1


cdef inline Py_ssize_t as_int(
    object value, str name, Py_ssize_t low, Py_ssize_t high
) except? -1:
    """An int from low to high, bounds included; bool is not one."""
    cdef int overflow = 0
    cdef long long number
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and low <= number <= high:
            return <Py_ssize_t> number
    return refuse_int(value, name, low, high)


cdef inline list as_list(object items):
    """Items as a list whose own may be read as borrowed; copied where it need be."""
    return unshared(items) if type(items) is list else list(items)


cdef int read_key(object value, Key* key) except -1
cdef Py_ssize_t check_digest(object value) except -1
cdef unsigned int as_group_id(object value) except? 0
cdef cnp.ndarray as_ids(object ids)
cdef cnp.ndarray new_ids(Py_ssize_t count)
cdef object as_hashes(object hashes, HashSource* source)
cdef int check_hashes(const HashSource* source, Py_ssize_t start) except -1
cdef Py_ssize_t next_digests(
    const HashSource* source,
    Py_ssize_t start,
    Py_ssize_t count,
    const unsigned char** digests,
    Py_ssize_t* length,
) except -1
cdef object no_copy(object thing)
