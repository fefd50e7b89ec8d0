"""Counts the instructions of many operations in one run under callgrind."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kvcache

# Only what is between the first two is instrumented, so that imports run five times as
# fast, and only what is between two toggles is counted.
SWITCH = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
"""


def skip_without_valgrind():
    """Call it in a setup."""
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            raise NotImplementedError(f"{tool} is not here")
    if not Path("/usr/include/valgrind/callgrind.h").exists():
        raise NotImplementedError("valgrind's headers are not here")


def counts(program):
    """Instructions by name; the program is given the switch's library."""
    with tempfile.TemporaryDirectory() as folder:
        source, switch = Path(folder, "switch.c"), Path(folder, "switch.so")
        source.write_text(SWITCH)
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", switch, source]
        subprocess.run(command, check=True)
        run(folder, [sys.executable, str(program), str(switch)])
        found = {}
        for report in Path(folder).glob("callgrind.*"):
            text = report.read_text()
            name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M)
            total = re.search(r"^(?:summary|totals): (\d+)$", text, re.M)
            if name and total:
                found[name[1]] = int(total[1])
    return found


def run(folder, command):
    paths = [str(Path(kvcache.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OPENBLAS_NUM_THREADS": "1",
    }
    report = Path(folder, "callgrind.%p")
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    valgrind.append("--collect-atstart=no")
    done = subprocess.run(
        [*valgrind, f"--callgrind-out-file={report}", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    print(done.stdout, end="")  # what was not counted
