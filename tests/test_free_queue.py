"""The queue of free blocks: its order, its ends, and what it refuses."""

from collections.abc import Callable, Iterator

import pytest
from pools import UNIT, cached, ids, refused, walk

from kvcache import (
    BlockPool,
    BlockStateError,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    NoFreeBlocksError,
)


def make(count: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(i) for i in range(count)]
    return FreeKVCacheBlockQueue(blocks), blocks


def assert_holds(queue: FreeKVCacheBlockQueue, blocks: list[KVCacheBlock]) -> None:
    """The queue is these very blocks, whichever way it is walked."""
    assert queue.num_free_blocks == len(blocks)
    for first, step, last in (
        (queue.fake_free_list_head, "next_free_block", queue.fake_free_list_tail),
        (queue.fake_free_list_tail, "prev_free_block", queue.fake_free_list_head),
    ):
        met = []
        block = getattr(first, step)
        while block is not last:
            met.append(block)
            block = getattr(block, step)
        if step == "prev_free_block":
            met.reverse()
        assert len(met) == len(blocks)
        assert all(one is other for one, other in zip(met, blocks, strict=True))


def assert_loose(*blocks: KVCacheBlock) -> None:
    for block in blocks:
        assert block.prev_free_block is None
        assert block.next_free_block is None


# -- what it is made of -----------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 10])
def test_a_queue_holds_its_blocks_in_the_order_given(count: int) -> None:
    queue, blocks = make(count)
    assert_holds(queue, blocks)


def test_a_queue_is_made_of_any_iterable() -> None:
    blocks = [KVCacheBlock(i) for i in (5, 3, 4)]
    assert_holds(FreeKVCacheBlockQueue(iter(blocks)), blocks)


def test_a_queue_holds_blocks_of_any_ids() -> None:
    blocks = [KVCacheBlock(i) for i in (7, 7, -1, 2**31 - 1)]
    assert_holds(FreeKVCacheBlockQueue(blocks), blocks)


def test_the_list_a_queue_was_made_of_stays_the_callers() -> None:
    queue, blocks = make(3)
    blocks.clear()
    assert queue.num_free_blocks == 3
    queue.popleft()
    assert blocks == []


def test_an_empty_queue_has_ends_that_meet() -> None:
    queue, _ = make(0)
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    assert queue.fake_free_list_tail.prev_free_block is queue.fake_free_list_head
    assert queue.get_all_free_blocks() == []


def test_the_ends_are_two_blocks_with_the_id_minus_1() -> None:
    queue, _ = make(3)
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert type(head) is type(tail) is KVCacheBlock
    assert head is not tail
    assert head.block_id == tail.block_id == -1
    assert head.prev_free_block is None
    assert tail.next_free_block is None


def test_the_ends_stay_the_same_objects() -> None:
    queue, blocks = make(3)
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    queue.popleft_n(3)
    queue.append_n(KVCacheBlock(i) for i in range(100))
    queue.append_n(blocks)
    assert queue.fake_free_list_head is head
    assert queue.fake_free_list_tail is tail
    assert head.next_free_block.prev_free_block is head
    assert tail.prev_free_block.next_free_block is tail


@pytest.mark.parametrize("name", ["fake_free_list_head", "num_free_blocks"])
def test_what_a_queue_shows_of_itself_cannot_be_assigned(name: str) -> None:
    queue, _ = make(3)
    with pytest.raises(AttributeError):
        setattr(queue, name, KVCacheBlock(-1))


def test_a_queue_is_not_made_twice() -> None:
    queue, blocks = make(3)
    with pytest.raises(ValueError):
        queue.__init__([KVCacheBlock(9)])
    assert_holds(queue, blocks)


def test_a_queue_that_was_never_initialised_is_empty() -> None:
    queue = FreeKVCacheBlockQueue.__new__(FreeKVCacheBlockQueue)
    assert_holds(queue, [])
    with pytest.raises(NoFreeBlocksError):
        queue.popleft()


def test_blocks_keep_their_fields_while_their_rows_move_in_and_out() -> None:
    block = KVCacheBlock(3, 2, b"key", 16, is_null=True)
    queue = FreeKVCacheBlockQueue([block])
    for i in range(100):  # the queue's memory grows and moves
        queue.append(KVCacheBlock(100 + i))
    assert (block.block_id, block.ref_cnt, block.is_null) == (3, 2, True)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"key", 16)
    block.ref_cnt = 5
    block.reset_hash()
    assert queue.popleft() is block
    assert block == KVCacheBlock(3, 5, is_null=True)


def test_blocks_outlive_their_queue_unlinked_and_with_their_fields() -> None:
    queue, blocks = make(3)
    blocks[1].ref_cnt = 4
    blocks[1].set_block_hash(b"key")
    ends = queue.fake_free_list_head, queue.fake_free_list_tail
    del queue
    noise = [make(3) for _ in range(50)]
    assert blocks[1] == KVCacheBlock(1, 4, b"key")
    assert_loose(*blocks, *ends)
    assert len(noise) == 50


def test_blocks_of_a_dropped_queue_can_be_queued_again() -> None:
    queue, blocks = make(3)
    del queue
    assert_holds(FreeKVCacheBlockQueue(blocks), blocks)


# -- popleft, popleft_n -----------------------------------------------------------


def test_popleft_takes_the_first_block_and_unlinks_it() -> None:
    queue, blocks = make(3)
    assert queue.popleft() is blocks[0]
    assert_loose(blocks[0])
    assert_holds(queue, blocks[1:])


def test_popleft_takes_the_last_block_too() -> None:
    queue, blocks = make(1)
    assert queue.popleft() is blocks[0]
    assert_loose(blocks[0])
    assert_holds(queue, [])


def test_popleft_of_an_empty_queue_says_that_no_block_is_free() -> None:
    queue, _ = make(0)
    with pytest.raises(NoFreeBlocksError) as error:
        queue.popleft()
    assert str(error.value) == "No free blocks available"
    assert isinstance(error.value, ValueError)
    assert_holds(queue, [])


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_popleft_n_takes_the_first_n_in_order(count: int) -> None:
    queue, blocks = make(4)
    popped = queue.popleft_n(count)
    assert type(popped) is list
    assert all(one is two for one, two in zip(popped, blocks[:count], strict=True))
    assert_loose(*popped)
    assert_holds(queue, blocks[count:])


@pytest.mark.parametrize(("held", "count"), [(0, 1), (3, 4), (3, 2**31 - 2)])
def test_popleft_n_of_more_than_there_are_takes_none(held: int, count: int) -> None:
    queue, blocks = make(held)
    with pytest.raises(BlockStateError, match=f"{count} blocks .* of {held}") as error:
        queue.popleft_n(count)
    assert isinstance(error.value, AssertionError)
    assert_holds(queue, blocks)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (-1, ValueError),
        (2**70, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_popleft_n_takes_an_int_from_0_on(
    count: object, error: type[Exception]
) -> None:
    queue, blocks = make(3)
    with pytest.raises(error):
        queue.popleft_n(count)
    assert_holds(queue, blocks)


# -- remove -----------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
def test_remove_takes_a_block_from_wherever_it_stands(index: int) -> None:
    queue, blocks = make(3)
    assert queue.remove(blocks[index]) is None
    assert_loose(blocks[index])
    del blocks[index]
    assert_holds(queue, blocks)


def test_remove_takes_the_only_block() -> None:
    queue, (block,) = make(1)
    queue.remove(block)
    assert_loose(block)
    assert_holds(queue, [])


def test_a_block_is_removed_once() -> None:
    queue, blocks = make(3)
    queue.remove(blocks[1])
    with pytest.raises(ValueError, match="block 1 is not in this queue"):
        queue.remove(blocks[1])
    assert_holds(queue, [blocks[0], blocks[2]])


def test_a_block_is_removed_from_its_own_queue_only() -> None:
    queue, blocks = make(3)
    other, others = make(3)
    with pytest.raises(ValueError, match="block 1 is not in this queue"):
        queue.remove(others[1])
    assert_holds(queue, blocks)
    assert_holds(other, others)


def test_an_equal_block_is_not_removed_in_its_place() -> None:
    queue, (block,) = make(1)
    twin = KVCacheBlock(0)
    twin.prev_free_block = queue.fake_free_list_head
    twin.next_free_block = queue.fake_free_list_tail
    assert twin == block
    with pytest.raises(ValueError, match="block 0 is not in this queue"):
        queue.remove(twin)
    assert_holds(queue, [block])


def test_the_ends_cannot_be_removed() -> None:
    queue, blocks = make(3)
    for end in (queue.fake_free_list_head, queue.fake_free_list_tail):
        with pytest.raises(ValueError, match="block -1"):
            queue.remove(end)
    assert_holds(queue, blocks)


@pytest.mark.parametrize("block", [0, None, "block", [KVCacheBlock(0)]])
def test_what_is_no_block_cannot_be_removed(block: object) -> None:
    queue, blocks = make(3)
    with pytest.raises(TypeError):
        queue.remove(block)
    assert_holds(queue, blocks)


# -- append, append_n, prepend_n --------------------------------------------------


@pytest.mark.parametrize("held", [0, 1, 3])
def test_append_puts_a_block_at_the_back(held: int) -> None:
    queue, blocks = make(held)
    block = KVCacheBlock(9)
    queue.append(block)
    assert_holds(queue, [*blocks, block])


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_append_n_puts_blocks_at_the_back_in_order(held: int, count: int) -> None:
    queue, blocks = make(held)
    added = [KVCacheBlock(9 - i) for i in range(count)]
    queue.append_n(added)
    assert_holds(queue, blocks + added)


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_prepend_n_puts_blocks_at_the_front_in_order(held: int, count: int) -> None:
    queue, blocks = make(held)
    added = [KVCacheBlock(9 - i) for i in range(count)]
    queue.prepend_n(added)
    assert_holds(queue, added + blocks)


@pytest.mark.parametrize("name", ["append_n", "prepend_n"])
def test_blocks_are_added_from_any_iterable(name: str) -> None:
    queue, _ = make(0)
    getattr(queue, name)(KVCacheBlock(i) for i in (4, 2))
    assert ids(queue.get_all_free_blocks()) == [4, 2]


def test_a_block_moves_from_one_queue_to_another() -> None:
    queue, blocks = make(3)
    other, _ = make(0)
    other.append(queue.popleft())
    assert_holds(queue, blocks[1:])
    assert_holds(other, blocks[:1])


def test_a_block_that_was_taken_can_be_put_back() -> None:
    queue, blocks = make(3)
    queue.append(queue.popleft())
    queue.remove(blocks[1])
    queue.prepend_n([blocks[1]])
    assert_holds(queue, [blocks[1], blocks[2], blocks[0]])


def test_links_set_by_hand_are_gone_once_a_block_was_queued() -> None:
    block = KVCacheBlock(3)
    block.next_free_block = block.prev_free_block = KVCacheBlock(4)
    queue = FreeKVCacheBlockQueue([block])
    assert_holds(queue, [block])
    assert_loose(queue.popleft())


def test_a_queue_grows_one_block_at_a_time_and_keeps_its_order() -> None:
    queue, blocks = make(0)
    for i in range(300):
        blocks.append(KVCacheBlock(i))
        queue.append(blocks[-1])
        if i % 3 == 0:
            assert queue.popleft() is blocks.pop(0)
    assert_holds(queue, blocks)


class Cast:
    """A block that may be queued, and some that may not."""

    def __init__(self) -> None:
        self.new = KVCacheBlock(9)
        self.queued = KVCacheBlock(1)
        self.queue = FreeKVCacheBlockQueue([KVCacheBlock(0), self.queued])
        self.held = self.queue.get_all_free_blocks()
        self.elsewhere = KVCacheBlock(5)
        self.other = FreeKVCacheBlockQueue([self.elsewhere])
        self.pool = BlockPool(8, True, UNIT)

    def assert_unchanged(self) -> None:
        assert_holds(self.queue, self.held)
        assert_holds(self.other, [self.elsewhere])
        assert_loose(self.new)
        assert walk(self.pool) == [1, 2, 3, 4, 5, 6, 7]
        assert FreeKVCacheBlockQueue([self.new]).popleft() is self.new


bad_batches = pytest.mark.parametrize(
    ("batch", "error", "named"),
    [
        (lambda c: [c.new, KVCacheBlock(8), c.new], ValueError, "block 9"),
        (lambda c: [c.new, c.elsewhere], ValueError, "block 5"),
        (lambda c: [c.new, c.pool.blocks[3]], ValueError, "block 3"),
        (lambda c: [c.new, c.other.fake_free_list_tail], ValueError, "block -1"),
        (
            lambda c: [c.new, c.pool.free_block_queue.fake_free_list_head],
            ValueError,
            None,
        ),
        (lambda c: [c.new, 3], TypeError, "3"),
        (lambda c: [c.new, None], TypeError, "None"),
        (lambda c: 3, TypeError, None),
        (lambda c: None, TypeError, None),
    ],
    ids=[
        "twice",
        "of another queue",
        "of a pool",
        "an end",
        "an end of a pool's",
        "an id",
        "a None",
        "not iterable",
        "no batch",
    ],
)


@pytest.mark.parametrize("name", ["append_n", "prepend_n"])
@bad_batches
def test_a_batch_with_a_block_that_cannot_be_queued_is_refused_whole(
    name: str,
    batch: Callable[[Cast], object],
    error: type[Exception],
    named: str | None,
) -> None:
    cast = Cast()
    with pytest.raises(error, match=named):
        getattr(cast.queue, name)(batch(cast))
    cast.assert_unchanged()


@bad_batches
def test_a_queue_is_not_made_of_blocks_that_cannot_be_queued(
    batch: Callable[[Cast], object], error: type[Exception], named: str | None
) -> None:
    cast = Cast()
    with pytest.raises(error, match=named):
        FreeKVCacheBlockQueue(batch(cast))
    cast.assert_unchanged()


@pytest.mark.parametrize("name", ["append_n", "prepend_n"])
def test_a_block_that_stands_in_the_queue_is_not_added_to_it(name: str) -> None:
    cast = Cast()
    with pytest.raises(ValueError, match="block 1 is already in a queue"):
        getattr(cast.queue, name)([cast.new, cast.queued])
    cast.assert_unchanged()


@pytest.mark.parametrize(
    "block",
    [
        lambda cast: cast.queued,
        lambda cast: cast.pool.blocks[3],
        lambda cast: [cast.new],
        lambda cast: None,
    ],
    ids=["queued", "of a pool", "list", "None"],
)
def test_append_refuses_what_append_n_refuses(
    block: Callable[[Cast], object],
) -> None:
    cast = Cast()
    with pytest.raises((TypeError, ValueError)):
        cast.queue.append(block(cast))
    cast.assert_unchanged()


def test_a_refused_batch_leaves_the_links_set_by_hand() -> None:
    block, other = KVCacheBlock(3), KVCacheBlock(4)
    block.prev_free_block = block.next_free_block = other
    queue, _ = make(0)
    with pytest.raises(ValueError):
        queue.append_n([block, block])
    assert block.prev_free_block is block.next_free_block is other


def test_what_an_iterable_raises_leaves_the_queue_as_it_was() -> None:
    def broken() -> Iterator[KVCacheBlock]:
        yield KVCacheBlock(9)
        raise KeyError("broken")

    queue, blocks = make(3)
    for add in (queue.append_n, queue.prepend_n):
        with pytest.raises(KeyError):
            add(broken())
        assert_holds(queue, blocks)


# -- a tail unlinked by hand ------------------------------------------------------


def test_append_n_to_an_unlinked_tail_fails_vllms_way_and_appends_nothing() -> None:
    queue, _ = make(0)
    queue.fake_free_list_tail.prev_free_block = None
    assert queue.fake_free_list_tail.prev_free_block is None
    blocks = [KVCacheBlock(i) for i in range(3)]
    with pytest.raises(AssertionError) as error:
        queue.append_n(blocks)
    assert isinstance(error.value, BlockStateError)
    assert isinstance(error.value, ValueError)
    assert queue.num_free_blocks == 0
    assert_loose(*blocks)
    assert_holds(FreeKVCacheBlockQueue(blocks), blocks)


@pytest.mark.parametrize(
    "link",
    [
        ("fake_free_list_head", "next_free_block", None),
        ("fake_free_list_head", "prev_free_block", KVCacheBlock(9)),
        ("fake_free_list_tail", "next_free_block", None),
        ("fake_free_list_tail", "prev_free_block", KVCacheBlock(9)),
    ],
    ids=lambda link: " ".join(map(str, link))[:36],
)
def test_no_other_link_of_the_ends_can_be_set(
    link: tuple[str, str, KVCacheBlock | None],
) -> None:
    queue, blocks = make(3)
    end, name, value = link
    with pytest.raises(ValueError, match="block -1"):
        setattr(getattr(queue, end), name, value)
    assert_holds(queue, blocks)


# -- walking ----------------------------------------------------------------------


def test_all_free_blocks_are_a_new_list_each_time() -> None:
    queue, blocks = make(3)
    queue.get_all_free_blocks().clear()
    assert queue.get_all_free_blocks() == blocks


def test_iteration_after_none_meets_every_block() -> None:
    queue, blocks = make(3)
    assert ids(queue.iter_blocks_after(None)) == ids(blocks)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_iteration_after_a_block_begins_behind_it(index: int) -> None:
    queue, blocks = make(3)
    assert ids(queue.iter_blocks_after(blocks[index])) == ids(blocks[index + 1 :])


def test_iteration_after_the_ends_is_all_or_nothing() -> None:
    queue, blocks = make(3)
    assert ids(queue.iter_blocks_after(queue.fake_free_list_head)) == ids(blocks)
    assert ids(queue.iter_blocks_after(queue.fake_free_list_tail)) == []


def test_iteration_after_a_block_outside_queues_meets_nothing() -> None:
    queue, _ = make(3)
    assert list(queue.iter_blocks_after(KVCacheBlock(1))) == []


def test_iteration_after_a_block_of_another_queue_is_refused_at_once() -> None:
    queue, _ = make(3)
    _other, others = make(3)
    with pytest.raises(ValueError, match="block 1"):
        queue.iter_blocks_after(others[1])


@pytest.mark.parametrize("cursor", [1, "block", [KVCacheBlock(1)]])
def test_iteration_after_what_is_no_block_is_refused_at_once(cursor: object) -> None:
    queue, _ = make(3)
    with pytest.raises(TypeError):
        queue.iter_blocks_after(cursor)


def test_iteration_meets_blocks_that_were_added_meanwhile() -> None:
    queue, _ = make(2)
    walk = queue.iter_blocks_after(None)
    assert next(walk).block_id == 0
    queue.append(KVCacheBlock(9))
    assert ids(walk) == [1, 9]


def test_iteration_does_not_meet_blocks_that_left_meanwhile() -> None:
    queue, blocks = make(4)
    walk = queue.iter_blocks_after(None)
    next(walk)
    queue.remove(blocks[1])
    queue.remove(blocks[3])
    assert ids(walk) == [2]


def test_iteration_ends_when_the_block_it_stands_on_leaves() -> None:
    queue, blocks = make(4)
    walk = queue.iter_blocks_after(None)
    assert next(walk) is blocks[0]
    queue.remove(blocks[0])
    assert list(walk) == []


def test_iteration_goes_on_from_where_its_block_was_put_back() -> None:
    queue, _ = make(4)
    walk = queue.iter_blocks_after(None)
    queue.append(next(walk) and queue.popleft())
    queue.append(KVCacheBlock(9))
    assert ids(walk) == [9]


def test_iteration_keeps_its_queue_alive() -> None:
    queue, blocks = make(3)
    walk = queue.iter_blocks_after(None)
    del queue
    assert ids(walk) == [0, 1, 2]
    del walk
    assert_loose(*blocks)


# -- the queue of a pool ----------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(8, True, UNIT)
    yield pool
    pool.check()


def test_a_pools_queue_can_be_read(pool: BlockPool) -> None:
    queue = pool.free_block_queue
    pool.get_new_blocks(4)
    assert_holds(queue, pool.blocks[5:])
    assert ids(queue.iter_blocks_after(pool.blocks[6])) == [7]
    assert queue.fake_free_list_head.block_id == -1


def test_iteration_after_a_used_block_of_a_pool_meets_nothing(pool: BlockPool) -> None:
    (block,) = pool.get_new_blocks(1)
    assert list(pool.free_block_queue.iter_blocks_after(block)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.free_block_queue.popleft(),
        lambda pool: pool.free_block_queue.popleft_n(1),
        lambda pool: pool.free_block_queue.popleft_n(0),
        lambda pool: pool.free_block_queue.remove(pool.blocks[3]),
        lambda pool: pool.free_block_queue.append(pool.blocks[1]),
        lambda pool: pool.free_block_queue.append_n([pool.blocks[1]]),
        lambda pool: pool.free_block_queue.append(KVCacheBlock(9)),
        lambda pool: pool.free_block_queue.prepend_n([KVCacheBlock(9)]),
        lambda pool: pool.free_block_queue.__init__([KVCacheBlock(9)]),
    ],
)
def test_a_pools_queue_changes_through_the_pool_alone(
    pool: BlockPool, change: Callable[[BlockPool], object]
) -> None:
    cached(pool, 1)
    with refused(ValueError, pool):
        change(pool)


def test_a_pools_queue_cannot_be_unlinked_by_hand(pool: BlockPool) -> None:
    with refused(ValueError, pool):
        pool.free_block_queue.fake_free_list_tail.prev_free_block = None


def test_a_pools_queue_outlives_the_pool() -> None:
    pool = BlockPool(8, True, UNIT)
    pool.get_new_block_ids(4)
    queue = pool.free_block_queue
    del pool
    assert ids(queue.get_all_free_blocks()) == [5, 6, 7]
