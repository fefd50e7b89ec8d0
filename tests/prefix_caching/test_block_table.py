"""Which blocks hold the tokens of a sequence: one behaviour, one test."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import PlainBlock

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.block_table import BlockTable
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.interfaces import Device
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.null_block import NullBlock

UNIT = 4
GPU, CPU = Device.GPU, Device.CPU
KINDS = ["naive", "prefix_caching"]

Make = Callable[..., CpuGpuBlockAllocator]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators whose invariants are proved when the test is over."""
    made = []

    def make(
        kind: str = "prefix_caching", on_gpu: int = 16, on_cpu: int = 16
    ) -> CpuGpuBlockAllocator:
        made.append(CpuGpuBlockAllocator.create(kind, on_gpu, on_cpu, UNIT))
        return made[-1]

    yield make
    for allocator in made:
        for one in allocator._allocators.values():
            one.check()


@pytest.fixture(params=KINDS)
def either(make: Make, request: pytest.FixtureRequest) -> CpuGpuBlockAllocator:
    """An allocator of either kind, with sixteen blocks on each device."""
    return make(request.param)


def table_of(
    allocator: CpuGpuBlockAllocator,
    num_tokens: int,
    device: Device = GPU,
    window: int | None = None,
    **of: Any,
) -> BlockTable:
    """The table of a sequence 0, 1, 2, ..."""
    table = BlockTable(UNIT, allocator, max_block_sliding_window=window)
    table.allocate(list(range(num_tokens)), device, **of)
    return table


def num_free(allocator: CpuGpuBlockAllocator, device: Device = GPU) -> int:
    return allocator.get_num_free_blocks(device)


def take_all_but(allocator: CpuGpuBlockAllocator, left: int) -> list[Any]:
    """Use up the GPU's blocks."""
    return [
        allocator.allocate_mutable_block(None, GPU)
        for _ in range(num_free(allocator) - left)
    ]


def state(table: BlockTable) -> tuple[Any, ...]:
    return (
        list(table.physical_block_ids),
        list(table.blocks),
        table._get_all_token_ids(),
        table.num_full_slots,
    )


# -- allocate ----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("device", list(Device))
def test_tokens_are_put_into_as_few_blocks_as_hold_them(
    either: CpuGpuBlockAllocator, num_tokens: int, device: Device
) -> None:
    table = table_of(either, num_tokens, device)
    num_blocks = -(-num_tokens // UNIT)
    assert len(table.physical_block_ids) == num_blocks
    assert num_free(either, device) == 16 - num_blocks
    assert table._get_all_token_ids() == list(range(num_tokens))
    assert table.num_full_slots == num_tokens
    assert table._num_empty_slots == num_blocks * UNIT - num_tokens


def test_a_table_starts_without_blocks(either: CpuGpuBlockAllocator) -> None:
    table = BlockTable(UNIT, either)
    assert not table._is_allocated
    assert state(table) == ([], [], [], 0)


def test_ids_stand_beside_their_blocks(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 10)
    assert table.physical_block_ids == [block.block_id for block in table.blocks]


def test_blocks_are_chained(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 10)
    table.append_token_ids([1, 2, 3])
    before: list[Any] = [None, *table.blocks[:-1]]
    assert [block.prev_block for block in table.blocks] == before


def test_full_blocks_that_are_cached_are_shared(make: Make) -> None:
    allocator = make()
    one, other = table_of(allocator, 10), table_of(allocator, 11)
    assert one.physical_block_ids[:2] == other.physical_block_ids[:2]
    assert one.physical_block_ids[2] != other.physical_block_ids[2]


def test_another_extra_hash_shares_nothing(make: Make) -> None:
    allocator = make()
    one, other = (table_of(allocator, 8, extra_hash=i) for i in (1, 2))
    assert not set(one.physical_block_ids) & set(other.physical_block_ids)
    assert table_of(allocator, 8, extra_hash=2).physical_block_ids == (
        other.physical_block_ids
    )


def test_a_table_is_allocated_once(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 5)
    before = state(table)
    with pytest.raises(BlockStateError, match="2 blocks already"):
        table.allocate([1])
    assert state(table) == before


@pytest.mark.parametrize(
    ("tokens", "error"),
    [([], ValueError), (["1"], TypeError), (None, TypeError), ([2**63], ValueError)],
)
def test_what_are_no_tokens_is_refused(
    either: CpuGpuBlockAllocator, tokens: Any, error: type[Exception]
) -> None:
    table = BlockTable(UNIT, either)
    with pytest.raises(error):
        table.allocate(tokens)
    assert not table._is_allocated
    assert num_free(either) == 16


def test_what_is_no_device_is_refused(either: CpuGpuBlockAllocator) -> None:
    table = BlockTable(UNIT, either)
    with pytest.raises(TypeError, match="'gpu'"):
        table.allocate([1], "gpu")  # type: ignore[arg-type]
    assert not table._is_allocated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [12, 11, 9])
def test_tokens_for_which_there_is_no_room_take_no_block(
    make: Make, kind: str, num_tokens: int
) -> None:
    allocator = make(kind, on_gpu=2)
    table = BlockTable(UNIT, allocator)
    with pytest.raises(NoFreeBlocksError):
        table.allocate(list(range(num_tokens)))
    assert not table._is_allocated
    assert num_free(allocator) == 2
    # Nothing of it may answer lookups: it was never computed.
    assert getattr(allocator._allocators[GPU], "_cached_blocks", {}) == {}


def test_shared_blocks_need_no_room(make: Make) -> None:
    allocator = make(on_gpu=3)
    table_of(allocator, 8)
    table_of(allocator, 9)
    assert num_free(allocator) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, None, None), "block_size"), ((4, None, 0), "max_block_sliding_window")],
)
def test_impossible_sizes_are_refused(
    either: CpuGpuBlockAllocator, arguments: tuple[Any, ...], named: str
) -> None:
    size, blocks, window = arguments
    with pytest.raises(ValueError, match=named):
        BlockTable(size, either, blocks, window)


def test_a_table_may_start_with_blocks(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 10)
    forked = BlockTable(UNIT, either, either.fork(table.blocks[-1]))
    assert forked.num_full_slots == 10
    assert forked.physical_block_ids == table.physical_block_ids
    forked.append_token_ids([7])
    assert forked._get_all_token_ids() == [*range(10), 7]


def test_a_table_does_not_change_the_list_it_was_made_from(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = either.fork(table_of(either, 4).blocks[-1])
    BlockTable(UNIT, either, blocks).append_token_ids([1])
    assert len(blocks) == 1


# -- empty slots -------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "num_new"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2)])
def test_empty_slots_are_made_where_they_are_missing(
    either: CpuGpuBlockAllocator, slots: int, num_new: int
) -> None:
    table = table_of(either, 6)
    table.ensure_num_empty_slots(slots)
    assert len(table.blocks) == 2 + num_new
    assert table._num_empty_slots >= slots
    assert table.num_full_slots == 6
    table.append_token_ids([9] * slots)
    assert len(table.blocks) == 2 + num_new


def test_empty_slots_know_the_extra_hash(make: Make) -> None:
    table = table_of(make(), 4, extra_hash=3)
    table.ensure_num_empty_slots(4, extra_hash=3)
    assert table.blocks[1].extra_hash == 3


def test_empty_slots_for_which_there_is_no_room_take_no_block(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 6)
    take_all_but(either, 1)
    before = state(table)
    with pytest.raises(NoFreeBlocksError, match="2 blocks are needed, 1 are free"):
        table.ensure_num_empty_slots(7)
    assert state(table) == before
    assert num_free(either) == 1


def test_making_no_room_evicts_nothing(make: Make) -> None:
    allocator = make(on_gpu=4)
    old = table_of(allocator, 8)
    old.free()
    table = BlockTable(UNIT, allocator)
    table.allocate([50])
    with pytest.raises(NoFreeBlocksError):
        table.ensure_num_empty_slots(4 * UNIT)
    assert len(allocator._allocators[GPU]._cached_blocks) == 2


@pytest.mark.parametrize("slots", [-1, 2**63])
def test_an_impossible_number_of_slots_is_refused(
    either: CpuGpuBlockAllocator, slots: int
) -> None:
    table = table_of(either, 6)
    with pytest.raises(ValueError, match=f"num_empty_slots .* got {slots}"):
        table.ensure_num_empty_slots(slots)
    with pytest.raises(ValueError, match=f"num_lookahead_slots .* got {slots}"):
        table.append_token_ids([], slots)
    with pytest.raises(ValueError, match=f"num_lookahead_slots .* got {slots}"):
        table.get_num_blocks_touched_by_append_slots([], slots)


def test_a_table_without_blocks_has_no_slots(either: CpuGpuBlockAllocator) -> None:
    table = BlockTable(UNIT, either)
    calls: list[Callable[[], object]] = [
        lambda: table.ensure_num_empty_slots(1),
        lambda: table.append_token_ids([1]),
        lambda: table._num_empty_slots,
        table.fork,
    ]
    for call in calls:
        with pytest.raises(BlockStateError, match="no blocks"):
            call()


# -- append ------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 4, 6])
@pytest.mark.parametrize("num_new", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_tokens_are_appended_behind_the_last(
    either: CpuGpuBlockAllocator, num_tokens: int, num_new: int, at_once: int
) -> None:
    table = table_of(either, num_tokens)
    new = list(range(100, 100 + num_new))
    for i in range(0, num_new, at_once):
        table.append_token_ids(new[i : i + at_once])
    assert table._get_all_token_ids() == [*range(num_tokens), *new]
    assert table.num_full_slots == num_tokens + num_new
    assert len(table.physical_block_ids) == -(-(num_tokens + num_new) // UNIT)


def test_lookahead_slots_are_behind_the_new_tokens(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 3)
    table.append_token_ids([3, 4], num_lookahead_slots=4)
    assert table.num_full_slots == 5
    assert len(table.blocks) == 3
    table.append_token_ids([5, 6, 7, 8])
    assert len(table.blocks) == 3
    assert table._get_all_token_ids() == list(range(9))


def test_lookahead_alone_makes_slots(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 4)
    table.append_token_ids([], num_lookahead_slots=1)
    assert len(table.blocks) == 2
    assert table.num_full_slots == 4


def test_a_block_that_becomes_full_takes_the_place_of_its_twin(make: Make) -> None:
    allocator = make()
    one, other = table_of(allocator, 7), table_of(allocator, 7)
    one.append_token_ids([7])
    assert num_free(allocator) == 13
    other.append_token_ids([7])
    assert other.physical_block_ids == one.physical_block_ids
    assert num_free(allocator) == 14


def test_appended_blocks_know_the_extra_hash(make: Make) -> None:
    allocator = make()
    grown = table_of(allocator, 4, extra_hash=3)
    grown.append_token_ids([4, 5, 6, 7], extra_hash=3)
    assert (
        table_of(allocator, 8, extra_hash=3).physical_block_ids
        == grown.physical_block_ids
    )


def test_tokens_for_which_there_is_no_room_leave_all_as_it_was(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 6)
    take_all_but(either, 1)
    before = state(table)
    with pytest.raises(NoFreeBlocksError):
        table.append_token_ids(list(range(7)))
    with pytest.raises(NoFreeBlocksError):
        table.append_token_ids([1], num_lookahead_slots=6)
    assert state(table) == before
    assert num_free(either) == 1


@pytest.mark.parametrize("tokens", [[1, 2, 3, "4"], [1, 2, 3, None], [1, 2, 3, 2**63]])
def test_one_bad_token_leaves_all_as_it_was(
    either: CpuGpuBlockAllocator, tokens: list[Any]
) -> None:
    table = table_of(either, 6)
    before = state(table)
    with pytest.raises((TypeError, ValueError)):
        table.append_token_ids(tokens)
    assert state(table) == before
    assert num_free(either) == 14


def test_a_block_freed_behind_the_tables_back_is_found_first(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 6)
    table.ensure_num_empty_slots(8)
    either.free(table.blocks[2])
    with pytest.raises(BlockStateError, match="at 2 was freed"):
        table.append_token_ids([6, 7, 8])
    assert table._get_all_token_ids() == list(range(6))


def test_blocks_already_taken_go_back_if_one_more_cannot_be_had(
    either: CpuGpuBlockAllocator,
) -> None:
    class Limited:
        """An allocator that does not tell how little it has."""

        left = 3

        def __getattr__(self, name: str) -> Any:
            return getattr(either, name)

        def get_num_free_blocks(self, device: Device) -> int:
            return 1000

        def allocate_mutable_block(self, **how: Any) -> Any:
            if self.left == 0:
                raise NoFreeBlocksError("none left")
            self.left -= 1
            return either.allocate_mutable_block(**how)

    table = BlockTable(UNIT, Limited())
    table.allocate([1])
    before = state(table)
    with pytest.raises(NoFreeBlocksError, match="none left"):
        table.ensure_num_empty_slots(4 * UNIT)
    assert state(table) == before
    assert num_free(either) == 15


class Plain:
    """A device-aware allocator with vLLM's methods alone."""

    def __init__(self, allocator: CpuGpuBlockAllocator) -> None:
        for name in ("allocate_immutable_blocks", "allocate_mutable_block", "free"):
            setattr(self, name, getattr(allocator, name))


def test_an_allocator_with_vllms_methods_alone_will_do(
    either: CpuGpuBlockAllocator,
) -> None:
    for num_tokens in (3, 8, 10):
        table = BlockTable(UNIT, Plain(either))
        table.allocate(list(range(num_tokens)))
        assert table._get_all_token_ids() == list(range(num_tokens))
        table.free()
    take_all_but(either, 2)
    with pytest.raises(NoFreeBlocksError):
        BlockTable(UNIT, Plain(either)).allocate(list(range(10)))
    assert num_free(either) == 2


class Elsewhere:
    """An allocator of another class, which hands all calls on to one of kvcache's."""

    def __init__(self, allocator: CpuGpuBlockAllocator, give: Any = list) -> None:
        self.allocator, self.give = allocator, give

    def __getattr__(self, name: str) -> Any:
        return getattr(self.allocator, name)

    def fork(self, *args: Any) -> Any:
        return self.give(self.allocator.fork(*args))


def work(table: BlockTable) -> Iterator[tuple[Any, ...]]:
    """What a table shows while it grows, is forked, written to and freed."""
    table.allocate(list(range(6)))
    yield state(table)
    for start, stop in ((6, 7), (7, 8), (8, 17), (17, 20)):
        table.append_token_ids(list(range(start, stop)), 2)
        yield state(table)
    table.ensure_num_empty_slots(7)
    yield state(table)
    forked = table.fork()
    forked.append_token_ids([90, 91, 92])
    table.append_token_ids([80])
    yield state(table)
    yield state(forked)
    forked.free()
    table.free()


@pytest.mark.parametrize("give", [list, tuple])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_does_the_same_where_its_allocator_is_of_another_class(
    make: Make, kind: str, give: Any
) -> None:
    def shown(table: BlockTable) -> list[Any]:
        return [(ids, tokens, n) for ids, _, tokens, n in work(table)]

    other = make(kind)
    expected = shown(BlockTable(UNIT, make(kind)))
    assert shown(BlockTable(UNIT, Elsewhere(other, give))) == expected
    assert num_free(other) == 16


@pytest.mark.parametrize("n", [1, 7])
def test_a_table_may_hold_blocks_of_another_allocator(make: Make, n: int) -> None:
    own, other = make(), make()
    table, theirs = table_of(own, 6), table_of(other, 6)
    old = table.blocks
    table.update(theirs.blocks)
    if n == 1:
        table.append_token_ids([50])
        assert theirs.blocks[1].token_ids == [4, 5, 50]
    else:
        table.append_token_ids(list(range(50, 57)))
        assert table._get_all_token_ids() == [*range(6), *range(50, 57)]
        own.free(table.blocks[3])
        own.free(table.blocks[2])
    for block in old:
        own.free(block)


class OwnBlock(PlainBlock):
    """A block class of one's own, as vLLM's NaiveBlock."""

    def append_token_ids(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.block_id = self.allocator.cow_block_if_not_appendable(self)

    @property
    def num_empty_slots(self) -> int:
        return self.block_size - len(self.token_ids)


def test_a_table_may_hold_blocks_of_a_class_of_ones_own() -> None:
    def allocator(first: int) -> NaiveBlockAllocator:
        return NaiveBlockAllocator(OwnBlock, 12, UNIT, range(first, first + 12))

    devices = CpuGpuBlockAllocator(allocator(12), allocator(0))
    table = BlockTable(UNIT, devices)
    shown = [(ids, tokens) for ids, _, tokens, _ in work(table)]
    assert shown[-1][1] == [*range(20), 90, 91, 92]
    assert shown[-2][1] == [*range(20), 80]
    assert num_free(devices) == 12


def test_a_table_made_of_null_blocks_counts_them_as_full(make: Make) -> None:
    allocator = make()
    table = table_of(allocator, 14, window=1)
    table.append_token_ids([14], num_computed_slots=14)
    other = BlockTable(UNIT, allocator, list(table.blocks), 1)
    assert isinstance(other.blocks[0], NullBlock)
    assert other.num_full_slots == table.num_full_slots == 15


@pytest.mark.parametrize("give", [list, tuple])
def test_a_fork_by_another_allocator_keeps_the_null_blocks(
    make: Make, give: Any
) -> None:
    table = BlockTable(UNIT, Elsewhere(make(), give), max_block_sliding_window=1)
    table.allocate(list(range(14)))
    table.append_token_ids([14], num_computed_slots=14)
    forked = table.fork()
    assert forked.physical_block_ids == table.physical_block_ids
    assert [type(block) for block in forked.blocks] == [
        type(block) for block in table.blocks
    ]


def test_blocks_made_ahead_count_the_tokens_that_came_before_them_later(
    make: Make,
) -> None:
    table = table_of(make(), 2)
    table.ensure_num_empty_slots(9)
    table.append_token_ids(list(range(2, 11)))
    assert [block.num_tokens_total for block in table.blocks] == [4, 8, 11]


# -- copy-on-write -----------------------------------------------------------------


def test_a_fork_has_the_same_blocks(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 10)
    table.ensure_num_empty_slots(5)
    before = num_free(either)
    forked = table.fork()
    assert num_free(either) == before
    assert forked.physical_block_ids == table.physical_block_ids
    assert forked._get_all_token_ids() == table._get_all_token_ids()
    assert forked.num_full_slots == 10
    assert forked._num_empty_slots == table._num_empty_slots


@pytest.mark.parametrize("writer", ["table", "fork"])
def test_whoever_writes_to_a_shared_block_first_gets_a_copy(
    either: CpuGpuBlockAllocator, writer: str
) -> None:
    table = table_of(either, 6)
    forked = table.fork()
    first, second = (table, forked) if writer == "table" else (forked, table)
    shared = list(table.physical_block_ids)
    first.append_token_ids([50])
    assert first.physical_block_ids == [shared[0], 2]
    assert second.physical_block_ids == shared
    assert either.clear_copy_on_writes() == [(shared[1], 2)]
    second.append_token_ids([60])
    assert either.clear_copy_on_writes() == []
    assert second.physical_block_ids == shared


def test_full_blocks_are_shared_for_good(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 8)
    forked = table.fork()
    forked.append_token_ids([50])
    assert forked.physical_block_ids[:2] == table.physical_block_ids
    assert either.clear_copy_on_writes() == []


def test_shared_lookahead_blocks_are_copied_as_they_are_written(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 6)
    table.ensure_num_empty_slots(10)
    forked = table.fork()
    forked.append_token_ids(list(range(6, 13)))
    assert len(either.clear_copy_on_writes()) == 3
    assert forked._get_all_token_ids() == list(range(13))
    assert table._get_all_token_ids() == list(range(6))


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_copy_for_which_there_is_no_room_leaves_all_as_it_was(
    either: CpuGpuBlockAllocator, left: int
) -> None:
    table = table_of(either, 6)
    table.ensure_num_empty_slots(10)
    forked = table.fork()
    take_all_but(either, left)
    before = state(table), state(forked)
    with pytest.raises(NoFreeBlocksError):
        forked.append_token_ids(list(range(6, 13)))
    assert (state(table), state(forked)) == before
    assert either.clear_copy_on_writes() == []
    assert num_free(either) == left


def test_a_fork_outlives_its_source(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 10)
    forked = table.fork()
    table.free()
    assert num_free(either) == 13
    forked.append_token_ids([10])
    assert forked._get_all_token_ids() == list(range(11))
    assert either.clear_copy_on_writes() == []
    forked.free()
    assert num_free(either) == 16


def test_a_fork_of_a_fork_is_a_fork(either: CpuGpuBlockAllocator) -> None:
    tables = [table_of(either, 6)]
    for i in range(5):
        tables.append(tables[-1].fork())
        tables[-1].append_token_ids([i])
    for i, table in enumerate(tables):
        assert table._get_all_token_ids() == [*range(6), *range(i)]
        table.free()
    assert num_free(either) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_200_000_blocks_is_forked_and_freed_without_recursion(
    kind: str,
) -> None:  # B22
    allocator = CpuGpuBlockAllocator.create(kind, 200_001, 0, 1)
    table = BlockTable(1, allocator)
    table.allocate(list(range(200_000)))
    forked = table.fork()
    table.free()
    assert num_free(allocator) == 1
    forked.append_token_ids([7])
    forked.free()
    assert num_free(allocator) == 200_001
    del table, forked


# -- free --------------------------------------------------------------------------


def test_a_freed_table_gives_all_blocks_back_and_is_as_new(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 10)
    table.ensure_num_empty_slots(10)
    table.free()
    assert num_free(either) == 16
    assert state(table) == ([], [], [], 0)
    table.free()
    table.allocate([1, 2], CPU)
    assert table._get_all_token_ids() == [1, 2]


def test_a_table_with_a_freed_block_gives_none_back(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 10)
    either.free(table.blocks[1])
    with pytest.raises(BlockStateError, match="at 1 was freed already"):
        table.free()
    assert num_free(either) == 14
    assert len(table.blocks) == 3


# -- the sliding window ------------------------------------------------------------


def test_blocks_that_the_window_has_passed_are_given_back(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 16, window=2)
    null = either.allocate_or_get_null_block()
    table.append_token_ids([16], num_computed_slots=16)
    assert [block is null for block in table.blocks] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert table.physical_block_ids[:2] == [null.block_id] * 2
    assert num_free(either) == 16 - 1 - 3
    assert table.num_full_slots == 17


@pytest.mark.parametrize(
    ("computed", "dropped"), [(0, 0), (11, 0), (12, 1), (15, 1), (16, 2), (17, 2)]
)
def test_the_window_is_counted_in_blocks_behind_the_computed_ones(
    either: CpuGpuBlockAllocator, computed: int, dropped: int
) -> None:
    table = table_of(either, 16, window=2)
    table.append_token_ids([16], num_computed_slots=computed)
    assert sum(isinstance(block, NullBlock) for block in table.blocks) == dropped


def test_a_long_sequence_keeps_to_its_window(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 1, window=2)
    for i in range(200):
        table.append_token_ids([i], num_computed_slots=table.num_full_slots)
        assert num_free(either) >= 16 - 1 - 3 - 1
    assert len(table.blocks) == 51
    assert table.num_full_slots == 201
    table.free()
    assert num_free(either) == 15  # the null block stays


def test_a_window_that_goes_back_takes_nothing_back(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 16, window=2)
    table.append_token_ids([], num_computed_slots=16)
    ids = list(table.physical_block_ids)
    table.append_token_ids([], num_computed_slots=3)
    assert table.physical_block_ids == ids


def test_the_last_block_stays_whatever_is_computed(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 8, window=1)
    table.append_token_ids(list(range(8, 24)), num_computed_slots=24)
    assert [isinstance(block, NullBlock) for block in table.blocks] == [
        True, False, False, False, False, False,
    ]  # fmt: skip
    assert table.num_full_slots == 24


def test_a_block_with_room_stays_whatever_is_computed(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 5, window=1)
    table.ensure_num_empty_slots(8)
    table.append_token_ids(list(range(5, 13)), num_computed_slots=13)
    assert table._get_all_token_ids() == list(range(4, 13))


def test_blocks_that_an_update_brings_are_passed_by_the_window_too(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 16, window=2)
    table.append_token_ids([], num_computed_slots=16)
    other = table_of(either, 16)
    old, new = table.blocks[2:], either.fork(other.blocks[-1])
    table.update(new)
    for block in old:
        either.free(block)
    table.append_token_ids([], num_computed_slots=16)
    assert [isinstance(block, NullBlock) for block in table.blocks[:3]] == [
        True,
        True,
        False,
    ]
    table.free()
    other.free()
    assert num_free(either) == 15


@pytest.mark.parametrize("computed", [None, -1, 18])
def test_a_window_needs_to_know_what_is_computed(
    either: CpuGpuBlockAllocator, computed: int | None
) -> None:
    table = table_of(either, 16, window=2)
    before = state(table)
    with pytest.raises(ValueError, match=f"num_computed_slots.* got {computed}"):
        table.append_token_ids([16], num_computed_slots=computed)
    assert state(table) == before


def test_without_a_window_it_is_not_asked(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 16)
    table.append_token_ids([16], num_computed_slots=10**6)
    assert len(table.blocks) == 5


def test_a_window_may_make_the_room_that_is_needed(make: Make) -> None:
    allocator = make("naive", on_gpu=5)
    table = table_of(allocator, 16, window=2)
    table.append_token_ids([16], num_computed_slots=16)
    assert num_free(allocator) == 1


def test_what_the_window_has_passed_is_given_back_even_if_there_is_no_room(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 16, window=2)
    either.allocate_or_get_null_block()
    take_all_but(either, 0)
    with pytest.raises(NoFreeBlocksError):
        table.append_token_ids(list(range(12)), num_computed_slots=16)
    assert num_free(either) == 2
    assert table.num_full_slots == 16
    table.append_token_ids([16], num_computed_slots=16)
    assert table.num_full_slots == 17


def test_a_fork_has_the_null_blocks_too(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 16, window=2)
    table.append_token_ids([16, 17], num_computed_slots=16)
    before = num_free(either)
    forked = table.fork()
    assert num_free(either) == before
    assert forked.physical_block_ids == table.physical_block_ids
    assert forked.num_full_slots == 18
    for i in range(20):
        forked.append_token_ids([50 + i], num_computed_slots=18 + i)
    assert table._get_all_token_ids() == list(range(8, 18))
    table.free()
    forked.free()
    assert num_free(either) == 15


def test_content_behind_dropped_blocks_stays_cached(make: Make) -> None:
    allocator = make()
    table = table_of(allocator, 16, window=2)
    hashes = [block.content_hash for block in table.blocks]
    allocator.mark_blocks_as_computed([])
    table.append_token_ids([16], num_computed_slots=16)
    forked = table.fork()
    table.free()
    forked.free()
    assert allocator.find_cached_blocks_prefix(hashes) == hashes


def test_a_table_with_null_blocks_can_be_swapped(either: CpuGpuBlockAllocator) -> None:
    table = table_of(either, 16, window=2)
    table.append_token_ids([16], num_computed_slots=16)
    null_id = table.physical_block_ids[0]
    mapping = either.swap(table.blocks, GPU, CPU)
    table.update(table.blocks)
    assert len(mapping) == 3
    assert table.physical_block_ids == [null_id, null_id, *mapping.values()]
    either.swap(table.blocks, CPU, GPU)
    table.update(table.blocks)
    table.append_token_ids([17, 18, 19, 20], num_computed_slots=20)
    assert table._get_all_token_ids() == list(range(12, 21))
    table.free()
    assert (num_free(either), num_free(either, CPU)) == (15, 16)


# -- swap --------------------------------------------------------------------------


def test_after_a_swap_an_update_reads_the_ids_again(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 10)
    mapping = either.swap(table.blocks, GPU, CPU)
    table.update(table.blocks)
    assert table.physical_block_ids == list(mapping.values())
    assert table.num_full_slots == 10
    table.free()
    assert num_free(either, CPU) == 16


def test_an_update_with_a_freed_block_changes_nothing(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 10)
    before = state(table)
    freed = either.allocate_mutable_block(None, GPU)
    either.free(freed)
    with pytest.raises(BlockStateError):
        table.update([*table.blocks[:2], freed])
    assert state(table) == before


# -- counts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "required"),
    [(0, 0, 0), (1, 0, 1), (4, 0, 1), (5, 0, 2), (4, 1, 2), (3, 9, 3)],
)
def test_required_blocks_hold_tokens_and_lookahead(
    num_tokens: int, lookahead: int, required: int
) -> None:
    tokens = [0] * num_tokens
    assert BlockTable.get_num_required_blocks(tokens, UNIT, lookahead) == required


def test_required_blocks_need_no_lookahead() -> None:
    assert BlockTable.get_num_required_blocks([1] * 9, block_size=UNIT) == 3


@pytest.mark.parametrize(("size", "lookahead"), [(0, 0), (-4, 0), (4, -1)])
def test_impossible_requirements_are_refused(size: int, lookahead: int) -> None:
    with pytest.raises(ValueError):
        BlockTable.get_num_required_blocks([1], size, lookahead)


def test_unseen_tokens_are_those_behind_the_tables(
    either: CpuGpuBlockAllocator,
) -> None:
    table = table_of(either, 6)
    assert table.get_unseen_token_ids(list(range(9))) == [6, 7, 8]
    assert table.get_unseen_token_ids(list(range(6))) == []
    assert table.get_unseen_token_ids((*range(7),)) == (6,)


@pytest.mark.parametrize(
    ("num_tokens", "num_new", "lookahead", "touched"),
    [
        (4, 0, 0, 0),
        (5, 0, 0, 1),  # as in vLLM
        (5, 3, 0, 1),
        (5, 4, 0, 2),
        (4, 4, 0, 1),
        (4, 4, 1, 2),
        (6, 1, 9, 3),
    ],
)
def test_touched_blocks_are_those_that_an_append_writes_to(
    either: CpuGpuBlockAllocator,
    num_tokens: int,
    num_new: int,
    lookahead: int,
    touched: int,
) -> None:
    table = table_of(either, num_tokens)
    assert (
        table.get_num_blocks_touched_by_append_slots([0] * num_new, lookahead)
        == touched
    )


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("num_new", range(1, 9))
def test_so_many_free_blocks_as_are_touched_are_enough_for_a_fork(
    either: CpuGpuBlockAllocator, num_tokens: int, num_new: int
) -> None:
    forked = table_of(either, num_tokens).fork()
    new = list(range(num_new))
    touched = forked.get_num_blocks_touched_by_append_slots(new, 0)
    take_all_but(either, touched)
    forked.append_token_ids(new)
    assert num_free(either) == 0


def test_a_foreign_block_is_counted_by_its_tokens(either: CpuGpuBlockAllocator) -> None:
    block = SimpleNamespace(block_id=3, token_ids=[1, 2])
    table = BlockTable(UNIT, either, [block])
    assert (table.num_full_slots, table.physical_block_ids) == (2, [3])
