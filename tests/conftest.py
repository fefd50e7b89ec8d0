"""What all tests share: where they run."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from compiled import build


@pytest.fixture(autouse=True, scope="session")
def away_from_the_checkout() -> Iterator[None]:
    """Run here: a checkout's own folder holds the package uncompiled, and a program
    that a test starts there would import it instead of the installed one.
    """
    before = os.getcwd()
    if "KVCACHE_SHARED" in os.environ:
        os.environ["KVCACHE_SHARED"] = os.path.abspath(os.environ["KVCACHE_SHARED"])
    os.chdir(Path(__file__).parent)
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Shows the core's memory, and calls it in C."""
    text = (Path(__file__).parent / "engines" / "probe.pyx").read_text()
    return build(tmp_path_factory.mktemp("probe"), "probe.pyx", text, "-O0")
