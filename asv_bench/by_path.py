"""Loads a few files of an engine whose package asks for more than a machine here has.

Stores nothing. Modules stand in for what those files import and do not need; all else
is the engine's own, file for file. Whatever has that package's name meanwhile is put
aside, so two releases of one can be in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import machinery, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

Contents = Mapping[str, Mapping[str, Any]]


@contextmanager
def stand_ins(contents: Contents) -> Iterator[None]:
    """Modules of one package with these names in them, for as long as it imports.

    A module with a `__path__` is a package whose other modules are found there.
    """
    package = next(iter(contents)).partition(".")[0]
    aside = take(package)
    for name, names in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        take(package)
        sys.modules.update(aside)


def take(package: str) -> dict[str, ModuleType]:
    """A package's modules, which are then not imported any more."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    return {name: sys.modules.pop(name) for name in names}


def folder_of(package: str, where: Path) -> Path:
    """Where a package lies: in `where` or where Python finds packages.

    Raises:
        ImportError: It is in neither.
    """
    spec = machinery.PathFinder.find_spec(package, [str(where), *sys.path])
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no module named {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def version_of(distribution: str, folder: Path) -> str:
    """The version that is installed in a folder."""
    found = metadata.distributions(name=distribution, path=[str(folder)])
    return next((each.version for each in found), "unknown")


def how_to_install(where: Path, requirement: str) -> str:
    return f"{sys.executable} -m pip install --no-deps --target {where} {requirement}"
