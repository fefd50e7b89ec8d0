"""The compiled pool against the plain-Python one."""

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
