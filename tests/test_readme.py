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


def test_the_cython_example_compiles_against_the_installed_package_and_runs(
    tmp_path: Path,
) -> None:
    pytest.importorskip("Cython")
    [example] = fenced("cython")
    (tmp_path / "example.pyx").write_text(example)
    (tmp_path / "setup.py").write_text(
        textwrap.dedent("""
            import numpy
            from Cython.Build import cythonize
            from setuptools import Extension, setup

            setup(
                ext_modules=cythonize(
                    Extension(
                        "example", ["example.pyx"], include_dirs=[numpy.get_include()]
                    )
                )
            )
        """)
    )
    program = (
        "import example; from kvcache import BlockPool; pool = BlockPool(20, True, 16);"
        "example.churn(pool, 1000); pool.check();"
        "assert pool.get_num_free_blocks() == 19"
    )
    for command in (["setup.py", "-q", "build_ext", "--inplace"], ["-c", program]):
        subprocess.run(
            [sys.executable, *command], cwd=tmp_path, check=True, capture_output=True
        )
