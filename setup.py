"""Compiles the extension modules; everything else is in pyproject.toml.

Switches, set to 1 in the environment of the build (all off in wheels):
    KVCACHE_DEBUG      assertions, bounds and None checks, no optimisation
    KVCACHE_LINETRACE  line tracing, for coverage of .pyx files
    KVCACHE_SANITIZE   AddressSanitizer and UndefinedBehaviorSanitizer
"""

import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from Cython.Compiler import Errors
from setuptools import Extension, setup


def switch(name: str) -> bool:
    return os.environ.get(f"KVCACHE_{name}", "0") not in ("", "0")


# Level 1 warns of every Python attribute read under a critical section, which does not
# protect it; ours protect the rows.
Errors.LEVEL = 2

debug, line_trace, sanitize = map(switch, ("DEBUG", "LINETRACE", "SANITIZE"))

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": True,
    # Costs nothing in the C loops; foreign code may shorten a list that is being read.
    "boundscheck": True,
    "wraparound": False,
    "nonecheck": debug,
    "initializedcheck": debug,
    "cdivision": True,
    # A plain method descriptor is called 5 ns faster than a bound function object; the
    # signature in its docstring keeps inspect.signature working.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "unraisable_tracebacks": False,
    "linetrace": line_trace,
}

define_macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if line_trace:
    define_macros.append(("CYTHON_TRACE_NOGIL", "1"))
if not debug:
    define_macros.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))

compile_args, link_args = [], []
if sys.platform != "win32":
    compile_args = ["-g", "-O1"] if debug or sanitize else ["-O3"]
    if sanitize:
        compile_args += ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
        link_args += ["-fsanitize=address,undefined"]

root = Path(__file__).parent
setup(
    ext_modules=cythonize(
        [
            Extension(
                ".".join(path.relative_to(root).with_suffix("").parts),
                [str(path.relative_to(root))],
                include_dirs=[numpy.get_include()],
                define_macros=define_macros,
                extra_compile_args=compile_args,
                extra_link_args=link_args,
            )
            for path in sorted((root / "kvcache").rglob("*.pyx"))
        ],
        compiler_directives=DIRECTIVES,
        nthreads=0 if sys.platform == "win32" else os.cpu_count() or 1,
    ),
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
