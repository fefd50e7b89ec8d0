"""Replays a trace of requests through pools of several sizes at once.

Holds the pools of one replay, each driven by a `kvcache.manager.KVCacheManager`.
Invariant: all pools see the same requests in the same order, and what they do depends
on nothing else. Costs: the trace is read once, whatever the number of pools, and only
held in memory where requests run side by side.
Thread-safety: replays share nothing; one replay runs in one thread.

    with Trace("requests.jsonl.gz") as trace:
        print(replay(trace, [1_000, 5_000, 20_000]).to_table())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from kvcache.replay._concurrent import ConcurrentReplay
from kvcache.replay._simulate import PoolReplay
from kvcache.replay.arrivals import in_order_of_arrival
from kvcache.replay.batches import Source, batches
from kvcache.replay.report import Report, Run
from kvcache.replay.trace import Trace, TraceError

STEP_MS = 25
# Between two looks at Ctrl-C.
_MANY_STEPS = 10_000

__all__ = ["STEP_MS", "Report", "Run", "Source", "Trace", "TraceError", "replay"]


def replay(
    source: Source,
    sizes: Iterable[int],
    *,
    concurrency: int | None = None,
    step_ms: int = STEP_MS,
    record_assignment: bool = True,
    on_batch: Callable[[], object] | None = None,
) -> Report:
    """Run all requests of a source through one pool per size.

    A request looks up its longest cached prefix, allocates blocks for the rest,
    caches its full blocks and ends at once; one that does not fit is skipped.

    With a concurrency, requests arrive by their timestamps and run side by side. All
    that happens happens in steps of equal length, whatever is in them; where nothing
    runs, the clock jumps to the next arrival. A step first gives each running request
    a slot for its last token, in the order in which they were admitted. Whenever there
    is no block for one, the request admitted last is preempted: it gives its blocks
    back and waits in front of all others. A step in which nobody was preempted then
    admits those that wait, first come first served, while they are fewer than
    `concurrency` and the first one's tokens fit; these are computed in one go, but for
    those that are cached. At the end of the step each running request has generated
    one token, and ends with the last of its `output_length`. Blocks that generated
    tokens fill are cached, as content that no other request has: one that was
    preempted finds them again. Skipped is what would not fit alone.

    Args:
        source: The requests: a `Trace`, or a `kvcache.replay.workload.Workload`.
        sizes: Blocks of each pool, null block included.
        concurrency: Most requests running at a time; None for one after the other,
            without their timestamps and output.
        step_ms: How long a step lasts, in milliseconds.
        record_assignment: Whether to digest all block ids handed out, as
            `assignment_sha256`.
        on_batch: Called after each batch of requests, for instance to show
            `source.done`.

    Returns:
        One run per size, in the order of `sizes`.

    Raises:
        TraceError: A row of the trace is malformed.
        ValueError: A size, the concurrency or the length of a step is out of range.
    """
    if concurrency is not None:
        arrivals = in_order_of_arrival(source, on_batch)
        side_by_side = [
            ConcurrentReplay(
                size,
                source.block_size,
                arrivals,
                concurrency,
                step_ms,
                record_assignment=record_assignment,
            )
            for size in sizes
        ]
        for each in side_by_side:
            while each.advance(_MANY_STEPS):
                pass
        runs = [_rounded(each.result()) for each in side_by_side]
        return Report(source.name, source.block_size, runs, concurrency, step_ms)
    pools = [
        PoolReplay(size, source.block_size, record_assignment=record_assignment)
        for size in sizes
    ]
    for batch in batches(source, source.block_size):
        for pool in pools:
            pool.run(batch.input_lengths, batch.keys, batch.indptr)
        if on_batch is not None:
            on_batch()
    runs = [_rounded(pool.result()) for pool in pools]
    return Report(source.name, source.block_size, runs)


def _rounded(result: dict[str, int | float | str]) -> Run:
    run = cast(Run, result)
    run["hit_rate"] = round(run["hit_rate"], 6)
    if "mean_running" in run:
        run["mean_running"] = round(run["mean_running"], 6)
    return run
