"""Signals, the time budget, and hung ranks: what may end a run from outside. No torch here.

A thread waits for signals and looks whether the training moves, as the main thread may wait for another rank where no
Python code runs.
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
"""Exit code: the state is saved, and starting again goes on."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SAME_SIGNAL_S = 1.0
"""torchrun and SLURM both pass signals on: what comes so soon after the first is the same request."""
PATIENCE_S = 10.0
"""A step that goes on for so long after a signal may not end before the process is killed, so the record says why."""
_LOOK_EVERY_S = 0.5
_LAST_RESORT_S = 30.0
"""How much later the interpreter's own watchdog ends a process whose threads cannot run."""
_REARM_EVERY_S = 10.0
_STOPPED_S = 5.0
"""Looks that lie further apart: nothing of this process ran."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Watchdog:
    """What the training tells and asks; does nothing until it is started."""

    def __init__(self, *, timeout_s: float, record: Callable[[str, int, bool], None] = lambda *_: None) -> None:
        """Watch; ``record`` is told why the process leaves without its main thread, after how many steps.

        Its last value is true if that is only to be feared: the process may be killed, and have no time to say so then.
        """
        self.timeout_s = timeout_s
        """Longest time without a sign of life."""
        self._record = record
        self._beat_s = time.monotonic()
        self.step = 0
        """Steps finished."""
        self._first: tuple[int, float] | None = None
        self._told = False
        self.ending = False
        """Whether how the run ended is settled."""
        self._armed_s = 0.0
        self._ends = threading.Event()
        self.traceback_file: Path | None = None
        """Where a hung rank says what it is doing, beside standard error."""

    def start(self) -> None:
        """Take over the signals, and begin to watch; only in the main thread."""
        self._sockets = _, writing = socket.socketpair()
        for one in self._sockets:
            one.setblocking(False)
        faulthandler.enable(sys.__stderr__ or sys.stderr, all_threads=True)
        # The interpreter writes a signal's number there at once, whatever the main thread is doing.
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in (*heard_signals(), signal.SIGTSTP):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def end_within(self, timeout_s: float) -> None:
        """Look out for a hang only: what is left to do takes less time, and no signal could ask for more."""
        self.ending = True
        self.timeout_s = timeout_s
        self.heartbeat()

    def stop(self) -> None:
        """Watch no more; further signals are left without effect, as the end is near."""
        self._ends.set()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    def heartbeat(self, step: int | None = None) -> None:
        """A sign of life."""
        self._beat_s = time.monotonic()
        if step is not None:
            self.step = step

    @property
    def asked_by(self) -> int | None:
        """The number of the first signal, if there was one."""
        return None if self._first is None else self._first[0]

    def _look(self) -> None:
        looked_s = time.monotonic()
        while not self._ends.is_set():
            self._arm_last_resort()
            ready, _, _ = select.select([self._sockets[0]], [], [], _LOOK_EVERY_S)
            if self._ends.is_set():
                return
            before_s, looked_s = looked_s, time.monotonic()
            if looked_s - before_s > _STOPPED_S:
                self._beat_s += looked_s - before_s  # stopped, as a scheduler that suspends jobs does: nothing hung
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
            _say(f"{name}: saving and leaving at the end of this step; a second signal leaves at once")
        elif now_s - self._first[1] >= SAME_SIGNAL_S:
            self._leave(f"a second signal, {name}: left without saving; the newest checkpoint is as it was")

    def _stop(self) -> None:
        """Stop, as the signal asks; SLURM sends it a moment before the one that cannot be caught."""
        faulthandler.cancel_dump_traceback_later()
        self._armed_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _check_pace(self) -> None:
        now_s = time.monotonic()
        still_s = now_s - self._beat_s
        if still_s > self.timeout_s:
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            if self.traceback_file is not None:
                with contextlib.suppress(OSError), self.traceback_file.open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            where = "" if self.traceback_file is None else f"; {self.traceback_file.name} says where"
            self._leave(
                f"nothing moved for {still_s:.0f} s after step {self.step}: it hangs, or waits for a rank that "
                f"does{where}"
            )
        if self._first is not None and not self._told and not self.ending and now_s - self._first[1] > PATIENCE_S:
            self._told = True
            name = signal.Signals(self._first[0]).name
            reason = f"{name}, and killed before the step ended and the state was saved"
            if not self.step:
                reason = f"{name} before the first step; another rank's messages may say why"
            with contextlib.suppress(Exception):  # this thread must go on
                self._record(reason, self.step, True)

    def _leave(self, reason: str) -> None:
        _say(reason)
        with contextlib.suppress(Exception):
            self._record(reason, self.step, False)
        os._exit(REQUEUE)

    def _arm_last_resort(self) -> None:
        """For a main thread that keeps all others from running."""
        now_s = time.monotonic()
        if now_s - self._armed_s > _REARM_EVERY_S:
            self._armed_s = now_s
            faulthandler.dump_traceback_later(
                self.timeout_s + _LAST_RESORT_S, file=sys.__stderr__ or sys.stderr, exit=True
            )


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
        sys.stderr.write(f"train: {text}\n")
        sys.stderr.flush()


def heard_signals() -> tuple[signal.Signals, ...]:
    """Those that ask to leave; under ``nohup`` the terminal may go."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (nohup and number == signal.SIGHUP))


def ignore_signals() -> None:
    """For loader processes: whoever signals all processes of a job means the training, which ends them itself."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Ask the system for SIGTERM when the process that started this one dies: torchrun, killed, leaves its ranks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class TimeBudget:
    """When the run has to be over, and what is still to be done then, learned from what was done so far."""

    def __init__(self, stop_after_s: float | None, started_s: float, slurm_left_s: float | None = None) -> None:
        ends = [] if stop_after_s is None else [started_s + stop_after_s]
        if slurm_left_s is not None:
            ends.append(time.monotonic() + slurm_left_s)
        self._end_s = min(ends, default=math.inf)
        self.step_s: deque[float] = deque(maxlen=20)
        """What the last steps took, the evaluations that may have followed them not included."""
        self.evaluation_s = 0.0
        """What the last evaluation took."""

    def over(self, *, save_s: float, evaluation_due: bool) -> bool:
        """Whether what has yet to be done would otherwise not be done in time."""
        # Four steps, as numbers are read some steps later, a save that may take longer, and 2 s to leave.
        reserve_s = 4 * max(self.step_s, default=0.0) + 1.5 * save_s + 2.0
        return time.monotonic() + reserve_s + evaluation_due * self.evaluation_s >= self._end_s


def slurm_left_s(environment: Mapping[str, str]) -> float | None:
    """Seconds until the end of this process's SLURM job; None outside of one, or where it has no limit."""
    with contextlib.suppress(ValueError):
        return float(environment.get("SLURM_JOB_END_TIME", "")) - time.time()
    job, squeue = environment.get("SLURM_JOB_ID", ""), shutil.which("squeue")
    if not job.isdecimal() or squeue is None:
        return None
    # Older versions do not tell the end in the environment.
    command = [squeue, "--noheader", "--job", job, "--format", "%L"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
        return parse_slurm_time_s(told.strip())
    return None


def parse_slurm_time_s(text: str) -> float | None:
    """Seconds in SLURM's ``[days-][[hours:]minutes:]seconds``; None for ``UNLIMITED`` and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
