"""The plugin, with a stand-in for vLLM: what is put in place, what not, and back again.

The stand-in has vLLM's module names and nothing more than the names that are replaced;
vLLM itself judges the plugin in its own test suite and in engine_with_vllm.py.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

import kvcache
from kvcache import events, hashing
from kvcache.hashing import functions
from kvcache.integrations import vllm as plugin

STOCK = {
    "vllm.v1.core.kv_cache_utils": ["KVCacheBlock", "FreeKVCacheBlockQueue"],
    "vllm.v1.core.block_pool": ["BlockPool", "BlockHashToBlockMap"],
    "vllm.distributed.kv_events": ["BlockStored", "BlockRemoved", "AllBlocksCleared"],
    "vllm.v1.core.single_type_kv_cache_manager": [
        "FullAttentionManager",
        "SlidingWindowManager",
    ],
}


def hash_block_tokens(
    hash_function: Any,
    parent_block_hash: Any,
    curr_block_token_ids: Any,
    extra_keys: Any = None,
) -> None: ...


def get_request_block_hasher(hash_block_size: Any, caching_hash_fn: Any) -> None: ...


def allocate_slots(
    self: Any,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: Any = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_blocks: bool = False,
    num_encoder_tokens: int = 0,
    full_sequence_must_fit: bool = False,
    reserved_blocks: int = 0,
    has_scheduled_reqs: bool = True,
    skip_zeroing_group_ids: tuple[int, ...] = (),
) -> str:
    return "vLLM's own"


class Spec(NamedTuple):
    block_size: int = 4


def find_longest_cache_hit(
    cls: Any,
    block_hashes: Any,
    max_length: int,
    kv_cache_group_ids: list[int],
    block_pool: Any,
    kv_cache_spec: Any,
    drop_eagle_block: bool,
    alignment_tokens: int,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
) -> str:
    return "vLLM's own"


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
    module("vllm.v1.request", RequestStatus=SimpleNamespace(RUNNING="running"))
    manager = type("KVCacheManager", (), {"allocate_slots": allocate_slots})
    module("vllm.v1.core.kv_cache_manager", KVCacheManager=manager)
    module("vllm.v1.kv_cache_interface", FullAttentionSpec=Spec)
    full = made["vllm.v1.core.single_type_kv_cache_manager"].FullAttentionManager
    full.find_longest_cache_hit = classmethod(find_longest_cache_hit)
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


def held(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.usefixtures("vllm")
def test_every_module_that_holds_a_name_gets_ours() -> None:
    swapped = plugin.register()
    assert held("vllm.v1.core.block_pool.BlockPool") is kvcache.BlockPool
    assert held("vllm.elsewhere.Pool") is kvcache.BlockPool
    assert held("vllm.v1.core.kv_cache_utils.KVCacheBlock") is kvcache.KVCacheBlock
    assert held("vllm.utils.hashing.sha256") is hashing.sha256
    assert {"BlockPool", "sha256", "KVCacheManager.allocate_slots"} <= set(swapped)
    stored = held("vllm.distributed.kv_events.BlockStored")
    assert events.event_classes().stored is stored


@pytest.mark.usefixtures("vllm")
def test_a_derived_class_is_derived_from_ours() -> None:
    plugin.register()
    derived = held("vllm.elsewhere.Derived")
    assert issubclass(derived, kvcache.BlockPool)
    made = derived(10, True, 16)
    assert made.of_its_own
    assert made.get_num_free_blocks() == 9


@pytest.mark.usefixtures("vllm")
def test_registering_twice_changes_nothing_more() -> None:
    first = plugin.register()
    changes = list(plugin._changes)
    assert plugin.register() == first
    assert plugin._changes == changes


@pytest.mark.usefixtures("vllm")
def test_unregistering_puts_all_back() -> None:
    names = [
        "vllm.v1.core.block_pool.BlockPool",
        "vllm.elsewhere.Pool",
        "vllm.elsewhere.Derived",
        "vllm.utils.hashing.sha256",
        "vllm.v1.core.kv_cache_utils.init_none_hash",
    ]
    before = [held(name) for name in names]
    manager = held("vllm.v1.core.kv_cache_manager.KVCacheManager")
    plugin.register()
    assert manager.allocate_slots is not allocate_slots
    plugin.unregister()
    assert [held(name) for name in names] == before
    assert manager.allocate_slots is allocate_slots
    assert events.event_classes() == events.OWN_EVENT_CLASSES
    assert issubclass(held("vllm.elsewhere.Derived"), held("vllm.elsewhere.Pool"))


@pytest.mark.usefixtures("vllm")
def test_the_root_of_hashes_follows_vllms() -> None:
    plugin.register()
    held("vllm.v1.core.kv_cache_utils.init_none_hash")(hashing.sha256)
    assert hashing.NONE_HASH == b"of vLLM"


@pytest.mark.parametrize(
    ("mode", "pool", "slots"),
    [("0", False, False), ("pool", True, False), ("manager", True, True)],
)
@pytest.mark.usefixtures("vllm")
def test_a_variable_says_how_much_is_replaced(
    monkeypatch: pytest.MonkeyPatch, mode: str, pool: bool, slots: bool
) -> None:
    monkeypatch.setenv("KVCACHE_VLLM", mode)
    swapped = plugin.register()
    assert ("BlockPool" in swapped) == pool
    assert ("KVCacheManager.allocate_slots" in swapped) == slots
    manager = held("vllm.v1.core.kv_cache_manager.KVCacheManager")
    assert (manager.allocate_slots is not allocate_slots) == slots


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """What is logged when nothing is replaced: one line."""
    caplog.clear()
    assert plugin.register() == []
    assert plugin._changes == []
    [record] = caplog.records
    assert "vLLM runs as it is" in record.getMessage()
    return record.getMessage()


def test_what_is_not_known_is_left_alone(
    vllm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    assert "0.34.1 is not known" in refusal(caplog)
    monkeypatch.setattr(vllm, "__version__", "0.33.2+cpu")
    pool = held("vllm.v1.core.block_pool.BlockPool")
    monkeypatch.setattr(pool, "touch", lambda self, blocks, fast: None, raising=False)
    assert "BlockPool.touch(blocks, fast) is not" in refusal(caplog)
    monkeypatch.setattr(pool, "touch", lambda self, blocks: None)
    monkeypatch.setattr(pool, "defragment", lambda self: None, raising=False)
    assert "BlockPool.defragment is not known" in refusal(caplog)
    monkeypatch.delattr(pool, "defragment")
    monkeypatch.delattr(sys.modules["vllm.v1.core.block_pool"], "BlockHashToBlockMap")
    assert "BlockHashToBlockMap" in refusal(caplog)
    monkeypatch.setenv("KVCACHE_VLLM", "some")
    assert "got 'some'" in refusal(caplog)


def test_under_0_32_a_pool_is_made_as_there(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    plugin.register()
    made = held("vllm.v1.core.block_pool.BlockPool")(9, True, 16, False, None, "CPU")
    assert made.medium == "CPU"
    assert isinstance(made, kvcache.BlockPool)


@pytest.mark.usefixtures("vllm")
def test_the_check_says_what_would_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "replaced: BlockPool" in plugin.check()
    assert plugin._changes == []
    monkeypatch.setenv("KVCACHE_VLLM", "pool")
    assert "not replaced: KVCacheManager.allocate_slots" in plugin.check()
    assert "not replaced: FullAttentionManager.find_longest" in plugin.check()
    monkeypatch.setenv("KVCACHE_VLLM", "0")
    assert "nothing is replaced" in plugin.check()


def test_without_vllm_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="needs vLLM"):
        plugin.register()


def test_importing_the_plugin_imports_no_vllm() -> None:
    program = (
        "import sys, kvcache.integrations.vllm;"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'vllm']"
    )
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, env=path)


# -- hits of full attention --------------------------------------------------------


def find(
    pool: Any, hashes: Any, *, most: int = 100, eagle: bool = False, **to: Any
) -> Any:
    manager = held("vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager")
    options = {"kv_cache_spec": Spec(), "alignment_tokens": 4, **to}
    return manager.find_longest_cache_hit(
        hashes, most, [0, 1], pool, drop_eagle_block=eagle, **options
    )


@pytest.mark.usefixtures("vllm")
def test_hits_are_found_in_all_groups_at_once() -> None:
    plugin.register()
    pool = kvcache.BlockPool(20, True, 4)
    hashes = [bytes([i]) * 16 for i in range(5)]
    ids = pool.get_new_block_ids(7)
    pool.cache_block_ids(ids[:4], hashes[:4], 0)
    pool.cache_block_ids(ids[4:], hashes[:3], 1)
    blocks, length = find(pool, hashes)
    assert [[block.block_id for block in group] for group in blocks] == [
        ids[:3].tolist(),
        ids[4:].tolist(),
    ]
    assert length == 12
    assert find(pool, hashes, most=11)[1] == 8
    blocks, length = find(pool, hashes, eagle=True)
    assert (len(blocks[0]), len(blocks[1]), length) == (2, 2, 8)
    assert find(pool, [b"?" * 16], eagle=True) == (([], []), 0)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "other",
    [
        {"alignment_tokens": 2},
        {"kv_cache_spec": Spec(8)},
        {"dcp_world_size": 2},
        {"hashes": (b"?",)},
        {"pool": object()},
    ],
)
def test_hits_of_other_sizes_ranks_lists_and_pools_are_vllms(
    other: dict[str, Any],
) -> None:
    plugin.register()
    pool = other.pop("pool", kvcache.BlockPool(20, True, 4))
    assert find(pool, other.pop("hashes", []), **other) == "vLLM's own"


@pytest.mark.usefixtures("vllm")
def test_hits_are_vllms_again_afterwards() -> None:
    plugin.register()
    plugin.unregister()
    assert find(kvcache.BlockPool(20, True, 4), []) == "vLLM's own"


# -- the usual allocate_slots ------------------------------------------------------


class Group:
    """What `allocate_slots` reads of a group's manager: 3 blocks of 4, 2 cached."""

    find_longest_cache_hit = classmethod(find_longest_cache_hit)

    def __init__(self, **changes: Any) -> None:
        self.block_size = 4
        self.enable_caching = True
        self.req_to_blocks = {"a": [SimpleNamespace(is_null=False)] * 3}
        self.num_cached_block = {"a": 2}
        self._partial_hit_reqs: dict[str, Any] = {}
        vars(self).update(changes)


class Window(Group):
    sliding_window = 5
    extra_retained_tokens = 0


def answer(group: Group, computed: int = 9, *args: Any, **changes: Any) -> Any:
    """What vLLM's manager answers to a request with so many computed tokens."""
    manager = held("vllm.v1.core.kv_cache_manager.KVCacheManager")()
    manager.max_model_len = 100
    manager.coordinator = SimpleNamespace(single_type_managers=[group])
    manager.block_pool = SimpleNamespace(hash_block_size=4)
    manager.empty_kv_cache_blocks = "no blocks"
    request = SimpleNamespace(
        request_id="a",
        num_computed_tokens=computed,
        status="running",
        num_in_flight_tokens=0,
    )
    options = {
        name: changes.pop(name)
        for name in list(changes)
        if name.startswith("num_l")
        or name
        in ("delay_cache_blocks", "reserved_blocks", "num_external_computed_tokens")
    }
    vars(request).update(changes)
    return manager.allocate_slots(request, *(args or (1,)), **options)


@pytest.fixture
def registered(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    single = sys.modules["vllm.v1.core.single_type_kv_cache_manager"]
    monkeypatch.setattr(single, "FullAttentionManager", Group)
    monkeypatch.setattr(single, "SlidingWindowManager", Window)
    assert "KVCacheManager.allocate_slots" in plugin.register()


@pytest.mark.usefixtures("registered")
def test_a_request_that_has_its_slots_is_answered_at_once() -> None:
    assert answer(Group()) == "no blocks"
    assert answer(Group(), 8, 3) == "no blocks"
    assert answer(Group(), 9, num_lookahead_tokens=2) == "no blocks"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("changed", "computed", "args", "changes"),
    [
        ({}, 12, (1,), {}),  # needs a block
        ({}, 11, (1,), {}),  # fills one
        ({}, 9, (1,), {"num_lookahead_tokens": 3}),
        ({}, 9, (0,), {}),
        ({}, 9, (-1,), {}),
        ({}, 9, (True,), {}),
        ({}, 100, (1,), {}),
        ({}, 9, (1,), {"status": "waiting"}),
        ({}, 9, (1,), {"delay_cache_blocks": True}),
        ({}, 9, (1,), {"reserved_blocks": 1}),
        ({}, 9, (1,), {"num_external_computed_tokens": 4}),
        ({"_partial_hit_reqs": {"a": 0}}, 9, (1,), {}),
        ({"num_cached_block": {}}, 9, (1,), {}),
        ({"req_to_blocks": {}}, 9, (1,), {}),
        ({"block_size": 2}, 4, (1,), {}),  # hashes of another size: a partial tail
    ],
)
def test_all_else_is_vllms(
    changed: dict[str, Any], computed: int, args: tuple[int, ...], changes: Any
) -> None:
    assert answer(Group(**changed), computed, *args, **changes) == "vLLM's own"


@pytest.mark.usefixtures("registered")
def test_a_window_that_gives_a_block_back_is_vllms() -> None:
    given_back = [SimpleNamespace(is_null=True)] + [SimpleNamespace(is_null=False)] * 2
    blocks = {"a": given_back}
    assert answer(Window(), 7, num_cached_block=0) == "no blocks"
    assert answer(Window(), 8) == "vLLM's own"
    assert answer(Window(req_to_blocks=blocks), 8) == "no blocks"
    assert answer(Window(), 8, num_in_flight_tokens=1) == "no blocks"


@pytest.mark.usefixtures("registered")
def test_a_group_of_an_unknown_kind_is_vllms_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Other(Group):
        pass

    caplog.set_level("INFO", "vllm.plugins.kvcache")
    assert [answer(Other()), answer(Other())] == ["vLLM's own"] * 2
    [record] = caplog.records
    assert "a Other, whose rules are not known" in record.getMessage()
