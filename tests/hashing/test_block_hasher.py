"""Tokens in, chained block hashes out: every face, every path, every refusal."""

import array
import enum
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compare_with_vllm import (
    ALGORITHMS,
    GOLDEN_SEED,
    golden_requests,
    hashes_of,
    random_token,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.errors import BlockStateError
from kvcache.hashing import (
    BlockHasher,
    functions,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    init_none_hash,
    sha256,
    sha256_cbor,
)
from kvcache.hashing.chain import CompiledHash

PARENT = bytes(range(32))


@pytest.fixture(autouse=True)
def no_root_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "NONE_HASH", None)


@pytest.fixture(params=ALGORITHMS)
def hash_fn(request: pytest.FixtureRequest) -> Callable[[Any], bytes]:
    if "cbor" in request.param:
        pytest.importorskip("cbor2")
    if "xxhash" in request.param:
        pytest.importorskip("xxhash")
    return get_hash_fn_by_name(request.param)


def chain(
    hash_fn: Callable[[Any], bytes],
    tokens: list[int],
    block_size: int,
    parent: bytes = PARENT,
    lookahead: int = 0,
    keys: Callable[[int, int], Any] | None = None,
) -> list[bytes]:
    """The hashes by the serialisers alone: what every path must give."""
    hashes = []
    for start in range(0, len(tokens), block_size):
        end = start + block_size
        if end + lookahead > len(tokens):
            break
        extra = keys(start, end + lookahead) if keys else None
        if lookahead:
            extra = (extra, *tokens[end : end + lookahead])
        parent = hash_fn((parent, tuple(tokens[start:end]), extra))
        hashes.append(parent)
    return hashes


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [random_token(rng) for _ in range(count)]


# -- both paths agree -------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 17, 1000])
@pytest.mark.parametrize("length", [1, 16, 32, 300, 70_000])
def test_the_path_in_c_gives_what_the_serialiser_gives(
    hash_fn: Callable[[Any], bytes], block_size: int, length: int
) -> None:
    tokens, parent = some_tokens(3 * block_size + 1), b"p" * length
    expected = chain(hash_fn, tokens, block_size, parent)
    assert hash_blocks(tokens, block_size, parent, hash_fn=hash_fn) == expected
    # A function that is not recognised goes through the serialiser.
    unknown = hash_blocks(tokens, block_size, parent, hash_fn=lambda o: hash_fn(o))
    assert unknown == expected


@pytest.mark.parametrize("count", [0, 1, 3, 4, 16, 70_000])
def test_a_block_is_hashed_as_the_serialiser_would(
    hash_fn: Callable[[Any], bytes], count: int
) -> None:
    tokens = some_tokens(count)
    expected = hash_fn((PARENT, tuple(tokens), None))
    assert hash_block_tokens(hash_fn, PARENT, tokens) == expected
    assert hash_block_tokens(hash_fn, PARENT, tuple(tokens)) == expected
    assert hash_block_tokens(hash_fn, PARENT, np.array(tokens, int)) == expected


def test_a_parent_of_a_kind_of_bytes_is_serialised_as_that_kind() -> None:
    parent = Digest(b"p" * 32)
    expected = sha256((parent, (1, 2), None))
    assert expected != sha256((bytes(parent), (1, 2), None))
    assert hash_block_tokens(sha256, parent, [1, 2]) == expected
    assert hash_blocks([1, 2, 3, 4], 2, parent) == [
        expected,
        sha256((expected, (3, 4), None)),
    ]


class Digest(bytes):
    """A subclass, which pickle writes with its name."""


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_lookahead_tokens_are_covered_and_wait_for_their_block(
    hash_fn: Callable[[Any], bytes], lookahead: int
) -> None:
    for count in range(8 + lookahead, 40):
        tokens = some_tokens(count)
        options = {"hash_fn": hash_fn, "num_lookahead_tokens": lookahead}
        expected = chain(hash_fn, tokens, 8, lookahead=lookahead)
        assert len(expected) == (count - lookahead) // 8
        assert hash_blocks(tokens, 8, PARENT, **options) == expected
        rows = hash_blocks(np.array(tokens, int), 8, PARENT, **options)
        assert [row.tobytes() for row in rows] == expected


def test_blocks_with_and_without_extra_keys_form_one_chain(
    hash_fn: Callable[[Any], bytes],
) -> None:
    tokens = some_tokens(80)
    keys = [None, None, (("lora", "a", "/p"),), None, ("x",), (), None, None, None, "t"]
    expected = chain(hash_fn, tokens, 8, keys=lambda start, end: keys[start // 8])
    assert hash_blocks(tokens, 8, PARENT, hash_fn=hash_fn, extra_keys=keys) == expected


def test_back_references_follow_identity() -> None:
    tokens, name = (1, 2), "".join(("na", "me"))
    twin = "".join(("na", "me"))
    same = hash_block_tokens(sha256, PARENT, tokens, ((name,), (name,)))
    equal = hash_block_tokens(sha256, PARENT, tokens, ((name,), (twin,)))
    assert same == sha256((PARENT, tokens, ((name,), (name,))))
    assert equal == sha256((PARENT, tokens, ((name,), (twin,))))
    assert same != equal
    # The tuple of tokens and the parent may be in the keys, too.
    for keys in ((tokens,), (PARENT,)):
        assert hash_block_tokens(sha256, PARENT, tokens, keys) == sha256(
            (PARENT, tokens, keys)
        )


def test_no_object_is_made_for_a_block_of_an_array() -> None:
    tokens = np.arange(16 * 5_000, dtype=np.int32)
    hash_blocks(tokens, 16)
    tracemalloc.start()
    try:
        hashes = hash_blocks(tokens, 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < hashes.nbytes + 4_096


# -- faces ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "as_array",
    [
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint16),
        lambda tokens: np.array(tokens, np.uint64),
        lambda tokens: np.array(tokens, ">i4"),
        lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
        lambda tokens: array.array("i", tokens),
        lambda tokens: array.array("q", tokens),
        lambda tokens: memoryview(array.array("l", tokens)),
    ],
)
def test_an_array_of_tokens_gives_an_array_of_hashes(as_array: Any) -> None:
    tokens = list(range(100))
    rows = hash_blocks(as_array(tokens), 16)
    assert rows.shape == (6, 32)
    assert rows.dtype == np.uint8
    assert rows.flags.owndata and rows.flags.writeable and rows.flags.c_contiguous
    assert [row.tobytes() for row in rows] == hash_blocks(tokens, 16)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_array_of_either_width_is_hashed_as_a_list_by_every_function(
    hash_fn: Callable[[Any], bytes], dtype: Any, lookahead: int
) -> None:
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1] * 3
    for function in (hash_fn, lambda value: hash_fn(value)):
        options = {"hash_fn": function, "num_lookahead_tokens": lookahead}
        rows = hash_blocks(np.array(tokens, dtype), 8, PARENT, **options)
        expected = hash_blocks(tokens, 8, PARENT, **options)
        assert [row.tobytes() for row in rows] == expected
        keyed = hash_block_tokens(function, PARENT, np.array(tokens, dtype), ("key",))
        assert keyed == hash_block_tokens(function, PARENT, tokens, ("key",))


def test_an_array_that_is_read_only_will_do() -> None:
    tokens = np.arange(32, dtype=np.int32)
    tokens.flags.writeable = False
    assert len(hash_blocks(tokens, 16)) == 2


@pytest.mark.parametrize("kind", [list, tuple, lambda r: r])
def test_a_sequence_of_tokens_gives_a_list_of_bytes(kind: Any) -> None:
    hashes = hash_blocks(kind(range(100)), 16)
    assert type(hashes) is list
    assert [type(digest) for digest in hashes] == [bytes] * 6


def test_too_few_tokens_give_no_hash_but_the_width_of_one(
    hash_fn: Callable[[Any], bytes],
) -> None:
    length = len(hash_fn(1))
    assert hash_blocks([1] * 15, 16, hash_fn=hash_fn) == []
    empty = hash_blocks(np.ones(15, np.int32), 16, hash_fn=hash_fn)
    assert empty.shape == (0, length)
    empty = hash_blocks(np.ones(0, int), 16, hash_fn=lambda value: hash_fn(value))
    assert empty.shape == (0, length)


def test_a_chain_may_be_continued_from_any_of_its_hashes(
    hash_fn: Callable[[Any], bytes],
) -> None:
    tokens = some_tokens(200)
    whole = hash_blocks(tokens, 8, hash_fn=hash_fn)
    for done in (1, 7, 24):
        rest = hash_blocks(tokens[8 * done :], 8, whole[done - 1], hash_fn=hash_fn)
        assert rest == whole[done:]


def test_a_long_chain_is_hashed_without_the_gil_and_is_the_same() -> None:
    tokens = np.arange(16 * 1_000, dtype=np.int32)
    rows = hash_blocks(tokens, 16, PARENT)
    assert [row.tobytes() for row in rows] == chain(sha256, tokens.tolist(), 16)


# -- refusals ---------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 3


BAD_TOKENS = [
    (-1, ValueError),
    (-(2**70), ValueError),
    (2**63, ValueError),
    (2**200, ValueError),
    (True, TypeError),
    (1.0, TypeError),
    ("1", TypeError),
    (None, TypeError),
    (Color.RED, TypeError),
    (np.int32(3), TypeError),
]


def never(value: Any) -> bytes:
    raise AssertionError("hashed before it was checked")


@pytest.mark.parametrize(("token", "error"), BAD_TOKENS)
@pytest.mark.parametrize("place", [0, 7, 15, 17])
def test_a_bad_token_is_refused_and_named_before_anything_is_hashed(
    token: Any, error: type[Exception], place: int
) -> None:
    tokens: list[Any] = [5] * 20
    tokens[place] = token
    named = str(token) if error is ValueError else "int"
    hasher = BlockHasher(8, never, parent=PARENT)
    hash_request = get_request_block_hasher(4, never)
    request = SimpleNamespace(
        block_hashes=[PARENT], num_tokens=24, all_token_ids=[1] * 4 + tokens
    )
    for call in (
        lambda: hash_blocks(tokens, 16, PARENT, hash_fn=never),
        lambda: hash_block_tokens(never, PARENT, tuple(tokens)),
        lambda: hash_block_tokens(never, PARENT, tokens, ("key",)),
        lambda: hasher.append(tokens),
        lambda: hash_request(request),
    ):
        with pytest.raises(error, match=named):
            call()
    assert hasher.num_tokens == 0
    assert hasher.block_hashes == []


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_a_negative_token_in_an_array_is_refused_and_named(dtype: Any) -> None:
    tokens = np.arange(40).astype(dtype)
    tokens[33] = -77
    with pytest.raises(ValueError, match="-77"):
        hash_blocks(tokens, 16)


def test_a_token_too_large_in_an_array_is_refused_and_named() -> None:
    tokens = np.arange(40).astype(np.uint64)
    tokens[33] = 2**63
    with pytest.raises(ValueError, match=str(2**63)):
        hash_blocks(tokens, 16)


@pytest.mark.parametrize(
    "tokens",
    [
        np.ones(16, bool),
        np.ones(16, float),
        np.ones(16, object),
        "1" * 16,
        b"1" * 16,
        bytearray(16),
        dict.fromkeys(range(16)),
        set(range(16)),
        16,
        None,
    ],
)
def test_what_is_no_sequence_of_integers_is_refused(tokens: Any) -> None:
    with pytest.raises(TypeError):
        hash_blocks(tokens, 16)
    with pytest.raises(TypeError):
        hash_block_tokens(sha256, PARENT, tokens)


def test_an_array_of_two_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 16\)"):
        hash_blocks(np.ones((2, 16), int), 16)


@pytest.mark.parametrize(
    "parent", ["p" * 32, bytearray(32), memoryview(PARENT), 0, [1]]
)
def test_a_parent_that_is_not_bytes_is_refused(parent: Any) -> None:
    for tokens in ([1, 2], np.array([1, 2])):
        with pytest.raises(TypeError):
            hash_blocks(tokens, 2, parent)
    with pytest.raises(TypeError):
        hash_block_tokens(sha256, parent, [1, 2])
    with pytest.raises(TypeError):
        BlockHasher(2, parent=parent)
    request = SimpleNamespace(
        block_hashes=[parent], num_tokens=4, all_token_ids=[1] * 4, **NO_KEYS
    )
    with pytest.raises(TypeError):
        get_request_block_hasher(2, sha256)(request)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 31, 33])
def test_a_parent_on_the_array_face_has_16_or_32_bytes(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        hash_blocks(np.array([1, 2]), 2, b"p" * length)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)],
)
def test_a_bad_block_size_is_refused_and_named(
    size: Any, error: type[Exception]
) -> None:
    for call in (
        lambda: hash_blocks([1] * 8, size),
        lambda: BlockHasher(size),
        lambda: get_request_block_hasher(size, sha256),
    ):
        with pytest.raises(error, match=str(size)):
            call()


@pytest.mark.parametrize("keys", [[], [None], [None] * 3])
def test_extra_keys_that_are_not_one_a_block_are_refused(keys: list[Any]) -> None:
    with pytest.raises(ValueError, match="2 blocks"):
        hash_blocks([1] * 8, 4, extra_keys=keys)


@pytest.mark.parametrize(
    "function", [None, "sha256", CompiledHash.__new__(CompiledHash)]
)
def test_what_is_no_hash_function_is_refused(function: Any) -> None:
    with pytest.raises(TypeError):
        hash_block_tokens(function, PARENT, [1])
    with pytest.raises(TypeError):
        hash_blocks([1], 1, PARENT, hash_fn=function)


def test_a_hash_function_must_return_bytes() -> None:
    with pytest.raises(TypeError, match="17"):
        hash_blocks([1], 1, PARENT, hash_fn=lambda value: 17)  # type: ignore


def test_rows_of_different_lengths_are_no_array() -> None:
    digests = iter([b"one", b"other"])
    with pytest.raises(ValueError, match="different lengths"):
        hash_blocks(np.arange(8), 4, b"p" * 16, hash_fn=lambda value: next(digests))


# -- a request that grows ---------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_token_by_token_gives_what_one_call_gives(
    hash_fn: Callable[[Any], bytes], lookahead: int
) -> None:
    tokens = some_tokens(100)
    hasher = BlockHasher(8, hash_fn, num_lookahead_tokens=lookahead)
    fresh = [digest for token in tokens for digest in hasher.append(token)]
    expected = hash_blocks(tokens, 8, hash_fn=hash_fn, num_lookahead_tokens=lookahead)
    assert fresh == hasher.block_hashes == expected


def test_its_hashes_are_one_list_that_grows_and_shrinks() -> None:
    hasher = BlockHasher(4)
    hashes = hasher.block_hashes
    hasher.append([1] * 9)
    assert len(hashes) == 2
    hasher.truncate(4)
    assert len(hashes) == 1
    assert hasher.block_hashes is hashes


def test_truncating_returns_the_hashes_that_it_withdraws() -> None:
    hasher = BlockHasher(4)
    first, second, third = hasher.append([1] * 12)
    assert hasher.truncate(12) == []
    assert hasher.truncate(7) == [second, third]
    assert hasher.block_hashes == [first]
    assert hasher.append(1) == [second]


@pytest.mark.parametrize("count", [-1, 6])
def test_one_cannot_keep_more_tokens_than_there_are(count: int) -> None:
    hasher = BlockHasher(4)
    hasher.append([1] * 5)
    with pytest.raises(ValueError, match=str(count)):
        hasher.truncate(count)
    assert hasher.num_tokens == 5


def test_a_hash_function_that_fails_leaves_the_hasher_as_it_was() -> None:
    def failing(value: Any) -> bytes:
        if 9 in value[1]:
            raise OSError
        return sha256(value)

    hasher = BlockHasher(2, failing, parent=PARENT)
    hasher.append([1, 2, 3])
    before = list(hasher.block_hashes)
    with pytest.raises(OSError):
        hasher.append([4, 5, 6, 9, 9])
    assert hasher.num_tokens == 3
    assert hasher.block_hashes == before
    assert hasher.append([4]) == chain(sha256, [1, 2, 3, 4], 2)[1:]


def test_a_hasher_cannot_be_changed_by_what_it_calls() -> None:
    hasher = BlockHasher(1, parent=PARENT, extra_keys=lambda s, e: hasher.append(7))
    with pytest.raises(BlockStateError):
        hasher.append(1)
    hasher = BlockHasher(1, lambda value: hasher.truncate(0), parent=PARENT)
    with pytest.raises(BlockStateError):
        hasher.append(1)
    assert hasher.num_tokens == 0


def test_the_bytes_of_its_tokens_are_reported_and_given_back() -> None:
    hasher = BlockHasher(16)
    tracemalloc.start()
    try:
        hasher.append(np.arange(10_000, dtype=np.int32))
        big = tracemalloc.take_snapshot()
        assert hasher.nbytes == 80_000
        assert hasher.nbytes in [trace.size for trace in big.traces]
        del hasher
        left = tracemalloc.take_snapshot()
        assert 80_000 not in [trace.size for trace in left.traces]
    finally:
        tracemalloc.stop()


def test_the_tokens_can_be_read_back_as_a_copy() -> None:
    hasher = BlockHasher(4)
    hasher.append([1, 2**62, 3])
    hasher.append(4)
    hasher.truncate(3)
    tokens = hasher.token_ids
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 2**62, 3]
    tokens[0] = 9
    assert hasher.token_ids[0] == 1


def test_a_hasher_without_tokens_has_an_empty_array_of_them() -> None:
    assert BlockHasher.__new__(BlockHasher).token_ids.shape == (0,)


def test_a_hasher_is_initialised_once() -> None:
    hasher = BlockHasher(4)
    hasher.append([1] * 5)
    with pytest.raises(BlockStateError):
        hasher.__init__(2)  # type: ignore[misc]
    assert hasher.block_size == 4


def test_a_hasher_that_was_never_initialised_hashes_nothing() -> None:
    hasher = BlockHasher.__new__(BlockHasher)
    assert hasher.truncate(0) == []
    with pytest.raises(TypeError):
        hasher.append([1])


class Growing(RuleBasedStateMachine):
    """Appends and cuts, in any order: always the hashes of the tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = lambda start, end: None if start % 3 else (start, end)
        self.hashers = [
            (BlockHasher(4, parent=PARENT), 0, None),
            (BlockHasher(4, parent=PARENT, num_lookahead_tokens=2), 2, None),
            (BlockHasher(4, parent=PARENT, extra_keys=self.keys), 0, self.keys),
        ]
        self.tokens: list[int] = []

    @rule(tokens=st.lists(st.integers(0, 2**63 - 1), max_size=12), wide=st.booleans())
    def append(self, tokens: list[int], wide: bool) -> None:
        for hasher, _, _ in self.hashers:
            hasher.append(np.array(tokens, np.int64) if wide else tokens)
        self.tokens += tokens

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.tokens)))
        for hasher, _, _ in self.hashers:
            hasher.truncate(count)
        del self.tokens[count:]

    @invariant()
    def hashes_are_those_of_the_tokens(self) -> None:
        for hasher, lookahead, keys in self.hashers:
            assert hasher.num_tokens == len(self.tokens)
            assert hasher.block_hashes == chain(
                sha256, self.tokens, 4, lookahead=lookahead, keys=keys
            )


MACHINES = {"hasher": Growing}
TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=30, deadline=None)


# -- requests ---------------------------------------------------------------------

NO_KEYS: dict[str, Any] = {
    "lora_request": None,
    "mm_features": None,
    "cache_salt": None,
    "prompt_embeds": None,
}


def test_requests_get_the_digests_that_vllm_gave(
    hash_fn: Callable[[Any], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    monkeypatch.setenv("PYTHONHASHSEED", str(GOLDEN_SEED))
    init_none_hash(hash_fn)
    found = [
        b"".join(hashes_of(request, get_request_block_hasher, hash_fn)[-1:]).hex()
        for request in golden_requests()
    ]
    assert found == golden[hash_fn.__name__]


@pytest.mark.parametrize("function", [sha256, sha256_cbor])
def test_the_root_is_the_one_that_vllm_has(
    function: Callable[[Any], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = json.loads((Path(__file__).parent / "golden.json").read_text())
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if function is sha256_cbor:
        pytest.importorskip("cbor2")
    init_none_hash(function)
    assert functions.NONE_HASH is not None
    assert [functions.NONE_HASH.hex()] == golden[f"root of {function.__name__}"]


def test_a_request_without_new_full_blocks_gets_none() -> None:
    hash_request = get_request_block_hasher(4, sha256)
    request = SimpleNamespace(
        block_hashes=[PARENT], num_tokens=7, all_token_ids=[1] * 7, **NO_KEYS
    )
    assert hash_request(request) == []
    request.num_tokens = 3  # fewer tokens than hashes
    assert hash_request(request) == []


def test_a_request_that_promises_more_tokens_than_it_has_is_refused() -> None:
    request = SimpleNamespace(
        block_hashes=[], num_tokens=9, all_token_ids=[1] * 7, **NO_KEYS
    )
    with pytest.raises(ValueError, match="num_tokens = 9"):
        get_request_block_hasher(4, sha256)(request)


def test_requests_are_hashed_as_vllm_hashes_them() -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("xxhash")
    from compare_with_vllm import compare

    assert compare(blocks=5_000, seed=7)["all"] >= 5_000
