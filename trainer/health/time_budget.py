"""Time budget of a run: when to stop so that a save still fits. No torch here."""

import math
import time
from collections import deque

_RESERVED_STEPS = 4
"""Steps for which time is reserved, as their numbers are read some steps later."""
_RESERVED_SAVES = 1.5
"""Saves for which time is reserved, as one may take longer than the last."""
_RESERVED_FOR_EXIT_S = 2.0
"""Time reserved for the exit of all ranks after the save, in seconds."""


class TimeBudget:
    """Time limit of the run, less the time that a save and the exit will take.

    That time is estimated from past steps, saves and evaluations.
    """

    def __init__(
        self,
        stop_after_s: float | None,
        started_s: float,
        slurm_left_s: float | None = None,
    ) -> None:
        """Start a budget.

        Args:
            stop_after_s: Time limit of the run; None without one.
            started_s: Time of the monotonic clock from which it counts.
            slurm_left_s: Time until the SLURM job ends; None without one.
        """
        self._end_s = math.inf
        if stop_after_s is not None:
            self._end_s = started_s + stop_after_s
        if slurm_left_s is not None:
            self._end_s = min(self._end_s, time.monotonic() + slurm_left_s)
        self.step_s: deque[float] = deque(maxlen=20)
        """Durations of the last steps, in seconds, without evaluations."""
        self.evaluation_s = 0.0
        """Duration of the last evaluation, in seconds; 0 before the first one."""

    def is_over(self, *, save_s: float, evaluation_due: bool) -> bool:
        """Return whether to stop now, as another step would leave too little time.

        Args:
            save_s: Duration of a save, in seconds.
            evaluation_due: Whether an evaluation follows the current step.
        """
        # Before the first step, none has a known duration.
        longest_step_s = max(self.step_s) if self.step_s else 0.0
        reserve_s = (
            _RESERVED_STEPS * longest_step_s
            + _RESERVED_SAVES * save_s
            + _RESERVED_FOR_EXIT_S
        )
        evaluation_s = self.evaluation_s if evaluation_due else 0.0
        return time.monotonic() + reserve_s + evaluation_s >= self._end_s
