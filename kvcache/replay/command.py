"""The command `kvcache replay`: options in, a table, JSON or a plot out.

Holds nothing. Invariant: a caller's mistake is told in one line, with exit
status 2, and before the replay starts if it can be known by then. Costs: the
progress bar, the plot and exact fractions are imported only where they are used.
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kvcache.replay import STEP_MS, Report, Source, Trace, TraceError, replay
from kvcache.replay.report import prepare_plot
from kvcache.replay.row import MAX_BLOCK_SIZE
from kvcache.replay.workload import SHAPE, Workload

if TYPE_CHECKING:
    from fractions import Fraction

NAME = "replay"
HELP = "replay a trace of requests through pools of several sizes"
MAX_BLOCKS = 2**31 - 1
MAX_CONCURRENCY = 65_536
DEFAULT_SIZES = [1_000, 5_000, 20_000, 50_000]

T = TypeVar("T")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="JSON lines, plain or .gz, .xz or .bz2; without it, generated "
        "multi-turn chats are replayed",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--blocks",
        type=_list_of(_integer(1, MAX_BLOCKS)),
        metavar="N,...",
        help="pool sizes in blocks, null block included "
        f"(default: {','.join(map(str, DEFAULT_SIZES))})",
    )
    sizes.add_argument(
        "--budget-gib",
        type=_list_of(_gib),
        metavar="GIB,...",
        help="pool sizes in GiB; needs --kv-bytes-per-token",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=_integer(1, 2**63 - 1),
        metavar="N",
        help="bytes of keys and values a token takes, over all layers",
    )
    parser.add_argument(
        "--block-size",
        type=_integer(1, MAX_BLOCK_SIZE),
        metavar="N",
        help="tokens a block (default: found from the trace; generated: "
        f"{Workload.block_size})",
    )
    parser.add_argument(
        "--concurrency",
        type=_integer(1, MAX_CONCURRENCY),
        metavar="N",
        help="replay by arrival time, with at most N requests running at a time and "
        "their output decoded step by step (default: one after the other, without "
        "their output)",
    )
    parser.add_argument(
        "--step-ms",
        type=_integer(1, 2**31 - 1),
        metavar="N",
        help=f"milliseconds a step lasts (default: {STEP_MS}); needs --concurrency",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw hit rate over pool size (.png, .svg, .pdf, ...)",
    )
    shape = parser.add_argument_group("generated chats, without a TRACE")
    for name, (least, meaning) in SHAPE.items():
        shape.add_argument(
            _flag(name),
            type=_integer(least, 2**63 - 1),
            default=SUPPRESS,
            metavar="N",
            help=f"{meaning} (default: {getattr(Workload, name)})",
        )


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Replay and print; a caller's mistake exits through the parser."""
    if (args.budget_gib is None) != (args.kv_bytes_per_token is None):
        parser.error("--budget-gib and --kv-bytes-per-token need each other")
    if args.step_ms is not None and args.concurrency is None:
        parser.error("--step-ms needs --concurrency")
    draw = _plotter(args.plot, parser) if args.plot else None
    try:
        with _open(args, parser) as source:
            sizes = _sizes(args, source.block_size, parser)
            with _progress(source) as on_batch:
                report = replay(
                    source,
                    sizes,
                    concurrency=args.concurrency,
                    step_ms=args.step_ms or STEP_MS,
                    record_assignment=args.json,
                    on_batch=on_batch,
                )
    except (TraceError, OSError, ImportError, MemoryError) as error:
        _fail(parser, str(error) or "out of memory")
    print(report.to_json() if args.json else report.to_table())
    if draw is not None:
        try:
            draw(report)
        except OSError as error:
            _fail(parser, str(error))
    return 0


def _open(
    args: Namespace, parser: ArgumentParser
) -> AbstractContextManager[Trace | Workload]:
    shape = {name: value for name, value in vars(args).items() if name in SHAPE}
    if args.trace is None:
        if args.block_size is not None:
            shape["block_size"] = args.block_size
        return nullcontext(Workload(**shape))
    if shape:
        parser.error(f"{_flag(next(iter(shape)))} shapes generated chats, not a TRACE")
    return Trace(args.trace, args.block_size)


def _sizes(args: Namespace, block_size: int, parser: ArgumentParser) -> list[int]:
    if args.budget_gib is None:
        return args.blocks or DEFAULT_SIZES
    block_bytes = args.kv_bytes_per_token * block_size
    sizes = [gib * 2**30 // block_bytes for gib in args.budget_gib]
    for gib, size in zip(args.budget_gib, sizes, strict=True):
        if not 1 <= size <= MAX_BLOCKS:
            parser.error(
                f"{float(gib)} GiB hold {size} blocks of {block_bytes} bytes; "
                f"a pool has 1 to {MAX_BLOCKS}"
            )
    return sizes


def _plotter(path: str, parser: ArgumentParser) -> Callable[[Report], None]:
    try:
        return prepare_plot(path)
    except ImportError as error:
        _fail(parser, f'--plot needs matplotlib ({error}): pip install "kvcache[cli]"')
    except (OSError, ValueError) as error:
        _fail(parser, str(error))


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[], object] | None]:
    bar_class = _bar_class()
    if bar_class is None:
        yield None
        return
    with bar_class(
        total=source.total or None, unit=source.unit, unit_scale=True, leave=False
    ) as bar:
        yield lambda: bar.update(source.done - bar.n)


def _bar_class() -> Any:
    # `sys.stderr` is None if it was closed before the interpreter started.
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        return import_module("tqdm").tqdm
    except ImportError:
        return None


def _fail(parser: ArgumentParser, message: str) -> NoReturn:
    parser.exit(2, f"{parser.prog}: error: {message}\n")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ArgumentTypeError(
                f"{text!r:.40} is no integer from {least} to {most}"
            )
        return value

    return parse


def _gib(text: str) -> Fraction:
    from fractions import Fraction

    # A plain decimal: of "1e999999999", Fraction would write out every digit.
    if not re.fullmatch(r"(?=.?[0-9])[0-9]{0,20}(\.[0-9]{0,40})?", text):
        raise ArgumentTypeError(f"{text!r:.40} is no number of GiB")
    return Fraction(text)


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [parse(item.strip()) for item in text.split(",")]
