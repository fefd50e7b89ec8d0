"""An operation whose n-th allocation fails, for every n until it succeeds.

A `World` is an owner in a known state and one call on it. `go_through` makes it anew
for each n, lets the n-th allocation of the call fail, and proves that the outcome is
MemoryError, that `check()` is clean, that the state is the one before the call, and
that the call then succeeds with the result and the state of one that was never
disturbed.

Two things can fail an allocation. CPython's `_testcapi.set_nomemory` fails any of the
interpreter's: objects, and what kvcache takes in C, which is the interpreter's raw
memory; once, or from the n-th on. In builds with KVCACHE_FAIL_ALLOCATIONS
`kvcache._memory.fail_allocation` fails what kvcache takes in C, whatever the
interpreter.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvcache import KVCacheBlock, _memory
from kvcache.prefix_caching import BlockTable

MOST = 2_000  # allocations of one call


def nothing() -> None:
    """No invariant to prove."""


@dataclass
class World:
    """An owner, and a call on it.

    Attributes:
        act: The call, and nothing else.
        state: All that it could change.
        check: Proves the owner's invariants.
        catch_up: What makes up for a call that had no memory to cache blocks; None if
            a call that succeeds must have done all.
        resumes: The call may stop halfway, for the next one to go on from there.
    """

    act: Callable[[], Any]
    state: Callable[[], Any]
    check: Callable[[], Any] = nothing
    catch_up: Callable[[], Any] | None = None
    resumes: bool = False


class Once:
    """The interpreter's n-th allocation fails."""

    def start(self, n: int) -> None:
        self.n = n
        testcapi.set_nomemory(n, n + 1)

    def stop(self) -> bool:
        """Whether the failure is still to come."""
        try:
            for _ in range(self.n + 1):
                bytes(600)  # an allocation each, and no freelist
        except MemoryError:
            return True
        finally:
            testcapi.remove_mem_hooks()
        return False


class FromThenOn:
    """Every allocation of the interpreter fails from the n-th on."""

    def start(self, n: int) -> None:
        testcapi.set_nomemory(n, 0)

    def stop(self) -> bool:
        testcapi.remove_mem_hooks()
        return True  # a call that succeeds has made fewer


class InC:
    """The n-th allocation of kvcache in C fails."""

    def start(self, n: int) -> None:
        fail_allocation(n)

    def stop(self) -> bool:
        return fail_allocation(0)


fail_allocation: Any = getattr(_memory, "fail_allocation", None)
try:
    import _testcapi as testcapi
except ImportError:
    testcapi = None
if sys.gettrace() is not None:
    testcapi = None  # what traces lines makes objects too

ONCE = [*([Once()] if testcapi else []), *([InC()] if fail_allocation else [])]
"""What this interpreter and this build can do: one allocation fails."""
# CPython 3.10 ends the process where it has no room for a function's error, be that in
# Python alone ("Cannot recover from MemoryErrors while normalizing exceptions").
ALL = [
    *ONCE,
    *([FromThenOn()] if testcapi and sys.version_info >= (3, 11) else []),
]
"""The same, and all that follow too."""


@contextmanager
def unraisable() -> Iterator[list[Any]]:
    """What goes to sys.unraisablehook meanwhile: the objects it is said to be of."""
    met: list[Any] = []
    before, sys.unraisablehook = (
        sys.unraisablehook,
        lambda args: met.append(args.object),
    )
    gc.disable()  # whose finalizers are not the call's
    try:
        yield met
    finally:
        gc.enable()
        sys.unraisablehook = before


def attempt(world: World, fails: Any, n: int) -> tuple[Any, Any, bool, list[Any]]:
    """(error, result, whether no allocation failed, what was unraisable)."""
    error = result = None
    with unraisable() as met:
        fails.start(n)
        try:
            result = world.act()
        except BaseException as raised:
            # CPython keeps few MemoryErrors for hard times: none may stay in a cycle.
            error = raised.with_traceback(None)
        pending = fails.stop()
    return error, result, pending and error is None, met


def is_lack_of_memory(error: BaseException) -> bool:
    # CPython 3.11 forgets to say so where a Python function's frame finds no room.
    return isinstance(error, MemoryError) or (
        type(error) is SystemError
        and str(error) == "error return without exception set"
    )


def plain(value: Any) -> Any:
    """A result as something that can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, KVCacheBlock):
        return "block", value.block_id
    if isinstance(value, BlockTable):
        return list(value.physical_block_ids)
    if hasattr(value, "token_ids"):
        return type(value).__name__, value.block_id, value.token_ids
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def go_through(make: Callable[[], World], fails: Any) -> None:
    """Fail each allocation of a call in turn."""
    make().act()  # what is made once and kept is made here
    world = make()
    before, result, after = world.state(), plain(world.act()), world.state()
    if world.catch_up:
        world.catch_up()
    caught_up = world.state()
    for n in count(1):
        assert n < MOST
        world = make()
        assert world.state() == before
        error, got, was_undisturbed, met = attempt(world, fails, n)
        # A hook that fails is reported, and the call completes.
        assert {getattr(one, "__name__", str(one)) for one in met} <= {
            "kvcache.block_pool.run_hook"
        }
        world.check()
        if error is None:
            assert plain(got) == result, n
            if world.catch_up:
                world.catch_up()
                assert world.state() == caught_up, n
            else:
                assert world.state() == after, n
            if was_undisturbed:
                return
            continue
        assert is_lack_of_memory(error), n
        assert world.resumes or world.state() == before, n
        error = None
        assert plain(world.act()) == result, n
        assert world.state() == after, n
    raise AssertionError  # the loop has no end


def each(modes: list[Any]) -> Any:
    """A test for each way in which allocations can fail here."""
    if not modes:
        return pytest.mark.skip("nothing here can fail an allocation")
    return pytest.mark.parametrize("fails", modes, ids=lambda mode: type(mode).__name__)
