"""A baseline on this machine, whose windows are timed beside those of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.evidence.workers import BATCHES
from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import StepRequest
from autotune.subjects.baseline import Baseline
from autotune.subjects.subject import Argument
from autotune.trials.job_figures import WindowFigures
from autotune.trials.values import Trial
from autotune.workers.windows import LoaderSettings, SubjectWindows, window_trial

FIT_STEPS = StepCounts(warmup=1, timed=1)
"""Steps of a trial that checks whether a size fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A subject with its settings on this machine."""

    baseline: Baseline
    """The subject and its settings."""
    windows: SubjectWindows[Any]
    """Windows on this machine; their subject and choice are replaced by those of
    ``baseline``."""
    units_per_batch_of_size: float | None = None
    """Units that a batch has for each one of the size, in case nothing counts a batch's
    work; None if the size does not tell it."""
    fit_local: dict[str, Any] = field(default_factory=dict)
    """Inputs of the check that the size fits, which depend on this machine."""

    def trial(self, round_number: int, interleaved_with: Sequence[str]) -> Trial:
        """Return the trial of a window.

        Args:
            round_number: Number of the window's round, from 0.
            interleaved_with: Names of all windows of the round.
        """
        baseline = self.baseline
        choice, settings = baseline.choice, None
        if baseline.fed_by == "training":
            # The loop makes its own loader.
            choice = {**choice, **baseline.loader_settings}
        elif baseline.loader_settings:
            settings = loader_settings_of(baseline.loader_settings)
        windows = replace(
            self.windows,
            subject=baseline.subject,
            choice=choice,
            fed_by=baseline.fed_by,
        )
        # On a CPU, one padded step of four micro-batches is long enough.
        return window_trial(
            windows, round_number, interleaved_with, settings=settings, min_steps=1
        )

    def fit_trial(self, memory_budget_bytes: int) -> Trial:
        """Return a trial of the worst case under a memory budget, as in a probe."""
        baseline = self.baseline
        assert baseline.fit_choice is not None
        timeout_s = self.windows.request.trial_timeout_s
        request = StepRequest(
            **step_fields(
                baseline.subject,
                {**baseline.choice, **baseline.fit_choice},
                FIT_STEPS,
                device=self.windows.device,
                local_ranks=self.windows.limits.local_ranks,
                source_sha256=self.windows.source_sha256,
            ),
            memory_budget_bytes=memory_budget_bytes,
        )
        return request.trial(timeout_s=timeout_s, limit_s=timeout_s, **self.fit_local)

    @property
    def _loader_words(self) -> str:
        """Your function that builds the loader, or else the subject in words."""
        subject = self.baseline.subject
        code = subject.code()
        return code.get("loader") or code.get("step") or subject.words

    def counts_by_size(self, figures: WindowFigures) -> bool:
        """Return whether your own code counts its work by its size alone."""
        is_counted = self.baseline.fed_by == "loader" and figures.unit != BATCHES
        return bool(self.baseline.subject.code()) and not is_counted

    def rates(self, figures: WindowFigures) -> dict[str, float]:
        """Return the rates of a window by unit, without padding if that is known."""
        if figures.unit == BATCHES:
            # Batches of different loaders cannot be compared.
            rates = {f"{BATCHES} of {self._loader_words}": figures.units_per_s}
            count = self.baseline.size
            if count is not None and self.units_per_batch_of_size is not None:
                units_per_batch = count * self.units_per_batch_of_size
                unit = self.baseline.subject.size.unit
                rates = {unit: units_per_batch * figures.units_per_s}
            return {**figures.other_units_per_s, **rates}
        units_per_s = figures.units_per_s
        size = self.baseline.subject.size
        if self.baseline.fed_by != "loader" and size.name.endswith("batch_size"):
            # The size was counted, and is a number of samples.
            samples_per_s = units_per_s / size.units_per_size
            return {"samples": samples_per_s, figures.unit: units_per_s}
        if self.baseline.non_padding_share is not None:
            # How many units of a window are padding is chance.
            units_per_s = self.baseline.non_padding_share * figures.padded_units_per_s
        return {**figures.other_units_per_s, figures.unit: units_per_s}


def loader_settings_of(settings: Mapping[str, Argument]) -> LoaderSettings:
    """Return settings of a loader by their names; missing ones stay as they are."""
    prefetch_factor = settings.get("prefetch_factor")
    pin_memory = settings.get("pin_memory")
    return LoaderSettings(
        num_workers=int(settings.get("num_workers", 0)),
        prefetch_factor=None if prefetch_factor is None else int(prefetch_factor),
        pin_memory=None if pin_memory is None else bool(pin_memory),
    )
