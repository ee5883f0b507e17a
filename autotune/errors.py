"""The errors a user can meet, and the exit code that each one owns.

AutotuneError
├── UsageError        2   the command line itself is wrong
├── BadInput          3   a file, a name or a value that was given cannot be used
├── DoesNotFit        4   not even the smallest case fits the memory budget
├── MachineLacks      5   this machine has no such device, library or permission
├── ProfileRefused    6   the profile does not belong to this machine, model or data
├── NotCheckable      7   nothing here can confirm or deny it
├── Undecided         8   the measurements ran, and do not support an answer
├── Slower            9   what was compared is proven to be slower than allowed
├── InternalError    70   a bug of this project
├── StartAgain       75   time ran out, or a node was lost; the same command goes on
└── StoppedWaiting  130   Ctrl-C while waiting for a job, which goes on
"""

from trainer.errors import printable


class AutotuneError(Exception):
    """Something the user can act on; both texts can be shown as they are, whatever file they quote.

    Args:
        message: What happened, with the value that caused it.
        next_step: What to do or to run next.
    """

    exit_code = 70

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.next_step = printable(next_step)


class UsageError(AutotuneError):
    """The command line is wrong."""

    exit_code = 2


class BadInput(AutotuneError):
    """A given file, name or value cannot be used."""

    exit_code = 3


class DoesNotFit(AutotuneError):
    """Not even the smallest case fits the memory budget."""

    exit_code = 4


class MachineLacks(AutotuneError):
    """This machine has no such device, library or permission."""

    exit_code = 5


class ProfileRefused(AutotuneError):
    """The profile does not belong to this machine, model or data, or its order of tuning was not kept."""

    exit_code = 6


class NotCheckable(AutotuneError):
    """Nothing on this machine can confirm or deny it."""

    exit_code = 7


class Undecided(AutotuneError):
    """Trials ran, and what came back does not support an answer."""

    exit_code = 8


class OutOfTime(Undecided):
    """The next trial would end after the time that you gave; what was measured is in the trial log."""


class Slower(AutotuneError):
    """What was compared is slower than allowed, beyond noise."""

    exit_code = 9


class InternalError(AutotuneError):
    """A bug of this project."""

    exit_code = 70


class StartAgain(AutotuneError):
    """Time ran out, or a node was lost; what was finished is saved, and the same command goes on."""

    exit_code = 75


class StoppedWaiting(AutotuneError):
    """Somebody pressed Ctrl-C while waiting for a job, which goes on."""

    exit_code = 130


EXIT_INTERRUPTED = 130
"""Ctrl-C: what was finished is saved."""
EXIT_TERMINATED = 143
"""SIGTERM: what was finished is saved."""
INTERRUPTED = "interrupted: finished work is saved, and the same command goes on from it\n"
