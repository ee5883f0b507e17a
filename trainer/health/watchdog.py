"""Watchdog for signals and hung ranks. No torch here.

A thread waits for signals and checks that training makes progress, as the main thread
may be blocked in a collective, which runs no Python code.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.health.signals import SIGNALS, exit_signals

REQUEUE = 75
"""Exit code after which a restart resumes the run."""
SAME_SIGNAL_S = 1.0
"""Seconds in which a second signal is taken for a copy of the first, as torchrun and
SLURM both forward signals. A later one ends the process at once."""
PATIENCE_S = 10.0
"""Seconds after a signal before its name is recorded, in case the process is killed
before the step ends."""
_POLL_S = 0.5
"""Interval between two checks of progress, in seconds. A signal ends it early."""
_LAST_RESORT_S = 30.0
"""Seconds after the timeout until ``faulthandler`` ends a process whose threads cannot
run."""
_REARM_EVERY_S = 10.0
"""Interval at which that end is postponed, in seconds."""
_SUSPENDED_S = 5.0
"""Seconds between two checks, which are ``_POLL_S`` apart, above which the process must
have been suspended meanwhile."""
_MAX_SIGNALS_READ = 64
"""Signals read at once; others are read at the next check."""


class RecordExit(Protocol):
    """Function that records the exit of this rank."""

    def __call__(self, reason: str, step: int, *, is_likely: bool) -> None:
        """Record an exit.

        Args:
            reason: Reason of the exit.
            step: Number of finished steps.
            is_likely: True if the exit is only likely: training has not responded to a
                signal yet, but still may.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExitRequest:
    """Signal that requests an exit."""

    number: int
    """Number of the signal."""
    received_s: float
    """Time of the monotonic clock at which it was received."""

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


def _record_nothing(reason: str, step: int, *, is_likely: bool) -> None:
    """Record no exit."""


class Watchdog:
    """Thread that handles signals, and ends the process if training hangs.

    It has no effect until it is started.

    Args:
        timeout_s: Longest time without a heartbeat, in seconds.
        record: Function that records an exit which this thread causes or expects.
    """

    def __init__(
        self, *, timeout_s: float, record: RecordExit = _record_nothing
    ) -> None:
        self.timeout_s = timeout_s
        """Longest time without a heartbeat, in seconds."""
        self.step = 0
        """Number of finished steps."""
        self.ending = False
        """True if the outcome of the run is final."""
        self.traceback_file: Path | None = None
        """File for the traceback of a failed or hung rank, in addition to standard
        error."""
        self._record = record
        self._stopped = threading.Event()
        self._first_request: _ExitRequest | None = None
        self._first_request_is_recorded = False
        self._last_heartbeat_s = time.monotonic()
        self._last_rearmed_s = 0.0

    def start(self) -> None:
        """Install signal handlers and start the watching thread.

        Call it only in the main thread.
        """
        self._signal_reader, self._signal_writer = socket.socketpair()
        self._signal_reader.setblocking(False)
        self._signal_writer.setblocking(False)
        faulthandler.enable(sys.__stderr__ or sys.stderr, all_threads=True)
        # The interpreter writes a signal's number there at once, whatever the main
        # thread is doing.
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing, but without one a signal would end the process.
        for number in (*exit_signals(), signal.SIGTSTP):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def end_within(self, timeout_s: float) -> None:
        """Set a new timeout, as the run is about to end.

        Signals are ignored from now on; only a hang is watched for.
        """
        self.ending = True
        self.timeout_s = timeout_s
        self.heartbeat()

    def stop(self) -> None:
        """Stop watching; later signals have no effect."""
        self._stopped.set()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    def heartbeat(self, step: int | None = None) -> None:
        """Report progress, and optionally the number of finished steps."""
        self._last_heartbeat_s = time.monotonic()
        if step is not None:
            self.step = step

    @property
    def first_signal(self) -> int | None:
        """Number of the first signal, or None."""
        return None if self._first_request is None else self._first_request.number

    def _watch(self) -> None:
        """Handle signals and check for progress until the watchdog is stopped."""
        last_check_s = time.monotonic()
        while not self._stopped.is_set():
            self._postpone_last_resort()
            readable, _, _ = select.select([self._signal_reader], [], [], _POLL_S)
            if self._stopped.is_set():
                return
            now_s = time.monotonic()
            since_last_check_s = now_s - last_check_s
            last_check_s = now_s
            if since_last_check_s > _SUSPENDED_S:
                # A scheduler, for example, suspended the process, which is not a hang.
                self._last_heartbeat_s += since_last_check_s
            if readable:
                self._read_signals()
            self._check_progress()
            self._record_late_request()

    def _postpone_last_resort(self) -> None:
        """Postpone the exit by faulthandler.

        Its timer runs outside Python, so it acts even if the main thread holds the
        interpreter and this thread cannot run.
        """
        now_s = time.monotonic()
        if now_s - self._last_rearmed_s > _REARM_EVERY_S:
            self._last_rearmed_s = now_s
            faulthandler.dump_traceback_later(
                self.timeout_s + _LAST_RESORT_S,
                file=sys.__stderr__ or sys.stderr,
                exit=True,
            )

    def _read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._signal_reader.recv(_MAX_SIGNALS_READ):
                if number in SIGNALS and not self.ending:
                    self._handle_request(number)
                elif number == signal.SIGTSTP:
                    self._suspend()

    def _handle_request(self, number: int) -> None:
        """Note the first signal; exit at a second one."""
        request = _ExitRequest(number=number, received_s=time.monotonic())
        if self._first_request is None:
            self._first_request = request
            _write_message(
                f"{request.name}: saving a checkpoint after this step, then exiting; a"
                " second signal exits immediately"
            )
        elif request.received_s - self._first_request.received_s >= SAME_SIGNAL_S:
            self._exit(
                f"second signal, {request.name}: exited without saving; the newest"
                " checkpoint is intact"
            )

    def _suspend(self) -> None:
        """Suspend the process on SIGTSTP.

        SLURM sends it a moment before SIGSTOP, which cannot be caught.
        """
        faulthandler.cancel_dump_traceback_later()
        self._last_rearmed_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _check_progress(self) -> None:
        """Exit if there was no heartbeat for the timeout."""
        still_s = time.monotonic() - self._last_heartbeat_s
        if still_s <= self.timeout_s:
            return
        self._write_tracebacks()
        traceback = ""
        if self.traceback_file is not None:
            traceback = f"; traceback: {self.traceback_file.name}"
        self._exit(
            f"no progress for {still_s:.0f} s after step {self.step}: this rank hangs"
            f" or waits for one that does{traceback}"
        )

    def _write_tracebacks(self) -> None:
        """Write the tracebacks of all threads to standard error and to the file."""
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        if self.traceback_file is None:
            return
        # The hang may be that of the disk.
        with contextlib.suppress(OSError), self.traceback_file.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _record_late_request(self) -> None:
        """Record a signal to which training has not responded yet.

        The process may be killed before it does.
        """
        request = self._first_request
        if request is None or self._first_request_is_recorded or self.ending:
            return
        if time.monotonic() - request.received_s <= PATIENCE_S:
            return
        self._first_request_is_recorded = True
        if self.step:
            reason = f"{request.name}: killed before the step ended, without saving"
        else:
            reason = (
                f"{request.name} before the first step; see the messages of other ranks"
            )
        with contextlib.suppress(Exception):  # this thread must continue
            self._record(reason, self.step, is_likely=True)

    def _exit(self, reason: str) -> None:
        """Record the reason if possible, and end the process at once.

        ``sys.exit`` would only end this thread.
        """
        _write_message(reason)
        with contextlib.suppress(Exception):
            self._record(reason, self.step, is_likely=False)
        os._exit(REQUEUE)


def _write_message(text: str) -> None:
    # The reader may have closed the stream.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"train: {text}\n")
        sys.stderr.flush()
