"""Request for a joint search: the configurations, their windows, and limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.search.configuration import Configuration
from autotune.search.windows import StepWindows
from autotune.subjects.searched_settings import SearchedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Prediction of a kind of configuration, from a trace of its step."""

    largest_size: int | None
    """Largest size that leaves the headroom free; None if it is not known."""
    step_s_by_size: Mapping[int, float] = field(default_factory=dict)
    """Seconds of an optimizer step by size; empty without constants of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPredictor:
    """Predictions of steps before they are measured."""

    predict: Callable[[Configuration], StepPrediction]
    """Predicts a kind: a configuration at size 1. Takes seconds."""
    defined_by: Mapping[str, object] = field(default_factory=dict)
    """Everything besides the kind that defines a prediction, as JSON. A prediction in
    the trial log is reused if it is equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """Configurations to search, with the limits of the search."""

    settings: SearchedSettings
    """Settings that are searched, and what their values mean."""
    configurations: tuple[Configuration, ...]
    """Configurations to search, the starting configuration first."""
    windows: StepWindows
    budget_s: float
    """Time for the search and the verification after it, in seconds."""
    trial_timeout_s: float
    """Time limit of a trial, in seconds."""
    most_trials: int = 60
    """Number of configurations after which no more are proposed."""
    predictor: StepPredictor | None = None
    """None if nothing can be predicted."""
    study_name: str = "search"
    """Name of the Optuna study."""
    study_file: Path | None = None
    """File of the Optuna study; None keeps it in memory."""

    def words(self, configuration: Configuration) -> str:
        """Return a configuration in words."""
        return self.settings.words(configuration)
