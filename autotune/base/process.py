"""Child processes that the kernel signals when their parent ends.

To the kernel, the parent is the thread that started the child: a child of a thread that
ends gets the signal, even if the process continues.
"""

import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

# Options of prctl(2), from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded here, not in a forked child, as loading a library allocates memory: another
# thread may have held malloc's lock at the fork.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def end_with_parent(
    parent_pid: int, end_signal: signal.Signals = signal.SIGKILL
) -> None:
    """Let the kernel signal this forked process when its parent ends.

    Call this first in the child.

    Args:
        parent_pid: Process id of the parent, read before the fork: the parent may have
            ended since.
        end_signal: The signal; SIGTERM suits programs that have children.
    """
    _prctl(_PR_SET_PDEATHSIG, end_signal)
    # If the parent ended before the call above, no signal will come.
    if os.getppid() != parent_pid:
        os._exit(1)


def keep_orphans() -> None:
    """Let descendants whose parents have ended become this process's own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_child(
    command: Sequence[str],
    *,
    end_signal: signal.Signals = signal.SIGKILL,
    **options: Any,
) -> "subprocess.Popen[Any]":
    """Start a program that receives a signal when the calling thread ends.

    Args:
        command: Program and arguments.
        end_signal: As for ``end_with_parent``.
        options: Further arguments of ``subprocess.Popen``.
    """
    before_exec = functools.partial(end_with_parent, os.getpid(), end_signal)
    return subprocess.Popen(command, preexec_fn=before_exec, **options)  # noqa: PLW1509 - two system calls, no locks
