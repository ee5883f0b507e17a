"""Timed windows of a subject with other settings, on cached batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.search.configuration import Configuration
from autotune.subjects.searched_settings import SearchedSettings
from autotune.subjects.subject import Argument
from autotune.trials.decide.equal_loss import LOSS_STEPS
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from autotune.workers.windows import SubjectWindows, window_trial


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLength:
    """Length of a window: it ends when both limits are reached."""

    window_s: float
    """Least duration of the window, in seconds."""
    min_steps: int
    """Fewest optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Figures of a window that ran."""

    units_per_s: float
    """Throughput that it means for training with the global batch, in the subject's
    units: non-padding tokens/s for the bundled trainer."""
    figures: WindowFigures
    """Figures of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindows:
    """Windows of a subject's step by configuration, without data loading."""

    windows: SubjectWindows[Any]
    """Windows of the subject as it is."""
    settings: SearchedSettings
    """Settings of the configurations."""

    @property
    def window_s(self) -> float:
        """Least duration of a full window, in seconds."""
        return self.windows.request.window_s

    def trial(
        self,
        configuration: Configuration,
        length: WindowLength,
        *,
        round_number: int,
        interleaved_with: Sequence[str],
    ) -> Trial:
        """Return the trial of a window."""
        return window_trial(
            self._with(self.settings.window_choice(configuration)),
            round_number,
            interleaved_with,
            cached=True,
            min_steps=length.min_steps,
            window_s=length.window_s,
        )

    def loss_trial(self, configuration: Configuration, label: str) -> Trial:
        """Return the trial of a short training, which keeps the loss of each step."""
        return window_trial(
            self._with(self.settings.loss_check_choice(configuration)),
            0,
            [label],
            cached=True,
            losses=True,
            min_steps=LOSS_STEPS,
            window_s=0.0,
        )

    def read(self, configuration: Configuration, outcome: Measured) -> StepWindow:
        """Return the figures of a window."""
        figures = WindowFigures.of(outcome)
        units_per_s = figures.units_per_s
        share = self.settings.non_padding_share(configuration)
        if share is not None:
            # How many units of a window are padding is chance.
            units_per_s = share * figures.padded_units_per_s
        return StepWindow(
            units_per_s=units_per_s * self.settings.useful_share(configuration),
            figures=figures,
        )

    def _with(self, choice: Mapping[str, Argument]) -> SubjectWindows[Any]:
        """Return the windows of the subject with a choice of settings."""
        return replace(self.windows, choice={**self.windows.choice, **choice})
