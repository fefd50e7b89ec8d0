"""How much memory is in use: of the interpreter's objects, of kvcache in C, of all."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache import tracemalloc_domain

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory of the process that is there; 0 where the system does not tell."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def bytes_in_c() -> Iterator[Callable[[], int]]:
    """What kvcache has taken in C meanwhile and not given back, to the byte.

    It is all of it: kvcache/_memory.pyx takes what there is, under a domain of its own,
    and tracemalloc counts a domain's memory by the size that was asked for.
    """
    only = tracemalloc.DomainFilter(True, tracemalloc_domain)

    def held() -> int:
        traces = tracemalloc.take_snapshot().filter_traces([only])
        return sum(trace.size for trace in traces.traces)

    tracemalloc.start(1)
    try:
        yield held
    finally:
        tracemalloc.stop()


def left_over(work: Callable[[int], None], operations: int) -> tuple[int, int]:
    """What so many operations have lost: objects, of all that CPython made, and bytes.

    The latter are those by which the process has grown, 0 where the system does not
    tell.
    """
    work(operations // 10)  # what is kept once is kept now
    objects, sizes = [], []
    # What is lost is lost in both halves; what the interpreter keeps, or the test
    # before gave back late, is in one.
    for _ in range(2):
        gc.collect()
        objects.append(-sys.getallocatedblocks())
        sizes.append(-resident_bytes())
        work(operations // 2)
        gc.collect()
        objects[-1] += sys.getallocatedblocks()
        sizes[-1] += resident_bytes()
    return 2 * min(objects), 2 * min(sizes)
