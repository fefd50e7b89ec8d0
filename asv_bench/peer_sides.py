"""The work that the rows beside other engines measure: each prepares one side.

Stores nothing. An engine is asked for one thing: to serve a prompt, from its tokens to
the ids of its blocks, to a token generated, to its end. What that takes differs by what
the pool holds: nothing of the prompt, all of it, or something else in every block. Both
sides get pools of the same size and the same prompts in the same form. Hits and number
of blocks are looked at each time, and must be what the work says on either side; a
prompt that is cached must be found where it was put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter_ns as clock
from typing import Any, Protocol

import numpy as np
from hashing_sides import CHAIN, VOCABULARY, random_tokens, repeated
from measure import Side
from pool_sides import BLOCK_SIZE, HALF, POOL, SEED

from kvcache.manager import FullAttention, KVCacheManager

TAIL = 12  # tokens of a prompt behind its full blocks: they take a block of their own

Form = Callable[[np.ndarray], Any]


class Engine(Protocol):
    """What can serve a prompt."""

    def serve(self, tokens: Any) -> tuple[int, np.ndarray]:
        """The tokens that were cached, and the prompt's blocks."""

    def num_empty(self) -> int:
        """Blocks that hold nothing."""

    def forget(self) -> None:
        """Empty the cache; nobody is served."""


MakeEngine = Callable[[], Engine]


class OurEngine:
    """A manager whose blocks are cached by one of kvcache's hashes."""

    def __init__(self, hash_fn: Callable[[Any], bytes]) -> None:
        self.manager = KVCacheManager(
            POOL,
            [FullAttention(BLOCK_SIZE)],
            max_model_len=POOL,
            max_num_requests=1,
            hash_fn=hash_fn,
        )

    def serve(self, tokens: Any) -> tuple[int, np.ndarray]:
        manager = self.manager
        row = manager.add_request(tokens)
        num_hits = manager.match(row)
        manager.allocate_slots(row, len(tokens) - num_hits)
        ids = manager.block_ids(row).copy()
        manager.append(row, 7)
        manager.free(row)
        return num_hits, ids

    def num_empty(self) -> int:
        pool = self.manager.block_pool
        return POOL - 1 - len(pool.cached_block_hash_to_block)

    def forget(self) -> None:
        if not self.manager.reset_prefix_cache():
            raise AssertionError("the cache could not be emptied")


def prompts(form: Form, blocks: int) -> Iterator[Any]:
    """Prompts of so many full blocks each, never one twice."""
    generator = np.random.default_rng(SEED)
    length = blocks * BLOCK_SIZE + TAIL
    while True:
        yield form(generator.integers(0, VOCABULARY, length))


def must_be(served: tuple[int, np.ndarray], hits: int, blocks: int) -> None:
    """Hits are counted in blocks; there is one more than those of the prompt."""
    num_hits, ids = served
    if num_hits != hits * BLOCK_SIZE or len(ids) != blocks + 1:
        raise AssertionError(f"{num_hits} tokens were cached, {len(ids)} blocks given")


def served(
    engine: Engine, turns: Iterator[Any], hits: int, blocks: int, before: Callable
) -> Side:
    """Serve one prompt after the other; `before` each the clock does not run."""

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            before()
            tokens = next(turns)
            start = clock()
            done = engine.serve(tokens)
            spent += clock() - start
            must_be(done, hits, blocks)
        return spent

    return Side(run, blocks)


def insert(make: MakeEngine, form: Form, blocks: int) -> Side:
    """Nothing is cached, and there is room: a pool half full is emptied."""
    engine = make()

    def make_room() -> None:
        if engine.num_empty() < HALF:
            engine.forget()

    return served(engine, prompts(form, blocks), 0, blocks, make_room)


def match(make: MakeEngine, form: Form, blocks: int) -> Side:
    """All is cached but the tail: what half a pool holds, in turns."""
    engine, new = make(), prompts(form, blocks)
    known = [next(new) for _ in range(HALF // blocks)]
    places = []
    for tokens in known:
        num_hits, ids = engine.serve(tokens)
        must_be((num_hits, ids), 0, blocks)
        places.append(ids[:blocks].copy())
    if len(np.unique(np.concatenate(places))) != len(known) * blocks:
        raise AssertionError("a block was given twice")
    for tokens, put in zip(known, places, strict=True):
        num_hits, ids = engine.serve(tokens)
        must_be((num_hits, ids), blocks, blocks)
        if not np.array_equal(ids[:blocks], put):
            raise AssertionError("a prompt was not found where it was put")
    return served(engine, cycle(known), blocks, blocks, lambda: None)


def evict(make: MakeEngine, form: Form, blocks: int) -> Side:
    """Nothing is cached, and every block holds something: each one evicts."""
    engine, new = make(), prompts(form, blocks)
    while engine.num_empty() > blocks:
        must_be(engine.serve(next(new)), 0, blocks)
    return served(engine, new, 0, blocks, lambda: None)


def hash_list(hash_tokens: Callable[[list[int]], Any]) -> Side:
    """A chain of hashes of a list of tokens, by what gives one a block.

    A token more than the blocks hold: TokenSpeed leaves the last one to be computed.
    """
    tokens = random_tokens(CHAIN * BLOCK_SIZE + 1).tolist()
    if len(hash_tokens(tokens)) != CHAIN:
        raise AssertionError("there is not a hash a block")
    return repeated(lambda: hash_tokens(tokens), CHAIN)


def allocate_and_free(allocator: Any, n: int) -> Side:
    """LMDeploy's ids, from its allocator and back; half of a pool is in use."""
    allocate, free = allocator.allocate, allocator.free
    held, taken = allocate(HALF), allocate(n)
    if len(np.unique(np.concatenate([held, taken]))) != HALF + n:
        raise AssertionError("a block was given twice")
    free(taken)

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            free(allocate(n))
        return clock() - start

    return Side(run, n)
