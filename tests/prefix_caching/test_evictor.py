"""The evictor of free cached blocks: its order, its mistakes, what it costs."""

import copy
import gc
import inspect
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

from kvcache.prefix_caching.evictor import (
    BlockMetaData,
    EvictionPolicy,
    Evictor,
    LRUEvictor,
    make_evictor,
)


class Index:
    """An integer of another class, as NumPy has them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def evictor_of(*blocks: tuple[int, int, float]) -> LRUEvictor:
    """Holds blocks (id, tokens, time); the content hash of block 7 is 107."""
    evictor = LRUEvictor()
    for block_id, num_tokens, time in blocks:
        evictor.add(block_id, 100 + block_id, num_tokens, time)
    return evictor


def drain(evictor: LRUEvictor) -> list[int]:
    """Ids of all its blocks in the order in which they go."""
    gone = []
    while evictor.num_blocks:
        block_id, content_hash = evictor.evict()
        assert content_hash == 100 + block_id
        gone.append(block_id)
        evictor.check()
    return gone


def snapshot(evictor: LRUEvictor) -> list[tuple[int, int, int, float]]:
    return [
        (block_id, data.content_hash, data.num_hashed_tokens, data.last_accessed)
        for block_id, data in evictor.free_table.items()
    ]


# -- order ------------------------------------------------------------------------


def test_the_least_recently_accessed_block_goes_first() -> None:
    assert drain(evictor_of((1, 16, 3.0), (2, 16, 1.0), (3, 16, 2.0))) == [2, 3, 1]


def test_among_equal_times_the_deepest_block_goes_first() -> None:
    assert drain(evictor_of((1, 16, 1), (2, 48, 1), (3, 32, 1))) == [2, 3, 1]


def test_among_equal_times_and_depths_the_lowest_id_goes_first() -> None:
    assert drain(evictor_of((5, 16, 1), (-2, 16, 1), (3, 16, 1))) == [-2, 3, 5]


def test_a_time_weighs_more_than_a_depth_and_a_depth_more_than_an_id() -> None:
    assert drain(evictor_of((1, 16, 2), (9, 16, 1), (8, 99, 2))) == [9, 8, 1]


def test_the_order_does_not_depend_on_the_order_of_adding() -> None:
    blocks = [(i, i // 3 % 4, float(i // 12)) for i in range(200)]
    expected = sorted(blocks, key=lambda block: (block[2], -block[1], block[0]))
    for seed in range(5):
        random.Random(seed).shuffle(blocks)
        assert drain(evictor_of(*blocks)) == [block[0] for block in expected]


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0), (0, -0.0)])
def test_both_zeros_are_the_same_time(zeros: tuple[float, float]) -> None:
    assert drain(evictor_of((2, 16, zeros[0]), (1, 16, zeros[1]))) == [1, 2]


def test_infinite_times_are_before_and_after_all_others() -> None:
    inf = float("inf")
    assert drain(evictor_of((1, 0, inf), (2, 0, 1e308), (3, 0, -inf))) == [3, 2, 1]


def test_what_is_evicted_comes_with_its_content_hash() -> None:
    hashes = {-(2**63): 0, -1: -5, 0: 2**127 + 1, 2**63 - 1: -(2**300)}
    evictor = LRUEvictor()
    for block_id, content_hash in hashes.items():
        evictor.add(block_id, content_hash, 16, 1.0)
    assert [evictor.evict() for _ in hashes] == list(hashes.items())


# -- update and remove ------------------------------------------------------------


def test_an_updated_block_goes_by_its_new_time() -> None:
    evictor = evictor_of((1, 16, 1), (2, 16, 2), (3, 16, 3))
    evictor.update(1, 2.5)
    evictor.update(3, 0.5)
    evictor.check()
    assert drain(evictor) == [3, 2, 1]


def test_an_updated_block_is_not_lost() -> None:
    """vLLM 0.8.5 says here that nothing is left: it drops the entry made by `add`,
    since its time is no longer the block's, and has no other.
    """
    evictor = evictor_of((1, 16, 1.0))
    evictor.update(1, 2.0)
    assert evictor.num_blocks == 1
    assert evictor.evict() == (1, 101)


def test_each_of_a_thousand_blocks_goes_once_after_many_updates() -> None:
    rng = random.Random(7)
    times = {block_id: float(block_id) for block_id in range(1000)}
    evictor = evictor_of(*((block_id, 16, time) for block_id, time in times.items()))
    for block_id in rng.choices(list(times), k=20_000):
        times[block_id] = rng.random() * 1000
        evictor.update(block_id, times[block_id])
    evictor.check()
    assert drain(evictor) == sorted(times, key=times.__getitem__)


def test_a_removed_block_is_never_evicted() -> None:
    evictor = evictor_of(*((i, 16, i) for i in range(10)))
    for block_id in (0, 5, 9):
        evictor.remove(block_id)
        evictor.check()
        assert block_id not in evictor
    assert drain(evictor) == [1, 2, 3, 4, 6, 7, 8]


def test_a_removed_block_can_be_added_again_with_an_older_time() -> None:
    evictor = evictor_of((1, 16, 5), (2, 16, 6))
    evictor.remove(2)
    evictor.add(2, 102, 16, 4)
    assert drain(evictor) == [2, 1]


def test_adding_a_block_again_describes_it_anew_and_keeps_its_place() -> None:
    evictor = evictor_of((1, 16, 1), (2, 16, 2))
    evictor.add(1, 9, 32, 3)
    evictor.check()
    assert evictor.num_blocks == 2
    assert snapshot(evictor) == [(1, 9, 32, 3.0), (2, 102, 16, 2.0)]
    assert [evictor.evict() for _ in range(2)] == [(2, 102), (1, 9)]


# -- what it shows ----------------------------------------------------------------


def test_it_contains_the_blocks_that_were_added() -> None:
    evictor = evictor_of((4, 16, 1))
    assert 4 in evictor
    assert 5 not in evictor
    assert None not in evictor
    assert "4" not in evictor
    with pytest.raises(TypeError):
        [] in evictor  # noqa: B015


def test_the_free_table_lists_blocks_in_the_order_of_adding() -> None:
    evictor = evictor_of((3, 16, 9), (1, 32, 7), (2, 48, 8))
    evictor.remove(3)
    evictor.add(3, 103, 16, 1)
    assert snapshot(evictor) == [
        (1, 101, 32, 7.0),
        (2, 102, 48, 8.0),
        (3, 103, 16, 1.0),
    ]


def test_the_free_table_is_a_read_only_snapshot() -> None:
    evictor = evictor_of((1, 16, 1), (2, 16, 2))
    table = evictor.free_table
    assert isinstance(table, MappingProxyType)
    with pytest.raises(TypeError):
        del table[1]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        table[1].last_accessed = 5  # type: ignore[misc]
    evictor.evict()
    assert list(table) == [1, 2]
    assert list(evictor.free_table) == [2]


def test_the_data_of_a_block_is_what_was_given() -> None:
    data = BlockMetaData(content_hash=-7, num_hashed_tokens=48, last_accessed=3)
    assert (data.content_hash, data.num_hashed_tokens, data.last_accessed) == (
        -7,
        48,
        3.0,
    )
    assert data == evictor_data(-7, 48, 3.0)
    assert data != BlockMetaData(-7, 48, 3.5)
    assert data != (-7, 48, 3.0)
    assert pickle.loads(pickle.dumps(data)) == data
    assert repr(data) == (
        "BlockMetaData(content_hash=-7, num_hashed_tokens=48, last_accessed=3.0)"
    )


def evictor_data(content_hash: int, tokens: int, time: float) -> BlockMetaData:
    evictor = LRUEvictor()
    evictor.add(1, content_hash, tokens, time)
    return evictor.free_table[1]


def test_integers_of_other_classes_are_taken_as_ints() -> None:
    class Odd(int):
        def __float__(self) -> float:
            return float("nan")

        def __pos__(self) -> int:
            return 0

    evictor = LRUEvictor()
    evictor.add(Index(1), Index(2**90), Index(16), Index(5))
    evictor.add(Odd(2), Odd(3), Odd(16), Odd(6))
    evictor.check()
    assert snapshot(evictor) == [(1, 2**90, 16, 5.0), (2, 3, 16, 6.0)]
    assert type(evictor.free_table[2].content_hash) is int
    assert 1 in evictor
    evictor.update(Index(1), Index(7))
    evictor.remove(Odd(2))
    assert evictor.evict() == (1, 2**90)


# -- mistakes ---------------------------------------------------------------------

NO_INTS: list[Any] = [True, None, "1", 1.0, b"1", [1], object()]
NO_TIMES: list[Any] = [False, None, "1", 1j, [1.0], object()]


def refused(
    evictor: LRUEvictor, error: type[Exception], method: str, *arguments: Any
) -> str:
    """The call raises and changes nothing; its message."""
    before = snapshot(evictor)
    with pytest.raises(error) as raised:
        getattr(evictor, method)(*arguments)
    assert type(raised.value) is error
    assert snapshot(evictor) == before
    evictor.check()
    return str(raised.value)


def bad_arguments() -> Iterable[tuple[type[Exception], str, tuple[Any, ...]]]:
    for bad in NO_INTS:
        yield TypeError, "add", (bad, 1, 16, 1.0)
        yield TypeError, "add", (2, bad, 16, 1.0)
        yield TypeError, "add", (2, 1, bad, 1.0)
        yield TypeError, "update", (bad, 1.0)
        yield TypeError, "remove", (bad,)
    for bad in NO_TIMES:
        yield TypeError, "add", (2, 1, 16, bad)
        yield TypeError, "update", (1, bad)
    for bad in (float("nan"), 10**400, -(10**400)):
        yield ValueError, "add", (2, 1, 16, bad)
        yield ValueError, "add", (1, 1, 16, bad)
        yield ValueError, "update", (1, bad)
    for bad in (2**63, -(2**63) - 1, 10**30):
        yield ValueError, "add", (bad, 1, 16, 1.0)
        yield ValueError, "update", (bad, 1.0)
        yield ValueError, "remove", (bad,)
    for bad in (-1, 2**63):
        yield ValueError, "add", (2, 1, bad, 1.0)


@pytest.mark.parametrize(("error", "method", "arguments"), [*bad_arguments()])
def test_a_wrong_argument_is_refused_and_changes_nothing(
    error: type[Exception], method: str, arguments: tuple[Any, ...]
) -> None:
    refused(evictor_of((1, 16, 1), (3, 16, 2)), error, method, *arguments)


def test_an_index_that_raises_changes_nothing() -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    evictor = evictor_of((1, 16, 1))
    refused(evictor, ZeroDivisionError, "add", Broken(), 1, 1, 1)
    refused(evictor, ZeroDivisionError, "add", 1, Broken(), 1, 1)
    refused(evictor, ZeroDivisionError, "add", 1, 1, Broken(), 1)
    refused(evictor, ZeroDivisionError, "add", 1, 1, 1, Broken())


def test_evicting_from_an_empty_evictor_is_a_value_error() -> None:
    evictor = LRUEvictor()
    assert "no block is left" in refused(evictor, ValueError, "evict")
    evictor.add(1, 1, 1, 1)
    evictor.evict()
    refused(evictor, ValueError, "evict")


@pytest.mark.parametrize("call", [("update", 7, 1.0), ("remove", 7)])
def test_a_block_that_is_not_in_it_is_named(call: tuple[Any, ...]) -> None:
    evictor = evictor_of((1, 16, 1))
    assert refused(evictor, ValueError, *call) == "block 7 is not in the evictor"
    evictor.add(7, 107, 16, 0)
    evictor.evict()
    assert refused(evictor, ValueError, *call) == "block 7 is not in the evictor"


def test_it_takes_no_arguments_and_cannot_be_copied() -> None:
    with pytest.raises(TypeError):
        LRUEvictor(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LRUEvictor(blocks=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        copy.copy(evictor_of((1, 16, 1)))
    with pytest.raises(TypeError):
        type("Derived", (LRUEvictor,), {})


def test_an_index_that_calls_back_finds_a_whole_evictor() -> None:
    evictor = evictor_of(*((i, 16, i) for i in range(16)))

    class Meddler:
        def __index__(self) -> int:
            for i in range(100, 200):
                evictor.add(i, 100 + i, 16, i)
            if 3 in evictor:
                evictor.remove(3)
            return 3

    evictor.add(Meddler(), Meddler(), Meddler(), 0.5)
    evictor.check()
    assert evictor.num_blocks == 116
    assert evictor.evict() == (0, 100)
    assert evictor.evict() == (3, 3)


def test_a_collection_that_calls_back_finds_a_whole_evictor() -> None:
    """The collector may run, and finalisers with it, whenever a call makes an object
    that it tracks.
    """
    evictor = LRUEvictor()
    rng = random.Random(3)
    busy = False

    def meddle(phase: str, info: dict[str, int]) -> None:
        nonlocal busy
        if busy or phase == "start":
            return
        busy = True
        for _ in range(rng.randrange(40)):
            evictor.add(rng.randrange(400), 1, rng.randrange(9), rng.random())
        for _ in range(min(rng.randrange(40), evictor.num_blocks)):
            evictor.evict()
        busy = False

    with collecting_all_the_time(meddle):
        for _ in range(3000):
            evictor.add(rng.randrange(400), 1, rng.randrange(9), rng.random())
            try:
                evictor.update(rng.randrange(400), rng.random())
                evictor.remove(rng.randrange(400))
                evictor.evict()
            except ValueError:
                pass
            assert all(type(block_id) is int for block_id in evictor.free_table)
    evictor.check()


@pytest.mark.parametrize("waiting", range(4))
def test_a_collection_may_add_blocks_while_room_is_made(waiting: int) -> None:
    """Up to Python 3.11 one runs at the very object that is one too many: with some
    number of them waiting, that is the one made inside `add`.
    """
    evictor = evictor_of(*((i, 16, i) for i in range(16)))
    assert evictor.nbytes == 44 * 16
    armed = False

    def meddle(phase: str, info: dict[str, int]) -> None:
        nonlocal armed
        if armed:
            armed = False
            for block_id in range(1000, 1200):
                evictor.add(block_id, 1, 16, 1.0)

    with collecting_all_the_time(meddle):
        kept: list[Any] = [[] for _ in range(200)]  # none is left to be used again
        gc.collect()
        for _ in range(waiting):
            kept.append(set())
        armed = True
        evictor.add(500, 1, 16, 1.0)
        armed = False
    assert len(kept) == 200 + waiting
    evictor.check()
    assert evictor.num_blocks in (17, 217)


@contextmanager
def collecting_all_the_time(
    callback: Callable[[str, dict[str, int]], None],
) -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)


# -- costs ------------------------------------------------------------------------


def test_memory_stays_as_it_is_however_often_blocks_are_updated() -> None:
    """vLLM 0.8.5 lets entries pile up, to 50 for each block."""
    evictor = evictor_of(*((i, 16, i) for i in range(100)))
    before = evictor.nbytes
    for i in range(10_000):
        block_id = i % 100
        evictor.update(block_id, i)
        evictor.add(block_id, 100 + block_id, 16, i)
        evictor.remove(block_id)
        evictor.add(block_id, 100 + block_id, 16, i)
    evictor.check()
    assert evictor.nbytes == before


def test_adding_the_blocks_of_a_full_evictor_again_takes_no_memory() -> None:
    evictor = evictor_of(*((i, 16, i) for i in range(16)))
    before = evictor.nbytes
    assert before == 44 * 16
    for i in range(16):
        evictor.add(i, 100 + i, 16, -i)
    assert evictor.nbytes == before
    assert drain(evictor) == list(range(15, -1, -1))


def test_memory_is_for_the_most_blocks_held_at_once() -> None:
    assert LRUEvictor().nbytes == 0
    evictor = evictor_of(*((i, 16, i) for i in range(1000)))
    assert 44 * 1000 <= evictor.nbytes <= 44 * 1100
    evictor = evictor_of(*((i, 16, i) for i in range(1025)))
    assert 44 * 1025 <= evictor.nbytes <= 2 * 44 * 1025


def test_its_memory_is_seen_by_tracemalloc_and_given_back() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        evictor = evictor_of(*((i % 250, 16, i) for i in range(1000)))
        traced = tracemalloc.get_traced_memory()[0] - before
        assert evictor.nbytes <= traced
        assert traced - evictor.nbytes < 250 * 100  # the dict, the list, their ints
        del evictor
        assert tracemalloc.get_traced_memory()[0] - before < 500
    finally:
        tracemalloc.stop()


def test_the_collector_does_not_track_it() -> None:
    evictor = evictor_of((1, 16, 1))
    assert not gc.is_tracked(evictor)
    assert not gc.is_tracked(evictor.free_table[1])


# -- policies ---------------------------------------------------------------------


def test_the_lru_policy_makes_an_empty_lru_evictor() -> None:
    evictor = make_evictor(EvictionPolicy.LRU)
    assert type(evictor) is LRUEvictor
    assert evictor.num_blocks == 0
    assert make_evictor(eviction_policy=EvictionPolicy.LRU) is not evictor


@pytest.mark.parametrize("policy", [None, "LRU", 1, EvictionPolicy])
def test_another_policy_is_a_value_error(policy: Any) -> None:
    with pytest.raises(ValueError, match="unknown eviction policy"):
        make_evictor(policy)


def test_the_lru_evictor_is_an_evictor() -> None:
    assert issubclass(LRUEvictor, Evictor)
    assert isinstance(LRUEvictor(), Evictor)


def test_the_lru_evictor_has_all_that_an_evictor_has() -> None:
    for name in Evictor.__abstractmethods__ - {"num_blocks", "__init__"}:
        ours, general = getattr(LRUEvictor, name), getattr(Evictor, name)
        if not name.startswith("__"):
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(general).parameters
            )
    assert isinstance(LRUEvictor().num_blocks, int)


def test_an_evictor_of_another_kind_must_do_all_that_the_interface_has() -> None:
    class Unfinished(Evictor):
        def __init__(self) -> None: ...

    with pytest.raises(TypeError, match="evict"):
        Unfinished()  # type: ignore[abstract]


def test_a_policy_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(EvictionPolicy.LRU)) is EvictionPolicy.LRU
