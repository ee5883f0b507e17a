"""Probe of one model: verify the largest micro-batch, then measure its throughput.

The largest micro-batch is verified on both sides: it ran under the memory budget, and
one sequence more ran out of memory. Smaller sizes give the throughput curve.
"""

import contextlib
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE, TRIAL_TIMEOUT_S
from autotune.base.statistics import estimate_windows
from autotune.base.units import format_bytes
from autotune.base.wording import plural
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.machine.gpu_models import GpuModel
from autotune.memory.decide.batch_search import (
    MAX_FAILURES,
    Prediction,
    SizeTrial,
    bracket,
    predict_bytes,
)
from autotune.memory.decide.memory_model import memory_breakdown, peak_bytes
from autotune.memory.decide.overheads import OverheadsRange
from autotune.memory.decide.sharding import smallest_sharding
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.size_search import SizeSearch
from autotune.memory.values import (
    ACTIVATIONS,
    CurvePoint,
    ProbeEvidence,
    StepRequest,
    TraceRequest,
)
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.profiles.decide.micro_batch import (
    MicroBatchChoice,
    choose_micro_batch,
    curve_sizes,
    knee_interval,
    with_headroom,
)
from autotune.trials.fork_server import Machine
from autotune.trials.runner import TrialRunner
from autotune.trials.values import (
    Contaminated,
    Crashed,
    Measured,
    OutOfMemory,
    StepFigures,
    Trial,
)
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import Manifest
from trainer.data.global_batch import SequenceStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Optimizer steps of a trial."""

    warmup: int
    timed: int


FIT_STEPS = StepCounts(warmup=1, timed=1)
"""Steps, each followed by an evaluation, of a trial that tests if a size fits."""
CURVE_STEPS = {
    "cpu": StepCounts(warmup=1, timed=4),
    "cuda": StepCounts(warmup=3, timed=10),
}
"""Steps of a point of the throughput curve."""
SUSTAINED_S = {"cpu": 0.0, "cuda": 60.0}
"""Seconds of the trial of the chosen micro-batch: a warm GPU at its power limit is
slower."""
_SUSTAINED_MARGIN = 1.1
"""Steps of that trial over the number that should take its time, as steps differ."""
_POINT_SHARE = 0.25
"""Largest share of the time left for the trial of one point, so that a slow machine
measures several."""
_MAX_CHOICES = 3
"""Most sizes that are added to the curve before one of its sizes is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Request to probe one model; None takes the default of the machine."""

    config: TrainConfig
    """Settings of the step; unless set, ``layout`` and ``precision`` are the defaults
    of model and device."""
    data: Path
    reports: Path
    memory_bytes: int | None = None
    as_gpu: GpuModel | None = None
    """Smaller GPU whose memory is imitated."""
    ranks: int | None = None
    accumulate: bool = True
    """True if a step has several micro-batches on each rank; two stand for any larger
    number."""
    headroom_share: float = HEADROOM_SHARE
    max_micro_batch_size: int = MAX_MICRO_BATCH_SIZE
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    traced: bool = True
    """True if memory is predicted first; otherwise trials alone guide the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request at a known site, with all settings complete."""

    request: ProbeRequest
    config: TrainConfig
    """Complete settings; the chosen micro-batch splits their ``global_batch_size``."""
    manifest: Manifest
    memory_budget_bytes: int
    device_used_before_bytes: int | list[int] | None = None
    """Memory used on each GPU before this program, by NVML; None on a CPU."""
    local_ranks: int = 1
    global_batch_tokens: int = DEFAULT_GLOBAL_BATCH_TOKENS
    sequence_stats: SequenceStatistics | None = None
    """Statistics of the dataset's sequences; None for full sequences of one
    document."""
    overheads: OverheadsRange | None = None
    """Overheads of a traced step on this device; None if nothing is traced."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, on each rank."""
        return 2 if self.request.accumulate else 1

    @property
    def documents_per_sequence(self) -> float:
        """Documents per sequence in the fullest micro-batches."""
        if self.sequence_stats is None or self.config.layout != "packed":
            return 1.0
        return self.sequence_stats.max_documents

    def trace(self, machine: Machine) -> MemoryEstimate:
        """Trace the model's step, and predict its memory near the largest micro-batch.

        Raises:
            CannotTrace: If the memory can only be measured.
        """
        assert self.overheads is not None
        request = TraceRequest(
            config=step_config(self, 1),
            vocab_size=self.manifest.vocab_size,
            special_ids=self.manifest.special_ids,
            documents_per_sequence=self.documents_per_sequence,
            micro_batches=self.micro_batches,
            ranks=self.local_ranks,
        )
        return estimate_model(
            request,
            machine,
            self.memory_budget_bytes,
            self.overheads.usual,
            max_micro_batch_size=self.request.max_micro_batch_size,
        )


@dataclass(slots=True, kw_only=True)
class ProbeSearch(SizeSearch):
    """State of a running probe."""

    probe: Probe
    estimate: MemoryEstimate | None = None
    not_traced: str | None = None
    """Reason for a missing trace."""

    def __post_init__(self) -> None:
        config = self.probe.config
        self.name = config.model.name
        self.on_gpu = config.device == "cuda"
        self.budget_bytes = self.probe.memory_budget_bytes
        self.max_size = self.probe.request.max_micro_batch_size

    def predict(self) -> None:
        """Trace the model; if that fails, let trials alone guide the search."""
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
        fit = self.estimate.memory_model

        # A search asks for the same sizes again and again, and each replays a trace.
        @functools.cache
        def predicted_bytes(micro_batch_size: int) -> float:
            return float(peak_bytes(fit, micro_batch_size, overheads.usual))

        range_bytes = (
            overheads.most.non_pytorch_bytes - overheads.least.non_pytorch_bytes
        )
        self.prediction = Prediction(
            peak_bytes=predicted_bytes, unsure_bytes=range_bytes / 4
        )

    def trial_of(self, size: int, attempt: int) -> Trial:
        """Return the trial of a micro-batch size."""
        return step_trial(
            self.probe, size, FIT_STEPS, self.budget_bytes, attempt=attempt
        )

    def peak_bytes_of(self, size: int, outcome: Measured) -> int:
        """Return the peak of a trial that ran."""
        return StepFigures.of(outcome).peak_bytes

    def curve(self, sizes: list[int]) -> list[CurvePoint]:
        """Measure throughput from the largest size down, as far as time allows.

        The largest size is always measured.
        """
        *smaller, largest = sizes
        points = [self._point(largest)]
        with contextlib.suppress(OutOfTime):
            for size in reversed(smaller):
                points.insert(0, self._point(size))
        return points

    def choose(self, curve: list[CurvePoint], feasible_max: int) -> MicroBatchChoice:
        """Choose the split of the global batch.

        If the chosen size was not measured, add it to the curve.
        """
        choose_from = functools.partial(
            choose_micro_batch,
            curve,
            feasible_max,
            global_batch_size=self.probe.config.global_batch_size,
            ranks=self.probe.local_ranks,
        )
        all_sizes = range(1, curve[-1].micro_batch_size + 1)
        for _ in range(_MAX_CHOICES):
            choice = choose_from(sizes=all_sizes)
            if _point_of(curve, choice.micro_batch_size) is not None:
                return choice
            try:
                curve.append(self._point(choice.micro_batch_size))
            except OutOfTime:
                break
            curve.sort(key=lambda point: point.micro_batch_size)
        return choose_from()

    def sustained(self, chosen: CurvePoint) -> CurvePoint | None:
        """Run the chosen micro-batch until the GPU is as warm as in training.

        Returns:
            Its throughput; None on a CPU, or if time runs out.
        """
        device = self.probe.config.device
        seconds = min(SUSTAINED_S[device], self.probe.request.trial_timeout_s / 4)
        if not seconds:
            return None
        steps = StepCounts(
            warmup=CURVE_STEPS[device].warmup,
            timed=max(1, math.ceil(_SUSTAINED_MARGIN * seconds / chosen.step_s)),
        )
        with contextlib.suppress(OutOfTime):
            return self._point(chosen.micro_batch_size, steps, f" for {seconds:g} s")
        return None

    def _point(
        self, micro_batch_size: int, steps: StepCounts | None = None, duration: str = ""
    ) -> CurvePoint:
        """Measure the throughput of one micro-batch size, which is known to fit.

        Raises:
            Undecided: If it runs out of memory or fails too often.
        """
        # Allocator settings that make a CPU's limit exact slow it down; speed is
        # measured without, as the size fits.
        budget_bytes = self.budget_bytes if self.on_gpu else None
        label = f"{plural(micro_batch_size, 'sequence')}, throughput{duration}"
        for attempt in range(MAX_FAILURES):
            # A step of one micro-batch, which accumulation repeats.
            trial = step_trial(
                self.probe,
                micro_batch_size,
                steps or self._curve_steps(micro_batch_size),
                budget_bytes,
                attempt=attempt,
                micro_batches=1,
            )
            again = f", attempt {attempt + 1}" if attempt else ""
            outcome = self.runner.run(trial, f"{self.name}: {label}{again}", timed=True)
            if not isinstance(outcome, Crashed | Contaminated):
                break
        if isinstance(outcome, OutOfMemory):
            raise Undecided(
                f"micro-batch size {micro_batch_size} fitted at first, but not in the"
                f" throughput trial: {outcome.detail}",
                next_step="Leave more memory free: add --headroom 0.1",
            )
        figures = StepFigures.of(
            self.runner.require_measured(f"the trial {label!r}", outcome)
        )
        tokens_per_step = figures.padded_tokens_per_step
        step_s = statistics.median(figures.step_s)
        rates = [tokens_per_step / seconds for seconds in figures.step_s]
        interval = estimate_windows(rates).interval()
        return CurvePoint(
            micro_batch_size=micro_batch_size,
            padded_tokens_per_s=tokens_per_step / step_s,
            step_s=step_s,
            timed_steps=len(figures.step_s),
            padded_tokens_per_s_low=interval.low,
            padded_tokens_per_s_high=interval.high,
        )

    def _curve_steps(self, micro_batch_size: int) -> StepCounts:
        """Return the steps of a point: fewer of them on a machine that is too slow."""
        usual = CURVE_STEPS[self.probe.config.device]
        left_s = self.runner.budget_left_s
        step_s = self._expected_step_s(micro_batch_size)
        if left_s is None or not step_s:
            return usual
        timed = int(_POINT_SHARE * left_s / step_s) - usual.warmup
        return replace(usual, timed=min(usual.timed, max(1, timed)))

    def _expected_step_s(self, micro_batch_size: int) -> float:
        """Return the seconds of a step of one micro-batch, by the trials so far.

        0 if none of them has figures.
        """
        seconds_per_token = []
        for finished in self.runner.finished:
            if isinstance(finished.outcome, Measured):
                figures = StepFigures.of(finished.outcome)
                step_s = statistics.median(figures.step_s)
                seconds_per_token.append(step_s / figures.padded_tokens_per_step)
        if not seconds_per_token:
            return 0.0
        tokens = micro_batch_size * self.probe.config.seq_length_tokens
        return statistics.median(seconds_per_token) * tokens * self.probe.local_ranks

    def does_not_fit(self) -> ExceedsMemory:
        """Return the error for a model of which not even one sequence fits.

        It names the memory that one sequence needs, the largest term, and remedies.
        """
        probe = self.probe
        outcome = self.runner.run(
            step_trial(probe, 1, FIT_STEPS, None),
            f"{self.name}: 1 sequence without a limit",
        )
        need = ""
        if isinstance(outcome, Measured):
            need = f"; {format_bytes(StepFigures.of(outcome).peak_bytes)} needed"
        terms = self.terms_bytes(1)
        if terms:
            largest_term = max(terms, key=terms.__getitem__)
            size = format_bytes(terms[largest_term])
            need += f"; largest part: {largest_term}, {size} (predicted)"
        remedies = self._remedies(terms)
        budget = format_bytes(probe.memory_budget_bytes)
        return ExceedsMemory(
            f"one sequence of {probe.config.seq_length_tokens} tokens of"
            f" {self.name!r} exceeds the memory budget of {budget}{need}",
            next_step=f"{', '.join(remedies[:-1]).capitalize()}, or {remedies[-1]}.",
        )

    def _remedies(self, terms_bytes: Mapping[str, int]) -> list[str]:
        """Return what may make one sequence fit, given its predicted memory by term."""
        remedies = [
            "raise --memory",
            "shorten --seq-length",
            "choose a smaller --model",
        ]
        if not terms_bytes:
            return remedies
        config = self.probe.config
        largest_term = max(terms_bytes, key=terms_bytes.__getitem__)
        if (
            largest_term.startswith(ACTIVATIONS)
            and config.activation_checkpointing != "full"
        ):
            remedies.insert(0, "add --activation-checkpointing full")
        # Under any other strategy, the terms of several ranks are a share already.
        whole_state = config.parallel.strategy == "ddp" or self.probe.local_ranks == 1
        if self.estimate is not None and whole_state:
            sharding = smallest_sharding(
                terms_bytes,
                self.probe.memory_budget_bytes,
                largest_layer_bytes=self.estimate.memory_model.largest_parameter_bytes,
            )
            if sharding is not None:
                remedies.append(f"shard the state: {sharding}")
        return remedies

    def terms_bytes(self, micro_batch_size: int) -> dict[str, int]:
        """Return the predicted memory of a micro-batch by term; empty if not traced."""
        if self.estimate is None or self.probe.overheads is None:
            return {}
        breakdown = memory_breakdown(
            self.estimate.memory_model, micro_batch_size, self.probe.overheads.usual
        )
        return dict(breakdown.terms_bytes)


def probe_model(
    probe: Probe, runner: TrialRunner, traced: MemoryEstimate | None = None
) -> tuple[TrainConfig, ProbeEvidence]:
    """Predict, find and verify the largest micro-batch, and measure the curve.

    Every trial is a fresh process.

    Args:
        probe: The model and its limits.
        runner: Runs the trials.
        traced: Result of ``probe.trace``, if known.

    Returns:
        The settings with the chosen micro-batch, and the evidence for it.

    Raises:
        ExceedsMemory: If not even one sequence fits.
        OutOfTime: If time ended before any size ran. If it ends later, the evidence is
            a lower bound, or lacks throughput.
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
        is_lower_bound = True
    verified = bracket(search.tried)
    feasible_max = verified.feasible_max
    if not feasible_max:
        raise search.does_not_fit()
    limit = with_headroom(feasible_max, probe.request.headroom_share)
    curve: list[CurvePoint] = []
    not_timed = "on a pretended GPU no throughput is measured"
    if not runner.pretended:
        not_timed = "no time was left to measure throughput"
        with contextlib.suppress(OutOfTime):
            curve = search.curve(curve_sizes(limit))
    if curve:
        choice = search.choose(curve, feasible_max)
    else:
        reason = f"the largest size that leaves the headroom free; {not_timed}"
        choice = MicroBatchChoice(micro_batch_size=limit, reason=reason)
    chosen = _point_of(curve, choice.micro_batch_size)
    # Before the evidence reads ``runner.seconds``, which includes this trial.
    sustained = None if chosen is None else search.sustained(chosen)
    estimate, prediction = search.estimate, search.prediction
    traced_peak_bytes = None
    if prediction is not None:
        traced_peak_bytes = round(prediction.peak_bytes(feasible_max))
    evidence = ProbeEvidence(
        feasible_max=feasible_max,
        infeasible_min=verified.infeasible_min,
        is_lower_bound=is_lower_bound,
        not_traced=search.not_traced,
        feasible_peak_bytes=_highest_peak_bytes(search.tried, feasible_max),
        predicted_peak_bytes=predict_bytes(search.tried, feasible_max, prediction),
        traced_peak_bytes=traced_peak_bytes,
        traced_micro_batch_size=(
            None if estimate is None else estimate.max_micro_batch_size
        ),
        traced_terms_bytes=search.terms_bytes(feasible_max),
        local_ranks=probe.local_ranks,
        parameters=None if estimate is None else estimate.parameters,
        search_trials=len(search.tried),
        gradient_accumulation_steps=probe.micro_batches,
        sustained=sustained,
        seconds=round(runner.seconds, 3),
        mean_tokens_per_sequence=_mean_tokens_per_sequence(probe),
        curve=curve,
        knee_micro_batch_sizes=list(knee_interval(curve) or ()),
        choice=choice.reason,
    )
    update = {"micro_batch_size": choice.micro_batch_size}
    return probe.config.model_copy(update=update), evidence


def _point_of(curve: Sequence[CurvePoint], micro_batch_size: int) -> CurvePoint | None:
    """Return the point of a size; None if it was not measured."""
    for point in curve:
        if point.micro_batch_size == micro_batch_size:
            return point
    return None


def _highest_peak_bytes(tried: Sequence[SizeTrial], micro_batch_size: int) -> int:
    """Return the peak of a size: the higher one if it was tried twice."""
    return max(
        trial.peak_bytes or 0
        for trial in tried
        if trial.micro_batch_size == micro_batch_size
    )


def _mean_tokens_per_sequence(probe: Probe) -> float:
    """Return the non-padding tokens per sequence: all, if there are no statistics."""
    if probe.sequence_stats is None:
        return probe.config.seq_length_tokens
    return probe.sequence_stats.mean_non_padding_tokens


def step_config(
    probe: Probe, micro_batch_size: int, *, micro_batches: int | None = None
) -> TrainConfig:
    """Return the trainer's settings of a trial of a micro-batch size.

    A step has ``micro_batches`` on each rank, by default those of the probe.
    """
    global_batch_size = (
        micro_batch_size * probe.local_ranks * (micro_batches or probe.micro_batches)
    )
    return probe.config.model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "global_batch_size": global_batch_size,
        }
    )


def step_trial(
    probe: Probe,
    micro_batch_size: int,
    steps: StepCounts,
    budget_bytes: int | None,
    *,
    attempt: int = 0,
    micro_batches: int | None = None,
) -> Trial:
    """Return a trial of the trainer's step, without a limit if there is no budget.

    Each attempt is another trial.
    """
    request = StepRequest(
        config=step_config(probe, micro_batch_size, micro_batches=micro_batches),
        vocab_size=probe.manifest.vocab_size,
        special_ids=probe.manifest.special_ids,
        memory_budget_bytes=budget_bytes,
        warmup_steps=steps.warmup,
        timed_steps=steps.timed,
        local_ranks=probe.local_ranks,
        documents_per_sequence=probe.documents_per_sequence,
        attempt=attempt,
    )
    return request.trial(
        timeout_s=probe.request.trial_timeout_s,
        device_used_before_bytes=probe.device_used_before_bytes,
        first_attempt=not attempt,
    )
