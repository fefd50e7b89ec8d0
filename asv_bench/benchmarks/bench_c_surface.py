"""The C surface from compiled code: what the calls cost without the interpreter.

Each has a Python twin with the same work in `bench_pool` or `bench_manager`: what lies
between is the cost of a call from Python.
"""

import sys
from pathlib import Path

import numpy as np

from .bench_manager import BLOCK_SIZE, PROMPT, digests, make_manager
from .common import REQUEST, make_pool, random_digests

sys.path.append(str(Path(__file__).parents[1]))

from c_loop import compiled
from measure import Unavailable

ROUNDS = 1_000
RUNNING = 256


class InC:
    """Loops without the GIL; one call a sample, since steps start anew with each."""

    timeout = 120
    number = 1

    def setup(self):
        try:
            self.loops = compiled()
        except Unavailable as error:
            raise NotImplementedError(str(error)) from None
        self.pool = make_pool("kvcache", 100_000)
        self.digests = np.array(random_digests("kvcache", REQUEST))
        ids = self.pool.get_new_block_ids(REQUEST)
        self.pool.cache_block_ids(ids, self.digests)
        self.manager = make_manager("full", RUNNING)
        self.rows = np.array(
            [
                self.manager.add_request(hashes=digests(i, PROMPT), num_tokens=1_024)
                for i in range(RUNNING)
            ],
            np.int32,
        )
        for i, row in enumerate(self.rows.tolist()):
            self.manager.allocate_slots(row, BLOCK_SIZE + i % BLOCK_SIZE)
        self.one = np.ones(RUNNING, np.int32)

    def time_get_and_free_100_1000_rounds(self):
        self.loops.get_and_free(self.pool, REQUEST, ROUNDS)

    def time_match_100_1000_rounds(self):
        self.loops.match(self.pool, self.digests, ROUNDS)

    def time_allocate_step_16_steps(self):
        self.loops.steps(self.manager, self.rows, self.one, BLOCK_SIZE)
