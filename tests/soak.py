"""All state machines, for as many steps as one likes.

    python -m tests.soak --steps 1000000 --seed 1 [--machine NAME] [--jobs N]

A state machine drives kvcache beside a plain model with what hypothesis draws; each
test file with machines lists them in `MACHINES`. Where vLLM 0.8.5 can be imported, its
allocator is driven beside the same model; where vLLM 0.33 can, random requests go
through its manager and kvcache's. The steps are shared out evenly. What ran is printed;
of what failed also the smallest run that fails, and a line that repeats it.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES, STEPS = 100, 50  # of one round: runs, and the most steps of each
OPERATIONS = 5_000  # of one round beside vLLM's manager
Round = Callable[[int], int]  # takes a seed, gives the steps it ran


def load(path: Path) -> Any:
    """A test file as a module."""
    # In front: two folders have a module of the same name.
    sys.path[:0] = [str(path.parent), str(HERE)]
    return importlib.import_module(path.stem)


def drive(factory: Callable[[], Any], seed: int) -> int:
    """A round of a state machine."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    steps = 0

    def make() -> Any:
        nonlocal steps
        machine = factory()
        check = machine.check_invariants  # called at the start, and after each step
        steps -= 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            return check(*args, **kwargs)

        machine.check_invariants = counted
        return machine

    run_state_machine_as_test(
        hypothesis.seed(seed)(make),
        settings=hypothesis.settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    return steps


def beside_vllm(driver: Any, name: str, seed: int) -> int:
    """A round of random requests through both managers."""
    return len(driver.compare(name, OPERATIONS, seed)) // 4


def machines() -> Iterator[tuple[str, Round]]:
    """All there are, by name."""
    for path in sorted(HERE.rglob("test_*.py")):
        if "\nMACHINES" in path.read_text():
            for name, factory in load(path).MACHINES.items():
                yield name, partial(drive, factory)
    if importlib.util.find_spec("vllm"):
        try:
            importlib.import_module("vllm.v1.core.kv_cache_manager")
        except ImportError:
            return
        driver = load(HERE / "manager" / "test_manager_beside_vllm.py").driver
        for name in driver.CONFIGURATIONS:
            yield f"beside vLLM 0.33, {name}", partial(beside_vllm, driver, name)


def soak(name: str, steps: int, seed: int) -> tuple[str, bool]:
    """Run a machine, with a seed of its own for each round; what to print of it."""
    logging.disable(logging.WARNING)  # a reset that is refused
    run = dict(machines())[name]
    start, done, at = time.monotonic(), 0, seed
    while done < steps:
        try:
            done += run(at)
        except BaseException:
            again = f"python -m tests.soak --machine {name!r} --seed {at} --steps 1"
            return f"{name}: failed\n{traceback.format_exc()}\nagain: {again}", False
        at += 1
    spent = time.monotonic() - start
    return f"{name}: {done:,} steps, seeds {seed} to {at - 1}, {spent:.0f} s", True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=100_000, help="of all machines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--machine", action="append", help="only this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    known = [name for name, _ in machines()]
    names = options.machine or known
    if unknown := set(names) - set(known):
        parser.error(f"no machine {unknown}; there are: {', '.join(known)}")
    each = -(-options.steps // len(names))
    print(
        f"{len(names)} machines, {each:,} steps each, seed {options.seed}", flush=True
    )
    failed = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = [pool.submit(soak, name, each, options.seed) for name in names]
        for run in as_completed(runs):
            text, passed = run.result()
            print(text, flush=True)
            failed += not passed
    print(f"{len(names) - failed} machines passed, {failed} failed")
    raise SystemExit(failed > 0)


# A checkout holds the package uncompiled: the installed one is meant, unless it was
# compiled in place or PYTHONPATH says otherwise.
sys.path[:] = [each for each in sys.path if each not in ("", str(HERE.parent))] + [
    str(HERE.parent)
]

if __name__ == "__main__":
    main()
