"""`LRUEvictor` against a dict that is searched for its least entry.

Few blocks and few different times, so that ties are common; `check()` and the whole
table are compared after each step.
"""

from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvcache.prefix_caching.evictor import LRUEvictor

block_ids = st.integers(-3, 40) | st.sampled_from([-(2**63), 2**63 - 1])
hashes = st.integers(0, 5) | st.integers(-(2**140), 2**140)
depths = st.integers(0, 3).map(lambda n: 16 * n) | st.just(2**63 - 1)
times = (
    st.integers(-1, 3) | st.sampled_from([0.5, -0.0, 2.5]) | st.floats(allow_nan=False)
)


class Data(NamedTuple):
    content_hash: int
    num_tokens: int
    last_accessed: float


class EvictorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evictor = LRUEvictor()
        self.model: dict[int, Data] = {}
        self.most = 0

    def first(self) -> int:
        """The block to go."""
        return min(
            self.model,
            key=lambda block_id: (
                self.model[block_id].last_accessed,
                -self.model[block_id].num_tokens,
                block_id,
            ),
        )

    def draw_known(self, data) -> int | None:
        if not self.model:
            return None
        return data.draw(st.sampled_from(list(self.model)), label="block")

    @invariant()
    def it_holds_what_the_model_holds(self):
        self.evictor.check()
        assert self.evictor.num_blocks == len(self.model)
        assert [
            (block_id, Data(d.content_hash, d.num_hashed_tokens, d.last_accessed))
            for block_id, d in self.evictor.free_table.items()
        ] == list(self.model.items())

    @invariant()
    def its_memory_is_for_the_most_blocks_it_held(self):
        self.most = max(self.most, len(self.model))
        assert self.evictor.nbytes <= 44 * max(16, 2 * self.most)

    @rule(block_id=block_ids, content_hash=hashes, depth=depths, time=times)
    def add(self, block_id, content_hash, depth, time):
        self.evictor.add(block_id, content_hash, depth, time)
        self.model[block_id] = Data(content_hash, depth, time)

    @rule(start=st.integers(0, 40), count=st.integers(1, 20), time=times)
    def add_a_chain_accessed_at_once(self, start, count, time):
        for block_id in range(start, start + count):
            self.add(block_id, block_id, 16 * (block_id - start), time)

    @rule(data=st.data(), time=times)
    def update(self, data, time):
        block_id = self.draw_known(data)
        if block_id is not None:
            self.evictor.update(block_id, time)
            self.model[block_id] = self.model[block_id]._replace(last_accessed=time)

    @rule(data=st.data())
    def remove(self, data):
        block_id = self.draw_known(data)
        if block_id is not None:
            assert block_id in self.evictor
            self.evictor.remove(block_id)
            assert block_id not in self.evictor
            del self.model[block_id]

    @rule(count=st.integers(1, 10))
    def evict(self, count):
        for _ in range(count):
            if self.model:
                block_id = self.first()
                expected = block_id, self.model.pop(block_id).content_hash
                assert self.evictor.evict() == expected
            else:
                with pytest.raises(ValueError):
                    self.evictor.evict()

    @rule(block_id=block_ids, time=times)
    def name_a_block_that_is_not_in_it(self, block_id, time):
        if block_id not in self.model:
            assert block_id not in self.evictor
            with pytest.raises(ValueError, match=f"block {block_id} "):
                self.evictor.update(block_id, time)
            with pytest.raises(ValueError, match=f"block {block_id} "):
                self.evictor.remove(block_id)

    @rule(data=st.data(), block_id=block_ids)
    def call_with_wrong_arguments(self, data, block_id):
        known = self.draw_known(data)
        for some_id in (block_id, known):
            bad: list[tuple[Any, ...]] = [
                (some_id, 1.5, 16, 1.0),
                (some_id, 1, -1, 1.0),
                (some_id, 1, 16, float("nan")),
                (some_id, 1, 16, None),
                (True, 1, 16, 1.0),
            ]
            for arguments in bad:
                with pytest.raises((TypeError, ValueError)):
                    self.evictor.add(*arguments)
            for time in (float("nan"), "1", True):
                with pytest.raises((TypeError, ValueError)):
                    self.evictor.update(some_id, time)


MACHINES = {"evictor": EvictorMachine}


def test_an_evictor_does_what_a_searched_dict_does() -> None:
    run_state_machine_as_test(
        EvictorMachine,
        settings=settings(
            RuleBasedStateMachine.TestCase.settings,
            max_examples=100,
            stateful_step_count=40,
        ),
    )
