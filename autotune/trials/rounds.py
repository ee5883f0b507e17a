"""Timed windows of several configurations to compare, measured in rounds.

A round has one window of each configuration, so that slow changes of a machine affect
all of them. Every other round runs backwards, so that a drift within rounds cancels. A
round is reused from the trial log completely or not at all, because its windows are
compared with each other.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.errors import BadInput
from autotune.trials.outcomes import Contaminated, Measured, Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial

ATTEMPTS = 3
"""Attempts at a timed window that other processes or faults disturb."""
Key = TypeVar("Key")
"""Identifies a window within a round, such as the name of its recipe."""


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Measurement of timed windows in rounds, which counts windows and their time."""

    runner: TrialRunner
    windows: int = 0
    """Number of windows that gave figures so far."""
    seconds: float = 0.0
    """Seconds that all windows took so far, those from the trial log included."""

    @property
    def totals(self) -> dict[str, Any]:
        """``windows`` and ``seconds`` as fields of an evidence table."""
        return {"windows": self.windows, "seconds": round(self.seconds, 3)}

    def measure_round(
        self,
        number: int,
        trials: Mapping[Key, tuple[Trial, str]],
        check: Callable[[Key, Outcome, float], None],
        on_rejected: Callable[[Key, BadInput], None] | None = None,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of a round.

        A round that is in the trial log is reused, and only its failed windows are
        tried again. If one of them succeeds, the whole round is measured again, as
        windows of one round must be measured together.

        Args:
            number: Number of the round from 0; odd ones run backwards.
            trials: Trial of each window, and its label for people.
            check: Called with the key, the outcome and the seconds of each window; may
                raise to end the round.
            on_rejected: Called with the key and the error of a window whose input is
                unusable, which is then left out. None raises the error.

        Returns:
            The outcomes in the order in which they were measured.
        """
        if number % 2 == 1:
            trials = dict(reversed(list(trials.items())))
        measure = functools.partial(
            self._measure_windows, trials, check=check, on_rejected=on_rejected
        )
        unknown_keys = [
            key for key, (trial, _) in trials.items() if not self.runner.knows(trial)
        ]
        has_run = self._has_run(trials, may_reject=on_rejected is not None)
        outcomes = measure(remeasure=not has_run)
        has_recovered = any(
            isinstance(outcomes.get(key), Measured) for key in unknown_keys
        )
        if has_run and has_recovered:
            outcomes = measure(remeasure=True)
        return outcomes

    def _has_run(
        self, trials: Mapping[Key, tuple[Trial, str]], *, may_reject: bool
    ) -> bool:
        """Return whether a round was run before, with or without failures.

        Args:
            trials: As for ``measure_round``.
            may_reject: True if windows may have been rejected. They are in no trial
                log, so one known window is enough then.
        """
        unknown_trials = [
            trial for trial, _ in trials.values() if not self.runner.knows(trial)
        ]
        if may_reject and len(unknown_trials) < len(trials):
            return True
        return all(self.runner.has_failed(trial) for trial in unknown_trials)

    def _measure_windows(
        self,
        trials: Mapping[Key, tuple[Trial, str]],
        *,
        check: Callable[[Key, Outcome, float], None],
        on_rejected: Callable[[Key, BadInput], None] | None,
        remeasure: bool,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of windows in their order.

        Args:
            trials: As for ``measure_round``.
            check: As for ``measure_round``.
            on_rejected: As for ``measure_round``.
            remeasure: Measure windows even if the trial log has their outcomes.
        """
        outcomes = {}
        for key, (trial, label) in trials.items():
            try:
                outcome = self.measure_window(trial, label, remeasure=remeasure)
            except BadInput as error:
                if on_rejected is None:
                    raise
                on_rejected(key, error)
                continue
            check(key, outcome, self.runner.finished[-1].seconds)
            outcomes[key] = outcome
        return outcomes

    def measure_window(
        self, trial: Trial, label: str, *, remeasure: bool = False
    ) -> Outcome:
        """Return a window's outcome.

        A window that other processes or faults disturbed is measured again, at most
        ``ATTEMPTS`` times in all. Arguments are as for ``TrialRunner.run``.
        """
        for attempt in range(1, ATTEMPTS + 1):
            attempt_label = label if attempt == 1 else f"{label}, attempt {attempt}"
            outcome = self.runner.run(trial, attempt_label, remeasure=remeasure)
            self.seconds += self.runner.finished[-1].seconds
            if not isinstance(outcome, Contaminated):
                break
        if isinstance(outcome, Measured):
            self.windows += 1
        return outcome
