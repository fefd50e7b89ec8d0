"""`python -m kvcache` is the program `kvcache`.

Holds nothing; `kvcache.cli` has it all. It is a module of its own so that the
program runs from an interpreter whose scripts are not on the path.
"""

import sys

from kvcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
