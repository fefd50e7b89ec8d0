"""The plugin, with a stand-in for vLLM: what is put in place, what not, and back again.

vLLM itself judges the plugin in its own test suite and in engine_with_vllm.py.
"""

import os
import subprocess
import sys
from types import ModuleType

import pytest
from stand_in import allocate_slots, held

import kvcache
from kvcache import events, hashing
from kvcache.integrations import vllm as plugin


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
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
