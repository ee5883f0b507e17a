"""Windows of settings that are explored: what they are, and reading them beside each other."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.knobs import Knobs
from autotune.core.outcome import Measured, Outcome
from autotune.core.trial import FeedFigures, Trial
from autotune.decide.knob_space import useful_share
from autotune.search.rounds import Rounds
from autotune.search.workers import Asked, SweepRequest, feed_trial
from trainer.config import Layout, TrainConfig

SHORT_PART = 0.25
"""Of a window: what a first look takes."""
COMPILING_S = 60.0
"""What a window of compiled layers takes longer, until one was read: on a CPU a minute, on GPUs less."""
LEAST_S = 0.001
"""No window counts as less: ledgers keep no more digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """What to explore."""

    windows: SweepRequest
    """Its configuration is the unexplored one; its budget is for the search and what follows it."""
    cells: tuple[Knobs, ...]
    """The unexplored one first."""
    global_rows: Mapping[Layout, int]
    """The same global batch, by layout."""
    real_shares: Mapping[Layout, float | None]
    """Part of a row's places that holds real tokens, in the mean of the dataset; None where windows must tell."""
    most_trials: int
    left_out: tuple[str, ...] = ()
    fits: Callable[[Knobs], bool] = lambda knobs: True
    """By prediction; asked once a cell is proposed, as tracing takes seconds."""

    @property
    def unexplored(self) -> Knobs:
        """What the profile has."""
        return self.cells[0]

    def config_of(self, cell: Knobs) -> TrainConfig:
        """The unexplored configuration with the knobs of a cell, at the same global batch."""
        rows = {"global_batch_rows": self.global_rows[cell.layout]}
        other = {"global_batch_tokens": None, "global_batch_samples": None}
        return self.windows.config.model_copy(update=cell.settings() | rows | other)

    def rate_of(self, cell: Knobs, figures: FeedFigures) -> float:
        """Real tokens/s of a window, as training has them at the global batch."""
        share = self.real_shares[cell.layout]
        real = figures.real_tokens_per_s if share is None else share * figures.slot_tokens_per_s
        return real * useful_share(cell, self.global_rows, self.windows.limits.local_ranks)


@dataclass(slots=True, kw_only=True)
class Windows:
    """Reads windows, and knows what they took."""

    request: ExploreRequest
    reading: Rounds
    rounds: int = 0
    taken_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of windows, start included, without and with compiled layers."""

    def read(self, cells: Sequence[Knobs], *, short: bool) -> dict[Knobs, Outcome]:
        """One window of each, one after the other, the unexplored settings among them.

        Raises:
            Undecided: If the unexplored settings did not run.
        """
        number, names = self.rounds, [cell.name for cell in cells]
        self.rounds += 1
        what = "a first look" if short else f"round {number + 1}"
        trials = {cell: (self.trial(cell, number, names, short=short), f"{cell.name} ({what})") for cell in cells}

        def check(cell: Knobs, outcome: Outcome, seconds: float) -> None:
            self.taken_s[cell.compile_layers].append(seconds)
            if cell == self.request.unexplored and not isinstance(outcome, Measured):
                raise self.reading.unmeasured("the unexplored settings", outcome)

        return self.reading.read(number, trials, check)

    def rates(self, outcomes: Mapping[Knobs, Outcome]) -> dict[Knobs, float]:
        """Real tokens/s of each that ran."""
        return {
            cell: self.request.rate_of(cell, FeedFigures.of(outcome))
            for cell, outcome in outcomes.items()
            if isinstance(outcome, Measured)
        }

    def trial(self, cell: Knobs, number: int, names: list[str], *, short: bool, **changes: Any) -> Trial:  # noqa: ANN401
        """A window of a cell in a round, beside those of these names; changes are of what is measured."""
        windows = self.request.windows
        asked = Asked(name=cell.name, config=self.request.config_of(cell), cached=True)
        trial = feed_trial(windows, asked, number, names)
        length = {"window_s": windows.window_s * SHORT_PART, "min_steps": 1} if short else {"min_steps": 2}
        return replace(trial, measured=trial.measured | length | changes)

    def takes_s(self, cell: Knobs) -> float:
        """About so long, by those of its kind so far."""
        plain = statistics.median(self.taken_s[False] or [1.0])
        compiled = statistics.median(self.taken_s[True] or [plain + COMPILING_S])
        return max(LEAST_S, compiled if cell.compile_layers else plain)
