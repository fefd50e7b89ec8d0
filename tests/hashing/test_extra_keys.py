"""What a block's hash covers beside its tokens, and how events tell of it."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.hashing import (
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    to_event_extra_keys,
)


def item(name: str | None, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=position)


def request_of(*items: SimpleNamespace, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "mm_features": list(items),
            "lora_request": None,
            "cache_salt": None,
            "prompt_embeds": None,
            "_prompt_embeds_per_block_hashes": {},
            **fields,
        }
    )


def lora(name: str, path: str, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


def keys_of(request: Any, start: int, end: int, index: int = 0) -> Any:
    return generate_block_hash_extra_keys(request, start, end, index)[0]


# -- multimodal items -------------------------------------------------------------

START, END = 8, 16  # the block


@pytest.mark.parametrize(
    ("offset", "end"),
    [
        (start, end)
        for start in (4, START, 10)
        for end in (14, END, 20)  # all nine ways to overlap
    ],
)
def test_an_item_that_overlaps_a_block_is_a_key_with_its_place_in_it(
    offset: int, end: int
) -> None:
    request = request_of(item("image", offset, end - offset))
    keys, index = generate_block_hash_extra_keys(request, START, END, 0)
    assert keys == (("mm", "image", offset - START),)
    # The next block looks at it again if it reaches behind this one.
    assert index == (1 if end <= END else 0)


@pytest.mark.parametrize(
    ("offset", "end", "index"),
    [
        (2, 6, 0),  # before, as the last item: nothing behind needs to be looked at
        (2, START, 0),  # ends where the block begins
        (END, 20, 0),  # begins where the block ends
        (18, 20, 0),  # behind
    ],
)
def test_an_item_that_does_not_overlap_a_block_is_no_key(
    offset: int, end: int, index: int
) -> None:
    request = request_of(item("image", offset, end - offset))
    assert generate_block_hash_extra_keys(request, START, END, 0) == (None, index)


def test_an_item_that_ends_before_a_block_is_passed_by() -> None:
    request = request_of(item("one", 2, 6), item("two", 10, 2))
    keys, index = generate_block_hash_extra_keys(request, START, END, 0)
    assert keys == (("mm", "two", 2),)
    assert index == 2


def test_a_single_token_counts_on_either_edge() -> None:
    assert keys_of(request_of(item("image", START, 1)), START, END)
    assert keys_of(request_of(item("image", END - 1, 1)), START, END)
    assert keys_of(request_of(item("image", START - 1, 1)), START, END) is None
    assert keys_of(request_of(item("image", END, 1)), START, END) is None


def test_text_behind_an_item_hashes_alike_whatever_the_items_length() -> None:
    for length in (3, 4):
        assert keys_of(request_of(item("image", 0, length)), 4, 8) is None


def test_all_items_of_a_block_are_keys_in_their_order() -> None:
    request = request_of(
        item("one", 6, 4), item("two", 10, 2), item("three", 12, 2), item("four", 14, 9)
    )
    keys, index = generate_block_hash_extra_keys(request, START, END, 0)
    assert keys == (
        ("mm", "one", -2),
        ("mm", "two", 2),
        ("mm", "three", 4),
        ("mm", "four", 6),
    )
    assert index == 3


def test_the_index_returned_leads_from_block_to_block() -> None:
    items = [item("one", 3, 2), item("two", 6, 9), item("three", 15, 1)]
    request = request_of(*items)
    index, told = 0, []
    for start in range(0, 24, 4):
        keys, index = generate_block_hash_extra_keys(request, start, start + 4, index)
        told.append([name for _, name, _ in keys or ()])
    assert told == [["one"], ["one", "two"], ["two"], ["two", "three"], [], []]
    assert told == [
        [
            one.identifier
            for one in items
            if one.mm_position.offset < start + 4
            and one.mm_position.offset + one.mm_position.length > start
        ]
        for start in range(0, 24, 4)
    ]


def test_an_index_that_begins_behind_an_item_passes_it_by() -> None:
    request = request_of(item("one", 8, 2), item("two", 12, 2))
    assert keys_of(request, START, END, 1) == (("mm", "two", 4),)
    assert generate_block_hash_extra_keys(request, START, END, 2) == (None, 2)


def test_a_negative_index_counts_from_the_last_item() -> None:
    request = request_of(item("one", 8, 2), item("two", 12, 2))
    assert keys_of(request, START, END, -1) == (("mm", "two", 4),)
    assert keys_of(request, START, END, -2) == (("mm", "one", 0), ("mm", "two", 4))
    assert generate_block_hash_extra_keys(request, START, END, -1)[1] == 2


def test_an_index_before_the_first_item_is_refused() -> None:
    request = request_of(item("one", 8, 2))
    with pytest.raises(ValueError, match="-2"):
        keys_of(request, START, END, -2)


@pytest.mark.parametrize("index", [-1, 0, 1])
def test_behind_the_last_item_the_index_is_returned_as_it_came(index: int) -> None:
    request = request_of(item("one", 0, 4))
    assert generate_block_hash_extra_keys(request, START, END, index) == (None, index)


@pytest.mark.parametrize("items", [[], (), None])
def test_a_request_may_have_no_items(items: object) -> None:
    request = request_of(mm_features=items)
    assert generate_block_hash_extra_keys(request, START, END, 0) == (None, 0)


def test_an_overlapping_item_must_be_identified() -> None:
    with pytest.raises(ValueError, match="item 0 has no identifier"):
        keys_of(request_of(item(None, 8, 2)), START, END)


def test_equal_items_at_different_places_are_told_apart() -> None:
    places = [keys_of(request_of(item("image", at, 2)), START, END) for at in (9, 10)]
    assert places[0] != places[1]


# -- adapters ---------------------------------------------------------------------


def test_an_adapter_is_a_key_of_name_and_path_in_every_block() -> None:
    request = request_of(lora_request=lora("adapter", "/weights"))
    for start in (0, 8):
        keys = keys_of(request, start, start + 8)
        assert keys == (("lora", "adapter", "/weights"),)


def test_adapters_differ_by_name_or_path_and_not_by_number() -> None:
    one, renamed, repointed, renumbered = (
        keys_of(request_of(lora_request=adapter), 0, 8)
        for adapter in (
            lora("a", "/1"),
            lora("b", "/1"),
            lora("a", "/2"),
            lora("a", "/1", number=2),
        )
    )
    assert len({one, renamed, repointed, None}) == 4
    assert renumbered == one


# -- the salt ---------------------------------------------------------------------


def test_a_salt_is_a_key_of_the_first_block_alone() -> None:
    request = request_of(cache_salt="salt")
    assert keys_of(request, 0, 8) == (("cache_salt", "salt"),)
    assert keys_of(request, 8, 16) is None


@pytest.mark.parametrize("salt", ["", None])
def test_no_salt_is_no_key(salt: str | None) -> None:
    assert keys_of(request_of(cache_salt=salt), 0, 8) is None


# -- prompt embeddings ------------------------------------------------------------


def embeds(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((16, 4), np.float32)


def test_prompt_embeddings_are_a_key_by_their_digest() -> None:
    request = request_of(prompt_embeds=embeds(1))
    for start in (0, 8):
        digest = hashlib.sha256(embeds(1)[start : start + 8].tobytes()).digest()
        keys = keys_of(request, start, start + 8)
        assert keys == (("prompt_embeds", digest),)


def test_a_digest_of_embeddings_is_made_once_a_block() -> None:
    request = request_of(prompt_embeds=embeds(1))
    first = keys_of(request, 0, 8)
    request.prompt_embeds = embeds(2)  # would give another digest
    assert keys_of(request, 0, 8) == first
    assert keys_of(request, 8, 16) != first
    assert list(request._prompt_embeds_per_block_hashes) == [(0, 8), (8, 16)]


def test_embeddings_in_any_layout_have_one_digest() -> None:
    layouts = [
        embeds(1),
        np.asfortranarray(embeds(1)),
        np.repeat(embeds(1), 2, axis=1)[:, ::2],
    ]
    assert len({keys_of(request_of(prompt_embeds=one), 0, 8) for one in layouts}) == 1


def test_different_embeddings_have_different_digests() -> None:
    keys = {keys_of(request_of(prompt_embeds=embeds(seed)), 0, 8) for seed in (1, 2)}
    assert len(keys) == 2


# -- all together -----------------------------------------------------------------


def test_keys_stand_in_the_order_adapter_items_salt_embeddings() -> None:
    request = request_of(
        item("image", 2, 3),
        lora_request=lora("adapter", "/weights"),
        cache_salt="salt",
        prompt_embeds=embeds(1),
    )
    keys = keys_of(request, 0, 8)
    assert [key[0] for key in keys] == ["lora", "mm", "cache_salt", "prompt_embeds"]


def test_no_two_sources_of_keys_can_be_confused() -> None:
    digest = hashlib.sha256(embeds(1)[:8].tobytes()).digest()
    requests = [
        request_of(),
        request_of(lora_request=lora("S", "S")),
        request_of(cache_salt="S"),
        request_of(item("S", 0, 4)),
        request_of(item("S", 1, 4)),
        request_of(prompt_embeds=embeds(1)),
        request_of(cache_salt=digest),
        request_of(item(digest, 0, 4)),
        request_of(item("S", 0, 4), cache_salt="S"),
        request_of(lora_request=lora("S", "S"), cache_salt="S"),
    ]
    keys = [keys_of(request, 0, 8) for request in requests]
    assert len(set(keys)) == len(requests)


# -- lookahead --------------------------------------------------------------------


def test_with_lookahead_keys_cover_the_tokens_behind_the_block() -> None:
    request = request_of(item("one", 6, 2), item("two", 9, 2), item("three", 11, 2))
    keys, _ = generate_lookahead_block_hash_extra_keys(request, 0, 8, 10, 0)
    assert keys == (("mm", "one", 6), ("mm", "two", 9))


@pytest.mark.parametrize(
    ("offset", "length", "index"),
    [
        (2, 2, 1),  # done with: it ends inside the block
        (6, 2, 1),  # done with: it ends with the block
        (6, 3, 0),  # reaches into the tokens behind
        (8, 1, 0),  # begins behind the block, ends before the lookahead does
        (8, 2, 0),  # ends with the lookahead
        (8, 9, 0),
        (10, 2, 0),  # begins behind the lookahead
    ],
)
def test_with_lookahead_the_index_is_the_first_item_that_the_next_block_meets(
    offset: int, length: int, index: int
) -> None:
    request = request_of(item("image", offset, length))
    assert generate_lookahead_block_hash_extra_keys(request, 0, 8, 10, 0)[1] == index


def test_with_lookahead_the_index_goes_back_over_several_items() -> None:
    request = request_of(*(item(str(at), at, 1) for at in (7, 8, 9)))
    keys, index = generate_lookahead_block_hash_extra_keys(request, 0, 8, 10, 0)
    assert [name for _, name, _ in keys] == ["7", "8", "9"]
    assert index == 1


def test_without_tokens_behind_lookahead_changes_nothing() -> None:
    request = request_of(item("one", 2, 3), item("two", 6, 4))
    for start in (0, 4, 8):
        assert generate_lookahead_block_hash_extra_keys(
            request, start, start + 4, start + 4, 0
        ) == generate_block_hash_extra_keys(request, start, start + 4, 0)


# -- as events tell them ----------------------------------------------------------


def test_events_tell_keys_without_their_tags() -> None:
    tagged = (
        ("lora", "adapter", "/weights"),
        ("mm", "image", -2),
        ("cache_salt", "salt"),
        ("prompt_embeds", b"digest"),
    )
    assert to_event_extra_keys([tagged, None]) == [
        ("adapter", ("image", -2), "salt", b"digest"),
        None,
    ]


def test_blocks_without_keys_are_told_as_none_each() -> None:
    assert to_event_extra_keys([None, None]) == [None, None]


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_blocks_are_told_as_none(nothing: Any) -> None:
    assert to_event_extra_keys(nothing) is None
