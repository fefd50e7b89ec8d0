"""Stock vLLM 0.8.5's block allocators, beside whatever `vllm` is imported already.

Stores nothing. What is measured is that release's `core/block` and `core/evictor`, file
for file. The four modules around them that these import (logger, platforms, sequence,
utils) would pull in the whole of an engine, whose operators cannot be registered twice
in a process; small ones stand in for them, with the six names that are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum, auto
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from by_path import Contents, stand_ins
from measure import Unavailable

RELEASE = "0.8.5"
FOLDER = "v0site"


class Allocators(NamedTuple):
    """The classes that both sides have, of one of them."""

    PrefixCachingBlockAllocator: type
    CpuGpuBlockAllocator: type
    BlockTable: type
    LRUEvictor: type
    Device: type
    version: str


class Device(Enum):
    GPU = auto()
    CPU = auto()


def ceiling(a: int, b: int) -> int:
    return -(a // -b)


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def imported(root: Path) -> Contents:
    """What the allocators' imports find; all else is looked up below `root`."""
    platform = SimpleNamespace(is_hpu=lambda: False)
    return {
        "vllm": {"__path__": [str(root)]},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.sequence": {"Sequence": object},  # in annotations only
        "vllm.utils": {"Device": Device, "cdiv": ceiling, "chunk_list": chunks},
    }


def import_v0(peers: Path) -> Allocators:
    """The release from `peers`/v0site.

    Raises:
        Unavailable: It is not there or does not load; the message says what to do.
    """
    where = peers / FOLDER
    try:
        with stand_ins(imported(where / "vllm")):
            names = ("cpu_gpu_block_allocator", "block_table", "prefix_caching_block")
            two_devices, table, prefix_caching = (
                import_module(f"vllm.core.block.{name}") for name in names
            )
            evictor = import_module("vllm.core.evictor")
    except ImportError as error:
        raise Unavailable(
            f"No vLLM {RELEASE} ({error}). To have it: ../shared/vllm/setup.sh {peers}"
        ) from error
    found = metadata.distributions(path=[str(where)])
    versions = [each.version for each in found if each.name.startswith("vllm")]
    return Allocators(
        prefix_caching.PrefixCachingBlockAllocator,
        two_devices.CpuGpuBlockAllocator,
        table.BlockTable,
        evictor.LRUEvictor,
        Device,
        versions[0] if versions else "unknown",
    )
