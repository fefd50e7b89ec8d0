"""What the prefix cache is said to have saved."""

from managers import make, run

from kvcache.manager import PrefixCacheStats, SlidingWindow


def test_nothing_was_looked_up_at_first() -> None:
    stats = make().take_prefix_cache_stats()
    assert stats == PrefixCacheStats()
    assert stats.hit_rate == 0.0


def test_an_admission_counts_its_tokens_and_those_that_were_cached() -> None:
    manager = make()
    run(manager, range(10))
    run(manager, range(9))
    stats = manager.take_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 19, 8)
    assert stats.hit_rate == 8 / 19


def test_taken_statistics_start_anew() -> None:
    manager = make()
    run(manager, range(10))
    first = manager.take_prefix_cache_stats()
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()
    assert first.requests == 1


def test_a_look_up_counts_when_the_request_is_let_in_and_once() -> None:
    manager = make(num_blocks=6)
    run(manager, range(16))
    row = manager.add_request(range(16))
    for _ in range(3):
        assert manager.match(row) == 12
        assert manager.allocate_slots(row, 4, reserved_blocks=5) is None
    assert manager.take_prefix_cache_stats().requests == 1
    assert manager.allocate_slots(row, 4) is not None
    manager.append(row, [1])
    manager.allocate_slots(row, 1)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats(1, 16, 12)


def test_a_request_that_is_to_skip_the_cache_is_not_counted() -> None:
    manager = make()
    run(manager, range(10))
    manager.take_prefix_cache_stats()
    run(manager, range(10), skip_reading_prefix_cache=True)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_nothing_is_counted_without_caching() -> None:
    manager = make(SlidingWindow(4, 6), enable_caching=False)
    run(manager, range(10))
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_a_fork_is_no_look_up() -> None:
    manager = make()
    row = run(manager, range(10))
    manager.take_prefix_cache_stats()
    manager.fork(row)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats()


def test_tokens_that_a_connector_brings_are_no_hits() -> None:
    manager = make()
    row = manager.add_request(range(10))
    manager.match(row)
    manager.allocate_slots(row, 2, num_external_computed_tokens=8)
    assert manager.take_prefix_cache_stats() == PrefixCacheStats(1, 10, 0)


def test_a_reset_is_told_once_and_only_where_it_was_done() -> None:
    manager = make()
    row = run(manager, range(10))
    assert not manager.reset_prefix_cache()
    assert not manager.take_prefix_cache_stats().reset
    manager.free(row)
    assert manager.reset_prefix_cache()
    assert manager.take_prefix_cache_stats().reset
    assert not manager.take_prefix_cache_stats().reset
