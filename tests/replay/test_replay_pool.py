"""The compiled pool against the plain-Python one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_replay import ReferenceReplay

from kvcache.replay._simulate import PoolReplay
from kvcache.replay.batches import Row, batches

SIZE = 4
# Few ids, so that paths are shared; lengths with and without a partial block.
requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, SIZE - 1)),
    max_size=40,
).map(lambda rows: [(len(ids) * SIZE + rest, ids) for ids, rest in rows])


@given(requests, st.integers(2, 20), st.integers(1, 30), st.booleans())
def test_the_compiled_pool_does_what_the_reference_does(
    rows: list[Row], num_blocks: int, batch_blocks: int, record_assignment: bool
) -> None:
    results = []
    for pool_class in (PoolReplay, ReferenceReplay):
        pool = pool_class(num_blocks, SIZE, record_assignment=record_assignment)
        for batch in batches(rows, SIZE, batch_blocks):
            pool.run(batch.input_lengths, batch.keys, batch.indptr)
        result = pool.result()
        del result["seconds"]
        if not record_assignment:
            result.pop("assignment_sha256", None)
        results.append(result)
    assert results[0] == pytest.approx(results[1])


@pytest.mark.parametrize(
    ("lengths", "indptr", "fault"),
    [
        ([-1], [0, 0], "request 0 has no valid length or keys"),
        ([4], [-1, 0], "request 0 has no valid length or keys"),
        ([4, 4], [0, 1, 0], "request 1 has no valid length or keys"),
        ([4], [3, 4], "request 0 has no valid length or keys"),
        ([4, 8], [0, 1, 2], "request 1 of 8 tokens has 1 keys"),
        ([4], [0, 2], "request 0 of 4 tokens has 2 keys"),
        ([4], [0], r"shape \(2,\), got \(1,\)"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    lengths: list[int], indptr: list[int], fault: str
) -> None:
    pool = PoolReplay(5, SIZE)
    keys = np.zeros((3, 16), np.uint8)
    with pytest.raises(ValueError, match=fault):
        pool.run(np.array(lengths), keys, np.array(indptr))
    assert pool.result()["requests"] == 0


def test_an_assignment_of_more_text_than_is_kept_is_hashed_whole() -> None:
    results = []
    for pool_class in (PoolReplay, ReferenceReplay):
        pool = pool_class(5, SIZE, record_assignment=True)
        for batch in batches([(100, list(range(25)))] * 20_000, SIZE, 10**6):
            pool.run(batch.input_lengths, batch.keys, batch.indptr)
        results.append(pool.result())
    assert results[0]["skipped"] == results[1]["skipped"] == 20_000
    assert results[0]["assignment_sha256"] == results[1]["assignment_sha256"]


def test_a_replay_is_made_once() -> None:
    pool = PoolReplay(5, SIZE)
    with pytest.raises(ValueError, match="already made"):
        pool.__init__(9, SIZE)  # type: ignore[misc]
    pool.run(np.array([5 * SIZE]), np.zeros((5, 16), np.uint8), np.array([0, 5]))
    assert pool.result()["skipped"] == 1  # 8 blocks would do
