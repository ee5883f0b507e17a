"""The errors a user can meet, and the exit code that each one owns.

AutotuneError
├── UsageError        2   the command line itself is wrong
├── BadInput          3   a file, a name or a value that was given cannot be used
├── ExceedsMemory        4   not even the smallest case fits the memory budget
├── MachineLacks      5   this machine has no such device, library or permission
├── ProfileRejected    6   the profile does not belong to this machine, model or data
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

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.next_step = printable(next_step)


class UsageError(AutotuneError, exit_code=2):
    """The command line is wrong."""


class BadInput(AutotuneError, exit_code=3):
    """A given file, name or value cannot be used."""


class ExceedsMemory(AutotuneError, exit_code=4):
    """Not even the smallest case fits the memory budget."""


class MachineLacks(AutotuneError, exit_code=5):
    """This machine has no such device, library or permission."""


class ProfileRejected(AutotuneError, exit_code=6):
    """The profile does not belong to this machine, model or data, or its order of tuning was not kept."""


class NotCheckable(AutotuneError, exit_code=7):
    """Nothing on this machine can confirm or deny it."""


class Undecided(AutotuneError, exit_code=8):
    """Trials ran, and what came back does not support an answer."""


class OutOfTime(Undecided):
    """The next trial would end after the time that you gave; what was measured is in the trial log."""


class Slower(AutotuneError, exit_code=9):
    """What was compared is slower than allowed, beyond noise."""


class InternalError(AutotuneError, exit_code=70):
    """A bug of this project."""


class StartAgain(AutotuneError, exit_code=75):
    """Time ran out, or a node was lost; what was finished is saved, and the same command goes on."""


class StoppedWaiting(AutotuneError, exit_code=130):
    """Somebody pressed Ctrl-C while waiting for a job, which goes on."""


EXIT_INTERRUPTED = 130
"""Ctrl-C: what was finished is saved."""
EXIT_TERMINATED = 143
"""SIGTERM: what was finished is saved."""
INTERRUPTED = "interrupted: finished work is saved, and the same command goes on from it\n"
