"""The interfaces: their names, and which classes keep them."""

from abc import ABC
from typing import Any

import pytest

from kvcache import NoFreeBlocksError
from kvcache.prefix_caching.blocks import NaiveBlock, PrefixCachingBlock
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.interfaces import (
    Block,
    BlockAllocator,
    BlockId,
    Device,
    DeviceAwareBlockAllocator,
    PrefixHash,
    RefCounterProtocol,
)
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.null_block import NullBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter import ReadOnlyRefCounter, RefCounter

KEPT_BY: list[tuple[type[ABC], type[Any]]] = [
    (Block, NaiveBlock),
    (Block, PrefixCachingBlock),
    (Block, NullBlock),
    (BlockAllocator, NaiveBlockAllocator),
    (BlockAllocator, PrefixCachingBlockAllocator),
    (DeviceAwareBlockAllocator, CpuGpuBlockAllocator),
]


def abstract_names(interface: type[Any]) -> set[str]:
    return set(interface.__abstractmethods__)


def test_a_gpu_and_a_cpu_are_the_devices() -> None:
    assert [device.name for device in Device] == ["GPU", "CPU"]


def test_ids_and_hashes_are_ints() -> None:
    assert BlockId is int
    assert PrefixHash is int


def test_a_lack_of_blocks_is_the_same_error_as_everywhere() -> None:
    assert BlockAllocator.NoFreeBlocksError is NoFreeBlocksError


@pytest.mark.parametrize(
    "interface", [Block, BlockAllocator, DeviceAwareBlockAllocator]
)
def test_an_interface_cannot_be_made(interface: type[ABC]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        interface()


def test_a_class_that_lacks_a_method_cannot_be_made() -> None:
    names = abstract_names(BlockAllocator)
    whole = type("Whole", (BlockAllocator,), dict.fromkeys(names))
    whole()
    for name in names:
        rest = dict.fromkeys(names - {name})
        with pytest.raises(TypeError, match=name):
            type("Partial", (BlockAllocator,), rest)()


def test_a_block_has_the_members_of_vllms() -> None:
    assert abstract_names(Block) == {
        "append_token_ids",
        "block_id",
        "computed",
        "content_hash",
        "extra_hash",
        "is_full",
        "last_accessed",
        "num_empty_slots",
        "num_tokens_total",
        "prev_block",
        "token_ids",
    }
    assert callable(Block.Factory)


COMMON = {
    "all_block_ids",
    "allocate_immutable_block",
    "allocate_immutable_blocks",
    "allocate_mutable_block",
    "clear_copy_on_writes",
    "find_cached_blocks_prefix",
    "fork",
    "free",
    "get_common_computed_block_ids",
    "get_num_free_blocks",
    "get_num_full_blocks_touched",
    "get_num_total_blocks",
    "get_physical_block_id",
    "get_prefix_cache_hit_rate",
    "mark_blocks_as_accessed",
    "mark_blocks_as_computed",
    "reset_prefix_cache",
}


def test_an_allocator_has_the_members_of_vllms() -> None:
    assert abstract_names(BlockAllocator) == COMMON | {
        "cow_block_if_not_appendable",
        "promote_to_immutable_block",
        "swap_in",
        "swap_out",
    }


def test_an_allocator_for_two_devices_has_the_members_of_vllms() -> None:
    assert abstract_names(DeviceAwareBlockAllocator) == COMMON | {
        "allocate_or_get_null_block",
        "swap",
    }


@pytest.mark.parametrize(("interface", "kept_by"), KEPT_BY)
def test_a_compiled_class_passes_for_its_interface(
    interface: type[ABC], kept_by: type[Any]
) -> None:
    assert issubclass(kept_by, interface)


@pytest.mark.parametrize(("interface", "kept_by"), KEPT_BY)
def test_a_compiled_class_has_all_that_its_interface_promises(
    interface: type[ABC], kept_by: type[Any]
) -> None:
    assert {
        name for name in abstract_names(interface) if not hasattr(kept_by, name)
    } == set()


@pytest.mark.parametrize("counter", [RefCounter, ReadOnlyRefCounter])
def test_a_counter_has_all_that_its_protocol_promises(counter: type[Any]) -> None:
    names = {name for name in vars(RefCounterProtocol) if not name.startswith("_")}
    assert names == {"incr", "decr", "get"}
    assert all(callable(getattr(counter, name)) for name in names)


def test_a_class_of_ones_own_may_call_what_it_overrides() -> None:
    class Own(Block):
        def append_token_ids(self, token_ids: list[int]) -> None:
            super().append_token_ids(token_ids)  # type: ignore[safe-super]

    names = abstract_names(Own)
    made = type("Made", (Own,), dict.fromkeys(names))()
    made.append_token_ids([1])
