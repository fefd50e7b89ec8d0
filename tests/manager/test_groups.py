"""KV cache groups: what they store, refuse, and mean to a manager."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from managers import ids, make, num_free, run

from kvcache.manager import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Group,
    KVCacheManager,
    Mamba,
    SlidingWindow,
)

KINDS = [
    FullAttention(4),
    SlidingWindow(4, 6),
    ChunkedLocal(4, 8),
    Mamba(4, "all"),
    CrossAttention(4),
]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (FullAttention, {"block_size": 0}),
        (FullAttention, {"block_size": -1}),
        (FullAttention, {"block_size": 2**31}),
        (SlidingWindow, {"block_size": 4, "window": 0}),
        (SlidingWindow, {"block_size": 4, "window": 4, "extra_retained_tokens": -1}),
        (ChunkedLocal, {"block_size": 4, "chunk": 0}),
        (ChunkedLocal, {"block_size": 4, "chunk": 2**40}),
        (Mamba, {"block_size": 4, "mode": "align"}),
        (Mamba, {"block_size": 4, "mode": None}),
        (Mamba, {"block_size": 4, "num_speculative_blocks": -1}),
        (CrossAttention, {"block_size": 0}),
    ],
)
def test_a_number_out_of_range_is_a_value_error(
    kind: type[Group], arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        kind(**arguments)


@pytest.mark.parametrize("value", [True, 4.0, "4", None, [4]])
def test_a_block_size_is_an_int_and_no_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="block_size must be an int"):
        FullAttention(value)


def test_eagle_is_a_bool() -> None:
    with pytest.raises(TypeError, match="eagle must be a bool"):
        FullAttention(4, eagle=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", KINDS, ids=lambda each: type(each).__name__)
def test_a_group_stays_as_it_was_made(group: Group) -> None:
    with pytest.raises(FrozenInstanceError):
        group.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize("group", KINDS, ids=lambda each: type(each).__name__)
def test_groups_of_the_same_kind_and_numbers_are_equal(group: Group) -> None:
    same = type(group)(**vars(group))
    assert same == group
    assert hash(same) == hash(group)
    assert type(group)(**{**vars(group), "block_size": 8}) != group


@pytest.mark.parametrize("group", KINDS, ids=lambda each: type(each).__name__)
def test_a_manager_takes_each_kind_alone(group: Group) -> None:
    manager = make(group, enable_caching=False)
    assert manager.groups == (group,)
    row = manager.add_request(range(10))
    assert manager.allocate_slots(row, 10, num_encoder_tokens=10) is not None
    assert [i for i in ids(manager, row) if i] == [1, 2, 3]
    manager.check()


@pytest.mark.parametrize(
    "group", [Group(4), object(), 4, FullAttention, None, ("FullAttention", 4)]
)
def test_a_manager_takes_nothing_else_for_a_group(group: Any) -> None:
    with pytest.raises(TypeError, match="expected a KV cache group"):
        make(group)


def test_a_subclass_of_a_group_is_nothing_a_manager_knows() -> None:
    class Odd(FullAttention):
        pass

    with pytest.raises(TypeError, match="expected a KV cache group"):
        make(Odd(4))


def test_a_manager_needs_a_group() -> None:
    with pytest.raises(ValueError, match="needs a KV cache group"):
        KVCacheManager(10, [], max_model_len=64, max_num_requests=4)


def test_a_manager_takes_64_groups_and_no_more() -> None:
    make(*[FullAttention(4)] * 64)
    with pytest.raises(ValueError, match="65 groups are too many"):
        make(*[FullAttention(4)] * 65)


@pytest.mark.parametrize("group", [Mamba(4), Mamba(4, "all"), CrossAttention(4)])
def test_states_and_encoder_outputs_go_without_caching_only(group: Group) -> None:
    with pytest.raises(ValueError, match="enable_caching=False only"):
        make(FullAttention(4), group)


def test_chunks_go_with_groups_of_their_block_size_only() -> None:
    with pytest.raises(ValueError, match="needs groups of its block size"):
        make(FullAttention(8), ChunkedLocal(4, 8))


def test_chunks_do_not_go_with_eagle() -> None:
    with pytest.raises(ValueError, match="does not go with EAGLE"):
        make(FullAttention(4), ChunkedLocal(4, 8), use_eagle=True)


def test_the_hash_block_size_divides_all_block_sizes() -> None:
    make(FullAttention(8), SlidingWindow(12, 6), hash_block_size=4)
    with pytest.raises(ValueError, match="no multiple of hash_block_size 8"):
        make(FullAttention(8), SlidingWindow(12, 6), hash_block_size=8)


def test_one_group_alone_is_hashed_by_its_block_size() -> None:
    with pytest.raises(ValueError, match="with one group"):
        make(FullAttention(8), hash_block_size=4)


def test_block_sizes_without_a_sensible_common_multiple_are_refused() -> None:
    with pytest.raises(ValueError):
        make(FullAttention(65537), SlidingWindow(65536, 6), hash_block_size=1)


# -- what they mean -------------------------------------------------------------------


def test_full_attention_keeps_all_blocks() -> None:
    manager = make(FullAttention(4))
    row = run(manager, range(30))
    manager.append(row, [1, 2])
    manager.allocate_slots(row, 2)
    assert ids(manager, row) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_window_keeps_what_the_next_token_attends_to() -> None:
    manager = make(SlidingWindow(4, 6))
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)  # the 16th token attends to the 11th and later
    assert ids(manager, row) == [0, 0, 3, 4]


def test_retained_tokens_are_kept_before_the_window() -> None:
    manager = make(SlidingWindow(4, 6, extra_retained_tokens=4))
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert ids(manager, row) == [0, 2, 3, 4]


def test_chunks_before_the_present_one_are_given_back() -> None:
    manager = make(ChunkedLocal(4, 8), enable_caching=False)
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert ids(manager, row) == [0, 0, 3, 4]


def test_a_mamba_state_stands_for_all_before_it() -> None:
    manager = make(Mamba(4, "all"), enable_caching=False)
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert ids(manager, row) == [0, 0, 0, 4]


def test_a_mamba_state_alone_needs_one_block_and_those_of_drafts() -> None:
    manager = make(
        Mamba(64, num_speculative_blocks=2), enable_caching=False, hash_block_size=4
    )
    row = run(manager, range(15))
    assert ids(manager, row) == [1, 2, 3]


def test_an_encoders_output_is_held_whole_from_the_start() -> None:
    manager = make(FullAttention(4), CrossAttention(4), enable_caching=False)
    row = manager.add_request(range(10))
    new = manager.allocate_slots(row, 4, num_encoder_tokens=9)
    assert new is not None
    assert [each.tolist() for each in new] == [[1], [2, 3, 4]]
    new = manager.allocate_slots(row, 4)
    assert new is not None
    assert [each.tolist() for each in new] == [[5], []]


def test_blocks_outside_a_window_go_back_although_the_rest_does_not_fit() -> None:
    manager = make(SlidingWindow(4, 6), num_blocks=6)
    row = run(manager, range(16))
    before = num_free(manager)
    manager.append(row, [1] * 40)
    assert manager.allocate_slots(row, 40) is None
    assert num_free(manager) == before + 2


def test_the_longest_hit_is_common_to_all_groups() -> None:
    manager = make(FullAttention(4), SlidingWindow(4, 6))
    first = run(manager, range(20))
    tables = ids(manager, first, 0), ids(manager, first, 1)
    manager.free(first)
    manager.block_pool.evict_blocks({tables[1][3]})
    row = manager.add_request(range(20))
    assert manager.match(row) == 12  # full attention has 16, the window 12 or 20
    manager.allocate_slots(row, 8)
    assert ids(manager, row, 0)[:3] == tables[0][:3]
    assert ids(manager, row, 1)[:3] == [0, *tables[1][1:3]]


def test_hits_end_where_all_block_sizes_do() -> None:
    manager = make(FullAttention(4), SlidingWindow(12, 6), num_blocks=41)
    manager.free(run(manager, range(40)))
    for length, hit in [(40, 36), (36, 24), (25, 24), (24, 12), (12, 0)]:
        row = manager.add_request(range(length))
        assert manager.match(row) == hit
        manager.free(row)


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
@pytest.mark.parametrize(("lost", "hit"), [(0, 0), (1, 0), (2, 8), (3, 8)])
def test_hits_of_full_groups_end_where_all_block_sizes_do(
    sizes: tuple[int, int], lost: int, hit: int
) -> None:
    manager = make(*map(FullAttention, sizes), num_blocks=41)
    row = run(manager, range(16))
    block = ids(manager, row, sizes.index(4))[lost]
    manager.free(row)
    manager.block_pool.evict_blocks({block})
    assert manager.match(manager.add_request(range(17))) == hit


def test_eagle_has_the_last_block_of_a_hit_computed_again() -> None:
    for eagle, hit in [(False, 16), (True, 12)]:
        manager = make(FullAttention(4), use_eagle=eagle)
        manager.free(run(manager, range(18)))
        assert manager.match(manager.add_request(range(18))) == hit


def test_a_group_that_eagle_reads_drops_no_block_where_no_draft_model_runs() -> None:
    for use_eagle, hit in [(False, 16), (True, 12)]:
        groups = FullAttention(4, eagle=True), SlidingWindow(4, 5)
        manager = make(*groups, num_blocks=41, use_eagle=use_eagle)
        manager.free(run(manager, range(21)))
        assert manager.match(manager.add_request(range(18))) == hit
