"""Generated chats: determinism, shape, limits."""

import hashlib
import json
from itertools import pairwise

import pytest

from kvcache.replay.workload import SHAPE, Workload


def test_equal_options_give_equal_requests_in_every_iteration() -> None:
    workload = Workload(seed=3, sessions=5)
    first = list(workload)
    assert list(workload) == first == list(Workload(seed=3, sessions=5))


def test_another_seed_gives_other_requests() -> None:
    assert list(Workload(seed=1, sessions=5)) != list(Workload(seed=2, sessions=5))


def test_the_requests_are_the_same_on_every_python_version() -> None:
    rows = json.dumps(list(Workload(sessions=20, turns=3, open_sessions=7)))
    assert hashlib.sha256(rows.encode()).hexdigest() == (
        "971d818294f78bf8e748c42e988f5cd5a598cd392251bcc93e15142f39bbde6f"
    )


def test_each_session_makes_its_turns_and_each_turn_repeats_what_came_before() -> None:
    workload = Workload(sessions=6, turns=4, open_sessions=3, system_tokens=40)
    sessions: dict[int, list[tuple[int, list[int]]]] = {}
    for length, ids in workload:
        assert len(ids) == length // 16
        assert list(ids[:2]) == [0, 1]  # the full blocks of the system prompt
        sessions.setdefault(ids[2], []).append((length, list(ids)))
    assert [len(turns) for turns in sessions.values()] == [4] * 6
    for turns in sessions.values():
        for (length, ids), (next_length, next_ids) in pairwise(turns):
            assert next_length > length
            assert next_ids[: len(ids)] == ids


def test_sessions_share_nothing_but_the_system_prompt() -> None:
    last_of_session = {ids[2]: set(ids[2:]) for _, ids in Workload(sessions=9)}
    # The system prompt fills 64 blocks.
    own = [ids - set(range(64)) for ids in last_of_session.values()]
    assert sum(map(len, own)) == len(set().union(*own))


def test_no_more_sessions_than_may_be_open_take_turns() -> None:
    workload = Workload(sessions=4, turns=2, open_sessions=1, system_tokens=0)
    first_ids = [ids[0] for _, ids in workload]
    assert first_ids == sorted(first_ids)


def test_progress_counts_requests() -> None:
    workload = Workload(sessions=3, turns=2)
    assert workload.total == 6
    assert [workload.done for _ in workload] == [1, 2, 3, 4, 5, 6]


def test_replies_and_system_prompt_may_be_empty() -> None:
    rows = Workload(sessions=1, turns=3, user_tokens=1, system_tokens=0, reply_tokens=0)
    assert list(rows) == [(1, []), (2, []), (3, [])]


@pytest.mark.parametrize(
    ("name", "least"),
    [*((name, least) for name, (least, _) in SHAPE.items()), ("block_size", 1)],
)
def test_an_option_below_its_least_value_is_named(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, not -1"):
        Workload(**{name: -1})
