"""The work that the prefix-caching allocators' rows measure: each prepares one side.

Stores nothing. Both sides get the same classes' names, allocators of the same size in
the same state and the same tokens, and make the same calls: one function serves both.
What undoes a loop's work is done between the clock's stops, and not counted. All blocks
are marked as accessed by their request, as a scheduler does it at every step: a request
is then evicted as a whole, the last block first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count, cycle
from time import perf_counter_ns as clock
from typing import Any

from measure import Side
from vllm_v0 import Allocators

BLOCK_SIZE = 16
REQUEST = 100  # blocks
POOL = 10_000  # blocks of an allocator
REQUESTS = POOL // REQUEST
LONG = 2_000  # blocks of a long prompt
GROWN = 256  # tokens that a request grows by
VOCABULARY = 128_256

Work = Callable[[Any], Any]


def tokens_of(number: int, blocks: int = REQUEST) -> list[list[int]]:
    """A request's tokens by block; no two requests begin alike."""
    first = number * blocks * BLOCK_SIZE
    tokens = [(first + i) * 7_919 % VOCABULARY for i in range(blocks * BLOCK_SIZE)]
    tokens[0] = VOCABULARY + number
    return [tokens[i : i + BLOCK_SIZE] for i in range(0, len(tokens), BLOCK_SIZE)]


def flat(tokens: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(tokens))


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def free_all(allocator: Any, blocks: list[Any]) -> None:
    """A call a block, first to last, as vLLM's BlockTable does it."""
    free = allocator.free
    for block in blocks:
        free(block)


def must_be(found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"the work is not what the row says: {found}, {expected}")


def timed(before: Work, work: Work, after: Work, blocks: int) -> Side:
    """`after(work(before(None)))` with the clock running for the middle only."""

    def run(loops: int) -> int:
        spent = 0
        for _ in range(loops):
            given = before(None)
            start = clock()
            done = work(given)
            spent += clock() - start
            after(done)
        return spent

    side = Side(run, blocks)
    run(1)
    return side


# -- allocate ---------------------------------------------------------------------


def allocate_missing(of: Allocators) -> Side:
    """No request is cached; when all blocks have been used the cache is reset."""
    allocator = of.PrefixCachingBlockAllocator(POOL, BLOCK_SIZE)
    allocate = allocator.allocate_immutable_blocks
    requests = cycle([tokens_of(number) for number in range(REQUESTS)])
    left = REQUESTS

    def next_request(_: None) -> list[list[int]]:
        nonlocal left
        if left == 0:
            must_be(allocator.get_prefix_cache_hit_rate(), 0)
            must_be(allocator.reset_prefix_cache(), True)
            left = REQUESTS
        left -= 1
        return next(requests)

    return timed(
        next_request,
        lambda tokens: allocate(None, tokens),
        lambda blocks: free_all(allocator, blocks),
        REQUEST,
    )


def cached_requests(of: Allocators) -> tuple[Any, list[list[list[int]]]]:
    """An allocator all of whose blocks are free and cached, and what they hold."""
    allocator = of.PrefixCachingBlockAllocator(POOL, BLOCK_SIZE)
    requests = [tokens_of(number) for number in range(REQUESTS)]
    for time, tokens in enumerate(requests):
        blocks = allocator.allocate_immutable_blocks(None, tokens)
        allocator.mark_blocks_as_accessed(ids(blocks), float(time))
        free_all(allocator, blocks)
    must_be(allocator.evictor.num_blocks, POOL)
    return allocator, requests


def allocate_cached(of: Allocators, shared: bool) -> Side:
    """All hits; `shared` if someone uses the blocks already, else they are free."""
    allocator, requests = cached_requests(of)
    allocate = allocator.allocate_immutable_blocks
    if shared:
        held = [allocate(None, tokens) for tokens in requests]
        must_be(len(held), REQUESTS)
    turns = cycle(requests)
    times = count(REQUESTS)

    def give_back(blocks: list[Any]) -> None:
        allocator.mark_blocks_as_accessed(ids(blocks), float(next(times)))
        free_all(allocator, blocks)

    return timed(
        lambda _: next(turns),
        lambda tokens: allocate(None, tokens),
        give_back,
        REQUEST,
    )


def allocate_evicting(of: Allocators) -> Side:
    """A block is evicted for each: the pool is full of what others left behind."""
    allocator, requests = cached_requests(of)
    allocate = allocator.allocate_immutable_blocks
    # Twice what the pool holds: gone again when its turn comes.
    others = [tokens_of(REQUESTS + number) for number in range(REQUESTS)]
    turns = cycle(others + requests)
    times = count(REQUESTS)

    def give_back(blocks: list[Any]) -> None:
        allocator.mark_blocks_as_accessed(ids(blocks), float(next(times)))
        free_all(allocator, blocks)
        must_be(allocator.evictor.num_blocks, POOL)

    def next_request(_: None) -> list[list[int]]:
        must_be(allocator.get_prefix_cache_hit_rate(), 0)
        return next(turns)

    return timed(
        next_request, lambda tokens: allocate(None, tokens), give_back, REQUEST
    )


# -- fork and free ----------------------------------------------------------------


def fork(of: Allocators) -> Side:
    allocator, requests = cached_requests(of)
    last = allocator.allocate_immutable_blocks(None, requests[0])[-1]
    forked = allocator.fork
    return timed(
        lambda _: last,
        forked,
        lambda blocks: free_all(allocator, blocks),
        REQUEST,
    )


def free(of: Allocators, shared: bool) -> Side:
    """A call a block; `shared` if another request goes on using the blocks."""
    allocator, requests = cached_requests(of)
    allocate = allocator.allocate_immutable_blocks
    if shared:
        held = [allocate(None, tokens) for tokens in requests]
        must_be(len(held), REQUESTS)
    turns = cycle(requests)
    times = count(REQUESTS)

    def next_blocks(_: None) -> list[Any]:
        blocks = allocate(None, next(turns))
        allocator.mark_blocks_as_accessed(ids(blocks), float(next(times)))
        return blocks

    return timed(
        next_blocks, lambda blocks: free_all(allocator, blocks), lambda _: None, REQUEST
    )


# -- beyond the floors ------------------------------------------------------------


def block_table(of: Allocators, num_cpu_blocks: int = 0) -> tuple[Any, Any]:
    """An allocator for two devices and an empty table of its blocks."""
    allocator = of.CpuGpuBlockAllocator.create(
        "prefix_caching", POOL, num_cpu_blocks, BLOCK_SIZE
    )
    return allocator, of.BlockTable(BLOCK_SIZE, allocator)


def table_allocate_and_free(of: Allocators) -> Side:
    """A prompt whose blocks are cached, through a BlockTable, there and back."""
    allocator, _ = block_table(of)
    prompt = flat(tokens_of(0))

    def live(_: None) -> Any:
        table = of.BlockTable(BLOCK_SIZE, allocator)
        table.allocate(prompt)
        table.free()
        return table

    return timed(lambda _: None, live, lambda _: None, REQUEST)


def table_append(of: Allocators) -> Side:
    """A token at a time, none of it cached; counted by tokens."""
    allocator, _ = block_table(of)
    prompt, more = tokens_of(0, 1)[0], flat(tokens_of(1))[:GROWN]
    singles = [[token] for token in more]

    def start(_: None) -> Any:
        table = of.BlockTable(BLOCK_SIZE, allocator)
        table.allocate(prompt)
        return table

    def grow(table: Any) -> Any:
        append = table.append_token_ids
        for token in singles:
            append(token)
        return table

    def end(table: Any) -> None:
        must_be(table.num_full_slots, BLOCK_SIZE + GROWN)
        table.free()
        must_be(allocator.reset_prefix_cache(), True)

    return timed(start, grow, end, GROWN)


def swap(of: Allocators) -> Side:
    """A request to the CPU and back; both find its blocks cached."""
    allocator, table = block_table(of, POOL)
    table.allocate(flat(tokens_of(0)))
    blocks = table.blocks
    gpu, cpu = of.Device.GPU, of.Device.CPU

    def there_and_back(_: None) -> None:
        allocator.swap(blocks, gpu, cpu)
        allocator.swap(blocks, cpu, gpu)

    def end(_: None) -> None:
        must_be(len(allocator.get_and_reset_swaps()), 2 * REQUEST)

    return timed(lambda _: None, there_and_back, end, 2 * REQUEST)


def find_prefix(of: Allocators, blocks: int) -> Side:
    """All of so many hashes are cached."""
    allocator = of.PrefixCachingBlockAllocator(POOL, BLOCK_SIZE)
    held = allocator.allocate_immutable_blocks(None, tokens_of(0, blocks))
    hashes = [block.content_hash for block in held]
    allocator.mark_blocks_as_computed([])
    find = allocator.find_cached_blocks_prefix
    must_be(len(find(hashes)), blocks)
    # `held` keeps the blocks in use.
    return timed(lambda _: held, lambda _: find(hashes), lambda _: None, blocks)


def mark_accessed(of: Allocators) -> Side:
    """The blocks of a running request, once a step."""
    allocator, requests = cached_requests(of)
    block_ids = ids(allocator.allocate_immutable_blocks(None, requests[0]))
    times = count(REQUESTS)
    mark = allocator.mark_blocks_as_accessed
    return timed(
        lambda _: float(next(times)),
        lambda now: mark(block_ids, now),
        lambda _: None,
        REQUEST,
    )


def evict_and_add(of: Allocators) -> Side:
    """The evictor alone: the oldest block goes and comes in again as the latest."""
    evictor = of.LRUEvictor()
    for block_id in range(POOL):
        evictor.add(block_id, block_id, block_id % REQUEST, float(block_id // REQUEST))
    times = count(REQUESTS)

    def work(now: float) -> None:
        for depth in range(REQUEST):
            block_id, content_hash = evictor.evict()
            evictor.add(block_id, content_hash, depth, now)

    return timed(lambda _: float(next(times)), work, lambda _: None, REQUEST)
