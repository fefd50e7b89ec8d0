"""Compiles loops to time without the interpreter: kvcache's C surface, and memory.

Stores the module once compiled. Built in a temporary directory against the installed
package, as a user's own Cython module would be: it needs Cython, setuptools and a C
compiler, and takes some ten seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from measure import Unavailable

SOURCE = """
# cython: language_level=3
from libc.stdint cimport int32_t, uint8_t

from kvcache cimport (
    BlockPool,
    KVCacheManager,
    PoolState,
    block_id_t,
    manager_allocate_step,
    pool_free,
    pool_get,
    pool_match,
    step_ids,
)

cdef enum:
    MOST = 4096
    INTS_IN_ROW = 16  # of 64 bytes, as a block's


def walk(const int32_t[:, ::1] rows, int32_t at, Py_ssize_t steps):
    '''Where so many steps from row to row lead; each row begins with the next one.

    No step can begin before the one before it has come from memory.
    '''
    cdef const int32_t* first = &rows[0, 0]
    cdef Py_ssize_t i
    if rows.shape[1] != INTS_IN_ROW:
        raise ValueError(f"a row must have {INTS_IN_ROW} ints")
    with nogil:
        for i in range(steps):
            at = first[<Py_ssize_t> at * INTS_IN_ROW]
    return at


def get_and_free(BlockPool pool not None, Py_ssize_t n, Py_ssize_t loops):
    '''Get n blocks and free them, `loops` times, without the GIL.'''
    cdef PoolState* state = &pool.state
    cdef block_id_t[MOST] ids
    cdef Py_ssize_t i, failed = 0
    if not 0 < n <= MOST:
        raise ValueError(f"n must be from 1 to {MOST}, got {n}")
    with nogil:
        for i in range(loops):
            failed += pool_get(state, ids, n) < 0 or pool_free(state, ids, n) >= 0
    if failed:
        raise ValueError(f"{failed} of {loops} rounds failed")


def match(BlockPool pool not None, const uint8_t[:, ::1] digests, Py_ssize_t loops):
    '''Look all digests up, `loops` times, without the GIL.'''
    cdef PoolState* state = &pool.state
    cdef block_id_t[MOST] ids
    cdef Py_ssize_t n = digests.shape[0], length = digests.shape[1], i, found = 0
    if not 0 < n <= MOST:
        raise ValueError(f"there must be from 1 to {MOST} digests, got {n}")
    with nogil:
        for i in range(loops):
            found += pool_match(state, &digests[0, 0], length, n, 0, ids)
    if found != n * loops:
        raise ValueError(f"{found} of {n * loops} digests were found")


def steps(
    KVCacheManager manager not None,
    const int32_t[::1] rows,
    const int32_t[::1] num_new,
    Py_ssize_t loops,
):
    '''So many steps of a manager with one group, and the ids taken, without the GIL.'''
    cdef int32_t[MOST + 1] starts
    cdef int32_t[MOST] ids
    cdef Py_ssize_t n = rows.shape[0], i, served = 0, done
    if not 0 < n <= MOST or num_new.shape[0] != n:
        raise ValueError(f"there must be from 1 to {MOST} requests, got {n}")
    with nogil:
        for i in range(loops):
            done = manager_allocate_step(
                &manager.state, &rows[0], &num_new[0], n, 0, starts
            )
            if done == n and starts[n] <= MOST:
                step_ids(&manager.state, &rows[0], ids)
                served += done
    if served != n * loops:
        raise ValueError(f"{served} of {n * loops} requests were served")
"""


@cache
def compiled() -> ModuleType:
    """The compiled loops.

    Raises:
        Unavailable: Cython, setuptools or a C compiler is not there.
    """
    try:
        from Cython.Build import cythonize
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        raise Unavailable(
            f"needs {error.name}: pip install cython setuptools"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kvcache_c_loop.pyx")
        source.write_text(SOURCE)
        extension = Extension(source.stem, [str(source)])
        try:
            with stdout_to(os.devnull):
                extensions = cythonize([extension], quiet=True)
                command = build_ext(Distribution({"ext_modules": extensions}))
                command.build_lib = command.build_temp = folder
                command.ensure_finalized()
                command.run()
        except Exception as error:
            raise Unavailable(f"does not compile: {error}") from error
        path = command.get_ext_fullpath(source.stem)
        spec = importlib.util.spec_from_file_location(source.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def stdout_to(path: str):
    """Send what is printed, also by child processes, to a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
