"""The trainer's errors and their exit codes (the same numbers as autotune's).

TrainerError
├── BadConfig       3   a profile, dataset or setting that cannot be used
├── DeviceOutOfMemory      4   out of memory
├── DeviceMissing   5   the asked-for device is not here
├── ProfileMismatch  6   the profile was tuned for something else
├── DiskTrouble    75   a disk or file system failed; nothing was changed, and starting again goes on
├── RanksLost      75   another rank is gone; starting again goes on from the newest checkpoint
└── TrainingFailed 76   the run cannot go on, and starting it again would not help
"""

import re

HOST_REFUSES = re.compile(r"can't allocate memory|Cannot allocate memory|bad_alloc|Thread creation failed")
"""What C++, the allocator and libraries say if the host's memory is refused them."""


def printable(text: str) -> str:
    """The text with control and direction characters written out, but for line breaks.

    Messages quote files and names from strangers, and no such file is to steer a terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


class TrainerError(Exception):
    """Something the user can act on: what happened, and the next step; both can be shown as they are."""

    exit_code = 70

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.next_step = printable(next_step)


class BadConfig(TrainerError):
    """A profile, dataset or setting cannot be used."""

    exit_code = 3


class DeviceOutOfMemory(TrainerError):
    """The device ran out of memory."""

    exit_code = 4


class DeviceMissing(TrainerError):
    """The asked-for device is not on this machine."""

    exit_code = 5


class ProfileMismatch(TrainerError):
    """The profile cannot be used on this machine."""

    exit_code = 6


class RanksLost(TrainerError):
    """Another rank died, hung or was cut off; what was saved is intact."""

    exit_code = 75


class DiskTrouble(TrainerError):
    """A disk or file system failed to read what may well be whole; nothing was changed."""

    exit_code = 75


class TrainingFailed(TrainerError):
    """The run cannot go on, and starting it again unchanged would not help."""

    exit_code = 76
