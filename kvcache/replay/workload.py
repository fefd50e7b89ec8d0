"""Generates multi-turn chat requests, to replay where there is no trace.

Holds the sessions that are running. Invariant: equal options give equal
requests, on every machine and Python version. Costs: a request costs one copy
of its session's block ids. Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kvcache.replay.batches import Arrival, Row

SHAPE = {
    "seed": (0, "seed of all random choices"),
    "sessions": (1, "sessions in all"),
    "turns": (1, "requests a session makes"),
    "open_sessions": (1, "sessions that take turns at a time"),
    "system_tokens": (0, "tokens of the system prompt that all sessions share"),
    "user_tokens": (1, "mean tokens of a message"),
    "reply_tokens": (0, "mean tokens of a reply"),
}
"""Options: the least value and the meaning of each."""


@dataclass
class Workload:
    """Chat sessions that take turns in random order.

    Each request repeats the system prompt, which all sessions share, and its
    session's earlier messages and replies, and adds a message. Lengths of
    messages and replies vary evenly around their means.

    Attributes:
        block_size: Tokens a block. The other options are in `SHAPE`.

    Raises:
        ValueError: An option is below its least value.
    """

    seed: int = 0
    sessions: int = 256
    turns: int = 10
    open_sessions: int = 128
    system_tokens: int = 1024
    user_tokens: int = 150
    reply_tokens: int = 350
    block_size: int = 16

    name: ClassVar[None] = None
    unit: ClassVar[str] = "requests"
    done: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options."""
        for name, (least, _) in {**SHAPE, "block_size": (1, "")}.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @property
    def total(self) -> int:
        """Requests in all."""
        return self.sessions * self.turns

    def __iter__(self) -> Iterator[Row]:
        """Yield the requests; each iteration yields the same ones."""
        for length, ids, _, _ in self.arrivals():
            yield length, ids

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests and how long the replies are; none has a time."""
        # Of Random, only `random()` promises equal numbers in every version.
        random = Random(self.seed).random
        fresh_ids = count()
        system_ids = list(islice(fresh_ids, self.system_tokens // self.block_size))
        waiting = self.sessions
        running: list[_Session] = []
        self.done = 0
        while waiting or running:
            while waiting and len(running) < self.open_sessions:
                running.append(_Session(self.system_tokens, system_ids[:]))
                waiting -= 1
            chosen = int(random() * len(running))
            session = running[chosen]
            session.tokens += _around(self.user_tokens, random())
            new_blocks = session.tokens // self.block_size - len(session.ids)
            session.ids += islice(fresh_ids, new_blocks)
            self.done += 1
            reply = _around(self.reply_tokens, random())
            yield session.tokens, session.ids[:], None, reply
            session.tokens += reply
            session.turn += 1
            if session.turn == self.turns:
                running[chosen] = running[-1]
                running.pop()


@dataclass
class _Session:
    tokens: int
    ids: list[int]
    turn: int = 0


def _around(mean: int, fraction: float) -> int:
    """Map a fraction in [0, 1) to 1 .. 2 * mean - 1, or to 0 if the mean is 0."""
    return 1 + int(fraction * (2 * mean - 1)) if mean else 0
