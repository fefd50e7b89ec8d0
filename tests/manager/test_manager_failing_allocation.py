"""No allocation that fails breaks a manager or a replay: see failing_allocation.py.

Two outcomes are a manager's own. What there is no memory to cache does not cost a
request its slots: the call succeeds, and the request's next call caches it. And
`cache_blocks` of several groups may cache one and not the other; called again, it
caches the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from failing_allocation import (
    ALL,
    ONCE,
    InC,
    World,
    attempt,
    each,
    go_through,
    is_lack_of_memory,
)
from test_failing_allocation import Act, state_of
from workloads import KEYED, Collector

from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow
from kvcache.replay._concurrent import ConcurrentReplay
from kvcache.replay._simulate import PoolReplay
from kvcache.replay.arrivals import Arrivals

GROUPS: dict[str, list[Any]] = {
    "one group": [FullAttention(4)],
    "a window": [FullAttention(4), SlidingWindow(4, 40)],
    "hashes finer than blocks": [FullAttention(8), FullAttention(4)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "with events": {"enable_kv_cache_events": True},
    "with metrics": {"metrics_collector": Collector()},
}


def manager_of(groups: list[Any], **options: Any) -> KVCacheManager:
    """Request 1 runs; 20 tokens of a request that is gone are cached."""
    manager = KVCacheManager(
        30,
        groups,
        hash_block_size=4,
        max_model_len=64,
        max_num_requests=4,
        hash_fn=KEYED,
        **options,
    )
    for first, count in ((0, 20), (100, 13)):
        run(manager, range(first, first + count))
    manager.free(0)
    manager.take_changed_rows()
    manager.take_events()
    return manager


def run(manager: KVCacheManager, tokens: range) -> int:
    row = manager.add_request(tokens)
    manager.allocate_slots(row, len(tokens) - manager.match(row))
    return row


def state(manager: KVCacheManager) -> Any:
    rows = []
    for row in range(4):
        try:
            tokens = tokens_of(manager, row)
        except ValueError:
            continue
        groups = range(len(manager.groups))
        rows.append((row, tokens, [manager.block_ids(row, g).tolist() for g in groups]))
    return (
        state_of(manager.block_pool),
        manager.num_requests,
        rows,
        manager.occupancy(),
        manager.prefix_cache_stats,
    )


def settled(manager: KVCacheManager) -> Any:
    """The state, but for the order of events: who comes late is told of late."""
    of_pool, *others = state(manager)
    return *of_pool[:5], sorted(of_pool[5]), *of_pool[6:], *others


def tokens_of(manager: KVCacheManager, row: int) -> tuple[int, int]:
    return manager.num_tokens(row), manager.num_computed_tokens(row)


def waiting(manager: KVCacheManager, tokens: range) -> tuple[int, int]:
    row = manager.add_request(tokens)
    return row, manager.match(row)


# -- calls, on a manager whose request 1 runs --------------------------------------


def append_hashes(manager: KVCacheManager) -> Act:
    row = manager.add_request(hashes=[b"0" * 16], num_tokens=5)
    return lambda: manager.append(row, num_tokens=9, hashes=[b"1" * 16, b"2" * 16])


def append_step(manager: KVCacheManager) -> Act:
    row = manager.add_request(range(23))
    return lambda: manager.append_step([1, row], [7, 8])


def truncate(manager: KVCacheManager) -> Act:
    manager.append(1, [1, 2])
    return lambda: manager.truncate(1, 13)


def match(manager: KVCacheManager) -> Act:
    row = manager.add_request(range(24))
    return lambda: manager.match(row)


def fork(manager: KVCacheManager) -> Act:
    return lambda: manager.fork(1)


def pop_block_ids(manager: KVCacheManager) -> Act:
    return lambda: manager.pop_block_ids(1)


def take_changed_rows(manager: KVCacheManager) -> Act:
    manager.append(1, [1] * 8)
    manager.allocate_slots(1, 8)
    return manager.take_changed_rows


def take_events(manager: KVCacheManager) -> Act:
    manager.evict_blocks([1, 2, 3])
    return manager.take_events


def reset(manager: KVCacheManager) -> Act:
    manager.free(1)
    return manager.reset_prefix_cache


CALLS: dict[str, Callable[[KVCacheManager], Act]] = {
    "add_request": lambda manager: lambda: manager.add_request(range(24)),
    "add_request with hashes": lambda manager: (
        lambda: manager.add_request(hashes=[b"0" * 16, b"1" * 16], num_tokens=9)
    ),
    "append": lambda manager: lambda: manager.append(1, [7, 8, 9, 10]),
    "append of hashes": append_hashes,
    "append_step": append_step,
    "truncate": truncate,
    "match": match,
    "fork": fork,
    "free": lambda manager: lambda: manager.free(1),
    "preempt": lambda manager: lambda: manager.preempt(1),
    "pop_block_ids": pop_block_ids,
    "block_table": lambda manager: lambda: manager.block_table()[1, :3],
    "block_ids": lambda manager: lambda: manager.block_ids(1),
    "slot_mapping": lambda manager: lambda: manager.slot_mapping([1], [3]),
    "set_num_computed_tokens": lambda manager: (
        lambda: manager.set_num_computed_tokens(1, 12)
    ),
    "take_changed_rows": take_changed_rows,
    "take_events": take_events,
    "take_prefix_cache_stats": lambda manager: manager.take_prefix_cache_stats,
    "evict_blocks": lambda manager: lambda: manager.evict_blocks([1, 2, 3]),
    "reset_prefix_cache": reset,
    "occupancy": lambda manager: manager.occupancy,
    "check": lambda manager: manager.check,
}


@each(ONCE)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("call", CALLS)
def test_a_manager_is_as_before_where_a_call_finds_no_memory(
    call: str, groups: str, options: str, fails: Any
) -> None:
    def make() -> World:
        manager = manager_of(GROUPS[groups], **OPTIONS[options])
        act = CALLS[call](manager)
        return World(act, lambda: state(manager), manager.check)

    go_through(make, fails)


# -- calls that cache what they fill -----------------------------------------------


def admit(manager: KVCacheManager) -> tuple[Act, list[int]]:
    row, hits = waiting(manager, range(28))
    return (lambda: manager.allocate_slots(row, 28 - hits)), [row]


def admit_with_external(manager: KVCacheManager) -> tuple[Act, list[int]]:
    row, hits = waiting(manager, range(28))
    return (
        lambda: manager.allocate_slots(
            row, 24 - hits, num_external_computed_tokens=4, num_lookahead_tokens=2
        )
    ), [row]


def go_on(manager: KVCacheManager) -> tuple[Act, list[int]]:
    manager.append(1, list(range(9)))
    return (lambda: manager.allocate_slots(1, 9)), [1]


def step(manager: KVCacheManager) -> tuple[Act, list[int]]:
    row = run(manager, range(24))
    for one in (1, row):
        manager.append(one, list(range(9)))
    return (lambda: manager.allocate_step([1, row], [9, 9])), [1, row]


def step_without_room(manager: KVCacheManager) -> tuple[Act, list[int]]:
    """The second of three finds no block."""
    rows = [1, run(manager, range(200, 207)), run(manager, range(300, 302))]
    manager.block_pool.get_new_block_ids(
        manager.block_pool.get_num_free_blocks() - 2 * len(manager.groups)
    )
    return (lambda: manager.allocate_step(rows, [4, 9, 1])), rows[:1]


CACHING = {
    "allocate_slots, hits": admit,
    "allocate_slots, a connector's": admit_with_external,
    "allocate_slots, running": go_on,
    "allocate_step": step,
    "allocate_step, no room": step_without_room,
}
# With events or metrics a step may stop early; that is tested apart.
CACHING_CALLS = [
    (call, options)
    for call in CACHING
    for options in OPTIONS
    if options == "quiet" or not call.startswith("allocate_step")
]


@each(ONCE)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("call", "options"), CACHING_CALLS)
def test_no_memory_to_cache_a_block_costs_a_request_no_slots(
    call: str, groups: str, options: str, fails: Any
) -> None:
    def make() -> World:
        manager = manager_of(GROUPS[groups], **OPTIONS[options])
        act, rows = CACHING[call](manager)

        def catch_up() -> None:
            for row in rows:
                manager.cache_blocks(row, min(tokens_of(manager, row)))

        return World(act, lambda: settled(manager), manager.check, catch_up)

    go_through(make, fails)


@each(ONCE)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", GROUPS)
def test_caching_of_blocks_goes_on_where_it_found_no_memory(
    groups: str, options: str, fails: Any
) -> None:
    def make() -> World:
        manager = manager_of(GROUPS[groups], **OPTIONS[options])
        row, _ = waiting(manager, range(200, 224))
        manager.allocate_slots(row, 24, delay_cache_blocks=True)
        return World(
            lambda: manager.cache_blocks(row, 24),
            lambda: settled(manager),
            manager.check,
            resumes=True,
        )

    go_through(make, fails)


@each(ONCE)
def test_a_step_with_events_serves_whom_it_says_and_no_others(fails: Any) -> None:
    """Where there is no memory to tell of the first request's blocks, it raises."""

    def make() -> tuple[KVCacheManager, list[int]]:
        manager = manager_of(GROUPS["one group"], enable_kv_cache_events=True)
        return manager, [1, run(manager, range(24)), run(manager, range(300, 303))]

    def serve(manager: KVCacheManager, rows: list[int]) -> int:
        return manager.allocate_step(rows, [5] * len(rows))[0]

    serve(*make())
    manager, rows = make()
    before = state(manager)
    assert serve(manager, rows) == 3
    after = settled(manager)
    stops = {3}
    for n in range(1, 500):
        manager, rows = make()
        act = partial(manager.allocate_step, rows, [5, 5, 5])
        error, result, was_undisturbed, _ = attempt(World(act, int), fails, n)
        if error is not None:
            assert is_lack_of_memory(error)
            assert state(manager) == before
            result = act()
        served, ids, starts = result
        assert (len(ids), len(starts)) == (starts[-1], served + 1)
        stops.add(served)
        manager.check()
        if served < 3:
            assert serve(manager, rows[served:]) == 3 - served
        for row in rows:
            manager.cache_blocks(row, min(tokens_of(manager, row)))
        assert settled(manager) == after
        if was_undisturbed:
            break
    # Only what tells of blocks takes memory for each request.
    assert stops > {3} or isinstance(fails, InC)


# -- making ------------------------------------------------------------------------


@each(ALL)
@pytest.mark.parametrize("groups", GROUPS)
def test_a_manager_whose_making_failed_is_empty_and_can_be_made(
    groups: str, fails: Any
) -> None:
    def make() -> World:
        manager = KVCacheManager.__new__(KVCacheManager)

        def act() -> None:
            manager.__init__(  # type: ignore[misc]
                30,
                GROUPS[groups],
                hash_block_size=4,
                max_model_len=64,
                max_num_requests=4,
            )

        def seen() -> Any:
            return manager.num_requests, manager.nbytes, len(manager.groups)

        return World(act, seen, manager.check)

    go_through(make, fails)


def arrivals() -> Arrivals:
    lengths = np.full(6, 12)
    return Arrivals(
        lengths,
        np.full(6, 5),
        np.zeros(6),
        np.arange(6) * 3,
        np.frombuffer(bytes(range(32)) * 9, np.uint8).reshape(-1, 16),
    )


@each(ONCE)
def test_a_replay_whose_making_failed_can_be_made(fails: Any) -> None:
    def make() -> World:
        replay = ConcurrentReplay.__new__(ConcurrentReplay)

        def act() -> None:
            replay.__init__(30, 4, arrivals(), 3, 1.0)  # type: ignore[misc]

        def seen() -> Any:
            try:
                return replay.advance(1)
            except ValueError:
                return "not made"

        return World(act, seen)

    go_through(make, fails)


@each(ONCE)
def test_a_replay_that_finds_no_memory_says_so(fails: Any) -> None:
    """Its pool stays whole; the totals are those of the requests that were run."""

    def make() -> World:
        replay = PoolReplay(30, 4)
        lengths = np.array([12, 8, 12])
        keys = np.frombuffer(bytes(range(128)), np.uint8).reshape(8, 16)
        starts = np.array([0, 3, 5, 8])
        return World(
            lambda: replay.run(lengths, keys, starts),
            lambda: replay.manager.num_requests,
            replay.manager.check,
        )

    go_through(make, fails)
