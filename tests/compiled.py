"""Compiled helpers and engines: built against the installed package, and imported."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

SETUP = """
import sys
from pathlib import Path

import kvcache, numpy
from setuptools import Extension, setup

name, include = sys.argv.pop(), [numpy.get_include(), kvcache.get_include()]
extension = Extension(Path(name).stem, [name], include_dirs=include)
if name.endswith(".pyx"):
    from Cython.Build import cythonize
    [extension] = cythonize(extension)
setup(name="engine", ext_modules=[extension])
"""


def build(folder: Path, source: str, text: str, flags: str = "") -> ModuleType:
    """Compile a module in a folder of its own, and import it."""
    pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    (folder / source).write_text(text)
    (folder / "setup.py").write_text(textwrap.dedent(SETUP))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", source]
    environment = {**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} {flags}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    name = Path(source).stem
    [path] = [each for each in folder.iterdir() if each.suffix in (".so", ".pyd")]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
