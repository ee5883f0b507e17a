"""Compare the tuned settings with both baselines, in interleaved windows of training.

A window has at most four micro-batches per optimizer step. So a recipe with small
micro-batches, such as transformers', has more optimizer steps and gradient
synchronisations per token in a window than in training.

Rates are in non-padding tokens: all tokens of a window times the dataset's average
share of non-padding tokens, so that the samples of a short window add no noise. If a
recipe trims micro-batches to their longest sample, that average is not known, and the
non-padding tokens of the window itself count.
"""

import statistics
from dataclasses import dataclass, field, replace

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.units import format_bytes
from autotune.base.window_statistics import MIN_WINDOWS, estimate_windows, paired_ratio
from autotune.baseline.decide.recipes import TUNED, Recipe, differences, is_precise
from autotune.errors import OutOfTime
from autotune.evidence.baseline import BaselineEvidence, RecipeName, RecipeRow
from autotune.memory.size_probe import step_fields
from autotune.memory.values import StepRequest
from autotune.subjects.mlm.memory.probe import FIT_STEPS
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import training_trial
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import (
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    describe,
)
from autotune.trials.rounds import Rounds
from autotune.trials.values import Trial
from autotune.workers.windows import SubjectWindows
from trainer.formats.manifest import Manifest
from trainer.formats.train_config import TrainConfig

RoundFigures = dict[RecipeName, WindowFigures]
"""Figures of one round's windows, without those of recipes that failed."""


@dataclass(slots=True, kw_only=True)
class BaselineRunner:
    """Measurement of recipes in rounds of windows, until their speedups are precise."""

    training: SubjectWindows[MlmSubject]
    """Request, tuned configuration and limits of all windows."""
    recipes: dict[RecipeName, Recipe]
    """Recipes that are compared, the tuned one first. A baseline that does not fit is
    replaced by one with a smaller micro-batch."""
    non_padding_shares: dict[RecipeName, float | None]
    """``non_padding_share`` of each recipe."""
    max_rounds: int
    """Maximum number of rounds."""
    memory_budget_bytes: int
    """Memory budget of the profile, under which micro-batches must fit."""
    gradient_accumulation_steps: int
    """Gradient accumulation steps in the check that a micro-batch fits, as the profile
    was probed."""
    manifest: Manifest
    """Manifest of the dataset."""
    device_used_before_bytes: list[int] | None = None
    """Bytes in use on each GPU before this program started, by NVML; None on a CPU or
    if unknown."""
    windows: Rounds
    """Measurement of the windows, with their time."""
    failures: dict[RecipeName, str] = field(default_factory=dict)
    """Reason for the failure of each recipe that failed. Later rounds leave it out."""
    rounds: list[RoundFigures] = field(default_factory=list)
    """Figures of the rounds so far."""

    def run(self) -> BaselineEvidence:
        """Measure the recipes that fit until their speedups are precise.

        Raises:
            Undecided: If the tuned settings fail.
            OutOfTime: If there is no time for three rounds.
        """
        for name in self._remaining_baselines():
            self._make_fit(name)
        try:
            while self._needs_another_round():
                self._measure_round()
        except OutOfTime:
            # The runner raises this before a window that would likely end after the
            # deadline. The windows of the begun round are then not used.
            if len(self.rounds) < MIN_WINDOWS:
                raise
        return BaselineEvidence(
            rows=[self._row(name) for name in reversed(self.recipes)],
            local_ranks=self.training.limits.local_ranks,
            window_s=self.training.request.window_s,
            windows=sum(len(figures) for figures in self.rounds),
            seconds=round(self.windows.runner.seconds, 3),
        )

    def _remaining(self) -> list[RecipeName]:
        """Return the recipes that have not failed."""
        return [name for name in self.recipes if name not in self.failures]

    def _remaining_baselines(self) -> list[RecipeName]:
        """Return the recipes that have not failed, except for the tuned one."""
        return [name for name in self._remaining() if name != TUNED]

    def _needs_another_round(self) -> bool:
        """Return True until the speedups are precise, or rounds or time are used up."""
        rounds = len(self.rounds)
        if rounds == 0:
            # The tuned settings are measured even if no baseline fits.
            return True
        if rounds >= self.max_rounds or not self._remaining_baselines():
            return False
        if rounds < MIN_WINDOWS:
            return True
        has_time = self.windows.runner.seconds < self.training.request.budget_s
        return has_time and not self._is_precise()

    def _is_precise(self) -> bool:
        """Return True if all speedups are precise and all rates have bounds."""
        speedups_are_precise = all(
            is_precise(self._speedup(name)) for name in self._remaining_baselines()
        )
        rates_have_bounds = all(
            estimate_windows(self._rates(name)).interval().low is not None
            for name in self._remaining()
        )
        return speedups_are_precise and rates_have_bounds

    def _make_fit(self, name: RecipeName) -> None:
        """Halve a recipe's micro-batch until it fits the memory budget of the profile.

        If not even one sequence fits, or if the check itself fails, the reason is
        recorded in ``failures``.
        """
        while True:
            recipe = self.recipes[name]
            size = recipe.config.micro_batch_size
            outcome = self.windows.measure_window(
                self._fit_trial(recipe.config),
                f"{name}: check that micro-batch {size} fits",
            )
            if isinstance(outcome, Measured):
                return
            if not isinstance(outcome, OutOfMemory | HostOutOfMemory):
                self.failures[name] = f"{describe(outcome)} with micro-batch {size}"
                return
            if size == 1:
                self.failures[name] = f"{describe(outcome)} even with one sequence"
                return
            self.recipes[name] = self._with_half_micro_batch(recipe)

    def _fit_trial(self, config: TrainConfig) -> Trial:
        """Return a trial of full sequences under the memory budget, as in the probe."""
        ranks = self.training.limits.local_ranks
        subject = MlmSubject(
            config=config.model_copy(
                update={"global_batch_tokens": None, "global_batch_samples": None}
            ),
            vocab_size=self.manifest.vocab_size,
            special_ids=self.manifest.special_ids,
            local_ranks=ranks,
        )
        choice = {
            "micro_batch_size": config.micro_batch_size,
            "micro_batches": self.gradient_accumulation_steps,
        }
        request = StepRequest(
            **step_fields(
                subject, choice, FIT_STEPS, device=config.device, local_ranks=ranks
            ),
            memory_budget_bytes=self.memory_budget_bytes,
        )
        timeout_s = self.training.request.trial_timeout_s
        return request.trial(
            timeout_s=timeout_s,
            limit_s=timeout_s,
            device_used_before_bytes=self.device_used_before_bytes,
        )

    def _with_half_micro_batch(self, recipe: Recipe) -> Recipe:
        """Return a recipe with half its micro-batch size, and the reason for it."""
        size = recipe.config.micro_batch_size
        reason = f"{size} does not fit {format_bytes(self.memory_budget_bytes)}"
        return replace(
            recipe,
            config=recipe.config.model_copy(update={"micro_batch_size": size // 2}),
            because={**recipe.because, "micro_batch_size": reason},
        )

    def _measure_round(self) -> None:
        """Measure a window of each remaining recipe; those that fail drop out."""
        number = len(self.rounds)
        names = self._remaining()
        trials = {}
        for name in names:
            # On a CPU, one padded step of four micro-batches is long enough.
            trial = training_trial(
                self.training, self.recipes[name].config, number, names, min_steps=1
            )
            trials[name] = (trial, f"{name}, round {number + 1}")
        outcomes = self.windows.measure_round(number, trials, self._check_tuned)
        figures: RoundFigures = {}
        for name, outcome in outcomes.items():
            if isinstance(outcome, Measured):
                figures[name] = WindowFigures.of(outcome)
            else:
                self.failures[name] = f"{describe(outcome)} in round {number + 1}"
        self.rounds.append(figures)

    def _check_tuned(self, name: RecipeName, outcome: Outcome, seconds: float) -> None:
        """Check that a window has figures if it is one of the tuned settings.

        Args:
            name: Recipe of the window.
            outcome: Outcome of the window.
            seconds: Time of the window, which ``Rounds`` passes. It is ignored.

        Raises:
            Undecided: If a window of the tuned settings failed.
        """
        if name == TUNED:
            self.windows.runner.require_measured(
                "a window of the tuned settings", outcome
            )

    def _windows_of(self, name: RecipeName) -> list[WindowFigures]:
        """Return the figures of a recipe's windows so far."""
        return [figures[name] for figures in self.rounds if name in figures]

    def _rates(self, name: RecipeName) -> list[float]:
        """Return the non-padding tokens/s of a recipe's windows."""
        windows = self._windows_of(name)
        return [self._rate(name, window) for window in windows]

    def _rate(self, name: RecipeName, window: WindowFigures) -> float:
        """Return the non-padding tokens/s of one of a recipe's windows."""
        share = self.non_padding_shares[name]
        if share is None:
            return window.units_per_s
        return share * window.padded_units_per_s

    def _speedup(self, name: RecipeName) -> Interval:
        """Return the tuned settings' speedup over a recipe that was measured."""
        # Windows of the same round only, as the machine may change between rounds.
        pairs = [
            (self._rate(TUNED, figures[TUNED]), self._rate(name, figures[name]))
            for figures in self.rounds
            if name in figures
        ]
        return paired_ratio(pairs, confidence=SHOWN_CONFIDENCE)

    def _row(self, name: RecipeName) -> RecipeRow:
        """Return a recipe's row of the evidence."""
        differences_from_tuned = differences(
            self.recipes[name],
            self.training.subject.config,
            self.training.limits.local_ranks,
        )
        windows = self._windows_of(name)
        if not windows:
            return RecipeRow(
                name=name,
                differences=differences_from_tuned,
                tokens_per_s=[],
                outcome=self.failures[name],
            )
        speedup = self._speedup(name)
        if name == TUNED:
            # The tuned settings have no noise against themselves.
            speedup = Interval(value=speedup.value)
        return RecipeRow(
            name=name,
            differences=differences_from_tuned,
            tokens_per_s=self._rates(name),
            speedup=speedup.value,
            speedup_low=speedup.low,
            speedup_high=speedup.high,
            data_wait_share=statistics.median(
                window.data_wait_share for window in windows
            ),
            outcome=self.failures.get(name, "ran"),
        )
