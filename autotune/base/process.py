"""Child processes that the kernel signals when this process ends."""

import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Loaded here, not in a forked child: it allocates.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this forked process when its parent ends.

    To be called first in the child.

    ``parent`` is its process id, read before the fork: it may have ended. Send SIGTERM
    to a program with children.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def keep_orphans() -> None:
    """Let descendants whose parents have ended become this process's own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start(
    command: Sequence[str],
    *,
    at_end: signal.Signals = signal.SIGKILL,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start a program that receives a signal when this thread ends."""
    ending = functools.partial(end_with_parent, os.getpid(), at_end)
    return subprocess.Popen(command, preexec_fn=ending, **options)  # noqa: PLW1509 - two system calls, no locks
