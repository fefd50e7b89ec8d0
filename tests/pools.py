"""What the tests of the pool share: hashes, requests, and what a pool looks like."""

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache import BlockPool, KVCacheBlock
from kvcache.hashing import make_block_hash_with_group_id

UNIT = 4
"""Tokens a block hash covers, unless a test says otherwise."""


def hash_of(number: int, length: int = 32) -> bytes:
    """The digest that stands for a block's content."""
    return hashlib.sha256(b"content %d" % number).digest()[:length]


def hashes_of(*numbers: int) -> list[bytes]:
    return [hash_of(number) for number in numbers]


def key_of(number: int, group: int = 0) -> bytes:
    return make_block_hash_with_group_id(hash_of(number), group)


def request_of(*numbers: int) -> SimpleNamespace:
    """A request of which nothing but the block hashes can be read."""
    return SimpleNamespace(block_hashes=hashes_of(*numbers))


def full_request_of(*numbers: int, unit: int = UNIT, **fields: Any) -> SimpleNamespace:
    """A request with everything that events tell of; token i is 100 + i."""
    return SimpleNamespace(
        **{
            "block_hashes": hashes_of(*numbers),
            "all_token_ids": list(range(100, 100 + len(numbers) * unit)),
            "session_id": None,
            "lora_request": None,
            "mm_features": [],
            "cache_salt": None,
            "prompt_embeds": None,
            "_prompt_embeds_per_block_hashes": {},
            **fields,
        }
    )


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def walk(pool: BlockPool) -> list[int]:
    """Ids of the free blocks in the order in which they go."""
    return ids(pool.free_block_queue.get_all_free_blocks())


def cached(pool: BlockPool, *numbers: int, group: int = 0) -> list[KVCacheBlock]:
    """New blocks, in use, that hold these contents."""
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks(
        full_request_of(*numbers, unit=pool.hash_block_size),
        blocks,
        0,
        len(numbers),
        pool.hash_block_size,
        group,
    )
    return blocks


def hit(pool: BlockPool, number: int, group: int = 0) -> int | None:
    """Id of the block that answers for a content."""
    found = pool.get_cached_block(hash_of(number), [group])
    return None if found is None else found[0].block_id


def snapshot(pool: BlockPool) -> tuple[Any, ...]:
    """Everything that a call could have changed."""
    return (
        pool.blocks.as_array().tobytes(),
        walk(pool),
        pool.get_num_free_blocks(),
        len(pool.cached_block_hash_to_block),
        dict(pool.cached_block_hashes_by_block),
        list(pool.kv_event_queue),
        dict(pool._reuse_watchers),
    )


@contextmanager
def refused(
    error: type[Exception], *pools: BlockPool, match: str | None = None
) -> Iterator[None]:
    """The call in the body raises, and the pools stay as they were."""
    before = [snapshot(pool) for pool in pools]
    with pytest.raises(error, match=match):
        yield
    assert [snapshot(pool) for pool in pools] == before
    for pool in pools:
        pool.check()


def run_apart(code: str) -> str:
    """What a program prints that might crash the interpreter it runs in."""
    program = (
        "import gc, sys, weakref\n"
        "from types import SimpleNamespace\n"
        "from kvcache import *\n"
        f"{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.strip()
