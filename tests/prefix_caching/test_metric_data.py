"""The hit rate of a prefix cache: vLLM's numbers, without its rounding errors."""

import copy
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.prefix_caching.metric_data import CacheMetricData


def asked(hits: int, misses: int, **fields: Any) -> CacheMetricData:
    metric = CacheMetricData(**fields)
    for i in range(hits + misses):
        metric.query(i < hits)
    return metric


def test_the_rate_is_zero_before_the_first_query() -> None:
    assert CacheMetricData().get_hit_rate() == 0.0


def test_the_rate_is_the_share_of_hits() -> None:
    assert asked(hits=3, misses=1).get_hit_rate() == 0.75


def test_a_query_returns_nothing() -> None:
    assert CacheMetricData().query(hit=True) is None  # type: ignore[func-returns-value]


def test_whatever_is_true_is_a_hit() -> None:
    metric = CacheMetricData()
    for hit in ["yes", 2, [0], "", 0, None]:
        metric.query(hit)  # type: ignore[arg-type]
    assert metric.num_incompleted_block_hit == 3


def test_queries_are_counted_in_a_block_until_it_is_complete() -> None:
    metric = asked(hits=300, misses=699)
    assert metric == CacheMetricData(0, 0.0, 999, 300)
    metric.query(hit=True)
    assert metric == CacheMetricData(1, 0.301, 0, 0)


def test_complete_blocks_count_with_the_queries_since() -> None:
    metric = CacheMetricData(3, 0.5, 500, 500)
    assert metric.get_hit_rate() == (1500 + 500) / 3500


def test_the_size_of_a_block_can_be_chosen() -> None:
    assert asked(hits=2, misses=3, block_size=5) == CacheMetricData(1, 0.4, 0, 0, 5)


def test_each_query_completes_a_block_of_one() -> None:
    metric = asked(hits=1, misses=2, block_size=1)
    assert metric.num_completed_blocks == 3
    assert metric.get_hit_rate() == 1 / 3


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 20))
def test_the_rate_is_that_of_all_queries_however_they_fall_into_blocks(
    queries: list[bool], block_size: int
) -> None:
    metric = CacheMetricData(block_size=block_size)
    for i, hit in enumerate(queries, 1):
        metric.query(hit)
        assert metric.get_hit_rate() == pytest.approx(sum(queries[:i]) / i, rel=1e-15)
    assert metric.num_completed_blocks == len(queries) // block_size
    assert metric.num_incompleted_block_queries == len(queries) % block_size


def test_billions_of_queries_later_it_is_right_to_the_last_digits() -> None:
    blocks, hits = 4_000_000_000, 1_333_333_333_333  # of four thousand billion queries
    metric = CacheMetricData(blocks, hits / (blocks * 1000))
    for _ in range(1000):
        for hit in (True, *[False] * 999):
            metric.query(hit)
    exact = Fraction(hits + 1000, (blocks + 1000) * 1000)
    assert metric.get_hit_rate() == float(exact)


def test_fields_are_given_by_name_or_in_vllms_order() -> None:
    assert CacheMetricData(1, 0.5, 20, 10, 100) == CacheMetricData(
        block_size=100,
        num_incompleted_block_hit=10,
        num_incompleted_block_queries=20,
        completed_block_cache_hit_rate=0.5,
        num_completed_blocks=1,
    )


def test_it_equals_one_with_the_same_fields_only() -> None:
    assert CacheMetricData(1, 0.5) == CacheMetricData(1, 0.5)
    assert CacheMetricData(1, 0.5) != CacheMetricData(1, 0.25)
    assert CacheMetricData() != CacheMetricData(block_size=10)
    assert CacheMetricData() != (0, 0.0, 0, 0, 1000)


def test_it_shows_its_fields() -> None:
    assert repr(CacheMetricData(1, 0.5, 20, 10, 100)) == (
        "CacheMetricData(num_completed_blocks=1, completed_block_cache_hit_rate=0.5, "
        "num_incompleted_block_queries=20, num_incompleted_block_hit=10, "
        "block_size=100)"
    )


def test_it_changes_so_it_has_no_hash() -> None:
    with pytest.raises(TypeError):
        hash(CacheMetricData())


def test_it_can_be_copied_and_pickled() -> None:
    metric = asked(hits=7, misses=6, block_size=5)
    assert copy.deepcopy(metric) == metric
    assert pickle.loads(pickle.dumps(metric)) == metric


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_completed_blocks": -1}, "num_completed_blocks"),
        ({"completed_block_cache_hit_rate": 1.5}, "1.5"),
        ({"completed_block_cache_hit_rate": float("nan")}, "nan"),
        ({"num_incompleted_block_queries": 1000}, "1000"),
        ({"num_incompleted_block_hit": 1}, "1 hits in 0 queries"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_impossible_fields_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CacheMetricData(**fields)


def test_fields_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="num_completed_blocks"):
        CacheMetricData(num_completed_blocks=1.0)  # type: ignore[arg-type]
