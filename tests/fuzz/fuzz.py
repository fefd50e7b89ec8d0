"""Let atheris look for inputs that a target fails on, or that reach more compiled code.

    python tests/fuzz/fuzz.py TARGET CORPUS [-max_total_time=SECONDS, ...]
    python tests/fuzz/fuzz.py TARGET FILE   runs that input alone

TARGET is pool, index, encoding or trace; what follows goes to libFuzzer. CORPUS is a
folder of inputs, which grows; the target's own come first. `.ci/fuzz` builds the
package for it: clang's counters of what was reached, AddressSanitizer, and
UndefinedBehaviorSanitizer.
"""

import importlib
import logging
import sys
from pathlib import Path

import atheris


def main() -> None:
    name, where = sys.argv.pop(1), Path(sys.argv[1])
    logging.disable(logging.WARNING)  # a reset that is refused
    with atheris.instrument_imports(include=["kvcache"]):  # what is in Python
        target = importlib.import_module(f"fuzz_{name}")
    if where.is_dir():
        for i, seed in enumerate(target.SEEDS):
            (where / f"seed-{i}").write_bytes(seed)
    atheris.Setup(sys.argv, target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
