"""What a pool says of its content: the records, and what stands in them."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pools import UNIT, cached, full_request_of, hash_of, hashes_of, key_of, refused

from kvcache import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventClasses,
    KVCacheBlock,
    use_event_classes,
)
from kvcache.events import (
    MEDIUM_GPU,
    OWN_EVENT_CLASSES,
    KVCacheEvent,
    event_classes,
    external_hashes,
)

VARIABLE = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


@pytest.fixture
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events carry whole digests."""
    monkeypatch.setenv(VARIABLE, "0")


def events_pool(num_blocks: int = 8, **options: Any) -> BlockPool:
    return BlockPool(num_blocks, True, UNIT, enable_kv_cache_events=True, **options)


def stored(pool: BlockPool) -> BlockStored:
    """The one event since the last look, which is a BlockStored."""
    (event,) = pool.take_events()
    assert type(event) is BlockStored
    return event


# -- the records ------------------------------------------------------------------


def test_a_stored_event_has_vllms_fields_in_their_order() -> None:
    assert [field.name for field in fields(BlockStored)] == [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        "lookahead_token_ids",
    ]


def test_a_removed_event_has_vllms_fields_in_their_order() -> None:
    assert [field.name for field in fields(BlockRemoved)] == [
        "block_hashes",
        "medium",
        "group_idx",
        "locality",
        "ownership",
    ]


def test_a_cleared_event_has_no_fields() -> None:
    assert is_dataclass(AllBlocksCleared)
    assert fields(AllBlocksCleared) == ()


def test_what_an_engine_may_know_is_none_unless_it_says_so() -> None:
    event = BlockStored([1], None, [2], 1, None, "GPU", None)
    assert [getattr(event, field.name) for field in fields(event)[7:]] == [None] * 8
    removed = BlockRemoved([1], "GPU")
    assert (removed.group_idx, removed.locality, removed.ownership) == (None,) * 3


def make_stored() -> BlockStored:
    return BlockStored(
        block_hashes=[1, b"two"],
        parent_block_hash=b"zero",
        token_ids=[3, 4],
        block_size=1,
        lora_id=5,
        medium="GPU",
        lora_name="adapter",
        extra_keys=[None, ("adapter", ("image", 2))],
        group_idx=6,
        lookahead_token_ids=[[4], [5]],
    )


EVENTS = [make_stored, lambda: BlockRemoved([1, b"two"], "GPU", 6), AllBlocksCleared]


@pytest.mark.parametrize("make", EVENTS)
def test_events_with_equal_fields_are_equal_and_hash_alike(make: Any) -> None:
    assert make() == make()
    assert make() is not make()
    assert hash(make()) == hash(make())
    assert len({make(), make()}) == 1


@pytest.mark.parametrize("field", fields(BlockStored), ids=lambda field: field.name)
def test_every_field_of_a_stored_event_counts(field: Any) -> None:
    changed = make_stored()
    setattr(changed, field.name, ["other"])
    assert changed != make_stored()
    assert len({changed, make_stored()}) == 2
    assert hash(changed) != hash(make_stored())


@pytest.mark.parametrize("field", fields(BlockRemoved), ids=lambda field: field.name)
def test_every_field_of_a_removed_event_counts(field: Any) -> None:
    changed = BlockRemoved([1], "GPU", 6)
    setattr(changed, field.name, ["other"])
    assert changed != BlockRemoved([1], "GPU", 6)
    assert hash(changed) != hash(BlockRemoved([1], "GPU", 6))


def test_events_of_different_kinds_are_not_equal() -> None:
    assert BlockRemoved([], None) != AllBlocksCleared()
    assert make_stored() != BlockRemoved([1, b"two"], "GPU", 6)
    assert AllBlocksCleared() != ()


def test_the_event_classes_have_vllms_names() -> None:
    # Its publisher tags what it sends with them.
    names = [kind.__name__ for kind in OWN_EVENT_CLASSES]
    assert names == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]


@pytest.mark.parametrize("make", EVENTS)
def test_events_are_plain_records(make: Any) -> None:
    event = make()
    assert isinstance(event, KVCacheEvent)
    assert not hasattr(event, "__dict__")
    assert pickle.loads(pickle.dumps(event)) == event
    assert repr(event).startswith(f"{type(event).__name__}(")


# -- hashes as events carry them --------------------------------------------------


def test_by_default_a_hash_is_the_low_64_bits_of_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = bytes(range(32))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert external_hashes([digest]) == [0x18191A1B1C1D1E1F]
    monkeypatch.setenv(VARIABLE, "1")
    assert external_hashes([digest, b"\xff" * 32]) == [0x18191A1B1C1D1E1F, 2**64 - 1]


@pytest.mark.parametrize(
    ("digest", "value"), [(b"\1\2", 258), (b"\xff" * 8, 2**64 - 1)]
)
def test_a_digest_of_8_bytes_or_less_is_all_of_its_number(
    monkeypatch: pytest.MonkeyPatch, digest: bytes, value: int
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert external_hashes([digest]) == [value]


def test_with_the_variable_off_a_hash_is_its_digest(whole_hashes: None) -> None:
    assert external_hashes(hashes_of(1, 2)) == hashes_of(1, 2)
    assert external_hashes([]) == []


def test_the_variable_is_read_at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = events_pool()
    short = int.from_bytes(hash_of(1)[-8:], "big")
    for value, expected in (("1", short), ("0", hash_of(1)), ("1", short)):
        monkeypatch.setenv(VARIABLE, value)
        cached(pool, 1)
        assert stored(pool).block_hashes == [expected]


def test_parents_and_removals_carry_hashes_in_the_same_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    short = [int.from_bytes(one[-8:], "big") for one in hashes_of(1, 2)]
    pool = events_pool()
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(full_request_of(1, 2), blocks, 1, 2, UNIT, 0)
    pool.evict_blocks([2])
    event, removed = pool.take_events()
    assert event.parent_block_hash == short[0]
    assert event.block_hashes == removed.block_hashes == [short[1]]


# -- other classes in the place of ours -------------------------------------------


@dataclass
class OtherStored:
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Any = None
    group_idx: int | None = None
    session_id: str | None = None
    lookahead_token_ids: Any = None


@dataclass
class OtherRemoved:
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


@dataclass
class OtherCleared:
    pass


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    use_event_classes(OWN_EVENT_CLASSES)


def test_events_are_built_from_the_classes_in_use(restored: None) -> None:
    pool = events_pool(3)
    use_event_classes(EventClasses(OtherStored, OtherRemoved, OtherCleared))
    pool.free_blocks(cached(pool, 1))
    pool.cache_block_ids([2], hashes_of(2))
    pool.get_new_block_ids(2)
    pool.free_block_ids([1, 2])
    pool.reset_prefix_cache()
    assert [type(event) for event in pool.take_events()] == [
        OtherStored,
        OtherStored,
        OtherRemoved,
        OtherRemoved,
        OtherCleared,
    ]


def test_our_own_classes_can_be_put_back(restored: None) -> None:
    others = EventClasses(OtherStored, OtherRemoved, OtherCleared)
    assert event_classes() == (BlockStored, BlockRemoved, AllBlocksCleared)
    use_event_classes(others)
    assert event_classes() == others
    use_event_classes(OWN_EVENT_CLASSES)
    pool = events_pool()
    cached(pool, 1)
    assert type(stored(pool)) is BlockStored


def test_three_classes_are_needed(restored: None) -> None:
    with pytest.raises(TypeError):
        use_event_classes((OtherStored, OtherRemoved))
    assert event_classes() == OWN_EVENT_CLASSES


# -- what is stored ---------------------------------------------------------------


def test_a_stored_event_tells_of_the_blocks_and_their_request(
    whole_hashes: None,
) -> None:
    pool = events_pool()
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(
        full_request_of(1, 2, session_id="chat"), blocks, 0, 2, UNIT, 3
    )
    assert stored(pool) == BlockStored(
        block_hashes=hashes_of(1, 2),
        parent_block_hash=None,
        token_ids=[100, 101, 102, 103, 104, 105, 106, 107],
        block_size=UNIT,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        extra_keys=[None, None],
        group_idx=3,
        session_id="chat",
    )


def test_the_parent_is_the_block_before_in_the_request(whole_hashes: None) -> None:
    pool = events_pool()
    blocks = pool.get_new_blocks(4)
    request = full_request_of(1, 2, 3, 4)
    pool.cache_full_blocks(request, blocks, 0, 2, UNIT, 0)
    pool.cache_full_blocks(request, blocks, 2, 3, UNIT, 0)
    pool.cache_full_blocks(request, blocks, 3, 4, UNIT, 0)
    events = pool.take_events()
    assert [event.parent_block_hash for event in events] == [
        None,
        hash_of(2),
        hash_of(3),
    ]
    assert [event.token_ids for event in events] == [
        list(range(100, 108)),
        list(range(108, 112)),
        list(range(112, 116)),
    ]


def test_token_ids_span_the_blocks_that_were_skipped(whole_hashes: None) -> None:
    # As in vLLM: whoever aligns tokens with hashes has to know of the gaps.
    pool = events_pool()
    null = pool.null_block
    table = [null, *pool.get_new_blocks(1), null, *pool.get_new_blocks(2)]
    pool.cache_full_blocks(
        full_request_of(1, 2, 3, 4, 5),
        table,
        0,
        5,
        UNIT,
        0,
        block_mask=[True, True, True, True, False],
    )
    event = stored(pool)
    assert event.block_hashes == hashes_of(2, 4)
    assert event.token_ids == list(range(100, 120))
    assert event.extra_keys == [None, None]


def test_blocks_that_are_all_skipped_are_an_event_without_hashes(
    whole_hashes: None,
) -> None:
    # As in vLLM.
    pool = events_pool()
    pool.cache_full_blocks(full_request_of(1), [pool.null_block], 0, 1, UNIT, 0)
    event = stored(pool)
    assert event.block_hashes == []
    assert event.token_ids == [100, 101, 102, 103]
    assert event.extra_keys is None


def test_where_no_block_is_newly_full_nothing_is_told() -> None:
    pool = events_pool()
    pool.cache_full_blocks(full_request_of(1), pool.get_new_blocks(1), 1, 1, UNIT, 0)
    assert pool.take_events() == []


def test_blocks_of_several_hashes_are_told_in_their_own_size(
    whole_hashes: None,
) -> None:
    pool = events_pool()
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(full_request_of(1, 2, 3, 4), blocks, 1, 2, 2 * UNIT, 0)
    event = stored(pool)
    assert event.block_hashes == [hash_of(4)]
    assert event.parent_block_hash == hash_of(2)
    assert event.token_ids == list(range(108, 116))
    assert event.block_size == 2 * UNIT


def test_the_medium_is_the_pools_at_the_time() -> None:
    pool = events_pool(medium="CPU")
    cached(pool, 1)
    pool.medium = "DISK"
    pool.evict_blocks([1])
    assert [event.medium for event in pool.take_events()] == ["CPU", "DISK"]


def test_an_adapter_is_told_by_id_and_name() -> None:
    lora = SimpleNamespace(
        adapter_id=7, name="adapter", lora_name="adapter", lora_path="/adapter"
    )
    pool = events_pool()
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(
        full_request_of(1, 2, lora_request=lora), blocks, 0, 2, UNIT, 0
    )
    event = stored(pool)
    assert (event.lora_id, event.lora_name) == (7, "adapter")
    assert event.extra_keys == [("adapter",), ("adapter",)]


def item(name: str, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name, mm_position=position)


def test_extra_keys_are_told_block_by_block_without_their_tags() -> None:
    request = full_request_of(
        1, 2, 3, cache_salt="salt", mm_features=[item("one", 2, 4), item("two", 9, 2)]
    )
    pool = events_pool()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3, UNIT, 0)
    assert stored(pool).extra_keys == [
        (("one", 2), "salt"),
        (("one", -2),),
        (("two", 1),),
    ]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_extra_keys_are_the_same_wherever_caching_begins(start: int) -> None:
    request = full_request_of(
        1, 2, 3, 4, mm_features=[item("one", 2, 4), item("two", 9, 6)]
    )
    whole, part = events_pool(), events_pool()
    whole.cache_full_blocks(request, whole.get_new_blocks(4), 0, 4, UNIT, 0)
    part.cache_full_blocks(request, part.get_new_blocks(4), start, 4, UNIT, 0)
    assert stored(part).extra_keys == stored(whole).extra_keys[start:]


def test_extra_keys_skip_what_was_skipped() -> None:
    request = full_request_of(
        1, 2, 3, mm_features=[item("one", 0, 4), item("two", 4, 4), item("three", 8, 4)]
    )
    pool = events_pool()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3, UNIT, 0, [True, False, True])
    assert stored(pool).extra_keys == [(("one", 0),), (("three", 0),)]


def test_lookahead_tokens_follow_each_block() -> None:
    pool = events_pool(num_hash_lookahead_tokens=2)
    request = full_request_of(1, 2)
    request.all_token_ids.append(108)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, UNIT, 0)
    event = stored(pool)
    assert event.lookahead_token_ids == [[104, 105], [108]]
    assert event.token_ids == list(range(100, 108))


def test_with_lookahead_extra_keys_cover_the_tokens_behind_a_block() -> None:
    pool = events_pool(num_hash_lookahead_tokens=1)
    request = full_request_of(1, 2, 3, mm_features=[item("one", 4, 2)])
    pool.cache_full_blocks(request, pool.get_new_blocks(3), 0, 3, UNIT, 0)
    assert stored(pool).extra_keys == [(("one", 4),), (("one", 0),), None]


def test_without_lookahead_no_tokens_are_told() -> None:
    pool = events_pool()
    cached(pool, 1)
    assert stored(pool).lookahead_token_ids is None


@pytest.mark.parametrize(
    "name", ["all_token_ids", "lora_request", "session_id", "mm_features", "cache_salt"]
)
def test_a_request_that_cannot_be_read_leaves_the_pool_as_it_was(name: str) -> None:
    pool = events_pool()
    (block,) = pool.get_new_blocks(1)
    request = full_request_of(1)
    delattr(request, name)
    for call in (
        lambda: pool.cache_full_blocks(request, [block], 0, 1, UNIT, 0),
        lambda: pool.cache_partial_block(request, block, UNIT, 0, UNIT),
        lambda: pool.emit_cached_block_events(request, 1, UNIT, 0),
    ):
        with refused(AttributeError, pool, match=name):
            call()


# -- partial blocks ---------------------------------------------------------------


def test_a_partial_block_is_told_by_its_last_hash(whole_hashes: None) -> None:
    pool = events_pool()
    (block,) = pool.get_new_blocks(1)
    request = full_request_of(1, 2, 3, session_id="chat")
    pool.cache_partial_block(request, block, 2 * UNIT, 5, 4 * UNIT)
    assert stored(pool) == BlockStored(
        block_hashes=[hash_of(2)],
        parent_block_hash=hash_of(1),
        token_ids=[104, 105, 106, 107],
        block_size=UNIT,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None],
        group_idx=5,
        session_id="chat",
    )


def test_a_partial_block_at_the_start_has_no_parent() -> None:
    pool = events_pool()
    pool.cache_partial_block(full_request_of(1), pool.blocks[1], UNIT, 0, 2 * UNIT)
    assert stored(pool).parent_block_hash is None


def test_a_partial_blocks_extra_keys_and_lookahead_are_its_last_hashs() -> None:
    pool = events_pool(num_hash_lookahead_tokens=2)
    request = full_request_of(
        1, 2, 3, cache_salt="salt", mm_features=[item("one", 0, 5), item("two", 8, 2)]
    )
    pool.cache_partial_block(request, pool.blocks[1], 2 * UNIT, 0, 4 * UNIT)
    event = stored(pool)
    assert event.extra_keys == [(("one", -4), ("two", 4))]
    assert event.lookahead_token_ids == [[108, 109]]


def test_a_promotion_tells_first_what_is_gone(whole_hashes: None) -> None:
    pool = events_pool()
    (block,) = pool.get_new_blocks(1)
    request = full_request_of(1, 2, 3, 4)
    pool.cache_partial_block(request, block, UNIT, 0, 4 * UNIT)
    pool.cache_partial_block(request, block, 2 * UNIT, 0, 4 * UNIT)
    pool.cache_full_blocks(request, [block], 0, 1, 4 * UNIT, 0)
    assert [(type(event), event.block_hashes) for event in pool.take_events()] == [
        (BlockStored, [hash_of(1)]),
        (BlockRemoved, [hash_of(1)]),
        (BlockStored, [hash_of(2)]),
        (BlockRemoved, [hash_of(2)]),
        (BlockStored, [hash_of(4)]),
    ]


def test_a_boundary_shorter_than_the_own_hash_is_told_once(whole_hashes: None) -> None:
    # As in vLLM, which gives the block a second key there.
    pool = events_pool()
    (block,) = pool.get_new_blocks(1)
    request = full_request_of(1, 2)
    pool.cache_full_blocks(request, [block], 0, 1, 2 * UNIT, 0)
    for _ in range(3):
        pool.cache_partial_block(request, block, UNIT, 0, 2 * UNIT)
    assert [event.block_hashes for event in pool.take_events()] == [
        [hash_of(2)],
        [hash_of(1)],
    ]


def test_replaced_content_is_told_as_removed_and_stored(whole_hashes: None) -> None:
    pool = events_pool()
    (block,) = cached(pool, 1)
    pool.take_events()
    pool.cache_partial_block(
        full_request_of(1), block, UNIT, 0, UNIT, replace_existing_hashes=True
    )
    assert [type(event) for event in pool.take_events()] == [BlockRemoved, BlockStored]


def test_a_partial_hash_of_the_null_block_is_not_told() -> None:
    pool = events_pool()
    pool.cache_partial_block(full_request_of(1), pool.null_block, UNIT, 0, UNIT)
    assert pool.take_events() == []


# -- blocks that are reused -------------------------------------------------------


def test_reused_blocks_are_told_from_the_start_and_stay_as_they_are(
    whole_hashes: None,
) -> None:
    pool = events_pool()
    cached(pool, 1, 2)
    pool.take_events()
    before = pool.blocks.as_array().tobytes()
    pool.emit_cached_block_events(full_request_of(1, 2, 3), 2, UNIT, 4)
    assert stored(pool) == BlockStored(
        block_hashes=hashes_of(1, 2),
        parent_block_hash=None,
        token_ids=list(range(100, 108)),
        block_size=UNIT,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=4,
    )
    assert pool.blocks.as_array().tobytes() == before


def test_reused_blocks_of_several_hashes_are_told_in_their_own_size(
    whole_hashes: None,
) -> None:
    pool = events_pool(num_hash_lookahead_tokens=1)
    request = full_request_of(1, 2, 3, 4, 5, mm_features=[item("one", 7, 2)])
    pool.emit_cached_block_events(request, 2, 2 * UNIT, 0)
    event = stored(pool)
    assert event.block_hashes == hashes_of(2, 4)
    assert event.token_ids == list(range(100, 116))
    assert event.extra_keys == [(("one", 7),), (("one", -1),)]
    assert event.lookahead_token_ids == [[108], [116]]


def test_no_reused_blocks_are_not_told() -> None:
    pool = events_pool()
    pool.emit_cached_block_events(full_request_of(1), 0, UNIT, 0)
    assert pool.take_events() == []


def test_with_events_off_a_reusing_request_is_not_read() -> None:
    pool = BlockPool(8, True, UNIT)
    pool.emit_cached_block_events(None, 1, UNIT, 0)
    assert pool.kv_event_queue == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, UNIT, 0), ValueError),
        ((-1, UNIT, 0), ValueError),
        ((1.0, UNIT, 0), TypeError),
        ((1, UNIT + 1, 0), ValueError),
        ((1, 0, 0), ValueError),
        ((1, UNIT, -1), ValueError),
        ((1, UNIT, "0"), TypeError),
    ],
)
def test_reuse_that_cannot_be_is_refused(
    arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    pool = events_pool()
    with refused(error, pool):
        pool.emit_cached_block_events(full_request_of(1, 2), *arguments)


# -- what is removed and cleared --------------------------------------------------


def test_every_key_that_a_block_loses_is_an_event_of_its_own(
    whole_hashes: None,
) -> None:
    pool = events_pool()
    (block,) = cached(pool, 1, group=3)
    pool._insert_block_hash(key_of(5, group=4), block, UNIT)
    pool.take_events()
    pool.evict_blocks([1])
    assert pool.take_events() == [
        BlockRemoved([hash_of(1)], "GPU", 3),
        BlockRemoved([hash_of(5)], "GPU", 4),
    ]


def test_allocation_tells_what_it_evicted_in_order(whole_hashes: None) -> None:
    pool = events_pool(5)
    pool.free_blocks(cached(pool, 1, 2, 3)[::-1])
    pool.take_events()
    pool.get_new_blocks(3)  # one was free and empty
    assert pool.take_events() == [
        BlockRemoved([hash_of(number)], "GPU", 0) for number in (3, 2)
    ]


def test_a_removal_is_told_although_another_copy_stays(whole_hashes: None) -> None:
    # As in vLLM: a consumer that counts hashes must count them itself.
    pool = events_pool()
    for _ in range(2):
        cached(pool, 1)
    pool.take_events()
    pool.evict_blocks([1])
    assert pool.take_events() == [BlockRemoved([hash_of(1)], "GPU", 0)]
    assert pool.get_cached_block(hash_of(1), [0]) is not None


def test_evicting_what_is_not_cached_tells_nothing() -> None:
    pool = events_pool()
    pool.evict_blocks([0, 1, 2])
    pool._maybe_evict_cached_block(pool.blocks[3])
    assert pool.take_events() == []


def test_a_hash_that_was_only_set_is_not_told_as_removed() -> None:
    pool = events_pool()
    pool.blocks[1].set_block_hash(key_of(1))
    pool.evict_blocks([1])
    assert pool.take_events() == []
    assert pool.blocks[1].block_hash is None


def test_reset_hash_tells_nothing() -> None:
    pool = events_pool()
    (block,) = cached(pool, 1)
    pool.take_events()
    block.reset_hash()
    assert pool.take_events() == []


def test_moved_keys_tell_nothing() -> None:
    pool = events_pool()
    (block,) = cached(pool, 1)
    pool.take_events()
    pool.move_block_hashes(block, *pool.get_new_blocks(1))
    assert pool.take_events() == []


def test_a_key_inserted_by_a_manager_tells_nothing() -> None:
    pool = events_pool()
    pool._insert_block_hash(key_of(1), pool.blocks[1], UNIT)
    assert pool.take_events() == []


def test_a_hand_made_block_is_told_like_any_other(whole_hashes: None) -> None:
    pool = events_pool()
    block = KVCacheBlock(100)
    pool.cache_full_blocks(full_request_of(1), [block], 0, 1, UNIT, 0)
    assert stored(pool).block_hashes == [hash_of(1)]
    assert pool._maybe_evict_cached_block(block)
    assert pool.take_events() == [BlockRemoved([hash_of(1)], "GPU", 0)]


def test_a_reset_is_told_once_and_a_refused_one_never() -> None:
    pool = events_pool()
    blocks = cached(pool, 1)
    pool.take_events()
    for _ in range(3):
        assert not pool.reset_prefix_cache()
    assert pool.take_events() == []
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]


def test_with_events_off_a_reset_is_not_told() -> None:
    pool = BlockPool(8, True, UNIT)
    assert pool.reset_prefix_cache()
    assert pool.kv_event_queue == []


def test_a_refused_call_tells_nothing() -> None:
    pool = events_pool()
    blocks = cached(pool, 1)
    pool.free_blocks(blocks)
    with refused(ValueError, pool):
        pool.get_new_blocks(8)
    with refused(ValueError, pool):
        pool.evict_blocks([1, 8])
    with refused(ValueError, pool):
        pool.cache_full_blocks(full_request_of(1), blocks, 0, 1, UNIT, 0)


def test_replaying_the_events_gives_what_is_cached(whole_hashes: None) -> None:
    # True as long as no content is held twice.
    pool = events_pool(6)
    known: set[bytes] = set()
    for number in range(50):
        blocks = cached(pool, 2 * number, 2 * number + 1)
        pool.free_blocks(blocks[::-1])
        if number % 7 == 0:
            pool.evict_blocks([blocks[0].block_id])
        if number % 20 == 19:
            pool.reset_prefix_cache()
        for event in pool.take_events():
            if isinstance(event, BlockStored):
                known |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known -= set(event.block_hashes)
            else:
                known.clear()
        assert known == {
            one
            for one in hashes_of(*range(2 * number + 2))
            if pool.get_cached_block(one, [0]) is not None
        }
