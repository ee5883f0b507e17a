"""Programs that stages start: each in a session of its own, bounded by a time box, and never left behind."""

import collections
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.process import end_with_parent
from benchmarks.gpu.check.results import NO_TIME

ROOT = Path(__file__).parents[3]
ENDING_S = 3.0
"""Of the time, kept for a program that is asked to end and has to be killed."""
_TAIL_LINES = 15
_POLL_S = 0.05
_CAUSE = re.compile(r"error: |(\w+\.)*[A-Z]\w*(:|$)")
"""A command's own message, or the line of a traceback that names the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a program."""

    exit_code: int
    cut_off: bool
    """Whether it was ended because its time was over."""
    tail: str
    """The last lines of its standard error."""

    @property
    def why(self) -> str:
        """Why it did not come to its own good end."""
        if self.cut_off:
            return f"{NO_TIME}: it was cut off"
        lines = self.tail.splitlines()
        # Tables show the first line alone: of a traceback the one with the exception, not where the tail begins.
        causes = [line for line in lines if _CAUSE.match(line)] or lines or ["nothing was said"]
        return "\n".join([f"it ended with code {self.exit_code}: {causes[-1]}", *lines])


class Programs:
    """Runs programs of this checkout, one at a time or several.

    Args:
        scratch: Where they put temporary files, so that those of one that was killed go with the directory.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def run(
        self,
        arguments: Sequence[str],
        limit_s: float,
        on_line: Callable[[str], None],
        *,
        cwd: Path = ROOT,
        stdout: Path | None = None,
    ) -> Ended:
        """Run ``python ARGUMENTS`` for at most so many seconds, and end all of its processes.

        Args:
            arguments: After the interpreter, such as ``-m module``.
            limit_s: Asked to end that much later, less what ending may take, and killed at the latest then.
            on_line: Takes each line of its standard error.
            cwd: Its working directory; the project is found from any.
            stdout: A file for its standard output; None drops it.
        """
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with contextlib.ExitStack() as files:
            out = subprocess.DEVNULL if stdout is None else files.enter_context(stdout.open("w"))
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                # A check that is killed leaves nothing behind.
                preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - two system calls, no locks
                env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._scratch)},
            )
        self._running.add(process)
        if self._closed:  # the check has ended meanwhile
            _kill(process)
        tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        reader = threading.Thread(target=_read, args=(process, tail, on_line), daemon=True)
        reader.start()
        try:
            cut_off = not _within(process, max(0.0, limit_s - ENDING_S))
        finally:
            _end(process)
            self._running.discard(process)
        reader.join(timeout=1.0)
        return Ended(exit_code=process.returncode, cut_off=cut_off, tail="\n".join(tail))

    def close(self) -> None:
        """Kill what still runs."""
        self._closed = True
        for process in tuple(self._running):
            _kill(process)


def _within(process: "subprocess.Popen[str]", seconds: float) -> bool:
    """Whether it ends by itself in time; it is not reaped, so that nobody else gets its number."""
    end_s = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _end(process: "subprocess.Popen[str]") -> None:
    """Ask it, and then kill it and all that it started."""
    if not _within(process, 0.0):
        process.terminate()
        _within(process, ENDING_S / 2)
    _kill(process)
    process.wait()


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(process: "subprocess.Popen[str]", tail: "collections.deque[str]", on_line: Callable[[str], None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip():
            tail.append(line.rstrip())
            on_line(line.rstrip())
