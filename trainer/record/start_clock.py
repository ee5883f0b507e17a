"""Clock of a start: the time that each phase takes until the end of the first step."""

import os
import time
from pathlib import Path
from typing import Literal

from trainer.health.events import utc_now
from trainer.health.watchdog import REQUEUE
from trainer.record.run_record import RunExit, StartUp

_START_TIME_FIELD = 22
"""Number of the field ``starttime`` in ``/proc/PID/stat``, counted from 1."""

Phase = Literal[
    "import",
    "staging",
    "process_group",
    "build",
    "restore",
    "first_batch",
    "compile",
    "first_step",
]


class StartClock:
    """Measures the phases until the end of the first step, and the whole run.

    ``began_s`` is the start, in seconds since 1970; None is now.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.time() if began_s is None else began_s
        self._last_s = self._began_s
        self._phase_s: dict[Phase, float] = {}
        # The start may be that of the process, which only the wall clock tells.
        self.monotonic_start_s = time.monotonic() - (time.time() - self._began_s)
        """Start of the clock on the scale of ``time.monotonic``."""
        self.is_over = False
        """True after the end of the first step."""

    def ended(self, phase: Phase) -> None:
        """Add the time since the last phase ended, or since the start, to a phase."""
        now_s = time.time()
        self._phase_s[phase] = self._phase_s.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def rehearsed(self) -> bool:
        """True after the warm-up before the first step, which creates communicators."""
        return "compile" in self._phase_s

    def total_s(self) -> float:
        """Return the seconds since the start."""
        return time.time() - self._began_s

    def startup(self) -> StartUp:
        """Return the time of all phases; 0 for those that did not happen."""
        fields = dict.fromkeys(StartUp.model_fields, 0.0)
        for phase, seconds in self._phase_s.items():
            fields[f"{phase}_s"] = seconds
        fields["total_s"] = self._last_s - self._began_s
        return StartUp(**fields)

    def exit(
        self, exit_code: int, reason: str, steps: int, checkpoint: str | None
    ) -> RunExit:
        """Return the content of ``exit.json`` for a run that ends now."""
        return RunExit(
            exit_code=exit_code,
            reason=reason,
            requeue=exit_code == REQUEUE,
            steps=steps,
            checkpoint=checkpoint,
            seconds=self.total_s(),
            finished_utc=utc_now(),
        )


def process_started_s() -> float:
    """Return the start time of this process, in seconds since 1970."""
    start_s = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")  # since the boot
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_s
    return time.time() - age_s


def start_ticks(process_id: int) -> int:
    """Return the start time of a process, in clock ticks since the boot."""
    stat = Path(f"/proc/{process_id}/stat").read_text()
    # The second field, the program's name in parentheses, may contain spaces and
    # parentheses, so fields are counted from the third; see proc_pid_stat(5).
    _, _, from_third_field = stat.rpartition(")")
    return int(from_third_field.split()[_START_TIME_FIELD - 3])
