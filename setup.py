"""Compiles the extension modules; everything else is in pyproject.toml.

Switches, set to 1 in the environment of the build (all off in wheels):
    KVCACHE_DEBUG      assertions, bounds and None checks, no optimisation
    KVCACHE_LINETRACE  line tracing, for coverage of .pyx files
    KVCACHE_SANITIZE   AddressSanitizer and UndefinedBehaviorSanitizer; other
                       sanitizers by the names that -fsanitize knows them by
    KVCACHE_SYMBOLS    names and lines for profilers, as the three above have them
    KVCACHE_FAIL_ALLOCATIONS  kvcache._memory.fail_allocation, for tests
"""

import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from Cython.Compiler import Errors
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def switch(name: str) -> str:
    """Its value, which is empty where it is off."""
    value = os.environ.get(f"KVCACHE_{name}", "0")
    return "" if value == "0" else value


# Level 1 warns of every Python attribute read under a critical section, which does not
# protect it; ours protect the rows.
Errors.LEVEL = 2

debug, line_trace, sanitize = map(switch, ("DEBUG", "LINETRACE", "SANITIZE"))
symbols = debug or line_trace or sanitize or switch("SYMBOLS")

DIRECTIVES = {
    "language_level": 3,
    "freethreading_compatible": True,
    # Costs nothing in the C loops; foreign code may shorten a list that is being read.
    "boundscheck": True,
    "wraparound": False,
    "nonecheck": bool(debug),
    "initializedcheck": bool(debug),
    "cdivision": True,
    # A plain method descriptor is called 5 ns faster than a bound function object; the
    # signature in its docstring keeps inspect.signature working.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
    "unraisable_tracebacks": False,
    "linetrace": bool(line_trace),
}

define_macros = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if line_trace:
    define_macros.append(("CYTHON_TRACE_NOGIL", "1"))
if switch("FAIL_ALLOCATIONS"):
    define_macros.append(("KVCACHE_FAIL_ALLOCATIONS", "1"))
if not debug:
    define_macros.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))

compile_args, link_args = [], []
if sys.platform != "win32":
    # At -O0 every access stays where it was written, and gcc is thrice as fast.
    compile_args = ["-O0" if sanitize else "-O1" if debug or line_trace else "-O3"]
    # CPython's own flags have -g: symbols were four fifths of a wheel.
    compile_args += ["-g1" if sanitize else "-g" if symbols else "-g0"]
    if not symbols:
        # Apple's linker has no -s; local names are nearly all.
        link_args += ["-Wl,-x" if sys.platform == "darwin" else "-Wl,-s"]
    if sanitize:
        named = "address,undefined" if sanitize == "1" else sanitize
        link_args += [f"-fsanitize={named}"]
        # CPython's own flags may make signed overflow defined.
        compile_args += [*link_args, "-fno-sanitize-recover=all", "-fno-wrapv"]
        compile_args += ["-fno-omit-frame-pointer"]


class CompileCython(build_ext):
    """Makes C of .pyx files only where it is compiled: a source archive needs none."""

    def build_extensions(self):
        in_c = cythonize(
            self.extensions,
            compiler_directives=DIRECTIVES,
            nthreads=0 if sys.platform == "win32" else os.cpu_count() or 1,
        )
        for extension, made in zip(self.extensions, in_c, strict=True):
            vars(extension).update(vars(made))
        super().build_extensions()


root = Path(__file__).parent
setup(
    ext_modules=[
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
    cmdclass={"build_ext": CompileCython},
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
