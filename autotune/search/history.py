"""Search request, and the measurements of each configuration so far."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.evidence.explore import Configuration
from autotune.search.decide import (
    Posterior,
    Seen,
    expected_gain_over,
    posterior,
    useful_share,
)
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Contaminated, Outcome, OutOfMemory, describe
from autotune.workers.windows import SubjectWindows
from trainer.config.train_config import TrainConfig
from trainer.formats.batch_split import Layout

CRASHES = 2
"""Number of crashes after which a value that never ran is excluded from the search."""
LEAST_IMPROVEMENT = 0.003
"""Smallest gain in log throughput that is worth a search, however certain."""
_SURE = 8
"""Number of windows that the starting configuration's ratio of 1 counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """Configurations to search, with the global batch and limits of the search."""

    training: SubjectWindows[MlmSubject]
    """Training windows of the starting configuration; the budget covers the search and
    the verification after it."""
    cells: tuple[Configuration, ...]
    """Configurations to search, the starting configuration first."""
    global_batch_size: Mapping[Layout, int]
    """Sequences of the global batch, by layout; every layout's hold the same
    non-padding tokens."""
    non_padding_shares: Mapping[Layout, float | None]
    """Average share of non-padding tokens in the dataset's sequences, by layout; None
    if each window counts its own."""
    most_trials: int = 60
    left_out: tuple[str, ...] = ()
    predict: Callable[[Configuration], Mapping[str, Any]] | None = None
    """Predictions of a ``kind``: its largest micro-batch that leaves the headroom free
    as ``max``, None if unknown; if the machine's constants are known, seconds of an
    optimizer step by micro-batch size as ``step_s``. Takes seconds."""
    predicted_for: Mapping[str, object] = field(default_factory=dict)
    """Limits that predictions depend on besides the configuration."""

    def config_of(self, cell: Configuration) -> TrainConfig:
        """Return the training configuration of ``cell``, at the same global batch."""
        rows = {"global_batch_size": self.global_batch_size[cell.layout]}
        other = {"global_batch_tokens": None, "global_batch_samples": None}
        return self.training.subject.config.model_copy(
            update=cell.model_dump() | rows | other
        )

    def rate_of(self, cell: Configuration, figures: WindowFigures) -> float:
        """Return the non-padding tokens/s that a window means for training.

        The training has the global batch.
        """
        share = self.non_padding_shares[cell.layout]
        real = (
            figures.units_per_s if share is None else share * figures.padded_units_per_s
        )
        return real * useful_share(
            cell, self.global_batch_size, self.training.limits.local_ranks
        )


@dataclass(slots=True, kw_only=True)
class ConfigurationWindows:
    """Measurements of one configuration."""

    full: list[tuple[float, float]] = field(default_factory=list)
    short: list[tuple[float, float]] = field(default_factory=list)
    """Non-padding tokens/s of windows, and the logarithms of their ratios to the
    starting configuration."""
    outcome: str = "ran"
    crashed: bool = False
    """True if one of its values may be the cause; out of memory and interference by
    other users do not count."""

    @property
    def best(self) -> list[tuple[float, float]]:
        """Full windows, or short ones if there are no full ones.

        The list is empty if nothing ran.
        """
        return self.full or self.short


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Configurations of a search, and their measurements."""

    cells: tuple[Configuration, ...]
    """Remaining configurations, the starting configuration first."""
    starting: Configuration = field(init=False)
    tried: dict[Configuration, ConfigurationWindows] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons for excluding values that only crashed, by value."""
    predicted_s: dict[Configuration, float] = field(default_factory=dict)
    """Seconds of an optimizer step, as far as they are predicted."""
    _believed: Posterior | None = None
    """Cached posterior; None after a new measurement."""

    def __post_init__(self) -> None:
        self.starting = self.cells[0]
        self.tried[self.starting] = ConfigurationWindows()

    def note(self, rates: Mapping[Configuration, float], *, short: bool) -> None:
        """Record the windows of a round.

        One of them is of the starting configuration.
        """
        for cell, rate in rates.items():
            one = self.tried.setdefault(cell, ConfigurationWindows())
            (one.short if short else one.full).append(
                (rate, math.log(rate / rates[self.starting]))
            )
        self._believed = None

    def predict(self, seconds: Mapping[Configuration, float]) -> None:
        """Record predicted seconds of an optimizer step."""
        self.predicted_s |= seconds
        self._believed = None

    def predicted_ratio(self, cell: Configuration) -> float | None:
        """Return the predicted ratio of tokens/s to the starting configuration.

        Returns:
            The ratio, or None if it is not known.
        """
        before_s, after_s = (
            self.predicted_s.get(self.starting),
            self.predicted_s.get(cell),
        )
        return before_s / after_s if before_s and after_s else None

    def failed(self, cell: Configuration, outcome: Outcome) -> None:
        """Record a failure.

        Out of memory excludes larger micro-batches, and repeated crashes exclude a
        value.
        """
        one = self.tried.setdefault(cell, ConfigurationWindows())
        one.outcome = describe(outcome)
        one.crashed = not isinstance(outcome, OutOfMemory | Contaminated)
        self.keep(other for other in self.cells if other != cell)
        if isinstance(outcome, OutOfMemory):
            self.rule_out(cell)
        elif one.crashed:
            self._leave_out(cell)

    def _leave_out(self, crashed: Configuration) -> None:
        """Exclude the values of a crashed configuration that never ran.

        If several values are suspect, only their combination is excluded.
        """
        suspects = {
            name: value
            for name, value in crashed.model_dump().items()
            if self._only_crashes(name, value)
        }
        if not suspects:
            return
        said = " and ".join(
            f"{name} {str(value).lower()}" for name, value in suspects.items()
        )
        together = " together" if len(suspects) > 1 else ""
        self.left_out[said] = (
            f"{said}{together}: {CRASHES} configurations failed, and none completed"
        )
        self.keep(
            cell
            for cell in self.cells
            if any(getattr(cell, name) != value for name, value in suspects.items())
        )

    def _only_crashes(self, name: str, value: object) -> bool:
        of_value = [
            one for knobs, one in self.tried.items() if getattr(knobs, name) == value
        ]
        return sum(one.crashed for one in of_value) >= CRASHES and not any(
            one.best for one in of_value
        )

    def rule_out(self, unfit: Configuration) -> None:
        """Exclude a configuration that does not fit.

        Its settings with larger micro-batches are excluded as well.
        """
        kind, rows = unfit.kind, unfit.micro_batch_size
        more = {
            cell
            for cell in self.cells
            if cell.micro_batch_size >= rows and cell.kind == kind
        }
        self.keep(cell for cell in self.cells if cell not in more - {self.starting})

    def keep(self, cells: Iterable[Configuration]) -> None:
        """Search only these configurations from now on."""
        self.cells = tuple(cells)
        self._believed = None

    def believed(self, lies: Sequence[Configuration] = ()) -> Posterior:
        """Return the posterior of all remaining configurations.

        ``lies`` are assumed to perform as predicted.
        """
        if self._believed is None:
            self._believed = self._posterior(self._seen())
        if not lies:
            return self._believed
        place, mean = self.places, self._believed.mean
        told = [
            Seen(cell=place[cell], log_ratio=float(mean[place[cell]])) for cell in lies
        ]
        return self._posterior([*self._seen(), *told])

    def _posterior(self, seen: Sequence[Seen]) -> Posterior:
        ratios = {
            number: self.predicted_ratio(cell) for cell, number in self.places.items()
        }
        return posterior(
            self.cells,
            seen,
            {number: math.log(one) for number, one in ratios.items() if one},
        )

    @property
    def places(self) -> dict[Configuration, int]:
        """Index of each configuration in the posterior."""
        return {cell: number for number, cell in enumerate(self.cells)}

    def _seen(self) -> list[Seen]:
        place = self.places
        # The starting configuration's ratio is 1 by definition, as certain as many
        # windows would make it.
        seen = [Seen(cell=place[self.starting], log_ratio=0.0) for _ in range(_SURE)]
        for cell, tried in self.tried.items():
            if cell in place and cell != self.starting:
                seen += [Seen(cell=place[cell], log_ratio=one) for _, one in tried.full]
                seen += [
                    Seen(cell=place[cell], log_ratio=one, short=True)
                    for _, one in tried.short
                ]
        return seen

    def best_mean(self, found: Posterior) -> float:
        """Return the highest predicted log ratio of the configurations that ran."""
        ran = {self.starting, *(cell for cell, one in self.tried.items() if one.best)}
        return max(
            float(found.mean[number])
            for cell, number in self.places.items()
            if cell in ran
        )

    def may_be_fastest(self, cells: Sequence[Configuration]) -> list[Configuration]:
        """Return the configurations that may be the fastest.

        They are the one predicted to be fastest, if not the starting one, and those
        expected to beat it.
        """
        found, place = self.believed(), self.places
        fastest = max(
            [self.starting, *cells], key=lambda cell: float(found.mean[place[cell]])
        )
        gains = expected_gain_over(found, place[fastest])
        others = [
            cell
            for cell in cells
            if cell != fastest and gains[place[cell]] >= LEAST_IMPROVEMENT
        ]
        others.sort(key=lambda cell: -float(gains[place[cell]]))
        return others if fastest == self.starting else [fastest, *others]
