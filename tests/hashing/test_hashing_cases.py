"""Faults from the field that concern hashes; the numbers are those of the cases."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.hashing import (
    BlockHasher,
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    sha256,
)


def item(offset: Any, length: Any, name: str = "image") -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=position)


def request_of(tokens: list[int], *items: Any, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "all_token_ids": tokens,
            "num_tokens": len(tokens),
            "block_hashes": [],
            "mm_features": list(items),
            "lora_request": None,
            "cache_salt": None,
            "prompt_embeds": None,
            **fields,
        }
    )


def hashes_of(block_size: int, request: Any) -> list[bytes]:
    return get_request_block_hasher(block_size, sha256)(request)


# -- B42: replaced tokens ---------------------------------------------------------


def test_b42_replaced_tokens_leave_no_hash_behind() -> None:
    prompt = [10] * 15
    first, other = list(range(100, 128)), list(range(200, 211))
    hasher = BlockHasher(16)
    hasher.append(prompt)
    hasher.append(first)
    stale = list(hasher.block_hashes)
    assert len(stale) == 2
    assert hasher.truncate(15) == stale
    hasher.append(other)
    assert hasher.block_hashes == hash_blocks(prompt + other, 16)
    assert not set(hasher.block_hashes) & set(hash_blocks(prompt + first, 16))


def test_b42_hashes_of_blocks_before_the_cut_stay() -> None:
    hasher = BlockHasher(16)
    kept = hasher.append(list(range(48)))[:2]
    hasher.truncate(40)
    hasher.append([7] * 8)
    assert hasher.block_hashes[:2] == kept
    assert hasher.block_hashes == hash_blocks([*range(40), *[7] * 8], 16)


# -- B44: an image that ends at a block's edge ------------------------------------


@pytest.mark.parametrize("start", [4, 8, 10])
@pytest.mark.parametrize("end", [14, 16, 20])
def test_b44_an_image_that_overlaps_a_block_is_in_its_keys(
    start: int, end: int
) -> None:
    request = request_of([], item(start, end - start))
    keys, _ = generate_block_hash_extra_keys(request, 8, 16, 0)
    assert keys == (("mm", "image", start - 8),)


@pytest.mark.parametrize(("start", "end"), [(2, 6), (4, 8), (16, 20), (18, 20)])
def test_b44_an_image_beside_a_block_is_not(start: int, end: int) -> None:
    request = request_of([], item(start, end - start))
    assert generate_block_hash_extra_keys(request, 8, 16, 0)[0] is None


def test_b44_where_an_image_ended_before_does_not_matter() -> None:
    tokens = list(range(12))
    parent = b"p" * 32
    found = [
        hashes_of(4, request_of(tokens, item(0, length), block_hashes=[parent]))
        for length in (3, 4)
    ]
    assert found[0] == found[1] == hash_blocks(tokens[4:], 4, parent)


# -- B46: unusable extra-key data -------------------------------------------------

UNUSABLE = [
    ([item(0, None)], "no length"),
    ([item(None, 4)], "no offset"),
    ([item(0, 0)], "length 0"),
    ([item(0, -3)], "length -3"),
    ([item(-1, 4)], "begins at token -1"),
    ([item(0, 4), item(3, 4)], "begins at token 3"),
    ([item(0, 4), item(0, 4)], "begins at token 0"),
    ([item(8, 4), item(0, 4)], "begins at token 0"),
    ([item(8, 2), item(20, 2), item(0, 2)], "begins at token 0"),
    (
        [SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=0))],
        "length",
    ),
]


@pytest.mark.parametrize(("items", "what"), UNUSABLE)
@pytest.mark.parametrize("hashed", [0, 1, 5])
def test_b46_unusable_ranges_are_refused_and_never_hashed_as_text(
    items: list[Any], what: str, hashed: int
) -> None:
    request = request_of(list(range(32)), *items, block_hashes=[b"p" * 32] * hashed)
    with pytest.raises(ValueError, match=what):
        hashes_of(4, request)
    with pytest.raises(ValueError, match=what):
        generate_block_hash_extra_keys(request, 4 * hashed, 4 * hashed + 4, 0)
    with pytest.raises(ValueError, match=what):
        generate_lookahead_block_hash_extra_keys(
            request, 4 * hashed, 4 * hashed + 4, 4 * hashed + 6, 0
        )


@pytest.mark.parametrize("value", ["4", 4.0, True])
def test_b46_ranges_of_no_integers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=repr(value)):
        hashes_of(4, request_of([1] * 8, item(0, value)))


def test_b46_an_item_without_an_identifier_is_refused() -> None:
    with pytest.raises(ValueError, match="identifier"):
        hashes_of(4, request_of([1] * 8, item(0, 4, None)))  # type: ignore


# -- B48: which adapter -----------------------------------------------------------


def lora(name: str, number: int, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


def hash_with(**fields: Any) -> bytes:
    return hashes_of(8, request_of([1] * 8, **fields))[0]


def test_b48_adapters_of_one_name_at_two_paths_have_two_hashes() -> None:
    found = [
        hash_with(),
        hash_with(lora_request=lora("a", 1, "/one")),
        hash_with(lora_request=lora("a", 2, "/two")),
        hash_with(lora_request=lora("b", 1, "/one")),
    ]
    assert len(set(found)) == 4


def test_b48_the_order_of_registration_does_not_matter() -> None:
    found = {hash_with(lora_request=lora("a", n, "/one")) for n in (1, 2, 77)}
    assert len(found) == 1


# -- B49: one text from several sources -------------------------------------------


def test_b49_equal_values_of_different_sources_have_different_hashes() -> None:
    found = [
        hash_with(),
        hash_with(lora_request=lora("S", 1, "S")),
        hash_with(cache_salt="S"),
        hash_with(mm_features=[item(0, 8, "S")]),
        hash_with(lora_request=lora("S", 1, "S"), cache_salt="S"),
        hash_block_tokens(sha256, None, [1] * 8, ("S",)),
        hash_block_tokens(sha256, None, [1] * 8, ("S", 0)),
        hash_block_tokens(sha256, None, [1] * 8, ["S", 0]),
    ]
    assert len(set(found)) == len(found)


def test_b49_an_empty_salt_is_no_salt() -> None:
    assert hash_with(cache_salt="") == hash_with(cache_salt=None) == hash_with()


# -- B51: the root in other processes ---------------------------------------------

CHAIN = """
from kvcache.hashing import get_hash_fn_by_name, hash_blocks, init_none_hash
import sys
hash_fn = get_hash_fn_by_name(sys.argv[1])
init_none_hash(hash_fn)
print(hash_blocks(list(range(48)), 16, hash_fn=hash_fn)[-1].hex())
"""


def chain_in_a_process(name: str, seed: str | None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", CHAIN, name]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_b51_processes_agree_for_each_setting_of_the_seed() -> None:
    found = {}
    for seed in (None, "0", "123", "random"):
        found[seed] = {chain_in_a_process("sha256", seed) for _ in range(2)}
        assert len(found[seed]) == 1
    assert len(set.union(*found.values())) == 4


def test_b51_a_function_that_is_not_cryptographic_is_random_unless_pinned() -> None:
    pytest.importorskip("xxhash")
    assert chain_in_a_process("xxhash", None) != chain_in_a_process("xxhash", None)
    assert chain_in_a_process("xxhash", "1") == chain_in_a_process("xxhash", "1")


# -- B53: tokens that Python holds for equal --------------------------------------


@pytest.mark.parametrize(("one", "other"), [(2**61 - 1, 0), (2**61, 1), (1, 0)])
def test_b53_tokens_of_equal_python_hash_have_different_block_hashes(
    one: int, other: int
) -> None:
    assert hash_blocks([one] * 4, 4) != hash_blocks([other] * 4, 4)


@pytest.mark.parametrize("token", [-1, -2, True, 1.0, 2**63, None])
def test_b53_what_could_collide_with_a_token_is_refused(token: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        hash_blocks([token, 2, 3, 4], 4)


# -- B58: large blocks from fine hashes -------------------------------------------


def test_b58_a_large_block_has_the_hash_of_its_last_small_one() -> None:
    fine = hash_blocks(list(range(24)), 4)
    coarse = BlockHashListWithBlockSize(fine, 4, 8)
    assert list(coarse) == [fine[1], fine[3], fine[5]]


def test_b58_a_block_size_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="10"):
        BlockHashListWithBlockSize([], 4, 10)
