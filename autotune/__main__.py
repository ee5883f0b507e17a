"""``python -m autotune``."""

import sys
from pathlib import Path

# ``-m`` searches the working directory first, whose modules may have any name, such as
# ``trainer``; the installed command does not. With ``-P``, the first entry is one that
# the user asked for.
if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).parents[1]:
    del sys.path[0]

from autotune.cli import main

main()
