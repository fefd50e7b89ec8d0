"""Hash functions of any object, and the root of a chain."""

import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache import hashing
from kvcache.hashing import (
    functions,
    get_hash_fn_by_name,
    hash_block_tokens,
    init_none_hash,
    resolve_none_hash_seed,
    sha256,
    sha256_cbor,
    xxhash,
    xxhash_cbor,
)

OBJECTS = [None, 1, "text", b"bytes", (b"p", (1, 2), None), [("mm", "a", 3)], {1: 2.5}]
RANDOM_ROOTED = [xxhash, xxhash_cbor]
FIXED_ROOTED = [sha256, sha256_cbor]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No root chosen yet, no seed set, both extras installed."""
    pytest.importorskip("cbor2")
    pytest.importorskip("xxhash")
    monkeypatch.setattr(functions, "NONE_HASH", None)
    monkeypatch.setattr(functions, "_roots", {})
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    yield


# -- hash functions ---------------------------------------------------------------


@pytest.mark.parametrize("value", OBJECTS)
def test_each_function_hashes_what_its_serialiser_writes(value: Any) -> None:
    import cbor2
    from xxhash import xxh3_128_digest

    pickled = pickle.dumps(value, protocol=5)
    cbor = cbor2.dumps(value, canonical=True)
    assert sha256(value) == hashlib.sha256(pickled).digest()
    assert sha256_cbor(value) == hashlib.sha256(cbor).digest()
    assert xxhash(value) == xxh3_128_digest(pickled)
    assert xxhash_cbor(value) == xxh3_128_digest(cbor)


@pytest.mark.parametrize("name", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_function_is_found_by_its_name(name: str) -> None:
    assert get_hash_fn_by_name(name) is getattr(functions, name)


@pytest.mark.parametrize("name", ["md5", "", "SHA256"])
def test_an_unknown_name_is_refused_and_named(name: str) -> None:
    with pytest.raises(ValueError, match=repr(name)):
        get_hash_fn_by_name(name)


@pytest.mark.parametrize(
    ("function", "extra"),
    [(sha256_cbor, "cbor2"), (xxhash_cbor, "cbor2"), (xxhash, "xxhash")],
)
def test_a_missing_extra_is_named(
    function: Callable[[Any], bytes], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)  # importing it fails
    for loaded in ("_cbor2_dumps", "_xxh3_128_digest"):
        monkeypatch.setattr(functions, loaded, None)
    with pytest.raises(ModuleNotFoundError, match=extra):
        function((1, 2))


# -- the root ---------------------------------------------------------------------


@pytest.mark.parametrize("function", FIXED_ROOTED)
def test_a_cryptographic_function_has_a_fixed_seed(
    function: Callable[[Any], bytes],
) -> None:
    assert resolve_none_hash_seed(function) == functions.DEFAULT_NONE_HASH_SEED


@pytest.mark.parametrize("function", RANDOM_ROOTED)
def test_another_function_has_a_fresh_secret_each_time(
    function: Callable[[Any], bytes],
) -> None:
    seeds = {resolve_none_hash_seed(function) for _ in range(10)}
    assert len(seeds) == 10
    assert all(len(bytes.fromhex(seed)) == 32 for seed in seeds)


@pytest.mark.parametrize("function", FIXED_ROOTED + RANDOM_ROOTED)
@pytest.mark.parametrize("seed", ["0", "123", "random", ""])
def test_the_environment_overrides_the_seed(
    function: Callable[[Any], bytes], seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert resolve_none_hash_seed(function) == seed
    init_none_hash(function)
    assert function(seed) == functions.NONE_HASH


@pytest.mark.parametrize("function", FIXED_ROOTED + RANDOM_ROOTED)
@pytest.mark.parametrize("seed", [None, "5"])
def test_only_a_random_root_is_warned_of(
    function: Callable[[Any], bytes],
    seed: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with caplog.at_level(logging.WARNING):
        init_none_hash(function)
    warned = function in RANDOM_ROOTED and seed is None
    assert [function.__name__ in text for text in caplog.messages] == [True] * warned


def test_there_is_no_chosen_root_before_it_is_chosen() -> None:
    assert hashing.NONE_HASH is None
    init_none_hash(sha256)
    assert sha256(functions.DEFAULT_NONE_HASH_SEED) == hashing.NONE_HASH


def test_a_chain_without_a_parent_begins_with_the_chosen_root() -> None:
    init_none_hash(sha256_cbor)
    root = hashing.NONE_HASH
    for function in (*FIXED_ROOTED, *RANDOM_ROOTED):
        expected = function((root, (1, 2), None))
        assert hash_block_tokens(function, None, [1, 2]) == expected
        assert hash_block_tokens(function, b"", [1, 2]) == expected


@pytest.mark.parametrize("function", FIXED_ROOTED + RANDOM_ROOTED)
def test_without_a_chosen_root_a_function_keeps_its_own(
    function: Callable[[Any], bytes],
) -> None:
    first = hash_block_tokens(function, None, [1, 2])
    assert first == hash_block_tokens(function, None, [1, 2])
    assert first == function((functions.root_hash(function), (1, 2), None))


def test_a_chain_is_the_same_in_every_process() -> None:
    code = (
        "from kvcache.hashing import hash_blocks; print(hash_blocks([1]*8, 4)[1].hex())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    }
    assert found == {hashing.hash_blocks([1] * 8, 4)[1].hex() + "\n"}
