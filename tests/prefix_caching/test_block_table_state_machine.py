"""`BlockTable` against plain lists, with a memory that is written as an engine would.

A table's tokens are a list in the model. The memory of a device is a dict from (block
id, slot) to token: what is appended is written there, copies and swaps are made as the
allocator says, and after each step every table must find its tokens in its blocks.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import NoFreeBlocksError
from kvcache.prefix_caching.block_table import BlockTable
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.interfaces import Device
from kvcache.prefix_caching.null_block import NullBlock

UNIT = 3
GPU, CPU = Device.GPU, Device.CPU

# Few different tokens, so that equal prefixes are common.
tokens = st.lists(st.integers(0, 1), max_size=6)
first_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)
devices = st.sampled_from([GPU, GPU, GPU, CPU])
pick = st.integers(0, 100)


class Sequence:
    """A table beside what it must hold."""

    def __init__(self, table: BlockTable, held: list[int], device: Device) -> None:
        self.table = table
        self.held = held
        self.device = device
        self.num_blocks = len(table.blocks)
        self.extra_hash: int | None = None


class TableMachine(RuleBasedStateMachine):
    kind: str

    @initialize(
        on_gpu=st.integers(4, 24),
        on_cpu=st.integers(0, 8),
        window=st.none() | st.integers(1, 3),
    )
    def begin(self, on_gpu: int, on_cpu: int, window: int | None) -> None:
        self.allocator = CpuGpuBlockAllocator.create(self.kind, on_gpu, on_cpu, UNIT)
        self.window = window
        self.sequences: list[Sequence] = []
        self.memory: dict[tuple[int | None, int], int] = {}

    def state(self) -> Any:
        """Everything that a failed call must leave as it is."""
        return (
            [(list(one.table.physical_block_ids), one.table.num_full_slots)
             for one in self.sequences],
            [[block.token_ids for block in one.table.blocks] for one in self.sequences],
            [self.allocator.get_num_free_blocks(device) for device in Device],
            [getattr(self.allocator._allocators[device], "_cached_blocks", None)
             for device in Device],
        )  # fmt: skip

    def write(self, one: Sequence, start: int) -> None:
        """What the engine does in its step: the copies, then the new tokens."""
        copies = self.allocator.clear_copy_on_writes()
        content = dict(self.memory)
        for source, destination in copies:
            for slot in range(UNIT):
                if (source, slot) in content:
                    self.memory[destination, slot] = content[source, slot]
        for place in range(start, len(one.held)):
            block_id = one.table.physical_block_ids[place // UNIT]
            self.memory[block_id, place % UNIT] = one.held[place]

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(held=first_tokens, device=devices, adapter=st.sampled_from([None, None, 1]))
    def allocate(self, held: list[int], device: Device, adapter: int | None) -> None:
        table = BlockTable(UNIT, self.allocator, max_block_sliding_window=self.window)
        before = self.state()
        try:
            table.allocate(held, device, adapter)
        except NoFreeBlocksError:
            assert not table._is_allocated
            assert self.state() == before
            return
        self.sequences.append(Sequence(table, list(held), device))
        self.sequences[-1].extra_hash = adapter
        self.write(self.sequences[-1], 0)

    @precondition(lambda self: any(one.device is GPU for one in self.sequences))
    @rule(which=pick, new=tokens, lookahead=st.integers(0, 7), behind=st.integers(0, 4))
    def append(self, which: int, new: list[int], lookahead: int, behind: int) -> None:
        on_gpu = [one for one in self.sequences if one.device is GPU]
        one = on_gpu[which % len(on_gpu)]
        computed = max(0, len(one.held) - behind)
        before = self.state()
        needed = one.table.get_num_blocks_touched_by_append_slots(new, lookahead)
        free = self.allocator.get_num_free_blocks(GPU)
        try:
            one.table.append_token_ids(new, lookahead, computed, one.extra_hash)
        except NoFreeBlocksError:
            assert needed > free - (self.window is not None)  # the null block
            if self.window is None:
                assert self.state() == before
            assert self.allocator.clear_copy_on_writes() == []
            return
        one.held += new
        one.num_blocks = max(one.num_blocks, -(-(len(one.held) + lookahead) // UNIT))
        self.write(one, len(one.held) - len(new))

    @precondition(lambda self: any(one.device is GPU for one in self.sequences))
    @rule(which=pick, slots=st.integers(0, 10))
    def ensure(self, which: int, slots: int) -> None:
        on_gpu = [one for one in self.sequences if one.device is GPU]
        one = on_gpu[which % len(on_gpu)]
        before = self.state()
        try:
            one.table.ensure_num_empty_slots(slots, one.extra_hash)
        except NoFreeBlocksError:
            assert self.state() == before
            return
        one.num_blocks = max(one.num_blocks, -(-(len(one.held) + slots) // UNIT))

    @precondition(lambda self: 0 < len(self.sequences) < 6)
    @rule(which=pick)
    def fork(self, which: int) -> None:
        one = self.sequences[which % len(self.sequences)]
        free = [self.allocator.get_num_free_blocks(device) for device in Device]
        forked = Sequence(one.table.fork(), list(one.held), one.device)
        forked.extra_hash = one.extra_hash
        self.sequences.append(forked)
        assert forked.table.physical_block_ids == one.table.physical_block_ids
        assert free == [self.allocator.get_num_free_blocks(device) for device in Device]

    @precondition(lambda self: any(one.device is GPU for one in self.sequences))
    @rule(which=pick, new=st.lists(st.integers(0, 1), min_size=1, max_size=2))
    def decode(self, which: int, new: list[int]) -> None:
        self.append(which, new, 0, 1)

    @precondition(lambda self: len(self.sequences) > 2)
    @rule(which=pick)
    def free(self, which: int) -> None:
        one = self.sequences.pop(which % len(self.sequences))
        one.table.free()
        assert not one.table._is_allocated

    @precondition(lambda self: self.sequences)
    @rule(which=pick)
    def swap(self, which: int) -> None:
        one = self.sequences[which % len(self.sequences)]
        there = CPU if one.device is GPU else GPU
        before = self.state()
        try:
            mapping = self.allocator.swap(one.table.blocks, one.device, there)
        except NoFreeBlocksError:
            assert self.state() == before
            return
        one.table.update(one.table.blocks)
        one.device = there
        content = dict(self.memory)
        for source, destination in mapping.items():
            for slot in range(UNIT):
                if (source, slot) in content:
                    self.memory[destination, slot] = content[source, slot]

    @rule()
    def mark_and_reset(self) -> None:
        self.allocator.mark_blocks_as_computed([])
        self.allocator.reset_prefix_cache()

    @invariant()
    def every_table_finds_its_tokens(self) -> None:
        for one in self.sequences:
            table = one.table
            num_null = sum(isinstance(block, NullBlock) for block in table.blocks)
            assert table.num_full_slots == len(one.held)
            assert table._get_all_token_ids() == one.held[num_null * UNIT :]
            assert len(table.blocks) == one.num_blocks
            assert table.physical_block_ids == [
                block.block_id for block in table.blocks
            ]
            for place in range(num_null * UNIT, len(one.held)):
                block_id = table.physical_block_ids[place // UNIT]
                assert self.memory[block_id, place % UNIT] == one.held[place]

    @invariant()
    def blocks_are_used_or_free(self) -> None:
        everything = [block for one in self.sequences for block in one.table.blocks]
        null_ids = {b.block_id for b in everything if isinstance(b, NullBlock)}
        used = {b.block_id for b in everything} - null_ids
        for device in Device:
            allocator = self.allocator._allocators[device]
            free = allocator.get_num_free_blocks()
            left = allocator.get_num_total_blocks() - free
            left -= len(used & allocator.all_block_ids)
            assert left in ((0, 1) if device is GPU and self.window else (0,))
            allocator.check()


class NaiveTableMachine(TableMachine):
    kind = "naive"


class PrefixCachingTableMachine(TableMachine):
    kind = "prefix_caching"


MACHINES = {
    "block tables, naive": NaiveTableMachine,
    "block tables, prefix caching": PrefixCachingTableMachine,
}


@pytest.mark.parametrize("machine", [NaiveTableMachine, PrefixCachingTableMachine])
def test_tables_hold_what_lists_hold(machine: type[TableMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=200, stateful_step_count=40, deadline=None),
    )
