"""The C surface: engines compiled against the installed package, and nothing else."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from compiled import build
from engines import schedule

import kvcache
from kvcache import BlockPool, BlockStateError
from kvcache.hashing import Keyed
from kvcache.manager import FullAttention, KVCacheManager

ENGINES = Path(__file__).parent / "engines"


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "scheduler.pyx").read_text()
    return build(tmp_path_factory.mktemp("scheduler"), "scheduler.pyx", text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "engine.cpp").read_text()
    return build(tmp_path_factory.mktemp("engine"), "engine.cpp", text)


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    text = (ENGINES / "threads.cpp").read_text()
    return build(tmp_path_factory.mktemp("threads"), "threads.cpp", text)


@pytest.mark.parametrize(("num_blocks", "most_running"), [(4_000, 64), (600, 64)])
def test_engines_in_cython_and_cpp_get_the_block_ids_that_python_gets(
    scheduler: ModuleType, engine: ModuleType, num_blocks: int, most_running: int
) -> None:
    work = schedule.make_workload(1_000, seed=num_blocks)
    managers = [schedule.make_manager(num_blocks, 1_000) for _ in range(3)]
    expected, preemptions = schedule.run(managers[0], work, most_running)
    log = np.zeros(len(expected) + 10_000, np.int32)
    num_logged, preempted = scheduler.run(
        managers[1], schedule.BLOCK_SIZE, *work, most_running, log
    )
    assert log[:num_logged].tolist() == expected
    cpp_log, cpp_preempted = engine.run(
        managers[2], schedule.BLOCK_SIZE, *work, most_running
    )
    assert np.frombuffer(cpp_log, np.int32).tolist() == expected
    assert preempted == cpp_preempted == preemptions
    assert (preemptions > 50) == (num_blocks == 600)
    for manager in managers:
        manager.check()
        assert manager.num_requests == 0


def test_a_pool_is_driven_from_cpp(engine: ModuleType) -> None:
    pool, keyed = BlockPool(100, True, 16), Keyed()
    tokens = np.arange(64 * 16, dtype=np.int32)
    said, digests = engine.drive_pool(pool, keyed, tokens, 16)
    expected = keyed.hash_blocks(tokens, 16)
    assert np.frombuffer(digests, np.uint8).tolist() == expected.ravel().tolist()
    # get, cache, cache again, match, same ids, other group, bad length, touch, ref_cnt,
    # free, free, free too often, a foreign id, evict, match, more than there are, free
    assert said == [0, -1, 0, 64, 1, 0, -1, -1, 2, -1, -1, 0, 0, -1, 0, -1, 99]
    pool.check()
    assert pool.match_prefix_ids(expected[1:], 3).tolist() == list(range(2, 65))


def test_a_managers_slots_and_changes_are_read_from_cpp(engine: ModuleType) -> None:
    manager = schedule.make_manager(100, 8)
    rows = np.array([manager.add_request(num_tokens=n) for n in (20, 33)], np.int32)
    for row, n in zip(rows.tolist(), (20, 33), strict=True):
        manager.allocate_slots(row, n)
    news = np.array([20, 3], np.int32)
    num_free, mapped, slots, changed = engine.read_manager(manager, rows, news, 0)
    assert num_free == manager.block_pool.get_num_free_blocks()
    expected = manager.slot_mapping(rows, news)
    assert np.frombuffer(slots, np.int64).tolist() == expected.tolist()
    assert mapped == 23
    assert np.frombuffer(changed, np.int32).tolist() == rows.tolist()
    assert manager.take_changed_rows().tolist() == []
    assert engine.read_manager(manager, rows, news + 99, 0)[1] == -1
    assert engine.read_manager(manager, rows, news, 1)[1] == -1


def test_a_block_in_c_lies_as_in_numpy(engine: ModuleType) -> None:
    size, offsets = engine.block_layout()
    dtype = BlockPool(2, True, 16).blocks.as_array().dtype
    assert size == dtype.itemsize
    assert offsets == {
        name: field[1]
        for name, field in dtype.fields.items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("function", "bad", "match"),
    [
        ("run", (None, 16, b"", b"", b"", b"", 1), "a KVCacheManager, got None"),
        ("drive_pool", (3, Keyed(), b"", 16), "a BlockPool, got 3"),
        ("drive_pool", (BlockPool(2, True, 16), 4, b"", 16), "a Keyed, got 4"),
    ],
)
def test_a_handle_of_another_object_is_refused(
    engine: ModuleType, function: str, bad: tuple[object, ...], match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        getattr(engine, function)(*bad)


BAD_ARGUMENT, BAD_STATE = -1, -2
DIGESTS = bytes(range(64))
RUNNING, WAITING, NOBODY = 0, 1, 2
"""Rows of the manager below."""


def make_manager(**options: Any) -> KVCacheManager:
    """12 tokens of a request run, 8 of another one wait; one more may come."""
    manager = KVCacheManager(
        9, [FullAttention(4)], max_model_len=20, max_num_requests=3, **options
    )
    for numbers in ((1, 2, 3), (1, 4)):
        hashes = [bytes([number]) * 16 for number in numbers]
        manager.add_request(num_tokens=4 * len(numbers), hashes=hashes)
    manager.allocate_slots(RUNNING, 12)
    return manager


def all_of(manager: KVCacheManager) -> list[object]:
    rows = range(manager.num_requests)
    return [
        manager.block_pool.blocks.as_array().tobytes(),
        [manager.block_ids(row).tolist() for row in rows],
        [(manager.num_tokens(row), manager.num_computed_tokens(row)) for row in rows],
    ]


REFUSED: dict[str, tuple[Callable[[Any, KVCacheManager], int], int]] = {
    "a request of no token": (
        lambda c, m: c.add_request(m, 0, DIGESTS, 0, 16),
        BAD_ARGUMENT,
    ),
    "a request that is too long": (
        lambda c, m: c.add_request(m, 21, DIGESTS, 0, 16),
        BAD_ARGUMENT,
    ),
    "digests of no byte": (
        lambda c, m: c.add_request(m, 8, DIGESTS, 2, 0),
        BAD_ARGUMENT,
    ),
    "digests of another length": (
        lambda c, m: c.add_request(m, 8, DIGESTS, 2, 32),
        BAD_ARGUMENT,
    ),
    "more digests than blocks": (
        lambda c, m: c.add_request(m, 7, DIGESTS, 2, 16),
        BAD_ARGUMENT,
    ),
    "fewer digests than none": (
        lambda c, m: c.add_request(m, 8, DIGESTS, -1, 16),
        BAD_ARGUMENT,
    ),
    "tokens for nobody": (lambda c, m: c.append(m, NOBODY, 1), BAD_ARGUMENT),
    "fewer tokens than none": (lambda c, m: c.append(m, RUNNING, -1), BAD_ARGUMENT),
    "tokens for a request of Python's": (
        lambda c, m: c.append(m, RUNNING, 1),
        BAD_STATE,
    ),
    "a match for nobody": (lambda c, m: c.match(m, NOBODY), BAD_ARGUMENT),
    "a match for one that runs": (lambda c, m: c.match(m, RUNNING), BAD_STATE),
    "slots for nobody": (lambda c, m: c.allocate_slots(m, NOBODY, 1), BAD_ARGUMENT),
    "no slots": (lambda c, m: c.allocate_slots(m, WAITING), BAD_ARGUMENT),
    "fewer slots than none": (
        lambda c, m: c.allocate_slots(m, WAITING, -1),
        BAD_ARGUMENT,
    ),
    "too many slots": (lambda c, m: c.allocate_slots(m, WAITING, 21), BAD_ARGUMENT),
    "a negative lookahead": (
        lambda c, m: c.allocate_slots(m, WAITING, 1, num_lookahead=-1),
        BAD_ARGUMENT,
    ),
    "negative external tokens": (
        lambda c, m: c.allocate_slots(m, WAITING, 1, num_external=-1),
        BAD_ARGUMENT,
    ),
    "a long encoder output": (
        lambda c, m: c.allocate_slots(m, WAITING, 1, num_encoder=21),
        BAD_ARGUMENT,
    ),
    "fewer reserved than none": (
        lambda c, m: c.allocate_slots(m, WAITING, 1, reserved_blocks=-1),
        BAD_ARGUMENT,
    ),
    "external tokens for one that runs": (
        lambda c, m: c.allocate_slots(m, RUNNING, 1, num_external=1),
        BAD_ARGUMENT,
    ),
    "a step of fewer than none": (
        lambda c, m: c.allocate_step(m, RUNNING, 1, n=-1),
        BAD_ARGUMENT,
    ),
    "a step with a negative lookahead": (
        lambda c, m: c.allocate_step(m, RUNNING, 1, num_lookahead=-1),
        BAD_ARGUMENT,
    ),
    "a step of nobody": (lambda c, m: c.allocate_step(m, NOBODY, 1), BAD_ARGUMENT),
    "a step of no token": (lambda c, m: c.allocate_step(m, RUNNING, 0), BAD_ARGUMENT),
    "nobody preempted": (lambda c, m: c.preempt(m, NOBODY), BAD_ARGUMENT),
    "preempted while it waits": (lambda c, m: c.preempt(m, WAITING), BAD_STATE),
    "nobody freed": (lambda c, m: c.free(m, NOBODY), BAD_ARGUMENT),
    "blocks of nobody": (lambda c, m: c.has_block_ids(m, NOBODY, 0), False),
    "blocks in no group": (lambda c, m: c.has_block_ids(m, RUNNING, 1), False),
    "a mapping of nobody": (lambda c, m: c.slot_mapping(m, NOBODY, 1), BAD_ARGUMENT),
    "a mapping of too many": (
        lambda c, m: c.slot_mapping(m, RUNNING, 13),
        BAD_ARGUMENT,
    ),
    "a mapping in no group": (
        lambda c, m: c.slot_mapping(m, RUNNING, 1, 1),
        BAD_ARGUMENT,
    ),
    "a digest of no byte cached": (lambda c, m: c.cache(m.block_pool, 8, b"", 0), 1),
    "another pool's block cached": (
        lambda c, m: c.cache(m.block_pool, 9, DIGESTS, 16),
        0,
    ),
    "another pool's block evicted": (lambda c, m: c.evict(m.block_pool, 9), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_c_and_changes_nothing(
    probe: ModuleType, name: str
) -> None:
    manager = make_manager()
    before = all_of(manager)
    call, code = REFUSED[name]
    assert call(probe, manager) == code
    assert all_of(manager) == before
    manager.check()


def test_a_request_made_in_c_gets_no_more_tokens_than_there_may_be(
    probe: ModuleType,
) -> None:
    manager = make_manager()
    row = probe.add_request(manager, 16, DIGESTS, 4, 16)
    before = all_of(manager)
    assert probe.append(manager, row, 5) == BAD_ARGUMENT
    assert probe.append(manager, row, 4, DIGESTS, 2) == BAD_ARGUMENT
    assert all_of(manager) == before
    assert probe.append(manager, row, 4, DIGESTS, 1) == 0
    assert probe.add_request(manager, 1, DIGESTS, 0, 16) == BAD_STATE  # no row is left


@pytest.mark.parametrize("num_blocks", [10, 40_000])
def test_a_block_is_cached_in_c_in_a_pool_of_any_size(
    probe: ModuleType, num_blocks: int
) -> None:
    pool = BlockPool(num_blocks, True, 16)
    [block] = pool.get_new_block_ids(1).tolist()
    assert probe.cache(pool, block, b"d" * 16, 16) == -1  # none is refused
    assert pool.match_prefix_ids([b"d" * 16]).tolist() == [block]
    pool.check()


def test_a_request_made_in_c_has_no_content_that_python_could_change(
    probe: ModuleType,
) -> None:
    manager = make_manager()
    row = probe.add_request(manager, 16, DIGESTS, 1, 16)
    before = all_of(manager)
    for call in (
        lambda: manager.append(row, [1]),
        lambda: manager.append_step([row], [1]),
        lambda: manager.truncate(row, 8),
    ):
        with pytest.raises(BlockStateError, match="made by compiled code"):
            call()
    assert all_of(manager) == before


def test_a_row_looks_prefixes_up_whatever_its_last_request_did(
    probe: ModuleType,
) -> None:
    manager = make_manager()
    row = manager.add_request(range(8), skip_reading_prefix_cache=True)
    manager.free(row)
    digests = b"".join(bytes([number]) * 16 for number in (1, 2))
    assert probe.add_request(manager, 12, digests, 2, 16) == row
    assert probe.match(manager, row) == 8


def test_hits_that_are_gone_are_not_taken_in_c(probe: ModuleType) -> None:
    manager = make_manager()
    assert probe.match(manager, WAITING) == 4
    manager.block_pool.evict_blocks(manager.block_ids(RUNNING))
    before = all_of(manager)
    assert probe.allocate_slots(manager, WAITING, 4) == BAD_STATE
    assert all_of(manager) == before


def test_a_hook_cannot_call_its_manager_in_c(probe: ModuleType) -> None:
    codes: list[int] = []
    calls: list[Callable[[], int]] = []

    class Collector:
        def on_block_allocated(self, block: object) -> None:
            codes.extend(call() for call in calls)

        on_block_evicted = on_block_accessed = reset = lambda *arguments: None

    manager = make_manager(metrics_collector=Collector())
    calls += [
        lambda: probe.add_request(manager, 1, DIGESTS, 0, 16),
        lambda: probe.append(manager, RUNNING, 1),
        lambda: probe.match(manager, WAITING),
        lambda: probe.allocate_slots(manager, WAITING, 1),
        lambda: probe.allocate_step(manager, RUNNING, 1),
        lambda: probe.preempt(manager, RUNNING),
        lambda: probe.free(manager, RUNNING),
    ]
    manager.append(RUNNING, num_tokens=1)
    manager.allocate_slots(RUNNING, 1)
    assert codes == [BAD_STATE] * len(calls)
    manager.check()


@pytest.mark.parametrize(("name", "value"), [("MAJOR", 2), ("MINOR", 1)])
def test_a_module_compiled_for_another_version_is_not_imported(
    tmp_path: Path, name: str, value: int
) -> None:
    header = (Path(kvcache.get_include()) / "kvcache.h").read_text()
    line = re.compile(rf"(?<=#define KVC_API_{name} )\d+")
    (tmp_path / "other.h").write_text(line.sub(str(value), header))
    text = (ENGINES / "engine.cpp").read_text().replace('"kvcache.h"', '"other.h"')
    with pytest.raises(ImportError, match=r"compiled for version .* installed is 1.0"):
        build(tmp_path, "engine.cpp", text)


@pytest.mark.parametrize("num_managers", [1, 4])
def test_threads_without_the_gil_share_a_manager_under_a_lock_or_have_their_own(
    threads: ModuleType, num_managers: int
) -> None:
    managers = [schedule.make_manager(300, 256) for _ in range(num_managers)]
    each = managers * (4 // num_managers)
    served, refused = threads.run(each, Keyed(), 5_000, False)
    assert served > 10_000
    assert refused > 1_000
    for manager in managers:
        manager.check()
        assert manager.num_requests == 0
        assert manager.block_pool.get_num_free_blocks() == 299


def test_every_function_of_the_capsule_is_called_by_an_engine_here() -> None:
    header = (Path(kvcache.get_include()) / "kvcache.h").read_text()
    names = re.findall(r"\(\*(\w+)\)\(", header)
    text = (ENGINES / "engine.cpp").read_text()
    missing = [name for name in names if f"kvc->{name}(" not in text]
    assert len(names) == 26
    assert missing == []


def test_the_package_config_names_this_version_and_the_header() -> None:
    path = Path(kvcache.__file__).parent / "lib" / "pkgconfig" / "kvcache.pc"
    text = path.read_text()
    assert f"Version: {kvcache.__version__}\n" in text
    assert "includedir=${prefix}/include\n" in text
    prefix = path.parents[2]
    assert (prefix / "include" / "kvcache.h").is_file()
    assert Path(kvcache.get_include()) == prefix / "include"
