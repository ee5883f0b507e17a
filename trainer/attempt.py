"""What the ranks of one node tell each other while one of them works for all. No torch here."""

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

from trainer.disk import LockHeld, locked
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


class Standing(enum.Enum):
    """How far the leader of a node's ranks is."""

    NOT_BEGUN = enum.auto()
    AT_WORK = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    DIED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What is known of the leader; where it failed, with its error."""

    standing: Standing
    message: str = ""
    next_step: str = ""


def job_key(environment: Mapping[str, str]) -> str:
    """A name for this start of this job, from what torchrun and SLURM say: the same on all its local ranks."""
    told = "\0".join(environment.get(name, "") for name in _JOB_NAMES)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


class Attempt:
    """One job's work on one thing, led by one process, which holds a lock on a file and writes there how it ended.

    A leader that was killed has lost the lock, so it is seen at once, whatever its process id has come to mean since.
    The file stays: a rank that comes late reads it too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def leading(self, timeout_s: float) -> Iterator[None]:
        """Be the leader while the block runs; an error of it is told to those that wait.

        Raises:
            BadConfig: If another process leads under the same name and does not end in time.
            OSError: If the file cannot be written.
        """
        try:
            with locked(self.path, timeout_s) as fd:
                assert fd is not None
                # The size alone says that a leader began: it needs no room on the disk.
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
        except LockHeld as error:
            raise BadConfig(
                f"another process has been at the same work for {timeout_s:g} s ({self.path})",
                next_step="See what it is doing, or wait longer.",
            ) from error

    def read(self) -> Word:
        """What is known of the leader at this moment.

        Raises:
            OSError: If the file can be neither read nor made: the leader could not make it either.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Word(standing=Standing.AT_WORK)
            status = os.fstat(fd)
            if not status.st_size or status.st_mtime < process_started_s() - _EARLIER_S:
                return Word(standing=Standing.NOT_BEGUN)
            raw = os.pread(fd, _LONGEST_BYTES, 0)
        finally:
            os.close(fd)
        try:
            told = json.loads(raw.rstrip(b"\0"))
        except ValueError:
            told = None
        if not isinstance(told, dict):
            return Word(standing=Standing.DIED)
        if "message" in told:
            next_step = str(told.get("next_step", "See its log."))
            return Word(standing=Standing.FAILED, message=str(told["message"]), next_step=next_step)
        return Word(standing=Standing.DONE if told.get("done") else Standing.DIED)


def _write(fd: int, content: Mapping[str, object]) -> None:
    os.pwrite(fd, json.dumps(content).encode().ljust(_ROOM_BYTES, b"\0"), 0)


def process_started_s() -> float:
    """When this process began, in seconds since 1970."""
    # The 22nd field; the second, the command's name, may hold blanks and brackets.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
