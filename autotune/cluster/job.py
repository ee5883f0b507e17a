"""Child process: torchrun that ends as the first of its ranks that failed.

torchrun itself returns 1 whatever its ranks return, and prints its own traceback below
the message of the rank. Here the exit code is the rank's, and its message is the
last word.
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SIGNAL_EXIT = 128
"""Exit code of a shell for signal 0; that of signal N is larger by N."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments and return the exit code of its first failure.

    Errors of torchrun itself, such as a rendezvous that fails, are raised.
    """
    # Of torchrun's loggers: below critical, they only repeat that a rank has failed.
    logging.disable(logging.ERROR)
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        killed_by = -failure.exitcode
        return _SIGNAL_EXIT + killed_by if killed_by > 0 else failure.exitcode
    except SignalException as stop:
        return _SIGNAL_EXIT + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
