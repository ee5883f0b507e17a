"""A sweep of DataLoader workers as an Optuna study.

Each number of workers is a trial, whose intermediate values are its windows. After it
come the trials of a joint search: each proposal, and the settings that it compares in
the end.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.sampler.decide.effects_model import Evaluation
from autotune.subjects.subject import Argument
from autotune.trials.job_figures import WindowFigures
from autotune.trials.study import TuningStudy, Values, gpu_attributes, open_study
from autotune.workers.decide.count_statistics import Count
from autotune.workers.decide.worker_count import WorkersChoice
from autotune.workers.gpu_figures import mean_gpu_use
from autotune.workers.windows import (
    TORCH_DEFAULTS,
    LoaderSettings,
    SubjectWindows,
    settings_words,
)

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

PREFETCH_CHOICES = (1, 2, 4, 8)
"""Batches that a worker loads ahead, to try."""
RATIOS = "ratios_to_chosen_count"
"""Attribute of a trial: in each round, its throughput over that of the chosen number of
workers with the loader's other settings as they were."""
CountRounds = Sequence[Mapping[Count, WindowFigures]]
"""Figures of complete rounds, by number of workers; under None cached batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStudy:
    """Study of loader settings, with a trial for each number of workers."""

    study: TuningStudy
    max_workers: int
    """Largest number of workers."""
    present: Mapping[str, Argument]
    """Present values of the other parameters."""
    choices: Mapping[str, Sequence[Argument]]
    """Values of the other parameters."""
    _trial_by_count: "dict[int, optuna.Trial]" = field(default_factory=dict)
    """Trials of numbers of workers that have begun."""

    @property
    def values(self) -> dict[str, Values]:
        """Values of each parameter."""
        return {"num_workers": range(self.max_workers + 1), **self.choices}

    def settings(self, params: Mapping[str, Argument]) -> LoaderSettings:
        """Return parameters of a trial as loader settings."""
        known: dict[str, Any] = {
            name: value for name, value in params.items() if name in self.values
        }
        return LoaderSettings(**known)

    def params(self, settings: LoaderSettings) -> dict[str, Argument]:
        """Return loader settings as parameters of a trial."""
        given = {
            "num_workers": settings.num_workers,
            "prefetch_factor": settings.prefetch_factor,
            "pin_memory": settings.pin_memory,
        }
        known = {name: value for name, value in given.items() if value is not None}
        return {name: {**self.present, **known}[name] for name in self.values}

    def begin_count(self, count: int) -> None:
        """Begin the trial of a number of workers, unless it has begun."""
        if count not in self._trial_by_count:
            trial = self.ask(LoaderSettings(num_workers=count))
            self._trial_by_count[count] = trial

    def report_round(self, number: int, windows: Mapping[Count, WindowFigures]) -> None:
        """Add the windows of a complete round to the trials of their counts."""
        if number == 0:
            rate_unit = _rate_unit(next(iter(windows.values())))
            self.study.name_metric(rate_unit)
        for count, figures in windows.items():
            if count is not None:
                trial = self._trial_by_count[count]
                self.study.report(trial, figures.padded_units_per_s, number)

    def end_counts(
        self, rounds: CountRounds, choice: WorkersChoice | None, *, unmeasured: str
    ) -> None:
        """End the trials of all numbers of workers.

        Args:
            rounds: Complete rounds of the sweep.
            choice: Choice of the sweep; None if it was interrupted.
            unmeasured: Why a number of workers has no complete round, in words.
        """
        cached = [windows[None] for windows in rounds if None in windows]
        if cached:
            upper_bound = statistics.median(
                figures.padded_units_per_s for figures in cached
            )
            self.study.note({"upper_bound_units_per_s": upper_bound})
        if choice is not None:
            self.study.note({"chosen_num_workers": choice.workers})
        for count, trial in self._trial_by_count.items():
            windows = [figures[count] for figures in rounds if count in figures]
            if not windows:
                self.fail(trial, unmeasured)
                continue
            attributes: dict[str, object] = {"outcome": "interrupted"}
            if choice is not None:
                ratio = choice.ratios[count]
                attributes = {
                    "outcome": choice.verdict_words(count),
                    "ratio_to_cached": ratio.value,
                    "ratio_to_cached_low": ratio.low,
                    "ratio_to_cached_high": ratio.high,
                    RATIOS: _ratios_to_chosen(rounds, count, choice),
                }
            self.tell(trial, windows, phase="sweep", **attributes)
        self._trial_by_count.clear()

    def fail_count(self, count: int, outcome: str) -> None:
        """End the trial of a number of workers as failed, if it is running."""
        trial = self._trial_by_count.pop(count, None)
        if trial is not None:
            self.fail(trial, outcome)

    def ask(self, settings: LoaderSettings) -> "optuna.Trial":
        """Begin a trial of loader settings."""
        return self.study.ask(self.values, self.params(settings))

    def tell(
        self,
        trial: "optuna.Trial",
        windows: Sequence[WindowFigures],
        *,
        phase: str,
        **attributes: object,
    ) -> None:
        """End a trial with the median throughput of its windows.

        Args:
            trial: The trial.
            windows: Its windows, at least one.
            phase: Part of the sweep that measured it, in words.
            attributes: Further attributes.
        """
        rates = [figures.padded_units_per_s for figures in windows]
        waits = [figures.data_wait_share for figures in windows]
        measured: dict[str, object] = {
            "configuration": settings_words(trial.params),
            "phase": phase,
            "windows": len(windows),
            "data_wait_share": statistics.median(waits),
            **gpu_attributes(mean_gpu_use(windows)),
        }
        self.study.tell(
            trial, statistics.median(rates), attributes=measured | attributes
        )

    def fail(self, trial: "optuna.Trial", outcome: str) -> None:
        """End a trial without a result.

        Args:
            trial: The trial.
            outcome: Why it has none, in words.
        """
        attributes = {
            "configuration": settings_words(trial.params),
            "outcome": outcome,
        }
        self.study.tell(trial, state="failed", attributes=attributes)


def open_loader_study(
    windows: SubjectWindows[Any], name: str, max_workers: int
) -> LoaderStudy:
    """Open the study of a sweep.

    Args:
        windows: Windows of the sweep, whose request names the study's file.
        name: Name of the study.
        max_workers: Most DataLoader workers of a rank.

    Raises:
        BadInput: If the file cannot be used.
    """
    arguments = {**TORCH_DEFAULTS, **windows.loader.arguments}
    present = {name: arguments[name] for name in sorted(windows.searched)}
    choices: dict[str, Sequence[Argument]] = {}
    if "prefetch_factor" in present:
        factors = {*PREFETCH_CHOICES, int(present["prefetch_factor"])}
        choices["prefetch_factor"] = tuple(sorted(factors))
    if "pin_memory" in present:
        choices["pin_memory"] = (True, False)
    study = open_study(
        name, file=windows.request.study_file, unit=windows.subject.size.unit
    )
    return LoaderStudy(
        study=study, max_workers=max_workers, present=present, choices=choices
    )


def evaluations_of(trial: "FrozenTrial") -> Iterator[Evaluation]:
    """Yield the ratios of a trial's windows to the chosen number of workers."""
    for ratio in trial.user_attrs.get(RATIOS, ()):
        yield Evaluation(value=ratio)


def _rate_unit(figures: WindowFigures) -> str:
    """Return the unit of rates in words."""
    padding = " incl. padding" if figures.counts_padding else ""
    return f"{figures.unit}/s{padding}"


def _ratios_to_chosen(
    rounds: CountRounds, count: int, choice: WorkersChoice
) -> list[float]:
    """Return a count's throughput over that of the chosen count, for each round.

    A round without the chosen count compares both with cached batches.

    Returns:
        The ratios; none for the chosen count itself, whose ratio is 1 without noise.
    """
    if count == choice.workers:
        return []
    ratios = []
    for windows in rounds:
        if count not in windows:
            continue
        rate = windows[count].padded_units_per_s
        if choice.workers in windows:
            ratios.append(rate / windows[choice.workers].padded_units_per_s)
        elif None in windows:
            ratio_to_cached = rate / windows[None].padded_units_per_s
            ratios.append(ratio_to_cached / choice.ratios[choice.workers].value)
    return ratios
