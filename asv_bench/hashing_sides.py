"""The work that the hashing rows measure: each function prepares one side.

Stores nothing. Both sides of a row hash the same random tokens. Where ours hashes many
blocks in one call, its digests must be stock's, or it is not timed. Stock is vLLM's own
functions, called as its scheduler calls them: with lists, since it takes nothing else;
where `keyed` has another side, it is SGLang's radix tree, which hashes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import Side
from pool_sides import BLOCK_SIZE, HALF, POOL, SEED, clock, loop_matcher
from sglang_tree import tree_of

from kvcache import BlockPool, hashing

CHAIN = 1_000  # blocks
REQUEST_TOKENS = 131_072
VOCABULARY = 128_256  # Llama 3's
# Given, so that the chains of xxhash begin alike on both sides, in every process.
PARENT = bytes(range(32))

AS_GIVEN: dict[str, Callable[[np.ndarray], Any]] = {
    "list": np.ndarray.tolist,
    "int32 array": np.ascontiguousarray,
}


class FakeRequest:
    """What a block hasher reads of vLLM's Request, and how it grows."""

    lora_request = cache_salt = prompt_embeds = None
    mm_features: tuple[Any, ...] = ()

    def __init__(self, tokens: list[int], hasher: Callable[[Any], list[bytes]]) -> None:
        self.all_token_ids = tokens
        self.block_hashes: list[bytes] = []
        self._hasher = hasher

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.block_hashes.extend(self._hasher(self))


def random_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, VOCABULARY, count, np.int32)


def repeated(work: Callable[[], Any], blocks: int) -> Side:
    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            work()
        return clock() - start

    return Side(run, blocks)


def stock_chain(stock: Any, name: str) -> Callable[[], list[bytes]]:
    """vLLM's loop over the blocks of a request, without its search for extra keys."""
    tokens = random_tokens(CHAIN * BLOCK_SIZE).tolist()
    hash_block, hash_fn = stock.utils.hash_block_tokens, getattr(stock.hashing, name)

    def chain() -> list[bytes]:
        hashes, parent = [], PARENT
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = hash_block(hash_fn, parent, tokens[start : start + BLOCK_SIZE])
            hashes.append(parent)
        return hashes

    return chain


def hash_chain_by_stock(stock: Any, name: str) -> Side:
    return repeated(stock_chain(stock, name), CHAIN)


def hash_chain(stock: Any, name: str, kind: str) -> Side:
    """One call for all blocks."""
    tokens = AS_GIVEN[kind](random_tokens(CHAIN * BLOCK_SIZE))
    hash_blocks, hash_fn = hashing.hash_blocks, getattr(hashing, name)

    def chain() -> Any:
        return hash_blocks(tokens, BLOCK_SIZE, PARENT, hash_fn=hash_fn)

    must_agree(chain(), stock_chain(stock, name)())
    return repeated(chain, CHAIN)


def hash_one_a_call(module: Any, functions: Any, name: str) -> Side:
    """The same call on both sides, whose modules are given."""
    tokens = random_tokens(CHAIN * BLOCK_SIZE).reshape(-1, BLOCK_SIZE).tolist()
    hash_block, hash_fn = module.hash_block_tokens, getattr(functions, name)

    def chain() -> None:
        parent = PARENT
        for block in tokens:
            parent = hash_block(hash_fn, parent, block)

    return repeated(chain, CHAIN)


def stock_hasher(stock: Any) -> Callable[[Any], list[bytes]]:
    stock.utils.init_none_hash(stock.hashing.sha256)
    return stock.utils.get_request_block_hasher(BLOCK_SIZE, stock.hashing.sha256)


def hash_request_by_stock(stock: Any) -> Side:
    tokens = random_tokens(REQUEST_TOKENS).tolist()
    hasher = stock_hasher(stock)
    request = FakeRequest(tokens, hasher)
    return repeated(lambda: hasher(request), REQUEST_TOKENS // BLOCK_SIZE)


def hash_request(stock: Any, kind: str) -> Side:
    numbers = random_tokens(REQUEST_TOKENS)
    tokens = AS_GIVEN[kind](numbers)
    hash_blocks = hashing.hash_blocks
    expected = stock_hasher(stock)(FakeRequest(numbers.tolist(), list))
    must_agree(hash_blocks(tokens, BLOCK_SIZE), expected)
    return repeated(
        lambda: hash_blocks(tokens, BLOCK_SIZE), REQUEST_TOKENS // BLOCK_SIZE
    )


def append_to_request(hasher: Callable[[Any], list[bytes]]) -> Side:
    """A request that grows by a token and then asks its hasher, as vLLM's does."""
    tokens = random_tokens(REQUEST_TOKENS).tolist()

    def grow() -> None:
        append = FakeRequest([], hasher).append
        for token in tokens:
            append(token)

    return repeated(grow, REQUEST_TOKENS // BLOCK_SIZE)


def append_to_stock_request(stock: Any) -> Side:
    return append_to_request(stock_hasher(stock))


def append_to_our_request() -> Side:
    return append_to_request(
        hashing.get_request_block_hasher(BLOCK_SIZE, hashing.sha256)
    )


def append_to_hasher() -> Side:
    tokens = random_tokens(REQUEST_TOKENS).tolist()

    def grow() -> None:
        append = hashing.BlockHasher(BLOCK_SIZE, hashing.sha256).append
        for token in tokens:
            append(token)

    return repeated(grow, REQUEST_TOKENS // BLOCK_SIZE)


def prompts_of(blocks: int) -> np.ndarray:
    """Prompts of so many blocks each, as many as the cached half of a pool holds."""
    count = HALF // blocks
    return random_tokens(count * blocks * BLOCK_SIZE).reshape(count, -1)


def pool_of_prompts(
    make_pool: Callable[..., Any],
    prompts: np.ndarray,
    hash_fn: Callable[[Any], bytes],
    scattered: bool,
) -> Any:
    """A pool whose free half holds the prompts."""
    pool = make_pool(POOL, True, BLOCK_SIZE)
    if scattered:
        scatter(pool)
    for prompt in prompts:
        hashes = hashing.hash_blocks(prompt.tolist(), BLOCK_SIZE, hash_fn=hash_fn)
        cached = pool.get_new_blocks(len(hashes))
        request = SimpleNamespace(block_hashes=hashes)
        pool.cache_full_blocks(request, cached, 0, len(hashes), BLOCK_SIZE, 0)
        pool.free_blocks(cached[::-1])
    return pool


def pool_that_keeps(
    prompts: np.ndarray, hasher: hashing.Keyed, scattered: bool
) -> BlockPool:
    """The same, with the prompts' tokens kept."""
    pool = BlockPool(POOL, True, BLOCK_SIZE, keep_tokens=True)
    if scattered:
        scatter(pool)
    for prompt in prompts:
        ids = pool.get_new_block_ids(len(prompt) // BLOCK_SIZE)
        pool.cache_block_tokens(ids, prompt, hasher)
        pool.free_block_ids(ids[::-1])
    return pool


def scatter(pool: Any) -> None:
    """Have the free blocks stand in random order."""
    blocks = pool.get_new_blocks(POOL - 1)
    np.random.default_rng(SEED).shuffle(blocks)
    pool.free_blocks(blocks)


def asked_for(prompts: list[Any], cold: bool) -> list[Any]:
    """The prompts that are looked up: all of them in turns, or one again and again."""
    return prompts if cold else prompts[:1]


def match_tokens_keyed(blocks: int, cold: bool = False, keep: bool = False) -> Side:
    """A match by digests, or by the tokens that the pool keeps."""
    prompts = prompts_of(blocks)
    hasher = hashing.keyed
    if keep:
        pool = pool_that_keeps(prompts, hasher, cold)
    else:
        pool = pool_of_prompts(BlockPool, prompts, hasher, cold)
    match = pool.match_prefix_tokens
    return match_each(
        lambda tokens: match(tokens, hasher), asked_for(list(prompts), cold), blocks
    )


def match_tokens_sha256(blocks: int, cold: bool = False) -> Side:
    prompts = prompts_of(blocks)
    pool = pool_of_prompts(BlockPool, prompts, hashing.sha256, cold)
    hash_blocks, match = hashing.hash_blocks, pool.match_prefix_ids
    return match_each(
        lambda tokens: match(hash_blocks(tokens, BLOCK_SIZE)),
        asked_for(list(prompts), cold),
        blocks,
    )


def match_tokens_by_stock(stock: Any, blocks: int, cold: bool = False) -> Side:
    """A new request's hashes, then one lookup a hash."""
    prompts = prompts_of(blocks)
    pool = pool_of_prompts(stock.BlockPool, prompts, hashing.sha256, cold)
    hasher, match = stock_hasher(stock), loop_matcher(pool)
    return match_each(
        lambda request: match(hasher(request)),
        [FakeRequest(tokens, hasher) for tokens in asked_for(prompts.tolist(), cold)],
        blocks,
    )


def match_tokens_by_sglang(
    sglang: Any, blocks: int, cold: bool = False, ids: bool = True
) -> Side:
    """A lookup in SGLang's radix tree, which holds as many pages as the pool does.

    It takes 64-bit tokens (an array("q"), as its requests keep them), ready before the
    clock starts, and gives a slot a token. Without `ids` it is the match alone, which
    gives the number of tokens and the node to read their slots from.
    """
    prompts = prompts_of(blocks)
    pages = np.arange(1, POOL)
    if cold:
        np.random.default_rng(SEED).shuffle(pages)
    pages = pages[: len(prompts) * blocks].reshape(len(prompts), blocks)
    tree = tree_of(sglang, prompts, pages, BLOCK_SIZE)
    return in_turns(
        tree.match if ids else tree.find, asked_for(tree.keys, cold), blocks
    )


def match_each(match: Callable[[Any], Any], prompts: list[Any], blocks: int) -> Side:
    for prompt in prompts:
        if len(match(prompt)) != blocks:
            raise AssertionError("a prompt is not cached as a whole")
    return in_turns(match, prompts, blocks)


def in_turns(match: Callable[[Any], Any], prompts: list[Any], blocks: int) -> Side:
    turns = cycle(prompts)

    def run(loops: int) -> int:
        start = clock()
        for _ in range(loops):
            match(next(turns))
        return clock() - start

    return Side(run, blocks)


def must_agree(ours: Any, stock: list[bytes]) -> None:
    if list(map(bytes, ours)) != stock:
        raise AssertionError("the digests are not vLLM's")
