"""Random requests through vLLM 0.33's KVCacheManager and through kvcache's.

    python tests/manager/compare_with_vllm.py --operations 100000
    python tests/manager/compare_with_vllm.py --plugin --operations 100000
    python tests/manager/compare_with_vllm.py --record tests/manager/recorded.json

Run by a Python that has kvcache and vLLM. After every operation both sides are asked
for all that can be seen of them: which blocks each request has in each group, hits,
what fitted, free blocks and their order, statistics, events. The second form compares
vLLM's manager with itself after kvcache's plugin was registered. The third form writes
what vLLM answered, a checksum an operation, for tests where there is no vLLM. The
operations of a seed are the same in every run, as long as the answers are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcache.hashing import get_request_block_hasher, sha256
from kvcache.manager import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KVCacheManager,
    Mamba,
    SlidingWindow,
)

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

RECORDED_SEED = 33
RECORDED_OPERATIONS = 160  # of each configuration
LONGEST = 256
MOST_REQUESTS = 10
CHECK_EVERY = 32


@dataclass(frozen=True)
class Configuration:
    """A model's groups, and how both managers are made."""

    groups: tuple[Any, ...]
    num_blocks: int = 48
    hash_block_size: int = 16
    enable_caching: bool = True
    use_eagle: bool = False
    events: bool = False
    watermark: float = 0.0
    in_flight: int | None = None

    @property
    def has_encoder(self) -> bool:
        return any(isinstance(group, CrossAttention) for group in self.groups)


def uncached(*groups: Any, **options: Any) -> Configuration:
    return Configuration(groups, enable_caching=False, **options)


FULL, WINDOW, CHUNKS = FullAttention(16), SlidingWindow(16, 40), ChunkedLocal(16, 64)
CONFIGURATIONS = {
    "full": Configuration((FULL,)),
    "full, watermark": Configuration((FULL,), watermark=0.1),
    "full, events": Configuration((FULL,), events=True),
    "full, EAGLE": Configuration((FULL,), use_eagle=True),
    "full, no caching": uncached(FULL),
    "full of 1 token": Configuration(
        (FullAttention(1),), hash_block_size=1, num_blocks=600
    ),
    "window": Configuration((WINDOW,), in_flight=64),
    "window of 1 token": Configuration((SlidingWindow(16, 1),)),
    "window, EAGLE": Configuration((WINDOW,), use_eagle=True),
    "window, retained tokens": Configuration(
        (SlidingWindow(16, 40, extra_retained_tokens=5),), in_flight=32
    ),
    "chunks": Configuration((CHUNKS,), in_flight=32),
    "full 16 + window 16": Configuration((FULL, WINDOW), watermark=0.05),
    "full 16 + window 32": Configuration((FULL, SlidingWindow(32, 40))),
    "full 32 + window 16": Configuration((FullAttention(32), SlidingWindow(16, 20))),
    "full 32 + window 16, events": Configuration(
        (FullAttention(32), SlidingWindow(16, 20)), events=True
    ),
    "full 32 + window 48": Configuration((FullAttention(32), SlidingWindow(48, 60))),
    "full + window, EAGLE": Configuration((FULL, WINDOW), use_eagle=True),
    "full 16 + window 32, EAGLE for full": Configuration(
        (FullAttention(16, eagle=True), SlidingWindow(32, 40)), use_eagle=True
    ),
    "full 32 + window 16, EAGLE": Configuration(
        (FullAttention(32), SlidingWindow(16, 20)), use_eagle=True
    ),
    "full 32 + window 16, EAGLE for full, events": Configuration(
        (FullAttention(32, eagle=True), SlidingWindow(16, 20)),
        use_eagle=True,
        events=True,
    ),
    "full 32 + window 16, EAGLE for window": Configuration(
        (FullAttention(32), SlidingWindow(16, 20, eagle=True)), use_eagle=True
    ),
    "full + window, no caching": uncached(FULL, WINDOW, in_flight=64),
    "full + chunks": Configuration((FULL, CHUNKS), in_flight=64),
    "full + chunks, events": Configuration((FULL, ChunkedLocal(16, 40)), events=True),
    "window + chunks": Configuration((WINDOW, CHUNKS)),
    "window 16 + window 32": Configuration((WINDOW, SlidingWindow(32, 100))),
    "2 full + window": Configuration((FULL, FULL, WINDOW), num_blocks=64),
    "2 full + window, EAGLE for one": Configuration(
        (FULL, FullAttention(16, eagle=True), WINDOW), num_blocks=64, use_eagle=True
    ),
    "full + 2 windows": Configuration(
        (FULL, SlidingWindow(16, 24), SlidingWindow(16, 90)), num_blocks=64
    ),
    "full 32 + 2 windows, EAGLE": Configuration(
        (FullAttention(32), SlidingWindow(16, 24), SlidingWindow(32, 90)),
        num_blocks=64,
        use_eagle=True,
    ),
    "full + Mamba none": uncached(FULL, Mamba(LONGEST), watermark=0.1),
    "full + Mamba none, drafts": uncached(
        FULL, Mamba(LONGEST, num_speculative_blocks=2)
    ),
    "full + Mamba all": uncached(FULL, Mamba(16, "all")),
    "full + Mamba all, drafts": uncached(
        FULL, Mamba(32, "all", num_speculative_blocks=2)
    ),
    "full + cross": uncached(FULL, CrossAttention(16)),
    "window + Mamba all + cross": uncached(
        WINDOW, Mamba(32, "all"), CrossAttention(32), in_flight=48
    ),
}


# -- requests ---------------------------------------------------------------------


@dataclass
class Request:
    """A request under the names that vLLM reads."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None
    lora_request: Any
    skip_reading_prefix_cache: bool
    given_tokens: bool  # to kvcache, which then makes the hashes
    num_encoder_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    shared_prefix_boundary: int = 0
    running: bool = False
    loading: bool = False  # a connector brings the values of its tokens
    block_hashes: list[bytes] = field(default_factory=list)
    status: Any = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    session_id: str | None = None
    _prompt_embeds_per_block_hashes: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Content:
    """Prompts that often begin alike."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self.rng = rng
        self.longest = longest
        self.known = [[n * 1000 + i for i in range(longest)] for n in range(3)]

    def prompt(self) -> list[int]:
        rng = self.rng
        before = rng.choice(self.known)
        shared = rng.choice((len(before), rng.randint(0, len(before))))
        tokens = before[: min(shared, self.longest - 40)] + self.tokens(
            rng.choice((1, 1, rng.randint(1, 40)))
        )
        self.known[rng.randrange(1, 3)] = tokens
        return tokens

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(count)]


@dataclass
class Ask:
    """The arguments of allocate_slots."""

    num_new_tokens: int
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False
    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0
    has_scheduled: bool = True


# -- the two sides ----------------------------------------------------------------


class Ours:
    """kvcache's manager; requests are known by vLLM's name for them."""

    def __init__(self, config: Configuration) -> None:
        self.config = config
        self.rows: dict[str, int] = {}
        self.popped: list[Any] = []
        self.manager = KVCacheManager(
            config.num_blocks,
            config.groups,
            hash_block_size=config.hash_block_size if config.enable_caching else None,
            max_model_len=LONGEST,
            max_num_requests=MOST_REQUESTS,
            max_in_flight_tokens=config.in_flight,
            enable_caching=config.enable_caching,
            watermark=config.watermark,
            use_eagle=config.use_eagle,
            enable_kv_cache_events=config.events,
            hash_fn=sha256,
        )

    def add(self, request: Request) -> None:
        what: dict[str, Any] = {
            "cache_salt": request.cache_salt,
            "lora_request": request.lora_request,
            "skip_reading_prefix_cache": request.skip_reading_prefix_cache,
        }
        if request.given_tokens or self.config.events:
            row = self.manager.add_request(request.all_token_ids, **what)
        else:
            hashes, count = request.block_hashes, request.num_tokens
            row = self.manager.add_request(hashes=hashes, num_tokens=count, **what)
        self.rows[request.request_id] = row

    def match(self, request: Request, max_length: int | None) -> int:
        return int(self.manager.match(self.rows[request.request_id], max_length))

    def allocate(self, request: Request, hits: int, ask: Ask) -> list[list[int]] | None:
        found = self.manager.allocate_slots(
            self.rows[request.request_id],
            ask.num_new_tokens,
            num_lookahead_tokens=ask.num_lookahead_tokens,
            num_external_computed_tokens=ask.num_external_computed_tokens,
            num_encoder_tokens=ask.num_encoder_tokens,
            delay_cache_blocks=ask.delay_cache_blocks,
            full_sequence_must_fit=ask.full_sequence_must_fit,
            reserved_blocks=ask.reserved_blocks,
            has_scheduled_requests=ask.has_scheduled,
        )
        return None if found is None else [ids.tolist() for ids in found]

    def step(
        self, requests: list[Request], counts: list[int], lookahead: int
    ) -> list[list[list[int]]]:
        """One token more and slots for each, until one does not fit."""
        rows = np.array([self.rows[each.request_id] for each in requests], np.int32)
        served, ids, indptr = self.manager.allocate_step(
            rows, np.array(counts, np.int32), num_lookahead_tokens=lookahead
        )
        n = len(self.config.groups)
        assert len(indptr) == served * n + 1
        parts = [ids[a:b].tolist() for a, b in pairwise(indptr)]
        return [parts[i * n : i * n + n] for i in range(served)]

    def append(self, request: Request, tokens: list[int], hashes: list[bytes]) -> None:
        row = self.rows[request.request_id]
        if request.given_tokens or self.config.events:
            self.manager.append(row, tokens)
        else:
            self.manager.append(row, num_tokens=len(tokens), hashes=hashes)

    def append_step(self, requests: list[Request], tokens: list[int]) -> None:
        rows = [self.rows[each.request_id] for each in requests]
        self.manager.append_step(rows, tokens)

    def withdraw_drafts(self, request: Request) -> None:
        self.manager.truncate(self.rows[request.request_id], request.num_tokens)

    def set_in_flight(self, request: Request, count: int) -> None:
        self.manager.set_in_flight(self.rows[request.request_id], count)

    def cache_blocks(self, request: Request, count: int) -> None:
        self.manager.cache_blocks(self.rows[request.request_id], count)

    def free(self, request: Request) -> None:
        self.manager.free(self.rows.pop(request.request_id))

    def preempt(self, request: Request) -> None:
        self.manager.preempt(self.rows[request.request_id])

    def pop(self, request: Request) -> list[int]:
        ids = self.manager.pop_block_ids(self.rows.pop(request.request_id))
        self.popped.append(ids)
        return ids.tolist()  # type: ignore[no-any-return]

    def release(self) -> None:
        self.manager.block_pool.free_block_ids(self.popped.pop(0)[::-1])

    def evict(self, ids: set[int]) -> None:
        self.manager.evict_blocks(ids)

    def reset(self) -> bool:
        return bool(self.manager.reset_prefix_cache())

    def tables(self, request: Request) -> list[list[int]]:
        row = self.rows[request.request_id]
        groups = range(len(self.config.groups))
        return [self.manager.block_ids(row, g).tolist() for g in groups]

    def num_free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def free_ids(self) -> list[int]:
        queue = self.manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def stats(self) -> Any:
        return self.manager.take_prefix_cache_stats()

    def events(self) -> list[Any]:
        return self.manager.take_events()

    def computed(self, request: Request) -> tuple[int, int]:
        row = self.rows[request.request_id]
        return self.manager.num_computed_tokens(row), self.manager.num_tokens(row)

    def check(self) -> None:
        self.manager.check()


class Theirs:
    """vLLM's manager, asked as its scheduler asks it."""

    def __init__(self, config: Configuration) -> None:
        import torch
        import vllm
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.core.kv_cache_manager import KVCacheManager as Manager
        from vllm.v1.request import RequestStatus

        self.config = config
        self.status = RequestStatus
        self.is_0_32 = vllm.__version__.startswith("0.32")  # hits have no limit there
        self.popped: list[Any] = []
        layer: dict[str, Any] = {
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }

        def spec(group: Any) -> Any:
            size = group.block_size
            if isinstance(group, SlidingWindow):
                return interface.SlidingWindowSpec(
                    block_size=size,
                    sliding_window=group.window,
                    extra_retained_tokens=group.extra_retained_tokens,
                    **layer,
                )
            if isinstance(group, ChunkedLocal):
                return interface.ChunkedLocalAttentionSpec(
                    block_size=size, attention_chunk_size=group.chunk, **layer
                )
            if isinstance(group, Mamba):
                return interface.MambaSpec(
                    block_size=size,
                    shapes=((1,),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode=group.mode,
                    num_speculative_blocks=group.num_speculative_blocks,
                )
            if isinstance(group, CrossAttention):
                return interface.CrossAttentionSpec(block_size=size, **layer)
            return interface.FullAttentionSpec(block_size=size, **layer)

        sizes = [group.block_size for group in config.groups]
        self.manager = Manager(
            interface.KVCacheConfig(
                num_blocks=config.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    interface.KVCacheGroupSpec(
                        [f"layer {i}"],
                        spec(group),
                        is_eagle_group=getattr(group, "eagle", False),
                    )
                    for i, group in enumerate(config.groups)
                ],
            ),
            max_model_len=LONGEST,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=config.hash_block_size,
            max_in_flight_tokens=config.in_flight,
            enable_caching=config.enable_caching,
            use_eagle=config.use_eagle,
            log_stats=True,
            enable_kv_cache_events=config.events,
            watermark=config.watermark,
        )
        self.hits: dict[str, Any] = {}

    def add(self, request: Request) -> None:
        request.status = self.status.WAITING

    def match(self, request: Request, max_length: int | None) -> int:
        most = () if max_length is None or self.is_0_32 else (max_length,)
        blocks, hits, _ = self.manager.get_computed_blocks(request, *most)
        self.hits[request.request_id] = blocks
        return int(hits)

    def allocate(self, request: Request, hits: int, ask: Ask) -> list[list[int]] | None:
        first = not request.running
        found = self.manager.allocate_slots(
            request,
            ask.num_new_tokens,
            num_new_computed_tokens=hits,
            new_computed_blocks=self.hits[request.request_id] if first else None,
            num_lookahead_tokens=ask.num_lookahead_tokens,
            num_external_computed_tokens=ask.num_external_computed_tokens,
            num_encoder_tokens=ask.num_encoder_tokens,
            delay_cache_blocks=ask.delay_cache_blocks,
            full_sequence_must_fit=ask.full_sequence_must_fit,
            reserved_blocks=ask.reserved_blocks,
            has_scheduled_reqs=ask.has_scheduled,
        )
        if found is None:
            return None
        if first:
            self.manager.record_prefix_cache_stats(request, hits)
            request.status = self.status.RUNNING
        return [list(group) for group in found.get_block_ids()]

    def step(
        self, requests: list[Request], counts: list[int], lookahead: int
    ) -> list[list[list[int]]]:
        served: list[list[list[int]]] = []
        for request, count in zip(requests, counts, strict=True):
            new = self.allocate(request, 0, Ask(count, lookahead))
            if new is None:
                break
            served.append(new)
        return served

    def append(self, request: Request, tokens: list[int], hashes: list[bytes]) -> None:
        """It reads them from the request."""

    def append_step(self, requests: list[Request], tokens: list[int]) -> None:
        """Likewise."""

    def withdraw_drafts(self, request: Request) -> None:
        """Likewise."""

    def set_in_flight(self, request: Request, count: int) -> None:
        """Likewise."""

    def cache_blocks(self, request: Request, count: int) -> None:
        self.manager.cache_blocks(request, count)

    def free(self, request: Request) -> None:
        self.manager.free(request)

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.status = self.status.PREEMPTED

    def pop(self, request: Request) -> list[int]:
        blocks = self.manager.pop_blocks_for_free(request)
        self.popped.append(blocks)
        return [block.block_id for block in blocks]

    def release(self) -> None:
        self.manager.block_pool.free_blocks(reversed(self.popped.pop(0)))

    def evict(self, ids: set[int]) -> None:
        self.manager.evict_blocks(ids)

    def reset(self) -> bool:
        return bool(self.manager.reset_prefix_cache())

    def tables(self, request: Request) -> list[list[int]]:
        blocks = self.manager.coordinator.get_blocks(request.request_id)
        return [[block.block_id for block in group] for group in blocks]

    def num_free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def free_ids(self) -> list[int]:
        queue = self.manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def stats(self) -> Any:
        return self.manager.make_prefix_cache_stats()

    def events(self) -> list[Any]:
        return list(self.manager.take_events())

    def computed(self, request: Request) -> tuple[int, int]:
        return request.num_computed_tokens, request.num_tokens

    def check(self) -> None:
        """It has none."""


# -- what they answer -------------------------------------------------------------

STATS = (
    *("requests", "queries", "hits"),
    *("preempted_requests", "preempted_queries", "preempted_hits", "reset"),
)
EVENT_FIELDS = (
    *("token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    *("group_idx", "locality", "ownership", "session_id", "lookahead_token_ids"),
)


class Different(AssertionError):
    """The first operation after which the sides differ."""


class Names:
    """Numbers for block hashes, by their first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __getitem__(self, value: Any) -> int | None:
        if value is None:
            return None
        return self.numbers.setdefault(value, len(self.numbers))

    def event(self, event: Any) -> tuple[Any, ...]:
        hashes = [self[value] for value in getattr(event, "block_hashes", ())]
        parent = self[getattr(event, "parent_block_hash", None)]
        rest = [getattr(event, name, None) for name in EVENT_FIELDS]
        return (type(event).__name__, hashes, parent, *rest)


class Seen:
    """All that can be seen of one side."""

    def __init__(self, side: Any, config: Configuration) -> None:
        self.side = side
        self.config = config
        self.names = Names()

    def __call__(self, requests: Iterable[Request], thorough: bool) -> dict[str, Any]:
        side = self.side
        seen = {
            "tables": {each.request_id: side.tables(each) for each in requests},
            "free blocks": side.num_free(),
            "computed": {each.request_id: side.computed(each) for each in requests},
        }
        if self.config.events:
            seen["events"] = [self.names.event(event) for event in side.events()]
        if thorough:
            stats = side.stats()
            seen["statistics"] = [getattr(stats, name) for name in STATS]
            seen["free queue"] = side.free_ids()
            side.check()
        return seen


# -- the run ----------------------------------------------------------------------


class Run:
    """A scheduler that decides at random, and asks every side the same."""

    def __init__(self, config: Configuration, seed: int, sides: list[Any]) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.sides = sides
        self.seen = [Seen(side, config) for side in sides]
        self.content = Content(self.rng, LONGEST)
        self.hasher = get_request_block_hasher(config.hash_block_size, sha256)
        self.requests: list[Request] = []
        self.made = 0
        self.popped = 0
        self.count = 0
        self.what = ""

    def ask(self, what: str, question: Callable[[Any], Any]) -> Any:
        """What the sides answer, which is the same."""
        self.what = what
        answers = [question(side) for side in self.sides]
        for answer in answers[1:]:
            if answer != answers[0]:
                raise Different(f"{what}: vLLM {answers[0]}, kvcache {answer}")
        return answers[0]

    def operations(self) -> Iterator[str]:
        """Run for ever; after each operation a checksum of all that can be seen."""
        actions: list[tuple[Callable[[], Any], float]] = [
            (self.add, 2.0),
            (self.admit, 4.0),
            (self.run_one, 6.0),
            (self.run_step, 3.0),
            (self.generate, 3.0),
            (self.settle_drafts, 2.0),
            (self.loaded, 1.0),
            (self.mark_in_flight, 1.0),
            (self.preempt, 0.5),
            (self.finish, 1.0),
            (self.pop, 0.3),
            (self.release, 0.4),
            (self.evict, 0.2),
            (self.reset, 0.1),
            (self.drain, 0.03),
        ]
        calls = [action for action, _ in actions]
        weights = [weight for _, weight in actions]
        while True:
            [action] = self.rng.choices(calls, weights)
            answer = action()
            if answer is NOTHING_TO_DO:
                continue
            self.count += 1
            thorough = self.count % CHECK_EVERY == 0
            seen = [look(self.requests, thorough) for look in self.seen]
            for other in seen[1:]:
                for name, value in seen[0].items():
                    if other[name] != value:
                        raise Different(
                            f"{name} after {self.what}: vLLM {value},"
                            f" kvcache {other[name]}"
                        )
            yield checksum((self.what, answer, seen[0]))

    # -- operations; each returns what the sides answered

    def pick(self, wanted: Callable[[Request], bool]) -> Request | None:
        some = [request for request in self.requests if wanted(request)]
        return self.rng.choice(some) if some else None

    def add(self) -> Any:
        if len(self.requests) == MOST_REQUESTS:
            return NOTHING_TO_DO
        rng = self.rng
        lora = SimpleNamespace(adapter_id=7, lora_int_id=7, name="a", lora_name="a")
        lora.path = lora.lora_path = "/a"
        request = Request(
            f"r{self.made}",
            self.content.prompt(),
            cache_salt="salt" if rng.random() < 0.05 else None,
            lora_request=lora if rng.random() < 0.05 else None,
            skip_reading_prefix_cache=rng.random() < 0.05,
            given_tokens=rng.random() < 0.5,
            num_encoder_tokens=rng.randint(0, 100) if self.config.has_encoder else 0,
        )
        self.made += 1
        request.num_prompt_tokens = request.num_tokens
        request.block_hashes += self.hasher(request)
        self.requests.append(request)
        return self.ask(
            f"add_request({request.num_tokens} tokens)",
            lambda side: side.add(request),
        )

    def admit(self) -> Any:
        request = self.pick(lambda each: not each.running)
        if request is None:
            return NOTHING_TO_DO
        rng = self.rng
        most = None if rng.random() < 0.8 else rng.randint(0, request.num_tokens)
        name = request.request_id
        hits = self.ask(
            f"match({name}, {most})", lambda side: side.match(request, most)
        )
        left = request.num_tokens - hits
        external, new, delay = 0, left, False
        if rng.random() < 0.15:
            external = rng.randint(0, left)
            delay = rng.random() < 0.7
            new = 0 if delay else left - external
        elif rng.random() < 0.5:
            new = rng.randint(1, left) if left else 0
        if new + external + hits == 0:
            new = 1
        ask = Ask(
            new,
            num_lookahead_tokens=rng.choice((0, 0, 1, 3)),
            num_external_computed_tokens=external,
            num_encoder_tokens=request.num_encoder_tokens,
            delay_cache_blocks=delay,
            full_sequence_must_fit=rng.random() < 0.5,
            reserved_blocks=rng.choice((0, 0, 0, rng.randint(0, 20))),
            has_scheduled=rng.random() < 0.8,
        )
        answer = self.allocate(request, hits, ask)
        if request.running:
            request.loading = delay
        return hits, answer

    def allocate(self, request: Request, hits: int, ask: Ask) -> Any:
        name = request.request_id
        answer = self.ask(
            f"allocate_slots({name}, {hits} hits, {ask})",
            lambda side: side.allocate(request, hits, ask),
        )
        if answer is not None:
            request.running = True
            request.num_computed_tokens += (
                hits + ask.num_external_computed_tokens + ask.num_new_tokens
            )
        return answer

    def is_ready(self, request: Request) -> bool:
        """Whether it runs and has room to go on."""
        return (
            request.running
            and not request.loading
            and max(request.num_computed_tokens, request.num_tokens) < LONGEST - 4
        )

    def run_one(self) -> Any:
        """The next tokens of one request: a chunk of its prompt, one token, drafts."""
        request = self.pick(self.is_ready)
        if request is None:
            return NOTHING_TO_DO
        rng = self.rng
        left = request.num_tokens - request.num_computed_tokens
        if left > 1:
            new = rng.choice((left, rng.randint(1, left)))
        else:
            new = max(left, 0) + rng.choice((0, 0, 1, 3))
        if new == 0:
            return NOTHING_TO_DO
        if left < 0:
            self.set_in_flight(request, request.num_in_flight_tokens)
        ask = Ask(
            new,
            num_lookahead_tokens=rng.choice((0, 0, 1, 3)),
            delay_cache_blocks=rng.random() < 0.05,
            full_sequence_must_fit=rng.random() < 0.1,
            reserved_blocks=rng.choice((0,) * 9 + (rng.randint(0, 40),)),
        )
        return self.allocate(request, 0, ask)

    def run_step(self) -> Any:
        """One more token for several requests that have computed all others."""
        some = [
            each
            for each in self.requests
            if self.is_ready(each) and each.num_computed_tokens == each.num_tokens
        ]
        if not some:
            return NOTHING_TO_DO
        rng = self.rng
        rng.shuffle(some)
        tokens = self.content.tokens(len(some))
        by_hand = [not (each.given_tokens or self.config.events) for each in some]
        for request, token, hand in zip(some, tokens, by_hand, strict=True):
            self.grow(request, [token], tell=hand)
        told = [
            (request, token)
            for request, token, hand in zip(some, tokens, by_hand, strict=True)
            if not hand
        ]
        self.ask(
            "append_step",
            lambda side: side.append_step([r for r, _ in told], [t for _, t in told]),
        )
        counts, lookahead = [1] * len(some), rng.choice((0, 0, 2))
        names = [request.request_id for request in some]
        answer = self.ask(
            f"allocate_step({names}, {lookahead} lookahead)",
            lambda side: side.step(some, counts, lookahead),
        )
        for request in some[: len(answer)]:
            request.num_computed_tokens += 1
        return answer

    def grow(self, request: Request, tokens: list[int], tell: bool = True) -> None:
        request.all_token_ids += tokens
        fresh = self.hasher(request)
        request.block_hashes += fresh
        if tell:
            self.ask(
                f"append({request.request_id}, {len(tokens)} tokens)",
                lambda side: side.append(request, tokens, fresh),
            )

    def generate(self) -> Any:
        """Tokens of a sampler, or of a next turn."""
        request = self.pick(
            lambda each: (
                self.is_ready(each) and each.num_computed_tokens == each.num_tokens
            )
        )
        if request is None:
            return NOTHING_TO_DO
        count = self.rng.choice((1, 1, 1, 2, self.rng.randint(1, 40)))
        self.grow(
            request, self.content.tokens(min(count, LONGEST - request.num_tokens))
        )
        return None

    def settle_drafts(self) -> Any:
        """Some of the drafts computed were right; the others are computed again."""
        request = self.pick(lambda each: each.num_computed_tokens > each.num_tokens)
        if request is None:
            return NOTHING_TO_DO
        drafts = request.num_computed_tokens - request.num_tokens
        right = self.rng.randint(0, min(drafts, LONGEST - request.num_tokens))
        if right:
            self.grow(request, self.content.tokens(right))
        request.num_computed_tokens = request.num_tokens
        name = request.request_id
        self.ask(f"drafts of {name}", lambda side: side.withdraw_drafts(request))
        if request.num_tokens < LONGEST:
            self.grow(request, self.content.tokens(1))
        return None

    def loaded(self) -> Any:
        """A connector has brought the values."""
        request = self.pick(lambda each: each.loading)
        if request is None:
            return NOTHING_TO_DO
        request.loading = False
        count = self.rng.choice((1, 1, self.rng.random()))
        count = int(count * request.num_computed_tokens)
        name = request.request_id
        return self.ask(
            f"cache_blocks({name}, {count})",
            lambda side: side.cache_blocks(request, count),
        )

    def mark_in_flight(self) -> Any:
        request = self.pick(lambda each: each.running)
        if request is None:
            return NOTHING_TO_DO
        count = self.rng.choice((0, 1, self.rng.randint(0, 40)))
        return self.set_in_flight(request, count)

    def set_in_flight(self, request: Request, count: int) -> Any:
        """So many tokens, and all drafts, are in steps under way."""
        count = max(count, request.num_computed_tokens - request.num_tokens)
        count = min(count, request.num_computed_tokens)
        request.num_in_flight_tokens = count
        return self.ask(
            f"set_in_flight({request.request_id}, {count})",
            lambda side: side.set_in_flight(request, count),
        )

    def preempt(self) -> Any:
        request = self.pick(lambda each: each.running)
        if request is None:
            return NOTHING_TO_DO
        request.running = request.loading = False
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        name = request.request_id
        return self.ask(f"preempt({name})", lambda side: side.preempt(request))

    def finish(self) -> Any:
        request = self.pick(lambda each: each.running or self.rng.random() < 0.1)
        if request is None:
            return NOTHING_TO_DO
        return self.end(request)

    def end(self, request: Request) -> Any:
        self.requests.remove(request)
        self.content.known[0] = request.all_token_ids[: LONGEST - 40]
        name = request.request_id
        return self.ask(f"free({name})", lambda side: side.free(request))

    def pop(self) -> Any:
        request = self.pick(lambda each: each.running)
        if request is None:
            return NOTHING_TO_DO
        self.requests.remove(request)
        self.popped += 1
        name = request.request_id
        return self.ask(f"pop_block_ids({name})", lambda side: side.pop(request))

    def release(self) -> Any:
        if not self.popped:
            return NOTHING_TO_DO
        self.popped -= 1
        return self.ask("the delayed free", lambda side: side.release())

    def evict(self) -> Any:
        ids = {self.rng.randrange(1, self.config.num_blocks) for _ in range(3)}
        return self.ask(f"evict_blocks({ids})", lambda side: side.evict(ids))

    def reset(self) -> Any:
        return self.ask("reset_prefix_cache", lambda side: side.reset())

    def drain(self) -> Any:
        """All requests end."""
        while self.requests:
            self.end(self.requests[-1])
        while self.popped:
            self.release()
        return self.reset()


NOTHING_TO_DO = object()


def checksum(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:4]


def seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "big")


# -- comparing, recording, replaying ----------------------------------------------


def compare(name: str, operations: int, seed: int) -> str:
    """The checksums of so many operations of both sides.

    Raises:
        Different: They differ.
    """
    config = CONFIGURATIONS[name]
    sides = [Theirs(config), Ours(config)]
    return run(Run(config, seed_of(name, seed), sides), name, operations, seed)


def run(driver: Run, name: str, operations: int, seed: int) -> str:
    sums = []
    try:
        for _, one in zip(range(operations), driver.operations(), strict=False):
            sums.append(one)
    except Exception as error:
        raise Different(
            f"{name}: operation {len(sums) + 1}, {driver.what}:"
            f" {type(error).__name__}: {error}\n  again: python"
            f" tests/manager/compare_with_vllm.py --configuration {name!r}"
            f" --operations {len(sums) + 1} --seed {seed}"
        ) from error
    return "".join(sums)


def compare_plugin(names: list[str], operations: int, seed: int) -> list[str]:
    """Where vLLM answers otherwise once kvcache's plugin is registered."""
    from kvcache.integrations import vllm as plugin

    def answers() -> dict[str, str]:
        sums = {}
        for name in names:
            config = CONFIGURATIONS[name]
            driver = Run(config, seed_of(name, seed), [Theirs(config)])
            sums[name] = run(driver, name, operations, seed)
        return sums

    stock = answers()
    if "KVCacheManager.allocate_slots" not in plugin.register():
        raise Different("the plugin did not register")
    differences = []
    for name, sums in answers().items():
        for at in range(0, len(sums), 4):
            if sums[at : at + 4] != stock[name][at : at + 4]:
                differences.append(
                    f"{name}: operation {at // 4 + 1} differs\n  again: python"
                    f" tests/manager/compare_with_vllm.py --plugin --configuration"
                    f" {name!r} --operations {at // 4 + 1} --seed {seed}"
                )
                break
    return differences


def record() -> dict[str, str]:
    """What vLLM alone answers to the recorded operations."""
    return {
        name: run(
            Run(config, seed_of(name, RECORDED_SEED), [Theirs(config)]),
            name,
            RECORDED_OPERATIONS,
            RECORDED_SEED,
        )
        for name, config in CONFIGURATIONS.items()
    }


def replay(name: str) -> str:
    """What kvcache alone answers to them."""
    config = CONFIGURATIONS[name]
    driver = Run(config, seed_of(name, RECORDED_SEED), [Ours(config)])
    return run(driver, name, RECORDED_OPERATIONS, RECORDED_SEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare kvcache's KVCacheManager with vLLM's."
    )
    parser.add_argument("--operations", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help="only this one")
    parser.add_argument("--plugin", action="store_true", help="vLLM's, and with plugin")
    parser.add_argument("--record", type=Path, help="write vLLM's answers instead")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # a reset that is refused
    if options.record:
        source = "python tests/manager/compare_with_vllm.py --record " + str(
            Path(*options.record.parts[-3:])
        )
        answers = {"vLLM 0.33, recorded by": source, **record()}
        options.record.write_text(json.dumps(answers, indent=1) + "\n")
        return
    names = [options.configuration] if options.configuration else list(CONFIGURATIONS)
    each = -(-options.operations // len(names))
    failed = False
    if options.plugin:
        found = compare_plugin(names, each, options.seed)
        print("\n".join(found) or f"{len(names)} configurations, {each} each: equal")
        raise SystemExit(bool(found))
    for name in names:
        try:
            sums = compare(name, each, options.seed)
            print(f"{name}: {len(sums) // 4} operations, equal", flush=True)
        except Different as difference:
            failed = True
            print(difference, flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
