import array
import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import BlockPool
from kvcache.hashing import (
    BlockHasher,
    get_hash_fn_by_name,
    hash_block_tokens,
    hash_blocks,
    keyed,
)
from kvcache.hashing.keyed_hash import PATHS, Keyed

KEY = bytes(range(16))
MASK = 2**64 - 1

# Of 16 tokens each: 0 .. 15, 16 .. 31, 32 .. 47.
GOLDEN = [
    "3c801f30ccdc1e4db5e03ecd340fb6c1",
    "5b8cd6d035fed0a7161e84baf374a344",
    "c50196fc12f8e0bf20aa633587a9e961",
]


def rotate(x: int, bits: int) -> int:
    return (x << bits | x >> 64 - bits) & MASK


def siphash128(key: bytes, message: bytes, word_rounds: int, last_rounds: int) -> bytes:
    """SipHash-c-d with a 128-bit result, as its authors define it."""
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rounds(n: int) -> None:
        nonlocal a, b, c, d
        for _ in range(n):
            a, c = (a + b) & MASK, (c + d) & MASK
            b, d = rotate(b, 13) ^ a, rotate(d, 16) ^ c
            a = rotate(a, 32)
            c, a = (c + b) & MASK, (a + d) & MASK
            b, d = rotate(b, 17) ^ c, rotate(d, 21) ^ a
            c = rotate(c, 32)

    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 255])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        d ^= word
        rounds(word_rounds)
        a ^= word
    c ^= 0xEE
    rounds(last_rounds)
    low = a ^ b ^ c ^ d
    b ^= 0xDD
    rounds(last_rounds)
    return low.to_bytes(8, "little") + (a ^ b ^ c ^ d).to_bytes(8, "little")


def message(tokens: Sequence[int], parent: bytes, extra: bytes = b"") -> bytes:
    wide = any(token >= 2**31 for token in tokens)
    header = len(tokens) | wide << 32 | len(extra) << 33
    body = b"".join(token.to_bytes(8 if wide else 4, "little") for token in tokens)
    padded = (part + bytes(-len(part) % 8) for part in (body, extra))
    return header.to_bytes(8, "little") + b"".join(padded) + parent


def prompt(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, n, dtype=np.int32)


# -- the primitive ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "digest"),
    [  # the authors' vectors of SipHash-2-4-128: message 00 01 02 ..., key 00 .. 0f
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (2, "8177228da4a45dc7fca38bdef60affe4"),
        (3, "9c70b60c5267a94e5f33b6b02985ed51"),
    ],
)
def test_the_model_gives_the_published_vectors(length: int, digest: str) -> None:
    assert siphash128(KEY, bytes(range(length)), 2, 4).hex() == digest


@pytest.mark.parametrize("path", PATHS)
def test_the_root_is_the_hash_of_the_empty_message(path: str) -> None:
    assert Keyed(KEY, path=path).root == siphash128(KEY, b"", 1, 3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 10, 16, 17, 32, 70])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 21])
def test_a_chain_is_the_model_block_by_block(
    path: str, block_size: int, count: int
) -> None:
    hasher = Keyed(KEY, path=path)
    tokens = prompt(count * block_size)
    digests = hasher.hash_blocks(tokens, block_size)
    assert digests.shape == (count, 16)
    parent = hasher.root
    for i in range(count):
        block = tokens[i * block_size : (i + 1) * block_size].tolist()
        parent = siphash128(KEY, message(block, parent), 1, 3)
        assert digests[i].tobytes() == parent


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**63 - 1)), max_size=40),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=40),
)
def test_one_block_is_the_model_with_any_tokens_and_extra(
    tokens: list[int], parent: bytes, extra: bytes
) -> None:
    expected = siphash128(KEY, message(tokens, parent, extra), 1, 3)
    for path in PATHS:
        assert Keyed(KEY, path=path).hash_block(tokens, parent, extra) == expected


def test_known_digests_stay_what_they_are() -> None:
    digests = Keyed(KEY).hash_blocks(range(48), 16)
    assert [row.tobytes().hex() for row in digests] == GOLDEN


@pytest.mark.parametrize("value", ["", 17, (b"", (1,)), (1, 2, 3), None])
def test_any_other_object_is_hashed_as_its_pickle(value: Any) -> None:
    hasher = Keyed(KEY)
    assert hasher(value) == hasher.hash_block((), None, pickle.dumps(value, 5))


def test_extra_bytes_have_a_length_of_31_bits() -> None:
    with pytest.raises(ValueError, match="at most 2147483647 bytes"):
        Keyed(KEY).hash_block((1,), None, bytes(2**31))  # zeros that nothing reads


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_hash_blocks_takes_it_for_arrays_of_either_width(dtype: Any) -> None:
    hasher, tokens = Keyed(KEY), prompt(96)
    rows = hash_blocks(tokens.astype(dtype), 16, hash_fn=hasher)
    assert rows.tolist() == hasher.hash_blocks(tokens, 16).tolist()


# -- the chain --------------------------------------------------------------------


def test_every_kind_of_tokens_gives_the_same_digests() -> None:
    hasher, tokens = Keyed(KEY), prompt(100)
    expected = hasher.hash_blocks(tokens, 16).tolist()
    kinds = [
        tokens.astype(np.int64),
        tokens.astype(np.uint64),
        tokens.astype(">i4"),
        np.repeat(tokens, 2)[::2],
        tokens.tolist(),
        tuple(tokens.tolist()),
        array.array("i", tokens.tolist()),
        memoryview(tokens),
    ]
    for kind in kinds:
        assert hasher.hash_blocks(kind, 16).tolist() == expected


def test_a_token_over_31_bits_changes_its_own_block_and_those_behind_only() -> None:
    hasher, tokens = Keyed(KEY), prompt(64).astype(np.int64)
    before = hasher.hash_blocks(tokens, 16)
    tokens[40] += 2**32
    behind = hasher.hash_blocks(tokens, 16)
    assert (before == behind).all(axis=1).tolist() == [True, True, False, False]
    assert behind.tolist() == hasher.hash_blocks(tokens.tolist(), 16).tolist()


@pytest.mark.parametrize("kind", [list, np.asarray])
@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_block_is_as_wide_as_its_largest_token(token: int, kind: Any) -> None:
    hasher, block = Keyed(KEY), [5, token, 7]
    expected = siphash128(KEY, message(block, hasher.root), 1, 3)
    assert hasher.hash_block(kind(block)) == expected
    assert hasher.hash_blocks(kind(block), 3)[0].tobytes() == expected
    expected = siphash128(KEY, message(block, hasher.root, b"extra"), 1, 3)
    assert hasher.hash_block(kind(block), None, b"extra") == expected


def test_a_parent_is_a_digest_and_nothing_more() -> None:
    hasher, tokens = Keyed(KEY), prompt(16 * 30)
    whole = hasher.hash_blocks(tokens, 16)
    for cut in (1, 8, 13):
        parent = whole[cut - 1].tobytes()
        rest = Keyed(KEY).hash_blocks(tokens[cut * 16 :], 16, parent)
        assert rest.tolist() == whole[cut:].tolist()


def test_wide_and_narrow_tokens_of_the_same_bytes_differ() -> None:
    hasher = Keyed(KEY)
    wide = [2**33 + 5, 7]
    narrow = np.array(wide, "<i8").view("<i4")
    assert hasher.hash_block(wide) != hasher.hash_block(narrow)


def test_padding_extra_and_block_size_are_told_apart() -> None:
    hasher = Keyed(KEY)
    digests = [
        hasher.hash_block([1]),
        hasher.hash_block([1, 0]),
        hasher.hash_block([1], extra=b"\0"),
        hasher.hash_block([1], extra=bytes(4)),
        hasher.hash_block([1], extra=bytes(8)),
        hasher.hash_block([], extra=b"\1"),
        hasher.hash_block([]),
        hasher.root,
    ]
    assert len(set(digests)) == len(digests)


def test_two_keys_share_no_digest() -> None:
    tokens = prompt(160)
    hashers = [Keyed(), Keyed(), Keyed(KEY), Keyed(bytes(16))]
    rows = {
        row.tobytes() for hasher in hashers for row in hasher.hash_blocks(tokens, 16)
    }
    assert len(rows) == 40
    assert len({hasher.root for hasher in hashers}) == 4


def test_the_key_does_not_get_out() -> None:
    hasher = Keyed(KEY)
    assert KEY.hex() not in repr(hasher) and repr(KEY) not in repr(hasher)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            copied(hasher)


# -- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, -1], ValueError),
        ([2**63], ValueError),
        ([1, True], TypeError),
        ([1.0], TypeError),
        ([None], TypeError),
        (["1"], TypeError),
        ("12", TypeError),
        (b"12", TypeError),
        (bytearray(b"12"), TypeError),
        (5, TypeError),
        (np.array([1, -1], np.int32), ValueError),
        (np.array([1, -1], np.int64), ValueError),
        (np.array([2**63], np.uint64), ValueError),
        (np.array([True]), TypeError),
        (np.array([1.0]), TypeError),
        (np.array([1], object), TypeError),
        (np.zeros((2, 2), np.int32), ValueError),
        (np.zeros((), np.int32), ValueError),
    ],
)
def test_bad_tokens_are_refused(tokens: object, error: type[Exception]) -> None:
    pool = BlockPool(4, True, 1)
    for call in (
        lambda: Keyed().hash_blocks(tokens, 1),  # type: ignore[arg-type]
        lambda: Keyed().hash_block(tokens),  # type: ignore[arg-type]
        lambda: pool.match_prefix_tokens(tokens, Keyed()),  # type: ignore[arg-type]
    ):
        with pytest.raises(error):
            call()


def test_the_message_shows_the_negative_token() -> None:
    with pytest.raises(ValueError, match="got -7"):
        Keyed().hash_blocks(np.array([1, 2, 3, -7], np.int32), 16)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"block_size": 0}, ValueError),
        ({"block_size": -16}, ValueError),
        ({"block_size": True}, TypeError),
        ({"block_size": 16.0}, TypeError),
        ({"parent": b"short"}, ValueError),
        ({"parent": bytes(32)}, ValueError),
        ({"parent": b""}, ValueError),
        ({"parent": "0" * 16}, TypeError),
        ({"parent": bytearray(16)}, TypeError),
    ],
)
def test_a_bad_block_size_or_parent_is_refused(
    arguments: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Keyed().hash_blocks([1, 2], **{"block_size": 1, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"key": b"short"}, ValueError),
        ({"key": bytes(32)}, ValueError),
        ({"key": "0" * 16}, TypeError),
        ({"key": bytearray(16)}, TypeError),
        ({"path": "sse9"}, ValueError),
    ],
)
def test_a_bad_key_or_path_is_refused(
    arguments: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Keyed(**arguments)  # type: ignore[arg-type]


def test_extra_must_be_bytes() -> None:
    with pytest.raises(TypeError):
        Keyed().hash_block([1], extra="x")  # type: ignore[arg-type]


# -- tokens to blocks -------------------------------------------------------------


def same_match(pool: BlockPool, hasher: Keyed, tokens: object, group: int = 0) -> int:
    """Both ways of matching agree; how many blocks they find."""
    hashes = hasher.hash_blocks(tokens, pool.hash_block_size)  # type: ignore[arg-type]
    expected = pool.match_prefix_ids(hashes, group)
    found = pool.match_prefix_tokens(tokens, hasher, group)  # type: ignore[arg-type]
    assert found.dtype == np.int32
    assert found.tolist() == expected.tolist()
    return len(found)


# With chain hints and, past 262,144 blocks, without.
@pytest.mark.parametrize("num_blocks", [1_000, 300_000])
@pytest.mark.parametrize("path", PATHS)
def test_tokens_match_the_blocks_that_their_hashes_match(
    path: str, num_blocks: int
) -> None:
    hasher, pool = Keyed(path=path), BlockPool(num_blocks, True, 16)
    tokens = prompt(16 * 200)
    hashes = hasher.hash_blocks(tokens, 16)
    ids = np.random.default_rng(1).permutation(pool.get_new_block_ids(200))
    ids = ids.astype(np.int32)
    assert same_match(pool, hasher, tokens) == 0
    pool.cache_block_ids(ids[:150], hashes[:150])
    for n in [0, 1, 2, 3, 8, 9, 10, 32, 33, 34, 41, 65, 149, 150, 151, 200]:
        for spare in (0, 5):
            some = tokens[: 16 * n + spare]
            assert same_match(pool, hasher, some) == min(n, 150)
    assert same_match(pool, hasher, tokens, group=1) == 0
    assert same_match(pool, Keyed(), tokens) == 0
    for place in (0, 1, 40, 149):
        other = tokens.copy()
        other[16 * place + 3] ^= 1
        assert same_match(pool, hasher, other) == place


def test_blocks_cached_one_by_one_are_found_without_hints() -> None:
    hasher, pool = Keyed(), BlockPool(300, True, 16)
    tokens = prompt(16 * 200)
    hashes = hasher.hash_blocks(tokens, 16)
    for i, block in enumerate(pool.get_new_block_ids(200)):
        pool.cache_block_ids([block], hashes[i : i + 1])
    assert same_match(pool, hasher, tokens) == 200


def test_a_hint_that_leads_to_another_prompt_is_not_believed() -> None:
    hasher, pool = Keyed(), BlockPool(1_000, True, 16)
    stem, tails = prompt(16 * 20), [prompt(16 * 20, seed) for seed in range(1, 5)]
    for tail in tails:
        tokens = np.concatenate([stem, tail])
        found = pool.match_prefix_tokens(tokens, hasher)
        new = pool.get_new_block_ids(40 - len(found))
        pool.cache_block_ids(
            np.concatenate([found, new]) if not len(found) else new,
            hasher.hash_blocks(tokens, 16)[len(found) :],
        )
    for tail in tails:
        assert same_match(pool, hasher, np.concatenate([stem, tail])) == 40
        # The right tokens behind the wrong prefix are no match.
        assert same_match(pool, hasher, np.concatenate([tail, stem])) == 0


def test_the_oldest_copy_answers() -> None:
    hasher, pool = Keyed(), BlockPool(100, True, 16)
    tokens = prompt(16 * 20)
    hashes = hasher.hash_blocks(tokens, 16)
    first, second = pool.get_new_block_ids(20), pool.get_new_block_ids(20)
    pool.cache_block_ids(first[5:], hashes[5:])
    pool.cache_block_ids(second, hashes)
    assert same_match(pool, hasher, tokens) == 20
    found = pool.match_prefix_tokens(tokens, hasher).tolist()
    assert found == [*second[:5].tolist(), *first[5:].tolist()]


def test_a_block_matched_by_a_further_key_is_the_parent_by_that_key() -> None:
    hasher, pool = Keyed(), BlockPool(100, True, 16)
    tokens = prompt(16 * 12)
    hashes = hasher.hash_blocks(tokens, 16)
    ids = pool.get_new_block_ids(12)
    pool._insert_block_hash(b"own key of the first block", pool.blocks[ids[0]], None)
    pool._insert_block_hash(hashes[0].tobytes() + bytes(4), pool.blocks[ids[0]], None)
    pool.cache_block_ids(ids[1:], hashes[1:])
    assert same_match(pool, hasher, tokens) == 12


def test_wide_tokens_match_too() -> None:
    hasher, pool = Keyed(), BlockPool(100, True, 16)
    tokens = prompt(16 * 20).astype(np.int64)
    tokens[100] += 2**40
    pool.cache_block_ids(pool.get_new_block_ids(20), hasher.hash_blocks(tokens, 16))
    assert same_match(pool, hasher, tokens) == 20
    tokens[100] -= 2**40
    assert same_match(pool, hasher, tokens) == 6


def test_random_pools_match_alike() -> None:
    draw = random.Random(3)
    for _ in range(30):
        size = draw.choice([1, 2, 3, 4, 16])
        hasher, pool = Keyed(), BlockPool(120, True, size)
        prompts = []
        for _ in range(draw.randrange(1, 12)):
            base = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
            kept = base[: draw.randrange(len(base) + 1)]
            prompts.append(
                kept + [draw.randrange(4) for _ in range(draw.randrange(90))]
            )
            tokens = prompts[-1]
            n = min(len(tokens) // size, pool.get_num_free_blocks())
            hits = pool.match_prefix_tokens(tokens, hasher)[:n]
            pool.touch_block_ids(hits)
            new = pool.get_new_block_ids(min(n - len(hits), pool.get_num_free_blocks()))
            stop = len(hits) + len(new)
            hashes = hasher.hash_blocks(tokens, size)
            pool.cache_block_ids(new, hashes[len(hits) : stop])
            pool.free_block_ids(np.concatenate([hits, new])[::-1])
            if draw.random() < 0.3:
                pool.evict_blocks([draw.randrange(1, 120) for _ in range(5)])
            for tokens in prompts:
                same_match(pool, hasher, tokens)
        pool.check()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"hasher": None}, TypeError),
        ({"hasher": hash}, TypeError),
        ({"kv_cache_group_id": -1}, ValueError),
        ({"kv_cache_group_id": 2**32}, ValueError),
        ({"kv_cache_group_id": True}, TypeError),
    ],
)
def test_a_bad_hasher_or_group_is_refused(
    arguments: dict[str, object], error: type[Exception]
) -> None:
    pool = BlockPool(4, True, 1)
    with pytest.raises(error):
        pool.match_prefix_tokens([1], **{"hasher": Keyed(), **arguments})  # type: ignore[arg-type]


# -- as a hash function beside the others -----------------------------------------


def test_keyed_is_a_hash_function_by_name_with_one_key_a_process() -> None:
    assert get_hash_fn_by_name("keyed") is keyed
    assert hash_blocks(list(range(32)), 16, hash_fn=keyed) == [
        bytes(row) for row in keyed.hash_blocks(range(32), 16)
    ]


@pytest.mark.parametrize("wide", [0, 2**40])
def test_blocks_are_hashed_alike_from_lists_and_arrays_and_one_by_one(
    wide: int,
) -> None:
    hasher = Keyed(b"k" * 16)
    tokens = [wide + i for i in range(64)]
    digests = hash_blocks(tokens, 16, hash_fn=hasher)
    array = hash_blocks(np.array(tokens), 16, hash_fn=hasher)
    assert [bytes(row) for row in array] == digests
    parent = hasher.root
    for i in range(4):
        parent = hash_block_tokens(hasher, parent, tokens[16 * i : 16 * i + 16])
        assert parent == digests[i]


def test_extra_keys_and_lookahead_tokens_change_the_digest() -> None:
    hasher = Keyed(b"k" * 16)
    block = list(range(16))
    digests = {
        hash_block_tokens(hasher, None, block),
        hash_block_tokens(hasher, None, block, (("lora", "a", "/a"),)),
        hash_block_tokens(hasher, None, block, (("cache_salt", "a"),)),
        hash_blocks([*block, 7], 16, hash_fn=hasher, num_lookahead_tokens=1)[0],
        hash_blocks([*block, 8], 16, hash_fn=hasher, num_lookahead_tokens=1)[0],
    }
    assert len(digests) == 5
    assert all(len(digest) == 16 for digest in digests)


def test_a_growing_request_is_hashed_with_keyed_too() -> None:
    hasher = Keyed(b"k" * 16)
    request = BlockHasher(16, hasher)
    for token in range(40):
        request.append(token)
    assert request.block_hashes == hash_blocks(list(range(40)), 16, hash_fn=hasher)


def test_a_parent_of_another_hash_function_is_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        hash_blocks(list(range(16)), 16, b"p" * 32, hash_fn=Keyed(b"k" * 16))
