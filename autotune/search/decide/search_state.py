"""State of a search: its measurements, and the configurations that remain. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.sampler.decide.discrete_space import (
    Codes,
    DiscreteSpace,
    space_of,
    values_in,
)
from autotune.sampler.decide.effects_model import Observation, Posterior, posterior
from autotune.sampler.decide.improvement import (
    expected_gain_over,
    expected_improvement,
)
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import without_size
from autotune.subjects.searched_settings import SearchedSettings, value_words
from autotune.subjects.subject import Argument
from autotune.trials.outcomes import Contaminated, Outcome, OutOfMemory, describe

CRASHES = 2
"""Number of crashes after which a value that never ran is excluded from the search."""
LEAST_IMPROVEMENT = 0.003
"""Smallest gain in log throughput that is worth a search, however certain."""
STARTING_WINDOWS = 8
"""Number of windows that the starting configuration's ratio counts as: it is 1 by
definition, as certain as many windows would make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedWindow:
    """A window that ran, compared with the starting configuration."""

    units_per_s: float
    log_ratio: float
    """Logarithm of throughput over the starting configuration's in the same round."""


@dataclass(slots=True, kw_only=True)
class ConfigurationWindows:
    """Measurements of one configuration."""

    full: list[RatedWindow] = field(default_factory=list)
    short: list[RatedWindow] = field(default_factory=list)
    outcome: str = "ran"
    """``ran``, ``pruned``, or the reason why it did not run."""
    crashed: bool = False
    """True if one of its values may be the cause; out of memory and interference by
    other users do not count."""

    @property
    def best(self) -> list[RatedWindow]:
        """Full windows, or short ones if there are no full ones; empty if none ran."""
        return self.full or self.short


@dataclass(slots=True, kw_only=True)
class SearchState:
    """Configurations of a search, and their measurements."""

    settings: SearchedSettings
    all_configurations: tuple[Configuration, ...]
    """All configurations of the search, the starting configuration first. One that is
    measured outside the search is added."""
    remaining: set[Configuration] = field(init=False)
    """Configurations that are not excluded."""
    starting: Configuration = field(init=False)
    tried: dict[Configuration, ConfigurationWindows] = field(default_factory=dict)
    excluded_values: dict[str, str] = field(default_factory=dict)
    """Reasons for excluding values that only crashed, by value."""
    predicted_s: dict[Configuration, float] = field(default_factory=dict)
    """Seconds of an optimizer step, as far as they are predicted."""
    _space: DiscreteSpace = field(init=False)
    _codes: Codes = field(init=False)
    _index: dict[Configuration, int] = field(init=False)
    _predictions: Posterior | None = None
    """Cached posterior; None after a new measurement."""

    def __post_init__(self) -> None:
        self.starting = self.all_configurations[0]
        self.tried[self.starting] = ConfigurationWindows()
        self.remaining = set(self.all_configurations)
        self._encode()

    def add(self, configuration: Configuration) -> None:
        """Add a configuration to the search, unless it is there."""
        if configuration not in self._index:
            self.all_configurations = (*self.all_configurations, configuration)
            self._encode()
        self.remaining.add(configuration)
        self._predictions = None

    def _encode(self) -> None:
        self._space = space_of(values_in(self.all_configurations))
        self._codes = self._space.encode(self.all_configurations)
        self._index = {
            configuration: number
            for number, configuration in enumerate(self.all_configurations)
        }

    def note(
        self, units_per_s: Mapping[Configuration, float], *, short: bool
    ) -> dict[Configuration, RatedWindow]:
        """Record the windows of a round.

        Args:
            units_per_s: Throughput by configuration, the starting one's among them.
            short: True for short windows.

        Returns:
            The windows with their ratios.
        """
        starting_rate = units_per_s[self.starting]
        windows = {}
        for configuration, rate in units_per_s.items():
            window = RatedWindow(
                units_per_s=rate, log_ratio=math.log(rate / starting_rate)
            )
            windows[configuration] = window
            result = self.tried.setdefault(configuration, ConfigurationWindows())
            if short:
                result.short.append(window)
            else:
                result.full.append(window)
                result.outcome = "ran"
        self._predictions = None
        return windows

    def predict(self, seconds: Mapping[Configuration, float]) -> None:
        """Record predicted seconds of an optimizer step."""
        self.predicted_s |= seconds
        self._predictions = None

    def predicted_ratio(self, configuration: Configuration) -> float | None:
        """Return the predicted ratio of throughput to the starting configuration.

        Returns:
            The ratio, or None if it is not known.
        """
        starting_s = self.predicted_s.get(self.starting)
        configuration_s = self.predicted_s.get(configuration)
        if not starting_s or not configuration_s:
            return None
        return starting_s / configuration_s

    def note_failure(self, configuration: Configuration, outcome: Outcome) -> None:
        """Record a failure.

        Out of memory excludes larger sizes, and repeated crashes exclude a value.
        """
        result = self.tried.setdefault(configuration, ConfigurationWindows())
        result.outcome = describe(outcome)
        result.crashed = not isinstance(outcome, OutOfMemory | Contaminated)
        self.exclude({configuration})
        if isinstance(outcome, OutOfMemory):
            self.exclude_from_size(configuration)
        elif result.crashed:
            self._exclude_values_of(configuration)

    def exclude(self, configurations: Collection[Configuration]) -> None:
        """Exclude configurations from the search, except the starting one."""
        self.remaining -= set(configurations) - {self.starting}
        self._predictions = None

    def exclude_from_size(self, unfit: Configuration) -> None:
        """Exclude a configuration that does not fit, and larger sizes of its kind."""
        size_name = self.settings.size.name
        kind = without_size(self.settings, unfit)
        self.exclude(
            [
                configuration
                for configuration in self.remaining
                if int(configuration[size_name]) >= int(unfit[size_name])
                and without_size(self.settings, configuration) == kind
            ]
        )

    def _exclude_values_of(self, crashed: Configuration) -> None:
        """Exclude the values of a crashed configuration that never ran.

        If several values are suspect, only their combination is excluded.
        """
        suspects = {
            name: value
            for name, value in crashed.items()
            if self._only_crashes(name, value)
        }
        if not suspects:
            return
        suspect_words = " and ".join(
            f"{name} {value_words(value)}" for name, value in suspects.items()
        )
        together = " together" if len(suspects) > 1 else ""
        self.excluded_values[suspect_words] = (
            f"{suspect_words}{together}: {CRASHES} configurations failed, and none"
            " completed"
        )
        self.exclude(
            [
                configuration
                for configuration in self.remaining
                if suspects.items() <= configuration.items()
            ]
        )

    def _only_crashes(self, name: str, value: Argument) -> bool:
        """Return whether configurations with a value crashed, and none ran."""
        results = [
            result
            for configuration, result in self.tried.items()
            if configuration[name] == value
        ]
        crashes = sum(result.crashed for result in results)
        return crashes >= CRASHES and not any(result.best for result in results)

    @property
    def predictions(self) -> Posterior:
        """Prediction of all configurations."""
        if self._predictions is None:
            predicted = {}
            for number, configuration in enumerate(self.all_configurations):
                ratio = self.predicted_ratio(configuration)
                if ratio is not None:
                    predicted[number] = math.log(ratio)
            self._predictions = posterior(
                self._space, self._codes, self._observations(), predicted
            )
        return self._predictions

    def _observations(self) -> list[Observation]:
        """Return all windows of other configurations, and the starting one's ratio."""
        observations = [Observation(configuration=0, log_ratio=0.0)] * STARTING_WINDOWS
        for configuration, result in self.tried.items():
            if configuration == self.starting:
                continue
            number = self._index[configuration]
            for short, windows in ((False, result.full), (True, result.short)):
                observations += [
                    Observation(
                        configuration=number, log_ratio=window.log_ratio, short=short
                    )
                    for window in windows
                ]
        return observations

    @property
    def best_mean(self) -> float:
        """Highest predicted log ratio of the remaining configurations that ran."""
        ran = [
            configuration
            for configuration, result in self.tried.items()
            if result.best and configuration in self.remaining
        ]
        numbers = {
            self._index[configuration] for configuration in [self.starting, *ran]
        }
        return max(float(self.predictions.mean[number]) for number in numbers)

    @property
    def largest_improvement(self) -> float:
        """Largest expected improvement of a remaining configuration, in logarithms."""
        gains = expected_improvement(self.predictions, self.best_mean)
        return max(
            float(gains[self._index[configuration]]) for configuration in self.remaining
        )

    def may_be_fastest(
        self, configurations: Iterable[Configuration]
    ) -> list[Configuration]:
        """Return the configurations that may be the fastest, the most likely first.

        They are the one predicted to be fastest, if not the starting one, and those
        expected to beat it.
        """
        candidates = list(configurations)
        mean = self.predictions.mean
        fastest = max(
            [self.starting, *candidates],
            key=lambda candidate: float(mean[self._index[candidate]]),
        )
        gains = expected_gain_over(self.predictions, self._index[fastest])
        challengers = [
            candidate
            for candidate in candidates
            if candidate != fastest
            and gains[self._index[candidate]] >= LEAST_IMPROVEMENT
        ]
        challengers.sort(key=lambda candidate: -float(gains[self._index[candidate]]))
        return challengers if fastest == self.starting else [fastest, *challengers]

    def finalists(self, rejected_arithmetic: Sequence[str]) -> list[Configuration]:
        """Return the configurations that ran and may be the fastest.

        Args:
            rejected_arithmetic: Arithmetics that the loss check rejected.
        """
        return self.may_be_fastest(
            configuration
            for configuration, result in self.tried.items()
            if result.best
            and configuration in self.remaining
            and configuration != self.starting
            and self.settings.arithmetic(configuration) not in rejected_arithmetic
        )
