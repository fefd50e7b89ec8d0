"""`ReferenceReplay`: a pool replaying a trace, in plain Python.

Holds the free queue as an ordered dict (front first) and the cached blocks of
each key, oldest first. Requests run one at a time, so between two requests all
blocks but the null block, id 0, are free. Short enough to be obviously right;
about a microsecond a block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

COUNTS = (
    "requests",
    "skipped",
    "prompt_tokens",
    "hit_tokens",
    "new_blocks",
    "evictions",
)


class ReferenceReplay:
    """The three methods of `kvcache.replay._simulate.PoolReplay`."""

    def __init__(
        self, num_blocks: int, block_size: int, *, record_assignment: bool = True
    ) -> None:
        """Make a pool whose free queue holds blocks 1 to `num_blocks - 1`."""
        self.block_size = block_size
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.key_of: dict[int, bytes] = {}
        self.cached: defaultdict[bytes, list[int]] = defaultdict(list)
        self.digest = hashlib.sha256() if record_assignment else None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.num_blocks = num_blocks
        self.blocks = 0
        self.seconds = 0.0

    def run(
        self,
        input_lengths: NDArray[np.int64],
        keys: NDArray[np.uint8],
        indptr: NDArray[np.int64],
    ) -> None:
        """Run a batch of requests."""
        start = perf_counter()
        for i, length in enumerate(input_lengths.tolist()):
            row = [key.tobytes() for key in keys[indptr[i] : indptr[i + 1]]]
            line = self._request(length, row) if length else ""
            if self.digest is not None:
                self.digest.update(f"{line}\n".encode())
            self.counts["requests"] += 1
        self.seconds += perf_counter() - start

    def _request(self, length: int, keys: list[bytes]) -> str:
        size, counts = self.block_size, self.counts
        assert len(keys) == length // size
        blocks: list[int] = []
        # The last token is always computed, so its block is never a hit.
        for key in keys[: (length - 1) // size]:
            if not self.cached.get(key):
                break
            blocks.append(self.cached[key][0])
        hits = len(blocks)
        needed = -(-length // size) - hits
        if needed > len(self.free) - hits:
            counts["skipped"] += 1
            return "skip"
        for block in blocks:
            del self.free[block]
        for _ in range(needed):
            block, _ = self.free.popitem(last=False)
            if block in self.key_of:
                key = self.key_of.pop(block)
                self.cached[key].remove(block)
                if not self.cached[key]:
                    del self.cached[key]
                counts["evictions"] += 1
            blocks.append(block)
        for block, key in list(zip(blocks, keys, strict=False))[hits:]:
            self.key_of[block] = key
            self.cached[key].append(block)
        for block in reversed(blocks):
            self.free[block] = None
            self.free.move_to_end(block, last=block in self.key_of)
        counts["prompt_tokens"] += length
        counts["hit_tokens"] += hits * size
        counts["new_blocks"] += needed
        self.blocks += len(blocks)
        return f"{hits * size}: {' '.join(map(str, blocks))}"

    def result(self) -> dict[str, int | float | str]:
        """Return the fields of a run, and the time it took."""
        prompt_tokens = self.counts["prompt_tokens"]
        return {
            "num_blocks": self.num_blocks,
            **self.counts,
            "hit_rate": self.counts["hit_tokens"] / max(prompt_tokens, 1),
            "cached_blocks": len(self.cached),
            "assignment_sha256": self.digest.hexdigest() if self.digest else "",
            "seconds": self.seconds,
            "blocks": self.blocks,
        }
