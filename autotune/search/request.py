"""Request for a joint search: the configurations, their windows, and limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import configuration_space
from autotune.search.windows import StepWindows
from autotune.subjects.searched_settings import PlainSettings, SearchedSettings
from autotune.subjects.subject import Argument
from autotune.workers.windows import SubjectWindows


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


def subject_request(
    windows: SubjectWindows[Any],
    present: Mapping[str, Argument],
    *,
    largest_size: int,
    study_name: str,
    study_file: Path | None = None,
) -> ExploreRequest:
    """Return the search of the settings that a subject declares.

    Settings that change the recipe keep their present value. Those that ``present``
    lacks are fixed by you, and are not searched.

    Args:
        windows: Windows of the subject, whose budget is that of the search.
        present: Present value of each setting, with the size.
        largest_size: Largest size that fits with the present settings. Others may not
            fit, which their windows show.
        study_name: Name of the Optuna study.
        study_file: As in ``ExploreRequest``.
    """
    searched, left_out = [], []
    for setting in windows.subject.settings():
        if setting.name not in present:
            left_out.append(f"{setting.name}: set by you")
            continue
        values = tuple(dict.fromkeys((present[setting.name], *setting.values)))
        if setting.changes_recipe:
            values = values[:1]
            left_out.append(f"{setting.name}: other values change the recipe")
        searched.append(replace(setting, values=values))
    settings = PlainSettings(
        settings=tuple(searched), size=windows.subject.size, left_out=tuple(left_out)
    )
    return ExploreRequest(
        settings=settings,
        configurations=configuration_space(settings, present, largest_size),
        windows=StepWindows(windows=windows, settings=settings),
        budget_s=windows.request.budget_s,
        trial_timeout_s=windows.request.trial_timeout_s,
        study_name=study_name,
        study_file=study_file,
    )
