"""`kvcache` as a process: the progress bar, Ctrl-C, closed pipes, imports."""

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.cli import main

WriteTrace = Callable[..., Path]
PROGRAM = "import sys; from kvcache.cli import main; sys.exit(main())"


def start(
    *args: str | Path, program: str = PROGRAM, stdout: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a program that can import what these tests can."""
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", program, "replay", *args],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        # A shell that started the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_terminal_shows_a_bar_that_counts_the_bytes_read(
    monkeypatch: pytest.MonkeyPatch, write_trace: WriteTrace
) -> None:
    tqdm = pytest.importorskip("tqdm")
    bars: list[Any] = []

    class Bar(tqdm.tqdm):  # type: ignore[name-defined, misc]
        def close(self) -> None:
            bars.append(self)
            super().close()

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    path = write_trace({"input_length": 32, "hash_ids": [1, 2]})
    assert main(["replay", str(path), "--block-size", "16"]) == 0
    assert "B/s" in terminal.getvalue()
    assert bars[0].n == bars[0].total == path.stat().st_size


def test_without_tqdm_a_terminal_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["replay", "--sessions", "1"]) == 0
    assert terminal.getvalue() == ""


def test_what_is_not_used_is_not_imported() -> None:
    unused = ["tqdm", "matplotlib", "fractions", "asyncio", "unittest"]
    program = (
        "import sys; from kvcache.cli import main; before = set(sys.modules);"
        "main(['replay', '--sessions', '1']);"
        f"print(set({unused}) & (set(sys.modules) - before), file=sys.stderr)"
    )
    assert start(program=program).communicate(timeout=60)[1] == "set()\n"


def test_the_package_runs_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvcache", "replay", "--sessions", "1"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("kvcache", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("generated chat: 10 requests")


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start(pipe, "--block-size", "16")
    writer = None
    while writer is None:
        # Succeeds once the program reads; from then on it waits for rows.
        with contextlib.suppress(OSError):
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    os.close(writer)
    assert process.returncode == 130


def test_a_closed_pipe_leaves_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("--sessions", "1", stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_is_told_in_one_line() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = start("--sessions", "1", stdout=full)
    os.close(full)
    error = process.communicate(timeout=60)[1]
    assert error.startswith("kvcache: error: ")
    assert error.count("\n") == 1
    assert process.returncode == 2
