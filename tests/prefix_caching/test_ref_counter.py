"""Counts of users, their read-only view, and the copies that writing causes."""

import copy
import gc
import pickle
import tracemalloc
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from doubles import Index, refused

from kvcache import BlockStateError
from kvcache.prefix_caching.blocks import NaiveBlock
from kvcache.prefix_caching.naive_block_allocator import NaiveBlockAllocator
from kvcache.prefix_caching.prefix_caching_block_allocator import (
    PrefixCachingBlockAllocator,
)
from kvcache.prefix_caching.ref_counter import (
    CopyOnWriteTracker,
    ReadOnlyRefCounter,
    RefCounter,
)

# -- counts --------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0, 1, 2], [9, 3, 2**62], range(5, 8)], ids=str)
def test_every_count_starts_at_0(ids: list[int]) -> None:
    counter = RefCounter(ids)
    assert counter._refcounts == dict.fromkeys(ids, 0)
    assert [counter.get(one) for one in ids] == [0, 0, 0]


def test_an_id_may_be_listed_twice() -> None:
    assert RefCounter(iter([4, 4, 9]))._refcounts == {4: 0, 9: 0}


def test_incr_and_decr_give_the_new_count() -> None:
    counter = RefCounter([3, 7])
    assert [counter.incr(7), counter.incr(7), counter.decr(7)] == [1, 2, 1]
    assert counter._refcounts == {3: 0, 7: 1}


def test_a_count_of_0_cannot_go_down() -> None:
    counter = RefCounter([3])
    with pytest.raises(BlockStateError, match="block 3 has no reference"):
        counter.decr(3)
    with pytest.raises(AssertionError):  # as in vLLM
        counter.decr(3)
    assert counter.get(3) == 0


@pytest.mark.parametrize("method", ["incr", "decr", "get"])
@pytest.mark.parametrize("block_id", [4, -1, 2**63, 2**200])
def test_a_block_that_is_not_there_is_named(method: str, block_id: int) -> None:
    with pytest.raises(ValueError, match=str(block_id)):
        getattr(RefCounter([3, 5]), method)(block_id)


@pytest.mark.parametrize("method", ["incr", "decr", "get"])
@pytest.mark.parametrize("block_id", [True, 3.0, "3", None, [3], float("nan")])
def test_a_block_is_named_by_an_int(method: str, block_id: Any) -> None:
    counter = RefCounter([3, 1])
    with pytest.raises(TypeError):
        getattr(counter, method)(block_id)
    assert counter._refcounts == {1: 0, 3: 0}


def test_reading_an_id_may_count_too() -> None:
    counter = RefCounter([3])
    assert counter.incr(Index(3, lambda: counter.incr(3))) == 2  # type: ignore[arg-type]


def test_a_count_ends_at_its_limit(probe: ModuleType) -> None:
    counter = RefCounter([3, 5])
    probe.counter_memory(counter)["rows"]["ref_cnt"][1] = 2**31 - 1
    with pytest.raises(ValueError, match="block 5 has 2147483647 references already"):
        counter.incr(5)
    assert counter.decr(5) == 2**31 - 2


def test_a_counter_is_made_once() -> None:
    counter = RefCounter([3])
    counter.incr(3)
    with pytest.raises(ValueError, match="already made"):
        counter.__init__([4])
    assert counter._refcounts == {3: 1}


@pytest.mark.parametrize("ids", [None, 3, ["3"], [3, True], [-1]])
def test_ids_that_are_none_make_no_counter(ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        RefCounter(ids)


def test_a_counter_that_was_never_made_counts_nothing() -> None:
    counter = RefCounter.__new__(RefCounter)
    assert counter._refcounts == {}
    with pytest.raises(ValueError, match="block 0"):
        counter.incr(0)


def test_a_counter_takes_64_bytes_a_block_and_no_object() -> None:
    before = len(gc.get_objects())
    tracemalloc.start()
    counter = RefCounter(range(10_000))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 10_000 * 64 + 1000
    assert len(gc.get_objects()) - before < 20
    assert counter.get(9_999) == 0


# -- counts of an allocator ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["naive", "prefix caching"])
def test_an_allocators_counts_change_through_it_alone(kind: str) -> None:
    """Else a block could be free and in use, or neither."""
    allocator: Any = (
        NaiveBlockAllocator(NaiveBlock, 3, 4)
        if kind == "naive"
        else PrefixCachingBlockAllocator(3, 4)
    )
    block = allocator.allocate_mutable_block(None)
    [fork] = allocator.fork(block)
    counter = allocator._refcounter
    assert counter._refcounts == {0: 2, 1: 0, 2: 0}
    for block_id in (0, 1):
        for change in (counter.incr, counter.decr):
            with refused(BlockStateError, f"block {block_id} ", allocator):
                change(block_id)
    allocator.free(block)
    allocator.free(fork)
    assert counter._refcounts == {0: 0, 1: 0, 2: 0}


def test_an_allocators_counter_outlives_it() -> None:
    counter = PrefixCachingBlockAllocator(3, 4)._refcounter
    gc.collect()
    assert counter.get(2) == 0


# -- the read-only view --------------------------------------------------------------


def test_a_view_shows_counts_and_changes_none() -> None:
    counter = RefCounter([3])
    view = counter.as_readonly()
    counter.incr(3)
    assert view.get(3) == 1
    with pytest.raises(ValueError, match="block 3 up: the view is read-only"):
        view.incr(3)
    with pytest.raises(ValueError, match="block 3 down: the view is read-only"):
        view.decr(3)
    assert counter.get(3) == 1


def test_a_view_may_be_of_another_class_of_counter() -> None:
    counter = MagicMock()
    counter.get.return_value = 5
    assert ReadOnlyRefCounter(counter).get(3) == 5


def test_a_view_of_nothing_raises() -> None:
    with pytest.raises(AttributeError):
        ReadOnlyRefCounter.__new__(ReadOnlyRefCounter).get(3)


# -- copies --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_block_with_one_user_at_most_is_appendable(count: int) -> None:
    counter = RefCounter([3])
    for _ in range(count):
        counter.incr(3)
    tracker = CopyOnWriteTracker(counter.as_readonly())
    assert tracker.is_appendable(MagicMock(block_id=3)) == (count <= 1)


def test_a_block_without_a_physical_one_is_appendable() -> None:
    assert CopyOnWriteTracker(RefCounter([])).is_appendable(MagicMock(block_id=None))


def test_copies_are_told_once_in_the_order_they_were_noted() -> None:
    tracker = CopyOnWriteTracker(RefCounter([]))
    for pair in [(1, 2), (3, 4), (1, 2)]:
        tracker.record_cow(*pair)
    assert tracker.clear_cows() == [(1, 2), (3, 4), (1, 2)]
    assert tracker.clear_cows() == []


def test_a_list_of_copies_is_the_callers() -> None:
    tracker = CopyOnWriteTracker(RefCounter([]))
    tracker.clear_cows().append((1, 2))
    assert tracker.clear_cows() == []


@pytest.mark.parametrize("pair", [(None, 1), (1, None), (None, None)])
def test_a_copy_is_from_a_block_to_a_block(pair: tuple[Any, Any]) -> None:
    tracker = CopyOnWriteTracker(RefCounter([]))
    with pytest.raises(ValueError, match="cannot copy"):
        tracker.record_cow(*pair)
    assert tracker.clear_cows() == []


def test_a_tracker_that_was_never_made_has_no_copies() -> None:
    tracker = CopyOnWriteTracker.__new__(CopyOnWriteTracker)
    assert tracker.clear_cows() == []
    with pytest.raises(AttributeError):
        tracker.is_appendable(MagicMock(block_id=1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_none_of_them_is_copied(duplicate: Any) -> None:
    counter = RefCounter([1])
    for one in (counter, CopyOnWriteTracker(counter)):
        with pytest.raises(TypeError):
            duplicate(one)
