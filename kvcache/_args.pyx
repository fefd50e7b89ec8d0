"""Checks and conversions of what callers pass.

Holds no state. Everything raises before anything is written: TypeError for the wrong
kind of thing, ValueError for the wrong value, and both name what came.
Costs: an int32 array or a list of bytes is used as it is, anything else is copied.
"""
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from libc.string cimport memset

import numpy as np

from kvcache._types cimport MAX_DIGEST_BYTES, MAX_KEY_BYTES, Key, key_from_bytes

cnp.import_array()

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(PyObject*)


cdef Py_ssize_t refuse_int(
    object value, str name, Py_ssize_t low, Py_ssize_t high
) except? -1:
    """What `as_int` does with anything but an int in range: convert it, or say why."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{name} must be an int, got {value!r}")
        return as_int(value.__index__(), name, low, high)
    raise ValueError(f"{name} must be from {low} to {high}, got {value}")


cdef unsigned int as_group_id(object value) except? 0:
    return <unsigned int> as_int(value, "kv_cache_group_id", 0, 2**32 - 1)


cdef int read_key(object value, Key* key) except -1:
    """A key, which is bytes, 1 to 36 of them."""
    if not PyBytes_Check(value):
        raise TypeError(f"a key must be bytes, got {value!r}")
    cdef Py_ssize_t length = PyBytes_GET_SIZE(value)
    if not 0 < length <= MAX_KEY_BYTES:
        raise ValueError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes, got {length}: {value!r}"
        )
    key_from_bytes(
        key, <const unsigned char*> PyBytes_AS_STRING(value), <unsigned int> length
    )
    return 0


cdef Py_ssize_t check_digest(object value) except -1:
    """Length of a block hash, which is bytes, 1 to 32 of them."""
    if not PyBytes_Check(value):
        raise TypeError(f"a block hash must be bytes, got {value!r}")
    cdef Py_ssize_t length = PyBytes_GET_SIZE(value)
    if not 0 < length <= MAX_DIGEST_BYTES:
        raise ValueError(
            f"a block hash has 1 to {MAX_DIGEST_BYTES} bytes, got {length}: {value!r}"
        )
    return length


cdef cnp.ndarray new_ids(Py_ssize_t count):
    """An uninitialised int32 array, shape (count,)."""
    cdef cnp.npy_intp shape = count
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_INT32)


cdef cnp.ndarray as_ids(object ids):
    """Block ids as a C-contiguous int32 array, shape (n,); ids are not range-checked.

    Raises:
        TypeError: They are not integers.
        ValueError: They are not one-dimensional, or one does not fit int32.
    """
    cdef cnp.ndarray array
    cdef list items
    cdef Py_ssize_t i
    cdef int* data
    if not cnp.PyArray_CheckExact(ids):
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"block ids must be integers, got {ids!r}")
        if not isinstance(ids, np.ndarray):
            items = list(ids)
            array = new_ids(len(items))
            data = <int*> cnp.PyArray_DATA(array)
            for i in range(len(items)):
                data[i] = <int> as_int(items[i], "block id", -2**31, 2**31 - 1)
            return array
        ids = np.asarray(ids)
    array = ids
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"block ids must be one-dimensional, got shape {ids.shape}")
    if cnp.PyArray_TYPE(array) == cnp.NPY_INT32 and cnp.PyArray_ISCARRAY_RO(array):
        return array
    if ids.dtype.kind not in "iu":
        raise TypeError(f"block ids must be integers, got dtype {ids.dtype}")
    wide = (ids < -(2**31)) | (ids > 2**31 - 1)
    if wide.any():
        raise ValueError(f"block id {ids[wide][0]} does not fit int32")
    return np.array(ids, dtype=np.int32, order="C")  # a copy: `ids` may be misaligned


cdef object as_hashes(object hashes, HashSource* source):
    """Describe block hashes in `source`; the caller keeps what is returned alive.

    They are an array (n, L) uint8 with 1 <= L <= 32, or a sequence of bytes, which is
    checked where it is read (`next_digests`, `check_hashes`).
    """
    cdef cnp.ndarray array
    memset(source, 0, sizeof(HashSource))
    if isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint8:
            raise TypeError(f"block hashes must be uint8, got dtype {hashes.dtype}")
        if hashes.ndim != 2 or not 0 < hashes.shape[1] <= MAX_DIGEST_BYTES:
            raise ValueError(
                f"block hashes must have the shape (n, 1 to {MAX_DIGEST_BYTES}),"
                f" got {hashes.shape}"
            )
        array = hashes if hashes.strides[1] == 1 else np.ascontiguousarray(hashes)
        source.count = cnp.PyArray_DIM(array, 0)
        source.length = cnp.PyArray_DIM(array, 1)
        source.stride = cnp.PyArray_STRIDE(array, 0)
        source.rows = <const unsigned char*> cnp.PyArray_DATA(array)
        return array
    if isinstance(hashes, (str, bytes)):
        raise TypeError(f"block hashes must be a sequence of bytes, got {hashes!r}")
    hashes = as_list(hashes)
    source.count = len(<list> hashes)
    source.items = <void*> hashes
    return hashes


cdef int check_hashes(const HashSource* source, Py_ssize_t start) except -1:
    """Prove that `next_digests` cannot fail from start on."""
    cdef Py_ssize_t i
    if source.items != NULL:
        if len(<list> source.items) != source.count:
            raise ValueError("the list of block hashes changed during the call")
        for i in range(start, source.count):
            check_digest(<object> PyList_GET_ITEM(<object> source.items, i))
    return 0


cdef Py_ssize_t next_digests(
    const HashSource* source,
    Py_ssize_t start,
    Py_ssize_t count,
    const unsigned char** digests,
    Py_ssize_t* length,
) except -1:
    """Where the digests from `start` on lie: up to count of them, of equal length."""
    cdef Py_ssize_t i
    cdef PyObject** items
    cdef const unsigned char* row
    if source.items == NULL:
        row = source.rows + start * source.stride
        for i in range(count):
            digests[i] = row
            row += source.stride
        length[0] = source.length
        return count
    if start + count > len(<list> source.items):
        raise ValueError("the list of block hashes shrank during the call")
    items = PySequence_Fast_ITEMS(<PyObject*> source.items) + start
    length[0] = check_digest(<object> items[0])
    for i in range(count):
        if not PyBytes_Check(<object> items[i]):
            check_digest(<object> items[i])
        if PyBytes_GET_SIZE(<object> items[i]) != length[0]:
            return i
        digests[i] = <const unsigned char*> PyBytes_AS_STRING(<object> items[i])
    return count


cdef object no_copy(object thing):
    """What `__reduce__` of an object raises that owns memory or shares rows."""
    return TypeError(f"a {type(thing).__name__} cannot be pickled or copied")
