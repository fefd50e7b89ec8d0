"""The stand-in for vLLM, as modules."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_in import (
    STOCK,
    Blocks,
    Spec,
    allocate_slots,
    cache_blocks,
    find_longest_cache_hit,
    free,
    get_computed_blocks,
    get_request_block_hasher,
    hash_block_tokens,
)

from kvcache.hashing import functions
from kvcache.integrations import vllm as plugin


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A vLLM 0.33 of empty classes."""
    made: dict[str, Any] = {}

    def module(name: str, **contents: Any) -> ModuleType:
        made[name] = ModuleType(name)
        vars(made[name]).update(contents)
        monkeypatch.setitem(sys.modules, name, made[name])
        return made[name]

    for name in ("vllm.v1", "vllm.v1.core", "vllm.distributed", "vllm.utils"):
        module(name)
    for name, classes in STOCK.items():
        module(name, **{each: type(each, (), {"__module__": name}) for each in classes})
    utils = made["vllm.v1.core.kv_cache_utils"]
    utils.BlockHashListWithBlockSize = type("BlockHashListWithBlockSize", (), {})
    utils.hash_block_tokens = hash_block_tokens
    utils.get_request_block_hasher = get_request_block_hasher
    utils.init_none_hash = lambda hash_fn: vars(utils).update(NONE_HASH=b"of vLLM")
    names = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    module("vllm.utils.hashing", **{name: (lambda input: b"") for name in names})
    made["vllm.utils.hashing"].get_hash_fn_by_name = lambda hash_fn_name: None
    status = SimpleNamespace(RUNNING="running", WAITING="waiting", PREEMPTED="gone")
    module("vllm.v1.request", RequestStatus=status)
    managers = made["vllm.v1.core.kv_cache_manager"]
    managers.KVCacheManager.allocate_slots = allocate_slots
    managers.KVCacheManager.get_computed_blocks = get_computed_blocks
    managers.KVCacheBlocks = Blocks
    made["vllm.v1.kv_cache_interface"].FullAttentionSpec = Spec
    single = made["vllm.v1.core.single_type_kv_cache_manager"]
    for each in (single.FullAttentionManager, single.SlidingWindowManager):
        each.find_longest_cache_hit = classmethod(find_longest_cache_hit)
    coordinators = made["vllm.v1.core.kv_cache_coordinator"]
    base = coordinators.KVCacheCoordinator
    base.cache_blocks, base.free = cache_blocks, free
    for name in ("Unitary", "Hybrid"):
        setattr(coordinators, f"{name}KVCacheCoordinator", type(name, (base,), {}))
    coordinators.KVCacheCoordinatorNoPrefixCache = type("Uncached", (base,), {})
    pool = made["vllm.v1.core.block_pool"].BlockPool

    class Derived(pool):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.of_its_own = True

    Derived.__module__ = "vllm.elsewhere"
    module("vllm.elsewhere", Pool=pool, Derived=Derived)
    monkeypatch.delenv("KVCACHE_VLLM", raising=False)
    monkeypatch.setattr(functions, "NONE_HASH", functions.NONE_HASH)
    yield module("vllm", __version__="0.33.0")
    plugin.unregister()
