"""The program `kvcache`: finds the command, and ends quietly when stopped.

Holds the list of commands. A command is a module with `NAME`, `HELP`,
`add_arguments(parser)` and `run(args, parser) -> exit status`. Invariant: no
mistake of the caller, Ctrl-C or closed pipe ends in a traceback. Costs: the
commands are imported when the program runs, not with this module.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

PROGRAM = "kvcache"
MISTAKE = 2
"""Exit status after a caller's mistake, as argparse has it."""
INTERRUPTED = 128 + 2
"""Exit status after Ctrl-C: what a shell reports for SIGINT."""
PIPE_CLOSED = 128 + 13
"""Exit status when the reader of our output went away: as for SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments without the program's name; `sys.argv` by default.

    Returns:
        The exit status: 0, or 2 for a mistake of the caller or an output that
        cannot be written, 130 after Ctrl-C, 141 if the output was closed.
    """
    try:
        status = _run(argv)
        # At interpreter exit it would be too late to catch a closed pipe.
        print(end="", flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # What is still buffered cannot be written either.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return MISTAKE
    return status


def _run(argv: Sequence[str] | None) -> int:
    from kvcache import __version__
    from kvcache.integrations import command as vllm_check
    from kvcache.replay import command as replay

    parser = ArgumentParser(
        prog=PROGRAM,
        description="KV-cache block management for LLM inference engines.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (replay, vllm_check):
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:] + ".",
            allow_abbrev=False,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=partial(command.run, parser=sub))
    try:
        args = parser.parse_args(argv)
        return int(args.run(args))
    except SystemExit as stop:
        return int(stop.code or 0)
