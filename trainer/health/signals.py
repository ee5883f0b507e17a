"""Signals that request an exit, and how a process gets or ignores them.

No torch here.
"""

import ctypes
import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that request an exit."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def exit_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request an exit; under ``nohup``, without SIGHUP."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if under_nohup:
        return tuple(number for number in SIGNALS if number != signal.SIGHUP)
    return SIGNALS


def ignore_signals() -> None:
    """Ignore signals in a DataLoader worker.

    A signal to all processes of a job is for training, which ends its workers.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Request SIGTERM when the parent process dies.

    A killed torchrun would otherwise leave its ranks running.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
