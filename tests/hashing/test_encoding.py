"""The C encoders write what the serialisers write, byte for byte."""

import pickle
import random

import numpy as np
import pytest
from compare_with_vllm import EDGES, random_token

from kvcache.hashing.encoding import block_as_cbor, block_as_pickle

PARENTS = [0, 1, 16, 32, 255, 256, 65530, 65535, 65536, 70_000]
# Around what fills pickle's frames of 64 KiB with tokens of 5, 3, 2 and 10 bytes.
COUNTS = [*range(6), 16, 100, 6_553, 6_554, 13_107, 21_845, 32_768, 40_000]


def as_pickle(parent: bytes, tokens: list[int]) -> bytes:
    return pickle.dumps((parent, tuple(tokens), None), protocol=5)


def as_cbor(parent: bytes, tokens: list[int]) -> bytes:
    cbor2 = pytest.importorskip("cbor2")
    encoded: bytes = cbor2.dumps((parent, tuple(tokens), None), canonical=True)
    return encoded


def assert_both(parent: bytes, tokens: list[int]) -> None:
    assert block_as_pickle(parent, tokens) == as_pickle(parent, tokens)
    assert block_as_cbor(parent, tokens) == as_cbor(parent, tokens)


@pytest.mark.parametrize("length", PARENTS)
@pytest.mark.parametrize("count", COUNTS)
def test_any_parent_and_any_number_of_tokens_is_encoded_exactly(
    length: int, count: int
) -> None:
    rng = random.Random(length * 100_000 + count)
    assert_both(rng.randbytes(length), [random_token(rng) for _ in range(count)])


@pytest.mark.parametrize("token", EDGES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
def test_a_token_is_encoded_in_the_shortest_form(token: int, count: int) -> None:
    assert_both(b"p" * 32, [token] * count)


@pytest.mark.parametrize("token", [7, 300, 70_000, 2**62])
def test_a_frame_ends_where_it_is_full(token: int) -> None:
    size = len(as_pickle(b"", [token] * 5)) - len(as_pickle(b"", [token] * 4))
    full = 65_536 // size
    for count in range(full - 30, full + 5):
        assert block_as_pickle(b"p" * 32, [token] * count) == as_pickle(
            b"p" * 32, [token] * count
        )
    for count in range(2 * full - 30, 2 * full + 5, 3):
        assert block_as_pickle(b"p" * 32, [token] * count) == as_pickle(
            b"p" * 32, [token] * count
        )


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"])
def test_an_array_is_encoded_as_the_ints_it_holds(dtype: str) -> None:
    tokens = list(range(100))
    array = np.array(tokens, dtype)
    assert block_as_pickle(b"p", array) == as_pickle(b"p", tokens)
    assert block_as_cbor(b"p", array[::-1]) == as_cbor(b"p", tokens[::-1])


def test_random_blocks_are_encoded_exactly() -> None:
    rng = random.Random(5)
    for _ in range(3_000):
        tokens = [random_token(rng) for _ in range(rng.randrange(40))]
        assert_both(rng.randbytes(rng.choice((16, 32, rng.randint(1, 300)))), tokens)


@pytest.mark.parametrize("encode", [block_as_pickle, block_as_cbor])
@pytest.mark.parametrize("parent", [None, "p", bytearray(b"p")])
def test_a_parent_that_is_not_bytes_is_refused(encode, parent) -> None:
    with pytest.raises(TypeError):
        encode(parent, [1])
