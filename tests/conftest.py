"""What all tests share: where they run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


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
