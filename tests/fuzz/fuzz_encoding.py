"""The C encoders beside pickle and cbor2, and the hashes beside hashlib.

A block is a parent and tokens: of a size each that the input chooses, repeated so often
that pickle's frames of 64 KiB end within it, as a list or as an array of some dtype.
"""

import hashlib
import pickle
from collections.abc import Callable

import cbor2
import numpy as np
from choices import Choices

from kvcache.hashing import hash_blocks, sha256, sha256_cbor
from kvcache.hashing.encoding import block_as_cbor, block_as_pickle

MOST_TOKENS = 14_000
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8]
DTYPES = [None, "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">i8"]
SEEDS = [
    bytes(30),
    b"\x20" + b"p" * 32 + bytes(range(200)),
    b"\x00\x00\x00\x00\x00" + b"\x02\x01\x3f\x10\x00\x01\x10\x00\x01" * 2,
]


def as_pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def as_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def draw_tokens(choices: Choices) -> list[int]:
    """Some tokens of few bytes, some of many, now and then as many as fill a frame."""
    tokens: list[int] = []
    while choices and len(tokens) < MOST_TOKENS:
        width, count = choices.pick(WIDTHS), 1 + choices.below(8)
        times = MOST_TOKENS // count if choices.below(64) == 63 else 1
        some = [
            int.from_bytes(choices.take(width), "little") & (2**63 - 1)
            for _ in range(count)
        ]
        tokens += some * times
    return tokens


def draw_form(choices: Choices, tokens: list[int]) -> object:
    """The tokens as a caller passes them; an array only if it can hold them."""
    dtype = choices.pick(DTYPES)
    if dtype is None or max(tokens, default=0) > np.iinfo(dtype).max:
        return tokens
    array = np.array(tokens, dtype)
    return np.repeat(array, 2)[::2] if choices.below(2) else array


def chain(
    encode: Callable[[object], bytes], parent: bytes, tokens: list[int], size: int
) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        block = (parent, tuple(tokens[start : start + size]), None)
        parent = hashlib.sha256(encode(block)).digest()
        hashes.append(parent)
    return hashes


def run(data: bytes) -> None:
    choices = Choices(data)
    parent = choices.take(choices.below(64)) * (1 + choices.below(4) ** 7)
    size = 1 + choices.below(40)
    form_choices, tokens = Choices(choices.take(2)), draw_tokens(choices)
    form = draw_form(form_choices, tokens)
    block = (parent, tuple(tokens), None)
    assert block_as_pickle(parent, form) == as_pickle(block)
    assert block_as_cbor(parent, form) == as_cbor(block)
    parent = (parent + bytes(32))[:32]
    tokens, form = tokens[:200], form[:200]
    for hash_fn, encode in ((sha256, as_pickle), (sha256_cbor, as_cbor)):
        found = hash_blocks(form, size, parent, hash_fn=hash_fn)
        assert [bytes(each) for each in found] == chain(encode, parent, tokens, size)
