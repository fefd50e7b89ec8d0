"""Token ids as C reads them.

Stores nothing: `as_tokens` describes what the caller passed, and returns what keeps it
alive. Every token is checked before anything is done with one.
Costs: an int32 or int64 array is used as it is, anything else is copied to int64.
Threads: each call is atomic.
"""
cimport numpy as cnp
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.list cimport PyList_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_New, PyTuple_SET_ITEM

from collections.abc import Sequence

import numpy as np

from kvcache._lock cimport unshared

cnp.import_array()

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)


cdef int64_t slow_token(object token) except -1:
    """A large token id, or the error for what is none."""
    # NumPy's integers and subclasses of int are refused: a serialiser writes them in
    # another way than the int of equal value, so equal tokens would not be found.
    if type(token) is not int:
        raise TypeError(
            f"a token id must be an int, got {token!r} ({type(token).__name__})"
        )
    if not 0 <= token <= 2**63 - 1:
        raise ValueError(f"a token id must be from 0 to {2**63 - 1}, got {token}")
    return token


cdef bint is_buffer(object tokens) noexcept:
    """Tokens come on the array face."""
    return not PyList_CheckExact(tokens) and PyObject_CheckBuffer(tokens)


cdef object as_tokens(object tokens, TokenSource* source):
    """Describe tokens in `source`; the caller keeps what is returned alive.

    Raises:
        TypeError: They are not integers, or no sequence of them.
        ValueError: One is negative or over 2**63 - 1, or they have two dimensions.
    """
    if PyList_CheckExact(tokens) or PyTuple_CheckExact(tokens):
        return _from_items(tokens, source)
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens must be ints, got {tokens!r}")
    if PyObject_CheckBuffer(tokens):
        return _from_array(np.asarray(tokens), source)
    if isinstance(tokens, Sequence):
        return _from_items(list(tokens), source)
    raise TypeError(
        f"tokens must be a sequence of ints or an array, got {tokens!r}"
    )


cdef object _from_items(object items, TokenSource* source):
    """A list or tuple, copied into memory that a bytes object owns."""
    items = unshared(items)
    # Reading exact ints runs no foreign code, so the sequence stays as it is.
    cdef Py_ssize_t count = PySequence_Fast_GET_SIZE(items)
    cdef object memory = PyBytes_FromStringAndSize(NULL, count * sizeof(int64_t))
    cdef int64_t* data = <int64_t*> PyBytes_AS_STRING(memory)
    cdef PyObject** item = PySequence_Fast_ITEMS(items)
    cdef Py_ssize_t i
    for i in range(count):
        data[i] = as_token(<object> item[i])
    source.count = count
    source.width = sizeof(int64_t)
    source.data = <const char*> data
    return memory


cdef object _from_array(object tokens, TokenSource* source):
    cdef cnp.ndarray array = tokens
    cdef int code = cnp.PyArray_TYPE(array)
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"tokens must be one-dimensional, got shape {tokens.shape}")
    if not cnp.PyTypeNum_ISINTEGER(code):  # bool is none
        raise TypeError(f"tokens must be integers, got dtype {tokens.dtype}")
    cdef Py_ssize_t count = cnp.PyArray_DIM(array, 0)
    if not (
        cnp.PyTypeNum_ISSIGNED(code)
        and cnp.PyArray_ITEMSIZE(array) >= 4
        and cnp.PyArray_ISCARRAY_RO(array)  # aligned, native, in one piece
    ):
        if count and tokens.dtype == np.uint64:
            slow_token(int(tokens.max()))
        array = np.array(tokens, dtype=np.int64, order="C")  # aligned, as a copy is
    source.count = count
    source.width = cnp.PyArray_ITEMSIZE(array)
    source.data = <const char*> cnp.PyArray_DATA(array)
    cdef Py_ssize_t negative
    if source.width == 4:
        negative = first_negative(<const int32_t*> source.data, count)
    else:
        negative = first_negative(<const int64_t*> source.data, count)
    if negative >= 0:
        slow_token(int(array[negative]))
    return array


cdef Py_ssize_t first_negative(const token_t* tokens, Py_ssize_t count) noexcept nogil:
    """Place of the first negative token, or -1."""
    cdef token_t signs = 0
    cdef Py_ssize_t i
    for i in range(count):  # without a branch, so that it is vectorised
        signs |= tokens[i]
    if signs < 0:
        for i in range(count):
            if tokens[i] < 0:
                return i
    return -1


cdef tuple token_tuple(const TokenSource* source, Py_ssize_t start, Py_ssize_t count):
    """Tokens [start, start + count) as ints."""
    cdef tuple result = PyTuple_New(count)
    cdef object token
    cdef Py_ssize_t i
    for i in range(start, start + count):
        if source.width == 4:
            token = (<const int32_t*> source.data)[i]
        else:
            token = (<const int64_t*> source.data)[i]
        Py_INCREF(token)
        PyTuple_SET_ITEM(result, i - start, token)
    return result
