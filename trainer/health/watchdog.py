"""Watchdog for signals and hung ranks, and the time budget of a run. No torch here.

A thread waits for signals and checks that training makes progress, as the main thread
may be blocked in a collective, which runs no Python code.
"""

import contextlib
import ctypes
import faulthandler
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

REQUEUE = 75
"""Exit code after which a restart resumes the run."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SAME_SIGNAL_S = 1.0
"""Seconds in which a second signal is the same request, as torchrun and SLURM both
forward signals."""
PATIENCE_S = 10.0
"""Seconds after a signal before its name is recorded, in case the process is killed
before the step ends."""
_LOOK_EVERY_S = 0.5
_LAST_RESORT_S = 30.0
"""Seconds after the timeout until ``faulthandler`` ends a process whose threads cannot
run."""
_REARM_EVERY_S = 10.0
_STOPPED_S = 5.0
"""Seconds between two checks above which the process must have been suspended."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Watchdog:
    """Watchdog for signals and progress; it has no effect until it is started."""

    def __init__(
        self,
        *,
        timeout_s: float,
        record: Callable[[str, int, bool], None] = lambda *_: None,
    ) -> None:
        """Set the timeout and ``record``, called with an exit's reason, finished steps, and if it is only likely."""
        self.timeout_s = timeout_s
        """Longest time without a heartbeat, in seconds."""
        self._record = record
        self._beat_s = time.monotonic()
        self.step = 0
        self._first: tuple[int, float] | None = None
        self._told = False
        self.ending = False
        """True if the outcome of the run is final."""
        self._armed_s = 0.0
        self._ends = threading.Event()
        self.traceback_file: Path | None = None
        """File for the traceback of a failed or hung rank, in addition to standard
        error."""

    def start(self) -> None:
        """Install signal handlers and start the watching thread.

        Call it only in the main thread.
        """
        self._sockets = _, writing = socket.socketpair()
        for one in self._sockets:
            one.setblocking(False)
        faulthandler.enable(sys.__stderr__ or sys.stderr, all_threads=True)
        # The interpreter writes a signal's number there at once, whatever the main
        # thread is doing.
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in (*exit_signals(), signal.SIGTSTP):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def end_within(self, timeout_s: float) -> None:
        """Ignore signals from now on and only watch for a hang, with a new timeout: the run is about to end."""
        self.ending = True
        self.timeout_s = timeout_s
        self.heartbeat()

    def stop(self) -> None:
        """Stop watching; later signals have no effect."""
        self._ends.set()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    def heartbeat(self, step: int | None = None) -> None:
        """Report progress, and optionally the number of finished steps."""
        self._beat_s = time.monotonic()
        if step is not None:
            self.step = step

    @property
    def first_signal(self) -> int | None:
        """Number of the first signal, or None."""
        return None if self._first is None else self._first[0]

    def _look(self) -> None:
        looked_s = time.monotonic()
        while not self._ends.is_set():
            if (now_s := time.monotonic()) - self._armed_s > _REARM_EVERY_S:
                # Postpone faulthandler's exit, which acts even if the main thread keeps
                # all others from running.
                self._armed_s, after_s = now_s, self.timeout_s + _LAST_RESORT_S
                faulthandler.dump_traceback_later(
                    after_s, file=sys.__stderr__ or sys.stderr, exit=True
                )
            ready, _, _ = select.select([self._sockets[0]], [], [], _LOOK_EVERY_S)
            if self._ends.is_set():
                return
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > _STOPPED_S:
                # Suspended, for example by a scheduler: not a hang.
                self._beat_s += looked_s - before_s
            if ready:
                with contextlib.suppress(BlockingIOError):
                    for number in self._sockets[0].recv(64):
                        if number in SIGNALS and not self.ending:
                            self._signalled(number)
                        elif number == signal.SIGTSTP:
                            self._stop()
            self._check_pace()

    def _signalled(self, number: int) -> None:
        now_s = time.monotonic()
        name = signal.Signals(number).name
        if self._first is None:
            self._first = (number, now_s)
            _say(
                f"{name}: saving a checkpoint after this step, then exiting; a second"
                " signal exits immediately"
            )
        elif now_s - self._first[1] >= SAME_SIGNAL_S:
            self._leave(
                f"second signal, {name}: exited without saving; the newest checkpoint"
                " is intact"
            )

    def _stop(self) -> None:
        """Suspend the process on SIGTSTP, which SLURM sends a moment before SIGSTOP, which cannot be caught."""
        faulthandler.cancel_dump_traceback_later()
        self._armed_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _check_pace(self) -> None:
        now_s = time.monotonic()
        still_s = now_s - self._beat_s
        if still_s > self.timeout_s:
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            if self.traceback_file is not None:
                with (
                    contextlib.suppress(OSError),
                    self.traceback_file.open("w") as file,
                ):
                    faulthandler.dump_traceback(file, all_threads=True)
            where = (
                ""
                if self.traceback_file is None
                else f"; traceback: {self.traceback_file.name}"
            )
            what = f"this rank hangs or waits for one that does{where}"
            self._leave(
                f"no progress for {still_s:.0f} s after step {self.step}: {what}"
            )
        if (
            self._first is not None
            and not self._told
            and not self.ending
            and now_s - self._first[1] > PATIENCE_S
        ):
            self._told = True
            name = signal.Signals(self._first[0]).name
            early = f"{name} before the first step; see the messages of other ranks"
            reason = (
                f"{name}: killed before the step ended, without saving"
                if self.step
                else early
            )
            with contextlib.suppress(Exception):  # this thread must continue
                self._record(reason, self.step, True)

    def _leave(self, reason: str) -> None:
        _say(reason)
        with contextlib.suppress(Exception):
            self._record(reason, self.step, False)
        os._exit(REQUEUE)


def _say(text: str) -> None:
    # The reader may have closed the stream.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"train: {text}\n")
        sys.stderr.flush()


def exit_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request an exit; under ``nohup``, without SIGHUP."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(
        number for number in SIGNALS if not (nohup and number == signal.SIGHUP)
    )


def ignore_signals() -> None:
    """Ignore signals in a DataLoader worker: a signal to all processes of a job is for training, which ends workers."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Request SIGTERM when the parent process dies, as a killed torchrun leaves its ranks running."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class TimeBudget:
    """Time limit of the run, and the time needed to save and exit, estimated from past steps and evaluations."""

    def __init__(
        self,
        stop_after_s: float | None,
        started_s: float,
        slurm_left_s: float | None = None,
    ) -> None:
        own_end_s = math.inf if stop_after_s is None else started_s + stop_after_s
        slurm_end_s = (
            math.inf if slurm_left_s is None else time.monotonic() + slurm_left_s
        )
        self._end_s = min(own_end_s, slurm_end_s)
        self.step_s: deque[float] = deque(maxlen=20)
        """Durations of the last steps, in seconds, without evaluations."""
        self.evaluation_s = 0.0

    def is_over(self, *, save_s: float, evaluation_due: bool) -> bool:
        """Return whether to stop now to have enough time left for a save, and for an evaluation if one is due."""
        # Four steps, as numbers are read some steps later, a save that may take longer,
        # and 2 s to exit.
        reserve_s = 4 * max(self.step_s, default=0.0) + 1.5 * save_s + 2.0
        return (
            time.monotonic() + reserve_s + evaluation_due * self.evaluation_s
            >= self._end_s
        )


def slurm_left_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the end of this process's SLURM job.

    None without a job or a time limit.
    """
    with contextlib.suppress(ValueError):
        return float(environment.get("SLURM_JOB_END_TIME", "")) - time.time()
    job, squeue = environment.get("SLURM_JOB_ID", ""), shutil.which("squeue")
    if not job.isdecimal() or squeue is None:
        return None
    # Older versions do not set the end in the environment.
    command = [squeue, "--noheader", "--job", job, "--format", "%L"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        ).stdout
        return parse_slurm_time_s(told.strip())
    return None


def parse_slurm_time_s(text: str) -> float | None:
    """Parse SLURM's ``[days-][[hours:]minutes:]seconds`` into seconds.

    None for ``UNLIMITED`` and the like.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
