"""Whatever a public callable is given: a documented exception, and nothing is broken.

A call that raises leaves all as it was, unless what it was given changed it meanwhile.
"""

import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hostile import Active, Callee, Own, World, callees

from kvcache import events
from kvcache.hashing import functions

CALLEES = {str(one): one for one in callees()}
# Of the caller's own making is what a value raised itself: `Own`.
DOCUMENTED = (TypeError, ValueError, MemoryError, IndexError, NotImplementedError, Own)
EXTRAS = ("cbor2", "xxhash")  # what hash functions need that need not be installed
RANDOM_CALLS = 40


def attempts(callee: Callee, count: int) -> Iterator[dict[str, int | None]]:
    """Which value for which parameter, None for a good one: each, then random ones."""
    names = [one.name for one in callee.parameters]
    required = [one.name for one in callee.parameters if one.is_required]
    good = dict.fromkeys(required)
    yield {**good}
    for name in names:
        for i in range(count):
            yield {**good, name: i}
    draw = random.Random(str(callee))
    for _ in range(RANDOM_CALLS if callee.parameters else 0):
        some = [name for name in names if name in required or draw.random() < 0.5]
        yield {name: draw.choice([None, draw.randrange(count)]) for name in some}


def call(callee: Callee, subject: Any, arguments: dict[str, Any]) -> Any:
    if callee.is_setter:
        return setattr(subject, callee.name, *arguments.values())
    if callee.is_property:
        return getattr(subject, callee.name)
    function = getattr(subject, callee.name) if callee.name else subject
    if any(one.by_position for one in callee.parameters):
        return function(*arguments.values())
    return function(**arguments)


@pytest.mark.parametrize("name", CALLEES)
def test_hostile_calls_are_refused_and_break_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda failed: None)  # of failing hooks
    monkeypatch.setattr(events, "_classes", events.event_classes())
    monkeypatch.setattr(functions, "NONE_HASH", functions.NONE_HASH)
    callee, world = CALLEES[name], World()
    for i in range(len(subjects_of(callee, world))):
        for chosen in attempts(callee, len(world.values())):
            values = world.values()
            arguments = {
                name: world.good(name, callee.package) if k is None else values[k]
                for name, k in chosen.items()
            }
            before = world.state()
            try:
                call(callee, subjects_of(callee, world)[i], arguments)
            except BaseException as error:
                if not is_documented(error, callee, arguments.values()):
                    print(f"given {arguments}")
                    raise
                if not any(map(is_active, arguments.values())):
                    assert world.state() == before, (error, arguments)
            world.check()
            if world.state() != before:
                world = World()


def is_documented(error: BaseException, callee: Callee, given: Iterable[Any]) -> bool:
    """Whether it is of the classes that are, or what was given lacks an attribute."""
    if isinstance(error, AttributeError):
        if error.obj is None:
            is_of_a_class = str(error).startswith("type object ")
            return is_of_a_class or any(has_none(each) for each in given)
        is_given = any(error.obj is each for each in given)
        return is_given or type(error.obj) is not callee.owner
    if isinstance(error, ModuleNotFoundError):
        return error.name in EXTRAS and importlib.util.find_spec(error.name) is None
    return isinstance(error, DOCUMENTED)


def has_none(value: Any) -> bool:
    return value is None or (type(value) is list and None in value)


def subjects_of(callee: Callee, world: World) -> list[Any]:
    if callee.owner is None:
        return [sys.modules[callee.package]]
    return world.instances(callee.owner) if callee.name else [callee.owner]


def is_active(value: Any) -> bool:
    """Whether it may have changed something itself."""
    return isinstance(value, Active) or (
        type(value) is list and any(isinstance(each, Active) for each in value)
    )
