"""What is predicted for a GPU that is not here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.memory.decide.memory_model import MemoryBreakdown
from autotune.memory.values import Share
from trainer.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedModel:
    """Prediction for one model on one GPU, or in an amount of memory."""

    model: str
    config: TrainConfig
    """Settings of the step; batches do not count."""
    parameters: int
    attention: str
    """The kernel that the trace took."""
    attention_reason: str
    budget_bytes: int
    micro_batch_size: int
    """The largest micro-batch that should fit."""
    micro_batch_size_low: int
    """The same with everything that is assumed at its most."""
    micro_batch_size_high: int
    """The same with everything that is assumed at its least."""
    limited: bool
    """Whether more may fit, and none was looked for."""
    breakdown: MemoryBreakdown
    bytes_per_sequence: float
    non_padding_tokens: float | None
    samples: float | None
    traces: int
    shares: tuple[Share, ...]
    """Memory of one of several GPUs that share the model; empty with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions for one GPU; nothing of it was measured."""

    target: str
    """The GPU, or the amount of memory."""
    reserve_bytes: int
    """Of the GPU's memory, left out of the budget."""
    models: tuple[PredictedModel, ...]
    refused: Mapping[str, Mapping[str, Any]]
    """Models that do not fit or cannot be predicted, each with its ``exit_code``, ``message`` and ``next_step``."""
    what_if: tuple[Mapping[str, Any], ...]
    """Alternatives, each with its settings, ``rows`` that fit, their ``non_padding_tokens`` and a ``note``; ``rows`` is
    null if the note says why there is no answer."""
