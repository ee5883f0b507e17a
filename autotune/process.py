"""What the operating system does for processes that this package starts."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here, not in a forked child: it allocates.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this forked process when its parent ends; for a child's first lines.

    Args:
        parent: The parent's process id, asked for before the fork: it may have ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
