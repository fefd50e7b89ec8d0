"""Packing requests into batches: keys, shapes, where a batch ends."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.replay.batches import Batch, Row, batches

SIZE = 4
few_ids = st.integers(-1, 3) | st.just(2**70)
requests = st.lists(
    st.tuples(st.lists(few_ids, max_size=6), st.integers(0, SIZE - 1)), max_size=30
).map(lambda rows: [(len(ids) * SIZE + rest, [*ids, 9]) for ids, rest in rows])


def keys_of(batch: Batch, request: int) -> list[bytes]:
    start, end = batch.indptr[request : request + 2]
    return [key.tobytes() for key in batch.keys[start:end]]


@given(requests, st.integers(1, 40))
def test_keys_are_equal_exactly_where_all_ids_so_far_are(
    rows: list[Row], batch_blocks: int
) -> None:
    seen: dict[tuple[int, ...], bytes] = {}
    requests = iter(rows)
    for batch in batches(rows, SIZE, batch_blocks):
        for request, length in enumerate(batch.input_lengths.tolist()):
            expected_length, ids = next(requests)
            assert length == expected_length
            keys = keys_of(batch, request)
            assert len(keys) == length // SIZE
            for i, key in enumerate(keys):
                assert seen.setdefault(tuple(ids[: i + 1]), key) == key
    assert next(requests, None) is None
    assert len(set(seen.values())) == len(seen)


@given(requests, st.integers(1, 40))
def test_arrays_have_the_shapes_and_types_that_a_pool_takes(
    rows: list[Row], batch_blocks: int
) -> None:
    for lengths, keys, indptr in batches(rows, SIZE, batch_blocks):
        assert lengths.dtype == indptr.dtype == np.int64
        assert keys.dtype == np.uint8
        assert keys.flags.c_contiguous
        assert keys.shape == (indptr[-1], 16)
        assert indptr[0] == 0
        assert np.diff(indptr).tolist() == (lengths // SIZE).tolist()


def test_a_batch_ends_once_its_blocks_and_requests_reach_the_limit() -> None:
    rows: list[Row] = [(8, [1, 2]), (0, []), (0, []), (40, list(range(10))), (0, [])]
    sizes = [len(batch.input_lengths) for batch in batches(rows, SIZE, 5)]
    assert sizes == [3, 1, 1]


def test_no_requests_make_no_batch() -> None:
    assert list(batches([], SIZE)) == []
