"""The blocks of two devices, the way between them, and the null block."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache import BlockStateError, NoFreeBlocksError
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcache.prefix_caching.interfaces import Block, Device
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.null_block import NullBlock
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)

UNIT = 4
GPU, CPU = Device.GPU, Device.CPU
KINDS = ["naive", "prefix_caching"]

Make = Callable[..., CpuGpuBlockAllocator]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators whose invariants are proved when the test is over."""
    made = []

    def make(
        kind: str = "prefix_caching", on_gpu: int = 8, on_cpu: int = 8
    ) -> CpuGpuBlockAllocator:
        made.append(CpuGpuBlockAllocator.create(kind, on_gpu, on_cpu, UNIT))
        return made[-1]

    yield make
    for allocator in made:
        for one in allocator._allocators.values():
            one.check()


@pytest.fixture(params=KINDS)
def either(make: Make, request: pytest.FixtureRequest) -> CpuGpuBlockAllocator:
    """An allocator of either kind, with eight blocks on each device."""
    return make(request.param)


def chain(
    allocator: CpuGpuBlockAllocator, device: Device, num_full: int, tail: int = 0
) -> list[Any]:
    """Blocks of a sequence: full ones, and one with `tail` tokens if there are any."""
    blocks = allocator.allocate_immutable_blocks(
        None, [[i] * UNIT for i in range(num_full)], device
    )
    if tail:
        last = allocator.allocate_mutable_block(blocks[-1] if blocks else None, device)
        last.append_token_ids([100] * tail)
        blocks.append(last)
    return blocks


def ids(blocks: list[Any]) -> list[int | None]:
    return [block.block_id for block in blocks]


def free_counts(allocator: CpuGpuBlockAllocator) -> tuple[int, int]:
    return allocator.get_num_free_blocks(GPU), allocator.get_num_free_blocks(CPU)


# -- made --------------------------------------------------------------------------


def test_an_allocator_is_made_once(either: CpuGpuBlockAllocator) -> None:
    chain(either, GPU, 2)
    with pytest.raises(ValueError, match="already made"):
        either.__init__(*CpuGpuBlockAllocator.create("naive", 1, 1, 4)._allocators)
    assert free_counts(either) == (6, 8)


@pytest.mark.parametrize(
    ("kind", "of"),
    [("naive", NaiveBlockAllocator), ("prefix_caching", PrefixCachingBlockAllocator)],
)
def test_both_devices_have_an_allocator_of_the_kind(
    make: Make, kind: str, of: type
) -> None:
    allocators = make(kind)._allocators
    assert set(allocators) == {GPU, CPU}
    assert {type(one) for one in allocators.values()} == {of}


def test_the_allocators_can_be_read_only(either: CpuGpuBlockAllocator) -> None:
    with pytest.raises(TypeError):
        either._allocators[GPU] = None  # type: ignore[index]


def test_ids_of_the_gpu_come_first(make: Make) -> None:
    allocator = make("naive", on_gpu=3, on_cpu=2)
    assert ids(chain(allocator, GPU, 3)) == [0, 1, 2]
    assert ids(chain(allocator, CPU, 2)) == [3, 4]
    assert allocator.all_block_ids == {0, 1, 2, 3, 4}
    assert isinstance(allocator.all_block_ids, frozenset)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_may_have_no_blocks(make: Make, kind: str) -> None:
    allocator = make(kind, on_gpu=2, on_cpu=0)
    assert allocator.get_num_total_blocks(CPU) == 0
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None, CPU)


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'radix'"):
        CpuGpuBlockAllocator.create("radix", 1, 1, UNIT)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 1, 4), "num_gpu_blocks"), ((1, -1, 4), "num_cpu_blocks"), ((1, 1, 0), "0")],
)
def test_impossible_sizes_are_refused(
    arguments: tuple[int, int, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        CpuGpuBlockAllocator.create("naive", *arguments)


@pytest.mark.parametrize(
    ("on_cpu", "on_gpu", "first"), [([0, 1], [1, 2], 1), ([9, 2, 5], [7, 5, 2], 2)]
)
def test_devices_that_share_an_id_are_refused(
    on_cpu: list[int], on_gpu: list[int], first: int
) -> None:
    one, other = (
        NaiveBlockAllocator(NaiveBlock, len(ids), UNIT, ids) for ids in (on_cpu, on_gpu)
    )
    with pytest.raises(ValueError, match=f"both devices, {first} is the first"):
        CpuGpuBlockAllocator(one, other)


def test_ids_need_not_be_contiguous() -> None:
    gpu = NaiveBlockAllocator(NaiveBlock, 3, UNIT, [70, 10, 40])
    cpu = NaiveBlockAllocator(NaiveBlock, 2, UNIT, [30, 50])
    allocator = CpuGpuBlockAllocator(cpu, gpu)
    blocks = chain(allocator, GPU, 2)
    assert ids(blocks) == [70, 10]
    assert allocator.swap(blocks, GPU, CPU) == {70: 30, 10: 50}
    assert allocator.get_physical_block_id(GPU, 70) == 2
    assert allocator.get_physical_block_id(CPU, 50) == 1


# -- allocate and free -------------------------------------------------------------


@pytest.mark.parametrize("device", list(Device))
def test_blocks_are_taken_from_the_device_and_go_back_to_it(
    either: CpuGpuBlockAllocator, device: Device
) -> None:
    other = CPU if device is GPU else GPU
    blocks = chain(either, device, 2, tail=1)
    assert either.get_num_free_blocks(device) == 5
    assert either.get_num_free_blocks(other) == either.get_num_total_blocks(other) == 8
    for block in blocks:
        either.free(block)
    assert free_counts(either) == (8, 8)


def test_one_immutable_block_is_allocated_as_many_are(
    either: CpuGpuBlockAllocator,
) -> None:
    block = either.allocate_immutable_block(None, [1] * UNIT, GPU)
    assert block.is_full
    assert block.block_id == 0


def test_the_extra_hash_reaches_the_block(make: Make) -> None:
    allocator = make()
    blocks = [
        allocator.allocate_mutable_block(None, GPU, 5),
        allocator.allocate_immutable_block(None, [1] * UNIT, GPU, 5),
        *allocator.allocate_immutable_blocks(None, [[1] * UNIT], GPU, 5),
    ]
    assert [block.extra_hash for block in blocks] == [5, 5, 5]


def test_the_last_of_several_blocks_may_have_room(either: CpuGpuBlockAllocator) -> None:
    blocks = either.allocate_blocks(None, [[1] * UNIT, [2] * UNIT, [3]], GPU)
    assert blocks is not None
    assert ids(blocks) == [0, 1, 2]
    assert [block.num_empty_slots for block in blocks] == [0, 0, 3]
    blocks[2].append_token_ids([3, 3, 3])
    assert blocks[2].is_full


def test_blocks_with_a_tail_are_allocated_all_or_none(make: Make) -> None:
    allocator = make(on_gpu=2)
    gpu = allocator._allocators[GPU]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_blocks(None, [[1] * UNIT, [2] * UNIT, [3]], GPU)
    assert allocator.get_num_free_blocks(GPU) == 2
    assert gpu._cached_blocks == {}


def test_an_allocator_without_that_method_is_left_to_the_caller() -> None:
    plain = SimpleNamespace(all_block_ids=frozenset())
    assert CpuGpuBlockAllocator(plain, plain).allocate_blocks(None, [], GPU) is None


@pytest.mark.parametrize("device", [None, "gpu", 1])
def test_what_is_no_device_is_refused_by_name(
    either: CpuGpuBlockAllocator, device: Any
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: either.allocate_mutable_block(None, device),
        lambda: either.allocate_immutable_block(None, [1] * UNIT, device),
        lambda: either.allocate_immutable_blocks(None, [], device),
        lambda: either.get_num_free_blocks(device),
        lambda: either.get_num_total_blocks(device),
        lambda: either.get_physical_block_id(device, 0),
        lambda: either.get_prefix_cache_hit_rate(device),
        lambda: either.find_cached_blocks_prefix([], device),
        lambda: either.get_num_full_blocks_touched([], device),
        lambda: either.swap([], device, GPU),
        lambda: either.swap([], GPU, device),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"got {device!r}"):
            call()


def test_a_block_is_freed_once(either: CpuGpuBlockAllocator) -> None:
    block = either.allocate_mutable_block(None, GPU)
    either.free(block)
    with pytest.raises(BlockStateError):
        either.free(block)
    assert free_counts(either) == (8, 8)


def test_a_block_of_another_allocator_is_refused(
    either: CpuGpuBlockAllocator, make: Make
) -> None:
    strange = make("naive").allocate_mutable_block(None, GPU)
    for call in (either.free, either.fork, lambda b: either.swap([b], GPU, CPU)):
        with pytest.raises(ValueError, match="another allocator"):
            call(strange)
    assert free_counts(either) == (8, 8)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (None, TypeError, "expected a block, got None"),
        (SimpleNamespace(block_id=None), BlockStateError, "no physical block"),
        (SimpleNamespace(block_id=99), ValueError, "block 99 is on neither device"),
    ],
)
def test_what_is_no_block_is_refused(
    either: CpuGpuBlockAllocator, wrong: Any, error: type[Exception], named: str
) -> None:
    for call in (either.free, either.fork, lambda b: either.swap([b], GPU, CPU)):
        with pytest.raises(error, match=named):
            call(wrong)


@pytest.mark.parametrize("device", list(Device))
def test_a_fork_shares_the_blocks_of_its_device(
    either: CpuGpuBlockAllocator, device: Device
) -> None:
    blocks = chain(either, device, 2, tail=1)
    before = free_counts(either)
    forked = either.fork(blocks[-1])
    assert ids(forked) == ids(blocks)
    assert free_counts(either) == before
    for block in blocks:
        either.free(block)
    assert free_counts(either) == before


def test_a_fork_may_be_of_the_last_blocks_only(either: CpuGpuBlockAllocator) -> None:
    blocks = chain(either, GPU, 3, tail=1)
    either.free(blocks[0])
    either.free(blocks[1])
    forked = either.fork(blocks[-1], 2)
    assert ids(forked) == ids(blocks[2:])
    assert [one.content_hash for one in forked] == [
        one.content_hash for one in blocks[2:]
    ]
    for block in [*forked, *blocks[2:]]:
        either.free(block)
    assert free_counts(either) == (8, 8)


@pytest.mark.parametrize("num_blocks", [0, -1, 4])
def test_a_fork_of_more_blocks_than_there_are_is_refused(
    either: CpuGpuBlockAllocator, num_blocks: int
) -> None:
    blocks = chain(either, GPU, 3)
    with pytest.raises(ValueError):
        either.fork(blocks[-1], num_blocks)
    for block in blocks:
        either.free(block)
    assert free_counts(either) == (8, 8)


# -- swap --------------------------------------------------------------------------


def test_a_swap_gives_each_block_an_id_of_the_other_device(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = chain(either, GPU, 2, tail=1)
    assert either.swap(blocks, GPU, CPU) == {0: 8, 1: 9, 2: 10}
    assert ids(blocks) == [8, 9, 10]
    assert free_counts(either) == (8, 5)
    assert [block.token_ids for block in blocks] == [[0] * UNIT, [1] * UNIT, [100]]


def test_a_block_can_be_used_where_it_was_swapped_to(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = chain(either, GPU, 1, tail=1)
    either.swap(blocks, GPU, CPU)
    blocks[1].append_token_ids([7])
    forked = either.fork(blocks[1])
    assert ids(forked) == ids(blocks)
    for block in [*blocks, *forked]:
        either.free(block)
    assert free_counts(either) == (8, 8)


def test_there_and_back_again(either: CpuGpuBlockAllocator) -> None:
    blocks = chain(either, GPU, 2, tail=1)
    there = either.swap(blocks, GPU, CPU)
    back = either.swap(blocks, CPU, GPU)
    assert list(back) == list(there.values())
    assert free_counts(either) == (5, 8)


def test_swaps_are_told_once(either: CpuGpuBlockAllocator) -> None:
    blocks = chain(either, GPU, 2)
    first = either.swap(blocks[:1], GPU, CPU)
    second = either.swap(blocks[1:], GPU, CPU)
    assert either.get_and_reset_swaps() == [*first.items(), *second.items()]
    assert either.get_and_reset_swaps() == []


def test_a_swap_of_nothing_is_nothing(either: CpuGpuBlockAllocator) -> None:
    assert either.swap([], GPU, CPU) == {}


def test_blocks_that_are_cached_on_the_other_device_take_no_new_one(make: Make) -> None:
    allocator = make(on_cpu=2)
    there = chain(allocator, CPU, 2)
    here = chain(allocator, GPU, 2)
    assert allocator.swap(here, GPU, CPU) == {0: 8, 1: 9}
    assert ids(here) == ids(there)


def test_content_that_was_swapped_out_can_still_be_hit(make: Make) -> None:
    allocator = make()
    blocks = chain(allocator, GPU, 2)
    allocator.swap(blocks, GPU, CPU)
    assert ids(chain(allocator, GPU, 2)) == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_swap_for_which_there_is_no_room_changes_nothing(
    make: Make, kind: str
) -> None:
    allocator = make(kind, on_gpu=8, on_cpu=2)
    blocks = chain(allocator, GPU, 2, tail=1)
    with pytest.raises(NoFreeBlocksError):
        allocator.swap(blocks, GPU, CPU)
    assert ids(blocks) == [0, 1, 2]
    assert free_counts(allocator) == (5, 2)
    assert allocator.get_and_reset_swaps() == []
    assert ids(chain(allocator, CPU, 2)) == [8, 9]  # nothing of it is cached there


def test_cached_blocks_that_nobody_uses_count_as_needed(make: Make) -> None:
    # B19: ten cached blocks, of which two are evicted, still take ten blocks.
    allocator = make(on_gpu=10, on_cpu=10)
    blocks = chain(allocator, GPU, 10)
    allocator.swap(blocks, GPU, CPU)
    taken = [allocator.allocate_mutable_block(None, GPU) for _ in range(2)]
    assert allocator.get_num_full_blocks_touched(blocks, GPU) == 10
    assert allocator.get_num_free_blocks(GPU) == 8
    with pytest.raises(NoFreeBlocksError):
        allocator.swap(blocks, CPU, GPU)
    for block in taken:
        allocator.free(block)
    assert len(allocator.swap(blocks, CPU, GPU)) == 10


def test_a_block_on_the_other_device_is_refused_and_nothing_moved(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = [*chain(either, GPU, 1), either.allocate_mutable_block(None, CPU)]
    with pytest.raises(ValueError, match=r"is not on Device\.GPU"):
        either.swap(blocks, GPU, CPU)
    assert ids(blocks) == [0, 8]


def test_a_swap_from_a_device_to_itself_is_refused(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = chain(either, GPU, 2)
    with pytest.raises(ValueError, match=r"from Device\.GPU to itself"):
        either.swap(blocks, GPU, GPU)
    assert ids(blocks) == [0, 1]


def test_a_block_that_comes_twice_is_refused_and_nothing_moved(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = chain(either, GPU, 2)
    with pytest.raises(ValueError, match="more than once"):
        either.swap([*blocks, blocks[0]], GPU, CPU)
    assert ids(blocks) == [0, 1]
    assert free_counts(either) == (6, 8)


def test_two_that_share_an_uncached_block_are_swapped_one_at_a_time(
    either: CpuGpuBlockAllocator,
) -> None:
    [block] = chain(either, GPU, 0, tail=1)
    [forked] = either.fork(block)
    with pytest.raises(ValueError, match="share a physical block"):
        either.swap([block, forked], GPU, CPU)
    assert either.swap([block], GPU, CPU) == {0: 8}
    assert either.swap([forked], GPU, CPU) == {0: 9}
    assert free_counts(either) == (8, 6)


def test_two_that_share_a_cached_block_share_it_over_there(make: Make) -> None:
    allocator = make()
    [block] = chain(allocator, GPU, 1)
    [forked] = allocator.fork(block)
    assert allocator.swap([block, forked], GPU, CPU) == {0: 8}
    assert ids([block, forked]) == [8, 8]


def test_a_freed_block_is_not_swapped(either: CpuGpuBlockAllocator) -> None:
    blocks = chain(either, GPU, 2)
    either.free(blocks[1])
    with pytest.raises(BlockStateError, match="no physical block"):
        either.swap(blocks, GPU, CPU)
    assert ids(blocks) == [0, None]


def test_allocators_that_check_nothing_ahead_are_just_told_to_swap() -> None:
    told = []

    def device(block_ids: set[int], new_id: int) -> SimpleNamespace:
        def swap_in(blocks: list[Any]) -> None:
            told.append("in")
            blocks[0].block_id = new_id

        return SimpleNamespace(
            all_block_ids=frozenset(block_ids),
            swap_out=lambda blocks: told.append("out"),
            swap_in=swap_in,
        )

    allocator = CpuGpuBlockAllocator(device({5, 6}, 5), device({1, 2}, 1))
    block = SimpleNamespace(block_id=2, content_hash=None)
    assert allocator.swap([block], GPU, CPU) == {2: 5}
    assert told == ["out", "in"]


# -- the null block ----------------------------------------------------------------


def test_there_is_one_null_block_made_when_first_asked_for(
    either: CpuGpuBlockAllocator,
) -> None:
    assert free_counts(either) == (8, 8)
    null = either.allocate_or_get_null_block()
    assert free_counts(either) == (7, 8)
    assert either.allocate_or_get_null_block() is null
    assert free_counts(either) == (7, 8)


def test_a_null_block_that_cannot_be_had_can_be_had_later(
    either: CpuGpuBlockAllocator,
) -> None:
    blocks = chain(either, GPU, 8)
    with pytest.raises(NoFreeBlocksError):
        either.allocate_or_get_null_block()
    either.free(blocks[-1])
    assert isinstance(either.allocate_or_get_null_block(), NullBlock)


def test_a_null_block_is_an_empty_block(either: CpuGpuBlockAllocator) -> None:
    null = either.allocate_or_get_null_block()
    assert isinstance(null, Block)
    assert null.block_id == 0
    assert null.token_ids == []
    assert (null.is_full, null.num_empty_slots) == (False, UNIT)
    assert (null.prev_block, null.extra_hash, null.content_hash) == (None, None, None)
    assert repr(null) == "NullBlock(block_id=0)"
    with pytest.raises(NotImplementedError):
        _ = null.num_tokens_total


def test_a_null_block_knows_whether_it_is_computed(make: Make) -> None:
    null = make("prefix_caching").allocate_or_get_null_block()
    assert (null.computed, null.last_accessed) == (False, -1)
    naive = make("naive").allocate_or_get_null_block()
    for name in ("computed", "last_accessed"):
        with pytest.raises(NotImplementedError):  # as for every naive block
            getattr(naive, name)


def test_nobody_can_change_a_null_block(either: CpuGpuBlockAllocator) -> None:
    null = either.allocate_or_get_null_block()
    calls: list[Callable[[], object]] = [
        lambda: null.append_token_ids([1]),
        lambda: setattr(null, "block_id", 5),
        lambda: setattr(null, "computed", True),
        lambda: setattr(null, "last_accessed", 1.0),
        lambda: null.__init__(SimpleNamespace()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="null block cannot be changed"):
            call()
    null.token_ids.append(1)
    assert (null.block_id, null.token_ids) == (0, [])


def test_freeing_a_null_block_does_nothing(either: CpuGpuBlockAllocator) -> None:
    null = either.allocate_or_get_null_block()
    either.free(null)
    either.free(null)
    assert null.block_id == 0
    assert free_counts(either) == (7, 8)


def test_a_null_block_is_not_forked(either: CpuGpuBlockAllocator) -> None:
    null = either.allocate_or_get_null_block()
    with pytest.raises(BlockStateError, match="NullBlock"):
        either.fork(null)


def test_a_swap_passes_null_blocks_over(either: CpuGpuBlockAllocator) -> None:
    null = either.allocate_or_get_null_block()
    blocks = [null, *chain(either, GPU, 1), null]
    assert either.get_num_full_blocks_touched(blocks, CPU) == 1
    assert either.swap(blocks, GPU, CPU) == {1: 8}
    assert ids(blocks) == [0, 8, 0]


@pytest.mark.parametrize("wrong", [None, 3])
def test_a_null_block_is_made_of_a_block(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"got {wrong}"):
        NullBlock(wrong)


# -- the GPU's prefix cache --------------------------------------------------------


def test_marks_and_copies_are_the_gpus(either: CpuGpuBlockAllocator) -> None:
    [block] = chain(either, GPU, 0, tail=1)
    [forked] = either.fork(block)
    forked.append_token_ids([1])
    assert either.clear_copy_on_writes() == [(0, 1)]
    assert either.clear_copy_on_writes() == []
    either.mark_blocks_as_accessed([0], 5.0)
    either.mark_blocks_as_computed([])


def test_cached_prefixes_are_found_on_either_device(make: Make) -> None:
    allocator = make()
    hashes = [block.content_hash for block in chain(allocator, CPU, 2)]
    allocator._allocators[CPU].mark_blocks_as_computed([])
    assert allocator.find_cached_blocks_prefix(hashes, CPU) == hashes
    assert allocator.find_cached_blocks_prefix(hashes) == []
    chain(allocator, GPU, 1)
    assert allocator.find_cached_blocks_prefix(hashes) == []
    allocator.mark_blocks_as_computed([])
    assert allocator.find_cached_blocks_prefix(hashes, device=GPU) == hashes[:1]


def test_common_computed_blocks_are_a_prefix(make: Make) -> None:
    lists = [[1, 2, 3], [1, 2], [], [1, 2, 4]]
    assert make("prefix_caching").get_common_computed_block_ids(lists) == [1, 2]
    assert make("naive").get_common_computed_block_ids(lists) == []


def test_each_device_has_its_hit_rate(make: Make) -> None:
    allocator = make()
    for _ in range(2):
        chain(allocator, GPU, 2)
    assert allocator.get_prefix_cache_hit_rate(GPU) == 0.5
    assert allocator.get_prefix_cache_hit_rate(CPU) == 0.0
    assert make("naive").get_prefix_cache_hit_rate(device=GPU) == -1


@pytest.mark.parametrize("device", [GPU, CPU, None])
def test_a_reset_forgets_what_is_cached_on_a_device_or_on_both(
    make: Make, device: Device | None
) -> None:
    allocator = make()
    for one in Device:
        for block in chain(allocator, one, 2):
            allocator.free(block)
    assert allocator.reset_prefix_cache(device) is True
    cached = {one: bool(allocator._allocators[one]._cached_blocks) for one in Device}
    assert cached == {one: device not in (one, None) for one in Device}


@pytest.mark.parametrize("used", list(Device))
def test_a_reset_of_both_does_what_it_can(make: Make, used: Device) -> None:
    allocator = make()
    for one in Device:
        for block in chain(allocator, one, 2):
            allocator.free(block)
    chain(allocator, used, 1)
    assert allocator.reset_prefix_cache() is False
    cached = {one: bool(allocator._allocators[one]._cached_blocks) for one in Device}
    assert cached == {one: one is used for one in Device}


def test_a_rank_is_told_for_an_id_of_the_device_only(
    either: CpuGpuBlockAllocator,
) -> None:
    assert either.get_physical_block_id(CPU, 10) == 2
    with pytest.raises(ValueError, match="10"):
        either.get_physical_block_id(GPU, 10)
