"""Compare the tuned settings with both baselines, in interleaved windows of training.

A window has at most four micro-batches per optimizer step, so a small micro-batch, such
as transformers', is measured with more frequent optimizer steps and gradient
synchronisations than in training.

Rates are in non-padding tokens: the tokens of a window times the dataset's average
share of non-padding tokens, so that the samples of a short window add no noise. If
micro-batches are trimmed to their longest sample, the window's own non-padding tokens
count.
"""

import statistics
from dataclasses import dataclass, field, replace

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.statistics import MIN_WINDOWS, estimate_windows, paired_ratio
from autotune.base.units import format_bytes
from autotune.baseline.decide.recipes import (
    Recipe,
    differences,
    hf_trainer,
    is_precise,
    paper,
)
from autotune.baseline.values import BaselineEvidence, RecipeName, RecipeRow
from autotune.errors import OutOfTime
from autotune.memory.probe import FIT_STEPS
from autotune.memory.values import StepRequest
from autotune.trials.runner import Rounds
from autotune.trials.values import (
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    TrainingFigures,
    describe,
)
from autotune.workers.measure import TrainingWindows, training_trial
from trainer.config.train_config import TRIMMED_LAYOUTS, TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import sequence_statistics, with_batch_in_sequences
from trainer.data.manifest import Manifest

TUNED: RecipeName = "tuned"


def compare_with(
    tuned: TrainConfig, dataset: TokenDataset, most_workers: int, limit: str
) -> tuple[dict[RecipeName, Recipe], dict[RecipeName, float | None]]:
    """Return the recipes, and the share of non-padding tokens of each.

    The tuned recipe is the first. ``most_workers`` and ``limit`` are as for ``paper``.
    """
    rows = with_batch_in_sequences(tuned, dataset).global_batch_size
    tokens = (
        tuned.global_batch_tokens
        or round(rows * sequence_statistics(tuned, dataset).mean_non_padding_tokens)
        or 1
    )
    others = (hf_trainer(tuned, tokens), paper(tuned, tokens, most_workers, limit))
    recipes = {
        one.name: one for one in (Recipe(name=TUNED, config=tuned, because={}), *others)
    }
    filled = {
        name: (
            sequence_statistics(one.config, dataset).mean_non_padding_tokens
            / one.config.seq_length_tokens
        )
        for name, one in recipes.items()
        if one.config.layout not in TRIMMED_LAYOUTS
    }
    return recipes, {name: filled.get(name) for name in recipes}


@dataclass(slots=True, kw_only=True)
class BaselineRunner:
    """State of a comparison."""

    training: TrainingWindows
    recipes: dict[RecipeName, Recipe]
    """Recipes that are compared, the tuned one first."""
    non_padding_shares: dict[RecipeName, float | None]
    """Average share of non-padding tokens in the dataset's sequences, by recipe; None
    if each window counts its own."""
    most_rounds: int
    memory_budget_bytes: int
    micro_batches: int
    """Gradient accumulation steps in the check that a micro-batch fits, as the profile
    was probed."""
    manifest: Manifest
    device_used_before_bytes: list[int] | None = None
    """Bytes in use on each GPU before this program started, by NVML; None on a CPU or
    if unknown."""
    reading: Rounds
    fallen: dict[RecipeName, str] = field(default_factory=dict)
    """Reasons why recipes dropped out."""
    rounds: list[dict[RecipeName, TrainingFigures]] = field(default_factory=list)

    def run(self) -> BaselineEvidence:
        """Measure the recipes that fit until their speedups are precise.

        Raises:
            Undecided: If the tuned settings fail.
        """
        for name in [name for name in self.recipes if name != TUNED]:
            self._fit(name)
        try:
            while self._continues():
                self._measure_round()
        except OutOfTime:
            if len(self.rounds) < MIN_WINDOWS:
                raise
        return BaselineEvidence(
            rows=[self._row(name) for name in reversed(self.recipes)],
            local_ranks=self.training.limits.local_ranks,
            window_s=self.training.request.window_s,
            windows=sum(map(len, self.rounds)),
            seconds=round(self.reading.runner.seconds, 3),
        )

    def _continues(self) -> bool:
        done, others = (
            len(self.rounds),
            [name for name in self._remaining() if name != TUNED],
        )
        if done >= self.most_rounds or not others:
            return done == 0
        if done < MIN_WINDOWS:
            return True
        precise = all(is_precise(self._speedup(name)) for name in others)
        bounded = all(
            estimate_windows(self._rates(name)).interval().low is not None
            for name in self._remaining()
        )
        return (
            not (precise and bounded)
            and self.reading.runner.seconds < self.training.request.budget_s
        )

    def _rates(self, name: RecipeName) -> list[float]:
        return [self._rate(name, one[name]) for one in self.rounds if name in one]

    def _remaining(self) -> list[RecipeName]:
        return [name for name in self.recipes if name not in self.fallen]

    def _fit(self, name: RecipeName) -> None:
        """Halve a recipe's micro-batch until it fits the memory budget of the probe."""
        ranks, timeout_s = (
            self.training.limits.local_ranks,
            self.training.request.trial_timeout_s,
        )
        while True:
            recipe = self.recipes[name]
            rows = recipe.config.micro_batch_size
            # The trainer's step on full sequences under the memory budget, as in the
            # probe.
            sequences = rows * ranks * self.micro_batches
            changes = {
                "global_batch_size": sequences,
                "global_batch_tokens": None,
                "global_batch_samples": None,
            }
            asked = StepRequest(
                config=recipe.config.model_copy(update=changes),
                vocab_size=self.manifest.vocab_size,
                special_ids=self.manifest.special_ids,
                memory_budget_bytes=self.memory_budget_bytes,
                warmup_steps=FIT_STEPS.warmup,
                timed_steps=FIT_STEPS.timed,
                local_ranks=ranks,
                documents_per_sequence=1.0,
            )
            trial = asked.trial(
                timeout_s=timeout_s,
                device_used_before_bytes=self.device_used_before_bytes,
            )
            outcome = self.reading.measure_window(
                trial, f"{name}: check that micro-batch {rows} fits"
            )
            if isinstance(outcome, Measured):
                return
            no_room = isinstance(outcome, OutOfMemory | HostOutOfMemory)
            if rows == 1 or not no_room:
                size = (
                    "even with one sequence" if no_room else f"with micro-batch {rows}"
                )
                self.fallen[name] = f"{describe(outcome)} {size}"
                return
            budget = format_bytes(self.memory_budget_bytes)
            config = recipe.config.model_copy(update={"micro_batch_size": rows // 2})
            because = {
                **recipe.because,
                "micro_batch_size": f"{rows} does not fit {budget}",
            }
            self.recipes[name] = replace(recipe, config=config, because=because)

    def _measure_round(self) -> None:
        number, names = len(self.rounds), self._remaining()
        trials = {}
        for name in names:
            # On a CPU, one padded step of four micro-batches is long enough.
            trial = training_trial(
                self.training, self.recipes[name].config, number, names, min_steps=1
            )
            trials[name] = (trial, f"{name}, round {number + 1}")

        def check(name: RecipeName, outcome: Outcome, seconds: float) -> None:
            if name == TUNED:
                self.reading.runner.require_measured(
                    "a window of the tuned settings", outcome
                )

        found: dict[RecipeName, TrainingFigures] = {}
        for name, outcome in self.reading.measure_round(number, trials, check).items():
            if isinstance(outcome, Measured):
                found[name] = TrainingFigures.of(outcome)
            else:
                self.fallen[name] = f"{describe(outcome)} in round {number + 1}"
        self.rounds.append(found)

    def _rate(self, name: RecipeName, figures: TrainingFigures) -> float:
        share = self.non_padding_shares[name]
        return (
            figures.tokens_per_s
            if share is None
            else share * figures.padded_tokens_per_s
        )

    def _speedup(self, name: RecipeName) -> Interval:
        """Return the tuned settings' speedup over a recipe that was measured."""
        both = [one for one in self.rounds if name in one]
        pairs = [
            (self._rate(TUNED, one[TUNED]), self._rate(name, one[name])) for one in both
        ]
        return paired_ratio(pairs, confidence=SHOWN_CONFIDENCE)

    def _row(self, name: RecipeName) -> RecipeRow:
        windows = [one[name] for one in self.rounds if name in one]
        ratio = self._speedup(name) if windows else None
        bounds = None if name == TUNED else ratio
        return RecipeRow(
            name=name,
            tokens_per_s=self._rates(name),
            speedup=None if ratio is None else ratio.value,
            differences=differences(
                self.recipes[name],
                self.training.config,
                self.training.limits.local_ranks,
            ),
            speedup_low=bounds.low if bounds else None,
            speedup_high=bounds.high if bounds else None,
            data_wait_share=(
                statistics.median(one.data_wait_share for one in windows)
                if windows
                else None
            ),
            outcome=self.fallen.get(name, "ran"),
        )
