"""Puts a source's requests into the order in which they arrive, as arrays.

Holds all requests of a replay. Invariant: requests that arrive at the same time keep
the source's order, and one without a time arrives with the one before it. Costs: 16
bytes a block and 32 a request, beside those of `batches`. Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.replay.batches import KEY_BYTES, Batch, Row, Source, batches

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Arrivals(NamedTuple):
    """Requests, those that arrive first in front.

    Attributes:
        input_lengths: Prompt tokens of each request, int64, shape (m,).
        output_lengths: Tokens that it generates, int64, shape (m,).
        times: When it arrives, in milliseconds, float64, shape (m,), ascending.
        starts: Its full blocks have the keys from this one on, int64, shape (m,).
        keys: Keys of all full blocks, uint8, shape (k, 16), C-contiguous.
    """

    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    times: NDArray[np.float64]
    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]


def in_order_of_arrival(
    source: Source, on_batch: Callable[[], object] | None = None
) -> Arrivals:
    """Read all requests of a source.

    Args:
        source: The requests.
        on_batch: Called from time to time while they are read.

    Raises:
        TraceError: A row of a trace is malformed.
    """
    outputs: list[int] = []
    times: list[float] = []

    def rows() -> Iterator[Row]:
        time = 0.0
        for length, ids, timestamp, output_length in source.arrivals():
            time = time if timestamp is None else timestamp
            times.append(time)
            outputs.append(output_length)
            yield length, ids

    packed: list[Batch] = []
    for batch in batches(rows(), source.block_size):
        packed.append(batch)
        if on_batch is not None:
            on_batch()
    lengths = np.concatenate(
        [np.zeros(0, np.int64), *(b.input_lengths for b in packed)]
    )
    keys = np.concatenate(
        [np.zeros((0, KEY_BYTES), np.uint8), *(b.keys for b in packed)]
    )
    full = lengths // source.block_size
    order = np.argsort(np.array(times, np.float64), kind="stable")
    return Arrivals(
        lengths[order],
        np.array(outputs, np.int64)[order],
        np.array(times, np.float64)[order],
        (np.cumsum(full) - full)[order],
        keys,
    )
