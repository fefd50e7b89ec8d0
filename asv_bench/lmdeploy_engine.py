"""LMDeploy's block manager in NumPy and its prefix trie, serving a request.

Stores nothing. What is measured is its `pytorch/paging/block_manager` and `block_trie`
with the sequence they work on, file for file; the engine around them, which asks for
compiled kernels and transformers, is stood in for.
"""

from __future__ import annotations

import logging
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from by_path import Contents, folder_of, how_to_install, stand_ins, version_of
from measure import Unavailable

RELEASE = "0.18.0"


class LMDeploy(NamedTuple):
    """The modules that are used, and the release they are of."""

    managers: ModuleType
    tries: ModuleType
    messages: ModuleType
    sequences: ModuleType
    version: str


def imported(root: Path) -> Contents:
    """What the imports of those files find; all else is looked up below `root`."""
    torch_engine = root / "pytorch"
    events = dict.fromkeys(("EngineEvent", "EventType"))
    types = ("GenerationConfig", "LogitsProcessor")
    packages = {
        f"lmdeploy.pytorch.{name}": {"__path__": [str(torch_engine / name)]}
        for name in ("paging", "strategies", "strategies/ar", "strategies/base")
    }
    return {
        "lmdeploy": {"__path__": [str(root)]},
        "lmdeploy.messages": events | dict.fromkeys(types, object),
        "lmdeploy.utils": {"get_logger": logging.getLogger},
        "lmdeploy.vl.constants": {"Modality": object},
        "lmdeploy.pytorch.config": {"CacheConfig": object},
        "lmdeploy.pytorch.disagg.conn.protocol": {"MigrationRequest": object},
        "lmdeploy.pytorch.engine.model_agent": {"BatchedOutputs": object},
        "lmdeploy.pytorch.model_inputs": dict.fromkeys(
            ("ModelInputs", "ModelInputsDelta"), object
        ),
        "lmdeploy.pytorch.multimodal.data_type": {
            "MultiModalInputs": dict,
            "make_multimodal_content_hash": None,
        },
        **{name.replace("/", "."): path for name, path in packages.items()},
    }


def import_lmdeploy(peers: Path) -> LMDeploy:
    """The modules from `peers`/lmdeploy or where Python finds packages.

    Raises:
        Unavailable: They are not there or do not load; the message says what to do.
    """
    where = peers / "lmdeploy"
    try:
        root = folder_of("lmdeploy", where)
        with stand_ins(imported(root)):
            modules = [
                import_module(f"lmdeploy.pytorch.{name}")
                for name in (
                    "paging.block_manager.default_block_manager",
                    "paging.block_trie",
                    "messages",
                    "strategies.ar.sequence",
                )
            ]
    except ImportError as error:
        raise Unavailable(
            f"No LMDeploy beside the manager ({error}). To have it:"
            f" {how_to_install(where, f'lmdeploy=={RELEASE}')}"
        ) from error
    return LMDeploy(*modules, version_of("lmdeploy", root.parent))


class Engine:
    """What its scheduler does with one request of text, less the scheduler."""

    def __init__(self, of: LMDeploy, num_blocks: int, block_size: int) -> None:
        self.manager = of.managers.DefaultBlockManager(num_blocks, 0)
        self.trie = of.tries.BlockTrie(
            allocator=self.manager.allocator, block_size=block_size, enabled=True
        )
        meta = of.messages.SequenceMeta(block_size, enable_prefix_caching=True)
        self.session = SimpleNamespace(seq_meta=meta, session_id=0)
        self.make = of.sequences.ARSequenceStrategy().make_sequence
        self.sampling = of.messages.SamplingParam()
        self.generated = of.messages.UpdateTokenMode.PREFILL
        self.names = count()

    def serve(self, tokens: np.ndarray) -> tuple[int, np.ndarray]:
        """From tokens to blocks, a token generated, and the end."""
        manager, trie = self.manager, self.trie
        sequence = self.make(next(self.names), self.session, self.sampling)
        sequence.update_token_ids(tokens)
        trie.match(sequence)
        num_hits = sequence.num_history_ids
        missing = manager.num_required_blocks(sequence)
        missing -= manager.get_num_free_gpu_blocks()
        if missing > 0:
            trie.evict(missing)
        manager.allocate(sequence)
        trie.allocate(sequence)
        trie.finalize_match(sequence)
        ids = manager.get_block_table(sequence)
        sequence.update_token_ids(7, mode=self.generated)
        manager.free(sequence)
        return num_hits, ids

    def num_empty(self) -> int:
        """Blocks that hold nothing."""
        empty: int = self.manager.get_num_free_gpu_blocks()
        return empty

    def forget(self) -> None:
        self.trie.evict(self.manager.num_gpu_blocks)


def allocator(of: LMDeploy, num_blocks: int) -> Any:
    """Its allocator alone."""
    return of.managers.DefaultBlockManager(num_blocks, 0).allocator
