"""Clock of a start: the time that each phase takes until the end of the first step."""

import time
from typing import Literal

from trainer.formats.events import utc_now
from trainer.formats.run_record import RunExit, StartUp
from trainer.health.watchdog import REQUEUE

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
"""Phase of a start; the field of ``StartUp`` with its name describes it."""


class StartClock:
    """Measures the phases until the end of the first step, and the whole run.

    Args:
        began_s: Start of the clock, in seconds since 1970; None is now.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.time() if began_s is None else began_s
        self._last_s = self._began_s
        self._phase_s: dict[Phase, float] = {}
        """Seconds of each phase that has ended."""
        # The start may be that of the process, which only the wall clock tells.
        self.monotonic_start_s = time.monotonic() - (time.time() - self._began_s)
        """Start of the clock on the scale of ``time.monotonic``."""
        self.is_over = False
        """True after the end of the first step."""

    def ended(self, phase: Phase) -> None:
        """Add the time since the last phase ended, or since the start, to a phase."""
        now_s = time.time()
        self._phase_s[phase] = self._seconds_of(phase) + now_s - self._last_s
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
        return StartUp(
            import_s=self._seconds_of("import"),
            staging_s=self._seconds_of("staging"),
            process_group_s=self._seconds_of("process_group"),
            build_s=self._seconds_of("build"),
            restore_s=self._seconds_of("restore"),
            first_batch_s=self._seconds_of("first_batch"),
            compile_s=self._seconds_of("compile"),
            first_step_s=self._seconds_of("first_step"),
            total_s=self._last_s - self._began_s,
        )

    def _seconds_of(self, phase: Phase) -> float:
        return self._phase_s.get(phase, 0.0)

    def exit(
        self, exit_code: int, reason: str, steps: int, checkpoint: str | None
    ) -> RunExit:
        """Return the content of ``exit.json`` for a run that ends now.

        Args:
            exit_code: As in ``RunExit``.
            reason: As in ``RunExit``.
            steps: As in ``RunExit``.
            checkpoint: As in ``RunExit``.
        """
        return RunExit(
            exit_code=exit_code,
            reason=reason,
            requeue=exit_code == REQUEUE,
            steps=steps,
            checkpoint=checkpoint,
            seconds=self.total_s(),
            finished_utc=utc_now(),
        )
