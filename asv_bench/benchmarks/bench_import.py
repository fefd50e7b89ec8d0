"""What starting costs: the imports, and the modules they bring."""

import subprocess
import sys
from pathlib import Path

import kvcache

MODULES = ["kvcache", "kvcache.manager", "kvcache.prefix_caching", "kvcache.replay"]


class Import:
    """NumPy is imported before: a process that uses kvcache has it anyway."""

    params = (MODULES,)
    param_names = ("module",)
    number = 1
    repeat = (3, 20, 20.0)

    def timeraw_import(self, module):
        return f"import {module}", "import numpy"

    def track_modules(self, module):
        program = (
            "import sys, numpy; before = set(sys.modules);"
            f"import {module}; print(len(set(sys.modules) - before))"
        )
        command = [sys.executable, "-c", program]
        # Python looks here first: a checkout would be found uncompiled.
        here = Path(kvcache.__file__).parents[1]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=here
        )
        return int(done.stdout)

    track_modules.unit = "modules"
