"""TokenSpeed's scheduler in C++, serving a request: beside kvcache's manager.

Stores nothing. Its pool, prefix index and eviction are inside one class that says what
to run next; none of them can be called alone, so a request is served from its tokens to
its end. Besides blocks a plan has the input ids of the batch, which kvcache leaves to
its caller.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from by_path import folder_of, how_to_install, version_of
from measure import Unavailable

RELEASE = "0.1.42"
GROUP = "full"
AT_ONCE = 1 << 20  # tokens that may be scheduled in a step


class TokenSpeed(NamedTuple):
    """The package, and its version."""

    package: ModuleType
    version: str


def import_tokenspeed(peers: Path) -> TokenSpeed:
    """The scheduler from `peers`/tokenspeed or where Python finds packages.

    Raises:
        Unavailable: It is not there or does not load; the message says what to do.
    """
    where = peers / "tokenspeed"
    # Else it tells of each time its cache is emptied.
    os.environ.setdefault("SPDLOG_LEVEL", "off")
    try:
        folder = folder_of("tokenspeed_scheduler", where).parent
        sys.path.append(str(folder))
        package = import_module("tokenspeed_scheduler")
    except ImportError as error:
        raise Unavailable(
            f"No TokenSpeed beside the manager ({error}). To have it:"
            f" {how_to_install(where, f'tokenspeed-scheduler=={RELEASE}')}"
        ) from error
    return TokenSpeed(package, version_of("tokenspeed-scheduler", folder))


class Engine:
    """A scheduler of one full-attention group, on the device alone."""

    def __init__(self, of: TokenSpeed, num_blocks: int, block_size: int) -> None:
        config = of.package.SchedulerConfig()
        config.prefix_granularity = block_size
        config.num_device_pages = num_blocks
        config.num_snapshot_pages = 1  # none but the null page: nothing is retracted
        config.disable_l2_cache = True
        config.max_batch_size = 2  # the last one leaves when the next is planned
        config.max_scheduled_tokens = AT_ONCE
        group = of.package.CacheGroupConfig(
            GROUP, block_size, num_blocks, of.package.AttnKind.Full
        )
        config.cache_groups = [group]
        self.scheduler = of.package.Scheduler(config)
        self.spec = of.package.RequestSpec
        self.event = of.package.ExecutionEvent
        self.result = of.package.ForwardEvent.ExtendResult
        self.finish = of.package.ForwardEvent.Finish
        self.names = map(str, count())

    def serve(self, tokens: list[int]) -> tuple[int, np.ndarray]:
        """From tokens to blocks, a token generated, and the end."""
        scheduler, spec = self.scheduler, self.spec()
        spec.request_id = name = next(self.names)
        spec.tokens = tokens
        spec.max_new_tokens = 1
        scheduler.submit_requests([spec])
        [batch] = scheduler.next_execution_plan().forward
        [num_hits] = batch.extend_prefix_lens
        ids = batch.block_tables_arrays()[GROUP][0]
        result, finish = self.result(), self.finish()
        result.request_id = finish.request_id = name
        result.tokens = [7]
        event = self.event()
        event.add_event(result)
        event.add_event(finish)
        scheduler.advance(event)
        return num_hits, ids

    def num_empty(self) -> int:
        """Blocks that hold nothing."""
        empty: int = self.scheduler.empty_lcm_blocks()
        return empty

    def forget(self) -> None:
        if not self.scheduler.clear_cache():
            raise AssertionError("TokenSpeed's cache could not be emptied")


def hash_chain(of: TokenSpeed, block_size: int) -> Any:
    """Its hashes of a chain of tokens, alone."""
    return Engine(of, 2, block_size).scheduler.prefix_hashes_for_tokens
