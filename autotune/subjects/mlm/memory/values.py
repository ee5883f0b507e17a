"""Answers of ``autotune estimate``, and the memory of a training plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.evidence.plan import PlanFigure
from autotune.memory.values import MemoryBreakdown, MemoryParts, Share
from autotune.speed.values import SpeedPrediction, StepWork
from trainer.formats.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a model, for a training plan."""

    parameters: PlanFigure
    """Number of parameters of the model."""
    state: MemoryParts
    """All memory of a rank alone, with ``micro_batch_size``, by part."""
    largest_bytes: int
    """Size of the largest layer, or other unit, that FSDP gathers at once."""
    micro_batch_size: int
    """Micro-batch size of a rank to which the figures apply."""
    max_micro_batch_size: int
    """Largest micro-batch that fits a rank alone with the headroom left; 0 if none
    does."""
    source: str
    """Source of the memory, in words."""
    work: StepWork | None = None
    """Kernels of a step; None if the memory is that of an earlier probe."""
    shares: tuple[Share, ...] = ()
    """Memory of one GPU under every way of sharing the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedModel:
    """Prediction for one model and one memory budget."""

    model: str
    """Name of the model."""
    config: TrainConfig
    """Settings of the step; batch sizes are ignored."""
    parameters: int
    """Number of parameters."""
    attention: str
    """Attention kernel of the traced step."""
    attention_reason: str
    """Reason for that kernel, in words."""
    budget_bytes: int
    """Memory that a step may use."""
    micro_batch_size: int
    """Largest micro-batch that is predicted to fit."""
    micro_batch_size_low: int
    """Largest micro-batch if all assumed overheads are at their most."""
    micro_batch_size_high: int
    """Largest micro-batch if all assumed overheads are at their least."""
    limited: bool
    """True if more may fit, but larger sizes were not tried."""
    breakdown: MemoryBreakdown
    """Memory at ``micro_batch_size``, by term."""
    bytes_per_sequence: float
    """Growth of the peak memory with each further sequence."""
    non_padding_tokens: float | None
    """Mean non-padding tokens of the largest micro-batch; None without a dataset."""
    samples: float | None
    """Mean samples in the largest micro-batch; None without a dataset."""
    traces: int
    """Number of micro-batch sizes that were traced."""
    torch: str
    """Version of torch whose step was traced; others may keep more or less."""
    speed: SpeedPrediction | None
    """Predicted speed at ``micro_batch_size``; None if the machine's constants are not
    known."""
    shares: tuple[Share, ...]
    """Memory of one GPU under each way of sharing the model; empty for one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Settings of a model, with the largest micro-batch that is predicted for them."""

    model: str
    """Name of the model."""
    precision: str
    attention: str
    """Attention setting; ``row`` for the own attention of an encoder that this project
    does not know."""
    activation_checkpointing: str
    mlm_head: str
    layout: str
    micro_batch_size: int | None
    """Largest micro-batch; 0 if not even one sequence fits, None if unknown."""
    non_padding_tokens: float | None
    """Mean non-padding tokens of the largest micro-batch; None without a dataset."""
    note: str
    """Reason for an unknown size; ``or more`` if larger sizes were not tried; otherwise
    empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions for one GPU, without any measurement."""

    target: str
    """GPU, or amount of memory, of the prediction."""
    reserve_bytes: int
    """GPU memory that is left out of the budget."""
    models: tuple[PredictedModel, ...]
    """Models with a prediction, in the order of the request."""
    rejected: Mapping[str, Mapping[str, Any]]
    """Errors of models that do not fit or cannot be predicted, by name: ``exit_code``,
    ``message`` and ``next_step``."""
    what_if: tuple[Alternative, ...]
    """Alternative settings of the models; empty if they were not requested."""
