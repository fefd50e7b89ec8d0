"""The block pool in plain Python: the model that the compiled one is compared with.

Blocks are ids, keys are bytes (block hash + group id); the free queue is a list, the
index a dict of lists. `chain` is the keys of a prompt, one for each `unit` tokens.
Every method checks its arguments first, so that a refused call changes nothing.
"""

from collections import Counter
from itertools import takewhile

from kvcache import BlockStateError, NoFreeBlocksError


def require(condition: object, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error


class ReferencePool:
    def __init__(self, num_blocks: int, caching: bool, unit: int) -> None:
        self.num_blocks, self.caching, self.unit = num_blocks, caching, unit
        self.queue = list(range(1, num_blocks))  # free blocks; the first goes first
        self.refs = [0] * num_blocks
        self.keys: list[list[bytes]] = [[] for _ in self.refs]  # a block's own first
        self.tokens: list[int | None] = [None] * num_blocks  # that its own key covers
        self.index: dict[bytes, list[int]] = {}  # key -> its blocks, oldest first
        self.watchers: dict[int, str] = {}  # block -> who is told of its reuse
        self.told: list[tuple[str, int]] = []
        self.events: list[tuple] = []

    def check(self, ids: list[int], references: int = 0) -> None:
        require(all(0 <= block < self.num_blocks for block in ids))
        for block, times in Counter(filter(None, ids)).items():
            require(self.refs[block] >= times * references)

    def get(self, n: int) -> list[int]:
        require(n <= len(self.queue), NoFreeBlocksError)
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            self.refs[block] = 1
            if block in self.watchers:
                self.told.append((self.watchers.pop(block), block))
            if self.caching:
                self.evict([block])
        return taken

    def touch(self, ids: list[int]) -> None:
        self.check(ids)
        for block in filter(None, ids):
            self.refs[block] += 1
        self.queue = [block for block in self.queue if self.refs[block] == 0]

    def release(self, ids: list[int]) -> list[int]:
        self.check(ids, references=1)
        idle = []
        for block in filter(None, ids):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                idle.append(block)
        return idle

    def free(self, ids: list[int]) -> None:
        idle = self.release(ids)
        last = [block for block in idle if self.caching and self.keys[block]]
        first = [block for block in idle if block not in last]
        self.queue = first + self.queue + last

    def unpin(self, ids: list[int], watcher: str) -> None:
        require(0 not in ids)
        self.queue += self.release(ids)
        self.watchers.update(dict.fromkeys(ids, watcher))

    def holds(self, block: int, key: bytes) -> bool:
        return key in self.keys[block][:1] or block in self.index.get(key, [])

    def add_key(self, key: bytes, block: int, tokens: int | None = None) -> None:
        if not self.holds(block, key):
            if not self.keys[block]:
                self.tokens[block] = tokens
            self.keys[block].append(key)
            self.index.setdefault(key, []).append(block)

    def drop_keys(self, block: int) -> list[bytes]:
        lost = [key for key in self.keys[block] if block in self.index.get(key, [])]
        for key in lost:
            self.index[key].remove(block)
        self.keys[block], self.tokens[block] = [], None
        return lost

    def evict(self, ids: list[int]) -> None:
        self.check(ids)
        for block in ids:
            if lost := self.drop_keys(block):
                self.events.append(("removed", lost))

    def cache_ids(self, ids: list[int], keys: list[bytes]) -> None:
        self.check(ids)
        new = {block: key for block, key in zip(ids, keys, strict=True) if block}
        require(len(new) + ids.count(0) == len(ids), BlockStateError)
        require(not any(self.keys[block] for block in new), BlockStateError)
        for block, key in new.items():
            self.add_key(key, block)
        if ids:
            self.events.append(("stored", [*new.values()], None, range(0), self.unit))

    def is_promoted_by(self, tokens: int, block: int) -> bool:
        known = self.tokens[block]
        return known is not None and known < tokens

    def cache_full(self, chain, table, span: range, size: int, mask: list) -> None:
        keys = chain[size // self.unit - 1 :: size // self.unit]
        new = [i for i, wanted in zip(span, mask, strict=True) if wanted and table[i]]
        for i in new:
            promoted = self.is_promoted_by((i + 1) * size, table[i])
            require(promoted or not self.keys[table[i]], BlockStateError)
        for i in new:
            self.evict([table[i]])
            self.add_key(keys[i], table[i], (i + 1) * size)
        parent = keys[span[0] - 1] if span[0] else None
        self.events.append(("stored", [keys[i] for i in new], parent, span, size))

    def cache_partial(self, chain, block: int, tokens: int, replace: bool) -> bytes:
        end = tokens // self.unit
        require(end * self.unit == tokens and 0 < end <= len(chain), BlockStateError)
        key, before = chain[end - 1], chain[end - 2] if end > 1 else None
        known = self.holds(block, key) and not replace
        if replace or (not known and self.is_promoted_by(tokens, block)):
            self.evict([block])
        self.add_key(key, block, tokens)
        if not known:
            self.events.append(("stored", [key], before, range(end)[-1:], self.unit))
        return key

    def move(self, source: int, target: int) -> None:
        require(not self.keys[target], BlockStateError)
        tokens = self.tokens[source]
        for key in self.drop_keys(source):
            self.add_key(key, target, tokens)

    def match_prefix(self, keys: list[bytes]) -> list[int]:
        return [self.index[key][0] for key in takewhile(self.index.get, keys)]

    def reset(self) -> bool:
        if len(self.queue) < self.num_blocks - 1:
            return False
        for block in range(self.num_blocks):
            self.drop_keys(block)
        self.told += [(watcher, block) for block, watcher in self.watchers.items()]
        self.watchers.clear()
        self.events.append(("cleared",))
        return True
