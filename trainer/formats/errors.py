"""Errors of the trainer, their exit codes, and the form of errors at the console.

* TrainerError (70)
  * BadConfig (3)
    * UnreadableFile (3)
  * DeviceOutOfMemory (4)
  * DeviceMissing (5)
  * ProfileMismatch (6)
  * RanksLost (75)
  * DiskTrouble (75)
  * TrainingFailed (76)

autotune uses the same exit codes. After 75, an unchanged restart resumes the run.
"""

import errno
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from trainer.formats.documentation import documentation_path

HOST_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|bad_alloc|Thread creation failed"
)
"""Messages of C++, allocators and libraries if host memory cannot be allocated.

Without torch, as autotune looks for them in the logs of its jobs too."""


def printable(text: str) -> str:
    """Escape characters that cannot be printed, except line breaks.

    A text may quote untrusted files, whose control characters could steer the terminal
    and whose direction marks could reorder it.
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def error_text(message: str, next_step: str, docs: str | None = None) -> str:
    """Return an error as the console shows it.

    A message that is wider than the terminal is broken between words. The next step is
    not, as it may hold a command to copy.

    Args:
        message: Message of the error.
        next_step: Advice, shown after ``next:``.
        docs: Section of ``docs/faq.md`` that explains the error; None if there is none.
    """
    text = f"{_fit_terminal(f'error: {message}')}\n  next: {next_step}\n"
    if docs:
        text += f"  docs: {documentation_path(f'faq.md#{docs}')}\n"
    return text


def _fit_terminal(text: str) -> str:
    """Break lines that are wider than the terminal on standard error, if any."""
    if not sys.stderr.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line,
            columns,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


class TrainerError(Exception):
    """Error that you can act on, with a message and a next step.

    Both texts are escaped as by ``printable``.
    """

    exit_code = 70
    """Exit code of the program; 70 is ``EX_SOFTWARE`` of ``sysexits.h``."""
    docs: str | None = None
    """Section of ``docs/faq.md`` that explains the error; None if there is none."""

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


def _permissions_advice(path: object) -> str:
    """Return the command that shows the permissions which decide access to a path."""
    return (
        "The permissions of the file and of the directories above it:"
        f" namei -l {shlex.quote(str(path))}"
    )


def permission_denied(error: PermissionError) -> BadConfig:
    """Return the error for a denied access that was not reported where it happened."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return BadConfig(
            f"cannot use a file: {reason}",
            next_step="Check the permissions of the files that you named.",
        )
    return BadConfig(
        f"cannot use {error.filename}: {reason}",
        next_step=f"Give this user access. {_permissions_advice(error.filename)}",
    )


class UnreadableFile(BadConfig):
    """A file exists but cannot be read here; its content may be intact."""


def unreadable(path: Path, error: OSError) -> UnreadableFile | None:
    """Return the error for a file that cannot be read although it may be intact.

    Args:
        path: File that was to be read.
        error: Error of the operating system.

    Returns:
        None if the file is missing, or the path leads to no plain file. The caller
        then reports which file it expected.
    """
    is_missing = isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError
    )
    if is_missing or error.errno == errno.ELOOP:
        return None
    if isinstance(error, PermissionError):
        next_step = f"Make it readable for this user. {_permissions_advice(path)}"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        next_step = "Raise the limit on open files: ulimit -n 65536"
    else:
        next_step = (
            "Check its file system; run the same command again once it is available."
        )
    return UnreadableFile(
        f"cannot read {path}: {error.strerror or error}", next_step=next_step
    )


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
