"""What the time until the first step goes into. No torch here."""

import time
from typing import Literal

from trainer.record import StartUp

Phase = Literal["import", "staging", "process_group", "build", "restore", "first_batch", "compile", "first_step"]


class StartClock:
    """Counts seconds until the end of the first step, phase by phase.

    Args:
        began_s: When the process began, by ``time.time``.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.time() if began_s is None else began_s
        self._last_s = self._began_s
        self._seconds: dict[Phase, float] = {}
        self.monotonic_start_s = time.monotonic() - (time.time() - self._began_s)
        """The beginning, by ``time.monotonic``."""
        self.is_over = False
        """Whether the first step has ended."""

    def ended(self, phase: Phase) -> None:
        """Count the time since the last call, or the beginning, to a phase."""
        now_s = time.time()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def rehearsed(self) -> bool:
        """Whether a step was tried out before the first, so that every communicator has been made."""
        return "compile" in self._seconds

    def total_s(self) -> float:
        """Since the beginning."""
        return time.time() - self._began_s

    def startup(self) -> StartUp:
        """All phases; those that did not happen took no time."""
        seconds = {f"{phase}_s": value for phase, value in self._seconds.items()}
        names = [name for name in StartUp.model_fields if name != "total_s"]
        return StartUp(**{name: seconds.get(name, 0.0) for name in names}, total_s=self._last_s - self._began_s)
