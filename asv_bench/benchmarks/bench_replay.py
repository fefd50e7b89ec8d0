"""A generated multi-turn chat, replayed: the whole job, and what it must give."""

from kvcache.replay import replay
from kvcache.replay.batches import batches
from kvcache.replay.workload import Workload

from .common import WHO, PlainPool

REQUESTS = {"sessions": 96, "turns": 8, "open_sessions": 64}


class Chat:
    """Pools that hold little of the running sessions, some of them, all of them.

    `track_*` shows both sides: they must agree.
    """

    params = (WHO, [1_000, 5_000, 50_000])
    param_names = ("who", "blocks")

    def setup(self, who, num_blocks):
        self.replay = replay_by_kvcache if who == "kvcache" else replay_plainly

    def time_replay(self, who, num_blocks):
        self.replay(num_blocks)

    def peakmem_replay(self, who, num_blocks):
        self.replay(num_blocks)

    def track_hit_tokens(self, who, num_blocks):
        return self.replay(num_blocks)["hit_tokens"]

    def track_evictions(self, who, num_blocks):
        return self.replay(num_blocks)["evictions"]

    def track_skipped(self, who, num_blocks):
        return self.replay(num_blocks)["skipped"]

    track_hit_tokens.unit = "tokens"
    track_evictions.unit = "blocks"
    track_skipped.unit = "requests"


def replay_by_kvcache(num_blocks):
    report = replay(Workload(**REQUESTS), [num_blocks], record_assignment=False)
    return report.runs[0]


def replay_plainly(num_blocks):
    """The same rules in plain Python."""
    workload = Workload(**REQUESTS)
    size = workload.block_size
    pool = PlainPool(num_blocks)
    hit_tokens = skipped = 0
    for batch in batches(workload, size):
        keys = list(map(bytes, batch.keys))
        for i, length in enumerate(batch.input_lengths.tolist()):
            hashes = keys[batch.indptr[i] : batch.indptr[i + 1]]
            hits = pool.match_prefix_ids(hashes[: max(length - 1, 0) // size])
            num_new = -(-length // size) - len(hits)
            num_free_hits = sum(pool.ref_cnt[block] == 0 for block in hits)
            if num_new + num_free_hits > pool.get_num_free_blocks():
                skipped += 1
                continue
            pool.touch_block_ids(hits)
            new = pool.get_new_block_ids(num_new)
            pool.cache_block_ids(new[: len(hashes) - len(hits)], hashes[len(hits) :])
            pool.free_block_ids((hits + new)[::-1])
            hit_tokens += len(hits) * size
    return {
        "hit_tokens": hit_tokens,
        "evictions": pool.num_evicted,
        "skipped": skipped,
    }
