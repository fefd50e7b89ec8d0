"""Block hashes: chains in one call, a request that grows, tokens -> matched blocks."""

import hashlib
import pickle
from itertools import cycle

import numpy as np

import kvcache
from kvcache import hashing

from .common import BLOCK_SIZE, SEED, scatter

CHAIN = 1_000  # blocks
VOCABULARY = 128_256
PARENT = bytes(range(32))
ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "keyed"]
KINDS = ["list", "int32", "int64"]
POOL = 100_000  # blocks


def random_tokens(count, kind):
    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, count, np.int32)
    return tokens.tolist() if kind == "list" else tokens.astype(kind)


def hash_function(name):
    """The function; skips the case where its optional package is missing."""
    hash_fn = hashing.get_hash_fn_by_name(name)
    try:
        hashing.hash_block_tokens(hash_fn, None, list(range(BLOCK_SIZE)), ("extra",))
    except ModuleNotFoundError:
        raise NotImplementedError(f"{name} needs an optional package") from None
    return hash_fn


class Chain:
    """All blocks of a request in one call."""

    params = (ALGORITHMS, KINDS)
    param_names = ("algorithm", "tokens")

    def setup(self, algorithm, kind):
        self.hash_fn = hash_function(algorithm)
        self.parent = self.hash_fn("root") if algorithm != "keyed" else None
        self.tokens = random_tokens(CHAIN * BLOCK_SIZE, kind)

    def time_hash_1000_blocks(self, algorithm, kind):
        hashing.hash_blocks(self.tokens, BLOCK_SIZE, self.parent, hash_fn=self.hash_fn)


class OneCall:
    """A call a block."""

    params = (ALGORITHMS,)
    param_names = ("algorithm",)

    def setup(self, algorithm):
        self.hash_fn = hash_function(algorithm)
        tokens = random_tokens(CHAIN * BLOCK_SIZE, "int32")
        self.blocks = tokens.reshape(-1, BLOCK_SIZE).tolist()

    def time_hash_1000_blocks(self, algorithm):
        parent = None
        for tokens in self.blocks:
            parent = hashing.hash_block_tokens(self.hash_fn, parent, tokens)


class PlainChain:
    """The baseline: pickle and hashlib, as vLLM has it."""

    def setup(self):
        self.tokens = random_tokens(CHAIN * BLOCK_SIZE, "list")

    def time_hash_1000_blocks(self):
        parent = PARENT
        for start in range(0, len(self.tokens), BLOCK_SIZE):
            block = (parent, tuple(self.tokens[start : start + BLOCK_SIZE]), None)
            parent = hashlib.sha256(pickle.dumps(block, protocol=5)).digest()


class Growing:
    """A request of 1,000 blocks whose tokens come one by one, or 100 at a time."""

    params = (ALGORITHMS,)
    param_names = ("algorithm",)

    def setup(self, algorithm):
        self.hash_fn = hash_function(algorithm)
        self.tokens = random_tokens(CHAIN * BLOCK_SIZE, "list")
        self.chunks = [
            self.tokens[start : start + 100]
            for start in range(0, len(self.tokens), 100)
        ]

    def time_append_one_by_one(self, algorithm):
        append = hashing.BlockHasher(BLOCK_SIZE, self.hash_fn).append
        for token in self.tokens:
            append(token)

    def time_append_100_at_a_time(self, algorithm):
        append = hashing.BlockHasher(BLOCK_SIZE, self.hash_fn).append
        for tokens in self.chunks:
            append(tokens)


class Match:
    """From an int32 array to matched ids; half of a scattered pool is cached.

    Each call looks up another prompt, so the calls go round all that is cached.
    """

    params = (["keyed", "keyed, tokens kept", "sha256"], [63, 2_000])
    param_names = ("algorithm", "blocks")

    def setup(self, algorithm, num_blocks):
        algorithm, _, keep = algorithm.partition(", ")
        hash_fn = hash_function(algorithm)
        pool = kvcache.BlockPool(POOL, True, BLOCK_SIZE, keep_tokens=bool(keep))
        scatter(pool)
        count = POOL // 2 // num_blocks
        tokens = random_tokens(count * num_blocks * BLOCK_SIZE, "int32")
        prompts = list(tokens.reshape(count, -1))
        for prompt in prompts:
            ids = pool.get_new_block_ids(num_blocks)
            if keep:
                pool.cache_block_tokens(ids, prompt, hash_fn)
            else:
                hashes = hashing.hash_blocks(prompt, BLOCK_SIZE, hash_fn=hash_fn)
                pool.cache_block_ids(ids, hashes)
            pool.free_block_ids(ids[::-1])
        if algorithm == "keyed":
            self.match = lambda tokens: pool.match_prefix_tokens(tokens, hash_fn)
        else:
            self.match = lambda tokens: pool.match_prefix_ids(
                hashing.hash_blocks(tokens, BLOCK_SIZE, hash_fn=hash_fn)
            )
        if len(self.match(prompts[-1])) != num_blocks:
            raise AssertionError("the prompt is not cached as a whole")
        self.prompts = cycle(prompts)

    def time_match(self, algorithm, num_blocks):
        self.match(next(self.prompts))
