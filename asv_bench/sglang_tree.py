"""SGLang's compiled radix tree, holding prompts: what `keyed` is measured against.

Stores nothing. It is a Rust extension that needs torch's libraries and nothing else of
SGLang, so it is loaded by its path: the package itself, which asks for a GPU's worth of
others, is not imported. A tree that is not installed costs its rows their other side.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from by_path import folder_of, how_to_install, version_of
from measure import Unavailable

RELEASE = "0.5.23"
ROOM = Path("srt/mem_cache/rust_tree_core")


class SGLang(NamedTuple):
    """The extension, and the release it is of."""

    bindings: ModuleType
    version: str


class Tree(NamedTuple):
    """A tree that holds prompts, and the two ways to ask it for one's cached prefix."""

    keys: list[array[int]]  # the prompts, as it takes them
    find: Callable[[array[int]], Any]  # how many tokens match, and the node they end in
    match: Callable[[array[int]], Any]  # their slots too


def import_sglang(peers: Path) -> SGLang:
    """SGLang from `peers`/sglang or where Python finds packages.

    Raises:
        Unavailable: It is not there or does not load; the message says what to do.
    """
    where = peers / "sglang"
    try:
        root = folder_of("sglang", where)
        bindings = load(root / ROOM)
    except ImportError as error:
        raise Unavailable(
            f"No SGLang beside keyed ({error}). To have it:"
            f" {how_to_install(where, f'sglang=={RELEASE}')}"
        ) from error
    return SGLang(bindings, version_of("sglang", root.parent))


def load(room: Path) -> ModuleType:
    importlib.import_module("torch")  # the libraries that it is linked to
    for suffix in machinery.EXTENSION_SUFFIXES:
        path = room / f"mem_cache{suffix}"
        spec = util.spec_from_file_location("mem_cache", path)
        if path.exists() and spec and spec.loader:
            module = util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError("its compiled radix tree is not in the package")


def tree_of(sglang: SGLang, prompts: np.ndarray, pages: np.ndarray, size: int) -> Tree:
    """A tree made and called as SGLang's adapter does, less the adapter's own time.

    Args:
        sglang: The extension.
        prompts: A row of tokens each; whole pages of `size` tokens.
        pages: The numbers of the pages that hold them; a row each.
        size: Tokens in a page.
    """
    ours = sglang.bindings
    params = ours.TreeCoreInitParamsBinding(
        eviction_policy="lru", page_size=size, device="cpu"
    )
    tree = ours.RustUnifiedTreeCoreBinding(params, [0])  # full attention alone
    torch = importlib.import_module("torch")
    slots = (pages[:, :, None] * size + np.arange(size)).reshape(len(pages), -1)
    keys = [array("q", prompt.tolist()) for prompt in prompts]
    for key, row in zip(keys, slots, strict=True):
        tree.insert(ours.InsertParamsBinding(key=key, value=torch.from_numpy(row)))
    root = tree.root_node_handle()
    Key, find_node = ours.MatchParamsBinding, tree.match_prefix
    slots_between = tree.collect_full_device_indices

    def find(key: array[int]) -> Any:
        return find_node(Key(key))

    def match(key: array[int]) -> Any:
        return slots_between(find_node(Key(key)).last_device_node_id, root)

    for key, row in zip(keys, slots, strict=True):
        if not np.array_equal(match(key).numpy(), row):
            raise AssertionError("SGLang's tree does not hold a prompt as a whole")
    return Tree(keys, find, match)
