"""One pool replaying requests, a batch of them at a time, through the C surface.

Stores: a `BlockPool`, the totals of the run, and the digest of all ids handed out.
Invariant: between requests no block is in use, so every hit is a free block.
Costs: O(1) a block; no Python object a request. Threads: one at a time.
"""
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int64_t, uint8_t

import hashlib
import time

from kvcache._memory cimport allocate
from kvcache._types cimport NO_NUM_TOKENS, Key, block_id_t, make_key
from kvcache.block_pool cimport BlockPool
from kvcache.hash_index cimport (
    MATCH_CHUNK,
    index_add_row,
    index_chain,
    index_match,
)
from kvcache.pool_state cimport (
    PoolState,
    pool_free,
    pool_get,
    pool_touch,
)

cnp.import_array()

cdef enum:
    MAX_DIGITS = 20         # of a decimal int64, with what separates it
    TEXT_BYTES = 65536


cdef class PoolReplay:
    """One pool replaying a trace, batch by batch (rules: see `kvcache.replay`).

    Args:
        num_blocks: Blocks of the pool, null block included.
        block_size: Tokens a block.
        record_assignment: Whether to digest all block ids handed out.

    Raises:
        ValueError: An argument is out of range.
    """

    cdef BlockPool pool
    cdef Py_ssize_t block_size
    cdef object digest          # hashlib's sha256, or None
    cdef block_id_t* ids        # room for all blocks of the pool
    cdef char* text             # what goes into the digest next
    cdef Py_ssize_t text_length
    cdef int64_t requests, skipped, prompt_tokens, hit_tokens, new_blocks, evictions
    cdef int64_t blocks, nanoseconds

    def __init__(self, num_blocks, block_size, *, record_assignment=True):
        if self.pool is not None:
            raise ValueError("the replay is already made")
        cdef BlockPool pool = BlockPool(num_blocks, True, block_size)
        self.block_size = block_size
        if record_assignment:
            self.digest = hashlib.sha256()
            self.text = <char*> allocate(TEXT_BYTES, 1, "text")
        self.ids = <block_id_t*> allocate(num_blocks, sizeof(block_id_t), "block ids")
        self.pool = pool

    def __dealloc__(self):
        PyMem_RawFree(self.text)
        PyMem_RawFree(self.ids)

    def run(
        self,
        cnp.ndarray input_lengths not None,
        cnp.ndarray keys not None,
        cnp.ndarray indptr not None,
    ):
        """Run m requests.

        Args:
            input_lengths: Prompt tokens, int64, shape (m,).
            keys: Keys of all full blocks, uint8, shape (k, 16), C-contiguous.
            indptr: Request i has keys[indptr[i]:indptr[i + 1]], exactly
                input_lengths[i] // block_size of them; int64, shape (m + 1,).

        Raises:
            ValueError: The arrays do not fit together. Nothing was run.
        """
        cdef Py_ssize_t i, m = cnp.PyArray_SIZE(input_lengths)
        for array, kind in zip(
            (input_lengths, indptr, keys), ("int64", "int64", "uint8")
        ):
            flags = array.flags
            if array.dtype != kind or not (flags.c_contiguous and flags.aligned):
                raise ValueError(f"expected a C-contiguous, aligned {kind} array")
        cdef tuple shape = (<object> keys).shape
        if self.pool is None or len(shape) != 2 or shape[1] != 16:
            raise ValueError(f"expected keys of shape (k, 16), got {shape}")
        if cnp.PyArray_SIZE(indptr) != m + 1:
            raise ValueError(
                f"{cnp.PyArray_SIZE(indptr)} index pointers for {m} requests"
            )
        cdef int64_t* lengths = <int64_t*> cnp.PyArray_DATA(input_lengths)
        cdef int64_t* starts = <int64_t*> cnp.PyArray_DATA(indptr)
        cdef uint8_t* data = <uint8_t*> cnp.PyArray_DATA(keys)
        cdef int64_t num_keys = cnp.PyArray_DIM(keys, 0)
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
            self.run_one(lengths[i], data + 16 * starts[i])
        self.flush()
        self.nanoseconds += time.perf_counter_ns() - began

    cdef int run_one(self, int64_t length, const uint8_t* keys) except -1:
        cdef PoolState* pool = &self.pool.state
        cdef int64_t full = length // self.block_size
        cdef int64_t total = full + (length % self.block_size != 0)
        # The last token is always computed, so its block is never looked up.
        cdef int64_t limit = 0 if length == 0 else (length - 1) // self.block_size
        cdef int64_t hits = 0, i, count
        cdef const uint8_t* batch[MATCH_CHUNK]
        cdef Key key
        cdef block_id_t swap
        self.requests += 1
        if total > pool.queue.num_free:
            # Every hit is free: hits and new blocks come out of the same number.
            self.skipped += 1
            return self.write_text(b"skip\n", 5)
        while hits < limit:
            count = min(limit - hits, <int64_t> MATCH_CHUNK)
            for i in range(count):
                batch[i] = keys + 16 * (hits + i)
            i = index_match(
                pool.index, self.ids[hits - 1] if hits else 0, batch, 16, 0, count,
                self.ids + hits,
            )
            hits += i
            if i < count:
                break
        pool_touch(pool, self.ids, hits)
        self.evictions += pool_get(pool, self.ids + hits, total - hits)
        for i in range(hits, full):
            make_key(&key, keys + 16 * i, 16, 0)
            index_add_row(pool.index, self.ids[i], &key, NO_NUM_TOKENS)
            index_chain(pool.index, self.ids[i - 1] if i else 0, self.ids[i])
        self.prompt_tokens += length
        self.hit_tokens += hits * self.block_size
        self.new_blocks += total - hits
        self.blocks += total
        self.write_ids(hits * self.block_size, total)
        for i in range(total // 2):
            swap = self.ids[i]
            self.ids[i] = self.ids[total - 1 - i]
            self.ids[total - 1 - i] = swap
        pool_free(pool, self.ids, total)
        return 0

    cdef int write_text(self, const char* text, Py_ssize_t length) except -1:
        cdef Py_ssize_t i
        if self.digest is None:
            return 0
        if self.text_length + length > TEXT_BYTES:
            self.flush()
        for i in range(length):
            self.text[self.text_length + i] = text[i]
        self.text_length += length
        return 0

    cdef int write_number(self, int64_t number, char behind) except -1:
        cdef char[MAX_DIGITS + 1] digits
        cdef int at = MAX_DIGITS
        digits[at] = behind
        while True:
            at -= 1
            digits[at] = c'0' + <char> (number % 10)
            number //= 10
            if number == 0:
                return self.write_text(digits + at, MAX_DIGITS + 1 - at)

    cdef int write_ids(self, int64_t hit_tokens, int64_t total) except -1:
        """`HIT_TOKENS: ID ID ID`, or an empty line for an empty prompt."""
        cdef int64_t i
        if self.digest is None:
            return 0
        if total == 0:
            return self.write_text(b"\n", 1)
        self.write_number(hit_tokens, c':')
        self.write_text(b" ", 1)
        for i in range(total):
            self.write_number(self.ids[i], c'\n' if i == total - 1 else c' ')
        return 0

    cdef int flush(self) except -1:
        if self.digest is not None and self.text_length:
            self.digest.update(PyBytes_FromStringAndSize(self.text, self.text_length))
            self.text_length = 0
        return 0

    def result(self):
        """The totals, by the names that `kvcache replay --json` gives them.

        Also `seconds` spent in `run`, and `blocks` handled; `assignment_sha256` only
        if it was recorded.
        """
        totals = {
            "num_blocks": self.pool.num_gpu_blocks,
            "requests": self.requests,
            "skipped": self.skipped,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_tokens / <double> max(self.prompt_tokens, 1),
            "new_blocks": self.new_blocks,
            "evictions": self.evictions,
            "cached_blocks": len(self.pool.cached_block_hash_to_block),
            "seconds": self.nanoseconds / 1e9,
            "blocks": self.blocks,
        }
        if self.digest is not None:
            totals["assignment_sha256"] = self.digest.hexdigest()
        return totals
