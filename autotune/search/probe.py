"""Probe one model: the largest micro-batch under the budget, proven on both sides, then the throughput curve."""

import statistics
from dataclasses import dataclass
from typing import Any

from autotune.core.outcome import Measured, Outcome, OutOfMemory, describe
from autotune.core.profile import CurvePoint
from autotune.core.trial import StepFigures, Trial
from autotune.core.units import format_bytes
from autotune.decide.choose import curve_rows, rows_with_headroom
from autotune.decide.search import Tried, bracket, next_rows, predict_bytes
from autotune.errors import DoesNotFit, Undecided
from autotune.search.trials import TrialRunner
from trainer.config import Layout, ModelSettings, Precision, TrainConfig
from trainer.dataset import Manifest

BRACKET_STEPS = (1, 1)
"""Warm-up and timed steps of a trial that asks whether a size fits: the optimizer's state exists from the second on."""
VERIFY_STEPS = (1, 4)
CURVE_STEPS = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to probe."""

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
    device_used_before_bytes: int | None
    """What the GPU held before this program, by NVML; None on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What fits, and how fast it is."""

    feasible_max: int
    infeasible_min: int | None
    feasible_peak_bytes: int
    predicted_peak_bytes: int | None
    search_trials: int
    curve: tuple[CurvePoint, ...]


def probe_model(request: ProbeRequest, runner: TrialRunner) -> ProbeResult:
    """Find the largest micro-batch, verify it in a fresh process with more steps, and measure the throughput curve.

    Raises:
        DoesNotFit: If not even one row fits; says what one row needs where that can be measured.
        Undecided: If a trial failed in a way that says nothing about memory.
    """
    tried: list[Tried] = []
    while (rows := next_rows(tried, request.memory_budget_bytes, request.max_rows)) is not None:
        tried.append(_try(request, runner, rows, BRACKET_STEPS, f"{rows} rows"))
        # A size that fitted once must fit for longer, in another process, before it is believed.
        if next_rows(tried, request.memory_budget_bytes, request.max_rows) is None and bracket(tried).feasible_max:
            best = bracket(tried).feasible_max
            tried.append(
                _try(request, runner, best, VERIFY_STEPS, f"{best} rows, verified over {sum(VERIFY_STEPS)} steps")
            )
    found = bracket(tried)
    if not found.feasible_max:
        raise _does_not_fit(request, runner)
    peak_bytes = max(trial.peak_bytes or 0 for trial in tried if trial.rows == found.feasible_max)
    curve = [
        _point(request, runner, rows)
        for rows in curve_rows(rows_with_headroom(found.feasible_max, request.headroom_share))
    ]
    return ProbeResult(
        feasible_max=found.feasible_max,
        infeasible_min=found.infeasible_min,
        feasible_peak_bytes=peak_bytes,
        predicted_peak_bytes=predict_bytes(tried, found.feasible_max),
        search_trials=len(tried),
        curve=tuple(curve),
    )


def step_trial(request: ProbeRequest, rows: int, steps: tuple[int, int], budget_bytes: int | None) -> Trial:
    """A trial of the trainer's own step; without a budget nothing is limited."""
    config = TrainConfig.model_validate(
        {
            "model": request.settings,
            "seq_length_tokens": request.seq_length_tokens,
            "layout": request.layout,
            "attention_dropout": request.attention_dropout,
            "micro_batch_rows": rows,
            "global_batch_rows": rows,
            "precision": request.precision,
            "device": request.device,
        }
    )
    measured: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "vocab_size": request.manifest.vocab_size,
        "special_ids": request.manifest.special_ids.model_dump(),
        "memory_budget_bytes": budget_bytes,
        "warmup_steps": steps[0],
        "timed_steps": steps[1],
    }
    place = {"device_used_before_bytes": request.device_used_before_bytes}
    return Trial(job="step", measured=measured, place=place, timeout_s=request.trial_timeout_s)


def _try(request: ProbeRequest, runner: TrialRunner, rows: int, steps: tuple[int, int], label: str) -> Tried:
    outcome = runner.run(
        step_trial(request, rows, steps, request.memory_budget_bytes), f"{request.settings.name}: {label}"
    )
    if isinstance(outcome, Measured):
        return Tried(rows=rows, fits=True, peak_bytes=StepFigures.of(outcome).peak_bytes)
    if isinstance(outcome, OutOfMemory):
        return Tried(rows=rows, fits=False)
    raise _undecided(outcome, label, runner)


def _point(request: ProbeRequest, runner: TrialRunner, rows: int) -> CurvePoint:
    # The allocator settings that make a CPU's limit exact also slow it down, so speed is measured without; the size is
    # known to fit.
    budget_bytes = request.memory_budget_bytes if request.device == "cuda" else None
    label = f"{rows} rows, speed"
    outcome = runner.run(step_trial(request, rows, CURVE_STEPS, budget_bytes), f"{request.settings.name}: {label}")
    if not isinstance(outcome, Measured):
        raise _undecided(outcome, label, runner)
    figures = StepFigures.of(outcome)
    step_s = statistics.median(figures.step_s)
    return CurvePoint(
        rows=rows,
        slot_tokens_per_s=figures.slot_tokens_per_step / step_s,
        step_s=step_s,
        timed_steps=len(figures.step_s),
    )


def _undecided(outcome: Outcome, label: str, runner: TrialRunner) -> Undecided:
    detail = "" if isinstance(outcome, Measured) else outcome.detail
    return Undecided(
        f"the trial of {label} {describe(outcome)}, which says nothing about memory:\n{detail}",
        next_step=f"Mend that and run the same command: it resumes from {runner.ledger.directory}.",
    )


def _does_not_fit(request: ProbeRequest, runner: TrialRunner) -> DoesNotFit:
    budget = format_bytes(request.memory_budget_bytes)
    trial = step_trial(request, 1, BRACKET_STEPS, None)
    outcome = runner.run(trial, f"{request.settings.name}: 1 row without a limit")
    name, tokens = request.settings.name, request.seq_length_tokens
    need = f"; it needs {format_bytes(StepFigures.of(outcome).peak_bytes)}" if isinstance(outcome, Measured) else ""
    return DoesNotFit(
        f"not even one row of {tokens} tokens of {name} fits {budget}{need}",
        next_step="Raise --memory, shorten --seq-length, or choose a smaller --model.",
    )
