"""A manager of requests: a decode step, admission, freeing, appending, memory.

Half of the pool holds content before. Requests get their hashes, but where tokens are
appended.
"""

import tracemalloc
from hashlib import sha256
from itertools import cycle

import numpy as np

from kvcache import hashing
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow

from .common import BLOCK_SIZE, SEED, scatter

POOL = 100_000  # blocks
PROMPT = 63  # blocks: 1,008 tokens
TAIL = 12  # tokens behind them
GROUPS = {
    "full": [FullAttention(BLOCK_SIZE)],
    "full + window": [FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 512)],
}


def digests(name, count):
    return [sha256(b"%d %d" % (name, i)).digest() for i in range(count)]


def make_manager(groups, num_requests, num_blocks=POOL, **options):
    return KVCacheManager(
        num_blocks,
        GROUPS[groups],
        max_model_len=131_072,
        max_num_requests=num_requests,
        **options,
    )


def fill_half(manager):
    """Cache prompts in random places; their hashes."""
    scatter(manager.block_pool)
    count = POOL // 2 // (PROMPT * len(manager.groups))
    prompts = [digests(name, PROMPT) for name in range(count)]
    for hashes in prompts:
        row = manager.add_request(hashes=hashes, num_tokens=PROMPT * BLOCK_SIZE)
        manager.allocate_slots(row, PROMPT * BLOCK_SIZE)
        manager.free(row)
    return prompts


class Decode:
    """One token for each request; a 16th of them caches a block, a 16th takes one.

    A call of many steps, since the requests start anew with each sample: `setup` runs
    before it. All tokens and hashes are known at the start.
    """

    params = (list(GROUPS), [256, 4_096])
    param_names = ("groups", "requests")
    number, warmup_time, timeout = 1, 0, 300
    steps = 64

    def setup(self, groups, num_requests):
        # 4,096 requests of 63 blocks fill the pool: theirs are shorter.
        blocks = PROMPT if num_requests == 256 else 4
        self.manager = make_manager(groups, num_requests)
        fill_half(self.manager)
        more = self.steps // BLOCK_SIZE + 1
        rows = []
        for i in range(num_requests):
            hashes = digests(-1 - i, blocks + more)
            num_tokens = (blocks + more) * BLOCK_SIZE
            row = self.manager.add_request(hashes=hashes, num_tokens=num_tokens)
            self.manager.allocate_slots(row, blocks * BLOCK_SIZE + i % BLOCK_SIZE)
            rows.append(row)
        self.rows = np.array(rows, np.int32)
        self.one = np.ones(num_requests, np.int32)

    def time_allocate_slots_64_steps(self, groups, num_requests):
        allocate = self.manager.allocate_slots
        rows = self.rows.tolist()
        for _ in range(self.steps):
            for row in rows:
                allocate(row, 1)

    def time_allocate_step_64_steps(self, groups, num_requests):
        allocate = self.manager.allocate_step
        for _ in range(self.steps):
            allocate(self.rows, self.one)


class Request:
    """A request whose 63 blocks are cached; another one each call."""

    params = (list(GROUPS),)
    param_names = ("groups",)

    def setup(self, groups):
        self.manager = make_manager(groups, 2)
        prompts = fill_half(self.manager)
        self.num_tokens = PROMPT * BLOCK_SIZE + TAIL
        self.row = self.manager.add_request(
            hashes=prompts[0], num_tokens=self.num_tokens
        )
        self.resume(groups)
        self.one, self.step = np.array([self.row], np.int32), np.ones(1, np.int32)
        self.prompts = cycle(prompts)

    def resume(self, groups):
        if self.manager.match(self.row) != PROMPT * BLOCK_SIZE:
            raise AssertionError("the prompt is not cached as a whole")
        self.manager.allocate_slots(self.row, TAIL)

    def time_add_match_admit_free(self, groups):
        manager = self.manager
        row = manager.add_request(hashes=next(self.prompts), num_tokens=self.num_tokens)
        manager.match(row)
        manager.allocate_slots(row, TAIL)
        manager.free(row)

    def time_preempt_and_resume(self, groups):
        self.manager.preempt(self.row)
        self.resume(groups)

    def time_block_ids(self, groups):
        self.manager.block_ids(self.row)

    def time_slot_mapping(self, groups):
        self.manager.slot_mapping(self.one, self.step)


class Append:
    """A token each for 256 requests, 64 times: a 16th of them fills a block."""

    params = (["keyed", "sha256"],)
    param_names = ("algorithm",)
    number, warmup_time = 1, 0

    def setup(self, algorithm):
        self.manager = make_manager("full", 256, hash_fn=getattr(hashing, algorithm))
        tokens = np.random.default_rng(SEED).integers(0, 128_256, (256, 1_024))
        lengths = [PROMPT * BLOCK_SIZE + i % BLOCK_SIZE for i in range(256)]
        rows = [
            self.manager.add_request(prompt[:length])
            for prompt, length in zip(tokens, lengths, strict=True)
        ]
        self.rows, self.tokens = np.array(rows, np.int32), tokens[:, 0].copy()

    def time_append_step_64_steps(self, algorithm):
        for _ in range(64):
            self.manager.append_step(self.rows, self.tokens)


class Memory:
    """Deterministic: what a request of 1,008 tokens takes besides its table row."""

    params = (["tokens", "hashes"],)
    param_names = ("given",)

    def setup(self, given):
        self.manager = make_manager("full", 100)
        tokens = np.random.default_rng(SEED).integers(0, 128_256, PROMPT * BLOCK_SIZE)
        if given == "tokens":
            self.content = {"tokens": tokens}
        else:
            self.content = {"hashes": digests(0, PROMPT), "num_tokens": len(tokens)}
        self.manager.free(self.manager.add_request(**self.content))

    def track_bytes_a_request(self, given):
        tracemalloc.start(1)
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(100):
                self.manager.add_request(**self.content)
            return (tracemalloc.get_traced_memory()[0] - before) / 100
        finally:
            tracemalloc.stop()

    track_bytes_a_request.unit = "bytes"


class Hits:
    """Deterministic: conversations that go on, in a pool that holds half of them."""

    params = (list(GROUPS),)
    param_names = ("groups",)

    def track_hit_rate(self, groups):
        manager = make_manager(groups, 1, 5_000 * len(GROUPS[groups]))
        order = np.random.default_rng(SEED).integers(0, 200, 2_000)
        blocks = np.zeros(200, int)
        for name in order.tolist():
            blocks[name] = blocks[name] % 96 + 8
            num_tokens = int(blocks[name]) * BLOCK_SIZE
            row = manager.add_request(
                hashes=digests(name, blocks[name]), num_tokens=num_tokens
            )
            manager.allocate_slots(row, num_tokens - manager.match(row))
            manager.free(row)
        return manager.take_prefix_cache_stats().hit_rate

    track_hit_rate.unit = "share of the tokens"
