"""How much time must be left for what is still to be done before a run can leave. No torch here."""

from collections import deque

_STEPS = 4
"""Steps between the moment when the time is over and the save: numbers are read some steps later."""
_SAVES = 1.5
_LEAVING_S = 2.0
_RECENT_STEPS = 20


class Reserve:
    """Learns from what steps and evaluations took."""

    def __init__(self) -> None:
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_s = 0.0

    def step_took(self, seconds: float) -> None:
        """A step is over, the evaluation that may have followed it not included."""
        self._step_s.append(seconds)

    def evaluation_took(self, seconds: float) -> None:
        """An evaluation is over."""
        self._evaluation_s = seconds

    def seconds(self, *, save_s: float, evaluation_due: bool) -> float:
        """What is still to be done when the time is over.

        Args:
            save_s: What a save takes.
            evaluation_due: Whether an evaluation follows the next step.
        """
        evaluation_s = self._evaluation_s if evaluation_due else 0.0
        return evaluation_s + _STEPS * max(self._step_s, default=0.0) + _SAVES * save_s + _LEAVING_S
