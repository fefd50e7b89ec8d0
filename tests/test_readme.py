"""README.md: its examples run, and so do those in docstrings."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvcache

README = Path(__file__).parents[1] / "README.md"


def fenced(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_examples_of_the_readme_do_what_they_show() -> None:
    failures, tries = doctest.testfile(str(README), module_relative=False)
    assert tries >= 10
    assert failures == 0


def test_the_readme_has_the_two_commands_of_the_quick_start() -> None:
    commands = fenced("sh")
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv") for command in commands)


def test_docstring_examples_do_what_they_show() -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(kvcache.__path__, "kvcache.")
        if "__main__" not in module.name
    ]
    failed = sum(
        doctest.testmod(importlib.import_module(name)).failed for name in names
    )
    assert len(names) > 15
    assert failed == 0


def test_the_cython_and_the_cpp_example_run_against_the_installed_package(
    tmp_path: Path,
) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    [cython], [cpp] = fenced("cython"), fenced("cpp")
    assert max(cython.count("\n"), cpp.count("\n")) <= 15
    (tmp_path / "in_cython.pyx").write_text(cython)
    (tmp_path / "in_cpp.cpp").write_text(
        cpp
        + textwrap.dedent("""
            static PyMethodDef methods[] = {
                {"churn", churn, METH_O, NULL}, {NULL, NULL, 0, NULL}};
            static PyModuleDef module = {
                PyModuleDef_HEAD_INIT, "in_cpp", NULL, -1, methods,
                NULL, NULL, NULL, NULL};
            PyMODINIT_FUNC PyInit_in_cpp() { return PyModule_Create(&module); }
        """)
    )
    (tmp_path / "setup.py").write_text(
        textwrap.dedent("""
            import kvcache
            from Cython.Build import cythonize
            from setuptools import Extension, setup

            include = [kvcache.get_include()]
            in_cpp = Extension("in_cpp", ["in_cpp.cpp"], include_dirs=include)
            setup(ext_modules=cythonize(["in_cython.pyx"]) + [in_cpp])
        """)
    )
    program = (
        "import in_cpp, in_cython; from kvcache import BlockPool;"
        "pool = BlockPool(20, True, 16);"
        "in_cython.churn(pool, 1000); in_cpp.churn(pool); pool.check();"
        "assert pool.get_num_free_blocks() == 19"
    )
    for command in (["setup.py", "-q", "build_ext", "--inplace"], ["-c", program]):
        subprocess.run(
            [sys.executable, *command], cwd=tmp_path, check=True, capture_output=True
        )
