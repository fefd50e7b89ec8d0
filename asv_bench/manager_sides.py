"""The work that the manager's rows measure: each function prepares one side.

Stores: an engine a side, which is a manager and its requests: rows of ours, vLLM's own
Request objects. Invariant: both sides get the same requests in the same order, the same
32-byte hashes, pools of the same size in the same state, and the same calls; what only
one side has to do between two calls (vLLM's scheduler counts computed tokens, ours does
it within `allocate_slots`) is left out of the time, as is making requests and letting
them grow by a token. All requests differ; half of a pool holds the content of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from random import Random
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from c_loop import compiled
from measure import Side
from pool_sides import BIG_POOL, BLOCK_SIZE, POOL, SEED

from kvcache import hashing
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow

PROMPT = 63  # full blocks of one: 1,008 tokens
TAIL = 12  # tokens behind them, in a block of their own
FREED = 70  # blocks of a request that ends
STEPS = 1_024  # that a batch decodes before it starts anew
RUNNING = 256  # requests
TURNS = 20  # requests that are handled before anything is undone
WINDOW = 512  # tokens
MAX_MODEL_LEN = 131_072
VOCABULARY = 128_256


def digests(name: int, start: int, stop: int) -> list[bytes]:
    """Hashes of a request's blocks from start to stop."""
    return [sha256(b"%d %d" % (name, i)).digest() for i in range(start, stop)]


class OurEngine:
    """Requests are rows."""

    def __init__(
        self,
        window: bool = False,
        num_blocks: int = POOL,
        num_requests: int = RUNNING,
        hash_fn: Callable[[Any], bytes] = hashing.keyed,
    ) -> None:
        groups = [FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, WINDOW)]
        self.num_groups = 1 + window
        self.manager = KVCacheManager(
            num_blocks,
            groups[: self.num_groups],
            max_model_len=MAX_MODEL_LEN,
            max_num_requests=num_requests,
            hash_fn=hash_fn,
        )

    def add(self, hashes: list[bytes], num_tokens: int) -> int:
        return self.manager.add_request(hashes=hashes, num_tokens=num_tokens)

    def add_tokens(self, tokens: list[int]) -> int:
        return self.manager.add_request(tokens)

    def append(self, row: int, hashes: list[bytes]) -> None:
        self.manager.append(row, num_tokens=1, hashes=hashes)

    def was_computed(self, rows: list[int], num_tokens: int) -> None:
        """`allocate_slots` has counted them."""

    def was_decoded(self, rows: list[int]) -> None:
        """Likewise."""

    def match(self, row: int) -> int:
        return self.manager.match(row)

    def admit(self, rows: list[int]) -> None:
        match, allocate = self.manager.match, self.manager.allocate_slots
        for row in rows:
            match(row)
            allocate(row, TAIL)

    def preempt_and_resume(self, rows: list[int]) -> None:
        preempt = self.manager.preempt
        match, allocate = self.manager.match, self.manager.allocate_slots
        for row in rows:
            preempt(row)
            match(row)
            allocate(row, TAIL)

    def arrays(self, rows: list[int]) -> None:
        block_ids = self.manager.block_ids
        for row in rows:
            block_ids(row)

    def block_ids(self, row: int, group: int) -> list[int]:
        ids: list[int] = self.manager.block_ids(row, group).tolist()
        return ids


class StockEngine:
    """Requests are vLLM's."""

    def __init__(
        self,
        stock: Any,
        window: bool = False,
        num_blocks: int = POOL,
        num_requests: int = RUNNING,
    ) -> None:
        self.stock = stock
        self.num_groups = 1 + window
        head = {"num_kv_heads": 1, "head_size": 1, "dtype": stock.dtype}
        interface = stock.interface
        specs = [
            interface.FullAttentionSpec(block_size=BLOCK_SIZE, **head),
            interface.SlidingWindowSpec(
                block_size=BLOCK_SIZE, sliding_window=WINDOW, **head
            ),
        ]
        groups = [
            interface.KVCacheGroupSpec([f"layer {i}"], spec)
            for i, spec in enumerate(specs[: self.num_groups])
        ]
        self.manager = stock.KVCacheManager(
            interface.KVCacheConfig(num_blocks, [], groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.sampling = stock.SamplingParams(max_tokens=MAX_MODEL_LEN)
        self.names = map(str, count())
        self.hasher: Any = None

    def add(self, hashes: list[bytes], num_tokens: int) -> Any:
        request = self.add_tokens([0] * num_tokens)
        request.block_hashes = list(hashes)
        return request

    def add_tokens(self, tokens: list[int]) -> Any:
        return self.stock.Request(
            next(self.names), tokens, self.sampling, None, block_hasher=self.hasher
        )

    def append(self, request: Any, hashes: list[bytes]) -> None:
        request.append_output_token_ids(0)
        request.block_hashes += hashes

    def was_computed(self, requests: list[Any], num_tokens: int) -> None:
        """What vLLM's scheduler writes once a request has its slots."""
        for request in requests:
            request.status = self.stock.RequestStatus.RUNNING
            request.num_computed_tokens = num_tokens or request.num_tokens
        self.manager.take_new_block_ids()

    def was_decoded(self, requests: list[Any]) -> None:
        """The same after a step of one token each."""
        for request in requests:
            request.num_computed_tokens += 1
        self.manager.take_new_block_ids()

    def match(self, request: Any) -> int:
        num_hits: int = self.manager.get_computed_blocks(request)[1]
        return num_hits

    def admit(self, requests: list[Any]) -> None:
        match, allocate = self.manager.get_computed_blocks, self.manager.allocate_slots
        for request in requests:
            blocks, num_hits, _ = match(request)
            allocate(request, TAIL, num_hits, blocks)

    def preempt_and_resume(self, requests: list[Any]) -> None:
        free, preempted = self.manager.free, self.stock.RequestStatus.PREEMPTED
        match, allocate = self.manager.get_computed_blocks, self.manager.allocate_slots
        running = self.stock.RequestStatus.RUNNING
        for request in requests:
            free(request)
            request.status = preempted
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            blocks, num_hits, _ = match(request)
            allocate(request, TAIL, num_hits, blocks)
            request.status = running
            request.num_computed_tokens = num_hits + TAIL

    def arrays(self, requests: list[Any]) -> None:
        get, array, int32 = self.manager.get_block_ids, np.array, np.int32
        for request in requests:
            array(get(request.request_id)[0], int32)

    def block_ids(self, request: Any, group: int) -> list[int]:
        ids: list[int] = self.manager.get_block_ids(request.request_id)[group]
        return ids


Engine = OurEngine | StockEngine
MakeEngine = Callable[..., Engine]


def filled(engine: Engine, num_blocks: int, scattered: bool, prompt: int) -> list[int]:
    """Give half of an engine's pool content; the names of the prompts it is of."""
    pool = engine.manager.block_pool
    if scattered:
        blocks = pool.get_new_blocks(num_blocks - 1)
        Random(SEED).shuffle(blocks)
        pool.free_blocks(blocks)
    names = list(range(num_blocks // 2 // (prompt * engine.num_groups)))
    for name in names:
        request = engine.add(digests(name, 0, prompt), prompt * BLOCK_SIZE)
        engine.manager.allocate_slots(request, prompt * BLOCK_SIZE)
        engine.manager.free(request)
    return names


# -- decoding --------------------------------------------------------------------------


class Decoding:
    """Requests that get a token a step, of which every 16th needs a block each time.

    After `steps` they end, what they cached is evicted, and they start again. The
    tokens of `ahead` steps are known at once: a loop of steps that nothing comes
    between but vLLM's counting.
    """

    def __init__(
        self,
        engine: Engine,
        num_requests: int,
        steps: int,
        ahead: int,
        scattered: bool,
    ) -> None:
        self.engine = engine
        self.scattered = scattered
        self.ahead = ahead
        self.length = PROMPT * BLOCK_SIZE
        longest = PROMPT + steps // BLOCK_SIZE + 1
        self.hashes = [digests(-1 - i, 0, longest) for i in range(num_requests)]
        self.num_steps = steps
        self.requests: list[Any] = []
        self.steps = self.endless()

    def endless(self) -> Iterator[list[Any]]:
        """The requests, before each step: each has a token that is not computed."""
        while True:
            self.start()
            for done in range(0, self.num_steps, self.ahead):
                for i, request in enumerate(self.requests):
                    for step in range(done, done + self.ahead):
                        full, rest = divmod(self.length + i % 16 + step + 1, BLOCK_SIZE)
                        fresh = [] if rest else [self.hashes[i][full - 1]]
                        self.engine.append(request, fresh)
                for _ in range(self.ahead):
                    yield self.requests
                    self.engine.was_decoded(self.requests)

    def start(self) -> None:
        engine, manager = self.engine, self.engine.manager
        cached: set[int] = set()
        for request in self.requests:
            for group in range(engine.num_groups):
                cached.update(engine.block_ids(request, group))
        # Evicted before they are free, blocks are taken again before those that are
        # cached: no step evicts.
        manager.block_pool.evict_blocks(cached - {0})
        for request in self.requests:
            manager.free(request)
        self.restore_order(len(cached - {0}))
        self.requests = []
        for i, hashes in enumerate(self.hashes):
            # Not all at the same place in their blocks: a block is full at any step.
            num_tokens = self.length + i % 16
            request = engine.add(hashes[:PROMPT], num_tokens)
            manager.allocate_slots(request, num_tokens)
            self.requests.append(request)
        engine.was_computed(self.requests, 0)

    def restore_order(self, num_blocks: int) -> None:
        """Free blocks come out as at first: else a pool ages into a scattered one."""
        pool = self.engine.manager.block_pool
        blocks = pool.get_new_blocks(num_blocks)
        blocks.sort(key=lambda block: block.block_id)
        if self.scattered:
            Random(SEED).shuffle(blocks)
        pool.free_blocks(blocks)


def decoding(
    make_engine: MakeEngine,
    window: bool,
    scattered: bool,
    num_requests: int,
    ahead: int = BLOCK_SIZE,
) -> Decoding:
    many = num_requests > RUNNING
    num_blocks = BIG_POOL if many else POOL
    engine = make_engine(window, num_blocks, num_requests)
    filled(engine, num_blocks, scattered, PROMPT)
    steps = STEPS // 8 if many else STEPS
    return Decoding(engine, num_requests, steps, ahead, scattered)


def decode_one_by_one(
    make_engine: MakeEngine,
    window: bool = False,
    scattered: bool = False,
    num_requests: int = RUNNING,
    ahead: int = BLOCK_SIZE,
) -> Side:
    """A call a request, the same on both sides."""
    batch = decoding(make_engine, window, scattered, num_requests, ahead)
    allocate = batch.engine.manager.allocate_slots

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            requests = next(batch.steps)
            start = clock()
            for request in requests:
                allocate(request, 1)
            spent += clock() - start
        return spent

    return Side(run, num_requests)


def decode_in_one_call(
    window: bool = False,
    scattered: bool = False,
    num_requests: int = RUNNING,
    ahead: int = BLOCK_SIZE,
) -> Side:
    batch = decoding(OurEngine, window, scattered, num_requests, ahead)
    allocate = batch.engine.manager.allocate_step
    one = np.ones(num_requests, np.int32)

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            rows = np.array(next(batch.steps), np.int32)
            start = clock()
            allocate(rows, one)
            spent += clock() - start
        return spent

    return Side(run, num_requests)


def decode_in_c(scattered: bool = False) -> Side:
    """The same, 16 steps a call of compiled code."""
    batch = decoding(OurEngine, False, scattered, RUNNING)
    steps, one = compiled().steps, np.ones(RUNNING, np.int32)
    manager = batch.engine.manager

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            rows = np.array(next(batch.steps), np.int32)
            start = clock()
            steps(manager, rows, one, BLOCK_SIZE)
            spent += clock() - start
            for _ in range(BLOCK_SIZE - 1):
                next(batch.steps)
        return spent

    return Side(run, RUNNING * BLOCK_SIZE)


def map_slots() -> Side:
    """The slots of one token for each request; the last step's, again and again."""
    batch = decoding(OurEngine, False, False, RUNNING)
    rows, one = np.array(next(batch.steps), np.int32), np.ones(RUNNING, np.int32)
    mapping = batch.engine.manager.slot_mapping

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            mapping(rows, one)
        return clock() - start

    return Side(run, RUNNING)


# -- a request comes and goes ----------------------------------------------------------


def hits(
    make_engine: MakeEngine, window: bool, scattered: bool, blocks: int
) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine, and requests of which all blocks but the last one are cached.

    Each time other ones. They hold nothing yet; who admits them frees them.
    """
    engine = make_engine(window, POOL, TURNS)
    names = filled(engine, POOL, scattered, blocks - 1)
    hashes = [digests(name, 0, blocks - 1) for name in names]
    if scattered:
        Random(SEED).shuffle(hashes)
    else:
        hashes = hashes[:TURNS]
    num_tokens = (blocks - 1) * BLOCK_SIZE + TAIL
    while True:
        for i in range(0, len(hashes) - TURNS + 1, TURNS):
            requests = [engine.add(h, num_tokens) for h in hashes[i : i + TURNS]]
            if engine.match(requests[0]) != num_tokens - TAIL:
                raise AssertionError("the prompt is not cached as a whole")
            yield engine, requests


def admit(
    make_engine: MakeEngine, window: bool = False, scattered: bool = False
) -> Side:
    """Match and take slots: 63 cached blocks, and a new one for what comes behind."""
    turns = hits(make_engine, window, scattered, PROMPT + 1)

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            engine, requests = next(turns)
            start = clock()
            engine.admit(requests)
            spent += clock() - start
            for request in requests:
                engine.manager.free(request)
        return spent

    return Side(run, TURNS)


def free(
    make_engine: MakeEngine, window: bool = False, scattered: bool = False
) -> Side:
    """The last user goes: 69 cached blocks and one that is not."""
    turns = hits(make_engine, window, scattered, FREED)

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            engine, requests = next(turns)
            engine.admit(requests)
            free = engine.manager.free
            start = clock()
            for request in requests:
                free(request)
            spent += clock() - start
        return spent

    return Side(run, TURNS)


def free_with_tokens(make_engine: MakeEngine) -> Side:
    """As `free`, but the requests were made with tokens; none of them was cached.

    vLLM's manager does not keep the tokens, so its requests go afterwards.
    """
    engine = make_engine(False, POOL, TURNS)
    num_tokens = (FREED - 1) * BLOCK_SIZE + TAIL
    if isinstance(engine, StockEngine):
        engine.hasher = sha256_hasher(engine.stock)
    prompts = random_tokens(TURNS, num_tokens)

    def run(loops: int) -> int:
        spent = 0
        free = engine.manager.free
        for _ in range(loops):
            requests = [engine.add_tokens(tokens) for tokens in prompts]
            for request in requests:
                engine.match(request)
                engine.manager.allocate_slots(request, num_tokens)
            held = [engine.block_ids(request, 0) for request in requests]
            start = clock()
            for request in requests:
                free(request)
            spent += clock() - start
            for ids in held:
                engine.manager.block_pool.evict_blocks(set(ids))
        return spent

    return Side(run, TURNS)


def running(make_engine: MakeEngine) -> tuple[Engine, list[Any]]:
    """Requests of 70 blocks."""
    engine, requests = next(hits(make_engine, False, False, FREED))
    engine.admit(requests)
    engine.was_computed(requests, 0)
    return engine, requests


def preempt_and_resume(make_engine: MakeEngine) -> Side:
    engine, requests = running(make_engine)
    return repeated(lambda: engine.preempt_and_resume(requests))


def block_arrays(make_engine: MakeEngine) -> Side:
    engine, requests = running(make_engine)
    return repeated(lambda: engine.arrays(requests))


def repeated(work: Callable[[], None]) -> Side:
    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            work()
        return clock() - start

    return Side(run, TURNS)


# -- tokens and their hashes -----------------------------------------------------------


def sha256_hasher(stock: Any) -> Any:
    stock.utils.init_none_hash(stock.hashing.sha256)
    return stock.utils.get_request_block_hasher(BLOCK_SIZE, stock.hashing.sha256)


def random_tokens(count: int, length: int) -> list[list[int]]:
    generator = np.random.default_rng(SEED)
    tokens: list[list[int]]
    tokens = generator.integers(0, VOCABULARY, (count, length)).tolist()
    return tokens


def prompts_of_a_batch() -> list[list[int]]:
    """As `Decoding` has them: a 16th of the requests fill a block at a step."""
    prompts = random_tokens(RUNNING, (PROMPT + 1) * BLOCK_SIZE)
    return [prompts[i][: PROMPT * BLOCK_SIZE + i % 16] for i in range(RUNNING)]


def append_step(hash_fn: Callable[[Any], bytes]) -> Side:
    engine = OurEngine(hash_fn=hash_fn)
    rows = np.array([engine.add_tokens(p) for p in prompts_of_a_batch()], np.int32)
    tokens = np.array(random_tokens(1, RUNNING)[0], np.int64)
    manager, lengths = engine.manager, list(map(len, prompts_of_a_batch()))
    done = 0

    def run(loops: int) -> int:
        nonlocal done
        spent = 0
        for _ in range(loops):
            if done == STEPS:
                for row, length in zip(rows.tolist(), lengths, strict=True):
                    manager.truncate(row, length)
                done = 0
            start = clock()
            manager.append_step(rows, tokens)
            spent += clock() - start
            done += 1
        return spent

    return Side(run, RUNNING)


def append_to_stock_requests(stock: Any) -> Side:
    engine = StockEngine(stock)
    engine.hasher = sha256_hasher(stock)
    prompts = prompts_of_a_batch()
    tokens = random_tokens(1, RUNNING)[0]
    requests: list[Any] = []
    done = STEPS

    def run(loops: int) -> int:
        nonlocal done, requests
        spent = 0
        for _ in range(loops):
            if done == STEPS:
                requests = [engine.add_tokens(tokens) for tokens in prompts]
                done = 0
            start = clock()
            for request, token in zip(requests, tokens, strict=True):
                request.append_output_token_ids(token)
            spent += clock() - start
            done += 1
        return spent

    return Side(run, RUNNING)
