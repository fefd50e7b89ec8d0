"""What a row of the side-by-side table is, and how its two sides are measured.

Stores nothing. Invariant: both sides of a row run the same number of rounds, in turns,
in one process, with the garbage collector off or on for both, so what disturbs the
machine disturbs both; only the ratio of a round counts, and the median of the rounds.
A turn is some 10 ms of short samples, and its best one counts.
"""

from __future__ import annotations

import gc
import os
import platform
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple


class Unavailable(Exception):
    """A row cannot run here; the message says what it needs."""


class Side(NamedTuple):
    """One side's work: `run(loops)` does it and returns the nanoseconds it took."""

    run: Callable[[int], int]
    blocks: int  # that one loop handles


class Pace(NamedTuple):
    """How long to measure."""

    rounds: int
    long_rounds: int  # for rows of which one loop takes long: one sample a turn
    samples: int  # in one side's turn; the best counts, so that few preemptions do
    sample_ns: int  # that a sample should take


@dataclass
class Result:
    """A row's figures.

    `low` and `high` are the 10th and 90th percentile of the ratios, or of our times
    where there is no stock side. `least` is the ratio at which the floor is met, also
    where that is one of nanoseconds or bytes.
    """

    work: str
    unit: str
    floor: str
    against: str = "vLLM"
    ours: float | None = None
    stock: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    least: float | None = None
    rounds: int = 0
    reached: bool | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TimeRow:
    """Nanoseconds a block; the floor is the least ratio of stock's to ours."""

    work: str
    floor: float | None
    ours: Callable[[], Side]
    stock: Callable[[], Side]
    long: bool = False  # one loop takes far longer than a sample should
    collector: bool = False  # whether the garbage collector is on
    against: str = "vLLM"  # whose the other side is
    unit = "ns"

    def measure(self, pace: Pace) -> Result:
        times: list[list[float]] = [[], []]
        rounds, samples = pace.rounds, pace.samples
        if self.long:
            rounds, samples = pace.long_rounds, 1
        with collector(self.collector):
            sides = self.ours(), self.stock()
            loops = [calibrate(side, pace.sample_ns) for side in sides]
            for i in range(rounds):
                # A B, then B A: a drift within the round cancels out over two.
                for k in (0, 1) if i % 2 == 0 else (1, 0):
                    spent = min(sides[k].run(loops[k]) for _ in range(samples))
                    times[k].append(spent / loops[k] / sides[k].blocks)
        ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
        ratio = median(ratios)
        deciles = quantiles(ratios, n=10, method="inclusive") if rounds > 1 else ratios
        return Result(
            self.work,
            self.unit,
            floor=f"{self.floor:g}x" if self.floor else "-",
            against=self.against,
            ours=median(times[0]),
            stock=median(times[1]),
            ratio=ratio,
            low=deciles[0],
            high=deciles[-1],
            least=self.floor,
            rounds=rounds,
            reached=ratio >= self.floor if self.floor else None,
        )


@dataclass
class LimitRow:
    """Nanoseconds a block of work that stock does not have; at most `limit` of them."""

    work: str
    limit: float | None
    ours: Callable[[], Side]
    unit = "ns"

    def measure(self, pace: Pace) -> Result:
        with collector(False):
            side = self.ours()
            loops = calibrate(side, pace.sample_ns)
            times = []
            for _ in range(pace.rounds):
                spent = min(side.run(loops) for _ in range(pace.samples))
                times.append(spent / loops / side.blocks)
        ours = median(times)
        deciles = quantiles(times, n=10, method="inclusive")
        return Result(
            self.work,
            self.unit,
            floor=f"<= {self.limit:g} ns" if self.limit else "-",
            ours=ours,
            low=deciles[0],
            high=deciles[-1],
            rounds=pace.rounds,
            reached=ours <= self.limit if self.limit else None,
        )


@dataclass
class BytesRow:
    """Bytes a block that `make()` leaves allocated; ours must be within the limit.

    `tracemalloc` sees Python's objects and what compiled code takes with PyMem_Raw*.
    """

    work: str
    limit: float | None
    ours: Callable[[], Any]
    stock: Callable[[], Any]
    blocks: int
    unit = "B"

    def measure(self, pace: Pace) -> Result:
        with collector(False):
            ours, stock = (
                traced_bytes(make) / self.blocks for make in (self.ours, self.stock)
            )
        return Result(
            self.work,
            self.unit,
            floor=f"<= {self.limit:g} B" if self.limit else "-",
            ours=ours,
            stock=stock,
            ratio=stock / ours,
            least=stock / self.limit if self.limit else None,
            rounds=1,
            reached=ours <= self.limit if self.limit else None,
        )


Row = TimeRow | LimitRow | BytesRow


@contextmanager
def collector(on: bool) -> Iterator[None]:
    gc.collect()
    if not on:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def calibrate(side: Side, sample_ns: int) -> int:
    """Loops that take about `sample_ns`; running them warms the side up."""
    loops = 1
    while (spent := side.run(loops)) * 4 < sample_ns:
        loops *= 2
    return max(1, round(loops * sample_ns / spent))


def traced_bytes(make: Callable[[], Any]) -> int:
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        after = tracemalloc.get_traced_memory()[0]
        del made
        return after - before
    finally:
        tracemalloc.stop()


def this_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
