"""The fuzzers' targets without a fuzzer: their seeds, random bytes, and seeded faults.

`.ci/fuzz` runs them where coverage guides the bytes; here they run everywhere. Each has
to fail where what it watches, or what it compares that with, does something else.
"""

import importlib
from collections.abc import Callable, Iterator
from random import Random
from types import ModuleType
from typing import Any

import pytest
from choices import Choices


def load(name: str) -> ModuleType:
    if name == "encoding":
        pytest.importorskip("cbor2")
    return importlib.import_module(f"fuzz_{name}")


def inputs(target: ModuleType) -> Iterator[bytes]:
    random = Random(1)
    yield from target.SEEDS
    yield from (random.randbytes(i % 200) for i in range(400))


@pytest.mark.parametrize("name", ["pool", "index", "encoding", "trace"])
def test_seeds_and_random_bytes_are_survived(name: str) -> None:
    target = load(name)
    for data in inputs(target):
        target.run(data)


@pytest.mark.parametrize(
    ("name", "replaced", "fault"),
    [
        ("pool", "reference_pool.ReferencePool.touch", lambda model, ids: None),
        ("index", "fuzz_index.pop", lambda index, model, *entry: model.popitem()),
        ("encoding", "fuzz_encoding.block_as_pickle", lambda parent, tokens: b""),
        ("encoding", "fuzz_encoding.block_as_cbor", lambda parent, tokens: b""),
        ("encoding", "fuzz_encoding.chain", lambda *arguments: []),
        ("trace", "kvcache.replay.trace.parse_arrival", lambda row: (None, 7)),
        ("trace", "kvcache.replay.trace.parse_row", lambda line: {}[line]),
    ],
)
def test_a_target_fails_on_a_fault(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    replaced: str,
    fault: Callable[..., Any],
) -> None:
    target = load(name)
    monkeypatch.setattr(replaced, fault)
    with pytest.raises((AssertionError, KeyError)):
        for data in inputs(target):
            target.run(data)


def test_choices_are_the_bytes_in_turn_and_then_nothing() -> None:
    choices = Choices(b"\x05\xff\x01\x02abc")
    assert choices.below(4) == 1
    assert choices.pick("xyz") == "x"
    assert choices.below(2**16) == 0x0201
    assert choices.take(2) == b"ab"
    assert choices
    assert choices.take(9) == b"c"
    assert not choices
    assert (choices.below(7), choices.take(1), choices.below(1)) == (0, b"", 0)
