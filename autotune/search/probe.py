"""Probe one model: the largest micro-batch under the budget, proven on both sides, then the throughput curve."""

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.allocations import is_activations
from autotune.core.evidence import CurvePoint
from autotune.core.outcome import Contaminated, Crashed, Measured, Outcome, OutOfMemory, describe
from autotune.core.trial import StepFigures, Trial
from autotune.core.units import format_bytes
from autotune.decide.choose import (
    MicroBatchChoice,
    choose_micro_batch,
    choose_untimed,
    curve_rows,
    rows_with_headroom,
)
from autotune.decide.memory import ledger
from autotune.decide.search import MAX_FAILURES, Prediction, Tried, bracket, next_rows, predict_bytes
from autotune.decide.sharding import fewest_that_share
from autotune.decide.statistics import of_windows
from autotune.decide.surroundings import Expected
from autotune.errors import AutotuneError, DoesNotFit, OutOfTime, Undecided
from autotune.search.estimate import (
    CannotTrace,
    EstimateRequest,
    MemoryEstimate,
    Room,
    estimate_model,
    predicted_bytes,
    predicted_rows,
)
from autotune.search.trials import TrialRunner
from trainer.config import Attention, Checkpointing, Head, Layout, ModelSettings, Precision, Strategy, TrainConfig
from trainer.dataset import Manifest

FIT_STEPS = (1, 1)
"""Warm-up and timed steps of a trial that asks whether a size fits: two optimizer steps after the rehearsal that begins
a training, and an evaluation after each. The last one finds the allocator as an evaluation leaves it."""
CURVE_STEPS = {"cpu": (1, 4), "cuda": (3, 10)}
"""The same of a point of the throughput curve."""
SUSTAINED_S = {"cpu": 0.0, "cuda": 60.0}
"""How long the chosen micro-batch runs before its tokens/s are promised: a GPU is slower once it is warm and at
its power limit."""
_MOST_CHOICES = 3
"""Sizes between those of the curve that are measured before one of them must be taken."""
CLOSE_BYTES = 2**20
"""A largest size that leaves less than this free is tried a second time: processes differ by a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe; ``max_rows`` is at least one granule."""

    settings: ModelSettings
    manifest: Manifest
    seq_length_tokens: int
    layout: Layout
    attention_dropout: float | None
    """Instead of the model's own."""
    precision: Precision
    device: str
    memory_budget_bytes: int
    headroom_share: float
    max_rows: int
    trial_timeout_s: float
    device_used_before_bytes: int | list[int] | None
    """What each GPU held before this program, by NVML; None on a CPU."""
    checkpointing: Checkpointing = "none"
    attention: Attention = "auto"
    head: Head = "masked"
    compile_layers: bool = False
    strategy: Strategy = "ddp"
    local_ranks: int = 1
    micro_batches: int = 1
    global_batch_rows: int = 256
    """Sequences of an optimizer step over all ranks, which the chosen micro-batch splits."""
    """Of an optimizer step, on each rank; two stand for any number above."""
    documents_per_row: float = 1.0
    granularity_rows: int = 1
    """Only multiples of it are tried."""
    expected: Expected | None = None
    """What lies around a traced step on this device; None: nothing is traced, and trials alone show the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What fits, and how fast it is."""

    feasible_max: int
    infeasible_min: int | None
    feasible_peak_bytes: int
    predicted_peak_bytes: int | None
    """Of ``feasible_max``, from the trace and from trials of smaller sizes."""
    traced_peak_bytes: int | None
    """The same before any trial; None where the model was not traced."""
    traced_terms_bytes: dict[str, int]
    traced_rows: int | None
    """The largest micro-batch that was predicted before any trial."""
    parameters: int | None
    """Of the model; None where it was not traced."""
    not_traced: str | None
    """Why the model was not traced."""
    search_trials: int
    curve: tuple[CurvePoint, ...]
    choice: MicroBatchChoice
    sustained: CurvePoint | None
    """The chosen micro-batch for ``SUSTAINED_S``."""


@dataclass(slots=True, kw_only=True)
class Search:
    """A probe under way. Sizes are counted in granules."""

    request: ProbeRequest
    runner: TrialRunner
    tried: list[Tried] = field(default_factory=list)
    estimate: MemoryEstimate | None = None
    not_traced: str | None = None
    prediction: Prediction | None = None
    traced_bytes: Callable[[int], float] | None = None
    """The predicted peak by rows, before any trial."""

    def predict(self) -> None:
        """Trace the model; where that cannot be done, trials alone show the way."""
        request, expected = self.request, self.request.expected
        if expected is None:
            return
        if self.estimate is None:
            self.runner.on_trial(f"{request.settings.name}: tracing, to predict its memory", None)
            try:
                self.estimate = estimate_model(trace_request(request), self.runner.machine, room_of(request))
            except CannotTrace as error:
                self.not_traced = error.message
                return
        by_rows = self.traced_bytes = predicted_bytes(self.estimate, expected.usual)
        self.prediction = Prediction(
            peak_bytes=lambda granules: by_rows(granules * request.granularity_rows),
            unsure_bytes=(expected.most.outside_bytes - expected.least.outside_bytes) / 4,
        )

    def predicted_rows(self) -> int | None:
        """The largest micro-batch that the trace alone predicts; None without one."""
        request = self.request
        if self.estimate is None or request.expected is None:
            return None
        rows = predicted_rows(
            self.estimate, request.memory_budget_bytes, request.expected.usual, max_rows=request.max_rows
        )
        return rows // request.granularity_rows * request.granularity_rows

    def find(self) -> None:
        """Try sizes until the largest is proven on both sides."""
        request, budget = self.request, self.request.memory_budget_bytes
        most = request.max_rows // request.granularity_rows
        while True:
            size = next_rows(self.tried, budget, most, self.prediction)
            if size is None:
                found = bracket(self.tried).feasible_max
                if not found or not self._is_close(found):
                    return
                size = found
            self._try(size)

    def _known_so_far(self) -> str:
        found, granule = bracket(self.tried), self.request.granularity_rows
        fit = f"{found.feasible_max * granule} rows fit" if found.feasible_max else "no size is known to fit"
        return fit if found.infeasible_min is None else f"{fit}, {found.infeasible_min * granule} do not"

    def _is_close(self, size: int) -> bool:
        """Whether the largest size is so near the budget that one trial does not prove it."""
        peaks = [one.peak_bytes for one in self.tried if one.rows == size and one.fits and one.peak_bytes is not None]
        return len(peaks) == 1 and self.request.memory_budget_bytes - peaks[0] < CLOSE_BYTES

    def _try(self, size: int) -> None:
        request = self.request
        rows = size * request.granularity_rows
        again = sum(one.rows == size for one in self.tried)
        label = f"{rows} rows" + (f", try {again + 1}" if again else "")
        trial = step_trial(request, rows, FIT_STEPS, request.memory_budget_bytes, attempt=again)
        try:
            outcome = self.runner.run(trial, f"{request.settings.name}: {label}")
        except OutOfTime as error:
            raise OutOfTime(f"{self._known_so_far()}; {error.message}", next_step=error.next_step) from error
        failed = sum(one.rows == size and one.fits is None for one in self.tried)
        if isinstance(outcome, Measured):
            self.tried.append(Tried(rows=size, fits=True, peak_bytes=StepFigures.of(outcome).peak_bytes))
        elif isinstance(outcome, OutOfMemory):
            self.tried.append(Tried(rows=size, fits=False))
        elif isinstance(outcome, Crashed | Contaminated) and failed < MAX_FAILURES - 1:
            self.tried.append(Tried(rows=size, fits=None))
        else:
            raise _undecided(outcome, label, self.runner)


def room_of(request: ProbeRequest) -> Room | None:
    """Return the memory that the largest micro-batch fills; None if nothing is known of the device."""
    if request.expected is None:
        return None
    return Room(
        budget_bytes=request.memory_budget_bytes,
        surroundings=request.expected.usual,
        max_rows=request.max_rows,
    )


def trace_request(request: ProbeRequest) -> EstimateRequest:
    """What is to be traced before a probe."""
    return EstimateRequest(
        config=step_config(request, 1),
        vocab_size=request.manifest.vocab_size,
        special_ids=request.manifest.special_ids,
        documents_per_row=request.documents_per_row,
        micro_batches=request.micro_batches,
        ranks=request.local_ranks,
    )


def probe_model(request: ProbeRequest, runner: TrialRunner, traced: MemoryEstimate | None = None) -> ProbeResult:
    """Predict, find the largest micro-batch, verify and refute it in fresh processes, and measure the throughput curve.

    Args:
        request: What to probe.
        runner: Runs trials, or knows them.
        traced: What tracing ``trace_request`` gave, if somebody did.

    Raises:
        DoesNotFit: If not even the smallest size fits; says what it needs, the largest term, and what would help.
        Undecided: If trials failed in a way that says nothing about memory.
    """
    search = Search(request=request, runner=runner, estimate=traced)
    search.predict()
    search.find()
    found = bracket(search.tried)
    if not found.feasible_max:
        raise _does_not_fit(search)
    granule = request.granularity_rows
    feasible_max = found.feasible_max * granule
    # The second reading of a size that was tried twice says no less than the first.
    peak_bytes = max(trial.peak_bytes or 0 for trial in search.tried if trial.rows == found.feasible_max)
    limit = max(1, rows_with_headroom(feasible_max, request.headroom_share) // granule)
    curve = [] if runner.pretended else _curve(request, runner, [size * granule for size in curve_rows(limit)])
    choice = _choose(request, runner, curve, feasible_max) if curve else choose_untimed(limit * granule)
    estimate, expected = search.estimate, request.expected
    return ProbeResult(
        feasible_max=feasible_max,
        infeasible_min=None if found.infeasible_min is None else found.infeasible_min * granule,
        feasible_peak_bytes=peak_bytes,
        predicted_peak_bytes=predict_bytes(search.tried, found.feasible_max, search.prediction),
        traced_peak_bytes=None if search.traced_bytes is None else round(search.traced_bytes(feasible_max)),
        traced_terms_bytes={}
        if estimate is None or expected is None
        else dict(ledger(estimate.law, feasible_max, expected.usual).terms_bytes),
        traced_rows=search.predicted_rows(),
        parameters=None if estimate is None else estimate.parameters,
        not_traced=search.not_traced,
        search_trials=len(search.tried),
        curve=tuple(curve),
        choice=choice,
        sustained=next((_sustained(request, runner, point) for point in curve if point.rows == choice.rows), None),
    )


def _curve(request: ProbeRequest, runner: TrialRunner, sizes: list[int]) -> list[CurvePoint]:
    """Measure throughput from the largest size down, as far as time allows; at least the largest."""
    *smaller, largest = sizes
    points = [_point(request, runner, largest)]
    with contextlib.suppress(OutOfTime):
        for rows in reversed(smaller):
            points.insert(0, _point(request, runner, rows))
    return points


def _choose(request: ProbeRequest, runner: TrialRunner, curve: list[CurvePoint], feasible_max: int) -> MicroBatchChoice:
    """Choose how the global batch is split; a chosen size that was not measured becomes a point of the curve."""
    granule, limit = request.granularity_rows, curve[-1].rows
    sizes = range(granule, limit + 1, granule)
    for _ in range(_MOST_CHOICES):
        rows, ranks = request.global_batch_rows, request.local_ranks
        choice = choose_micro_batch(curve, feasible_max, global_rows=rows, ranks=ranks, sizes=sizes)
        if any(point.rows == choice.rows for point in curve):
            return choice
        try:
            curve.append(_point(request, runner, choice.rows))
        except OutOfTime:
            break
        curve.sort(key=lambda point: point.rows)
    return choose_micro_batch(curve, feasible_max, global_rows=rows, ranks=ranks)


def step_config(request: ProbeRequest, rows: int) -> TrainConfig:
    """The trainer's settings of a trial of so many rows."""
    return TrainConfig.model_validate(
        {
            "model": request.settings,
            "seq_length_tokens": request.seq_length_tokens,
            "layout": request.layout,
            "attention_dropout": request.attention_dropout,
            "checkpointing": request.checkpointing,
            "attention": request.attention,
            "head": request.head,
            "compile_layers": request.compile_layers,
            "parallel": {"strategy": request.strategy},
            "micro_batch_rows": rows,
            "global_batch_rows": rows * request.local_ranks * request.micro_batches,
            "precision": request.precision,
            "device": request.device,
        }
    )


def step_trial(
    request: ProbeRequest, rows: int, steps: tuple[int, int], budget_bytes: int | None, *, attempt: int = 0
) -> Trial:
    """A trial of the trainer's own step; without a budget nothing is limited. Each attempt is a trial of its own."""
    measured: dict[str, Any] = {
        "config": step_config(request, rows).model_dump(mode="json"),
        "vocab_size": request.manifest.vocab_size,
        "special_ids": request.manifest.special_ids.model_dump(),
        "memory_budget_bytes": budget_bytes,
        "warmup_steps": steps[0],
        "timed_steps": steps[1],
        "local_ranks": request.local_ranks,
        "documents_per_row": request.documents_per_row,
    }
    if attempt:
        measured["attempt"] = attempt
    place = {"device_used_before_bytes": request.device_used_before_bytes, "first_attempt": not attempt}
    return Trial(job="step", measured=measured, place=place, timeout_s=request.trial_timeout_s)


def _sustained(request: ProbeRequest, runner: TrialRunner, chosen: CurvePoint) -> CurvePoint | None:
    """Run the chosen micro-batch until the GPU is as warm as in training; None on a CPU, or if time is over."""
    seconds = min(SUSTAINED_S[request.device], request.trial_timeout_s / 4)
    if seconds == 0:
        return None
    warm_up, _ = CURVE_STEPS[request.device]
    steps = max(1, math.ceil(1.1 * seconds / chosen.step_s))  # a little more, as steps differ
    with contextlib.suppress(OutOfTime):
        return _point(request, runner, chosen.rows, (warm_up, steps), f", speed for {seconds:g} s")
    return None


def _point(
    request: ProbeRequest,
    runner: TrialRunner,
    rows: int,
    steps: tuple[int, int] | None = None,
    what: str = ", speed",
) -> CurvePoint:
    request = replace(request, micro_batches=1)  # accumulation repeats what is measured here
    # The allocator settings that make a CPU's limit exact also slow it down, so speed is measured without; the size is
    # known to fit.
    budget_bytes = request.memory_budget_bytes if request.device == "cuda" else None
    label = f"{rows} rows{what}"
    for attempt in range(MAX_FAILURES):
        trial = step_trial(request, rows, steps or CURVE_STEPS[request.device], budget_bytes, attempt=attempt)
        named = f"{request.settings.name}: {label}" + (f", try {attempt + 1}" if attempt else "")
        outcome = runner.run(trial, named, timed=True)
        if not isinstance(outcome, Crashed | Contaminated):
            break
    if isinstance(outcome, OutOfMemory):
        raise Undecided(
            f"{rows} rows fitted at first, and were refused when their speed was measured: {outcome.detail}",
            next_step="Leave more memory free: --headroom 0.1",
        )
    if not isinstance(outcome, Measured):
        raise _undecided(outcome, label, runner)
    figures = StepFigures.of(outcome)
    step_s = statistics.median(figures.step_s)
    rates = [figures.slot_tokens_per_step / seconds for seconds in figures.step_s]
    spread = of_windows(rates).interval()
    return CurvePoint(
        rows=rows,
        slot_tokens_per_s=figures.slot_tokens_per_step / step_s,
        step_s=step_s,
        timed_steps=len(figures.step_s),
        slot_tokens_per_s_low=spread.low,
        slot_tokens_per_s_high=spread.high,
    )


def _undecided(outcome: Outcome, label: str, runner: TrialRunner) -> Undecided:
    detail = "" if isinstance(outcome, Measured) else outcome.detail
    return Undecided(
        f"the trial of {label} says nothing: {describe(outcome)}\n{detail}".rstrip(),
        next_step=f"Mend that and run the same command: it resumes from {runner.ledger.directory}.",
    )


def _does_not_fit(search: Search) -> AutotuneError:
    request = search.request
    rows = request.granularity_rows
    budget = format_bytes(request.memory_budget_bytes)
    trial = step_trial(request, rows, FIT_STEPS, None)
    outcome = search.runner.run(trial, f"{request.settings.name}: {rows} rows without a limit")
    name, tokens = request.settings.name, request.seq_length_tokens
    need = f"; it needs {format_bytes(StepFigures.of(outcome).peak_bytes)}" if isinstance(outcome, Measured) else ""
    helps = ["raise --memory", "shorten --seq-length", "choose a smaller --model"]
    if search.estimate is not None and request.expected is not None:
        terms = ledger(search.estimate.law, rows, request.expected.usual).terms_bytes
        term, size = max(terms.items(), key=lambda item: item[1])
        need += f", of which {term} {format_bytes(size)} (predicted)"
        if is_activations(term) and request.checkpointing != "full":
            helps.insert(0, "keep fewer activations with --checkpointing full")
        largest = int(search.estimate.law.largest_parameter_bytes)
        whole = request.strategy == "ddp" or request.local_ranks == 1  # else the terms are a share already
        shared = fewest_that_share(terms, request.memory_budget_bytes, largest_layer_bytes=largest) if whole else None
        helps += [] if shared is None else [f"share the state by {shared.words}"]
    what = "not even one row" if rows == 1 else f"not even {rows} rows"
    return DoesNotFit(
        f"{what} of {tokens} tokens of {name} fits {budget}{need}",
        next_step=f"{', '.join(helps[:-1]).capitalize()}, or {helps[-1]}.",
    )
