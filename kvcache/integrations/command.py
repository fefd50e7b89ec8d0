"""The command `kvcache vllm-check`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

NAME = "vllm-check"
HELP = "say what kvcache would replace in the vLLM that is installed"


def add_arguments(parser: ArgumentParser) -> None:
    """It takes none; `KVCACHE_VLLM` says how much is replaced."""


def run(args: Namespace, parser: ArgumentParser) -> int:
    """Print it; the exit status."""
    from kvcache.integrations import vllm

    try:
        print(vllm.check())
    except ImportError as error:
        parser.error(str(error))
    return 0
