"""What the ranks of one node tell each other while one of them works for all. No torch here.

The leader holds a lock on a file, and writes there how it ended. The kernel lets go of the lock with the process, so a
leader that was killed is seen at once, whatever its process id has come to mean since. The file stays: who comes late
reads it too.
"""

import contextlib
import enum
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import BadConfig, TrainerError

_JOB_NAMES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_EARLIER_S = 2.0
"""torchrun's defaults name every job alike. Ranks of one start within so long; what is older is another start's."""
_ROOM_BYTES = 4096
"""Taken in advance, so that an error can be told when the disk is full."""
_LONGEST_BYTES = 2**16
_POLL_S = 0.1


class Standing(enum.Enum):
    """How far the leader is."""

    NOT_BEGUN = enum.auto()
    AT_WORK = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    DIED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What is known of the leader.

    Args:
        standing: How far it is.
        message: Of its error, where it failed.
        next_step: Of its error, where it failed.
    """

    standing: Standing
    message: str = ""
    next_step: str = ""


def job_key(environment: Mapping[str, str]) -> str:
    """A name for this start of this job, from what torchrun and SLURM say: the same on all its local ranks."""
    told = "\0".join(environment.get(name, "") for name in _JOB_NAMES)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


class Attempt:
    """One job's work on one thing.

    Args:
        path: The file; its directory is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._since_s = process_started_s() - _EARLIER_S

    @contextlib.contextmanager
    def leading(self, timeout_s: float) -> Iterator[None]:
        """Be the leader while the block runs; an error of it is told to those that wait.

        Raises:
            BadConfig: If another process leads under the same name and does not end in time.
            OSError: If the file cannot be written.
        """
        fd = self._open()
        try:
            if not wait_for_lock(fd, timeout_s):
                raise BadConfig(
                    f"another process has been at the same work for {timeout_s:g} s ({self.path})",
                    next_step="See what it is doing, or wait longer.",
                )
            # The size alone says that somebody began: it needs no room on the disk.
            os.ftruncate(fd, _ROOM_BYTES)
            os.utime(fd)
            with contextlib.suppress(OSError):  # full, perhaps, of what the work begins by removing
                _write(fd, {})
            try:
                yield
            except TrainerError as error:
                with contextlib.suppress(OSError):  # the disk may be what is wrong
                    _write(fd, {"message": error.message, "next_step": error.next_step})
                raise
            _write(fd, {"done": True})
        finally:
            os.close(fd)

    def read(self) -> Word:
        """What is known of the leader at this moment.

        Raises:
            OSError: If the file can be neither read nor made: the leader could not make it either.
        """
        fd = self._open()
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Word(standing=Standing.AT_WORK)
            status = os.fstat(fd)
            if not status.st_size or status.st_mtime < self._since_s:
                return Word(standing=Standing.NOT_BEGUN)
            return _parse(os.pread(fd, _LONGEST_BYTES, 0))
        finally:
            os.close(fd)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def wait_for_lock(fd: int, timeout_s: float) -> bool:
    """Lock a file for this process alone; False if somebody else held it all the time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def _write(fd: int, content: Mapping[str, object]) -> None:
    os.pwrite(fd, json.dumps(content).encode().ljust(_ROOM_BYTES, b"\0"), 0)


def _parse(raw: bytes) -> Word:
    try:
        told = json.loads(raw.rstrip(b"\0"))
    except ValueError:
        told = {}
    if not isinstance(told, dict):
        told = {}
    if "message" in told:
        return Word(
            standing=Standing.FAILED, message=str(told["message"]), next_step=str(told.get("next_step", "See its log."))
        )
    return Word(standing=Standing.DONE if told.get("done") else Standing.DIED)


def process_started_s() -> float:
    """When this process began, in seconds since 1970."""
    # The 22nd field; the second, the command's name, may hold blanks and brackets.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
