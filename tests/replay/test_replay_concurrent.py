"""Requests in flight side by side: admission, decoding, preemption, the clock."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_concurrent import reference_run

from kvcache.replay import Trace, replay
from kvcache.replay._concurrent import ConcurrentReplay
from kvcache.replay._simulate import PoolReplay
from kvcache.replay.arrivals import Arrivals, in_order_of_arrival
from kvcache.replay.batches import Arrival, Row, batches
from kvcache.replay.workload import Workload

SIZE = 4


class Requests:
    """Requests given as a list."""

    unit, name, block_size, done, total = "requests", None, SIZE, 0, 0

    def __init__(self, *arrivals: Arrival) -> None:
        """Keep them."""
        self.given = arrivals

    def __iter__(self) -> Iterator[Row]:
        """Yield them without their times."""
        return ((length, ids) for length, ids, _, _ in self.given)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield them."""
        return iter(self.given)


def fresh(length: int, output: int, time: float | None = 0, first: int = 0) -> Arrival:
    """Make a request whose blocks have ids of their own from `first` on."""
    return length, list(range(first, first + length // SIZE)), time, output


def run_of(
    arrivals: Iterable[Arrival], num_blocks: int, concurrency: int, step_ms: int = 10
) -> dict[str, Any]:
    source = Requests(*arrivals)
    report = replay(source, [num_blocks], concurrency=concurrency, step_ms=step_ms)
    return dict(report.runs[0])


# Few ids, so that paths are shared; short and long outputs; some at the same time.
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4),
        st.integers(0, SIZE - 1),
        st.none() | st.integers(0, 60) | st.floats(0, 60),
        st.integers(0, 14),
    ),
    max_size=20,
).map(
    lambda rows: [
        (len(ids) * SIZE + rest, ids, time, output) for ids, rest, time, output in rows
    ]
)


@given(
    requests,
    st.integers(1, 14),
    st.integers(1, 6),
    st.sampled_from([1, 10, 0.3]),
    st.integers(1, 9),
)
def test_the_compiled_replay_does_what_the_reference_does(
    rows: list[Arrival],
    num_blocks: int,
    concurrency: int,
    step_ms: float,
    max_steps: int,
) -> None:
    arrivals = in_order_of_arrival(Requests(*rows))
    compiled = ConcurrentReplay(num_blocks, SIZE, arrivals, concurrency, step_ms)
    while compiled.advance(max_steps):
        compiled.manager.check()
    compiled.manager.check()
    result = compiled.result()
    del result["seconds"]
    assert result == reference_run(num_blocks, SIZE, arrivals, concurrency, step_ms)


def alone_and_at_once(source: Any, num_blocks: int) -> dict[str, Any]:
    """Replay one request after the other, each of one token, by arrival time."""
    arrivals = in_order_of_arrival(source)
    ones = np.ones_like(arrivals.output_lengths)
    arrivals = arrivals._replace(output_lengths=ones)
    replayed = ConcurrentReplay(num_blocks, source.block_size, arrivals, 1, 1)
    while replayed.advance(1000):
        pass
    return replayed.result()


@given(requests, st.integers(1, 20))
def test_one_in_flight_that_generates_one_token_is_the_replay_without_concurrency(
    rows: list[Arrival], num_blocks: int
) -> None:
    source = Requests(*((length, ids, None, 1) for length, ids, _, _ in rows))
    pool = PoolReplay(num_blocks, SIZE)
    for batch in batches(source, SIZE):
        pool.run(batch.input_lengths, batch.keys, batch.indptr)
    expected = pool.result()
    told = alone_and_at_once(source, num_blocks)
    del expected["seconds"]
    assert {name: told[name] for name in expected} == expected


def test_that_holds_of_a_real_trace_and_what_stock_vllm_gives(
    shared_traces: Path,
) -> None:
    name = "mooncake_synthetic.jsonl.gz"
    runs = json.loads((shared_traces / "expected.json").read_text())[name]["runs"]
    num_blocks, expected = next(iter(runs.items()))
    with Trace(shared_traces / name) as trace:
        told = alone_and_at_once(trace, int(num_blocks))
    assert {name: told[name] for name in expected} == {
        **expected,
        "hit_rate": pytest.approx(expected["hit_rate"], abs=1e-6),
    }


# Decoding


def test_a_request_takes_a_step_for_each_token_that_it_generates() -> None:
    run = run_of([fresh(8, 5)], 10, 1)
    assert (run["steps"], run["mean_running"], run["max_running"]) == (5, 1.0, 1)


@pytest.mark.parametrize("output", [0, 1])
def test_the_step_of_the_prompt_generates_the_first_token(output: int) -> None:
    assert run_of([fresh(8, output)], 10, 1)["steps"] == 1


def test_the_last_token_needs_no_slot() -> None:
    # 8 + 4 tokens are computed; with one more a fourth block is begun.
    assert run_of([fresh(8, 5)], 10, 1)["peak_blocks"] == 3
    assert run_of([fresh(8, 6)], 10, 1)["peak_blocks"] == 4


def test_blocks_of_generated_tokens_are_cached_but_no_other_prompt_hits_them() -> None:
    run = run_of([fresh(8, 9), fresh(16, 1, 1000)], 20, 1)
    # The second request repeats the first one's prompt, two blocks.
    assert run["hit_tokens"] == 8
    # Two of the prompt, two generated, two behind the second one's hits.
    assert run["cached_blocks"] == 6


# The clock


def test_the_clock_jumps_to_the_next_arrival_when_nothing_runs() -> None:
    run = run_of([fresh(4, 2, 5), fresh(4, 2, 1e12)], 10, 4)
    assert (run["steps"], run["max_running"]) == (4, 1)


@pytest.mark.parametrize(("time", "steps"), [(0, 4), (9, 5), (10, 5), (11, 6), (39, 8)])
def test_a_request_joins_at_the_first_step_that_begins_after_it_arrives(
    time: int, steps: int
) -> None:
    run = run_of([fresh(4, 4), fresh(4, 4, time, 10)], 10, 2, step_ms=10)
    assert run["steps"] == steps


def test_requests_run_in_the_order_of_their_times_and_else_in_that_of_the_file() -> (
    None
):
    arrivals = in_order_of_arrival(
        Requests(
            fresh(1, 1, 7), fresh(2, 2, 3), fresh(3, 3, None), fresh(4, 4, 0),
            fresh(5, 5, 3),
        )
    )  # fmt: skip
    assert arrivals.input_lengths.tolist() == [4, 2, 3, 5, 1]
    assert arrivals.output_lengths.tolist() == [4, 2, 3, 5, 1]
    assert arrivals.times.tolist() == [0, 3, 3, 3, 7]


def test_no_more_requests_run_than_the_concurrency() -> None:
    rows = [fresh(4, 3, 0, 10 * i) for i in range(5)]
    run = run_of(rows, 50, 2)
    assert (run["max_running"], run["steps"]) == (2, 9)
    assert run_of(rows, 50, 9)["steps"] == 3


# Room


def test_a_request_waits_until_its_whole_prompt_fits_and_nobody_overtakes_it() -> None:
    rows = [fresh(12, 3), fresh(12, 1, 0, 10), fresh(4, 1, 0, 20)]
    # The small one would fit beside the first; it runs with the second.
    run = run_of(rows, 5, 3)
    assert (run["steps"], run["preemptions"], run["max_running"]) == (4, 0, 2)


def test_the_newest_request_is_preempted_and_finds_its_own_blocks_again() -> None:
    # Each has two blocks, and 8 generated tokens to come; four blocks are there.
    rows = [fresh(7, 6), fresh(7, 6, 0, 10)]
    run = run_of(rows, 5, 2)
    assert run["preemptions"] == 1
    # Of its 8 computed tokens, the first block's 4 are still cached when it resumes:
    # the other one was taken for the request that stayed.
    assert run["recomputed_tokens"] == 4
    # First admissions alone count for the hit rate.
    assert (run["prompt_tokens"], run["hit_tokens"]) == (14, 0)
    assert run["peak_blocks"] == 4


def test_what_would_not_fit_alone_is_skipped() -> None:
    # Three blocks are there: 12 tokens fit, of which the last needs no slot.
    rows = [fresh(13, 1), fresh(8, 6), fresh(8, 5), fresh(0, 3)]
    run = run_of(rows, 4, 4)
    assert (run["requests"], run["skipped"], run["prompt_tokens"]) == (4, 2, 8)


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_where_nothing_fits_nothing_runs(num_blocks: int) -> None:
    run = run_of([fresh(3, 2**63 - 1), fresh(5, 0)], num_blocks, 4)
    assert (run["requests"], run["skipped"], run["steps"]) == (2, 2, 0)


# Sources and arguments


def test_generated_chats_all_wait_from_the_start_and_generate_their_replies() -> None:
    workload = Workload(sessions=2, turns=3)
    given = list(workload.arrivals())
    assert [(length, ids) for length, ids, _, _ in given] == list(workload)
    assert {time for _, _, time, _ in given} == {None}
    run = replay(workload, [1000], concurrency=1).runs[0]
    assert run["steps"] == sum(output for _, _, _, output in given)


def test_a_source_without_requests_takes_no_step() -> None:
    run = run_of([], 10, 4)
    assert (run["requests"], run["steps"], run["mean_running"]) == (0, 0, 0.0)


def arrays(**parts: Any) -> Arrivals:
    return in_order_of_arrival(Requests(fresh(8, 1), fresh(4, 1)))._replace(**parts)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"input_lengths": np.array([8, -1])}, "request 1 has a negative length"),
        ({"output_lengths": np.array([-1, 1])}, "request 0 has a negative length"),
        ({"output_lengths": np.array([1])}, r"shape \(2,\), got \(1,\)"),
        ({"times": np.array([1.0, 0.0])}, "request 1 arrives before"),
        ({"times": np.array([np.nan, 0.0])}, "request 0 arrives before"),
        ({"times": np.array([0, 1])}, "aligned float64 array"),
        ({"starts": np.array([2, 0])}, "request 0 has no valid keys"),
        ({"starts": np.array([0, -1])}, "request 1 has no valid keys"),
        ({"keys": np.zeros((3, 8), np.uint8)}, "expected an array of shape"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    parts: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        ConcurrentReplay(10, SIZE, arrays(**parts), 1, 1)


@pytest.mark.parametrize(
    ("num_blocks", "size", "concurrency", "step_ms", "fault"),
    [
        (0, SIZE, 1, 1, "num_gpu_blocks|num_blocks"),
        (9, 0, 1, 1, "block_size"),
        (9, SIZE, 0, 1, "concurrency must be"),
        (9, SIZE, 1, 0, "step_ms must be above 0"),
    ],
)
def test_an_argument_out_of_range_is_named(
    num_blocks: int, size: int, concurrency: int, step_ms: float, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        ConcurrentReplay(num_blocks, size, arrays(), concurrency, step_ms)


def test_a_replay_is_made_once() -> None:
    replayed = ConcurrentReplay(9, SIZE, arrays(), 1, 1)
    with pytest.raises(ValueError, match="already made"):
        replayed.__init__(9, SIZE, arrays(), 1, 1)  # type: ignore[misc]
    with pytest.raises(ValueError, match="not made"):
        ConcurrentReplay.__new__(ConcurrentReplay).advance(1)
