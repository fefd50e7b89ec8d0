"""A manager replaying requests one at a time, a batch of them a call.

Stores: what `ReplayedPool` does.
Invariant: between requests no block is in use, so every hit is a free block.
Costs: O(1) a block; no Python object a request. Threads: one at a time.
"""
cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t

import time

from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache.manager.calls cimport manager_free
from kvcache.replay._pool cimport KEY_BYTES, ReplayedPool


cdef class PoolReplay(ReplayedPool):
    """One pool replaying a trace, batch by batch (rules: see `kvcache.replay`).

    Args:
        num_blocks: Blocks of the pool, null block included.
        block_size: Tokens a block.
        record_assignment: Whether to digest all block ids handed out.

    Raises:
        ValueError: An argument is out of range.
    """

    @cython.critical_section
    def __init__(self, num_blocks, block_size, *, record_assignment=True):
        self.make(num_blocks, block_size, 1, INT64_MAX, record_assignment)

    @cython.critical_section
    def run(self, input_lengths, keys, indptr):
        """Run m requests.

        Args:
            input_lengths: Prompt tokens, int64, shape (m,).
            keys: Keys of all full blocks, uint8, shape (k, 16), C-contiguous.
            indptr: Request i has keys[indptr[i]:indptr[i + 1]], exactly
                input_lengths[i] // block_size of them; int64, shape (m + 1,).

        Raises:
            ValueError: The arrays do not fit together. Nothing was run.
        """
        self.require_made()
        cdef const int64_t* lengths = <const int64_t*> self.data_of(
            input_lengths, "int64", (None,)
        )
        cdef const uint8_t* data = <const uint8_t*> self.data_of(
            keys, "uint8", (None, KEY_BYTES)
        )
        cdef Py_ssize_t i, m = len(input_lengths)
        cdef const int64_t* starts = <const int64_t*> self.data_of(
            indptr, "int64", (m + 1,)
        )
        cdef int64_t num_keys = len(keys)
        for i in range(m):
            if lengths[i] < 0 or not 0 <= starts[i] <= starts[i + 1] <= num_keys:
                raise ValueError(f"request {i} has no valid length or keys")
            if starts[i + 1] - starts[i] != lengths[i] // self.block_size:
                raise ValueError(
                    f"request {i} of {lengths[i]} tokens has"
                    f" {starts[i + 1] - starts[i]} keys"
                )
        began = time.perf_counter_ns()
        for i in range(m):
            self.run_one(lengths[i], data + KEY_BYTES * starts[i])
        self.flush()
        self.nanoseconds += time.perf_counter_ns() - began

    cdef int run_one(self, int64_t length, const uint8_t* keys) except -1:
        cdef int32_t row
        cdef int64_t hits
        if length == 0:
            return self.count_empty()
        if length > self.most_tokens:
            return self.count_skipped()
        row = self.open(length, keys)
        # It fits: all blocks are free.
        hits = self.admit(row)
        self.requests += 1
        self.prompt_tokens += length
        self.hit_tokens += hits
        self.count_blocks(row, hits)
        return manager_free(self.m, row)

    @cython.critical_section
    def result(self):
        """The totals, by the names that `kvcache replay --json` gives them.

        Also `seconds` spent in `run`, and `blocks` handled; `assignment_sha256` only
        if it was recorded.
        """
        return self.totals()
