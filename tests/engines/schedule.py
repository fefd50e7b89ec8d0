"""The scheduler of scheduler.pyx through the Python face, and its workload."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.manager import FullAttention, KVCacheManager

BLOCK_SIZE = 16
Int64s = npt.NDArray[np.int64]


class Workload(NamedTuple):
    """Requests: lengths in tokens, and the digests of all blocks they will fill."""

    prompts: Int64s
    goals: Int64s
    digests: npt.NDArray[np.uint8]  # (sum of blocks, 16)
    starts: Int64s  # of each request's digests


def make_workload(num_requests: int, seed: int) -> Workload:
    """Prompts that begin with one of 20 prefixes, and go on alone."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(1, 30 * BLOCK_SIZE, num_requests)
    goals = prompts + generator.integers(1, 5 * BLOCK_SIZE, num_requests)
    blocks = goals // BLOCK_SIZE
    starts = np.concatenate([[0], np.cumsum(blocks)[:-1]])
    digests = generator.integers(0, 256, (int(blocks.sum()) + 1, 16), np.uint8)
    shared = generator.integers(0, 256, (20, 40, 16), np.uint8)
    for i in range(num_requests):
        n = int(min(prompts[i] // BLOCK_SIZE, generator.integers(0, 30)))
        digests[starts[i] : starts[i] + n] = shared[generator.integers(20), :n]
    return Workload(prompts, goals, digests, starts)


def make_manager(num_blocks: int, num_requests: int) -> KVCacheManager:
    return KVCacheManager(
        num_blocks,
        [FullAttention(BLOCK_SIZE)],
        max_model_len=1024,
        max_num_requests=num_requests,
    )


def run(
    manager: KVCacheManager, work: Workload, most_running: int
) -> tuple[list[int], int]:
    """Serve all requests: the block ids in the order they came, and preemptions."""
    rows: dict[int, int] = {}
    log: list[int] = []
    num_tokens = work.prompts.tolist()
    waiting, running = list(range(len(num_tokens)))[::-1], []
    preemptions = 0

    def digests_of(job: int, start: int, stop: int) -> list[bytes]:
        first = int(work.starts[job])
        return [bytes(d) for d in work.digests[first + start : first + stop]]

    while waiting or running:
        while waiting and len(running) < most_running:
            job = waiting[-1]
            if job not in rows:
                hashes = digests_of(job, 0, num_tokens[job] // BLOCK_SIZE)
                rows[job] = manager.add_request(
                    hashes=hashes, num_tokens=num_tokens[job]
                )
            num_new = num_tokens[job] - manager.match(rows[job])
            if (
                manager.allocate_slots(rows[job], num_new, full_sequence_must_fit=True)
                is None
            ):
                break
            log += manager.block_ids(rows[job]).tolist()
            running.append(waiting.pop())
        kept = []
        for job in running:
            if num_tokens[job] == work.goals[job]:
                manager.free(rows[job])
                continue
            num_tokens[job] += 1
            blocks, rest = divmod(num_tokens[job], BLOCK_SIZE)
            fresh = [] if rest else digests_of(job, blocks - 1, blocks)
            manager.append(rows[job], num_tokens=1, hashes=fresh)
            kept.append(job)
        running, done = kept, 0
        while done < len(running):
            step = np.array([rows[job] for job in running[done:]], np.int32)
            served, ids, _ = manager.allocate_step(step, np.ones(len(step), np.int32))
            log += ids.tolist()
            done += served
            if done < len(running):
                manager.preempt(rows[running[-1]])
                waiting.append(running.pop())
                preemptions += 1
    return log, preemptions
