"""kvcache's classes in the place of vLLM v1's.

Holds what was swapped, so that a second `register()` changes nothing. vLLM is imported
by the call, never by this module. A class is replaced in the module that defines it and
in every loaded vLLM module that holds it; modules loaded later find it there.
Events are built from vLLM's own classes, so that its publisher sees no difference.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import kvcache

# The module that defines each class, and what replaces it.
SWAPPED = {
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.core.block_pool": ("BlockHashToBlockMap", "BlockPool"),
}

_swapped: list[str] = []


def _vllm_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "vllm" and isinstance(module, ModuleType)
    ]


def register() -> list[str]:
    """Put kvcache's classes in vLLM's place, and say on stdout which.

    Returns:
        The names of the replaced classes.

    Raises:
        ImportError: vLLM is not installed.
    """
    if _swapped:
        return list(_swapped)
    try:
        events = importlib.import_module("vllm.distributed.kv_events")
        holders = {name: importlib.import_module(name) for name in SWAPPED}
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError("kvcache.integrations.vllm needs vLLM installed") from error
    ours_by_theirs = {
        id(getattr(holders[module], name)): (
            getattr(holders[module], name),
            getattr(kvcache, name),
        )
        for module, names in SWAPPED.items()
        for name in names
    }
    for module in _vllm_modules():
        for name, value in list(vars(module).items()):
            theirs, ours = ours_by_theirs.get(id(value), (None, None))
            if theirs is value and theirs is not None:
                setattr(module, name, ours)
    kvcache.use_event_classes(
        kvcache.EventClasses(
            events.BlockStored, events.BlockRemoved, events.AllBlocksCleared
        )
    )
    _swapped.extend(name for names in SWAPPED.values() for name in names)
    print("swapped:", ", ".join(_swapped))
    return list(_swapped)
