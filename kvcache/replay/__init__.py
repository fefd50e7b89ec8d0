"""Replays a trace of requests through pools of several sizes at once.

Holds the pools of one replay. Invariant: all pools see the same requests in the
same order, one at a time, and what they do depends on nothing else. Costs: the
trace is read once, whatever the number of pools, and never held in memory.
Thread-safety: replays share nothing; one replay runs in one thread.

    with Trace("requests.jsonl.gz") as trace:
        print(replay(trace, [1_000, 5_000, 20_000]).to_table())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from kvcache.replay._simulate import PoolReplay
from kvcache.replay.batches import Source, batches
from kvcache.replay.report import Report, Run
from kvcache.replay.trace import Trace, TraceError

__all__ = ["Report", "Run", "Source", "Trace", "TraceError", "replay"]


def replay(
    source: Source,
    sizes: Iterable[int],
    *,
    record_assignment: bool = True,
    on_batch: Callable[[], object] | None = None,
) -> Report:
    """Run all requests of a source through one pool per size.

    A request looks up its longest cached prefix, allocates blocks for the rest,
    caches its full blocks and ends at once; one that does not fit is skipped.

    Args:
        source: The requests: a `Trace`, or a `kvcache.replay.workload.Workload`.
        sizes: Blocks of each pool, null block included.
        record_assignment: Whether to digest all block ids handed out, as
            `assignment_sha256`.
        on_batch: Called after each batch of requests, for instance to show
            `source.done`.

    Returns:
        One run per size, in the order of `sizes`.

    Raises:
        TraceError: A row of the trace is malformed.
        ValueError: A size is out of range.
    """
    pools = [
        PoolReplay(size, source.block_size, record_assignment=record_assignment)
        for size in sizes
    ]
    for batch in batches(source, source.block_size):
        for pool in pools:
            pool.run(batch.input_lengths, batch.keys, batch.indptr)
        if on_batch is not None:
            on_batch()
    runs = [cast(Run, pool.result()) for pool in pools]
    for run in runs:
        run["hit_rate"] = round(run["hit_rate"], 6)
    return Report(source.name, source.block_size, runs)
