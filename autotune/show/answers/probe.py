"""What ``autotune probe --json`` answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.core.evidence import CurvePoint
from autotune.core.outcome import Measured
from autotune.core.trial import FinishedTrial, StepFigures
from autotune.show.probe import ProbedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrial:
    """One trial."""

    rows: int
    """Of the micro-batch."""
    label: str
    """What it was for."""
    outcome: str
    """``measured``, or the kind of failure."""
    seconds: float
    from_ledger: bool
    """Whether it was measured by an earlier command."""
    optimizer_steps: int | None
    """Null where it failed."""
    peak_bytes: int | None
    """Null where it failed."""
    detail: str | None
    """Of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswerModel:
    """The largest micro-batch of one model, and the one to use."""

    model: str
    profile: str
    """The file that was written."""
    feasible_max: int
    """The largest micro-batch, in rows, that ran optimizer steps under the budget."""
    infeasible_min: int | None
    """The smallest that was refused; null when the search met its own upper limit first."""
    micro_batch_rows: int
    """The one to use."""
    global_batch_rows: int
    memory_budget_bytes: int
    """Of each rank."""
    bytes_known: Literal["measured", "allocator"]
    """How the peaks of trials came about: ``allocator`` on a pretended GPU, where only torch's allocator is real."""
    feasible_peak_bytes: int
    predicted_peak_bytes: int | None
    traced_peak_bytes: int | None
    """Before any trial; null where the model was not traced."""
    traced_rows: int | None
    traced_terms_bytes: Mapping[str, int]
    not_traced: str | None
    """Why there is no trace."""
    parameters: int | None
    local_ranks: int
    knee_rows: list[int]
    """Between which two sizes the knee of the curve lies."""
    curve: list[CurvePoint]
    choice: str
    search_trials: int
    seconds: float
    trials: tuple[ProbeTrial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Every model that was probed."""

    models: tuple[ProbeAnswerModel, ...]


def probe_answer(probed: Sequence[ProbedModel]) -> ProbeAnswer:
    """Every model, with all its trials."""
    return ProbeAnswer(models=tuple(_model(one) for one in probed))


def _model(one: ProbedModel) -> ProbeAnswerModel:
    evidence, train = one.evidence, one.profile.train
    return ProbeAnswerModel(
        model=train.model.name,
        profile=str(one.path),
        feasible_max=evidence.feasible_max,
        infeasible_min=evidence.infeasible_min,
        micro_batch_rows=train.micro_batch_rows,
        global_batch_rows=train.global_batch_rows,
        memory_budget_bytes=one.profile.constraints.memory_budget_bytes,
        bytes_known=one.profile.fingerprint.bytes_known,
        feasible_peak_bytes=evidence.feasible_peak_bytes,
        predicted_peak_bytes=evidence.predicted_peak_bytes,
        traced_peak_bytes=evidence.traced_peak_bytes,
        traced_rows=evidence.traced_rows,
        traced_terms_bytes=evidence.traced_terms_bytes,
        not_traced=evidence.not_traced,
        parameters=evidence.parameters,
        local_ranks=evidence.local_ranks,
        knee_rows=evidence.knee_rows,
        curve=evidence.curve,
        choice=evidence.choice,
        search_trials=evidence.search_trials,
        seconds=evidence.seconds,
        trials=tuple(probe_trial(done) for done in one.trials),
    )


def probe_trial(done: FinishedTrial) -> ProbeTrial:
    """One trial."""
    outcome = done.outcome
    figures = StepFigures.of(outcome) if isinstance(outcome, Measured) else None
    return ProbeTrial(
        rows=done.trial.measured["config"]["micro_batch_rows"],
        label=done.label,
        outcome=outcome.kind,
        seconds=round(done.seconds, 3),
        from_ledger=done.from_ledger,
        optimizer_steps=None if figures is None else figures.optimizer_steps,
        peak_bytes=None if figures is None else figures.peak_bytes,
        detail=None if isinstance(outcome, Measured) else outcome.detail,
    )
