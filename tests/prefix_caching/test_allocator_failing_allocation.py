"""No allocation that fails breaks v0's allocators, tables, evictor: see
failing_allocation.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from doubles import PlainBlock, snapshot
from failing_allocation import ALL, ONCE, World, each, go_through, plain

from kvcache.prefix_caching import BlockTable, CpuGpuBlockAllocator
from kvcache.prefix_caching.block_list import BlockList
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.evictor import LRUEvictor
from kvcache.prefix_caching.interfaces import Device
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter import CopyOnWriteTracker, RefCounter
from kvcache.prefix_caching.trackers import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
)

Act = Callable[[], Any]
IDS = [900 + 7 * i for i in range(12)]  # beyond the ints that CPython keeps

# -- allocators of one device ------------------------------------------------------

ALLOCATORS: dict[str, Callable[[], Any]] = {
    "caching": lambda: PrefixCachingBlockAllocator(12, 4, IDS),
    "naive": lambda: NaiveBlockAllocator(NaiveBlock, 12, 4, IDS),
    "of blocks of one's own": lambda: NaiveBlockAllocator(PlainBlock, 12, 4, IDS),
}


class Held:
    """An allocator, of which a sequence of five blocks and its fork hold blocks."""

    def __init__(self, kind: str) -> None:
        self.allocator = allocator = ALLOCATORS[kind]()
        self.full = allocator.allocate_immutable_blocks(
            None, [[i] * 4 for i in range(4)]
        )
        self.last = allocator.allocate_mutable_block(self.full[-1])
        if kind != "of blocks of one's own":
            self.last.append_token_ids([5])
        self.fork = allocator.fork(self.last)
        for block in allocator.allocate_immutable_blocks(None, [[9] * 4, [8] * 4]):
            allocator.free(block)
        allocator.mark_blocks_as_computed([])

    def state(self) -> Any:
        return snapshot(self.allocator), plain([*self.full, self.last, *self.fork])


def swap_in(held: Held) -> Act:
    blocks = [*held.full, held.last]
    held.allocator.swap_out(blocks)
    return lambda: held.allocator.swap_in(blocks)


def clear_copies(held: Held) -> Act:
    held.allocator.cow_block_if_not_appendable(held.last)
    return held.allocator.clear_copy_on_writes


def reset(held: Held) -> Act:
    held.allocator.swap_out([*held.full, held.last, *held.fork])
    return held.allocator.reset_prefix_cache


def find(held: Held) -> Act:
    hashes = [block.content_hash for block in held.full]
    return lambda: held.allocator.find_cached_blocks_prefix(hashes)


ON_ANY: dict[str, Callable[[Held], Act]] = {
    "allocate_immutable_blocks": lambda held: (
        lambda: held.allocator.allocate_immutable_blocks(None, [[9] * 4, [7] * 4])
    ),
    "allocate_mutable_block": lambda held: (
        lambda: held.allocator.allocate_mutable_block(held.last)
    ),
    "allocate_blocks": lambda held: (
        lambda: held.allocator.allocate_blocks(None, [[9] * 4, [7] * 4, [6]])
    ),
    "free": lambda held: lambda: held.allocator.free(held.last),
    "fork": lambda held: lambda: held.allocator.fork(held.last),
    "cow_block_if_not_appendable": lambda held: (
        lambda: held.allocator.cow_block_if_not_appendable(held.last)
    ),
    "clear_copy_on_writes": clear_copies,
    "swap_out": lambda held: lambda: held.allocator.swap_out([*held.full, held.last]),
    "swap_in": swap_in,
    "get_num_full_blocks_touched": lambda held: (
        lambda: held.allocator.get_num_full_blocks_touched(held.full)
    ),
    "all_block_ids": lambda held: lambda: held.allocator.all_block_ids,
    "repr": lambda held: lambda: repr(held.allocator),
    "check": lambda held: held.allocator.check,
}
ON_OWN: dict[str, Callable[[Held], Act]] = {
    "append_token_ids": lambda held: lambda: held.last.append_token_ids([1]),
    "append_token_ids, full": lambda held: (
        lambda: held.last.append_token_ids([1, 2, 3])
    ),
}
ON_CACHING: dict[str, Callable[[Held], Act]] = {
    "promote_to_immutable_block": lambda held: (
        lambda: held.allocator.promote_to_immutable_block(held.full[0])
    ),
    "mark_blocks_as_accessed": lambda held: (
        lambda: held.allocator.mark_blocks_as_accessed(IDS[:3], 5.0)
    ),
    "mark_blocks_as_computed": lambda held: (
        lambda: held.allocator.mark_blocks_as_computed([])
    ),
    "find_cached_blocks_prefix": find,
    "reset_prefix_cache": reset,
}
CALLS = [
    *[(kind, call, ON_ANY[call]) for kind in ALLOCATORS for call in ON_ANY],
    *[(kind, call, ON_OWN[call]) for kind in ("caching", "naive") for call in ON_OWN],
    *[("caching", call, ON_CACHING[call]) for call in ON_CACHING],
]


@each(ONCE)
@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind, _, call in CALLS],
    ids=[f"{kind}, {name}" for kind, name, _ in CALLS],
)
def test_an_allocator_is_as_before_where_a_call_finds_no_memory(
    kind: str, call: Callable[[Held], Act], fails: Any
) -> None:
    def make() -> World:
        held = Held(kind)
        return World(call(held), held.state, held.allocator.check)

    go_through(make, fails)


# -- two devices, and tables -------------------------------------------------------


class Tables:
    """Two devices; a table of three blocks and its fork, both on the GPU."""

    def __init__(self, kind: str, num_blocks: int = 300) -> None:
        self.both = both = CpuGpuBlockAllocator.create(kind, num_blocks, 300, 4)
        # Ids over 256, which are no objects yet.
        filler = BlockTable(4, both)
        filler.allocate(range(1000, 1000 + 4 * 260))
        self.table = BlockTable(4, both)
        self.table.allocate(range(10))
        self.fork = self.table.fork()
        self.filler = filler

    def state(self) -> Any:
        devices = self.both._allocators
        return (
            [snapshot(devices[device]) for device in (Device.GPU, Device.CPU)],
            [
                (list(table.physical_block_ids), table._get_all_token_ids())
                for table in (self.table, self.fork)
            ],
            [table.num_full_slots for table in (self.table, self.fork)],
            dict(self.both._swap_mapping),
        )

    def check(self) -> None:
        for allocator in self.both._allocators.values():
            allocator.check()
        for table in (self.table, self.fork):
            if not self.both._swap_mapping:  # after a swap tables are to be updated
                ids = [block.block_id for block in table.blocks]
                assert table.physical_block_ids == ids


def allocate(tables: Tables) -> Act:
    tables.fork.free()
    return lambda: tables.fork.allocate(range(50, 61))


def swap(tables: Tables) -> Act:
    tables.fork.free()
    return lambda: tables.both.swap(tables.table.blocks, Device.GPU, Device.CPU)


def take_swaps(tables: Tables) -> Act:
    swap(tables)()
    tables.table.update(tables.table.blocks)
    return tables.both.get_and_reset_swaps


def slide(tables: Tables) -> Act:
    """The window has dropped what it drops."""
    tables.fork.free()
    table = BlockTable(4, tables.both, max_block_sliding_window=2)
    table.allocate(range(70, 86))
    table.append_token_ids([1], num_computed_slots=16)
    tables.fork = table
    return lambda: table.append_token_ids([2, 3, 4, 5, 6], num_computed_slots=17)


ON_TABLES: dict[str, Callable[[Tables], Act]] = {
    "allocate": allocate,
    "append_token_ids": lambda tables: lambda: tables.table.append_token_ids([1]),
    "append_token_ids, several blocks": lambda tables: (
        lambda: tables.table.append_token_ids(list(range(9)), num_lookahead_slots=6)
    ),
    "append_token_ids in a window": slide,
    "ensure_num_empty_slots": lambda tables: (
        lambda: tables.table.ensure_num_empty_slots(20)
    ),
    "fork": lambda tables: lambda: tables.table.fork(),
    "free": lambda tables: lambda: tables.table.free(),
    "physical_block_ids": lambda tables: lambda: tables.table.physical_block_ids,
    "swap": swap,
    "get_and_reset_swaps": take_swaps,
    "allocate_or_get_null_block": lambda tables: (
        lambda: tables.both.allocate_or_get_null_block()
    ),
}


@each(ONCE)
@pytest.mark.parametrize("kind", ["naive", "prefix_caching"])
@pytest.mark.parametrize("call", ON_TABLES)
def test_a_table_is_as_before_where_a_call_finds_no_memory(
    call: str, kind: str, fails: Any
) -> None:
    def make() -> World:
        tables = Tables(kind)
        return World(ON_TABLES[call](tables), tables.state, tables.check)

    go_through(make, fails)


@each(ONCE)
def test_a_swap_that_evicts_moves_all_blocks_or_none(fails: Any) -> None:
    """All of the CPU's are cached: each that moves there evicts one, or is a hit."""

    def make() -> World:
        tables = Tables("prefix_caching")
        tables.fork.free()
        for first in (0, 4000):
            other = BlockTable(4, tables.both)
            other.allocate(range(first, first + 4 * 150), Device.CPU)
            other.free()
        return World(
            lambda: tables.both.swap(tables.table.blocks, Device.GPU, Device.CPU),
            lambda: tables.state()[0::3],
            lambda: [one.check() for one in tables.both._allocators.values()],
        )

    go_through(make, fails)


# -- what they are made of ---------------------------------------------------------


def evictor_world(operation: Callable[[LRUEvictor], Act]) -> World:
    evictor = LRUEvictor()
    for i in range(16):  # all rows there are: one more makes it grow
        evictor.add(300 + i, i * 2**70, i, float(i))

    def state() -> Any:
        return [
            (block, one.content_hash, one.num_hashed_tokens, one.last_accessed)
            for block, one in evictor.free_table.items()
        ]

    return World(operation(evictor), state, evictor.check)


@each(ALL)
@pytest.mark.parametrize(
    "operation",
    [
        lambda evictor: lambda: evictor.add(999, 2**80, 5, 3.0),
        lambda evictor: lambda: evictor.add(305, 2**80, 5, 30.0),
        lambda evictor: lambda: evictor.update(303, 99.0),
        lambda evictor: lambda: evictor.remove(303),
        lambda evictor: evictor.evict,
    ],
    ids=["add", "add again", "update", "remove", "evict"],
)
def test_an_evictor_is_as_before(operation: Any, fails: Any) -> None:
    go_through(lambda: evictor_world(operation), fails)


@each(ALL)
def test_a_copy_is_recorded_and_told_once(fails: Any) -> None:
    def make() -> World:
        tracker = CopyOnWriteTracker(RefCounter(IDS))
        tracker.record_cow(300, 301)
        return World(tracker.clear_cows, lambda: tracker.nbytes)

    go_through(make, fails)


@each(ALL)
@pytest.mark.parametrize("operation", ["append", "update"])
def test_a_list_of_blocks_is_as_before(operation: str, fails: Any) -> None:
    def make() -> World:
        allocator = NaiveBlockAllocator(NaiveBlock, 40, 4, range(300, 340))
        blocks = allocator.allocate_immutable_blocks(None, [[i] for i in range(40)])
        kept = BlockList(blocks[:8])

        def act() -> None:
            if operation == "append":
                kept.append(blocks[8])
            else:
                kept.update(blocks)

        return World(act, lambda: (list(kept.ids()), plain(kept.list())))

    go_through(make, fails)


@each(ALL)
@pytest.mark.parametrize(
    "make",
    [
        *ALLOCATORS.values(),
        lambda: CpuGpuBlockAllocator.create("prefix_caching", 8, 8, 4),
        lambda: BlockTable(4, CpuGpuBlockAllocator.create("naive", 8, 8, 4)),
        LRUEvictor,
        lambda: RefCounter(IDS),
        lambda: CopyOnWriteTracker(None),
        lambda: ComputedBlocksTracker(None, 4, True),
        lambda: LastAccessBlocksTracker(None),
    ],
    ids=[
        *ALLOCATORS,
        "two devices",
        "table",
        "evictor",
        "counter",
        "copies",
        "computed blocks",
        "last accesses",
    ],
)
def test_what_cannot_be_made_leaves_nothing_behind(make: Any, fails: Any) -> None:
    def world() -> World:
        made: list[Any] = []

        def act() -> None:
            made.append(make())

        return World(act, lambda: len(made))

    go_through(world, fails)


@each(ONCE)
@pytest.mark.parametrize("kind", ["caching", "naive"])
def test_an_allocator_whose_making_failed_is_empty_and_can_be_made(
    kind: str, fails: Any
) -> None:
    of = {"caching": PrefixCachingBlockAllocator, "naive": NaiveBlockAllocator}[kind]

    def make() -> World:
        allocator = of.__new__(of)
        first = () if kind == "caching" else (NaiveBlock,)

        def act() -> None:
            allocator.__init__(*first, 12, 4, IDS)

        return World(act, lambda: snapshot(allocator), allocator.check)

    go_through(make, fails)
