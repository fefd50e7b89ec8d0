"""The long form of test_memory.py and test_size.py.

    python -m tests.long_memory [--pools 10000] [--operations 10000000]
                                [--blocks 50000000]

Makes and drops so many pools, and as many managers and allocators; runs so many
operations, shared out among all kinds of owners; and makes a pool of so many blocks, if
there is memory for it, takes all, caches some, matches, frees and checks. What was lost
and what a block takes is printed; it exits with 1 if anything was lost. A 0 leaves a
part out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHED = 1_000_000  # blocks of the large pool
SPARE = 2 * 2**30  # bytes that it leaves to others

# An object takes 16 bytes or more, and so does memory in C: one for each operation, or
# for each pool, is many times as much.
MOST_OBJECTS = 100
MOST_BYTES = 4 * 2**20


def lost(name: str, work: Callable[[int], None], times: int) -> Iterator[str]:
    """Run it; what to say if it lost anything."""
    use: Any = importlib.import_module("memory_use")
    start = time.monotonic()
    objects, size = use.left_over(work, times)
    spent = time.monotonic() - start
    print(f"{name}: {times:,} times, {objects} objects and {size:,} bytes left, "
          f"{spent:.0f} s", flush=True)  # fmt: skip
    if objects > MOST_OBJECTS or size > MOST_BYTES:
        yield name


def of_pools(times: int) -> Iterator[str]:
    for name, make_and_drop in importlib.import_module(
        "workloads"
    ).MADE_AND_DROPPED.items():

        def work(n: int, make_and_drop: Callable[[], None] = make_and_drop) -> None:
            for _ in range(n):
                make_and_drop()

        yield from lost(f"{name} made and dropped", work, times)


def of_operations(times: int) -> Iterator[str]:
    workloads = importlib.import_module("workloads").WORKLOADS
    for name, make in workloads.items():
        yield from lost(name, make(), -(-times // len(workloads)))


def of_size(num_blocks: int) -> Iterator[str]:
    """A pool of many blocks at work."""
    import numpy as np

    from kvcache import BlockPool

    use: Any = importlib.import_module("memory_use")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 100 * num_blocks + SPARE:
        print(f"a pool of {num_blocks:,} blocks: no room, {free:,} bytes are free")
        return
    digests = np.random.default_rng(1).integers(0, 256, (CACHED, 16), np.uint8)
    before = use.resident_bytes()
    clock = time.monotonic()

    def say(what: str) -> None:
        nonlocal clock
        now = time.monotonic()
        print(f"  {what}: {now - clock:.1f} s", flush=True)
        clock = now

    pool = BlockPool(num_blocks, True, 16)
    say(f"a pool of {num_blocks:,} blocks made")
    ids = pool.get_new_block_ids(num_blocks - 1)
    say("all blocks taken")
    assert pool.get_num_free_blocks() == 0 and ids[-1] == num_blocks - 1
    held = ids[-CACHED:].copy()  # ids that are large
    pool.cache_block_ids(held, digests)
    say(f"{CACHED:,} cached")
    assert (pool.match_prefix_ids(digests) == held).all()
    say("matched")
    pool.check()
    say("checked, all in use")
    pool.free_block_ids(ids[::-1].copy())
    say("all freed")
    assert pool.get_num_free_blocks() == num_blocks - 1
    assert (pool.match_prefix_ids(digests) == held).all()
    taken = pool.get_new_block_ids(num_blocks - 1 - CACHED // 2)
    say("all but half of the cached taken again")
    assert len(pool.cached_block_hash_to_block) == CACHED // 2
    pool.check()
    say("checked")
    del ids, taken
    gc.collect()
    grown = use.resident_bytes() - before
    print(f"{pool.nbytes / num_blocks:.2f} bytes a block, "
          f"{grown / num_blocks:.2f} of the process", flush=True)  # fmt: skip
    if pool.nbytes > 80 * num_blocks:
        yield "bytes a block"
    del pool
    left = use.resident_bytes() - before
    print(f"{left:,} bytes left when it is gone", flush=True)
    if left > 16 * MOST_BYTES:
        yield "a large pool"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--blocks", type=int, default=50_000_000)
    options = parser.parse_args()
    failed: list[str] = []
    for part, number in (
        (of_size, options.blocks),
        (of_pools, options.pools),
        (of_operations, options.operations),
    ):
        if number:
            failed += part(number)
    print(f"lost: {', '.join(failed)}" if failed else "nothing was lost")
    raise SystemExit(bool(failed))


# As in soak.py: the installed package is meant, unless it was compiled in place.
sys.path[:] = [
    str(HERE),
    *[each for each in sys.path if each not in ("", str(HERE.parent))],
    str(HERE.parent),
]

if __name__ == "__main__":
    main()
