"""The manager call by call: what it gives, what it refuses, what it leaves alone."""

import gc
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from managers import (
    LONGEST,
    MAX_BLOCKS,
    MOST,
    hashes_of,
    ids,
    make,
    num_free,
    picture,
    refs,
    refused,
    run,
)

from kvcache import BlockRemoved, BlockStateError, BlockStored
from kvcache.hashing import keyed, sha256
from kvcache.manager import (
    CrossAttention,
    FullAttention,
    KVCacheManager,
    Mamba,
    SlidingWindow,
)

NO_GROUPS: list[list[Any]] = [[], [FullAttention(4)] * 65, [4]]
NO_INTS = [True, 1.0, "1", None, [1], np.float32(1)]
OUT_OF_RANGE = [-1, MOST, 2**31 - 1, 2**31, -(2**63), 2**70]
BY_ROW: dict[str, Callable[[KVCacheManager, Any], Any]] = {
    "match": lambda m, row: m.match(row),
    "allocate_slots": lambda m, row: m.allocate_slots(row, 1),
    "append": lambda m, row: m.append(row, 1),
    "truncate": lambda m, row: m.truncate(row, 1),
    "set_in_flight": lambda m, row: m.set_in_flight(row, 0),
    "set_num_computed_tokens": lambda m, row: m.set_num_computed_tokens(row, 0),
    "cache_blocks": lambda m, row: m.cache_blocks(row, 0),
    "free": lambda m, row: m.free(row),
    "preempt": lambda m, row: m.preempt(row),
    "pop_block_ids": lambda m, row: m.pop_block_ids(row),
    "fork": lambda m, row: m.fork(row),
    "block_ids": lambda m, row: m.block_ids(row),
    "num_blocks": lambda m, row: m.num_blocks(row),
    "num_tokens": lambda m, row: m.num_tokens(row),
    "num_computed_tokens": lambda m, row: m.num_computed_tokens(row),
    "allocate_step": lambda m, row: m.allocate_step([row], [1]),
    "append_step": lambda m, row: m.append_step([row], [1]),
    "slot_mapping": lambda m, row: m.slot_mapping([row], [1]),
}
by_row = pytest.mark.parametrize("name", BY_ROW)


# -- making one -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": True}, TypeError),
        ({"num_blocks": "9"}, TypeError),
        ({"num_blocks": 2**40}, ValueError),
        ({"max_model_len": 0}, ValueError),
        ({"max_model_len": 2**31}, ValueError),
        ({"max_model_len": 64.0}, TypeError),
        ({"max_num_requests": 0}, ValueError),
        ({"max_num_requests": -1}, ValueError),
        ({"max_num_requests": True}, TypeError),
        ({"max_in_flight_tokens": 0}, ValueError),
        ({"max_in_flight_tokens": "9"}, TypeError),
        ({"hash_block_size": 0}, ValueError),
        ({"hash_block_size": 4.0}, TypeError),
        ({"watermark": -0.1}, ValueError),
        ({"watermark": 1.1}, ValueError),
        ({"watermark": float("nan")}, ValueError),
        ({"watermark": "low"}, TypeError),
        ({"surprise": 1}, TypeError),
    ],
    ids=str,
)
def test_a_manager_of_odd_numbers_is_not_made(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make(**options)


def test_a_manager_is_made_once() -> None:
    manager = make()
    row = run(manager, range(10))
    with refused(ValueError, manager, match="already made"):
        manager.__init__(9, [FullAttention(4)], max_model_len=64, max_num_requests=4)
    assert ids(manager, row) == [1, 2, 3]


def test_a_failed_start_leaves_a_manager_of_no_requests() -> None:
    manager = KVCacheManager.__new__(KVCacheManager)
    for groups in NO_GROUPS:
        with pytest.raises((ValueError, TypeError)):
            manager.__init__(9, groups, max_model_len=64, max_num_requests=4)
    manager.check()
    assert manager.num_requests == 0


@by_row
def test_a_manager_that_was_never_made_knows_no_row(name: str) -> None:
    manager = KVCacheManager.__new__(KVCacheManager)
    with pytest.raises(ValueError):
        BY_ROW[name](manager, 0)


def test_a_manager_that_was_never_made_is_empty() -> None:
    manager = KVCacheManager.__new__(KVCacheManager)
    manager.check()
    assert manager.num_requests == 0
    assert manager.usage == 0.0
    assert manager.occupancy() == (0, 0)
    assert manager.take_changed_rows().tolist() == []
    assert manager.take_events() == []
    assert manager.groups == ()
    with pytest.raises(ValueError):
        manager.block_table()
    with pytest.raises((TypeError, ValueError)):
        manager.add_request([1])


def test_a_manager_cannot_be_subclassed() -> None:
    with pytest.raises(TypeError):
        type("Mine", (KVCacheManager,), {})


class Collector:
    """Is told of blocks, and does nothing."""

    manager: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_a_manager_that_refers_to_itself_is_collected() -> None:
    collector = Collector()
    manager = make(metrics_collector=collector)
    collector.manager = manager
    run(manager, range(10))
    gone = weakref.ref(manager)
    del manager, collector
    gc.collect()
    assert gone() is None


def hit_length(manager: KVCacheManager, tokens: Any) -> int:
    """What a new request of these tokens finds."""
    row = manager.add_request(tokens)
    found = manager.match(row)
    manager.free(row)
    return found


# -- sizes ----------------------------------------------------------------------------


def test_the_sizes_of_a_large_engine_take_memory_as_they_are_used() -> None:
    program = """
import resource
import numpy as np
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manager = KVCacheManager(
    1_000_000,
    [FullAttention(16), SlidingWindow(16, 1024)],
    max_model_len=131_072,
    max_num_requests=4096,
)
tables = sum(manager.block_table(g).nbytes for g in range(2))
rows = [manager.add_request(hashes=(), num_tokens=131_072) for _ in range(4096)]
for row in rows[:8]:
    assert manager.allocate_slots(row, 131_072 - 16) is not None
served, ids, _ = manager.allocate_step(rows[:8], [16] * 8)
assert served == 8 and len(ids) == 16
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(tables, used, manager.block_pool.nbytes, manager.occupancy()[0])
manager.check()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    tables, used, pool, blocks = map(int, done.stdout.split())
    assert tables > 2 * 4096 * 8192 * 4
    assert used < pool + tables // 4
    assert blocks == 8 * 8192 + 8 * (64 + 8128) - 8 * 8127


def test_a_bound_is_refused_by_the_call_that_exceeds_it() -> None:
    manager = make()
    with refused(ValueError, manager, match="1 to 64 tokens, got 65"):
        manager.add_request(range(LONGEST + 1))
    with refused(ValueError, manager, match="num_tokens must be from 1 to 64"):
        manager.add_request(hashes=(), num_tokens=LONGEST + 1)
    rows = [manager.add_request(range(LONGEST)) for _ in range(MOST)]
    with refused(ValueError, manager, match="there are 4 requests already"):
        manager.add_request([1])
    with refused(ValueError, manager, match="65 tokens"):
        manager.append(rows[0], 1)
    with refused(ValueError, manager, match="has 64 tokens already"):
        manager.append_step(rows, [1] * MOST)
    with refused(ValueError, manager, match="65 tokens, the limit is 64"):
        manager.allocate_slots(rows[0], LONGEST + 1)


def test_tables_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="a table row of 2147483647 blocks"):
        make(FullAttention(1), max_model_len=MAX_BLOCKS)
    with pytest.raises(MemoryError, match="bytes for tables"):
        make(FullAttention(1), max_model_len=MAX_BLOCKS - 1, max_num_requests=2**20)


def test_memory_is_reported_to_tracemalloc_and_given_back() -> None:
    make()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manager = make(
            FullAttention(4),
            SlidingWindow(4, 9),
            num_blocks=1000,
            max_model_len=4096,
            max_num_requests=64,
        )
        traced = tracemalloc.get_traced_memory()[0] - before
        assert abs(traced - manager.nbytes) < 16_384 + 0.02 * traced
        del manager
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()


# -- rows -----------------------------------------------------------------------------


@by_row
@pytest.mark.parametrize("row", OUT_OF_RANGE)
def test_a_row_out_of_range_is_no_requests(name: str, row: int) -> None:
    manager = make()
    run(manager, range(10))
    with refused(ValueError, manager):
        BY_ROW[name](manager, row)


@by_row
def test_a_vacant_row_is_no_requests(name: str) -> None:
    manager = make()
    run(manager, range(10))
    manager.free(run(manager, range(10)))
    with refused(ValueError, manager, match="row 1 is no request's"):
        BY_ROW[name](manager, 1)


@by_row
@pytest.mark.parametrize("row", NO_INTS, ids=repr)
def test_a_row_is_an_int_and_no_bool(name: str, row: Any) -> None:
    manager = make()
    run(manager, range(10))
    with refused(TypeError, manager):
        BY_ROW[name](manager, row)


def test_rows_are_given_from_0_on_and_the_last_one_freed_goes_first() -> None:
    manager = make()
    assert [manager.add_request([1]) for _ in range(3)] == [0, 1, 2]
    manager.free(1)
    manager.free(0)
    assert [manager.add_request([1]) for _ in range(3)] == [0, 1, 3]
    assert manager.num_requests == 4


def test_a_row_may_be_a_numpy_int() -> None:
    manager = make()
    row = np.int32(run(manager, range(10)))
    assert manager.num_tokens(row) == 10  # type: ignore[arg-type]


# -- add_request ----------------------------------------------------------------------

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
    "int32 array": lambda tokens: np.array(tokens, np.int32),
    "int64 array": lambda tokens: np.array(tokens, np.int64),
    "uint16 array": lambda tokens: np.array(tokens, np.uint16),
    "strided array": lambda tokens: np.repeat(np.array(tokens), 2)[::2],
    "reversed view": lambda tokens: np.array(tokens[::-1])[::-1],
    "read-only array": lambda tokens: np.frombuffer(np.array(tokens).tobytes(), int),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_in_any_form_are_the_same_content(form: str) -> None:
    manager = make()
    manager.free(run(manager, list(range(12))))
    assert manager.match(manager.add_request(FORMS[form](list(range(12))))) == 8


@pytest.mark.parametrize("form", FORMS)
def test_tokens_in_any_form_can_be_appended(form: str) -> None:
    manager = make()
    manager.free(run(manager, list(range(12))))
    row = manager.add_request([0, 1])
    manager.append(row, FORMS[form](list(range(2, 12))))
    assert manager.match(row) == 8


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([], ValueError),
        ([-1], ValueError),
        ([2**63], ValueError),
        ([2**200], ValueError),
        ([1.0], TypeError),
        ([True], TypeError),
        ([None], TypeError),
        ("text", TypeError),
        (b"text", TypeError),
        (7.0, TypeError),
        (np.zeros((2, 2), int), ValueError),
        (np.zeros(3), TypeError),
        (np.array([-1]), ValueError),
    ],
    ids=repr,
)
def test_a_prompt_is_one_row_of_token_ids(tokens: Any, error: type[Exception]) -> None:
    manager = make()
    with refused(error, manager):
        manager.add_request(tokens)


def test_a_request_has_tokens_or_hashes() -> None:
    manager = make()
    for arguments in ({}, {"tokens": [1], "num_tokens": 1}, {"hashes": [b"a"]}):
        with refused(TypeError, manager):
            manager.add_request(**arguments)


def test_hashes_are_as_good_as_the_tokens_that_they_were_made_of() -> None:
    manager = make(hash_fn=sha256)
    manager.free(run(manager, range(12)))
    row = manager.add_request(hashes=hashes_of(range(12)), num_tokens=13)
    assert manager.match(row) == 12


def test_a_request_may_have_fewer_hashes_than_full_blocks() -> None:
    manager = make(hash_fn=sha256)
    manager.free(run(manager, range(12)))
    row = manager.add_request(hashes=hashes_of(range(12))[:1], num_tokens=13)
    assert manager.match(row) == 4
    manager.allocate_slots(row, 9)
    assert manager.block_pool.blocks[ids(manager, row)[2]].block_hash is None
    manager.append(row, num_tokens=0, hashes=hashes_of(range(12))[1:])
    manager.append(row, num_tokens=1)
    manager.allocate_slots(row, 1)
    assert manager.block_pool.blocks[ids(manager, row)[2]].block_hash is not None


@pytest.mark.parametrize(
    ("hashes", "error"),
    [
        ([b"a" * 16, b"b" * 16, b"c" * 16], ValueError),
        ([b""], ValueError),
        ([b"a" * 33], ValueError),
        ([b"a" * 16, b"b" * 15], ValueError),
        (["a" * 16], TypeError),
        ([bytearray(16)], TypeError),
        ([None], TypeError),
        (None, TypeError),
        (5, TypeError),
    ],
    ids=repr,
)
def test_hashes_are_bytes_of_one_length_for_full_blocks(
    hashes: Any, error: type[Exception]
) -> None:
    manager = make()
    with refused(error, manager):
        manager.add_request(hashes=hashes, num_tokens=11)
    row = manager.add_request(hashes=[b"a" * 16], num_tokens=4)
    if hashes:
        with refused(error, manager):
            manager.append(row, num_tokens=7, hashes=hashes)


def test_hashes_that_do_not_fit_are_not_kept() -> None:
    manager = make(enable_kv_cache_events=True)
    row = manager.add_request(hashes=[b"a" * 16], num_tokens=5)
    with refused(ValueError, manager, match="3 block hashes"):
        manager.append(row, num_tokens=4, hashes=[b"b" * 16, b"c" * 16])
    manager.append(row, num_tokens=3, hashes=[b"d" * 16])
    manager.allocate_slots(row, 8)
    [event] = manager.take_events()
    assert event.block_hashes == [
        int.from_bytes(one * 8, "big") for one in (b"a", b"d")
    ]


def test_hashes_of_all_requests_have_one_length() -> None:
    manager = make()
    manager.add_request(hashes=[b"a" * 16], num_tokens=4)
    with refused(ValueError, manager, match="16 bytes"):
        manager.add_request(hashes=[b"a" * 32], num_tokens=4)


LORA = SimpleNamespace(
    adapter_id=1, lora_int_id=1, name="a", lora_name="a", path="/a", lora_path="/a"
)
IMAGE = SimpleNamespace(
    identifier="image", mm_position=SimpleNamespace(offset=1, length=2)
)


@pytest.mark.parametrize(
    "content",
    [{"cache_salt": "s"}, {"lora_request": LORA}, {"mm_features": [IMAGE]}],
    ids=lambda content: next(iter(content)),
)
def test_what_is_not_tokens_keeps_requests_apart(content: dict[str, Any]) -> None:
    manager = make()
    manager.free(run(manager, range(12), **content))
    assert manager.match(manager.add_request(range(12))) == 0
    assert manager.match(manager.add_request(range(12), **content)) == 8


def test_content_that_the_manager_does_not_know_is_refused() -> None:
    manager = make()
    with refused(TypeError, manager):
        manager.add_request([1], adapter="a")


def test_a_request_that_skips_the_cache_fills_it_all_the_same() -> None:
    manager = make()
    run(manager, range(12), skip_reading_prefix_cache=True)
    assert manager.match(manager.add_request(range(12))) == 8
    row = manager.add_request(range(12), skip_reading_prefix_cache=True)
    assert manager.match(row) == 0


# -- match ----------------------------------------------------------------------------


def test_a_match_holds_nothing() -> None:
    manager = make()
    manager.free(run(manager, range(12)))
    row = manager.add_request(range(12))
    before = picture(manager)
    assert manager.match(row) == manager.match(row) == 8
    assert picture(manager) == before


@pytest.mark.parametrize(
    ("limit", "hit"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (2**31 - 2, 12)]
)
def test_a_match_may_be_limited(limit: int, hit: int) -> None:
    manager = make()
    manager.free(run(manager, range(12)))
    assert manager.match(manager.add_request(range(12)), limit) == hit


@pytest.mark.parametrize("limit", [-1, 2**31, 2**70])
def test_a_limit_out_of_range_is_a_value_error(limit: int) -> None:
    manager = make()
    row = manager.add_request(range(12))
    with refused(ValueError, manager):
        manager.match(row, limit)


def test_a_limit_is_an_int() -> None:
    manager = make()
    row = manager.add_request(range(12))
    for limit in (True, 4.0, "4"):
        with refused(TypeError, manager):
            manager.match(row, limit)  # type: ignore[arg-type]


def test_a_running_request_is_not_matched() -> None:
    manager = make()
    row = run(manager, range(12))
    with refused(BlockStateError, manager, match="is running"):
        manager.match(row)


def test_an_evicted_hit_has_to_be_matched_again() -> None:
    manager = make()
    first = run(manager, range(12))
    row = manager.add_request(range(12))
    manager.match(row)
    manager.block_pool.evict_blocks({ids(manager, first)[1]})
    with refused(BlockStateError, manager, match="match again"):
        manager.allocate_slots(row, 4)
    assert manager.match(row) == 4


@pytest.mark.parametrize(("window", "hit"), [(9, 8), (20, 0)])
def test_less_than_a_window_is_cut_to_what_all_groups_can_share(
    window: int, hit: int
) -> None:
    # The three blocks in front of a draft model's are rounded down twice, as in vLLM:
    # before the last one is dropped, and after.
    groups = FullAttention(8), SlidingWindow(4, window, eagle=True)
    manager = make(*groups, use_eagle=True)
    run(manager, range(17))
    assert hit_length(manager, range(17)) == hit


def test_tokens_that_are_appended_leave_a_match_as_it_was() -> None:
    manager = make()
    manager.free(run(manager, range(12)))
    row = manager.add_request(range(12))
    manager.match(row)
    manager.append(row, [7, 7])
    manager.allocate_slots(row, 6)
    assert manager.num_computed_tokens(row) == 14


def test_a_request_that_is_cut_is_matched_anew() -> None:
    manager = make()
    manager.free(run(manager, range(12)))
    row = manager.add_request(range(12))
    manager.match(row)
    manager.truncate(row, 3)
    manager.allocate_slots(row, 3)
    assert manager.num_computed_tokens(row) == 3
    assert len(ids(manager, row)) == 1


def test_blocks_of_a_match_that_was_dropped_are_not_taken() -> None:
    manager = make()
    manager.free(run(manager, range(12)))
    row = manager.add_request(range(12))
    manager.match(row)
    manager.truncate(row, 12)
    manager.allocate_slots(row, 4, num_external_computed_tokens=1)
    assert ids(manager, row) == [4, 5]
    manager.check()


# -- allocate_slots -------------------------------------------------------------------


def test_new_blocks_are_returned_and_stand_in_the_table() -> None:
    manager = make(FullAttention(4), SlidingWindow(8, 9), hash_block_size=4)
    row = manager.add_request(range(12))
    new = manager.allocate_slots(row, 9)
    assert new is not None
    assert [each.tolist() for each in new] == [[1, 2, 3], [4, 5]]
    assert all(each.dtype == np.int32 for each in new)
    assert [ids(manager, row, g) for g in (0, 1)] == [[1, 2, 3], [4, 5]]
    assert manager.num_computed_tokens(row) == 9


def test_new_ids_are_the_callers_own() -> None:
    manager = make()
    row = manager.add_request(range(12))
    new = manager.allocate_slots(row, 12)
    assert new is not None
    new[0][:] = 77
    assert ids(manager, row) == [1, 2, 3]
    manager.check()


def test_a_request_that_needs_no_block_gets_none() -> None:
    manager = make()
    row = manager.add_request(range(12))
    manager.allocate_slots(row, 9)
    new = manager.allocate_slots(row, 3)
    assert new is not None
    assert [each.tolist() for each in new] == [[]]


def test_slots_for_drafts_are_counted_but_not_computed() -> None:
    manager = make()
    row = manager.add_request(range(4))
    manager.allocate_slots(row, 4, num_lookahead_tokens=5)
    assert len(ids(manager, row)) == 3
    assert manager.num_computed_tokens(row) == 4


def test_slots_end_at_the_longest_request() -> None:
    manager = make()
    row = manager.add_request(range(60))
    manager.allocate_slots(row, 60, num_lookahead_tokens=1000)
    assert len(ids(manager, row)) == 16


def test_what_does_not_fit_is_none_and_changes_nothing() -> None:
    manager = make(num_blocks=3)
    row = manager.add_request(range(12))
    before = picture(manager)
    assert manager.allocate_slots(row, 12) is None
    assert picture(manager) == before
    assert manager.allocate_slots(row, 8) is not None


def test_reserved_blocks_are_left_to_others() -> None:
    manager = make(num_blocks=5)
    row = manager.add_request(range(12))
    assert manager.allocate_slots(row, 12, reserved_blocks=2) is None
    assert manager.allocate_slots(row, 12, reserved_blocks=1) is not None
    assert manager.allocate_slots(row, 1, reserved_blocks=2) is None


def test_the_watermark_stays_free_when_a_request_is_let_in_beside_others() -> None:
    manager = make(num_blocks=10, watermark=0.5)
    row = manager.add_request(range(20))
    assert manager.allocate_slots(row, 20) is None
    assert manager.allocate_slots(row, 20, has_scheduled_requests=False) is not None
    manager.append(row, range(16))
    assert manager.allocate_slots(row, 16) is not None  # it runs already


def test_a_request_may_have_to_fit_whole() -> None:
    manager = make(num_blocks=5)
    row = manager.add_request(range(20))
    assert manager.allocate_slots(row, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(row, 4) is not None


def test_a_window_bounds_what_has_to_fit() -> None:
    manager = make(SlidingWindow(4, 5), num_blocks=6, max_in_flight_tokens=8)
    row = manager.add_request(range(60))
    assert manager.allocate_slots(row, 8, full_sequence_must_fit=True) is not None


def test_tokens_from_elsewhere_have_blocks_that_are_not_new() -> None:
    manager = make()
    row = manager.add_request(range(20))
    new = manager.allocate_slots(row, 8, num_external_computed_tokens=12)
    assert new is not None
    assert new[0].tolist() == [4, 5]
    assert ids(manager, row) == [1, 2, 3, 4, 5]
    assert manager.num_computed_tokens(row) == 20


def test_tokens_from_elsewhere_outside_the_window_have_null_blocks() -> None:
    manager = make(SlidingWindow(4, 6))
    row = manager.add_request(range(40))
    new = manager.allocate_slots(row, 4, num_external_computed_tokens=30)
    assert new is not None
    assert ids(manager, row) == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert new[0].tolist() == [3]


def test_blocks_that_are_still_being_loaded_are_cached_when_told() -> None:
    manager = make()
    row = manager.add_request(range(12))
    options: dict[str, Any] = {"delay_cache_blocks": True}
    manager.allocate_slots(row, 0, num_external_computed_tokens=12, **options)
    other = manager.add_request(range(12))
    assert manager.match(other) == 0
    manager.cache_blocks(row, 4)
    assert manager.match(other) == 4
    manager.cache_blocks(row, 12)
    assert manager.match(other) == 8


def test_a_running_request_brings_no_tokens_from_elsewhere() -> None:
    manager = make()
    row = run(manager, range(8))
    with refused(BlockStateError, manager, match="runs"):
        manager.allocate_slots(row, 1, num_external_computed_tokens=4)


def test_a_request_that_asks_for_nothing_is_refused() -> None:
    manager = make()
    row = manager.add_request(range(8))
    with refused(ValueError, manager, match="asks for no token"):
        manager.allocate_slots(row, 0)


def test_a_hit_may_be_taken_without_a_new_token() -> None:
    manager = make()
    manager.free(run(manager, range(8)))
    row = manager.add_request(range(8))
    assert manager.match(row, 8) == 8
    new = manager.allocate_slots(row, 0)
    assert new is not None
    assert new[0].tolist() == []
    assert ids(manager, row) == [1, 2]


NUMBERS = (
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "num_encoder_tokens",
    "reserved_blocks",
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**31, 2**63, 2**70])
def test_a_number_out_of_range_is_refused(name: str, value: int) -> None:
    manager = make()
    row = manager.add_request(range(8))
    with refused(ValueError, manager, match=name):
        manager.allocate_slots(row, 1, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NO_INTS, ids=repr)
def test_a_number_is_an_int_and_no_bool(name: str, value: Any) -> None:
    manager = make()
    row = manager.add_request(range(8))
    with refused(TypeError, manager):
        manager.allocate_slots(row, 1, **{name: value})


@pytest.mark.parametrize("count", [-1, 2**31, 2**70])
def test_a_number_of_tokens_out_of_range_is_refused(count: int) -> None:
    manager = make()
    row = manager.add_request(range(8))
    with refused(ValueError, manager, match="num_new_tokens"):
        manager.allocate_slots(row, count)


# -- allocate_step --------------------------------------------------------------------

ROW_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "int32 array": lambda rows: np.array(rows, np.int32),
    "int64 array": lambda rows: np.array(rows, np.int64),
    "uint8 array": lambda rows: np.array(rows, np.uint8),
    "strided array": lambda rows: np.repeat(np.array(rows, np.int32), 2)[::2],
    "big-endian array": lambda rows: np.array(rows, ">i4"),
    "unaligned array": lambda rows: np.frombuffer(
        b"x" + np.array(rows, np.int32).tobytes(), np.int32, offset=1
    ),
    "read-only array": lambda rows: np.frombuffer(
        np.array(rows, np.int32).tobytes(), np.int32
    ),
}


def three_running(num_blocks: int = 21, *groups: Any) -> KVCacheManager:
    """Requests of 3, 4 and 7 tokens, each with one more to compute."""
    manager = make(*groups, num_blocks=num_blocks)
    for row, length in enumerate((3, 4, 7)):
        assert run(manager, [row] * length) == row
    manager.append_step([0, 1, 2], [9, 9, 9])
    return manager


@pytest.mark.parametrize("form", ROW_FORMS)
def test_a_step_takes_rows_in_any_form(form: str) -> None:
    manager = three_running()
    rows, counts = ROW_FORMS[form]([0, 1, 2]), ROW_FORMS[form]([1, 1, 1])
    served, new, starts = manager.allocate_step(rows, counts)
    assert (served, new.tolist(), starts.tolist()) == (3, [5], [0, 0, 1, 1])
    assert new.dtype == starts.dtype == np.int32


def test_a_step_does_what_single_calls_do() -> None:
    groups = FullAttention(4), SlidingWindow(4, 5)
    together, alone = three_running(21, *groups), three_running(21, *groups)
    for lookahead in (0, 2, 0):
        served, new, starts = together.allocate_step(
            [2, 0, 1], [1, 1, 1], num_lookahead_tokens=lookahead
        )
        assert served == 3
        single = [
            alone.allocate_slots(row, 1, num_lookahead_tokens=lookahead)
            for row in (2, 0, 1)
        ]
        parts = [each.tolist() for found in single if found for each in found]
        assert [new[a:b].tolist() for a, b in pairwise(starts)] == parts
        together.append_step([0, 1, 2], [7, 7, 7])
        alone.append_step([0, 1, 2], [7, 7, 7])
        assert picture(together) == picture(alone)


def test_a_step_stops_before_the_first_that_does_not_fit() -> None:
    manager = three_running(num_blocks=5)
    served, new, starts = manager.allocate_step([0, 1, 2], [1, 1, 1])
    assert (served, new.tolist(), starts.tolist()) == (1, [], [0, 0])
    assert [manager.num_computed_tokens(row) for row in range(3)] == [4, 4, 7]
    manager.preempt(2)
    served, new, starts = manager.allocate_step([1], [1])
    assert served == 1
    manager.check()


def test_a_step_is_not_taken_for_the_one_4_294_967_295_steps_ago(
    probe: ModuleType,
) -> None:
    manager = three_running()
    manager.allocate_step([0, 1, 2], [1, 1, 1])
    step = probe.manager_memory(manager)["step"]
    assert step.tolist() == [1]
    step[0] = 2**32 - 1
    served, _, _ = manager.allocate_step([0, 1, 2], [1, 1, 1])
    assert (served, step.tolist()) == (3, [1])
    with refused(ValueError, manager, match="more than once"):
        manager.allocate_step([0, 0], [1, 1])


def test_a_step_of_nobody_serves_nobody() -> None:
    served, new, starts = make().allocate_step([], [])
    assert (served, new.tolist(), starts.tolist()) == (0, [], [0])


def test_a_step_of_many_new_blocks_lists_them_all() -> None:
    manager = make(FullAttention(1), num_blocks=200)
    rows = [run(manager, [row]) for row in range(3)]
    for row in rows:
        manager.append(row, range(50))
    served, new, starts = manager.allocate_step(rows, [50] * 3)
    assert (served, starts.tolist()) == (3, [0, 50, 100, 150])
    assert sorted(new.tolist()) == list(range(4, 154))


@pytest.mark.parametrize(
    ("rows", "counts", "error"),
    [
        ([0, 1], [1], ValueError),
        ([0], [1, 1], ValueError),
        ([0, 0], [1, 1], ValueError),
        ([0, 9], [1, 1], ValueError),
        ([0, -1], [1, 1], ValueError),
        ([0, 3], [1, 1], BlockStateError),
        ([0, 1], [1, 0], ValueError),
        ([0, 1], [1, -1], ValueError),
        ([0, 1], [1, 62], ValueError),
        ([0, 1], [1, 2**31], ValueError),
        ([0, 2**31], [1, 1], ValueError),
        ([0, True], [1, 1], TypeError),
        ([0, 1.0], [1, 1], TypeError),
        ("01", [1, 1], TypeError),
        (0, [1], TypeError),
        (None, [1], TypeError),
        (np.array([0.0]), [1], TypeError),
        (np.array([[0]]), [1], ValueError),
        (np.array(0), [1], ValueError),
        (np.array([2**40]), [1], ValueError),
        ([0], np.array([1.0]), TypeError),
        ([0], None, TypeError),
    ],
    ids=repr,
)
def test_a_step_with_one_wrong_row_or_count_serves_nobody(
    rows: Any, counts: Any, error: type[Exception]
) -> None:
    manager = three_running()
    manager.add_request([1])  # waits in row 3
    with refused(error, manager):
        manager.allocate_step(rows, counts)


@pytest.mark.parametrize("value", [-1, 2**31])
def test_a_step_refuses_a_lookahead_out_of_range(value: int) -> None:
    manager = three_running()
    with refused(ValueError, manager):
        manager.allocate_step([0], [1], num_lookahead_tokens=value)


# -- append, truncate -----------------------------------------------------------------


def test_one_token_may_be_appended_without_a_list() -> None:
    manager = make()
    manager.free(run(manager, range(9)))
    row = manager.add_request(range(7))
    manager.append(row, 7)
    manager.append(row, np.int64(8))  # type: ignore[arg-type]
    assert manager.num_tokens(row) == 9
    assert manager.match(row) == 8


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], ValueError),
        ([1, 2**63], ValueError),
        ([1, 1.0], TypeError),
        ([1, True], TypeError),
        (-1, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (iter([1]), TypeError),
        (np.zeros((1, 1), int), ValueError),
        (np.zeros(1), TypeError),
    ],
    ids=repr,
)
def test_what_is_no_token_is_not_appended(tokens: Any, error: type[Exception]) -> None:
    manager = make()
    manager.free(run(manager, range(9)))
    row = manager.add_request(range(7))
    with refused(error, manager):
        manager.append(row, tokens)
    manager.append(row, [7, 8])
    assert manager.match(row) == 8


def test_a_request_of_hashes_is_given_no_tokens_and_the_other_way_round() -> None:
    manager = make()
    of_hashes = manager.add_request(hashes=(), num_tokens=3)
    of_tokens = manager.add_request([1, 2, 3])
    with refused(TypeError, manager, match="made with hashes"):
        manager.append(of_hashes, [1])
    with refused(TypeError, manager, match="made with hashes"):
        manager.append_step([of_tokens, of_hashes], [1, 1])
    with refused(TypeError, manager, match="made with tokens"):
        manager.append(of_tokens, num_tokens=1)


@pytest.mark.parametrize(
    ("rows", "tokens", "error"),
    [
        ([0, 0], [1, 1], ValueError),
        ([0, 1], [1], ValueError),
        ([0, 9], [1, 1], ValueError),
        ([0, 1], [1, -1], ValueError),
        ([0, 1], [1, 2**63], (TypeError, ValueError)),
        ([0, 1], [1.0, 1.0], TypeError),
        ([0, 1], [True, False], TypeError),
        ([0, 1], ["1", "1"], TypeError),
        ([0.0], [1], TypeError),
    ],
    ids=repr,
)
def test_a_step_with_one_wrong_token_appends_none(
    rows: Any, tokens: Any, error: Any
) -> None:
    manager = three_running()
    with refused(error, manager):
        manager.append_step(rows, tokens)


def test_tokens_appended_by_step_are_hashed_like_others() -> None:
    manager = make()
    manager.free(run(manager, range(9)))
    row = manager.add_request(range(7))
    manager.append_step([row], np.array([7]))
    manager.append_step(np.array([row]), [8])
    assert manager.match(row) == 8


def test_a_request_is_cut_to_what_is_kept() -> None:
    manager = make(enable_caching=False)
    row = run(manager, range(12))
    manager.truncate(row, 5)
    assert (manager.num_tokens(row), manager.num_computed_tokens(row)) == (5, 5)
    assert ids(manager, row) == [1, 2, 3]  # the blocks stay its own
    with refused(ValueError, manager):
        manager.truncate(row, 6)
    with refused(ValueError, manager):
        manager.truncate(row, 0)


def test_what_the_window_gave_back_cannot_be_computed_again() -> None:
    manager = make(SlidingWindow(4, 6), enable_caching=False)
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    for back in (manager.truncate, manager.set_num_computed_tokens):
        with refused(BlockStateError, manager, match="window"):
            back(row, 12)
        back(row, 14)


def test_blocks_that_a_fork_reads_cannot_be_computed_again() -> None:
    manager = make(enable_caching=False)
    row = run(manager, range(12))
    forked = manager.fork(row)
    assert forked is not None
    for each in (row, forked[0]):
        with refused(BlockStateError, manager):
            manager.truncate(each, 11)
    manager.free(forked[0])
    manager.truncate(row, 11)


def test_computed_tokens_can_be_computed_again() -> None:
    manager = make()
    row = manager.add_request(range(8))
    manager.allocate_slots(row, 0, num_external_computed_tokens=8)
    manager.set_num_computed_tokens(row, 7)
    assert manager.allocate_slots(row, 1) is not None
    assert manager.num_computed_tokens(row) == 8
    for count in (-1, 9):
        with refused(ValueError, manager):
            manager.set_num_computed_tokens(row, count)


def test_no_more_tokens_are_in_flight_than_are_computed() -> None:
    manager = make()
    row = run(manager, range(8))
    manager.set_in_flight(row, 8)
    for count in (-1, 9):
        with refused(ValueError, manager):
            manager.set_in_flight(row, count)


# -- cache_blocks ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 9, 2**31])
def test_no_more_tokens_are_cached_than_are_computed(count: int) -> None:
    manager = make()
    row = manager.add_request(range(12))
    manager.allocate_slots(row, 8, num_lookahead_tokens=4)
    with refused(ValueError, manager):
        manager.cache_blocks(row, count)


@pytest.mark.parametrize("num_aliases", range(40))
def test_blocks_are_cached_however_many_further_keys_there_are(
    num_aliases: int,
) -> None:
    manager = make()
    run(manager, [1] * 4)
    pool = manager.block_pool
    for number in range(num_aliases):  # at some number there is room for no key more
        key = bytes([number]) * 32 + bytes(4)
        pool._insert_block_hash(key, pool.blocks[1], None)
    manager.free(run(manager, range(16)))
    assert hit_length(manager, range(17)) == 16
    assert len(pool.cached_block_hash_to_block) == num_aliases + 5
    manager.check()


def test_a_block_that_was_given_a_hash_by_hand_cannot_be_cached() -> None:
    manager = make()
    row = run(manager, range(6))
    manager.append(row, [6, 7])
    block = manager.block_pool.blocks[ids(manager, row)[1]]
    block.set_block_hash(b"by hand", 8)
    with pytest.raises(BlockStateError, match=f"block {block.block_id} of request"):
        manager.allocate_slots(row, 2)
    manager.check()
    block.reset_hash()
    manager.cache_blocks(row, 8)
    assert hit_length(manager, range(9)) == 8


def test_the_end_of_a_prompt_takes_the_place_of_a_shorter_prefix() -> None:
    groups = FullAttention(8, eagle=True), SlidingWindow(4, 5)
    manager = make(*groups, use_eagle=True)
    row = manager.add_request(range(14))
    manager.allocate_slots(row, 9)
    pool, block = manager.block_pool, ids(manager, row)[1]
    shorter = SimpleNamespace(block_hashes=hashes_of(range(100, 108)))
    key = pool.cache_partial_block(shorter, pool.blocks[block], 8, 0, 8)
    assert pool.cached_block_hash_to_block.contain(key, block)
    manager.allocate_slots(row, 5)
    assert pool.blocks[block].block_hash_num_tokens == 12
    assert not pool.cached_block_hash_to_block.contain(key, block)
    manager.check()


def test_only_a_running_request_has_blocks_to_cache() -> None:
    manager = make()
    row = manager.add_request(range(12))
    with refused(BlockStateError, manager, match="not running"):
        manager.cache_blocks(row, 0)


# -- the end of a request -------------------------------------------------------------


def test_blocks_go_back_last_ones_first() -> None:
    manager = make(FullAttention(4), num_blocks=6)
    manager.free(run(manager, range(16)))
    fresh = manager.add_request(range(50, 58))
    new = manager.allocate_slots(fresh, 8)
    assert new is not None
    assert new[0].tolist() == [5, 4]
    assert manager.match(manager.add_request(range(16))) == 12


def test_a_request_that_holds_nothing_can_be_freed() -> None:
    manager = make()
    row = manager.add_request(range(8))
    manager.match(row)
    manager.free(row)
    assert manager.num_requests == 0
    manager.check()


def test_a_request_is_freed_once() -> None:
    manager = make()
    row = run(manager, range(8))
    manager.free(row)
    with refused(ValueError, manager):
        manager.free(row)


def test_a_preempted_request_keeps_its_tokens_and_comes_back() -> None:
    manager = make()
    row = run(manager, range(10))
    manager.append(row, [7, 8])
    manager.preempt(row)
    assert (manager.num_tokens(row), manager.num_computed_tokens(row)) == (12, 0)
    assert ids(manager, row) == []
    assert num_free(manager) == 20
    with refused(BlockStateError, manager, match="not running"):
        manager.preempt(row)
    assert manager.match(row) == 8
    assert manager.allocate_slots(row, 4) is not None


def test_popped_blocks_stay_in_use_until_they_are_freed() -> None:
    manager = make(FullAttention(4), SlidingWindow(4, 5), num_blocks=41)
    row = run(manager, range(16))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    held = [i for g in (0, 1) for i in ids(manager, row, g) if i]
    popped = manager.pop_block_ids(row)
    assert popped.tolist() == held
    assert manager.num_requests == 0
    assert [refs(manager, block) for block in held] == [1] * len(held)
    manager.check()
    manager.block_pool.free_block_ids(popped[::-1])
    assert num_free(manager) == 40


def test_what_waits_has_no_block_to_pop() -> None:
    manager = make()
    assert manager.pop_block_ids(manager.add_request(range(8))).tolist() == []


# -- fork -----------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    manager = make()
    row = run(manager, range(10))
    forked = manager.fork(row)
    assert forked is not None
    child, copies = forked
    assert copies.tolist() == [[3, 4]]
    assert copies.dtype == np.int32
    assert ids(manager, child) == [1, 2, 4]
    assert [refs(manager, block) for block in (1, 2, 3, 4)] == [2, 2, 1, 1]
    assert manager.num_computed_tokens(child) == 10
    manager.check()


def test_a_fork_of_full_blocks_copies_nothing() -> None:
    manager = make()
    forked = manager.fork(run(manager, range(8)))
    assert forked is not None
    assert forked[1].shape == (0, 2)


def test_a_fork_goes_its_own_way() -> None:
    manager = make()
    row = run(manager, range(10))
    forked = manager.fork(row)
    assert forked is not None
    child = forked[0]
    manager.append_step([row, child], [1, 2])
    manager.append_step([row, child], [1, 2])
    manager.allocate_step([row, child], [2, 2])
    manager.free(row)
    manager.free(child)
    for tokens, hit in [([1, 1], 12), ([2, 2], 12), ([1, 2], 8)]:
        other = manager.add_request([*range(10), *tokens, 0])
        assert manager.match(other) == hit
        manager.free(other)


def test_a_fork_does_not_share_blocks_with_drafts() -> None:
    manager = make()
    row = manager.add_request(range(10))
    manager.allocate_slots(row, 13)
    forked = manager.fork(row)
    assert forked is not None
    assert [target for _, target in forked[1].tolist()] == ids(manager, forked[0])[2:]
    assert ids(manager, forked[0])[:2] == ids(manager, row)[:2]


def test_forks_of_a_window_share_null_blocks() -> None:
    manager = make(SlidingWindow(4, 6))
    row = run(manager, range(15))
    manager.append(row, [1, 2])
    manager.allocate_slots(row, 2)
    forked = manager.fork(row)
    assert forked is not None
    assert ids(manager, forked[0])[:4] == ids(manager, row)[:4] == [0, 0, 3, 4]
    assert len(forked[1]) == 1


def test_forks_copy_states_and_share_the_encoders_output() -> None:
    manager = make(Mamba(4, "all"), CrossAttention(4), enable_caching=False)
    row = manager.add_request(range(9))
    manager.allocate_slots(row, 8, num_encoder_tokens=6)
    manager.allocate_slots(row, 1)
    forked = manager.fork(row)
    assert forked is not None
    child, copies = forked
    assert ids(manager, child, 1) == ids(manager, row, 1)
    assert [ids(manager, each, 0)[0] for each in (row, child)] == [0, 0]
    held = ids(manager, row, 0)[1:], ids(manager, child, 0)[1:]
    assert copies.tolist() == [list(pair) for pair in zip(*held, strict=True)]
    manager.check()
    manager.free(row)
    manager.free(child)
    assert num_free(manager) == 20


def test_forks_can_cache_the_blocks_that_they_share() -> None:
    for events in (False, True):
        manager = make(
            FullAttention(4),
            SlidingWindow(8, 9),
            hash_block_size=4,
            enable_kv_cache_events=events,
        )
        row = run(manager, range(4))  # not cached: hits end at multiples of 8
        manager.append(row, range(4, 8))
        forked = manager.fork(row)
        assert forked is not None
        served, _, _ = manager.allocate_step([row, forked[0]], [4, 4])
        assert served == 2
        manager.check()
        assert manager.match(manager.add_request(range(9))) == 8


def test_a_fork_whose_copies_do_not_fit_is_none() -> None:
    manager = make(num_blocks=4)
    row = run(manager, range(10))
    before = picture(manager)
    assert manager.fork(row) is None
    assert picture(manager) == before


def test_only_a_running_request_is_forked_and_only_into_a_row() -> None:
    manager = make()
    waiting = manager.add_request(range(10))
    with refused(BlockStateError, manager, match="not running"):
        manager.fork(waiting)
    rows = [run(manager, range(10)) for _ in range(MOST - 1)]
    with refused(ValueError, manager, match="4 requests already"):
        manager.fork(rows[0])


def test_a_fork_has_its_parents_kind_of_content() -> None:
    manager = make()
    of_hashes = manager.add_request(hashes=hashes_of(range(10)), num_tokens=10)
    manager.allocate_slots(of_hashes, 10)
    forked = manager.fork(of_hashes)
    assert forked is not None
    manager.append(forked[0], num_tokens=1)
    with refused(TypeError, manager):
        manager.append(forked[0], 1)


# -- tables ---------------------------------------------------------------------------


def test_a_table_shows_the_rows_without_a_copy() -> None:
    manager = make()
    row = run(manager, range(10))
    table, view = manager.block_table(), manager.block_ids(row)
    assert table.dtype == view.dtype == np.int32
    assert table.shape[0] == MOST
    assert table[row, : manager.num_blocks(row)].tolist() == view.tolist() == [1, 2, 3]
    assert np.shares_memory(table, view)
    manager.append(row, range(4))
    manager.allocate_slots(row, 4)
    assert table[row, :4].tolist() == [1, 2, 3, 4]


def test_views_cannot_be_written_to() -> None:
    manager = make()
    row = run(manager, range(10))
    for view in (manager.block_table(), manager.block_ids(row)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 7
        with pytest.raises(ValueError):
            view.flags.writeable = True


def test_views_outlive_the_manager() -> None:
    manager = make()
    row = run(manager, range(10))
    table, view = manager.block_table(), manager.block_ids(row)
    del manager
    gc.collect()
    assert view.tolist() == table[row, :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("group", [-1, 1, 2**31, 2**70])
def test_a_group_that_there_is_not_is_refused(group: int) -> None:
    manager = make()
    row = run(manager, range(10))
    for call in (
        lambda: manager.block_ids(row, group),
        lambda: manager.block_table(group),
        lambda: manager.num_blocks(row, group),
        lambda: manager.slot_mapping([row], [1], group),
    ):
        with refused(ValueError, manager, match="kv_cache_group_id"):
            call()
    with refused(TypeError, manager):
        manager.block_ids(row, True)


def test_rows_are_listed_once_when_their_tables_changed() -> None:
    manager = make()
    assert manager.take_changed_rows().tolist() == []
    rows = [run(manager, range(5)) for _ in range(3)]
    assert manager.take_changed_rows().tolist() == rows
    assert manager.take_changed_rows().tolist() == []
    manager.append_step(rows, [1, 1, 1])
    manager.allocate_step(rows, [1, 1, 1])  # no block is needed
    assert manager.take_changed_rows().tolist() == []
    manager.append(2, range(9))
    manager.allocate_slots(2, 9)
    manager.free(0)
    manager.preempt(2)
    changed = manager.take_changed_rows()
    assert changed.tolist() == [2, 0]
    assert changed.dtype == np.int32


# -- slot_mapping ---------------------------------------------------------------------


def test_slots_are_where_the_last_computed_tokens_go() -> None:
    manager = make()
    run(manager, range(3))
    row = run(manager, range(10))
    slots = manager.slot_mapping([row, 0], [3, 2])
    assert slots.tolist() == [3 * 4 + 3, 4 * 4, 4 * 4 + 1, 1 * 4 + 1, 1 * 4 + 2]
    assert slots.dtype == np.int64


def test_slots_are_64_bits_wide() -> None:
    size = 2**29
    manager = make(FullAttention(size), max_model_len=3 * size)
    manager.block_pool.get_new_block_ids(10)
    row = manager.add_request(hashes=(), num_tokens=3 * size)
    manager.allocate_slots(row, 3 * size)
    assert manager.slot_mapping([row], [1]).tolist() == [14 * size - 1]


@pytest.mark.parametrize(
    ("rows", "counts", "error"),
    [
        ([0], [11], ValueError),
        ([0], [-1], ValueError),
        ([0, 1], [1, 1], ValueError),
        ([0, 0], [1], ValueError),
        ([9], [1], ValueError),
        ([0], [1.0], TypeError),
        ("0", [1], TypeError),
    ],
    ids=repr,
)
def test_slots_of_what_is_not_computed_are_refused(
    rows: Any, counts: Any, error: type[Exception]
) -> None:
    manager = make()
    run(manager, range(10))
    manager.add_request([1])
    with refused(error, manager):
        manager.slot_mapping(rows, counts)


def test_slots_of_nobody_are_none() -> None:
    assert make().slot_mapping([], []).shape == (0,)


# -- state ----------------------------------------------------------------------------


def test_occupancy_is_in_blocks_and_in_tokens() -> None:
    manager = make()
    assert manager.occupancy() == (0, 0)
    row = run(manager, range(10))
    assert manager.occupancy() == (3, 10)
    manager.fork(row)
    assert manager.occupancy() == (4, 20)
    assert manager.usage == pytest.approx(4 / 20)


def test_occupancy_of_a_window_is_what_it_holds() -> None:
    manager = make(SlidingWindow(4, 6))
    row = run(manager, range(15))
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert manager.occupancy() == (2, 8)


def test_nothing_is_forgotten_while_a_request_runs() -> None:
    manager = make()
    row = run(manager, range(10))
    with_one = picture(manager)
    assert manager.reset_prefix_cache() is False
    assert picture(manager) == with_one
    manager.free(row)
    assert manager.reset_prefix_cache() is True
    assert manager.match(manager.add_request(range(10))) == 0


def test_events_say_what_was_stored_and_removed_and_of_which_kind() -> None:
    manager = make(
        FullAttention(4), SlidingWindow(4, 6), num_blocks=7, enable_kv_cache_events=True
    )
    row = run(manager, range(9), session_id="s")
    stored = [event for event in manager.take_events() if type(event) is BlockStored]
    assert [
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, e.token_ids)
        for e in stored
    ] == [
        (0, "full_attention", None, list(range(8))),
        (1, "sliding_window", 6, list(range(8))),
    ]
    assert {event.session_id for event in stored} == {"s"}
    manager.free(row)
    run(manager, range(50, 59))
    kinds = [type(event) for event in manager.take_events()]
    assert kinds.count(BlockRemoved) == 4
    assert manager.take_events() == []


def test_there_are_no_events_unless_they_are_wanted() -> None:
    manager = make()
    run(manager, range(10))
    assert manager.take_events() == []


def test_events_and_none_give_the_same_blocks() -> None:
    groups = FullAttention(4), SlidingWindow(8, 9)
    managers = [
        make(*groups, hash_block_size=4, enable_kv_cache_events=events)
        for events in (False, True)
    ]
    tables = []
    for manager in managers:
        first = run(manager, range(20))
        second = run(manager, range(17))
        tables.append([ids(manager, row, g) for row in (first, second) for g in (0, 1)])
        manager.check()
    assert tables[0] == tables[1]


def test_the_default_hash_is_keyed() -> None:
    manager, other = make(), make(hash_fn=keyed)
    for each in (manager, other):
        run(each, range(4))
    hashes = [each.block_pool.blocks[1].block_hash for each in (manager, other)]
    assert hashes[0] == hashes[1]


def test_a_hash_function_that_fails_leaves_the_request_as_it_was() -> None:
    def hash_function(data: Any) -> bytes:
        if failing:
            raise RuntimeError("no hash now")
        return sha256(data)

    failing = False
    manager = make(hash_fn=hash_function)
    row = manager.add_request(range(3))
    failing = True
    with refused(RuntimeError, manager):
        manager.add_request(range(4))
    with refused(RuntimeError, manager):
        manager.append(row, 1)
    with refused(RuntimeError, manager):
        manager.append_step([row], [1])
    failing = False
    manager.append(row, 1)
    assert manager.num_tokens(row) == 4


def test_a_hash_of_another_length_leaves_the_request_as_it_was() -> None:
    length = 32
    manager = make(hash_fn=lambda data: sha256(data)[:length])
    row = manager.add_request(range(7))
    length = 16
    with refused(ValueError, manager, match="32 bytes"):
        manager.append(row, 1)
    length = 32
    manager.append(row, 1)
    assert manager.allocate_slots(row, 8) is not None
    assert len(manager.block_pool.cached_block_hash_to_block) == 2


def test_a_step_whose_last_token_cannot_be_hashed_appends_none() -> None:
    def hash_function(data: Any) -> bytes:
        if failing and data[1][0] == 2:
            raise RuntimeError("no hash for this one")
        return sha256(data)

    failing = False
    manager = make(hash_fn=hash_function)
    rows = [manager.add_request([each] * 3) for each in range(3)]
    failing = True
    with refused(RuntimeError, manager):
        manager.append_step(rows, [7, 7, 2])
    failing = False
    manager.append_step(rows, [7, 7, 2])
    assert [manager.num_tokens(row) for row in rows] == [4, 4, 4]


def test_a_hash_function_that_ends_its_request_is_refused() -> None:
    def hash_function(data: Any) -> bytes:
        if ending:
            manager.free(row)
        return sha256(data)

    ending = False
    manager = make(hash_fn=hash_function)
    row = manager.add_request(range(3))
    ending = True
    with pytest.raises(BlockStateError, match=f"request {row} went away"):
        manager.append(row, 1)
    assert manager.num_requests == 0
    manager.check()


def test_a_hook_cannot_change_requests_in_the_middle_of_a_call() -> None:
    class Meddler(Collector):
        refusals = 0

        def on_block_allocated(self, block: Any) -> None:
            try:
                manager.free(row)
            except BlockStateError:
                self.refusals += 1

    meddler = Meddler()
    manager = make(metrics_collector=meddler)
    row = manager.add_request(range(10))
    assert manager.allocate_slots(row, 10) is not None
    assert meddler.refusals == 3
    assert ids(manager, row) == [1, 2, 3]
    manager.check()


def test_check_finds_a_block_that_was_freed_behind_the_managers_back() -> None:
    manager = make()
    row = run(manager, range(10))
    manager.block_pool.free_block_ids(ids(manager, row)[-1:])
    with pytest.raises(AssertionError, match="block 3"):
        manager.check()
