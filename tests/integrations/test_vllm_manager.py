"""vLLM's methods above the pool in compiled code, with a stand-in for vLLM's managers.

Beside vLLM's own they are in tests/manager/compare_with_vllm.py --plugin.
"""

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_in import Blocks, Spec, find_longest_cache_hit, held

import kvcache
from kvcache.integrations import vllm as plugin

# -- hits of full attention --------------------------------------------------------


def find(
    pool: Any, hashes: Any, *, most: int = 100, eagle: bool = False, **to: Any
) -> Any:
    manager = held("vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager")
    options = {"kv_cache_spec": Spec(), "alignment_tokens": 4, **to}
    return manager.find_longest_cache_hit(
        hashes, most, [0, 1], pool, drop_eagle_block=eagle, **options
    )


@pytest.mark.usefixtures("vllm")
def test_hits_are_found_in_all_groups_at_once() -> None:
    plugin.register()
    pool = kvcache.BlockPool(20, True, 4)
    hashes = [bytes([i]) * 16 for i in range(5)]
    ids = pool.get_new_block_ids(7)
    pool.cache_block_ids(ids[:4], hashes[:4], 0)
    pool.cache_block_ids(ids[4:], hashes[:3], 1)
    blocks, length = find(pool, hashes)
    assert [[block.block_id for block in group] for group in blocks] == [
        ids[:3].tolist(),
        ids[4:].tolist(),
    ]
    assert length == 12
    assert find(pool, hashes, most=11)[1] == 8
    blocks, length = find(pool, hashes, eagle=True)
    assert (len(blocks[0]), len(blocks[1]), length) == (2, 2, 8)
    assert find(pool, [b"?" * 16], eagle=True) == (([], []), 0)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "other",
    [
        {"alignment_tokens": 2},
        {"kv_cache_spec": Spec(8)},
        {"dcp_world_size": 2},
        {"hashes": (b"?",)},
        {"pool": object()},
    ],
)
def test_hits_of_other_sizes_ranks_lists_and_pools_are_vllms(
    other: dict[str, Any],
) -> None:
    plugin.register()
    pool = other.pop("pool", kvcache.BlockPool(20, True, 4))
    assert find(pool, other.pop("hashes", []), **other) == "vLLM's own"


@pytest.mark.usefixtures("vllm")
def test_hits_are_vllms_again_afterwards() -> None:
    plugin.register()
    plugin.unregister()
    assert find(kvcache.BlockPool(20, True, 4), []) == "vLLM's own"


# -- hits of a window --------------------------------------------------------------


def find_in_window(
    pool: Any,
    hashes: Any,
    *,
    window: int = 9,
    most: int = 20,
    eagle: bool = False,
    groups: tuple[int, ...] = (0,),
    **to: Any,
) -> Any:
    manager = held("vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager")
    spec = held("vllm.v1.kv_cache_interface.SlidingWindowSpec")()
    spec.block_size, spec.sliding_window = 4, window
    options = {"kv_cache_spec": spec, "alignment_tokens": 4, **to}
    return manager.find_longest_cache_hit(
        hashes, most, list(groups), pool, drop_eagle_block=eagle, **options
    )


HASHES = [bytes([i]) * 16 for i in range(10)]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("cached", "options", "hits"),
    [
        ([0, 1, 2, 3, 4], {}, [0, 0, 0, 4, 5]),
        ([0, 1, 2, 3, 4], {"most": 19}, [0, 0, 3, 4]),
        ([0, 1, 3], {}, [1, 2]),  # 3 is alone
        ([0], {}, [1]),  # less than a window, but from the start on
        ([1, 3], {}, []),
        ([0, 1, 2, 3, 4], {"window": 1}, [0, 0, 0, 0, 5]),
        ([0, 1, 2, 3, 4], {"eagle": True}, [0, 0, 3, 4]),
        ([0, 1, 3, 4], {"eagle": True}, [1]),
        ([0, 1, 2, 3, 4], {"alignment_tokens": 8}, [0, 0, 3, 4]),
        ([0, 1, 2], {"alignment_tokens": 8, "window": 20}, [1, 2]),
        ([0, 1, 2], {"alignment_tokens": 8, "window": 20, "eagle": True}, []),
        (range(5), {"alignment_tokens": 8, "window": 5, "eagle": True}, [0, 0, 0, 4]),
    ],
)
def test_a_windows_last_hit_is_found(
    cached: Any, options: dict[str, Any], hits: list[int]
) -> None:
    plugin.register()
    pool = kvcache.BlockPool(20, True, 4)
    pool.get_new_block_ids(5)
    numbers = list(cached)
    pool.cache_block_ids([1 + i for i in numbers], [HASHES[i] for i in numbers])
    [blocks], length = find_in_window(pool, HASHES, **options)
    assert ([block.block_id for block in blocks], length) == (hits, 4 * len(hits))


@pytest.mark.usefixtures("vllm")
def test_a_hit_of_windows_is_one_in_all_of_their_groups() -> None:
    plugin.register()
    pool = kvcache.BlockPool(20, True, 4)
    pool.get_new_block_ids(5)
    pool.cache_block_ids([1, 2, 3], HASHES[:3], 0)
    pool.cache_block_ids([4, 5], HASHES[:2], 1)
    blocks, length = find_in_window(pool, HASHES, groups=(0, 1))
    assert [[block.block_id for block in group] for group in blocks] == [[1, 2], [4, 5]]
    assert length == 8


@pytest.mark.usefixtures("vllm")
def test_hits_are_found_by_the_last_of_several_hashes_of_a_block() -> None:
    plugin.register()
    pool = kvcache.BlockPool(20, True, 2)
    pool.cache_block_ids(pool.get_new_block_ids(2), [HASHES[1], HASHES[3]])
    pool.cache_block_ids(pool.get_new_block_ids(2), [HASHES[1], HASHES[3]], 1)
    [blocks], length = find_in_window(pool, HASHES)
    assert ([block.block_id for block in blocks], length) == ([1, 2], 8)
    full, length = find(pool, HASHES)
    assert [[block.block_id for block in group] for group in full] == [[1, 2], [3, 4]]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_spec": Spec()},
        {"dcp_world_size": 2},
        {"pcp_world_size": 2},
        {"hashes": (b"?",)},
        {"pool": object()},
    ],
)
def test_hits_of_a_window_of_other_specs_ranks_lists_and_pools_are_vllms(
    other: dict[str, Any],
) -> None:
    plugin.register()
    pool = other.pop("pool", kvcache.BlockPool(20, True, 4))
    assert find_in_window(pool, other.pop("hashes", []), **other) == "vLLM's own"


# -- a manager of one group --------------------------------------------------------


class Group:
    """vLLM's manager of a group of blocks of 4."""

    find_longest_cache_hit = classmethod(find_longest_cache_hit)

    def __init__(self, pool: Any) -> None:
        self.block_pool, self._null_block = pool, pool.null_block
        self.block_size = self.cache_hit_alignment_tokens = 4
        self.kv_cache_group_id = 0
        self.kv_cache_spec = Spec()
        self.enable_caching, self.use_eagle = True, False
        self.req_to_blocks: Any = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        self._partial_hit_reqs: dict[str, Any] = {}
        self.max_admission_blocks_per_request = None
        self._record_new_block_ids = True
        self.new_block_ids: list[int] = []


class Window(Group):
    find_longest_cache_hit = classmethod(find_longest_cache_hit)
    sliding_window, extra_retained_tokens = 5, 0


@pytest.fixture
def registered(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    single = sys.modules["vllm.v1.core.single_type_kv_cache_manager"]
    monkeypatch.setattr(single, "FullAttentionManager", Group)
    monkeypatch.setattr(single, "SlidingWindowManager", Window)
    assert "KVCacheManager.allocate_slots" in plugin.register()


def make(
    kind: type[Group] = Group, num_blocks: int = 12, hash_block_size: int = 4
) -> Any:
    """A manager as vLLM's, with one group."""
    pool = kvcache.BlockPool(num_blocks, True, hash_block_size)
    manager = held("vllm.v1.core.kv_cache_manager.KVCacheManager")()
    coordinator = held("vllm.v1.core.kv_cache_coordinator.UnitaryKVCacheCoordinator")()
    coordinator.single_type_managers = (kind(pool),)
    coordinator.num_reprefillable_tokens = 0
    coordinator.retention_interval = None
    coordinator.block_size = 4
    coordinator.dcp_world_size = coordinator.pcp_world_size = 1
    manager.coordinator, manager.block_pool = coordinator, pool
    manager.max_model_len, manager.watermark_blocks = 100, 2
    manager.enable_caching, manager.enable_kv_cache_events = True, False
    manager.empty_kv_cache_blocks = Blocks(((),))
    return manager


def group_of(manager: Any) -> Any:
    return manager.coordinator.single_type_managers[0]


def make_request(num_tokens: int, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "request_id": "a",
            "num_tokens": num_tokens,
            "num_computed_tokens": 0,
            "num_in_flight_tokens": 0,
            "block_hashes": [bytes([i]) * 16 for i in range(num_tokens // 4)],
            "status": "waiting",
            "skip_reading_prefix_cache": False,
            **changes,
        }
    )


def running(manager: Any, num_tokens: int, computed: int) -> SimpleNamespace:
    """A request with slots for `computed` tokens."""
    request = make_request(num_tokens)
    assert manager.allocate_slots(request, computed) is not None
    request.num_computed_tokens, request.status = computed, "running"
    return request


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.usefixtures("registered")
def test_a_request_gets_blocks_and_its_full_ones_are_cached() -> None:
    manager = make()
    request = make_request(10)
    blocks = manager.allocate_slots(request, 10)
    assert [ids(group) for group in blocks.blocks] == [[1, 2, 3]]
    group = group_of(manager)
    assert (ids(group.req_to_blocks["a"]), group.new_block_ids) == ([1, 2, 3],) * 2
    assert group.num_cached_block == {"a": 2}
    assert len(manager.block_pool.cached_block_hash_to_block) == 2


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("new", "lookahead", "taken"),
    [(1, 0, []), (2, 0, []), (3, 0, [4]), (1, 2, [4]), (8, 0, [4, 5])],
)
def test_a_running_request_gets_what_it_lacks(
    new: int, lookahead: int, taken: list[int]
) -> None:
    manager = make()
    request = running(manager, 30, 10)
    blocks = manager.allocate_slots(request, new, num_lookahead_tokens=lookahead)
    assert ids(blocks.blocks[0]) == taken
    assert (blocks is manager.empty_kv_cache_blocks) == (taken == [])
    assert group_of(manager).num_cached_block["a"] == (10 + new) // 4


@pytest.mark.usefixtures("registered")
def test_what_does_not_fit_changes_nothing() -> None:
    manager = make(num_blocks=6)
    assert manager.allocate_slots(make_request(24), 24) is None
    assert (
        manager.allocate_slots(make_request(24), 4, full_sequence_must_fit=True) is None
    )
    assert manager.allocate_slots(make_request(20), 20) is None  # two stay free
    assert manager.block_pool.get_num_free_blocks() == 5
    given = manager.allocate_slots(make_request(20), 20, has_scheduled_reqs=False)
    assert ids(given.blocks[0]) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("registered")
def test_hits_are_shared_and_given_back() -> None:
    manager = make()
    first = running(manager, 12, 12)
    second = make_request(13, request_id="b")
    hits, length, boundary = manager.get_computed_blocks(second)
    assert ([ids(group) for group in hits.blocks], length, boundary) == (
        [[1, 2, 3]],
        12,
        0,
    )
    blocks = manager.allocate_slots(second, 1, length, hits)
    assert ids(blocks.blocks[0]) == [4]
    assert manager.block_pool.blocks[3].ref_cnt == 2
    for request in (first, second):
        manager.coordinator.free(request.request_id)
    assert manager.block_pool.get_num_free_blocks() == 11
    assert (
        dict(group_of(manager).req_to_blocks)
        == group_of(manager).num_cached_block
        == {}
    )


@pytest.mark.usefixtures("registered")
def test_nothing_is_cached_as_long_as_that_is_delayed() -> None:
    manager = make()
    request = make_request(8)
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    manager.coordinator.cache_blocks(request, 8)
    assert len(manager.block_pool.cached_block_hash_to_block) == 2


@pytest.mark.usefixtures("registered")
def test_a_window_gives_back_what_it_has_passed() -> None:
    manager = make(Window)
    request = running(manager, 30, 10)
    assert manager.allocate_slots(request, 1).blocks == ((),)
    assert ids(group_of(manager).req_to_blocks["a"]) == [0, 2, 3]
    request.num_computed_tokens, request.num_in_flight_tokens = 12, 2
    manager.allocate_slots(request, 1)
    assert ids(group_of(manager).req_to_blocks["a"]) == [0, 2, 3, 4]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ((0,), {}),
        ((-1,), {}),
        ((True,), {}),
        ((1.0,), {}),
        ((1,), {"num_lookahead_tokens": -1}),
        ((1,), {"num_external_computed_tokens": -4}),
        ((1,), {"num_encoder_tokens": 3}),
        ((1,), {"new_computed_blocks": Blocks((iter(()),))}),
    ],
)
def test_what_is_asked_in_no_known_way_is_vllms(args: Any, changes: Any) -> None:
    manager = make()
    request = running(manager, 30, 10)
    before = manager.block_pool.get_num_free_blocks()
    assert manager.allocate_slots(request, *args, **changes) == "vLLM's own"
    assert manager.block_pool.get_num_free_blocks() == before


class Other(Group):
    find_longest_cache_hit = classmethod(find_longest_cache_hit)


def derive(manager: Any) -> None:
    kind = type(manager)
    manager.__class__ = type("Derived", (kind,), {})


def derive_coordinator(manager: Any) -> None:
    kind = type(manager.coordinator)
    manager.coordinator.__class__ = type("Derived", (kind,), {})


def foreign_pool(manager: Any) -> None:
    group_of(manager).block_pool = object()


def partial_hit(manager: Any) -> None:
    group_of(manager)._partial_hit_reqs["a"] = (0, None)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (Other, None, "a Other, whose rules are not known"),
        (Group, derive, "derived manager"),
        (Group, derive_coordinator, "a Derived, whose rules are not known"),
        (Group, foreign_pool, "a object, which is not kvcache's"),
        (Group, partial_hit, "hits that end inside a block"),
    ],
)
def test_what_is_not_known_is_vllms_and_why_is_logged_once(
    kind: type[Group], change: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.plugins.kvcache")
    manager = make(kind)
    if change:
        change(manager)
    request = make_request(10)
    assert manager.allocate_slots(request, 1) == "vLLM's own"
    assert manager.allocate_slots(request, 1) == "vLLM's own"
    assert dict(group_of(manager).req_to_blocks) == {}
    [record] = caplog.records
    assert "vLLM's own allocate_slots" in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.usefixtures("registered")
def test_what_is_cached_and_freed_of_a_kind_that_is_not_known_is_vllms() -> None:
    manager = make(Other)
    manager.coordinator.cache_blocks(make_request(8), 8)
    assert manager.coordinator.left_to_vllm == "cache_blocks to 8"
    manager.coordinator.free("a")
    assert manager.coordinator.left_to_vllm == "free of a"


@pytest.mark.usefixtures("registered")
def test_a_running_request_of_a_kind_that_is_not_known_is_vllms() -> None:
    manager = make(Other)
    request = make_request(30, status="running", num_computed_tokens=8)
    assert manager.allocate_slots(request, 1) == "vLLM's own"


@pytest.mark.usefixtures("registered")
def test_a_running_request_whose_hits_ended_inside_a_block_is_vllms() -> None:
    manager = make()
    request = running(manager, 30, 9)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    partial_hit(manager)
    assert manager.allocate_slots(request, 1) == "vLLM's own"


@pytest.mark.usefixtures("registered")
def test_a_group_that_is_not_cached_is_left_out() -> None:
    manager = make()
    group_of(manager).enable_caching = False
    request = make_request(8)
    assert ids(manager.allocate_slots(request, 8).blocks[0]) == [1, 2]
    assert len(manager.block_pool.cached_block_hash_to_block) == 0


@pytest.mark.usefixtures("registered")
def test_of_several_groups_what_all_can_hit_is_cached() -> None:
    manager = make()
    kind = held("vllm.v1.core.kv_cache_coordinator.HybridKVCacheCoordinator")
    manager.coordinator.__class__ = kind
    manager.coordinator.get_num_cacheable_tokens = lambda computed, i: computed - 4
    manager.allocate_slots(make_request(12), 12)
    assert group_of(manager).num_cached_block == {"a": 2}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("alignment", "interval"), [(8, None), (6, None), (4, 100)])
def test_a_window_of_which_not_every_block_can_be_hit_is_cached_by_vllm(
    alignment: int, interval: int | None
) -> None:
    manager = make(Window)
    group_of(manager).cache_hit_alignment_tokens = alignment
    manager.coordinator.retention_interval = interval
    manager.allocate_slots(make_request(8), 8)
    assert manager.coordinator.left_to_vllm == "cache_blocks to 8"
    assert len(manager.block_pool.cached_block_hash_to_block) == 0


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("given", [(), (8,)])
@pytest.mark.parametrize(
    "change",
    [
        derive,
        derive_coordinator,
        lambda manager: setattr(manager, "enable_caching", False),
        lambda manager: setattr(manager, "enable_kv_cache_events", True),
    ],
)
def test_hits_of_a_manager_that_is_not_known_are_vllms(
    change: Any, given: tuple[int, ...]
) -> None:
    manager = make()
    change(manager)
    assert manager.get_computed_blocks(make_request(9), *given) == "vLLM's own"


@pytest.mark.usefixtures("registered")
def test_hits_may_be_limited() -> None:
    manager = make()
    running(manager, 12, 12)
    _blocks, length, _ = manager.get_computed_blocks(make_request(12), 8)
    assert length == 8


class Finer(Group):
    """A group whose pool has two hashes a block."""

    find_longest_cache_hit = classmethod(find_longest_cache_hit)

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.tails: list[int] = []

    def _cache_partial_tail_block(self, request: Any, num_tokens: int) -> None:
        self.tails.append(num_tokens)


@pytest.mark.usefixtures("vllm")
def test_the_tail_of_a_block_of_several_hashes_is_looked_at_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = sys.modules["vllm.v1.core.single_type_kv_cache_manager"]
    monkeypatch.setattr(single, "FullAttentionManager", Finer)
    plugin.register()
    manager = make(Finer, hash_block_size=2)
    request = make_request(30, block_hashes=[bytes([i]) * 16 for i in range(15)])
    manager.allocate_slots(request, 9)
    for computed in (9, 10):
        request.num_computed_tokens, request.status = computed, "running"
        assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    group = group_of(manager)
    assert (group.num_cached_block, group.tails) == ({"a": 2}, [9, 10, 11])


@pytest.mark.usefixtures("registered")
def test_hits_for_a_request_that_has_blocks_are_vllms() -> None:
    manager = make()
    request = running(manager, 30, 8)
    hits = Blocks(([manager.block_pool.blocks[1]],))
    assert manager.allocate_slots(request, 1, 4, hits) == "vLLM's own"
    other = make_request(30, request_id="b")
    group_of(manager).req_to_blocks["b"] = [manager.block_pool.blocks[1]]
    found = manager.allocate_slots(other, 1, num_external_computed_tokens=4)
    assert found == "vLLM's own"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("unzeroed", "recorded"), [((), True), ((0,), False)])
def test_blocks_for_tokens_from_elsewhere_are_the_groups_to_take(
    unzeroed: tuple[int, ...], recorded: bool
) -> None:
    manager, calls = make(), []
    group = group_of(manager)

    def allocate(
        name: str, local: int, external: int, record_for_zeroing: bool
    ) -> None:
        calls.append((name, local, external, record_for_zeroing))
        group.req_to_blocks[name] += manager.block_pool.get_new_blocks(2)

    group.allocate_external_computed_blocks = allocate
    request = make_request(30)
    blocks = manager.allocate_slots(
        request, 1, num_external_computed_tokens=8, skip_zeroing_group_ids=unzeroed
    )
    assert calls == [("a", 0, 8, recorded)]
    assert ids(blocks.blocks[0]) == [3]
    assert group.num_cached_block == {"a": 2}


@pytest.mark.usefixtures("registered")
def test_a_group_may_admit_a_request_with_fewer_blocks() -> None:
    manager = make(num_blocks=6)
    options = {"full_sequence_must_fit": True, "has_scheduled_reqs": False}
    assert manager.allocate_slots(make_request(24), 4, **options) is None
    group_of(manager).max_admission_blocks_per_request = 5
    blocks = manager.allocate_slots(make_request(24), 4, **options)
    assert ids(blocks.blocks[0]) == [1]


@pytest.mark.usefixtures("registered")
def test_hits_that_a_window_has_passed_are_null_blocks() -> None:
    manager = make(Window)
    running(manager, 12, 12)
    manager.coordinator.free("a")
    request = make_request(13, request_id="b")
    hits = Blocks(([manager.block_pool.blocks[i] for i in (1, 2, 3)],))
    blocks = manager.allocate_slots(request, 1, 12, hits)
    assert ids(group_of(manager).req_to_blocks["b"]) == [
        0,
        0,
        3,
        *ids(blocks.blocks[0]),
    ]
    assert [manager.block_pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [0, 0, 1]
