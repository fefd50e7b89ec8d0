"""What the tests of the manager share: managers, prompts, and that a refusal is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from pools import snapshot

from kvcache.hashing import hash_blocks, sha256
from kvcache.manager import FullAttention, KVCacheManager

MAX_BLOCKS = 2**31 - 2
LONGEST = 64
MOST = 4


def make(*groups: Any, num_blocks: int = 21, **options: Any) -> KVCacheManager:
    """A manager of blocks of 4 tokens, of which 20 can be had."""
    options = {"max_model_len": LONGEST, "max_num_requests": MOST, **options}
    return KVCacheManager(num_blocks, groups or (FullAttention(4),), **options)


def hashes_of(tokens: Any, size: int = 4) -> list[bytes]:
    array = hash_blocks(np.asarray(tokens, np.int64), size, hash_fn=sha256)
    return [row.tobytes() for row in np.asarray(array)]


def run(manager: KVCacheManager, tokens: Any, **options: Any) -> int:
    """A request that has all its tokens computed."""
    row = manager.add_request(tokens, **options)
    hits = manager.match(row)
    assert manager.allocate_slots(row, len(tokens) - hits) is not None
    return row


def ids(manager: KVCacheManager, row: int, group: int = 0) -> list[int]:
    return manager.block_ids(row, group).tolist()  # type: ignore[no-any-return]


def num_free(manager: KVCacheManager) -> int:
    return manager.block_pool.get_num_free_blocks()


def refs(manager: KVCacheManager, block: int) -> int:
    return manager.block_pool.blocks[block].ref_cnt


def rows_of(manager: KVCacheManager) -> list[int]:
    found = []
    for row in range(manager.block_table().shape[0]):
        try:
            manager.num_tokens(row)
        except ValueError:
            continue
        found.append(row)
    return found


def picture(manager: KVCacheManager) -> tuple[Any, ...]:
    """Everything of a manager that a call could have changed."""
    groups = range(len(manager.groups))
    return (
        snapshot(manager.block_pool),
        manager.num_requests,
        [
            (
                row,
                manager.num_tokens(row),
                manager.num_computed_tokens(row),
                [manager.block_ids(row, g).tolist() for g in groups],
            )
            for row in rows_of(manager)
        ],
        manager.occupancy(),
        asdict(manager.prefix_cache_stats),
    )


@contextmanager
def refused(
    error: type[Exception], manager: KVCacheManager, match: str | None = None
) -> Iterator[None]:
    """The call in the body raises, and the manager stays as it was."""
    before = picture(manager)
    with pytest.raises(error, match=match):
        yield
    assert picture(manager) == before
    manager.check()
