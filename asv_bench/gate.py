"""Compares what the `track_*` benchmarks give with accepted values.

    python asv_bench/gate.py             exit 1 where one is over 2 % worse
    python asv_bench/gate.py --accept    write what they give now to accepted.json

These are deterministic: bytes, hits, instructions. Run by a Python that has kvcache.
Instructions and imports depend on the tools that compiled and run it, which are
recorded beside them: with others they are printed, and not compared.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import pkgutil
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ACCEPTED = HERE / "accepted.json"
WORSE = 1.02
skipped: list[str] = []  # classes of benchmarks that cannot run here
OF_TOOLS = ("Instructions", "Import")
HIGHER_IS_BETTER = {"track_hit_rate", "track_hit_tokens"}


def tools() -> dict[str, str]:
    """What instructions depend on."""
    compiler = subprocess.run(
        ["cc", "--version"], capture_output=True, text=True, check=False
    )
    return {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cython": version("cython"),  # which compiled it, unless that was elsewhere
        "compiler": compiler.stdout.partition("\n")[0],
        "machine": platform.machine(),
    }


def tracked() -> Iterator[tuple[str, Any]]:
    """The benchmarks' names, with their parameters, and what they give."""
    sys.path.insert(0, str(HERE))
    package = importlib.import_module("benchmarks")
    for info in pkgutil.iter_modules(package.__path__, "benchmarks."):
        if not info.name.startswith("benchmarks.bench_"):
            continue
        for kind in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(kind) and kind.__module__ == info.name:
                yield from results(kind)


def results(kind: type) -> Iterator[tuple[str, Any]]:
    names = [name for name in vars(kind) if name.startswith("track_")]
    if not names:
        return
    try:
        cache = [kind().setup_cache()] if hasattr(kind, "setup_cache") else []
    except NotImplementedError as error:
        skipped.append(kind.__name__)
        print(f"skipped: {kind.__name__}: {error}")
        return
    for name in names:
        for chosen in itertools.product(*getattr(kind, "params", ())):
            if "plain" in chosen:  # the plain side of a comparison
                continue
            made = kind()
            given = [*cache, *chosen]
            if hasattr(made, "setup"):
                made.setup(*given)
            label = ", ".join(map(str, chosen))
            full = f"{kind.__name__}.{name.removeprefix('track_')}({label})"
            yield full, getattr(made, name)(*given)


def is_worse(name: str, now: float, accepted: float) -> bool:
    if any(f".{each.removeprefix('track_')}(" in name for each in HIGHER_IS_BETTER):
        return now * WORSE < accepted
    return now > accepted * WORSE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--accept", action="store_true", help="write accepted.json")
    options = parser.parse_args()
    now = dict(tracked())
    if options.accept:
        report = {"tools": tools(), "values": now}
        ACCEPTED.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{len(now)} values accepted")
        return
    accepted = json.loads(ACCEPTED.read_text())
    same_tools = accepted["tools"] == tools()
    if not same_tools:
        print(
            f"instructions and imports are not compared: they were accepted with"
            f" {accepted['tools']}, here are {tools()}"
        )
    failed = 0
    for name in sorted({*now, *accepted["values"]}):
        before, after = accepted["values"].get(name), now.get(name)
        kind = name.partition(".")[0]
        is_compared = same_tools or kind not in OF_TOOLS
        if kind in skipped:
            continue
        if before is None or after is None:
            verdict = "new: accept it" if before is None else "did not run"
            failed += is_compared
        else:
            worse = is_compared and is_worse(name, after, before)
            verdict = "WORSE" if worse else ""
            failed += worse
        print(f"{name:68} {shown(before):>12} {shown(after):>12}  {verdict}".rstrip())
    if failed:
        print(f"{failed} of these are not as accepted. If that is meant:")
        print(f"    python {Path(*Path(__file__).parts[-2:])} --accept")
    raise SystemExit(failed > 0)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1 else f"{value:,.1f}"


if __name__ == "__main__":
    main()
