"""Work on an untrusted file in a child with bounded time, memory and output.

The child is forked and inherits all loaded modules, so the caller must be light.
"""

import contextlib
import errno
import json
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autotune.base.process import end_with_parent

MAX_WALL_S = 300.0
"""Time limit of a child, in seconds. It is generous: a program of 95 MiB takes under a
minute, all others of a common distribution a few seconds."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
_MAX_REASON_CHARACTERS = 200
"""Length after which a reason is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Limits of a child process."""

    wall_s: float = MAX_WALL_S
    """Limit of wall-clock time, and of CPU time."""
    added_bytes: int = 800 * 2**20
    """Memory beyond that of the forking process: a 256 MiB file, its sections and its
    largest function's code fit."""
    output_bytes: int = 2**27
    """Largest file that it may write, above the size at which a piece is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """A slice that was read to its end."""

    samples: int
    piece: int
    """Number of the piece that the last sample went to."""
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A slice that was not read to its end, whose samples must not be used."""

    reason: str
    killed: bool = False
    """True if the file may be usable, as its reader was killed by you, or by the kernel
    for lack of memory."""


Outcome = Extracted | Unread


class CancelledError(Exception):
    """The requesting process has ended; the child was killed."""


def run_bounded(
    work: Callable[[], Sequence[Outcome]],
    limits: ChildLimits,
    *,
    cancel_fd: int | None = None,
) -> Sequence[Outcome] | Unread:
    """Run ``work`` in a child within the limits.

    The child is killed when ``cancel_fd`` becomes readable, or its other end is closed.

    Returns:
        The outcomes, or ``Unread`` if the work raises, crashes or exceeds the limits.

    Raises:
        CancelledError: If the child was killed because of ``cancel_fd``.
        OSError: If the child could not write because the disk is full.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb"):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(work, limits, write_fd, parent)
        try:
            unread = _wait(pid, limits, cancel_fd)
        finally:
            # Kill the child's process group, which holds only its processes, and reap
            # it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            # Between fork and setsid it is still in the group of its parent.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if unread:
            return unread
        try:
            # The capacity of a pipe, so that the child does not block.
            reply = json.loads(os.read(read_fd, 2**16))
            if "reason" in reply:
                return Unread(reason=printable(str(reply["reason"])))
            if "errno" not in reply:
                return [outcome_of(outcome) for outcome in reply["outcomes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return Unread(reason="its reader did not reply")
        raise OSError(reply["errno"], os.strerror(reply["errno"]))


def _wait(pid: int, limits: ChildLimits, cancel_fd: int | None) -> Unread | None:
    """Wait for the child's end without reaping it.

    Its id stays reserved until its group is killed.
    """
    with os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as end_of_child:
        watched: list[Any] = [end_of_child]
        if cancel_fd is not None:
            watched.append(cancel_fd)
        ready, _, _ = select.select(watched, [], [], limits.wall_s)
    if ready == [cancel_fd]:
        raise CancelledError
    if not ready:
        return Unread(reason=f"not finished after {limits.wall_s:g} s")
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None  # blocks without WNOHANG
    if end.si_code == os.CLD_EXITED:
        if end.si_status == 0:
            return None
        return Unread(reason=f"its reader exited with status {end.si_status}")
    if end.si_status == signal.SIGXCPU:
        return Unread(reason=f"not finished after {limits.wall_s:g} s of CPU time")
    return Unread(
        reason=f"its reader was killed by signal {end.si_status}",
        killed=end.si_status == signal.SIGKILL,
    )


def outcome_of(reply: Mapping[str, Any]) -> Outcome:
    """Make an outcome of untrusted fields.

    Raises:
        KeyError: If a field is missing.
        ValueError: If a field is no whole number.
        TypeError: If a field cannot be a number.
    """
    if "reason" in reply:
        return Unread(
            reason=printable(str(reply["reason"])), killed=bool(reply.get("killed"))
        )
    counts = {field.name: int(reply[field.name]) for field in fields(Extracted)}
    return Extracted(**counts)


def printable(text: str) -> str:
    """Return one short line without control characters.

    An untrusted file must not write to a terminal.
    """
    line = "".join(character if character.isprintable() else "?" for character in text)
    if len(line) <= _MAX_REASON_CHARACTERS:
        return line
    return line[: _MAX_REASON_CHARACTERS - 1] + "…"


def _child(
    work: Callable[[], Sequence[Outcome]],
    limits: ChildLimits,
    write_fd: int,
    parent: int,
) -> None:
    """Run the work and exit, without returning.

    An exception must not reach the copy of the caller's stack.
    """
    status = 1
    try:
        # If the parent dies, this process must stop writing, as its output would not be
        # undone.
        end_with_parent(parent)
        os.setsid()
        null_fd = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null_fd, fd)
        _set_limits(limits)
        os.write(write_fd, json.dumps(_reply(work, limits)).encode())
        status = 0
    finally:
        os._exit(status)


def _set_limits(limits: ChildLimits) -> None:
    """Set soft and hard limits, without exceeding the present hard ones."""
    # The sixth figure is data and stack, which the limit counts; reserved address space
    # is harmless.
    used_pages = int(Path("/proc/self/statm").read_text().split()[5])
    used_bytes = used_pages * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_DATA, used_bytes + limits.added_bytes),
        # Whole seconds, rounded up; the wall clock is the exact bound.
        (resource.RLIMIT_CPU, int(limits.wall_s) + 1),
        (resource.RLIMIT_FSIZE, limits.output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, allowed))


def _reply(
    work: Callable[[], Sequence[Outcome]], limits: ChildLimits
) -> dict[str, object]:
    """Run the work; return its outcomes, the reason of its failure, or an errno."""
    try:
        return {"outcomes": [asdict(outcome) for outcome in work()]}
    except MemoryError:
        limit_mib = limits.added_bytes / 2**20
        return {"reason": f"requires more than {limit_mib:.0f} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - a hostile file can make a parser raise anything
        # A full disk is not the file's fault: the caller must stop.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return {"errno": error.errno}
        return {"reason": reason_of(error)}


def reason_of(error: Exception) -> str:
    """Return the message of an error, or its type if it has none."""
    return printable(str(error) or type(error).__name__)
