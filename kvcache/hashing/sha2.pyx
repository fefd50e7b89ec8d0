"""SHA-256 of one whole message, on the best instructions that this processor has.

Stores: which path that is, chosen once, at import.
Invariant: every path gives FIPS 180-4's digest for every message.
Costs: 64 / 128 bytes, each message holding the digest before, take 74 / 110 ns with
SHA-NI (35 a block of 64, which is what the latency of its rounds allows) and 371 / 546
portably, on a Zen 4 core; no allocation. The command prints usec for 1000, so ns each:
`python -m timeit -n 9 -r 999 -s "import kvcache.hashing.sha2 as s"
"s._benchmark(64, 1000)"`.
Threads: guaranteed; nothing is written but the caller's digest.
"""
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t

from kvcache._memory cimport allocate, deallocate

cdef extern from "_sha256.h" nogil:
    ctypedef void (*sha256_function "kvc_sha256_function")(
        const uint8_t*, size_t, uint8_t*
    ) noexcept nogil

    ctypedef struct Sha256Path "kvc_sha256_path":
        const char* name
        sha256_function digest
        int (*available)() noexcept nogil

    const Sha256Path* PATHS "kvc_sha256_paths"
    const int NUM_PATHS "KVC_SHA256_PATHS"


# Why not a library. ns for 64 / 100 / 128 / 192 bytes on the same core:
#   hashlib.sha256(data).digest()    358 / 350 / 389 / 426   OpenSSL 3.0, SHA-NI
#   CPython's _sha256 (3.11)         511 / 511 / 702 / 908   portable C
#   CPython's _sha2 (3.13)           583 / 565 / 761 / 951   portable C
#   sha256_digest_bytes(data)        102 / 102 / 139 / 172   this file, from Python
#   sha256_digest, SHA-NI             74 /  74 / 110 / 144   this file, from C, chained
#   sha256_digest, portable          371 / 370 / 546 / 722   this file, from C, chained
# Some 280 ns of hashlib's are its objects, and neither module has a C interface that
# runs without the GIL; linking OpenSSL's would tie wheels to its versions. So it is C
# of our own. Two independent messages interleaved took 41 / 41 / 61 / 80 ns each, where
# they took 56 / 55 / 90 / 126 one after the other, their calls overlapping as they are;
# blocks of one request are a chain, which never has two, so it is left out.


cdef dict available_paths():
    """Name -> index in PATHS of what this processor can run, best first."""
    cdef int i
    return {PATHS[i].name.decode(): i for i in range(NUM_PATHS) if PATHS[i].available()}


# Asked once: cpuid leaves a virtual machine, which takes microseconds.
cdef dict AVAILABLE = available_paths()


cdef sha256_function digest_of(str path) except NULL:
    """The function of an available path; of the best one if none is named."""
    if path is None:
        return sha256_digest
    if path not in AVAILABLE:
        raise ValueError(
            f"path must be one of {', '.join(AVAILABLE)} here, got {path!r}"
        )
    return PATHS[<int> AVAILABLE[path]].digest


def sha256_paths() -> tuple:
    """Names of what this processor can run, best first; "portable" is always last."""
    return tuple(AVAILABLE)


def sha256_digest_bytes(data, str path=None) -> bytes:
    """SHA-256 of the bytes of a contiguous buffer.

    Args:
        data: bytes, bytearray, memoryview, array or anything else with a buffer.
        path: One of `sha256_paths()`; None is the first.

    Returns:
        The digest, 32 bytes.

    Raises:
        TypeError: data has no buffer.
        BufferError: Its buffer is not contiguous.
        ValueError: There is no such path, or this processor lacks it.
    """
    cdef sha256_function digest = digest_of(path)
    cdef Py_buffer view
    if not PyObject_CheckBuffer(data):
        raise TypeError(
            f"data must be a bytes-like object, got {type(data).__name__}"
        )
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        result = PyBytes_FromStringAndSize(NULL, SHA256_BYTES)
        digest(
            <const uint8_t*> view.buf,
            view.len,
            <uint8_t*> PyBytes_AS_STRING(result),
        )
    finally:
        PyBuffer_Release(&view)
    return result


def _benchmark(Py_ssize_t length, Py_ssize_t count, str path=None) -> bytes:
    """A chain of digests made in C, to time it without the interpreter.

    Each message is `length` bytes, at least 32: the digest before, then zeros.

    Returns:
        The last of `count` digests.
    """
    cdef sha256_function digest = digest_of(path)
    cdef uint8_t* message
    cdef Py_ssize_t _
    if length < SHA256_BYTES:
        raise ValueError(f"length must be at least {SHA256_BYTES}, got {length}")
    message = <uint8_t*> allocate(length, 1, "a message")
    try:
        with nogil:
            for _ in range(count):
                digest(message, length, message)
        return message[:SHA256_BYTES]
    finally:
        deallocate(message)


cdef sha256_function best = PATHS[<int> AVAILABLE[sha256_paths()[0]]].digest


cdef void sha256_digest(
    const uint8_t* data, size_t length, uint8_t* digest
) noexcept nogil:
    best(data, length, digest)
