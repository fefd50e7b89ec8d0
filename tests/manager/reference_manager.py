"""The manager in plain Python: the model that the compiled one is compared with.

Tables are lists of block ids over a `ReferencePool`. What a block holds is named by the
tokens up to its end, with the salt they came with, so nothing is hashed. The longest
hit is found by trying all lengths. Without EAGLE, whose rule is vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import Any

from reference_pool import ReferencePool, require

from kvcache import BlockStateError
from kvcache.manager import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Group,
    Mamba,
    SlidingWindow,
)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def num_skipped(group: Group, computed: int) -> int:
    """Tokens at the start that the next one does not attend to."""
    if isinstance(group, SlidingWindow):
        return max(0, computed - (group.window - 1) - group.extra_retained_tokens)
    if isinstance(group, ChunkedLocal):
        return computed // group.chunk * group.chunk
    if isinstance(group, Mamba):
        return max(0, computed - 1)
    return 0


@dataclass(eq=False)
class ReferenceRequest:
    tokens: list[int]
    salt: str | None
    skip: bool
    num_prompt: int
    tables: list[list[int]]
    cached: list[int | None]  # blocks at the start; None until known
    computed: int = 0
    in_flight: int = 0
    running: bool = False
    preempted: bool = False
    hits: list[list[int]] | None = None
    hit_length: int = 0

    def key(self, g: int, end: int) -> Any:
        """The content of group g up to a token."""
        return (g, self.salt, tuple(self.tokens[:end]))


@dataclass
class ReferenceManager:
    groups: list[Group]
    num_blocks: int
    unit: int
    max_model_len: int
    max_num_requests: int
    caching: bool = True
    watermark: float = 0.0
    max_in_flight: int | None = None
    rows: dict[int, ReferenceRequest] = field(default_factory=dict)
    stats: list[int] = field(default_factory=lambda: [0] * 6)
    changed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = ReferencePool(self.num_blocks, self.caching, self.unit)
        self.vacant = list(range(self.max_num_requests))[::-1]
        self.alignment = lcm(*(group.block_size for group in self.groups))
        self.reserve = int(self.watermark * self.num_blocks)

    # -- requests

    def row(self, row: int) -> ReferenceRequest:
        require(row in self.rows)
        return self.rows[row]

    def running(self, row: int) -> ReferenceRequest:
        require(self.row(row).running, BlockStateError)
        return self.rows[row]

    def add(
        self, tokens: list[int], salt: str | None = None, skip: bool = False
    ) -> int:
        require(1 <= len(tokens) <= self.max_model_len)
        require(self.vacant)
        n = len(self.groups)
        row = self.vacant.pop()
        empty: list[list[int]] = [[] for _ in range(n)]
        self.rows[row] = ReferenceRequest(
            list(tokens), salt, skip, len(tokens), empty, [None] * n
        )
        return row

    def append(self, row: int, tokens: list[int]) -> None:
        request = self.row(row)
        require(len(request.tokens) + len(tokens) <= self.max_model_len)
        request.tokens += tokens

    def append_step(self, rows: list[int], tokens: list[int]) -> None:
        require(len(rows) == len(tokens) == len(set(rows)))
        require(all(len(self.row(row).tokens) < self.max_model_len for row in rows))
        for row, token in zip(rows, tokens, strict=True):
            self.append(row, [token])

    def truncate(self, row: int, keep: int) -> None:
        request = self.row(row)
        require(1 <= keep <= len(request.tokens))

        for g, group in enumerate(self.groups):
            size, table = group.block_size, request.tables[g]
            require(keep >= (request.cached[g] or 0) * size, BlockStateError)
            nulls = self.num_nulls(table)
            require(nulls <= num_skipped(group, keep) // size, BlockStateError)
            rewritten = [] if self.is_cross(group) else table[keep // size :]
            shared = any(block and self.pool.refs[block] > 1 for block in rewritten)
            require(not shared, BlockStateError)
        del request.tokens[keep:]
        request.num_prompt = min(request.num_prompt, keep)
        request.computed = min(request.computed, keep)
        request.hits, request.hit_length = None, 0

    def set_in_flight(self, row: int, count: int) -> None:
        require(0 <= count <= self.row(row).computed)
        self.rows[row].in_flight = count

    def set_computed(self, row: int, count: int) -> None:
        request = self.row(row)
        require(0 <= count <= request.computed)
        for group, table in zip(self.groups, request.tables, strict=True):
            kept = num_skipped(group, count) // group.block_size
            require(self.num_nulls(table) <= kept, BlockStateError)
        request.computed = count
        request.in_flight = min(request.in_flight, count)

    # -- match

    def match(self, row: int, max_length: int | None = None) -> int:
        request = self.row(row)
        require(not request.running, BlockStateError)
        request.hits, request.hit_length = None, 0
        if not self.caching or request.skip:
            return 0
        limit = len(request.tokens) - 1
        if max_length is not None:
            limit = min(max_length, limit + 1)
        for length in range(limit // self.alignment * self.alignment, -1, -1):
            hits = self.hits_of_length(request, length)
            if length % self.alignment == 0 and hits is not None:
                break
        assert hits is not None
        request.hits, request.hit_length = hits, length
        return length

    def hits_of_length(
        self, request: ReferenceRequest, length: int
    ) -> list[list[int]] | None:
        """A block for each that the token behind attends to, if all are cached."""
        found = []
        for g, group in enumerate(self.groups):
            size = group.block_size
            start, stop = num_skipped(group, length) // size, length // size
            if isinstance(group, SlidingWindow):
                need = max(1, cdiv(group.window - 1, size))
                start = max(0, stop - need)
            keys = [request.key(g, (i + 1) * size) for i in range(start, stop)]
            if not all(self.pool.index.get(key) for key in keys):
                return None
            found.append([0] * start + [self.pool.index[key][0] for key in keys])
        return found

    def hits_hold(self, request: ReferenceRequest) -> bool:
        return request.hits is None or all(
            self.pool.holds(block, request.key(g, (i + 1) * group.block_size))
            for g, group in enumerate(self.groups)
            for i, block in enumerate(request.hits[g])
            if block
        )

    # -- allocate

    def is_cross(self, group: Group) -> bool:
        return isinstance(group, CrossAttention)

    def size_of(self, group: Group, wanted: int, encoder: int) -> int:
        """Blocks for so many slots."""
        extra = group.num_speculative_blocks if isinstance(group, Mamba) else 0
        tokens = encoder if self.is_cross(group) else wanted
        return cdiv(tokens, group.block_size) + extra

    def cap(self, group: Group) -> int:
        """Blocks of a request at most, as blocks are given back in time."""
        steps = self.max_in_flight or self.max_model_len
        if isinstance(group, SlidingWindow):
            steps += group.window - 1 + group.extra_retained_tokens
            return cdiv(min(steps, self.max_model_len), group.block_size) + 1
        if isinstance(group, ChunkedLocal):
            return cdiv(min(steps + group.chunk, self.max_model_len), group.block_size)
        return self.num_blocks * group.block_size + self.max_model_len

    def needed(
        self,
        request: ReferenceRequest,
        wanted: int,
        total: int,
        encoder: int,
        cap: bool,
    ) -> int:
        """Free blocks that it takes: new ones, and hits that nobody uses."""
        needed = 0
        for g, group in enumerate(self.groups):
            count = self.size_of(group, wanted, encoder)
            if cap:
                count = min(count, self.cap(group))
            table = request.tables[g]
            if request.cached[g] is not None:
                needed += max(0, count - len(table))
                continue
            hits = request.hits[g] if request.hits else []
            skipped = num_skipped(group, total) // group.block_size
            needed += max(0, count - max(skipped, len(hits) + len(table)))
            for block in hits[max(0, skipped - len(table)) :]:
                needed += bool(block) and self.pool.refs[block] == 0
        return needed

    def allocate(
        self,
        row: int,
        new: int,
        lookahead: int = 0,
        external: int = 0,
        encoder: int = 0,
        delay: bool = False,
        must_fit: bool = False,
        reserved: int = 0,
        scheduled: bool = True,
    ) -> list[list[int]] | None:
        request = self.row(row)
        require(new + external + request.hit_length > 0)
        local = request.computed + request.hit_length
        total = local + external
        require(total + new <= self.max_model_len)
        require(not (external and request.running), BlockStateError)
        require(self.hits_hold(request), BlockStateError)
        wanted = min(total + new + lookahead, self.max_model_len)
        spare = self.reserve if scheduled and not request.running else 0
        free = self.pool.queue
        if must_fit:
            needed = self.needed(request, len(request.tokens), total, encoder, True)
            if spare + needed > len(free):
                return None
        self.give_back_skipped(row, max(0, total - request.in_flight))
        needed = self.needed(request, wanted, total, encoder, False)
        if spare + needed > len(self.pool.queue) - reserved:
            return None
        if not request.running:
            self.record(request)
        if self.holds_nothing_yet(request) and (any(request.hits or []) or external):
            self.hold(request, total, external)
        added = []
        for g, group in enumerate(self.groups):
            more = self.size_of(group, wanted, encoder) - len(request.tables[g])
            added.append(self.pool.get(max(0, more)))
            request.tables[g] += added[g]
        if not request.running or any(added):
            self.note(row)
        request.hits, request.hit_length = None, 0
        request.running = True
        request.computed = total + new
        if not delay:
            self.cache(request, min(request.computed, len(request.tokens)))
        return added

    def holds_nothing_yet(self, request: ReferenceRequest) -> bool:
        return all(cached is None for cached in request.cached)

    def hold(self, request: ReferenceRequest, total: int, external: int) -> None:
        for g, group in enumerate(self.groups):
            if self.is_cross(group):
                continue
            skipped = num_skipped(group, total) // group.block_size
            hits = (request.hits[g] if request.hits else [])[skipped:]
            self.pool.touch(hits)
            request.tables[g] = [0] * skipped + hits
            request.cached[g] = len(request.tables[g])
        for g, group in enumerate(self.groups):
            inside = min(total - num_skipped(group, total), external)
            if not self.is_cross(group) and inside > 0:
                more = cdiv(total, group.block_size) - len(request.tables[g])
                request.tables[g] += self.pool.get(max(0, more))

    def num_nulls(self, table: list[int]) -> int:
        return next((i for i, block in enumerate(table) if block), len(table))

    def give_back_skipped(self, row: int, processed: int) -> None:
        request = self.rows[row]
        for g, group in enumerate(self.groups):
            table = request.tables[g]
            stop = min(num_skipped(group, processed) // group.block_size, len(table))
            start = self.num_nulls(table)
            if start < stop:
                self.pool.free(table[start:stop][::-1])
                table[:stop] = [0] * stop
                self.note(row)

    def record(self, request: ReferenceRequest) -> None:
        if self.caching and not request.skip:
            sums = [1, len(request.tokens), request.hit_length]
            at = 3 if request.preempted else 0
            for i, value in enumerate(sums):
                self.stats[at + i] += value

    def step(
        self, rows: list[int], counts: list[int], lookahead: int
    ) -> tuple[int, list[int], list[int]]:
        require(len(rows) == len(counts) == len(set(rows)))
        for row, count in zip(rows, counts, strict=True):
            require(self.running(row) and count >= 1)
            require(self.rows[row].computed + count <= self.max_model_len)
        ids: list[int] = []
        starts, served = [0], 0
        for row, count in zip(rows, counts, strict=True):
            added = self.allocate(row, count, lookahead)
            if added is None:
                break
            served += 1
            for group in added:
                ids += group
                starts.append(len(ids))
        return served, ids, starts

    # -- caching

    def cache_blocks(self, row: int, computed: int) -> None:
        request = self.row(row)
        require(0 <= computed <= min(len(request.tokens), request.computed))
        require(request.running, BlockStateError)
        self.cache(request, computed)

    def cache(self, request: ReferenceRequest, tokens: int) -> None:
        if not self.caching:
            return
        if len(self.groups) > 1:
            tokens -= tokens % self.alignment
        for g, group in enumerate(self.groups):
            size, table = group.block_size, request.tables[g]
            ends = range(self.unit, len(request.tokens) + 1, self.unit)
            chain = [request.key(g, end) for end in ends]
            span = range(request.cached[g] or 0, tokens // size)
            if span:
                # Of blocks that forks share, another one may have been the first.
                mask = [
                    self.is_reachable(group, i)
                    and not self.pool.holds(
                        table[i], chain[(i + 1) * size // self.unit - 1]
                    )
                    for i in span
                ]
                self.pool.cache_full(chain, table, span, size, mask)
                request.cached[g] = span.stop
            end = (request.num_prompt - 1) // self.unit * self.unit
            if isinstance(group, FullAttention) and 0 < end <= tokens and end % size:
                block = table[end // size]
                self.pool.cache_partial(chain, block, end, replace=False)

    def is_reachable(self, group: Group, i: int) -> bool:
        """Whether a hit, which ends at a multiple of the alignment, has block i."""
        if not isinstance(group, SlidingWindow):
            return True
        period = self.alignment // group.block_size
        return i % period >= period - cdiv(group.window - 1, group.block_size)

    # -- the end

    def release(self, request: ReferenceRequest) -> None:
        for table in request.tables:
            self.pool.free(table[self.num_nulls(table) :][::-1])

    def empty(self, row: int) -> None:
        request = self.rows[row]
        request.tables = [[] for _ in self.groups]
        request.cached = [None] * len(self.groups)
        request.hits, request.hit_length, request.running = None, 0, False
        self.note(row)

    def preempt(self, row: int) -> None:
        request = self.running(row)
        self.release(request)
        self.empty(row)
        request.computed = request.in_flight = 0
        request.preempted = True

    def free(self, row: int) -> None:
        self.release(self.row(row))
        self.empty(row)
        del self.rows[row]
        self.vacant.append(row)

    def pop(self, row: int) -> list[int]:
        tables = self.row(row).tables
        ids = [block for table in tables for block in table[self.num_nulls(table) :]]
        self.empty(row)
        del self.rows[row]
        self.vacant.append(row)
        return ids

    def fork(self, row: int) -> tuple[int, list[tuple[int, int]]] | None:
        source = self.running(row)
        known = min(source.computed, len(source.tokens))
        shared = []
        for group, table in zip(self.groups, source.tables, strict=True):
            if self.is_cross(group):
                shared.append(len(table))
            elif isinstance(group, Mamba):
                shared.append(0)
            else:
                shared.append(known // group.block_size)
        to_copy = [
            block
            for table, n in zip(source.tables, shared, strict=True)
            for block in table[n:]
            if block
        ]
        if len(to_copy) > len(self.pool.queue):
            return None
        child = self.add(source.tokens, source.salt, source.skip)
        copies = list(zip(to_copy, self.pool.get(len(to_copy)), strict=True))
        fresh = iter([target for _, target in copies])
        target = self.rows[child]
        target.num_prompt, target.computed = source.num_prompt, source.computed
        target.in_flight, target.running = source.in_flight, True
        target.cached = list(source.cached)
        for g, (table, n) in enumerate(zip(source.tables, shared, strict=True)):
            self.pool.touch(table[:n])
            target.tables[g] = table[:n] + [
                block and next(fresh) for block in table[n:]
            ]
        self.note(child)
        return child, copies

    def reset(self) -> bool:
        return self.pool.reset()

    # -- what is shown

    def note(self, row: int) -> None:
        if row not in self.changed:
            self.changed.append(row)

    def slots(self, rows: list[int], counts: list[int], g: int) -> list[int]:
        size, slots = self.groups[g].block_size, []
        require(len(rows) == len(counts))
        for row, count in zip(rows, counts, strict=True):
            request = self.row(row)
            require(0 <= count <= request.computed)
            require(request.computed <= len(request.tables[g]) * size)
            for i in range(request.computed - count, request.computed):
                slots.append(request.tables[g][i // size] * size + i % size)
        return slots

    def occupancy(self) -> tuple[int, int]:
        slots = 0
        for request in self.rows.values():
            for group, table in zip(self.groups, request.tables, strict=True):
                end = min(len(table) * group.block_size, request.computed)
                start = self.num_nulls(table) * group.block_size
                slots += max(0, end - start)
        return self.num_blocks - 1 - len(self.pool.queue), slots
