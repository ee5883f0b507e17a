"""Probe of one model: the largest micro-batch under the budget, verified on both sides, then the throughput curve."""

import contextlib
import functools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE, TRIAL_TIMEOUT_S
from autotune.base.statistics import of_windows
from autotune.base.units import format_bytes
from autotune.base.wording import plural
from autotune.errors import ExceedsMemory, OutOfTime, Undecided
from autotune.machine.gpu_models import GpuModel
from autotune.memory.decide.batch_search import (
    MAX_FAILURES,
    Prediction,
    bracket,
    predict_bytes,
)
from autotune.memory.decide.memory_model import Expected, memory_breakdown, peak_bytes
from autotune.memory.decide.sharding import fewest_that_share
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.size_search import SizeSearch
from autotune.memory.values import (
    ACTIVATIONS,
    CurvePoint,
    ProbeEvidence,
    StepRequest,
    TraceRequest,
)
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
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

FIT_STEPS = (1, 1)
"""Warm-up and timed steps, each followed by an evaluation, of a trial that tests if a
size fits."""
CURVE_STEPS = {"cpu": (1, 4), "cuda": (3, 10)}
"""Warm-up and timed steps of a point of the throughput curve."""
SUSTAINED_S = {"cpu": 0.0, "cuda": 60.0}
"""Seconds of the trial of the chosen micro-batch: a warm GPU at its power limit is
slower."""
_MOST_CHOICES = 3
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
    rows: SequenceStatistics | None = None
    """Statistics of the dataset's sequences; None for full sequences of one
    document."""
    expected: Expected | None = None
    """Overheads of a traced step on this device; None if nothing is traced."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, on each rank."""
        return 2 if self.request.accumulate else 1

    @property
    def documents_per_sequence(self) -> float:
        """Documents per sequence in the fullest micro-batches."""
        return (
            self.rows.most_documents
            if self.rows is not None and self.config.layout == "packed"
            else 1.0
        )

    def trace(self, machine: Machine) -> MemoryEstimate:
        """Trace the model's step.

        Predict its memory near the largest micro-batch. Raise ``CannotTrace`` on
        failure.
        """
        request = TraceRequest(
            config=step_config(self, 1),
            vocab_size=self.manifest.vocab_size,
            special_ids=self.manifest.special_ids,
            documents_per_sequence=self.documents_per_sequence,
            micro_batches=self.micro_batches,
            ranks=self.local_ranks,
        )
        assert self.expected is not None
        budget, usual = self.memory_budget_bytes, self.expected.usual
        return estimate_model(
            request,
            machine,
            budget,
            usual,
            max_micro_batch_size=self.request.max_micro_batch_size,
        )


@dataclass(slots=True, kw_only=True)
class Search(SizeSearch):
    """State of a running probe."""

    probe: Probe
    estimate: MemoryEstimate | None = None
    not_traced: str | None = None

    def __post_init__(self) -> None:
        config, request = self.probe.config, self.probe.request
        self.name, self.on_gpu = config.model.name, config.device == "cuda"
        self.budget_bytes, self.max_size = (
            self.probe.memory_budget_bytes,
            request.max_micro_batch_size,
        )

    def predict(self) -> None:
        """Trace the model; if that fails, let trials alone guide the search."""
        if (expected := self.probe.expected) is None:
            return
        if self.estimate is None:
            self.runner.on_trial(f"{self.name}: predicting memory from a trace", None)
            try:
                self.estimate = self.probe.trace(self.runner.machine)
            except CannotTrace as error:
                self.not_traced = error.message
                return
        fit, usual = self.estimate.fit, expected.usual
        self.prediction = Prediction(
            peak_bytes=functools.cache(
                lambda rows: float(peak_bytes(fit, rows, usual))
            ),
            unsure_bytes=(
                expected.most.non_pytorch_bytes - expected.least.non_pytorch_bytes
            )
            / 4,
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

        At least the largest.
        """
        *smaller, largest = sizes
        points = [self._point(largest)]
        with contextlib.suppress(OutOfTime):
            for rows in reversed(smaller):
                points.insert(0, self._point(rows))
        return points

    def choose(self, curve: list[CurvePoint], feasible_max: int) -> MicroBatchChoice:
        """Choose the split of the global batch.

        If the chosen size was not measured, add it to the curve.
        """
        limit, rows, ranks = (
            curve[-1].micro_batch_size,
            self.probe.config.global_batch_size,
            self.probe.local_ranks,
        )
        sizes = range(1, limit + 1)
        for _ in range(_MOST_CHOICES):
            choice = choose_micro_batch(
                curve, feasible_max, global_batch_size=rows, ranks=ranks, sizes=sizes
            )
            if any(
                point.micro_batch_size == choice.micro_batch_size for point in curve
            ):
                return choice
            try:
                curve.append(self._point(choice.micro_batch_size))
            except OutOfTime:
                break
            curve.sort(key=lambda point: point.micro_batch_size)
        return choose_micro_batch(
            curve, feasible_max, global_batch_size=rows, ranks=ranks
        )

    def sustained(self, chosen: CurvePoint) -> CurvePoint | None:
        """Run the chosen micro-batch until the GPU is as warm as in training.

        None on a CPU, or if time runs out.
        """
        device = self.probe.config.device
        if not (
            seconds := min(SUSTAINED_S[device], self.probe.request.trial_timeout_s / 4)
        ):
            return None
        # A little more, as steps differ.
        steps = max(1, math.ceil(1.1 * seconds / chosen.step_s))
        with contextlib.suppress(OutOfTime):
            return self._point(
                chosen.micro_batch_size,
                (CURVE_STEPS[device][0], steps),
                f" for {seconds:g} s",
            )
        return None

    def _point(
        self, rows: int, steps: tuple[int, int] | None = None, how_long: str = ""
    ) -> CurvePoint:
        # Allocator settings that make a CPU's limit exact slow it down; speed is
        # measured without, as the size fits.
        budget_bytes = self.budget_bytes if self.on_gpu else None
        label = f"{plural(rows, 'sequence')}, throughput{how_long}"
        for attempt in range(MAX_FAILURES):
            # Of one micro-batch, which accumulation repeats.
            steps = steps or CURVE_STEPS[self.probe.config.device]
            trial = step_trial(
                self.probe, rows, steps, budget_bytes, attempt=attempt, micro_batches=1
            )
            again = f", attempt {attempt + 1}" if attempt else ""
            outcome = self.runner.run(trial, f"{self.name}: {label}{again}", timed=True)
            if not isinstance(outcome, Crashed | Contaminated):
                break
        if isinstance(outcome, OutOfMemory):
            what = (
                f"micro-batch size {rows} fitted at first, but not in the throughput"
                f" trial: {outcome.detail}"
            )
            raise Undecided(
                what, next_step="Leave more memory free: add --headroom 0.1"
            )
        figures = StepFigures.of(
            self.runner.require_measured(f"the trial {label!r}", outcome)
        )
        step_s = statistics.median(figures.step_s)
        spread = of_windows(
            [figures.padded_tokens_per_step / seconds for seconds in figures.step_s]
        ).interval()
        return CurvePoint(
            micro_batch_size=rows,
            padded_tokens_per_s=figures.padded_tokens_per_step / step_s,
            step_s=step_s,
            timed_steps=len(figures.step_s),
            padded_tokens_per_s_low=spread.low,
            padded_tokens_per_s_high=spread.high,
        )

    def does_not_fit(self) -> ExceedsMemory:
        """Return the error for a model of which not even one sequence fits: its memory, largest term, and remedies."""
        probe = self.probe
        tokens, budget = (
            probe.config.seq_length_tokens,
            format_bytes(probe.memory_budget_bytes),
        )
        outcome = self.runner.run(
            step_trial(probe, 1, FIT_STEPS, None),
            f"{self.name}: 1 sequence without a limit",
        )
        need = (
            f"; {format_bytes(StepFigures.of(outcome).peak_bytes)} needed"
            if isinstance(outcome, Measured)
            else ""
        )
        helps = ["raise --memory", "shorten --seq-length", "choose a smaller --model"]
        if terms := self.terms_bytes(1):
            term, size = max(terms.items(), key=lambda item: item[1])
            need += f"; largest part: {term}, {format_bytes(size)} (predicted)"
            if (
                term.startswith(ACTIVATIONS)
                and probe.config.activation_checkpointing != "full"
            ):
                helps.insert(0, "add --activation-checkpointing full")
            # Otherwise the terms are a share already.
            if self.estimate is not None and (
                probe.config.parallel.strategy == "ddp" or probe.local_ranks == 1
            ):
                largest = self.estimate.fit.largest_parameter_bytes
                shared = fewest_that_share(
                    terms, probe.memory_budget_bytes, largest_layer_bytes=largest
                )
                helps += [] if shared is None else [f"shard the state: {shared}"]
        return ExceedsMemory(
            f"one sequence of {tokens} tokens of {self.name!r} exceeds the memory"
            f" budget of {budget}{need}",
            next_step=f"{', '.join(helps[:-1]).capitalize()}, or {helps[-1]}.",
        )

    def terms_bytes(self, rows: int) -> dict[str, int]:
        """Return the predicted memory of a micro-batch by term.

        Empty without a trace.
        """
        if self.estimate is None or self.probe.expected is None:
            return {}
        return dict(
            memory_breakdown(
                self.estimate.fit, rows, self.probe.expected.usual
            ).terms_bytes
        )


def probe_model(
    probe: Probe, runner: TrialRunner, traced: MemoryEstimate | None = None
) -> tuple[TrainConfig, ProbeEvidence]:
    """Predict, find and verify the largest micro-batch in fresh processes, and measure the throughput curve.

    ``traced`` is the result of ``probe.trace``, if known. Returns the settings with the
    chosen micro-batch as well. Raise ``ExceedsMemory`` if not even one sequence fits,
    ``Undecided`` if trials failed for another reason.
    """
    search = Search(probe=probe, runner=runner, estimate=traced)
    search.predict()
    search.find()
    found, estimate, prediction = (
        bracket(search.tried),
        search.estimate,
        search.prediction,
    )
    if not (feasible_max := found.feasible_max):
        raise search.does_not_fit()
    limit = with_headroom(feasible_max, probe.request.headroom_share)
    curve = [] if runner.pretended else search.curve(curve_sizes(limit))
    untimed = (
        "the largest size that leaves the headroom free; on a pretended GPU no"
        " throughput is measured"
    )
    choice = (
        search.choose(curve, feasible_max)
        if curve
        else MicroBatchChoice(micro_batch_size=limit, reason=untimed)
    )
    chosen = [
        point for point in curve if point.micro_batch_size == choice.micro_batch_size
    ]
    # Before ``seconds``, which includes its time.
    sustained = search.sustained(chosen[0]) if chosen else None
    rows = probe.rows
    evidence = ProbeEvidence(
        feasible_max=feasible_max,
        infeasible_min=found.infeasible_min,
        not_traced=search.not_traced,
        # The higher of two trials of a size.
        feasible_peak_bytes=max(
            one.peak_bytes or 0
            for one in search.tried
            if one.micro_batch_size == feasible_max
        ),
        predicted_peak_bytes=predict_bytes(search.tried, feasible_max, prediction),
        traced_peak_bytes=(
            None if prediction is None else round(prediction.peak_bytes(feasible_max))
        ),
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
        mean_tokens_per_sequence=(
            probe.config.seq_length_tokens
            if rows is None
            else rows.mean_non_padding_tokens
        ),
        curve=curve,
        knee_micro_batch_sizes=list(knee_interval(curve) or ()),
        choice=choice.reason,
    )
    return (
        probe.config.model_copy(update={"micro_batch_size": choice.micro_batch_size}),
        evidence,
    )


def step_config(
    probe: Probe, rows: int, *, micro_batches: int | None = None
) -> TrainConfig:
    """Return the trainer's settings of a trial with ``rows`` sequences per micro-batch."""
    global_batch_size = (
        rows * probe.local_ranks * (micro_batches or probe.micro_batches)
    )
    return probe.config.model_copy(
        update={"micro_batch_size": rows, "global_batch_size": global_batch_size}
    )


def step_trial(
    probe: Probe,
    rows: int,
    steps: tuple[int, int],
    budget_bytes: int | None,
    *,
    attempt: int = 0,
    micro_batches: int | None = None,
) -> Trial:
    """Return a trial of the trainer's step, without a limit if there is no budget.

    Each attempt is another trial.
    """
    asked = StepRequest(
        config=step_config(probe, rows, micro_batches=micro_batches),
        vocab_size=probe.manifest.vocab_size,
        special_ids=probe.manifest.special_ids,
        memory_budget_bytes=budget_bytes,
        warmup_steps=steps[0],
        timed_steps=steps[1],
        local_ranks=probe.local_ranks,
        documents_per_sequence=probe.documents_per_sequence,
        attempt=attempt,
    )
    used, timeout_s = probe.device_used_before_bytes, probe.request.trial_timeout_s
    return asked.trial(
        timeout_s=timeout_s, device_used_before_bytes=used, first_attempt=not attempt
    )
