"""Errors of the trainer, their exit codes, and the form of errors at the console.

* TrainerError (70)
  * BadConfig (3)
  * DeviceOutOfMemory (4)
  * DeviceMissing (5)
  * ProfileMismatch (6)
  * RanksLost (75)
  * DiskTrouble (75)
  * TrainingFailed (76)

autotune uses the same exit codes. After 75, an unchanged restart resumes the run.
"""

import re

from trainer.documentation import documentation_path

HOST_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|bad_alloc|Thread creation failed"
)
"""Messages of C++, the allocator and libraries if host memory cannot be allocated."""


def printable(text: str) -> str:
    """Escape control and direction characters of a text, except line breaks.

    The text may quote untrusted files, which could otherwise steer the terminal.
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def error_text(message: str, next_step: str, docs: str | None = None) -> str:
    """Return an error as the console shows it.

    ``docs`` is the section of ``docs/faq.md`` that explains it, if any.
    """
    text = f"error: {message}\n  next: {next_step}\n"
    if docs:
        text += f"  docs: {documentation_path(f'faq.md#{docs}')}\n"
    return text


class TrainerError(Exception):
    """Error that you can act on, with a message and a next step.

    Both are safe to print.
    """

    exit_code = 70
    docs: str | None = None
    """Section of ``docs/faq.md`` that explains it."""

    def __init__(
        self, message: str, *, next_step: str, docs: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.next_step = printable(next_step)
        self.docs = docs or self.docs


class BadConfig(TrainerError):
    """A profile, dataset or setting cannot be used."""

    exit_code = 3


class DeviceOutOfMemory(TrainerError):
    """The device ran out of memory."""

    exit_code = 4
    docs = "out-of-memory"


class DeviceMissing(TrainerError):
    """The requested device is not on this machine."""

    exit_code = 5


class ProfileMismatch(TrainerError):
    """The profile has another hash than expected, or needs more GPU memory."""

    exit_code = 6
    docs = "profile-mismatch"


class RanksLost(TrainerError):
    """Another rank died, hung or was cut off; what was saved is intact."""

    exit_code = 75
    docs = "hung-run"


class DiskTrouble(TrainerError):
    """A disk or file system failed; its content may be intact, and was not changed."""

    exit_code = 75


class TrainingFailed(TrainerError):
    """The run cannot continue, and restarting it unchanged would not help."""

    exit_code = 76
    docs = "diverged-run"
