"""Faults that users of LLM engines met in the field, as what a manager does instead.

Each docstring begins with the number of its case. Those of B14 to B99 that are about
requests are here; the others, about blocks alone, are in tests/test_field_cases.py.
"""

import pytest
from managers import ids, make, num_free, picture, refs, refused, run

from kvcache import BlockStateError
from kvcache.manager import ChunkedLocal, FullAttention, SlidingWindow


def test_a_request_that_does_not_fit_leaves_its_hits_alone() -> None:
    """B14: 50 refusals, and the hits are as free as before."""
    manager = make(num_blocks=6)
    first = run(manager, range(8))
    hits = ids(manager, first)
    manager.free(first)
    run(manager, [50, 51, 52, 53, 54])  # holds two others
    row = manager.add_request(range(20))
    for _ in range(50):
        assert manager.match(row) == 8
        assert manager.allocate_slots(row, 12) is None
        assert [refs(manager, block) for block in hits] == [0, 0]
        assert num_free(manager) == 3
        manager.check()


def test_free_hits_of_a_request_do_not_count_as_room_for_it() -> None:
    """B15: of 5 free blocks 2 are its own hits: 4 new ones are refused, 3 are not."""
    manager = make(num_blocks=6)
    manager.free(run(manager, range(8)))
    row = manager.add_request(range(24))
    assert manager.match(row) == 8
    before = picture(manager)
    assert manager.allocate_slots(row, 16) is None
    assert picture(manager) == before
    assert manager.allocate_slots(row, 12) is not None
    assert num_free(manager) == 0


def test_hits_in_use_by_others_take_no_room() -> None:
    """B15: and hits that somebody holds already are not subtracted."""
    manager = make(num_blocks=6)
    run(manager, range(8))
    row = manager.add_request(range(20))
    assert manager.match(row) == 8
    assert manager.allocate_slots(row, 12) is not None
    assert num_free(manager) == 0


def test_groups_get_all_their_blocks_or_none() -> None:
    """B17: 3 blocks for each of 2 groups where 5 are free."""
    manager = make(
        FullAttention(4), FullAttention(4), num_blocks=6, enable_kv_cache_events=True
    )
    row = manager.add_request(range(12))
    before = picture(manager)
    assert manager.allocate_slots(row, 12) is None
    assert picture(manager) == before
    assert manager.take_events() == []
    assert manager.allocate_slots(row, 8) is not None


def test_tokens_that_replace_others_have_hashes_of_their_own() -> None:
    """B42: cut inside a block that was hashed, and gone on with other tokens."""
    manager = make(FullAttention(16))
    prompt = [10] * 15
    row = manager.add_request(prompt)
    manager.append(row, [28])  # completes the block: it is hashed
    manager.truncate(row, 15)
    manager.append(row, [11])
    manager.allocate_slots(row, 16)
    manager.free(row)
    for last, hit in [(28, 0), (11, 16)]:
        row = manager.add_request([*prompt, last, 1])
        assert manager.match(row) == hit
        manager.free(row)


def test_hashes_of_untouched_blocks_stay_when_later_tokens_are_replaced() -> None:
    """B42: blocks before the cut keep their place in the cache."""
    manager = make()
    row = run(manager, range(8))
    manager.append(row, [1, 2, 3])
    manager.truncate(row, 9)
    manager.append(row, [7, 7, 7])
    manager.allocate_slots(row, 4)
    manager.free(row)
    for tokens, hit in [
        ([*range(8), 1, 2, 3, 9], 8),
        ([*range(8), 1, 7, 7, 7, 9], 12),
    ]:
        row = manager.add_request(tokens)
        assert manager.match(row) == hit
        manager.free(row)


def test_tokens_of_cached_blocks_cannot_be_replaced() -> None:
    """B42: nor can a caller cut what others may have found already."""
    manager = make()
    row = run(manager, range(8))
    with refused(BlockStateError, manager, match="2 blocks are cached"):
        manager.truncate(row, 7)


@pytest.mark.parametrize("window", range(1, 14))
def test_a_window_gives_back_what_no_token_attends_to_and_nothing_else(
    window: int,
) -> None:
    """B85: every window of 1 to 13 at every length up to 40, one token at a time."""
    manager = make(SlidingWindow(4, window))
    row = run(manager, [0])
    held = ids(manager, row)
    for computed in range(1, 41):
        manager.append(row, [0])
        manager.allocate_slots(row, 1)
        first = max(0, computed - window + 1)  # that the new token attends to
        table = ids(manager, row)
        assert [i for i, block in enumerate(table) if block == 0] == [
            *range(first // 4)
        ]
        assert table[first // 4 : len(held)] == held[first // 4 :]
        held = table
        assert num_free(manager) == 20 - len([block for block in table if block])
        manager.check()


def test_blocks_that_steps_under_way_read_are_not_given_back() -> None:
    """B85: the window moves with what is processed, not with what is scheduled."""
    manager = make(SlidingWindow(4, 4))
    row = run(manager, range(12))
    manager.set_in_flight(row, 12)
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert ids(manager, row) == [1, 2, 3, 4]
    manager.set_in_flight(row, 0)
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert ids(manager, row) == [0, 0, 3, 4]


def test_the_block_for_drafts_is_dropped_once_however_many_groups_there_are() -> None:
    """B88: 10 blocks cached, 9 hit; the drop does not repeat itself down to none."""
    for groups in [
        (FullAttention(4), SlidingWindow(4, 8)),
        (FullAttention(4), SlidingWindow(4, 8), SlidingWindow(4, 12)),
    ]:
        manager = make(*groups, num_blocks=61, use_eagle=True)
        manager.free(run(manager, range(40)))
        row = manager.add_request(range(41))
        assert manager.match(row) == 36


def test_a_hit_is_rounded_down_to_what_all_block_sizes_divide() -> None:
    """B90: blocks of 2 and 16; the shortest prefix that can be reused is 16."""
    for length, hit in [(15, 0), (16, 16), (31, 16), (32, 32)]:
        manager = make(FullAttention(2), SlidingWindow(16, 9), num_blocks=60)
        manager.free(run(manager, range(length)))
        row = manager.add_request([*range(length), 99])
        assert manager.match(row) == hit


def test_a_prompt_that_is_cached_whole_leaves_its_last_token_to_compute() -> None:
    """B93: 8 tokens hit 1 block of 4, 9 tokens hit 2; what is computed is a copy."""
    manager = make()
    first = run(manager, range(8))
    second = manager.add_request(range(8))
    assert manager.match(second) == 4
    manager.allocate_slots(second, 4)
    assert ids(manager, second)[0] == ids(manager, first)[0]
    assert ids(manager, second)[1] != ids(manager, first)[1]
    copy = manager.block_pool.blocks[ids(manager, second)[1]]
    assert (
        copy.block_hash == manager.block_pool.blocks[ids(manager, first)[1]].block_hash
    )
    third = manager.add_request(range(9))
    assert manager.match(third) == 8
    manager.check()


def test_drafts_are_not_hashed_before_they_are_accepted() -> None:
    """B94: 3 tokens and 3 drafts, of which 1 is right: exactly block 0 is cached."""
    manager = make()
    row = manager.add_request([1, 2, 3])
    manager.allocate_slots(row, 6)
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    manager.append(row, [4])
    manager.truncate(row, 4)
    assert manager.num_computed_tokens(row) == 4
    manager.append(row, [9])
    manager.allocate_slots(row, 1)
    cached = [b.block_id for b in manager.block_pool.blocks if b.block_hash is not None]
    assert cached == ids(manager, row)[:1]
    assert manager.match(manager.add_request([1, 2, 3, 4, 5, 6, 7])) == 4


def test_requests_that_come_back_do_not_raise_the_hit_rate() -> None:
    """B98: a preempted request hits what it computed itself, and counts apart."""
    manager = make()
    row = run(manager, range(16))
    manager.preempt(row)
    assert manager.match(row) == 12
    manager.allocate_slots(row, 4)
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 16, 0)
    assert stats.preempted_requests == 1
    assert (stats.preempted_queries, stats.preempted_hits) == (16, 12)
    assert stats.hit_rate == 0.0


# -- kinds of fault that have no number -----------------------------------------------


def test_no_block_is_lost_in_10_000_requests() -> None:
    """As B12, through requests: free blocks are back at where they were after each."""
    for caching in (False, True):
        manager = make(num_blocks=32, enable_caching=caching)
        for i in range(5_000):
            row = manager.add_request(hashes=(), num_tokens=i % 40 + 1)
            manager.allocate_slots(row, i % 40 + 1, num_lookahead_tokens=i % 3)
            manager.free(row)
            assert num_free(manager) == 31


def test_chunks_before_the_last_are_a_hit_without_a_look_up() -> None:
    """As vLLM has it: nothing attends to them, so that null blocks stand for them."""
    manager = make(ChunkedLocal(4, 8))
    row = manager.add_request(range(20))
    assert manager.match(row) == 16
    manager.allocate_slots(row, 4)
    assert ids(manager, row) == [0, 0, 0, 0, 1]


def test_a_hash_says_nothing_about_a_block_that_was_given_to_others() -> None:
    """As B35, between match and allocation: the hit was evicted, and is refused."""
    manager = make(num_blocks=5)
    manager.free(run(manager, range(8)))
    late = manager.add_request(range(9))
    assert manager.match(late) == 8
    run(manager, range(50, 66))  # takes all blocks, the hits too
    with refused(BlockStateError, manager, match="match again"):
        manager.allocate_slots(late, 1)
    assert manager.match(late) == 0
