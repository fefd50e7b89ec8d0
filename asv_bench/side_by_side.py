"""kvcache and stock vLLM in one process, in turns: ours, theirs, ratio, spread.

    python asv_bench/side_by_side.py [--rows SUBSTRING] [--quick] [--json FILE]
                                     [--plot FILE]

Run by a Python that has kvcache and vLLM 0.33. Only the ratios of one run mean
anything; the nanoseconds are there for scale. A row that kvcache loses is shown too.
Some rows are beside vLLM 0.8.5, SGLang, TokenSpeed or LMDeploy, where these are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace
from typing import Any, NoReturn

import plots
from lmdeploy_engine import import_lmdeploy
from measure import Pace, Result, Row, Unavailable, this_machine
from sglang_tree import import_sglang
from tokenspeed_engine import import_tokenspeed
from vllm_v0 import import_v0

RELEASE = "0.33"
FULL = Pace(rounds=41, long_rounds=5, samples=5, sample_ns=2_000_000)
QUICK = Pace(rounds=5, long_rounds=2, samples=5, sample_ns=1_000_000)
ROOMS = (
    "pool_rows",
    "hashing_rows",
    "manager_rows",
    "scheduler_rows",
    "allocator_rows",
    "peer_rows",
)
HEADS = ("work", "ours a block", "stock", "ratio", "spread", "floor", "reached")


def main() -> None:
    options = parse_arguments()
    stock = import_vllm(options.peers)
    kvcache, rooms = import_kvcache()
    sglang = there(import_sglang, options.peers)
    v0 = there(import_v0, options.peers)
    tokenspeed = there(import_tokenspeed, options.peers)
    lmdeploy = there(import_lmdeploy, options.peers)
    machine = this_machine() | {
        "kvcache": kvcache.__version__,
        "vllm": stock.version,
        "vllm_v0": version_of(v0),
        "sglang": version_of(sglang),
        "tokenspeed": version_of(tokenspeed),
        "lmdeploy": version_of(lmdeploy),
    }
    notes = " ".join(room.NOTES for room in vars(rooms).values())
    rows = chosen(
        rooms.pool_rows.pool_rows(stock.BlockPool)
        + rooms.hashing_rows.hashing_rows(stock, sglang)
        + rooms.manager_rows.manager_rows(stock)
        + rooms.scheduler_rows.scheduler_rows()
        + (rooms.allocator_rows.allocator_rows(v0) if v0 else [])
        + rooms.peer_rows.peer_rows(tokenspeed, lmdeploy),
        options.rows,
    )
    pace = QUICK if options.quick else FULL
    print(
        "{cpu}, {cores} cores, {python}, kvcache {kvcache}, vLLM {vllm} and {vllm_v0},"
        " SGLang {sglang}, TokenSpeed {tokenspeed}, LMDeploy {lmdeploy}".format(
            **machine
        )
    )
    if not stock.version.startswith(RELEASE):
        print(f"The floors were set against vLLM {RELEASE}.")
    print(fill(notes, 88))
    how = (
        f"Ratio: the median of {pace.rounds} rounds (of {pace.long_rounds} where a"
        " million blocks are made), in each of which ours and stock take turns; spread:"
        " 10th to 90th percentile, of our own times where there is no stock side."
    )
    print(fill(how, 88), end="\n\n")
    results = list(run(rows, pace))
    if options.json:
        report = {
            "machine": machine,
            "notes": notes,
            "rows": [result.as_dict() for result in results],
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plots.ratios(results, machine, options.plot)


def there(load: Callable[[Path], Any], peers: Path) -> Any:
    """What an engine's loader gives; None, and why, where it is not there."""
    try:
        return load(peers)
    except Unavailable as error:
        print(error)
        return None


def version_of(engine: Any) -> str:
    version: str = engine.version if engine else "none"
    return version


def parse_arguments() -> argparse.Namespace:
    default = os.environ.get("KVCACHE_PEERS") or "~/.cache/kvcache-peers"
    parser = argparse.ArgumentParser(
        description="Run kvcache and stock vLLM in turns and print the ratios."
    )
    parser.add_argument(
        "--rows", default="", metavar="SUBSTRING", help="only rows whose work has it"
    )
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    plots.add_option(parser)
    parser.add_argument(
        "--peers",
        default=default,
        metavar="DIR",
        type=lambda text: Path(text).expanduser(),
        help="where setup.sh put vLLM (default: $KVCACHE_PEERS, else %(default)s)",
    )
    options = parser.parse_args()
    plots.check(options.plot, parser)
    return options


def import_vllm(peers: Path) -> Any:
    """vLLM's classes, modules and version; exits with 2 if there is no vLLM.

    `BlockPool`, `utils` (kv_cache_utils), `hashing` and `version`; for its manager
    `KVCacheManager`, `Request`, `RequestStatus`, `SamplingParams`, `interface`
    (kv_cache_interface) and the `dtype` of a cache.
    """
    os.environ["KVCACHE_VLLM"] = "0"  # an installed kvcache must not take its place
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if Path(sys.prefix).resolve() == (peers / "venv").resolve():
        # The release to compare with is a source tree there, not the installed one.
        sys.path.insert(1, str(peers / "v1"))
    try:
        import torch
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils import hashing
        from vllm.v1 import kv_cache_interface, request
        from vllm.v1.core import block_pool, kv_cache_manager, kv_cache_utils
    except ImportError as error:
        stop(
            f"vLLM {RELEASE} cannot be imported here ({error}).",
            f"../shared/vllm/setup.sh {peers}",
            f"{peers}/venv/bin/pip install . cython",
            f"{peers}/venv/bin/python {' '.join(sys.argv)}",
        )
    for part in (block_pool.BlockPool, kv_cache_utils.hash_block_tokens):
        if not part.__module__.startswith("vllm."):
            raise SystemExit(f"vLLM's {part.__name__} is kvcache's: nothing to compare")
    return SimpleNamespace(
        version=vllm.__version__,
        BlockPool=block_pool.BlockPool,
        utils=kv_cache_utils,
        hashing=hashing,
        KVCacheManager=kv_cache_manager.KVCacheManager,
        Request=request.Request,
        RequestStatus=request.RequestStatus,
        SamplingParams=SamplingParams,
        interface=kv_cache_interface,
        dtype=torch.float32,
    )


def import_kvcache() -> tuple[Any, SimpleNamespace]:
    """kvcache, and the rows about its rooms; exits with 2 without it."""
    try:
        import kvcache
    except ImportError as error:
        stop(
            f"kvcache cannot be imported here ({error}).",
            f"{sys.executable} -m pip install . cython",
            f"{sys.executable} {' '.join(sys.argv)}",
        )
    return kvcache, SimpleNamespace(**{room: import_module(room) for room in ROOMS})


def stop(problem: str, *commands: str) -> NoReturn:
    print(problem, "To run the comparison:", *commands, sep="\n    ", file=sys.stderr)
    raise SystemExit(2)


def chosen(rows: list[Row], substring: str) -> list[Row]:
    found = [row for row in rows if substring.lower() in row.work.lower()]
    if not found:
        names = "\n    ".join(row.work for row in rows)
        print(f"no row has {substring!r}; there are\n    {names}", file=sys.stderr)
        raise SystemExit(2)
    return found


def run(rows: list[Row], pace: Pace) -> Iterator[Result]:
    """Measure the rows and print each as it is done."""
    print_line = line_printer(max(len(row.work) for row in rows))
    print_line(*HEADS)
    for row in rows:
        try:
            result = row.measure(pace)
        except Unavailable as error:
            result = Result(row.work, row.unit, floor="-", note=str(error))
            print_line(row.work, note=result.note)
        else:
            print_line(*cells(result))
        yield result


def cells(result: Result) -> tuple[str, ...]:
    alone = result.stock is None
    # A ratio near 1 is read to the hundredth.
    digits = 2 if result.ratio and result.ratio < 2 else 1
    spread = "-"
    if result.low is not None:
        unit = f" {result.unit}" if alone else "x"
        spread = f"{result.low:.{digits}f}-{result.high:.{digits}f}{unit}"
    return (
        result.work,
        f"{result.ours:.1f} {result.unit}",
        "-" if alone else f"{result.stock:.1f} {result.unit}",
        "-" if alone else f"{result.ratio:.{digits}f}x",
        spread,
        result.floor,
        {True: "yes", False: "NO", None: "-"}[result.reached],
    )


def line_printer(width: int) -> Callable[..., None]:
    def print_line(work: str, *columns: str, note: str = "") -> None:
        padded = "".join(f" | {column:>12}" for column in columns)
        print(f"{work:{width}}{padded}{note and ' | ' + note}", flush=True)

    return print_line


if __name__ == "__main__":
    main()
