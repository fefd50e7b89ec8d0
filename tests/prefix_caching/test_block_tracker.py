"""`BlockTracker`: what is known of a physical block in use."""

import pytest

from kvcache import BlockStateError
from kvcache.prefix_caching.block_tracker import BlockTracker


def state(tracker: BlockTracker) -> tuple[bool, float, bool]:
    return tracker.active, tracker.last_accessed, tracker.computed


def test_a_new_one_is_of_a_free_block_that_was_never_accessed() -> None:
    assert state(BlockTracker()) == (False, -1, False)


def test_of_makes_one_with_a_state() -> None:
    assert state(BlockTracker.of(True, 2.5, True)) == (True, 2.5, True)


def test_enabling_makes_a_block_active_and_forgets_what_it_was() -> None:
    tracker = BlockTracker.of(False, 2.5, True)
    tracker.enable()
    assert state(tracker) == (True, -1, False)


def test_disabling_makes_a_block_free_and_forgets_what_it_was() -> None:
    tracker = BlockTracker.of(True, 2.5, True)
    tracker.disable()
    assert state(tracker) == (False, -1, False)


def test_a_reset_leaves_a_block_active() -> None:
    tracker = BlockTracker.of(True, 2.5, True)
    tracker.reset()
    assert state(tracker) == (True, -1, False)


def test_a_block_in_use_is_not_taken_again() -> None:
    tracker = BlockTracker.of(True, 2.5, True)
    with pytest.raises(BlockStateError, match="in use already"):
        tracker.enable()
    with pytest.raises(AssertionError):  # as in vLLM
        tracker.enable()
    assert state(tracker) == (True, 2.5, True)


def test_a_free_block_is_not_freed_again() -> None:
    tracker = BlockTracker()
    with pytest.raises(BlockStateError, match="free already"):
        tracker.disable()
    assert state(tracker) == (False, -1, False)


def test_it_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        BlockTracker().touched = True  # type: ignore[attr-defined]
