"""A manager that a replay drives, and the totals of what it did.

Stores: a `KVCacheManager` of one full-attention group, the totals of the run, the
digest of all block ids handed out.
Invariant: every request that held blocks was counted once for each time it did.
Costs: O(1) a block; no Python object a request. Threads: one at a time.
"""
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize

import hashlib

from kvcache._args cimport no_copy
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport MAX_BLOCKS, has_hash
from kvcache.manager.calls cimport NO_MEMORY, manager_add_request, manager_match
from kvcache.manager.manager_state cimport GroupRow, table_row
from kvcache.manager.slots cimport NO_ROOM, serve

from kvcache.manager import FullAttention

cnp.import_array()

cdef enum:
    MAX_DIGITS = 20         # of a decimal int64, with what separates it
    TEXT_BYTES = 65536


cdef class ReplayedPool:
    """What both kinds of replay have in common; not to be made itself.

    Attributes:
        manager: The manager, for tests to look at.
    """

    def __dealloc__(self):
        deallocate(self.text)

    def __reduce__(self):
        raise no_copy(self)

    cdef int make(
        self, object num_blocks, object block_size, object num_requests,
        object longest, object record_assignment,
    ) except -1:
        """A manager for so many requests, of at most so many tokens."""
        if self.manager is not None:
            raise ValueError("the replay is already made")
        # A manager's own bound, where the pool would hold more.
        self.most_tokens = min((num_blocks - 1) * block_size, MAX_BLOCKS)
        cdef KVCacheManager manager = KVCacheManager(
            num_blocks,
            [FullAttention(block_size)],
            max_model_len=max(min(longest, self.most_tokens), 1),
            max_num_requests=num_requests,
        )
        self.block_size = block_size
        if record_assignment:
            self.digest = hashlib.sha256()
            if self.text == NULL:
                self.text = <char*> allocate(TEXT_BYTES, 1, "text")
        self.manager = manager
        self.m = &manager.state
        return 0

    cdef int require_made(self) except -1:
        if self.manager is None:
            raise ValueError("the replay was not made")
        return 0

    cdef int32_t open(self, int64_t num_tokens, const uint8_t* keys) except -1:
        """Make a request known, with the keys of its full blocks; its row."""
        cdef int32_t row = manager_add_request(
            self.m, num_tokens, keys, num_tokens // self.block_size, KEY_BYTES
        )
        if row == NO_MEMORY:
            raise MemoryError(f"cannot keep the hashes of {num_tokens} tokens")
        return row

    cdef int64_t admit(self, int32_t row) except -2:
        """Compute a request's tokens in one go: its hits, -1 if the rest does not fit.
        """
        cdef int64_t hits = manager_match(self.m, row, -1)
        # All the rest is asked for at once, so the full sequence fits or it does not.
        self.slots.num_new = self.m.content[row].num_tokens - hits
        return hits if serve(self.m, row, &self.slots) != NO_ROOM else -1

    cdef int count_blocks(self, int32_t row, int64_t hit_tokens) except -1:
        """Count the blocks of a request that is about to give them back.

        The digest gets `HIT_TOKENS: ID ID ID`.
        """
        cdef GroupRow* held = &self.m.groups[0].rows[row]
        cdef int32_t* ids = table_row(&self.m.groups[0], row)
        cdef int64_t hits = hit_tokens // self.block_size
        cdef int32_t i
        self.new_blocks += held.num_blocks - hits
        self.hashed += max(held.num_cached, 0) - hits
        self.blocks += held.num_blocks
        if self.digest is not None:
            self.write_number(hit_tokens, c':')
            self.write_text(b" ", 1)
            for i in range(held.num_blocks):
                self.write_number(ids[i], c'\n' if i == held.num_blocks - 1 else c' ')
        return 0

    cdef int count_empty(self) except -1:
        """Count a request of no tokens: an empty line."""
        self.requests += 1
        return self.write_text(b"\n", 1)

    cdef int count_skipped(self) except -1:
        """Count a request that does not fit into the pool."""
        self.requests += 1
        self.skipped += 1
        return self.write_text(b"skip\n", 5)

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

    cdef int flush(self) except -1:
        if self.digest is not None and self.text_length:
            self.digest.update(PyBytes_FromStringAndSize(self.text, self.text_length))
            self.text_length = 0
        return 0

    cdef int64_t evictions(self) noexcept:
        """Blocks that lost their hash: those that got one and have none now."""
        cdef int64_t count = self.hashed
        cdef Py_ssize_t i
        for i in range(self.m.pool.num_blocks):
            count -= has_hash(&self.m.pool.rows[i])
        return count

    cdef dict totals(self):
        self.require_made()
        self.flush()
        totals = {
            "num_blocks": self.manager.block_pool.num_gpu_blocks,
            "requests": self.requests,
            "skipped": self.skipped,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_tokens / <double> max(self.prompt_tokens, 1),
            "new_blocks": self.new_blocks,
            "evictions": self.evictions(),
            "cached_blocks": len(self.manager.block_pool.cached_block_hash_to_block),
            "seconds": self.nanoseconds / 1e9,
            "blocks": self.blocks,
        }
        if self.digest is not None:
            totals["assignment_sha256"] = self.digest.hexdigest()
        return totals

    cdef const void* data_of(self, object array, str kind, tuple shape) except NULL:
        """The data of an array of this dtype and shape; None stands for any length."""
        cdef bint fits = isinstance(array, cnp.ndarray) and array.dtype == kind
        if not fits or not (array.flags.c_contiguous and array.flags.aligned):
            raise ValueError(f"expected a C-contiguous, aligned {kind} array")
        if len(array.shape) != len(shape) or any(
            n is not None and n != m for n, m in zip(shape, array.shape)
        ):
            raise ValueError(f"expected an array of shape {shape}, got {array.shape}")
        return cnp.PyArray_DATA(<cnp.ndarray> array)
