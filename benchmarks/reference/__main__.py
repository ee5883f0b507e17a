"""``python -m benchmarks.reference``: write the pages of reference anew."""

import sys

from benchmarks.reference.pages import write

if __name__ == "__main__":
    write()
    sys.exit(0)
