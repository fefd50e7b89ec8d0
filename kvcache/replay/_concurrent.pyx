"""A manager replaying requests by arrival time, several in flight, step by step.

Stores: what `ReplayedPool` does, the requests that run and those that were begun and
wait, the clock.
Invariant: no more than `concurrency` requests have a row in the manager; those that
were preempted are the first to be admitted again, the oldest of them first.
Costs: O(1) a generated token and a block, no Python object a request.
Threads: one at a time.
"""
# A step is one of vLLM 0.33's scheduler, first come first served, with no limit on the
# tokens of a step: decode, preempt, admit, then a token for each that ran.
cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t

import time

from kvcache._args cimport as_int
from kvcache._lock cimport KVC_LOCKED  # no-cython-lint: it brings a macro
from kvcache._memory cimport allocate, deallocate
from kvcache._types cimport MAX_BLOCKS
from kvcache.manager.calls cimport manager_append, manager_free, manager_preempt
from kvcache.manager.manager_state cimport Progress
from kvcache.manager.slots cimport NO_ROOM, serve
from kvcache.replay._pool cimport KEY_BYTES, ReplayedPool

# A request that has a row.
cdef struct Flight:
    int64_t arrival         # its place among the arrivals
    int64_t left            # tokens that it is still to generate
    int64_t hits            # tokens found cached when it was admitted last


cdef class ConcurrentReplay(ReplayedPool):
    """One pool replaying requests that arrive, run side by side and are preempted.

    Args:
        num_blocks: Blocks of the pool, null block included.
        block_size: Tokens a block.
        arrivals: The requests, see `kvcache.replay.arrivals`.
        concurrency: Most requests running at a time.
        step_ms: What a step adds to the clock.
        record_assignment: Whether to digest all block ids handed out.

    Raises:
        ValueError: An argument is out of range, or the arrays do not fit together.
    """

    cdef object arrivals        # keeps the arrays below
    cdef const int64_t* input_lengths
    cdef const int64_t* output_lengths
    cdef const double* times
    cdef const int64_t* starts
    cdef const uint8_t* keys
    cdef int64_t num_arrivals
    cdef int64_t begun          # arrivals that were looked at
    cdef int32_t concurrency
    cdef double now, step_ms
    cdef Flight* flights        # by row
    cdef int32_t* running       # rows, those admitted first at the start
    cdef int32_t num_running
    cdef int32_t* waiting       # rows, the next one last
    cdef int32_t num_waiting
    cdef int64_t steps, preemptions, recomputed_tokens, peak_blocks
    cdef int64_t generated_tokens
    cdef int32_t max_running

    @cython.critical_section
    def __init__(
        self,
        num_blocks,
        block_size,
        arrivals,
        concurrency,
        step_ms,
        *,
        record_assignment=True,
    ):
        cdef int64_t longest = 1, i, n = len(arrivals.input_lengths)
        cdef int64_t size = as_int(block_size, "block_size", 1, MAX_BLOCKS)
        cdef int64_t most_running = as_int(concurrency, "concurrency", 1, MAX_BLOCKS)
        if self.manager is not None:
            raise ValueError("the replay is already made")
        if not step_ms > 0:
            raise ValueError(f"step_ms must be above 0, not {step_ms}")
        self.input_lengths = <const int64_t*> self.data_of(
            arrivals.input_lengths, "int64", (n,)
        )
        self.output_lengths = <const int64_t*> self.data_of(
            arrivals.output_lengths, "int64", (n,)
        )
        self.times = <const double*> self.data_of(arrivals.times, "float64", (n,))
        self.starts = <const int64_t*> self.data_of(arrivals.starts, "int64", (n,))
        self.keys = <const uint8_t*> self.data_of(
            arrivals.keys, "uint8", (None, KEY_BYTES)
        )
        cdef int64_t num_keys = len(arrivals.keys)
        for i in range(n):
            if self.input_lengths[i] < 0 or self.output_lengths[i] < 0:
                raise ValueError(f"request {i} has a negative length")
            if not 0 <= self.starts[i] <= num_keys - self.input_lengths[i] // size:
                raise ValueError(f"request {i} has no valid keys")
            # Also of no number, NaN.
            if not self.times[max(i - 1, <int64_t> 0)] <= self.times[i]:
                raise ValueError(f"request {i} arrives before the one before it")
            longest = max(longest, self.most_computed(i))
        self.concurrency = <int32_t> min(most_running, max(n, <int64_t> 1))
        self.arrivals = arrivals
        self.step_ms = step_ms
        self.now = self.times[0] if n else 0
        self.num_arrivals = n
        self.free_places()
        self.flights = <Flight*> allocate(self.concurrency, sizeof(Flight), "requests")
        self.running = <int32_t*> allocate(
            self.concurrency, sizeof(int32_t), "requests"
        )
        self.waiting = <int32_t*> allocate(
            self.concurrency, sizeof(int32_t), "requests"
        )
        # Last: who has a manager is made.
        self.make(num_blocks, block_size, self.concurrency, longest, record_assignment)

    def __dealloc__(self):
        self.free_places()

    cdef void free_places(self) noexcept:
        deallocate(self.flights)
        deallocate(self.running)
        deallocate(self.waiting)
        self.flights, self.running, self.waiting = NULL, NULL, NULL

    cdef int64_t most_computed(self, int64_t arrival) noexcept:
        """Tokens that a request needs slots for: never for the last it generates."""
        cdef int64_t prompt = self.input_lengths[arrival]
        cdef int64_t more = max(self.output_lengths[arrival] - 1, <int64_t> 0)
        return prompt + min(more, INT64_MAX - prompt)

    @cython.critical_section
    def advance(self, max_steps):
        """Run so many steps, or up to the end.

        Returns:
            Whether there is more to do.
        """
        cdef Py_ssize_t _
        self.require_made()
        began = time.perf_counter_ns()
        more = True
        for _ in range(max_steps):
            if self.num_running == self.num_waiting == 0:
                if self.begun == self.num_arrivals:
                    more = False
                    break
                # Nothing to do until the next one arrives.
                self.now = max(self.now, self.times[self.begun])
            if not self.decode():
                self.admit_waiting()
            if self.num_running:
                self.finish_step()
        self.nanoseconds += time.perf_counter_ns() - began
        return more

    cdef bint decode(self) except -1:
        """A slot for each running request's last token; whether one was preempted."""
        cdef Progress* progress
        cdef int32_t i = 0
        cdef bint preempted = False
        self.slots.num_new = 1
        while i < self.num_running:
            progress = &self.m.progress[self.running[i]]
            if progress.num_computed < progress.idle_until:
                # Most requests: the slot is there, and no block becomes full.
                progress.num_computed += 1
                i += 1
            elif serve(self.m, self.running[i], &self.slots) != NO_ROOM:
                i += 1
            else:
                self.preempt_newest()
                preempted = True
        return preempted

    cdef int preempt_newest(self) except -1:
        """The request admitted last gives way, be it the one that asks."""
        cdef int32_t row = self.running[self.num_running - 1]
        self.note_peak()
        self.count_blocks(row, self.flights[row].hits)
        manager_preempt(self.m, row)
        self.num_running -= 1
        self.waiting[self.num_waiting] = row
        self.num_waiting += 1
        self.preemptions += 1
        return 0

    cdef int admit_waiting(self) except -1:
        """Admit in order, up to the first that does not fit."""
        cdef int32_t row, num_tokens
        cdef int64_t hits
        while self.num_running < self.concurrency:
            if self.num_waiting == 0 and not self.begin_next():
                return 0
            row = self.waiting[self.num_waiting - 1]
            hits = self.admit(row)
            if hits < 0:
                return 0
            self.num_waiting -= 1
            self.running[self.num_running] = row
            self.num_running += 1
            self.flights[row].hits = hits
            num_tokens = self.m.content[row].num_tokens
            if self.m.requests[row].num_preemptions:
                # Its last token was not computed before.
                self.recomputed_tokens += num_tokens - 1 - hits
            else:
                self.prompt_tokens += num_tokens
                self.hit_tokens += hits
        return 0

    cdef bint begin_next(self) except -1:
        """Have the next request that has arrived wait; whether there is one."""
        cdef int64_t next
        cdef int32_t row
        while self.begun < self.num_arrivals and self.times[self.begun] <= self.now:
            next = self.begun
            self.begun += 1
            if self.input_lengths[next] == 0:
                self.count_empty()
            elif self.most_computed(next) > self.most_tokens:
                self.count_skipped()
            else:
                self.requests += 1
                row = self.open(
                    self.input_lengths[next], self.keys + KEY_BYTES * self.starts[next]
                )
                self.flights[row].arrival = next
                self.flights[row].left = max(self.output_lengths[next], <int64_t> 1)
                self.waiting[0] = row
                self.num_waiting = 1
                return True
        return False

    cdef int finish_step(self) except -1:
        """Each running request has generated a token; those that are done leave."""
        cdef Flight* flight
        cdef int32_t i, row, num_tokens, kept = 0
        cdef bint filled
        cdef int64_t[2] key
        self.note_peak()
        self.steps += 1
        self.now += self.step_ms
        self.generated_tokens += self.num_running
        self.max_running = max(self.max_running, self.num_running)
        for i in range(self.num_running):
            row = self.running[i]
            flight = &self.flights[row]
            flight.left -= 1
            if flight.left == 0:
                self.count_blocks(row, flight.hits)
                manager_free(self.m, row)
                continue
            num_tokens = self.m.content[row].num_tokens + 1
            filled = num_tokens % self.block_size == 0
            # The content of a generated block is its own: no key of a prompt has a
            # second half.
            key[0], key[1] = flight.arrival, num_tokens // self.block_size
            if manager_append(self.m, row, 1, <const uint8_t*> key, filled):
                raise MemoryError(f"cannot keep the hashes of {num_tokens} tokens")
            self.running[kept] = row
            kept += 1
        self.num_running = kept
        return 0

    cdef void note_peak(self) noexcept:
        cdef int64_t used = self.m.pool.num_blocks - 1 - self.m.pool.queue.num_free
        self.peak_blocks = max(self.peak_blocks, used)

    @cython.critical_section
    def result(self):
        """The totals at the end, by the names that `kvcache replay --json` gives them.

        Also `seconds` spent in `advance`, and `blocks` handled; `assignment_sha256`
        only if it was recorded.
        """
        return {
            **self.totals(),
            "steps": self.steps,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "peak_blocks": self.peak_blocks,
            "mean_running": self.generated_tokens / <double> max(self.steps, 1),
            "max_running": self.max_running,
        }
