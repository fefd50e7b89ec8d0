"""Faults that a sanitizer must report, each in what kvcache's own compiled code does.

    python tests/reported_faults.py FAULT

Callers of the C surface can break their side of it: they pass memory that is not as
they say, or leave out the lock. Python is the caller here, so that nothing but the
package is instrumented; for the lock it is the engine of `engines/threads.cpp`.
"""

import ctypes
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import schedule
from test_c_surface import ENGINES, build

from kvcache import BlockPool, capi, get_include
from kvcache.hashing import Keyed


def c_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of the table in kvcache.h, at its place there."""
    header = (Path(get_include()) / "kvcache.h").read_text()
    names = ["versions", *re.findall(r"\(\*(\w+)\)\(", header)]
    of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
    of_capsule.restype = ctypes.POINTER(ctypes.c_void_p)
    of_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = of_capsule(capi.API, b"kvcache.capi.API")[names.index(name)]
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


POINTER, COUNT = ctypes.c_void_p, ctypes.c_ssize_t
pool_of = c_function("pool_of", POINTER, ctypes.py_object)
pool_get = c_function("pool_get", COUNT, POINTER, POINTER, COUNT)
pool_touch = c_function("pool_touch", COUNT, POINTER, POINTER, COUNT)
pool_num_free = c_function("pool_num_free", ctypes.c_int32, POINTER)


def write_past_the_end() -> None:
    pool = BlockPool(100, True, 16)
    pool_get(pool_of(pool), (ctypes.c_int32 * 7)(), 8)


def use_after_free() -> None:
    handle = pool_of(BlockPool(100, True, 16))
    pool_num_free(handle)


def misaligned_ids() -> None:
    pool = BlockPool(100, True, 16)
    memory = (ctypes.c_int32 * 9)()
    pool_touch(pool_of(pool), ctypes.addressof(memory) + 1, 8)


def unlocked_access() -> None:
    folder = Path(tempfile.mkdtemp())
    engine = build(folder, "threads.cpp", (ENGINES / "threads.cpp").read_text())
    engine.run([schedule.make_manager(300, 256)] * 2, Keyed(), 5_000, True)


FAULTS = (write_past_the_end, use_after_free, misaligned_ids, unlocked_access)

if __name__ == "__main__":
    {fault.__name__: fault for fault in FAULTS}[sys.argv[1]]()
