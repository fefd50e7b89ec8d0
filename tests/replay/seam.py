"""Where the replay tests get their pool from.

Imported before `kvcache.replay`, also by the programs that tests start. Where
the compiled `kvcache.replay._simulate` is absent, `ReferenceReplay` stands in
for its `PoolReplay`; `COMPILED` says which one it is.
"""

import sys
from types import ModuleType

from reference_replay import ReferenceReplay

NAME = "kvcache.replay._simulate"

try:
    import kvcache.replay  # noqa: F401

    COMPILED = True
except ModuleNotFoundError as error:
    if error.name != NAME:
        raise
    COMPILED = False
    stand_in = ModuleType(NAME)
    stand_in.__dict__["PoolReplay"] = ReferenceReplay
    sys.modules[NAME] = stand_in
