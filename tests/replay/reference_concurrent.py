"""`reference_run`: requests that arrive, run side by side and are preempted.

In plain Python and by the rules in `kvcache.replay.replay` alone: a pool as an ordered
dict of free blocks (front first), reference counts, and the cached blocks of each key,
oldest first; a request as its keys and blocks. Short enough to be obviously right.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

from kvcache.replay.arrivals import Arrivals

Key = bytes | tuple[int, int]


class Pool:
    """Blocks, who uses them and what they hold; block 0 is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.users = [0] * num_blocks
        self.key_of: dict[int, Key] = {}
        self.cached: defaultdict[Key, list[int]] = defaultdict(list)
        self.evictions = 0

    def find(self, keys: list[Key]) -> list[int]:
        """Return the blocks of the leading keys that are cached."""
        found: list[int] = []
        for key in keys:
            if not self.cached.get(key):
                break
            found.append(self.cached[key][0])
        return found

    def hold(self, block: int) -> None:
        """Use a block."""
        self.users[block] += 1
        self.free.pop(block, None)

    def take(self) -> int:
        """Use the first free block, which loses what it held."""
        block = next(iter(self.free))
        self.hold(block)
        if block in self.key_of:
            key = self.key_of.pop(block)
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
            self.evictions += 1
        return block

    def cache(self, block: int, key: Key) -> None:
        """Say what a block holds."""
        self.key_of[block] = key
        self.cached[key].append(block)

    def give_back(self, blocks: list[int]) -> None:
        """Use blocks no more, last first; those that hold something go to the back."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free[block] = None
                self.free.move_to_end(block, last=block in self.key_of)


@dataclass
class Request:
    """One that has arrived."""

    number: int
    prompt: int
    tokens: int  # known
    left: int  # to generate
    keys: list[Key]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    hits: int = 0
    ran: bool = False


def reference_run(
    num_blocks: int, size: int, arrivals: Arrivals, concurrency: int, step_ms: float
) -> dict[str, int | float | str]:
    """Return what `ConcurrentReplay.result` does, without the time it took."""
    lengths, outputs, times, starts = (part.tolist() for part in arrivals[:4])
    keys = [key.tobytes() for key in arrivals.keys]
    coming = deque(
        Request(i, length, length, max(output, 1), [*keys[at : at + length // size]])
        for i, (length, output, at) in enumerate(
            zip(lengths, outputs, starts, strict=True)
        )
    )
    pool = Pool(num_blocks)
    waiting: deque[Request] = deque()
    running: list[Request] = []
    lines: list[str] = []
    count: defaultdict[str, int] = defaultdict(int)
    now = times[0] if times else 0.0

    def leave(request: Request) -> None:
        ids = " ".join(map(str, request.blocks))
        lines.append(f"{request.hits * size}: {ids}")
        count["new_blocks"] += len(request.blocks) - request.hits
        count["blocks"] += len(request.blocks)
        pool.give_back(request.blocks)
        request.blocks, request.computed = [], 0

    def compute(request: Request, tokens: int) -> bool:
        while len(request.blocks) * size < tokens:
            if not pool.free:
                return False
            request.blocks.append(pool.take())
        for i in range(request.computed // size, tokens // size):
            pool.cache(request.blocks[i], request.keys[i])
        request.computed = tokens
        return True

    def admit(request: Request) -> bool:
        hits = pool.find(request.keys[: (request.tokens - 1) // size])
        free_hits = sum(pool.users[block] == 0 for block in hits)
        needed = -(-request.tokens // size) - len(hits) + free_hits
        if needed > len(pool.free):
            return False
        for block in hits:
            pool.hold(block)
        request.blocks, request.hits = hits, len(hits)
        request.computed = len(hits) * size
        if request.ran:
            count["recomputed_tokens"] += request.tokens - 1 - request.computed
        else:
            count["prompt_tokens"] += request.tokens
            count["hit_tokens"] += request.computed
        request.ran = True
        assert compute(request, request.tokens)
        return True

    def note_peak() -> None:
        used = num_blocks - 1 - len(pool.free)
        count["peak_blocks"] = max(count["peak_blocks"], used)

    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, times[coming[0].number])
        # Decode.
        preempted = False
        for request in running[:]:
            while request in running and not compute(request, request.tokens):
                note_peak()
                newest = running.pop()
                leave(newest)
                waiting.appendleft(newest)
                count["preemptions"] += 1
                preempted = True
        # Admit. Those that have arrived wait behind the preempted ones.
        while not preempted and len(running) < concurrency:
            if not waiting:
                if not coming or times[coming[0].number] > now:
                    break
                request = coming.popleft()
                count["requests"] += 1
                most = request.prompt + request.left - 1
                if request.prompt == 0:
                    lines.append("")
                elif -(-most // size) > num_blocks - 1:
                    count["skipped"] += 1
                    lines.append("skip")
                else:
                    waiting.append(request)
                continue
            if not admit(waiting[0]):
                break
            running.append(waiting.popleft())
        if not running:
            continue
        # Each has generated a token.
        note_peak()
        count["steps"] += 1
        count["generated"] += len(running)
        count["max_running"] = max(count["max_running"], len(running))
        now += step_ms
        for request in running[:]:
            request.left -= 1
            if request.left == 0:
                running.remove(request)
                leave(request)
                continue
            request.tokens += 1
            if request.tokens % size == 0:
                request.keys.append((request.number, request.tokens // size))

    text = "".join(f"{line}\n" for line in lines)
    names = ["requests", "skipped", "prompt_tokens", "hit_tokens", "new_blocks"]
    names += ["blocks", "steps", "preemptions", "recomputed_tokens", "peak_blocks"]
    return {
        "num_blocks": num_blocks,
        **{name: count[name] for name in [*names, "max_running"]},
        "hit_rate": count["hit_tokens"] / max(count["prompt_tokens"], 1),
        "evictions": pool.evictions,
        "cached_blocks": len(pool.cached),
        "assignment_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "mean_running": count["generated"] / max(count["steps"], 1),
    }
