"""Hash functions of any object, and the root that chains of block hashes begin with.

Stores: `NONE_HASH`, the root that `init_none_hash` chose, None before; until then every
hash function has a root of its own, made when first needed and kept.
Functions, seeds and roots are vLLM 0.33's (utils/hashing.py and
v1/core/kv_cache_utils.py).
Costs: a serialiser's run each; blocks are hashed by `block_hasher`, in C.
Threads: functions are reentrant; call `init_none_hash` before any hashing.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

from kvcache.hashing.keyed_hash import Keyed

logger = logging.getLogger(__name__)

HashFunction = Callable[[Any], bytes]


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


# Loaded when first called for: the pool alone needs neither.
_cbor2_dumps: Any = None
_xxh3_128_digest: Any = None

PICKLE_PROTOCOL = 5
DEFAULT_NONE_HASH_SEED = "vllm-none-hash"

NONE_HASH: bytes | None = None
_roots: dict[HashFunction, bytes] = {}


def as_cbor(value: Any) -> bytes:
    """Canonical CBOR of an object.

    Raises:
        ModuleNotFoundError: cbor2 is not installed.
        TypeError: There is none of it.
    """
    global _cbor2_dumps
    if _cbor2_dumps is None:
        _cbor2_dumps = _optional("cbor2", "dumps")
    if _cbor2_dumps is None:
        raise ModuleNotFoundError(
            "sha256_cbor and xxhash_cbor need cbor2: pip install 'kvcache[cbor]'",
            name="cbor2",
        )
    try:
        encoded: bytes = _cbor2_dumps(value, canonical=True)
    except _optional("cbor2", "CBOREncodeError") as error:
        raise TypeError(f"no CBOR of {value!r}: {error}") from error
    return encoded


def xxhash_digest(data: bytes) -> bytes:
    """XXH3-128 of bytes, 16 bytes.

    Raises:
        ModuleNotFoundError: xxhash is not installed.
    """
    global _xxh3_128_digest
    if _xxh3_128_digest is None:
        _xxh3_128_digest = _optional("xxhash", "xxh3_128_digest")
    if _xxh3_128_digest is None:
        raise ModuleNotFoundError(
            "xxhash and xxhash_cbor need xxhash: pip install 'kvcache[xxhash]'",
            name="xxhash",
        )
    digest: bytes = _xxh3_128_digest(data)
    return digest


def sha256(input: Any) -> bytes:
    """SHA-256 of an object as pickle, 32 bytes."""
    return hashlib.sha256(pickle.dumps(input, protocol=PICKLE_PROTOCOL)).digest()


def sha256_cbor(input: Any) -> bytes:
    """SHA-256 of an object as canonical CBOR, 32 bytes; any language can make it."""
    return hashlib.sha256(as_cbor(input)).digest()


def xxhash(input: Any) -> bytes:
    """XXH3-128 of an object as pickle, 16 bytes; collisions can be made on purpose."""
    return xxhash_digest(pickle.dumps(input, protocol=PICKLE_PROTOCOL))


def xxhash_cbor(input: Any) -> bytes:
    """XXH3-128 of an object as canonical CBOR, 16 bytes; as safe as `xxhash`."""
    return xxhash_digest(as_cbor(input))


keyed = Keyed()
"""The hash function `keyed` under this process's own secret key."""

HASH_FUNCTIONS: dict[str, HashFunction] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash,
    "xxhash_cbor": xxhash_cbor,
    "keyed": keyed,
}
# Whoever knows the root could make prompts collide, so it must be secret.
NOT_CRYPTOGRAPHIC = frozenset({xxhash, xxhash_cbor})


def get_hash_fn_by_name(hash_fn_name: str) -> HashFunction:
    """The hash function of that name.

    Raises:
        ValueError: There is none.
    """
    try:
        return HASH_FUNCTIONS[hash_fn_name]
    except KeyError:
        names = ", ".join(HASH_FUNCTIONS)
        raise ValueError(
            f"no hash function {hash_fn_name!r}: there are {names}"
        ) from None


def resolve_none_hash_seed(hash_fn: HashFunction) -> str:
    """What the root of a hash function is made from.

    The environment variable PYTHONHASHSEED, as it stands, if it is set ("random" is a
    seed as any other); else a fixed seed for a cryptographic function, so that all
    processes agree, and a fresh secret for another.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    return (
        os.urandom(32).hex()
        if hash_fn in NOT_CRYPTOGRAPHIC
        else (DEFAULT_NONE_HASH_SEED)
    )


def _make_root(hash_fn: HashFunction) -> bytes:
    if hash_fn in NOT_CRYPTOGRAPHIC and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "%s is not collision resistant, so its chains begin with a random root:"
            " their hashes differ from process to process. To share them, set"
            " PYTHONHASHSEED to one value everywhere, or use sha256.",
            getattr(hash_fn, "__name__", hash_fn),
        )
    return hash_fn(resolve_none_hash_seed(hash_fn))


def init_none_hash(hash_fn: HashFunction) -> None:
    """Choose `NONE_HASH`, the root of all chains from now on, of any hash function."""
    global NONE_HASH
    NONE_HASH = _make_root(hash_fn)


def root_hash(hash_fn: HashFunction) -> bytes:
    """The parent of a first block: `NONE_HASH`, else hash_fn's own root."""
    if NONE_HASH is not None:
        return NONE_HASH
    root = _roots.get(hash_fn)
    if root is None:
        root = _roots[hash_fn] = _make_root(hash_fn)
    return root
