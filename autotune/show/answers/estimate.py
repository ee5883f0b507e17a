"""What ``autotune estimate --json`` answers; all of it is predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.show.estimate import Answer, Predicted, WhatIf
from autotune.show.estimated import EstimatedProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedModel:
    """What is predicted of one model on one card."""

    model: str
    parameters: int
    attention: str
    attention_reason: str
    budget_bytes: int
    """Of one rank."""
    rows: int
    """The largest micro-batch."""
    rows_low: int
    """With everything that is assumed at its most."""
    rows_high: int
    limited_by_max_rows: bool
    """Whether more may fit, and none was looked for."""
    slot_tokens: int
    """Of a micro-batch, padding included."""
    real_tokens: float | None
    """Null where no dataset was named."""
    samples: float | None
    peak_bytes: int
    bytes_per_row: float
    """Of one more row."""
    ledger_bytes: Mapping[str, int]
    """Where the memory goes."""
    traces: int
    sharded_bytes: Mapping[str, int]
    """Of a rank, by way of sharing the model."""
    profile: str | None
    """The file that was written, in which nothing is measured; null without ``--out``."""
    micro_batch_rows: int | None
    """The one to use until it is measured; null without ``--out``."""
    global_batch_rows: int | None
    """Null without ``--out``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedModel:
    """A model that does not fit or cannot be predicted."""

    model: str
    exit_code: int
    message: str
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """All that was predicted for one card."""

    target: str
    """The card."""
    measured: Literal[False] = False
    models: tuple[EstimatedModel, ...]
    refused: tuple[RefusedModel, ...]
    what_if: tuple[WhatIf, ...]
    """Empty without ``--what-if``."""


def estimate_answer(answer: Answer, written: Sequence[EstimatedProfile] = ()) -> EstimateAnswer:
    """Every model, whether it fits or not, with the profile that was written of it."""
    by_name = {one.profile.train.model.name: one for one in written}
    return EstimateAnswer(
        target=answer.target,
        models=tuple(_model(one, by_name.get(one.config.model.name)) for one in answer.predicted),
        refused=tuple(
            RefusedModel(model=name, exit_code=error.exit_code, message=error.message, next_step=error.next_step)
            for name, error in answer.refused
        ),
        what_if=answer.what_ifs,
    )


def _model(one: Predicted, written: EstimatedProfile | None) -> EstimatedModel:
    train = None if written is None else written.profile.train
    return EstimatedModel(
        model=one.config.model.name,
        parameters=one.parameters,
        attention=one.attention,
        attention_reason=one.attention_reason,
        budget_bytes=one.budget_bytes,
        rows=one.rows,
        rows_low=one.rows_low,
        rows_high=one.rows_high,
        limited_by_max_rows=one.limited,
        slot_tokens=one.rows * one.config.seq_length_tokens,
        real_tokens=one.real_tokens,
        samples=one.samples,
        peak_bytes=one.ledger.peak_bytes,
        bytes_per_row=one.per_row_bytes,
        ledger_bytes=dict(one.ledger.terms_bytes),
        traces=one.traces,
        sharded_bytes={name: shard.total_bytes for name, shard in one.sharded},
        profile=None if written is None else str(written.path),
        micro_batch_rows=None if train is None else train.micro_batch_rows,
        global_batch_rows=None if train is None else train.global_batch_rows,
    )
