"""Hand-made free queues against plain lists: same blocks, same order, same links.

Ten blocks wander between several queues. After each step every queue is walked in both
directions and compared by identity, and each block must still be what it was: its row
moves with it from queue to queue.
"""

from collections.abc import Callable, Iterable
from itertools import chain, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import (
    BlockPool,
    BlockStateError,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    NoFreeBlocksError,
)

NUM_BLOCKS = 10
POOL = BlockPool(3, True, 16)

numbers = st.integers(0, NUM_BLOCKS - 1)
iterables: st.SearchStrategy[Callable[[list], Iterable]] = st.sampled_from(
    [list, tuple, iter]
)


class QueueMachine(RuleBasedStateMachine):
    """A block is known by its number here: some blocks share an id."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [
            KVCacheBlock(
                block_id=number // 2 - 1,
                ref_cnt=number,
                _block_hash=b"hash %d" % number,
                _block_hash_num_tokens=number * 16,
            )
            for number in range(NUM_BLOCKS)
        ]
        # What a block in no queue is linked to: the numbers before and behind it.
        self.links: dict[int, list[int | None]] = {}
        self.queues = [FreeKVCacheBlockQueue([])]
        self.models: list[list[int]] = [[]]

    def loose(self) -> list[int]:
        queued = set(chain(*self.models))
        return [number for number in range(NUM_BLOCKS) if number not in queued]

    def these(self, numbers: Iterable[int]) -> list[KVCacheBlock]:
        return [self.blocks[number] for number in numbers]

    def draw_queue(self, data) -> tuple[FreeKVCacheBlockQueue, list[int]]:
        i = data.draw(st.integers(0, len(self.queues) - 1), label="queue")
        return self.queues[i], self.models[i]

    def draw_loose(self, data) -> list[int]:
        order = data.draw(st.permutations(self.loose()), label="loose blocks")
        return order[: data.draw(st.integers(0, len(order)), label="of which")]

    def enter(self, numbers: list[int]) -> None:
        """Blocks that enter a queue forget the links that they were given by hand."""
        for number in numbers:
            self.links.pop(number, None)

    @invariant()
    def every_queue_is_linked_as_its_model_in_both_directions(self):
        for queue, model in zip(self.queues, self.models, strict=True):
            head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
            assert queue.num_free_blocks == len(model)
            assert same(queue.get_all_free_blocks(), self.these(model))
            assert head.prev_free_block is None
            assert tail.next_free_block is None
            for before, after in pairwise([head, *self.these(model), tail]):
                assert before.next_free_block is after
                assert after.prev_free_block is before

    @invariant()
    def a_block_in_no_queue_has_the_links_it_was_given_by_hand(self):
        for number in self.loose():
            for name, linked in zip(
                ["prev_free_block", "next_free_block"],
                self.links.get(number, [None, None]),
                strict=True,
            ):
                expected = None if linked is None else self.blocks[linked]
                assert getattr(self.blocks[number], name) is expected

    @invariant()
    def every_block_is_what_it_was(self):
        for number, block in enumerate(self.blocks):
            assert block.block_id == number // 2 - 1
            assert block.ref_cnt == number
            assert block.block_hash == b"hash %d" % number
            assert block.block_hash_num_tokens == number * 16

    # -- queues come and go ------------------------------------------------------

    @precondition(lambda self: len(self.queues) < 4)
    @rule(data=st.data(), iterable=iterables)
    def make_a_queue(self, data, iterable):
        new = self.draw_loose(data)
        self.queues.append(FreeKVCacheBlockQueue(iterable(self.these(new))))
        self.models.append(new)
        self.enter(new)

    @precondition(lambda self: len(self.queues) > 1)
    @rule(data=st.data())
    def drop_a_queue(self, data):
        """Its blocks and its two ends stand alone then."""
        i = data.draw(st.integers(0, len(self.queues) - 1), label="queue")
        head = self.queues[i].fake_free_list_head
        tail = self.queues[i].fake_free_list_tail
        del self.queues[i], self.models[i]
        for end in (head, tail):
            assert end.block_id == -1
            assert end.prev_free_block is None
            assert end.next_free_block is None

    # -- blocks come and go ------------------------------------------------------

    @rule(data=st.data())
    def append(self, data):
        queue, model = self.draw_queue(data)
        for number in self.draw_loose(data)[:1]:
            queue.append(self.blocks[number])
            model.append(number)
            self.enter([number])

    @rule(data=st.data(), iterable=iterables)
    def append_n(self, data, iterable):
        queue, model = self.draw_queue(data)
        new = self.draw_loose(data)
        queue.append_n(iterable(self.these(new)))
        model.extend(new)
        self.enter(new)

    @rule(data=st.data(), iterable=iterables)
    def prepend_n(self, data, iterable):
        queue, model = self.draw_queue(data)
        new = self.draw_loose(data)
        queue.prepend_n(iterable(self.these(new)))
        model[:0] = new
        self.enter(new)

    @rule(data=st.data())
    def popleft(self, data):
        queue, model = self.draw_queue(data)
        if model:
            assert queue.popleft() is self.blocks[model.pop(0)]
        else:
            with pytest.raises(NoFreeBlocksError):
                queue.popleft()

    @rule(data=st.data(), n=st.integers(0, NUM_BLOCKS + 1))
    def popleft_n(self, data, n):
        queue, model = self.draw_queue(data)
        if n <= len(model):
            assert same(queue.popleft_n(n), self.these(model[:n]))
            del model[:n]
        else:
            with pytest.raises(BlockStateError):
                queue.popleft_n(n)

    @rule(data=st.data(), number=numbers)
    def remove(self, data, number):
        queue, model = self.draw_queue(data)
        if number in model:
            queue.remove(self.blocks[number])
            model.remove(number)
        else:
            with pytest.raises(ValueError):
                queue.remove(self.blocks[number])

    @rule(data=st.data(), number=numbers)
    def iterate_behind_a_block(self, data, number):
        queue, model = self.draw_queue(data)
        assert same(queue.iter_blocks_after(None), self.these(model))
        if number in model:
            behind = model[model.index(number) + 1 :]
            found = queue.iter_blocks_after(self.blocks[number])
            assert same(found, self.these(behind))
        elif number not in self.loose():
            with pytest.raises(ValueError):
                queue.iter_blocks_after(self.blocks[number])

    @precondition(lambda self: self.loose())
    @rule(data=st.data(), neighbour=st.none() | numbers, forward=st.booleans())
    def link_a_block_in_no_queue_by_hand(self, data, neighbour, forward):
        number = data.draw(st.sampled_from(self.loose()), label="loose block")
        setattr(
            self.blocks[number],
            "next_free_block" if forward else "prev_free_block",
            None if neighbour is None else self.blocks[neighbour],
        )
        self.links.setdefault(number, [None, None])[forward] = neighbour

    # -- mistakes ----------------------------------------------------------------

    @rule(data=st.data(), at_front=st.booleans())
    def put_in_what_cannot_be_put_in(self, data, at_front):
        """One bad block refuses its whole batch, wherever it stands in it."""
        queue, _ = self.draw_queue(data)
        good = self.draw_loose(data)
        refused = [
            *[(ValueError, self.blocks[one]) for one in chain(good, *self.models)],
            (ValueError, queue.fake_free_list_head),
            (ValueError, queue.fake_free_list_tail),
            (ValueError, POOL.blocks[1]),
            (ValueError, POOL.null_block),
            (TypeError, 1),
            (TypeError, None),
        ]
        error, bad = data.draw(st.sampled_from(refused), label="bad block")
        batch = self.these(good)
        batch.insert(data.draw(st.integers(0, len(good)), label="place"), bad)
        with pytest.raises(error):
            (queue.prepend_n if at_front else queue.append_n)(batch)

    @rule(data=st.data())
    def call_with_wrong_arguments(self, data):
        queue, _ = self.draw_queue(data)
        for error, method, argument in [
            (ValueError, queue.popleft_n, -1),
            (ValueError, queue.popleft_n, 2**64),
            (TypeError, queue.popleft_n, True),
            (TypeError, queue.popleft_n, 1.0),
            (TypeError, queue.popleft_n, None),
            (ValueError, queue.remove, queue.fake_free_list_head),
            (ValueError, queue.remove, queue.fake_free_list_tail),
            (ValueError, queue.remove, POOL.blocks[1]),
            (TypeError, queue.remove, 1),
            (TypeError, queue.append, None),
            (TypeError, queue.append_n, None),
            (TypeError, queue.prepend_n, None),
            (ValueError, queue.iter_blocks_after, POOL.blocks[1]),
            (TypeError, queue.iter_blocks_after, 1),
        ]:
            with pytest.raises(error):
                method(argument)

    @rule(number=numbers)
    def write_what_is_the_queues_to_write(self, number):
        if number in self.loose():
            return
        for name, value in [
            ("block_id", 7),
            ("is_null", True),
            ("prev_free_block", None),
            ("next_free_block", self.blocks[0]),
        ]:
            with pytest.raises(ValueError):
                setattr(self.blocks[number], name, value)


def same(found: Iterable[KVCacheBlock], expected: list[KVCacheBlock]) -> bool:
    """Whether these are the same objects in the same order."""
    return [id(block) for block in found] == [id(block) for block in expected]


MACHINES = {"queue": QueueMachine}  # of tests/soak.py, here and in the other files


def test_queues_do_what_lists_do() -> None:
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=100,
            stateful_step_count=40,
        ),
    )


def test_a_refused_batch_keeps_the_links_that_its_blocks_were_given_by_hand() -> None:
    block, neighbour = KVCacheBlock(1), KVCacheBlock(2)
    block.prev_free_block = block.next_free_block = neighbour
    queue = FreeKVCacheBlockQueue([])
    with pytest.raises(ValueError):
        queue.append_n([block, block])
    assert block.prev_free_block is neighbour
    assert block.next_free_block is neighbour
