"""What tests/test_hostile_calls.py calls, and with what: public callables, bad values.

The callables are read from the packages' `__all__` and from the stubs (a module's own
text, where it has no stub), so that a new method is among them the day it is added.
Every value is given for every parameter, be it meant for it or not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from kvcache import (
    BlockHashToBlockMap,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheMetricsCollector,
)
from kvcache.hashing import (
    BlockHasher,
    BlockHashListWithBlockSize,
    Keyed,
    get_request_block_hasher,
    sha256,
)
from kvcache.manager import (
    FullAttention,
    KVCacheManager,
    PrefixCacheStats,
    SlidingWindow,
)
from kvcache.prefix_caching import BlockPool as ObjectPool
from kvcache.prefix_caching import (
    BlockTable,
    ComputedBlocksTracker,
    CpuGpuBlockAllocator,
    Device,
    LastAccessBlocksTracker,
    LRUEvictor,
    PrefixCachingBlock,
)

PACKAGES = ("kvcache", "kvcache.hashing", "kvcache.manager", "kvcache.prefix_caching")
DUNDERS = {"__getitem__", "__setitem__", "__len__", "__contains__", "__eq__"}
DUNDERS |= {"__call__", "__iter__", "__reversed__", "__reduce__"}


class Parameter(NamedTuple):
    name: str
    is_required: bool
    by_position: bool


class Callee(NamedTuple):
    """A public function, method, property or class."""

    package: str
    owner: type | None  # None of a function
    name: str  # "" for the class itself
    parameters: tuple[Parameter, ...]
    is_property: bool = False
    is_setter: bool = False

    def __str__(self) -> str:
        owner = self.owner.__name__ if self.owner else ""
        name = ".".join(filter(None, (self.package, owner, self.name)))
        return f"{name} =" if self.is_setter else name


# -- what there is -----------------------------------------------------------------


def stub_of(module: str) -> tuple[ast.Module, bool]:
    """A module's stub, or its text and True."""
    path = Path(importlib.import_module(module).__file__ or "")
    beside = path.with_name(path.name.split(".")[0] + ".pyi")
    if beside.exists():
        return ast.parse(beside.read_text()), False
    return ast.parse(path.read_text()), True


def parameters_of(function: ast.FunctionDef, bound: bool) -> tuple[Parameter, ...]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [
        Parameter(one.arg, i < required, function.name in DUNDERS)
        for i, one in enumerate(positional)
    ]
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(one.arg, default is None, False))
    return tuple(found[bound:])


def methods_of(package: str, kind: type) -> Iterator[Callee]:
    """A class's own and inherited methods, as its stubs have them."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("kvcache"):
            continue
        text, is_source = stub_of(base.__module__)
        for node in ast.walk(text):
            if not isinstance(node, ast.ClassDef) or node.name != base.__name__:
                continue
            for each in node.body:
                if not isinstance(each, ast.FunctionDef):
                    continue
                marks = {ast.unparse(mark) for mark in each.decorator_list}
                is_setter = any(mark.endswith(".setter") for mark in marks)
                is_property = is_setter or any("property" in mark for mark in marks)
                name = "" if each.name in ("__init__", "__new__") else each.name
                if name.startswith("__") and name not in DUNDERS:
                    continue
                # vLLM's own names may begin so: those are in stubs.
                is_private = name.startswith("_") and is_source
                if (name, is_setter) in seen or (is_private and name not in DUNDERS):
                    continue
                seen.add((name, is_setter))
                bound = "staticmethod" not in marks
                parameters = parameters_of(each, bound)
                yield Callee(package, kind, name, parameters, is_property, is_setter)


def callees() -> Iterator[Callee]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                if not issubclass(thing, BaseException):
                    yield from methods_of(package, thing)
            elif inspect.isroutine(thing):
                for node in ast.walk(stub_of(thing.__module__)[0]):
                    if isinstance(node, ast.FunctionDef) and node.name == name:
                        yield Callee(package, None, name, parameters_of(node, False))
                        break


# -- the world ---------------------------------------------------------------------


class Collector:
    """Metrics hooks that use the pool, and fail."""

    def __init__(self, pool_of: Callable[[], Any]) -> None:
        self.pool_of = pool_of

    def on_block_allocated(self, block: Any) -> None:
        self.pool_of().get_num_free_blocks()
        raise RuntimeError("a hook that fails")

    def on_block_accessed(self, block: Any) -> None:
        self.pool_of().evict_blocks({2})

    def on_block_evicted(self, block: Any) -> None:
        self.pool_of().take_events()

    def reset(self) -> None:
        raise RuntimeError("a hook that fails")


class World:
    """Objects of all classes, in use; one is made for each callable."""

    def __init__(self) -> None:
        self.pool = pool = BlockPool(12, True, 4, enable_kv_cache_events=True)
        pool.metrics_collector = Collector(lambda: pool)
        self.digests = [bytes([i]) * 16 for i in range(6)]
        self.held = pool.get_new_blocks(5)
        pool.cache_block_ids([1, 2, 3], self.digests[:3])
        pool.free_blocks([self.held[2], self.held[1]])
        pool.unpin_blocks([self.held[3]], lambda block: pool.get_new_blocks(1))
        self.other = BlockPool(6, True, 4, keep_tokens=True)
        self.other.get_new_blocks(2)
        gone = BlockPool(4, True, 4)
        gone.get_new_blocks(1)
        self.stale = [gone.blocks[1], gone.blocks[2], gone.null_block]
        del gone
        self.loose = KVCacheBlock(7, ref_cnt=2)
        self.queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(3)])
        self.queued = self.queue.get_all_free_blocks()[1]
        self.map = BlockHashToBlockMap()
        self.map.insert(b"key", self.loose)
        self.manager = KVCacheManager(
            16,
            [FullAttention(4), SlidingWindow(4, 6)],
            max_model_len=64,
            max_num_requests=4,
            enable_kv_cache_events=True,
        )
        self.rows = [self.manager.add_request([1, 2, 3, 4, 5, 6]) for _ in range(2)]
        self.manager.allocate_slots(self.rows[0], 6)
        self.allocators = CpuGpuBlockAllocator.create("prefix_caching", 8, 8, 4)
        self.naive = CpuGpuBlockAllocator.create("naive", 8, 8, 4)
        self.block = self.allocators.allocate_immutable_block(
            None, [1, 2, 3, 4], Device.GPU
        )
        self.open_block = self.allocators.allocate_mutable_block(self.block, Device.GPU)
        self.naive_block = self.naive.allocate_mutable_block(None, Device.GPU)
        self.null = self.allocators.allocate_or_get_null_block()
        self.table = BlockTable(4, self.allocators)
        self.table.allocate([1, 2, 3, 4, 5])
        self.evictor = LRUEvictor()
        self.evictor.add(1, 10**20, 4, 1.0)
        self.hasher = BlockHasher(4)
        self.hasher.append([1, 2, 3, 4, 5])
        self.request = SimpleNamespace(
            block_hashes=list(self.digests),
            num_tokens=24,
            all_token_ids=list(range(24)),
            session_id=None,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            _prompt_embeds_per_block_hashes={},
        )

    def instances(self, owner: type) -> list[Any]:
        """Objects to call a class's methods on: none of an abstract class."""
        gpu = self.allocators._allocators[Device.GPU]
        blocks = [*self.held[:3], self.stale[0], self.loose, self.queued]
        there = [
            *(self.pool, self.other, self.pool.blocks, *blocks, self.queue),
            *(
                self.pool.free_block_queue,
                self.map,
                self.pool.cached_block_hash_to_block,
            ),
            *(self.manager, self.hasher, Keyed(bytes(16)), self.allocators, self.naive),
            *(gpu, self.naive._allocators[Device.GPU], self.block, self.open_block),
            *(
                self.naive_block,
                self.null,
                self.table,
                self.table._blocks,
                self.evictor,
            ),
            *(gpu._refcounter, gpu._refcounter.as_readonly(), gpu._cow_tracker),
            *(gpu._block_tracker[0], gpu.metric_data, self.evictor.free_table[1]),
            *(BlockHashListWithBlockSize(self.digests, 4, 8), PrefixCacheStats()),
            KVCacheMetricsCollector(0.5),
            ComputedBlocksTracker(self.allocators, 4, True),
            LastAccessBlocksTracker(self.allocators),
            ObjectPool(4, PrefixCachingBlock, gpu, 3),
        ]
        return [each for each in there if type(each) is owner]

    def values(self) -> list[Any]:
        """One of each kind of what may be passed, bad and good."""
        return [
            *(None, True, False, 0, 1, 2, 3, 4, 8, 11, 12, -1, -(2**31), 2**31 - 1),
            *(2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**30),
            *(0.0, -0.5, 1.5, float("nan"), float("inf"), 1j, "", "1", "gpu", "\ud800"),
            *(b"", b"1", bytes(16), bytes(36), bytes(37), bytearray(b"key"), b"key"),
            *((), [], {}, set(), frozenset({1}), object(), int, print, ..., range(3)),
            *(Small(3), Small(-1), Small(2**70), Index(1), Index(2**70), Index("x")),
            *(Raises(), Endless(), Lying(), iter([1, 2]), memoryview(b"abcd")),
            *([1, 2], [1, 1], (3, 4), [0], [-1], [2**31], [2**63], [2**70], [None]),
            *([1.0], [True], ["1"], [[1]], [b"x"], [Raises()], [Index(1)], {1, 2}),
            *(np.array([1, 2], np.int32), np.array([1, 2]), np.array([1, -1], np.int8)),
            *(np.array([1.0, 2.0]), np.array([1, 2], ">i4"), np.array([[1, 2]])),
            *(np.arange(8, dtype=np.int32)[::2], np.arange(8, dtype=np.int32)[::-1]),
            *(np.array(3), np.zeros(0, np.int32), np.array([1, None], object)),
            *(np.array([2**63], np.uint64), np.array([True]), np.array(["1"])),
            *(np.zeros((2, 16), np.uint8), np.zeros((2, 40), np.uint8), read_only()),
            *(np.int32(2), np.uint64(2**63), np.float64("nan"), np.bool_(True)),
            *(self.digests, self.digests[:2], [self.digests[0], b"other length"]),
            *(self.held, [self.held[0]] * 2, self.held[0], self.pool.blocks[9]),
            *([self.pool.blocks[i] for i in (8, 9)], self.pool.null_block),
            *(self.stale, self.stale[0], [self.other.blocks[1]], self.other.blocks[1]),
            *(self.loose, [self.loose], self.queued, [self.queued, self.queued]),
            *(self.pool, self.pool.blocks, self.pool.free_block_queue, self.map),
            *(self.request, SimpleNamespace(block_hashes=[b"x"] * 3), self.manager),
            *(self.rows, self.rows[0], self.rows[1], 10**6, Device.GPU, Device.CPU),
            *(self.allocators, self.naive, self.block, self.open_block, self.null),
            *(self.naive_block, [self.block], [self.block, self.block], self.table),
            *(self.hasher, Keyed(bytes(16)), sha256, self.evictor, [FullAttention(4)]),
            *(Shrinking(self), Reentrant(self), [Reentrant(self)], Seizing(self)),
            get_request_block_hasher(4, sha256),
        ]

    def good(self, name: str, package: str) -> Any:
        """What a parameter of this name is meant to be given."""
        block = self.held[0] if package == "kvcache" else self.block
        table = {
            "blocks": [block],
            "block": block,
            "src_block": self.held[1],
            "dst_block": self.pool.blocks[9],
            "ordered_blocks": [self.held[0]],
            "request": self.request,
            "hashes": self.digests[:2],
            "block_hash": self.digests[0],
            "hasher": Keyed(bytes(16)),
            "rows": [self.rows[0]],
            "row": self.rows[0],
            "ids": [1],
            "block_ids": [1],
            "tokens": [1, 2, 3, 4],
            "token_ids": [1, 2, 3, 4],
            "block_token_ids": [[1, 2, 3, 4]],
            "device": Device.GPU,
            "src_device": Device.GPU,
            "dst_device": Device.CPU,
            "num_full_blocks": 2,
            "num_cached_blocks": 0,
            "block_size": 4,
            "hash_block_size": 4,
            "kv_cache_group_id": 0,
            "kv_cache_group_ids": [0],
            "on_reuse": print,
            "prev_block": None,
            "now": 1.0,
            "groups": [FullAttention(4)],
            "max_model_len": 64,
            "max_num_requests": 4,
            "allocator": self.allocators,
            "block_allocator": self.allocators,
            "last_block": self.block,
            "key": self.digests[0] + bytes(4),
            "hash_fn": sha256,
            "hash_function": sha256,
            "caching_hash_fn": sha256,
            "sequence_token_ids": [1, 2, 3, 4, 5, 6, 7],
        }
        return table.get(name, 1)

    # -- what must hold ------------------------------------------------------------

    def check(self) -> None:
        for pool in (self.pool, self.other, self.manager.block_pool):
            pool.check()
        self.manager.check()
        self.evictor.check()
        for pair in (self.allocators, self.naive):
            for device in (Device.GPU, Device.CPU):
                pair._allocators[device].check()
        count = self.queue.num_free_blocks
        assert len(self.queue.get_all_free_blocks()) == count

    def state(self) -> list[Any]:
        """What a refused call leaves as it was."""
        pools = [
            [
                pool.blocks.as_array().tobytes(),
                len(pool.cached_block_hash_to_block),
                len(pool.kv_event_queue),
                sorted(pool._reuse_watchers),
            ]
            for pool in (self.pool, self.other, self.manager.block_pool)
        ]
        requests = [self.request_state(row) for row in self.rows]
        devices = [
            [pair.get_num_free_blocks(device), sorted(pair.all_block_ids)]
            for pair in (self.allocators, self.naive)
            for device in (Device.GPU, Device.CPU)
        ]
        blocks = [
            [block.block_id, block.token_ids]
            for block in (self.block, self.open_block, self.naive_block)
        ]
        loose = [
            [block.block_id, block.ref_cnt, block.block_hash]
            for block in (self.loose, *self.stale, *self.queue.get_all_free_blocks())
        ]
        return [
            *(pools, requests, devices, blocks, loose, len(self.map)),
            *(self.table.physical_block_ids, self.evictor.num_blocks),
            *(self.hasher.num_tokens, self.hasher.block_hashes),
        ]

    def request_state(self, row: int) -> list[Any]:
        manager = self.manager
        try:
            known = [manager.num_tokens(row), manager.num_computed_tokens(row)]
        except ValueError:  # it was freed
            return []
        return known + [manager.block_ids(row, g).tolist() for g in (0, 1)]


# -- values with a will of their own --------------------------------------------------


class Own(Exception):
    """What a caller's own code raised."""


class Small(int):
    """An int of another class, that also lies about its index."""

    def __index__(self) -> int:
        return 1


class Index:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        return self.value


class Raises:
    """Fails whatever it is asked."""

    def fail(self, *args: Any) -> Any:
        raise Own

    __index__ = __iter__ = __len__ = __getitem__ = __eq__ = __hash__ = fail  # type: ignore[assignment]
    __bool__ = __float__ = __contains__ = __call__ = __getattr__ = fail


class Endless:
    """A sequence that says it is short and gives items for ever, up to a limit."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index > 1_000:
            raise IndexError
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([1] * 1_000)


class Lying(list[int]):
    """A list that says another length than it has."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: Any) -> Any:
        raise IndexError


class Active:
    """Calls back into the world, whatever it is asked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.left = 20

    def act(self) -> None:
        raise NotImplementedError

    def __index__(self) -> int:
        if self.left:
            self.left -= 1
            self.act()
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.__index__(), self])

    def __len__(self) -> int:
        return self.__index__()

    def __getitem__(self, index: Any) -> int:
        if isinstance(index, int) and index > 2:
            raise IndexError
        return self.__index__()

    def __bool__(self) -> bool:
        return bool(self.__index__())

    def __float__(self) -> float:
        return float(self.__index__())

    def __call__(self, *args: Any) -> bytes:
        self.__index__()
        return bytes(16)


class Shrinking(Active, list[Any]):  # type: ignore[misc]
    """A list that loses its items as soon as one is read."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.extend([self, 1, self])

    def act(self) -> None:
        self.clear()


class Reentrant(Active):
    """Uses the very objects that are being called."""

    def act(self) -> None:
        world = self.world
        world.pool.free_block_ids(world.pool.get_new_block_ids(1))
        world.pool.evict_blocks({1})
        world.manager.append(world.rows[1], [1])
        world.manager.match(world.rows[1])
        world.allocators.free(world.allocators.allocate_mutable_block(None, Device.GPU))
        world.hasher.append([1])
        world.evictor.update(1, 2.0)


class Seizing(Active):
    """Takes all that there is, and drops what is held."""

    def act(self) -> None:
        world = self.world
        world.pool.get_new_blocks(world.pool.get_num_free_blocks())
        world.pool.metrics_collector = None
        world.manager.preempt(world.rows[0])
        world.manager.reset_prefix_cache()


def read_only() -> Any:
    array = np.array([1, 2], np.int32)
    array.flags.writeable = False
    return array
