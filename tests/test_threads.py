"""B101: eight threads at one pool, manager or allocator: right counts or a clear error.

With the GIL and without. What a thread takes it counts and gives back, so that in the
end all is free; in between it does what it likes with anything it can reach.
"""

import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pools import run_apart

from kvcache import BlockPool, KVCacheBlock
from kvcache.manager import FullAttention, KVCacheManager, SlidingWindow
from kvcache.prefix_caching import CpuGpuBlockAllocator, Device

THREADS = 8
OPERATIONS = 100_000  # of each thread on a pool; a quarter on what stands on one
SOURCES = Path(__file__).parents[1] / "kvcache"
UNSHARED = ("__cinit__", "__dealloc__", "__reduce__")  # one thread, or no state


def at_once(
    work: Callable[[random.Random, Callable[[], bool]], None],
    operations: int = OPERATIONS // 4,
) -> None:
    """Run the same work in all threads, from one moment on; what one raises fails."""
    barrier, failures = threading.Barrier(THREADS), []

    def run(seed: int) -> None:
        left = operations

        def more() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        barrier.wait()
        try:
            work(random.Random(seed), more)
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]


def test_a_pool_keeps_its_counts() -> None:
    pool = BlockPool(400, True, 16, enable_kv_cache_events=True)
    digests = [bytes([i]) * 16 for i in range(100)]
    everything = [
        lambda r: pool.blocks[r.randrange(400)].ref_cnt,
        lambda r: pool.blocks[r.randrange(400)].block_hash,
        lambda r: pool.blocks[r.randrange(400)].next_free_block,
        lambda r: pool.blocks[r.randrange(400)].pool,
        lambda r: repr(pool.blocks[r.randrange(400)]),
        lambda r: pool.get_num_free_blocks(),
        lambda r: pool.get_usage(),
        lambda r: pool.take_events(),
        lambda r: pool.evict_blocks([r.randrange(400)]),
        lambda r: pool.match_prefix_ids(r.sample(digests, 3)),
        lambda r: pool.get_cached_block(r.choice(digests), [0]),
        lambda r: len(pool.cached_block_hash_to_block),
        lambda r: pool.free_block_queue.num_free_blocks,
        lambda r: pool.blocks.as_array()["ref_cnt"].sum(),
        lambda r: pool.reset_prefix_cache(),
        lambda r: pool.nbytes,
    ]
    rare = [
        lambda r: pool.free_block_queue.get_all_free_blocks(),
        lambda r: pool.check(),
        lambda r: pool.match_prefix(digests, [0]),
    ]
    failed = [0] * THREADS

    def work(random: random.Random, more: Callable[[], bool]) -> None:
        mine: list[int] = []
        while more():
            try:
                choice = random.randrange(8)
                if choice == 0:
                    mine += pool.get_new_block_ids(random.randrange(6)).tolist()
                elif choice == 1:
                    mine += [b.block_id for b in pool.get_new_blocks(2)]
                elif choice == 2 and mine:
                    pool.touch([pool.blocks[mine[-1]]])
                    mine.append(mine[-1])
                elif choice == 3 and mine:
                    kept = random.randrange(len(mine))
                    freed, mine[kept:] = mine[kept:], []
                    pool.free_block_ids(freed)
                elif choice == 4 and mine:
                    pool.cache_block_ids([mine[-1]], [random.choice(digests)])
                elif choice == 5 and mine:
                    pool.free_blocks([pool.blocks[mine.pop()]])
                elif random.random() < 0.01:
                    random.choice(rare)(random)
                else:
                    random.choice(everything)(random)
            except ValueError:  # no free block, or a hash is there already
                failed[threading.get_native_id() % THREADS] += 1
        pool.free_block_ids(mine)

    at_once(work, OPERATIONS)
    assert sum(failed) > 100
    pool.check()
    assert pool.get_num_free_blocks() == 399
    assert pool.blocks.as_array()["ref_cnt"][1:].tolist() == [0] * 399


def test_a_manager_keeps_its_requests() -> None:
    manager = KVCacheManager(
        300,
        [FullAttention(4), SlidingWindow(4, 12)],
        max_model_len=256,
        max_num_requests=40,
    )

    def work(random: random.Random, more: Callable[[], bool]) -> None:
        mine: list[int] = []
        while more():
            try:
                choice = random.randrange(7)
                if choice == 0 and len(mine) < 5:
                    prompt = [random.randrange(3) for _ in range(random.randint(1, 40))]
                    mine.append(manager.add_request(prompt))
                elif choice == 1 and mine:
                    row = random.choice(mine)
                    num_new = manager.num_tokens(row) - manager.match(row)
                    manager.allocate_slots(row, num_new, full_sequence_must_fit=True)
                elif choice == 2 and mine:
                    manager.append(random.choice(mine), [1, 2, 3])
                elif choice == 3 and mine:
                    rows = np.array(mine, np.int32)
                    manager.allocate_step(rows, np.ones(len(mine), np.int32))
                elif choice == 4 and mine:
                    manager.free(mine.pop(random.randrange(len(mine))))
                elif choice == 5 and mine:
                    manager.preempt(random.choice(mine))
                else:
                    manager.take_changed_rows()
                    manager.block_ids(random.randrange(40)).tolist()
            except ValueError:  # no room, or not while the request is as it is
                pass
        for row in mine:
            manager.free(row)

    at_once(work)
    manager.check()
    assert manager.num_requests == 0
    assert manager.block_pool.get_num_free_blocks() == 299


def test_an_allocator_keeps_its_blocks() -> None:
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 200, 200, 4)

    def work(random: random.Random, more: Callable[[], bool]) -> None:
        mine = []
        while more():
            try:
                choice = random.randrange(6)
                if choice == 0:
                    tokens = [random.randrange(2) for _ in range(4)]
                    before = (
                        mine[-1] if mine and mine[-1].block_id is not None else None
                    )
                    mine.append(
                        allocator.allocate_immutable_block(before, tokens, Device.GPU)
                    )
                elif choice == 1:
                    mine.append(allocator.allocate_mutable_block(None, Device.GPU))
                elif choice == 2 and mine:
                    mine[-1].append_token_ids([random.randrange(2)])
                elif choice == 3 and mine:
                    mine += allocator.fork(mine[-1])
                elif choice == 4 and mine:
                    allocator.free(mine.pop())
                else:
                    allocator.get_num_free_blocks(Device.GPU)
                    allocator.get_prefix_cache_hit_rate(Device.GPU)
                    allocator.get_and_reset_swaps()
            except ValueError:  # no free block, or the block is full
                pass
        while mine:
            allocator.free(mine.pop())

    at_once(work)
    assert allocator.get_num_free_blocks(Device.GPU) == 200


def test_blocks_outlive_their_pools() -> None:
    shared: list[KVCacheBlock | None] = [None] * 4

    def work(random: random.Random, more: Callable[[], bool]) -> None:
        while more():
            block = shared[random.randrange(4)]
            if block is None or random.random() < 0.2:
                pool = BlockPool(4, True, 16)
                pool.get_new_blocks(1)
                shared[random.randrange(4)] = pool.blocks[random.randint(1, 2)]
                continue
            for _ in range(10):  # its pool goes meanwhile
                assert block.ref_cnt in (0, 1)
                assert block.block_id in (1, 2)
                assert isinstance(block.next_free_block, KVCacheBlock | None)
                block.reset_hash()
                pool = block.pool
                assert pool is None or len(pool.blocks) == 4

    at_once(work, OPERATIONS // 8)


def test_every_method_that_shares_state_is_under_the_lock() -> None:
    paths = sorted(SOURCES.rglob("*.pyx"))
    if not paths:
        pytest.skip("a wheel has no .pyx; a checkout and a source archive have")
    bare = []
    for path in paths:
        if path.name == "keyed_hash.pyx":
            continue  # once made, a Keyed does not change
        lines = path.read_text().split("\n")
        in_class = False
        for i, line in enumerate(lines):
            if re.match(r"\S", line) and not line.startswith((")", "@", "#")):
                in_class = line.startswith("cdef class")
            method = re.match(r"    def (\w+)", line)
            if not in_class or not method or method[1] in UNSHARED:
                continue
            body = "\n".join(lines[i + 1 :]).split("\n    def ")[0]
            if lines[i - 1].strip() in ("@staticmethod", "@classmethod"):
                continue
            if "yield" in body.split("\n    cdef ")[0]:
                continue  # an iterator: each item is read on its own
            if lines[i - 1].strip() != "@cython.critical_section":
                bare.append(f"{path.name}: {method[1]}")
        text = path.read_text()
        if "critical_section" in text and "from kvcache._lock cimport" not in text:
            bare.append(f"{path.name} does not cimport the lock")
    assert bare == []


@pytest.mark.skipif(
    getattr(sys, "_is_gil_enabled", lambda: True)(), reason="needs a build without GIL"
)
def test_importing_everything_leaves_the_gil_off() -> None:
    # Apart: what other tests import may have turned it on.
    printed = run_apart("""
import sys
import kvcache.capi, kvcache.prefix_caching, kvcache.replay
print(sys._is_gil_enabled())
""")
    assert printed == "False"


@pytest.mark.parametrize(
    "owner",
    [
        "BlockPool.__new__(BlockPool)",
        "BlockPool(9, True, 16)",
        "BlockPool(9, True, 16).get_new_blocks(2)",
        "FreeKVCacheBlockQueue([KVCacheBlock(0)])",
        "BlockHashToBlockMap()",
        "hashing.BlockHasher(16)",
        "manager.KVCacheManager(9, [manager.FullAttention(16)], max_model_len=64,"
        " max_num_requests=2)",
        "prefix_caching.CpuGpuBlockAllocator.create('prefix_caching', 4, 4, 16)",
        "prefix_caching.CpuGpuBlockAllocator.create('naive', 4, 4, 16)",
        "prefix_caching.LRUEvictor()",
    ],
)
def test_what_lives_until_the_interpreter_ends_goes_without_harm(owner: str) -> None:
    # Without the GIL a module may take the lock there for the first time.
    printed = run_apart(f"""
from kvcache import hashing, manager, prefix_caching
circle = [{owner}]
circle.append(circle)
print("done")
""")
    assert printed == "done"
