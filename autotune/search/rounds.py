"""Read windows one after the other in rounds, so that what a machine's minutes do to one they do to all.

Every other round is read backwards: a drift within rounds cancels too. A round is taken from the trial log whole or not
at all, as its windows are compared with each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.core.outcome import Contaminated, Measured, Outcome, describe
from autotune.core.trial import Trial
from autotune.errors import Undecided
from autotune.search.trials import TrialRunner

ATTEMPTS = 3
"""A window that somebody else spoiled is read again so often."""
Key = TypeVar("Key")


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Reads windows, and knows what they took."""

    runner: TrialRunner
    windows: int = 0
    """That gave figures."""
    seconds: float = 0.0
    """Of all windows, those from the trial log included."""

    @property
    def taken(self) -> dict[str, Any]:
        """Windows and seconds, as evidence keeps them."""
        return {"windows": self.windows, "seconds": round(self.seconds, 3)}

    def read(
        self,
        number: int,
        trials: Mapping[Key, tuple[Trial, str]],
        check: Callable[[Key, Outcome, float], None] = lambda key, outcome, seconds: None,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of a round.

        What failed in a round of the trial log has another chance alone; should it run now, the whole round is read
        again.

        ``trials`` are windows with their labels; ``check`` is called after each with its seconds, and ends the round by
        an exception.
        """

        def in_turn(*, anew: bool) -> dict[Key, Outcome]:
            found = {}
            for key in turn(number, list(trials)):
                found[key] = self.run(*trials[key], anew=anew)
                check(key, found[key], self.runner.finished[-1].seconds)
            return found

        late = [key for key, (trial, _) in trials.items() if not self.runner.knows(trial)]
        again = all(self.runner.has_failed(trials[key][0]) for key in late)
        found = in_turn(anew=not again)
        return in_turn(anew=True) if again and any(isinstance(found[key], Measured) for key in late) else found

    def run(self, trial: Trial, label: str, *, anew: bool = False) -> Outcome:
        """Return a window's outcome; what others spoiled is read again."""
        for attempt in range(ATTEMPTS):
            outcome = self.runner.run(trial, label + (f", try {attempt + 1}" if attempt else ""), anew=anew)
            self.seconds += self.runner.finished[-1].seconds
            if not isinstance(outcome, Contaminated):
                break
        self.windows += isinstance(outcome, Measured)
        return outcome


def unmeasured(what: str, outcome: Outcome, runner: TrialRunner) -> Undecided:
    """Return the error that a trial came to nothing that could be compared."""
    detail = "" if isinstance(outcome, Measured) else outcome.detail
    return Undecided(
        f"{what} was not measured ({describe(outcome)}):\n{detail}".rstrip(),
        next_step=f"Mend that and run the same command: it resumes from {runner.ledger.directory}.",
    )


def turn(number: int, keys: Sequence[Key]) -> list[Key]:
    """Return the order of a round: backwards if it is odd."""
    return list(keys if number % 2 == 0 else reversed(keys))
