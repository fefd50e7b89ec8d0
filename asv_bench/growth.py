"""What a block costs as a pool grows, and as it fills, beside what memory allows.

    python asv_bench/growth.py [--quick] [--most BLOCKS] [--json FILE] [--plot FILE]

Run by a Python that has kvcache and Cython, with a C compiler. Pools of a thousand to
ten million blocks; then one of a million, of which ever more is cached. Beside each
cost, in turns with it, is that of a walk from row to row, in random order, through an
array as large as the rows: each step waits for the one before it, and memory gives no
more. Only their ratio counts.
"""
# Where a work is more than twice over the walk: "get (all evict) + cache + free", 15
# times and more up to 10,000 blocks, some 5 at 100,000. There a step of the walk is a
# hit of a cache, 4 to 31 ns, and what costs is instructions: some 490 a block by
# callgrind, for one slot emptied, one found and filled, a row written, and two lists
# linked. Beyond, it is 1.6 to 2.0 times: slots and digests are asked for ahead of their
# turn, and several are on their way at once, which a walk cannot have. All else stays
# below 1.5.
#
# What brought it there: taking evicts eight blocks behind the one it takes, and caching
# asks for the slots of 32 keys ahead (`EVICT_BEHIND`, `index_is_far`). What did not
# help: walking the free list ahead of the taking, for the next row is known no sooner;
# and asking for rows inside the loop that checks a batch, which touches them itself.

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import thread_time_ns as clock  # others may run: a round is long

import numpy as np
import plots
from c_loop import compiled
from measure import Pace, Side, TimeRow, this_machine

from kvcache import BlockPool

SIZES = [10**exponent for exponent in range(3, 8)]
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
FILLED = 1_000_000  # blocks of the pool that fills
BATCH = 1_000  # blocks a call
# Blocks that a round takes, at most: 64 MiB of rows, more than a cache holds.
SPAN = 1 << 20
DIGEST = 32
ROW = 64  # bytes
SEED = 20
FULL = Pace(rounds=9, long_rounds=9, samples=3, sample_ns=10_000_000)
QUICK = Pace(rounds=3, long_rounds=3, samples=2, sample_ns=2_000_000)

random = np.random.default_rng(SEED)


@dataclass
class Cost:
    """Nanoseconds a block of a work, and the walk's; `over` is their ratio."""

    work: str
    num_blocks: int
    share: float  # of the pool that is cached
    ns: float
    walk_ns: float
    over: float
    low: float
    high: float


def walk(num_rows: int) -> Side:
    """Steps from row to row, in an order that visits all of them once."""
    rows = aligned_rows(num_rows)
    order = random.permutation(num_rows).astype(np.int32)
    rows[order, 0] = np.roll(order, -1)
    go, at = compiled().walk, 0

    def run(loops: int) -> int:
        nonlocal at
        start = clock()
        at = go(rows, at, loops * BATCH)
        return clock() - start

    return Side(run, BATCH)


def aligned_rows(num_rows: int) -> np.ndarray:
    """Rows of a cache line each; NumPy asks for huge pages, as a pool does."""
    memory = np.zeros((num_rows + 1) * ROW, np.uint8)
    start = -memory.ctypes.data % ROW
    return memory[start : start + num_rows * ROW].view(np.int32).reshape(num_rows, -1)


def digests(count: int) -> np.ndarray:
    return random.integers(0, 256, (count, DIGEST), np.uint8)


class Ground:
    """A pool of a size that the works are done in, one after the other."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, True, 16)
        self.batch = min(BATCH, num_blocks - 1)
        self.cached: list[np.ndarray] = []  # hashes of the requests that are
        self.share = 0.0

    def scatter(self) -> None:
        """Have the free blocks stand in random order, as after long use."""
        ids = self.pool.get_new_block_ids(self.pool.get_num_free_blocks())
        random.shuffle(ids)
        self.pool.free_block_ids(ids)

    def fill(self, share: float) -> None:
        """Have so much of the pool cached and free, in requests of a batch."""
        self.share = share
        wanted = int((self.num_blocks - 1) * share) // self.batch
        new = []
        for _ in range(wanted - len(self.cached)):
            hashes = digests(self.batch)
            ids = self.pool.get_new_block_ids(self.batch)
            self.pool.cache_block_ids(ids, hashes)
            self.cached.append(hashes)
            new.append(ids)
        for ids in new:
            self.pool.free_block_ids(ids[::-1])

    # Works: each prepares what is to be timed.

    def get_and_free(self) -> Side:
        """Many batches are taken before they go back, to where they stood."""
        get, free = self.pool.get_new_block_ids, self.pool.free_block_ids
        uncached = self.num_blocks - 1 - len(self.cached) * self.batch
        batches = max(1, min(uncached, SPAN) // self.batch)

        def run(loops: int) -> int:
            start = clock()
            for _ in range(loops):
                taken = [get(self.batch) for _ in range(batches)]
                while taken:
                    free(taken.pop())
            return clock() - start

        return Side(run, batches * self.batch)

    def match(self) -> Side:
        """Each time another request; its hashes have just been made."""
        match = self.pool.match_prefix_ids
        turns = cycle(random.permutation(len(self.cached)).tolist())

        def run(loops: int) -> int:
            spent = 0
            for hashes in [self.cached[i].copy() for i in islice(turns, loops)]:
                hashes.sum()  # in the near caches, as if they had
                start = clock()
                found = match(hashes)
                spent += clock() - start
                if len(found) != len(hashes):
                    raise AssertionError("a request is not cached as a whole")
            return spent

        return Side(run, self.batch)

    def evict(self) -> Side:
        """Take blocks that all hold something, cache other content, free them."""
        pool = self.pool
        get, cache, free = (
            pool.get_new_block_ids,
            pool.cache_block_ids,
            pool.free_block_ids,
        )
        self.cached.clear()  # what they were is evicted now

        def run(loops: int) -> int:
            spent = 0
            for _ in range(loops):
                hashes = digests(self.batch)
                start = clock()
                ids = get(self.batch)
                cache(ids, hashes)
                free(ids)
                spent += clock() - start
            return spent

        return Side(run, self.batch)

    def cache_and_evict(self) -> Side:
        """Cache blocks that hold nothing, and take that out of the cache again."""
        pool = self.pool
        cache, drop = pool.cache_block_ids, pool.evict_blocks

        def run(loops: int) -> int:
            spent = 0
            for _ in range(loops):
                hashes = digests(self.batch)
                ids = pool.get_new_block_ids(self.batch)
                start = clock()
                cache(ids, hashes)
                drop(ids)
                spent += clock() - start
                pool.free_block_ids(ids)
            return spent

        return Side(run, self.batch)


def by_size(most: int, pace: Pace) -> Iterator[Cost]:
    """The works in pools of ever more blocks."""
    for num_blocks in [size for size in SIZES if size <= most]:
        ground, limit = Ground(num_blocks), walk(num_blocks)
        beside = partial(compare, limit, ground, pace)
        yield beside("get + free, in order", ground.get_and_free())
        ground.scatter()
        yield beside("get + free, scattered", ground.get_and_free())
        ground.fill(1)
        yield beside("match_prefix_ids", ground.match())
        yield beside("get (all evict) + cache + free", ground.evict())


def by_share(num_blocks: int, pace: Pace) -> Iterator[Cost]:
    """The works in a pool of which ever more is cached."""
    ground, limit = Ground(num_blocks), walk(num_blocks)
    beside = partial(compare, limit, ground, pace)
    ground.scatter()
    for share in SHARES:
        ground.fill(share)
        yield beside("get + free, scattered", ground.get_and_free())
        yield beside("match_prefix_ids", ground.match())
        yield beside("cache + evict", ground.cache_and_evict())


def compare(limit: Side, ground: Ground, pace: Pace, work: str, side: Side) -> Cost:
    result = TimeRow(work, None, lambda: side, lambda: limit).measure(pace)
    assert result.ours and result.stock and result.ratio and result.low and result.high
    return Cost(
        work,
        ground.num_blocks,
        ground.share,
        result.ours,
        result.stock,
        1 / result.ratio,
        1 / result.high,
        1 / result.low,
    )


def shown(costs: Iterator[Cost]) -> Iterator[Cost]:
    for cost in costs:
        print(
            f"{cost.work:31} {cost.num_blocks:>10,} {cost.share:>6.0%}"
            f" {cost.ns:>9.1f} {cost.walk_ns:>9.1f} {cost.over:>7.2f}"
            f"  {cost.low:.2f}-{cost.high:.2f}",
            flush=True,
        )
        yield cost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument(
        "--most", type=int, default=SIZES[-1], metavar="BLOCKS", help="the largest pool"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    plots.add_option(parser)
    options = parser.parse_args()
    plots.check(options.plot, parser)
    pace = QUICK if options.quick else FULL
    print(
        "work                                blocks cached        ns   walk ns    over"
    )
    sizes = list(shown(by_size(options.most, pace)))
    shares = list(shown(by_share(min(FILLED, options.most), pace)))
    report = {
        "machine": this_machine(),
        "by_size": [asdict(cost) for cost in sizes],
        "by_share": [asdict(cost) for cost in shares],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plots.growth(report, options.plot)


if __name__ == "__main__":
    main()
