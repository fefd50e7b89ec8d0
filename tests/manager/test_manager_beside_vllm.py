"""The manager does what vLLM 0.33's does, or what that did when it was recorded."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    """compare_with_vllm.py, whose name other folders use too."""
    spec = importlib.util.spec_from_file_location(name, HERE / "compare_with_vllm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


driver = load("compare_managers_with_vllm")
RECORDED = json.loads((HERE / "recorded.json").read_text())


def has_vllm() -> bool:
    try:
        return importlib.util.find_spec("vllm.v1.core.kv_cache_manager") is not None
    except ImportError:
        return False


@pytest.mark.skipif(
    not has_vllm(),
    reason="vLLM 0.33 is not importable here; recorded.json stands in for it. With it:"
    " python tests/manager/compare_with_vllm.py --operations 100000",
)
def test_every_block_id_hit_and_free_count_is_vllms() -> None:
    for name in driver.CONFIGURATIONS:
        assert len(driver.compare(name, operations=60, seed=7)) == 60 * 4


@pytest.mark.parametrize("name", driver.CONFIGURATIONS)
def test_every_block_id_hit_and_free_count_is_as_vllm_was_recorded(name: str) -> None:
    found, recorded = driver.replay(name), RECORDED[name]
    same = [found[i : i + 4] == recorded[i : i + 4] for i in range(0, len(found), 4)]
    assert all(same), f"operation {same.index(False) + 1} of {name!r} differs"
    assert len(found) == len(recorded) == 4 * driver.RECORDED_OPERATIONS


def test_the_recording_has_all_configurations() -> None:
    assert set(RECORDED) == {"vLLM 0.33, recorded by", *driver.CONFIGURATIONS}


def test_the_runs_meet_hits_refusals_preemptions_and_resets() -> None:
    met = set()
    for name, config in driver.CONFIGURATIONS.items():
        run = driver.Run(config, driver.seed_of(name, 1), [driver.Ours(config)])
        asked = run.ask

        def ask(what: str, question: Any, asked: Any = asked) -> Any:
            answer = asked(what, question)
            met.add((what.split("(")[0], bool(answer)))
            return answer

        run.ask = ask
        driver.run(run, name, 60, 1)
    assert met >= {
        ("match", True),
        ("match", False),
        ("allocate_slots", True),
        ("allocate_slots", False),
        ("reset_prefix_cache", True),
        ("reset_prefix_cache", False),
    }
    assert {"preempt", "free", "pop_block_ids", "allocate_step"} <= {w for w, _ in met}
