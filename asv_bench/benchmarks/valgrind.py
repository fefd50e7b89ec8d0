"""Counts instructions: a program is run under valgrind, for a short and a long way."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kvcache


def skip_without_valgrind():
    """Call it in a setup."""
    if shutil.which("valgrind") is None:
        raise NotImplementedError("valgrind is not here")


def instructions(program, short, long, *arguments):
    """Instructions a round of a program whose last argument is the number of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [start(folder, program, *arguments, n) for n in (short, long)]
        few, many = map(counted, runs)
    return (many - few) / (long - short)


def start(folder, program, *arguments):
    """The process and the file in which it will leave its count."""
    report = Path(folder, f"callgrind.{arguments[-1]}")
    root = str(Path(kvcache.__file__).parents[1])
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={report}"]
    command += [sys.executable, "-c", program, *map(str, arguments)]
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OPENBLAS_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, report


def counted(run):
    process, report = run
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors)
    for line in report.read_text().splitlines():
        if line.startswith("summary:"):
            return int(line.split()[1])
    raise RuntimeError(f"no summary in {report}")
