"""Probe of one model: verify the largest micro-batch, then measure its throughput.

The largest micro-batch is verified on both sides: it ran under the memory budget, and
one sequence more ran out of memory. Smaller sizes give the throughput curve.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.errors import ExceedsMemory, OutOfTime
from autotune.evidence.probe import ProbeEvidence
from autotune.memory.decide.batch_search import (
    Prediction,
    SizeTrial,
    bracket,
    predict_bytes,
)
from autotune.memory.decide.memory_model import memory_breakdown, peak_bytes
from autotune.memory.decide.sharding import smallest_sharding
from autotune.memory.estimate import CannotTrace, MemoryEstimate
from autotune.memory.probe import FIT_STEPS, Probe, step_trial
from autotune.memory.size_search import SizeSearch
from autotune.memory.throughput import Throughput, measure_throughput
from autotune.memory.values import ACTIVATIONS, MemoryBreakdown
from autotune.profiles.decide.knee import knee_interval
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial
from trainer.config.train_config import TrainConfig

_UNSURE_SHARE = 1 / 4
"""Share of the range of assumed overheads that is added to predicted peaks until a
trial fits. The first trial is then likely to fit, and to correct the prediction: a
trial that runs out of memory has no peak."""


def probe_model(
    probe: Probe, runner: TrialRunner, traced: MemoryEstimate | None = None
) -> tuple[TrainConfig, ProbeEvidence]:
    """Find and verify the largest micro-batch, and measure the throughput curve.

    Every trial is a fresh process.

    Args:
        probe: The model and its limits.
        runner: Runs the trials.
        traced: Result of ``probe.trace``, if known.

    Returns:
        The settings with the chosen micro-batch, and the evidence for it.

    Raises:
        ExceedsMemory: If not even one sequence fits.
        OutOfTime: If time ended before any size fitted. If it ends later, the evidence
            is marked as a lower bound, or has no throughput.
        Undecided: If trials failed for another reason than memory.
    """
    search = ProbeSearch(probe=probe, runner=runner, estimate=traced)
    search.predict()
    is_lower_bound = False
    try:
        search.find()
    except OutOfTime:
        if not bracket(search.tried).feasible_max:
            raise
        # The largest size that ran is still worth reporting.
        is_lower_bound = True
    feasible_max = bracket(search.tried).feasible_max
    if not feasible_max:
        raise search.explain_too_large()
    throughput = measure_throughput(probe, runner, feasible_max)
    # Made last, as the evidence has the time of all trials.
    evidence = _evidence(search, throughput, is_lower_bound=is_lower_bound)
    update = {"micro_batch_size": throughput.choice.micro_batch_size}
    return probe.config.model_copy(update=update), evidence


@dataclass(slots=True, kw_only=True)
class ProbeSearch(SizeSearch):
    """Search for the largest micro-batch of a model, which a trace may guide."""

    probe: Probe
    """The model and its limits."""
    estimate: MemoryEstimate | None = None
    """Memory that a trace predicts; None until ``predict``, or without a trace."""
    not_traced: str | None = None
    """Reason why tracing failed; None if it did not, or was not requested."""

    def __post_init__(self) -> None:
        config = self.probe.config
        self.name = config.model.name
        self.on_gpu = config.device == "cuda"
        self.budget_bytes = self.probe.memory_budget_bytes
        self.max_size = self.probe.request.max_micro_batch_size

    def predict(self) -> None:
        """Trace the step, and set ``prediction``.

        If no trace is requested or tracing fails, ``prediction`` stays None and trials
        alone guide the search. If tracing fails, ``not_traced`` has the reason.
        """
        overheads = self.probe.overheads
        if overheads is None:
            return
        if self.estimate is None:
            self.runner.on_trial(f"{self.name}: predicting memory from a trace", None)
            try:
                self.estimate = self.probe.trace(self.runner.machine)
            except CannotTrace as error:
                self.not_traced = error.message
                return
        memory_model = self.estimate.memory_model

        # A search compares the same sizes after each trial, and the prediction of each
        # size replays a whole trace.
        @functools.cache
        def predicted_bytes(micro_batch_size: int) -> float:
            return float(peak_bytes(memory_model, micro_batch_size, overheads.usual))

        range_bytes = (
            overheads.most.non_pytorch_bytes - overheads.least.non_pytorch_bytes
        )
        self.prediction = Prediction(
            peak_bytes=predicted_bytes, unsure_bytes=_UNSURE_SHARE * range_bytes
        )

    def trial_of(self, size: int, attempt: int) -> Trial:
        """Return an attempt to run a micro-batch size under the memory budget."""
        return step_trial(
            self.probe, size, FIT_STEPS, self.budget_bytes, attempt=attempt
        )

    def peak_bytes_of(self, size: int, outcome: Measured) -> int:
        """Return the highest peak memory of the trial's ranks."""
        return StepFigures.of(outcome).peak_bytes

    def breakdown(self, micro_batch_size: int) -> MemoryBreakdown | None:
        """Return the predicted memory of a micro-batch; None if nothing is traced."""
        if self.estimate is None or self.probe.overheads is None:
            return None
        return memory_breakdown(
            self.estimate.memory_model, micro_batch_size, self.probe.overheads.usual
        )

    def explain_too_large(self) -> ExceedsMemory:
        """Run one sequence without a memory limit, and return an error with its memory.

        The error is for a model of which not even one sequence fits. It also names the
        largest term of the predicted memory, and remedies.
        """
        probe = self.probe
        outcome = self.runner.run(
            step_trial(probe, 1, FIT_STEPS, None),
            f"{self.name}: 1 sequence without a limit",
        )
        message = (
            f"one sequence of {probe.config.seq_length_tokens} tokens of"
            f" {self.name!r} exceeds the memory budget of"
            f" {format_bytes(probe.memory_budget_bytes)}"
        )
        if isinstance(outcome, Measured):
            message += f"; {format_bytes(StepFigures.of(outcome).peak_bytes)} needed"
        breakdown = self.breakdown(1)
        if breakdown is not None:
            # With the predicted total, as this term may exceed the measured peak.
            term = breakdown.largest_term
            message += (
                f"; largest part: {term}, {format_bytes(breakdown.terms_bytes[term])}"
                f" of {format_bytes(breakdown.peak_bytes)} predicted"
            )
        *remedies, last_remedy = self._remedies(breakdown)
        return ExceedsMemory(
            message,
            next_step=f"{', '.join(remedies).capitalize()}, or {last_remedy}.",
        )

    def _remedies(self, breakdown: MemoryBreakdown | None) -> list[str]:
        """Return what may make one sequence fit, given its predicted memory."""
        remedies = [
            "raise --memory",
            "shorten --seq-length",
            "choose a smaller --model",
        ]
        if breakdown is None:
            return remedies
        config = self.probe.config
        if (
            breakdown.largest_term.startswith(ACTIVATIONS)
            and config.activation_checkpointing != "full"
        ):
            remedies.insert(0, "add --activation-checkpointing full")
        # With several ranks, any strategy but DDP has sharded the traced state already.
        is_whole_state = (
            config.parallel.strategy == "ddp" or self.probe.local_ranks == 1
        )
        if self.estimate is not None and is_whole_state:
            sharding = smallest_sharding(
                breakdown.terms_bytes,
                self.probe.memory_budget_bytes,
                largest_layer_bytes=self.estimate.memory_model.largest_parameter_bytes,
            )
            if sharding is not None:
                remedies.append(f"shard the state: {sharding}")
        return remedies


def _evidence(
    search: ProbeSearch, throughput: Throughput, *, is_lower_bound: bool
) -> ProbeEvidence:
    """Return the result of a finished probe.

    Args:
        search: Search that found a size that fits.
        throughput: Throughput by size, and the chosen size.
        is_lower_bound: True if time ended before the largest size was verified.
    """
    probe = search.probe
    verified = bracket(search.tried)
    feasible_max = verified.feasible_max
    traced_peak_bytes = None
    if search.prediction is not None:
        traced_peak_bytes = round(search.prediction.peak_bytes(feasible_max))
    traced_micro_batch_size = None
    parameters = None
    if search.estimate is not None:
        traced_micro_batch_size = search.estimate.max_micro_batch_size
        parameters = search.estimate.parameters
    traced_terms_bytes: dict[str, int] = {}
    breakdown = search.breakdown(feasible_max)
    if breakdown is not None:
        traced_terms_bytes = dict(breakdown.terms_bytes)
    return ProbeEvidence(
        feasible_max=feasible_max,
        infeasible_min=verified.infeasible_min,
        is_lower_bound=is_lower_bound,
        feasible_peak_bytes=_highest_peak_bytes(search.tried, feasible_max),
        predicted_peak_bytes=predict_bytes(
            search.tried, feasible_max, search.prediction
        ),
        traced_peak_bytes=traced_peak_bytes,
        traced_micro_batch_size=traced_micro_batch_size,
        traced_terms_bytes=traced_terms_bytes,
        parameters=parameters,
        not_traced=search.not_traced,
        local_ranks=probe.local_ranks,
        gradient_accumulation_steps=probe.micro_batches,
        search_trials=len(search.tried),
        seconds=round(search.runner.seconds, 3),
        mean_tokens_per_sequence=probe.mean_tokens_per_sequence,
        curve=throughput.curve,
        knee_micro_batch_sizes=list(knee_interval(throughput.curve) or ()),
        dip=throughput.dip,
        sustained=throughput.sustained,
        choice=throughput.choice.reason,
    )


def _highest_peak_bytes(tried: Sequence[SizeTrial], micro_batch_size: int) -> int:
    """Return the peak memory of a size: the highest of its trials that fitted."""
    return max(
        trial.peak_bytes
        for trial in tried
        if trial.micro_batch_size == micro_batch_size and trial.peak_bytes is not None
    )
