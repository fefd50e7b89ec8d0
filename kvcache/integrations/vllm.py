"""kvcache's classes and functions in the place of vLLM v1's: the plugin `kvcache`.

Holds what was put where, so that a second `register()` changes nothing and
`unregister()` puts all back. vLLM is imported by the call, never by this module. A name
is replaced in the module that defines it and in every loaded vLLM module that holds it,
base classes included; modules loaded later find it there. Events are built from vLLM's
own classes, so that its publisher sees no difference.
Before anything is replaced, vLLM's version and the signatures are looked at: where they
are not those known here, vLLM runs as it is, and one line in the log says why.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import kvcache
from kvcache import events, hashing
from kvcache.hashing import functions
from kvcache.integrations import _vllm_caching as caching
from kvcache.integrations import _vllm_known, _vllm_parts, _vllm_slots
from kvcache.integrations._vllm_parts import UTILS

SUPPORTED = ("0.32", "0.33")
MODES = ("0", "pool", "manager")
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
SINGLE = "vllm.v1.core.single_type_kv_cache_manager"

# The module that defines each name, and what kvcache puts there.
POOL_SWAPS: dict[str, dict[str, Any]] = {
    UTILS: {
        "KVCacheBlock": kvcache.KVCacheBlock,
        "FreeKVCacheBlockQueue": kvcache.FreeKVCacheBlockQueue,
        "BlockHashListWithBlockSize": hashing.BlockHashListWithBlockSize,
    },
    POOL: {
        "BlockHashToBlockMap": kvcache.BlockHashToBlockMap,
        "BlockPool": kvcache.BlockPool,
    },
    "vllm.utils.hashing": {
        "sha256": hashing.sha256,
        "sha256_cbor": hashing.sha256_cbor,
        "xxhash": hashing.xxhash,
        "xxhash_cbor": hashing.xxhash_cbor,
        "get_hash_fn_by_name": hashing.get_hash_fn_by_name,
    },
}
# The methods above the pool: module, class and method, and what stands for it.
METHOD_SWAPS: dict[tuple[str, str], Any] = {
    (MANAGER, "KVCacheManager.allocate_slots"): _vllm_slots.allocate_slots,
    (MANAGER, "KVCacheManager.get_computed_blocks"): caching.get_computed_blocks,
    (COORDINATOR, "KVCacheCoordinator.cache_blocks"): caching.cache_blocks,
    (COORDINATOR, "KVCacheCoordinator.free"): caching.free,
    (SINGLE, "FullAttentionManager.find_longest_cache_hit"): caching.find_full,
    (SINGLE, "SlidingWindowManager.find_longest_cache_hit"): caching.find_window,
}

log = logging.getLogger("vllm.plugins.kvcache")


class Change(NamedTuple):
    """Something that was set on a vLLM module or class."""

    holder: Any
    name: str
    before: Any


class Plan(NamedTuple):
    """What `register` would do: or why not, if `refusal` says so."""

    version: str
    mode: str
    swaps: list[tuple[str, Any, Any]]  # name, vLLM's, kvcache's
    refusal: str


_changes: list[Change] = []
_swapped: list[str] = []


def _vllm_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "vllm" and isinstance(module, ModuleType)
    ]


def _parameters(function: Any) -> list[str] | None:
    """Names of a callable's parameters, without `self`; None if it does not tell."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return [name for name in names if name not in ("self", "args", "kwargs")]


def _drift(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Where a function or method of vLLM takes what ours does not."""
    if inspect.isclass(theirs):
        for each, method in vars(theirs).items():
            if inspect.isfunction(method) and not each.startswith("_"):
                if not hasattr(ours, each):
                    yield f"{name}.{each} is not known"
                else:
                    yield from _drift(f"{name}.{each}", method, getattr(ours, each))
        return
    wanted, have = _parameters(theirs), _parameters(ours)
    if wanted is not None and have is not None and wanted != have[: len(wanted)]:
        yield f"{name}({', '.join(wanted)}) is not {name}({', '.join(have)})"


def plan() -> Plan:
    """What `register` would put in place.

    Raises:
        ImportError: vLLM is not installed.
    """
    mode = os.environ.get("KVCACHE_VLLM", "manager")
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError("kvcache.integrations.vllm needs vLLM installed") from error
    version = str(getattr(vllm, "__version__", "unknown"))
    if mode not in MODES:
        refusal = f"KVCACHE_VLLM must be one of {', '.join(MODES)}, got {mode!r}"
        return Plan(version, mode, [], refusal)
    if mode == "0":
        return Plan(version, mode, [], "KVCACHE_VLLM is 0")
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        known = " and ".join(SUPPORTED)
        return Plan(version, mode, [], f"vLLM {version} is not known, {known} are")
    try:
        swaps = list(_swaps(mode, version))
    except (ImportError, AttributeError) as error:
        return Plan(version, mode, [], f"vLLM {version} is not as known: {error}")
    drifted = [line for name, a, b in swaps for line in _drift(name, a, b)]
    refusal = f"vLLM {version} has changed: {'; '.join(drifted)}" if drifted else ""
    return Plan(version, mode, swaps, refusal)


def _swaps(mode: str, version: str) -> Iterator[tuple[str, Any, Any]]:
    for module, names in POOL_SWAPS.items():
        for name, ours in names.items():
            if name == "BlockPool" and version.startswith("0.32"):
                ours = _vllm_parts.BlockPool032
            yield name, getattr(importlib.import_module(module), name), ours
    for name, around in _vllm_parts.AROUND.items():
        theirs = getattr(importlib.import_module(UTILS), name)
        yield name, theirs, around(theirs)
    if mode == "manager":
        for (module, name), ours in METHOD_SWAPS.items():
            yield name, _method(*_held_by(module, name)), ours


def _held_by(module: str, name: str) -> tuple[Any, str]:
    """The class and the name of a method given as `Class.method`."""
    owner, _, method = name.partition(".")
    return getattr(importlib.import_module(module), owner), method


def _method(owner: Any, name: str) -> Any:
    """The function behind a method, or a class method, of a class."""
    method = getattr(owner, name)
    return getattr(method, "__func__", method)


def register() -> list[str]:
    """Put kvcache in vLLM's place, and say on stdout what was replaced.

    Returns:
        The names of what was replaced: none where vLLM is not as known here or
        `KVCACHE_VLLM` is 0.

    Raises:
        ImportError: vLLM is not installed.
    """
    if _swapped:
        return list(_swapped)
    todo = plan()
    if todo.refusal:
        level = logging.INFO if todo.mode == "0" else logging.WARNING
        log.log(level, "kvcache: %s; vLLM runs as it is", todo.refusal)
        return []
    for name, theirs, ours in todo.swaps:
        if "." not in name:
            _replace(theirs, ours)
        _swapped.append(name)
    if todo.mode == "manager":
        _replace_methods()
    utils = importlib.import_module(UTILS)
    if hasattr(utils, "NONE_HASH"):
        functions.NONE_HASH = utils.NONE_HASH
    stock = importlib.import_module("vllm.distributed.kv_events")
    kvcache.use_event_classes(
        kvcache.EventClasses(
            stock.BlockStored, stock.BlockRemoved, stock.AllBlocksCleared
        )
    )
    print("swapped:", ", ".join(_swapped))
    return list(_swapped)


def _replace(theirs: Any, ours: Any) -> None:
    """Put ours wherever a loaded vLLM module holds theirs, and derive from it anew."""
    derived = []
    for module in _vllm_modules():
        for name, value in list(vars(module).items()):
            if value is theirs:
                _set(module, name, ours)
            elif (
                inspect.isclass(value)
                and theirs in value.__bases__
                and value.__module__ == module.__name__
            ):
                derived.append(value)
    for old in derived:
        _replace(old, _derive(old, theirs, ours))


def _derive(old: Any, theirs: Any, ours: Any) -> Any:
    """A class as `old`, but derived from ours; their layouts differ."""
    body = {
        name: value
        for name, value in vars(old).items()
        if name not in ("__dict__", "__weakref__")
    }
    bases = tuple(ours if base is theirs else base for base in old.__bases__)
    new = type(old)(old.__name__, bases, body)
    for method in vars(old).values():
        function = inspect.unwrap(getattr(method, "__func__", method))
        code = getattr(function, "__code__", None)
        if code and "__class__" in code.co_freevars:  # it calls super()
            cell = function.__closure__[code.co_freevars.index("__class__")]
            _set(cell, "cell_contents", new)
    return new


def _replace_methods() -> None:
    # Looked up now: classes may have been derived anew.
    stock = {}
    for (module, name), ours in METHOD_SWAPS.items():
        owner, method = _held_by(module, name)
        stock[name] = _method(owner, method)
        bound = isinstance(vars(owner)[method], classmethod)
        _set(owner, method, classmethod(ours) if bound else ours)
    _vllm_known.use(
        stock,
        importlib.import_module(MANAGER),
        importlib.import_module(COORDINATOR),
        importlib.import_module(SINGLE),
        importlib.import_module("vllm.v1.kv_cache_interface"),
        importlib.import_module("vllm.v1.request").RequestStatus,
    )


def _set(holder: Any, name: str, value: Any) -> None:
    # As it stands there: a class gives out a method bound.
    stands = vars(holder) if hasattr(holder, "__dict__") else {}
    _changes.append(Change(holder, name, stands.get(name) or getattr(holder, name)))
    setattr(holder, name, value)


def unregister() -> None:
    """Put back what `register` replaced. What was made meanwhile stays as it is."""
    while _changes:
        change = _changes.pop()
        setattr(change.holder, change.name, change.before)
    if _swapped:
        kvcache.use_event_classes(events.OWN_EVENT_CLASSES)
    _swapped.clear()


def check() -> str:
    """What `kvcache vllm-check` prints: vLLM's version, and what would be replaced."""
    todo = plan()
    lines = [f"vLLM {todo.version}, KVCACHE_VLLM={todo.mode}"]
    if todo.refusal:
        return "\n".join([*lines, f"nothing is replaced: {todo.refusal}"])
    lines += [f"replaced: {name}" for name, _, _ in todo.swaps]
    if todo.mode == "pool":
        lines += [f"not replaced: {name} (mode pool)" for _, name in METHOD_SWAPS]
    lines.append(
        "vLLM's own, as ever: groups that are neither full attention nor a sliding"
        " window, hits that end inside a block, blocks spread over ranks; the log says"
        " once of each kind of calls why"
    )
    return "\n".join(lines)
