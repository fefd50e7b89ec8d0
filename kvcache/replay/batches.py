"""Packs requests into batches of arrays, which every pool of a replay runs.

Holds the requests of one batch. Invariant: two blocks have equal keys if and
only if their ids and those of all blocks before them are equal. Costs: those of
`PathNumbers`, once, whatever the number of pools. Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvcache.replay.paths import PathNumbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = tuple[int, Sequence[int]]
"""A request: its prompt's tokens, and an id for each full block, or more."""
Arrival = tuple[int, Sequence[int], float | None, int]
"""A row, when it arrives in milliseconds, or None, and how many tokens it generates."""

BATCH_BLOCKS = 8192
KEY_BYTES = 16


class Source(Protocol):
    """Requests to replay, and how far they have been read."""

    @property
    def unit(self) -> str:
        """What `done` and `total` count."""

    @property
    def name(self) -> str | None:
        """File name, or None for generated requests."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    @property
    def done(self) -> int:
        """How many of `total` units have been read."""

    @property
    def total(self) -> int:
        """Units in all, 0 if that is unknown."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the requests in the order in which they run."""

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the same requests, with when they arrive and what they generate."""


class Batch(NamedTuple):
    """Consecutive requests.

    Attributes:
        input_lengths: Prompt tokens of each request, int64, shape (m,).
        keys: Keys of all full blocks, uint8, shape (k, 16), C-contiguous.
        indptr: Request i has `keys[indptr[i]:indptr[i + 1]]`, int64, shape
            (m + 1,).
    """

    input_lengths: NDArray[np.int64]
    keys: NDArray[np.uint8]
    indptr: NDArray[np.int64]


def batches(
    rows: Iterable[Row], block_size: int, batch_blocks: int = BATCH_BLOCKS
) -> Iterator[Batch]:
    """Pack rows into batches.

    Args:
        rows: Requests; ids past the last full block are ignored.
        block_size: Tokens a block.
        batch_blocks: A batch ends with the request that brings its blocks and
            requests together to this number.

    Yields:
        Batches, none of them empty.
    """
    numbers = PathNumbers()
    lengths: list[int] = []
    ids: list[int] = []
    ends = [0]
    for length, row_ids in rows:
        ids += row_ids[: length // block_size]
        lengths.append(length)
        ends.append(len(ids))
        if len(ids) + len(lengths) >= batch_blocks:
            yield _pack(lengths, numbers.of(ids, ends), ends)
            lengths, ids, ends = [], [], [0]
    if lengths:
        yield _pack(lengths, numbers.of(ids, ends), ends)


def _pack(lengths: list[int], paths: NDArray[np.int64], ends: list[int]) -> Batch:
    words = np.zeros((len(paths), KEY_BYTES // 8), np.int64)
    words[:, 0] = paths
    return Batch(
        np.array(lengths, np.int64),
        words.view(np.uint8).reshape(-1, KEY_BYTES),
        np.array(ends, np.int64),
    )
