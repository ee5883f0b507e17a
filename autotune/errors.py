"""Errors that you can act on, and the exit code of each.

    AutotuneError
    ├── UsageError          2
    ├── BadInput            3
    ├── ExceedsMemory       4
    ├── MachineLacks        5
    ├── ProfileRejected     6
    ├── NotCheckable        7
    ├── Undecided           8
    │   └── OutOfTime       8
    ├── Slower              9
    ├── InternalError      70
    ├── StartAgain         75
    └── StoppedWaiting    130

Errors of the trainer (``trainer.formats.errors``) use the same numbers.
"""

from trainer.formats.errors import printable


class AutotuneError(Exception):
    """An error that you can act on.

    Args:
        message: What failed, with the value that caused it, and why.
        next_step: What to do about it, with the exact command.
        docs: Section of ``docs/faq.md`` about it; by default that of the class.
    """

    exit_code = 70
    docs: str | None = None
    """Section of ``docs/faq.md`` about these errors, if any."""

    def __init_subclass__(
        cls, *, exit_code: int | None = None, docs: str | None = None
    ) -> None:
        cls.exit_code = exit_code or cls.exit_code
        cls.docs = docs or cls.docs

    def __init__(
        self, message: str, *, next_step: str, docs: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.next_step = printable(next_step)
        self.docs = docs or self.docs


class UsageError(AutotuneError, exit_code=2):
    """The command line is wrong."""


class BadInput(AutotuneError, exit_code=3):
    """A given file, name or value cannot be used."""


class ExceedsMemory(AutotuneError, exit_code=4, docs="out-of-memory"):
    """Not even the smallest case fits the memory budget."""


class MachineLacks(AutotuneError, exit_code=5):
    """This machine lacks a device, a library or a permission."""


class ProfileRejected(AutotuneError, exit_code=6, docs="profile-mismatch"):
    """The profile does not match this machine, model or data.

    Or tuning steps were run out of order.
    """


class NotCheckable(AutotuneError, exit_code=7):
    """The check cannot be made on this machine."""


class Undecided(AutotuneError, exit_code=8, docs="noisy-measurements"):
    """Trials ran, but their results do not support an answer."""


class OutOfTime(Undecided, docs="resume"):
    """The next trial would exceed the time budget.

    Results so far are in the trial log.
    """


class Slower(AutotuneError, exit_code=9):
    """The comparison is slower than allowed, beyond noise."""


class InternalError(AutotuneError, exit_code=70):
    """A bug in this project."""


class StartAgain(AutotuneError, exit_code=75, docs="resume"):
    """Time ran out, or a node was lost.

    Finished work is saved, and the same command continues.
    """


class StoppedWaiting(AutotuneError, exit_code=130):
    """Ctrl-C was pressed while waiting for a job, which continues."""


EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C; finished work is saved."""
EXIT_TERMINATED = 143
"""Exit code after SIGTERM; finished work is saved."""
INTERRUPTED = (
    "interrupted: finished work is saved; run the same command again to resume\n"
)
