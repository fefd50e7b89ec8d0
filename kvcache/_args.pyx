"""Checks and conversions of what callers pass.

Holds no state. Everything raises before anything is written: TypeError for the wrong
kind of thing, ValueError for the wrong value, and both name what came.
Costs: an int32 array or a list of bytes is used as it is, anything else is copied.
"""
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM
from cpython.long cimport PyLong_CheckExact
from libc.string cimport memcpy, memset

import numpy as np

from kvcache._types cimport GROUP_ID_BYTES, MAX_DIGEST_BYTES, MAX_KEY_BYTES, Key

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1


cdef Py_ssize_t as_int(
    object value, str name, Py_ssize_t low, Py_ssize_t high
) except? -1:
    """An int from low to high, bounds included; bool is not one."""
    cdef int overflow = 0
    cdef long long number
    if not PyLong_CheckExact(value):
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{name} must be an int, got {value!r}")
        value = value.__index__()
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or number < low or number > high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")
    return <Py_ssize_t> number


cdef unsigned int as_group_id(object value) except? 0:
    return <unsigned int> as_int(value, "kv_cache_group_id", 0, 2**32 - 1)


cdef Py_ssize_t as_key(object value) except -1:
    """Length of a key, which is bytes, 1 to 36 of them."""
    if not PyBytes_Check(value):
        raise TypeError(f"a key must be bytes, got {value!r}")
    cdef Py_ssize_t length = PyBytes_GET_SIZE(value)
    if not 0 < length <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {length}: {value!r}")
    return length


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
    if not cnp.PyArray_CheckExact(ids):
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"block ids must be integers, got {ids!r}")
        if not isinstance(ids, np.ndarray):
            ids = list(ids)
            for one in ids:
                if isinstance(one, bool) or not hasattr(type(one), "__index__"):
                    raise TypeError(f"a block id must be an int, got {one!r}")
                as_int(one, "block id", -2**31, 2**31 - 1)
            return np.array(ids, dtype=np.int32)
        ids = np.asarray(ids)
    array = ids
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(
            f"block ids must be one-dimensional, got shape {ids.shape}"
        )
    if (
        cnp.PyArray_TYPE(array) == cnp.NPY_INT32
        and cnp.PyArray_ISCARRAY_RO(array)
    ):
        return array
    if ids.dtype.kind not in "iu":
        raise TypeError(f"block ids must be integers, got dtype {ids.dtype}")
    wide = (ids < -(2**31)) | (ids > 2**31 - 1)
    if wide.any():
        raise ValueError(f"block id {ids[wide][0]} does not fit int32")
    return np.ascontiguousarray(ids, dtype=np.int32)


cdef object as_hashes(object hashes, HashSource* source):
    """Describe block hashes in `source`; the caller keeps what is returned alive.

    They are an array (n, L) uint8 with 1 <= L <= 32, or a sequence of bytes, which is
    checked where it is read (`load_keys`, `check_hashes`).
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
    if type(hashes) is not list:
        hashes = list(hashes)
    source.count = len(<list> hashes)
    source.items = <void*> hashes
    return hashes


cdef int check_hashes(const HashSource* source, Py_ssize_t start) except -1:
    """Prove that `load_keys` cannot fail from start on."""
    cdef Py_ssize_t i
    if source.items != NULL:
        for i in range(start, source.count):
            check_digest(<object> PyList_GET_ITEM(<object> source.items, i))
    return 0


cdef inline void make_key(
    Key* key, const unsigned char* digest, Py_ssize_t length, unsigned int group_id
) noexcept nogil:
    """The key of a digest in a group: the digest, then the group id, big-endian."""
    cdef unsigned char* end = <unsigned char*> key.words + length
    memset(key.words, 0, sizeof(key.words))
    memcpy(key.words, digest, length)
    end[0] = (group_id >> 24) & 255
    end[1] = (group_id >> 16) & 255
    end[2] = (group_id >> 8) & 255
    end[3] = group_id & 255
    key.length = <unsigned int> length + GROUP_ID_BYTES


cdef int load_keys(
    const HashSource* source,
    Py_ssize_t start,
    Py_ssize_t count,
    unsigned int group_id,
    Key* keys,
) except -1:
    """The keys of `count` hashes from `start` on."""
    cdef Py_ssize_t i, length
    cdef object item
    if source.items == NULL:
        for i in range(count):
            make_key(
                &keys[i],
                source.rows + (start + i) * source.stride,
                source.length,
                group_id,
            )
        return 0
    if start + count > len(<list> source.items):
        raise ValueError("the list of block hashes shrank during the call")
    for i in range(count):
        item = <object> PyList_GET_ITEM(<object> source.items, start + i)
        length = check_digest(item)
        make_key(
            &keys[i], <const unsigned char*> PyBytes_AS_STRING(item), length, group_id
        )
    return 0
