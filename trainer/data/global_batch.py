"""Size of the global batch in sequences, from the configuration and the dataset.

No torch here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan, lay_out
from trainer.data.dataset import TokenDataset

_LOOKED_AT_SAMPLES = 16_384
"""Samples, in whole blocks of every lane, from which the mean content of a sequence is
estimated."""
_ROWS_TOGETHER, _SIGMAS = 32, 6.0
_SAME_IN_PLAN = (
    "seed",
    "seq_length_tokens",
    "layout",
    "global_batch_size",
    "max_epochs",
)


def with_batch_in_sequences(config: TrainConfig, dataset: TokenDataset) -> TrainConfig:
    """Return the configuration with its global batch in sequences, by means estimated from a part of the dataset."""
    if config.global_batch_tokens is None and config.global_batch_samples is None:
        return config
    mean = sequence_statistics(config, dataset)
    asked = (config.global_batch_tokens or 0) / mean.mean_non_padding_tokens
    asked = asked or (config.global_batch_samples or 0) / mean.mean_samples
    return config.model_copy(update={"global_batch_size": max(1, round(asked))})


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStatistics:
    """Content of a dataset's sequences."""

    mean_non_padding_tokens: float
    mean_samples: float
    max_documents: float
    """Samples per sequence in the fullest micro-batches of 32 sequences: six standard
    deviations above the mean."""


def sequence_statistics(
    config: TrainConfig, dataset: TokenDataset
) -> SequenceStatistics:
    """Return statistics of sequences, from a part of the dataset."""
    plan = make_plan(config, len(dataset), world_size=1)
    samples_by_row: list[np.ndarray] = []
    tokens = looked_at = 0
    blocks = (
        (lane, block)
        for block in range(plan.blocks_per_epoch)
        for lane in range(plan.lanes)
    )
    for lane, block in blocks:
        part = lay_out(plan, lane, block, dataset)
        samples_by_row.append(np.bincount(part.rows))
        tokens += int(np.sum(part.tokens)) + SPECIAL_TOKENS_PER_SAMPLE * len(part)
        looked_at += len(part)
        if looked_at >= _LOOKED_AT_SAMPLES:
            break
    counts = np.concatenate(samples_by_row) if looked_at else np.zeros(1)
    mean = float(counts.mean())
    most = max(1.0, mean + _SIGMAS * float(counts.std()) / _ROWS_TOGETHER**0.5)
    return SequenceStatistics(
        mean_non_padding_tokens=tokens / len(counts),
        mean_samples=mean,
        max_documents=most,
    )


def make_plan(config: TrainConfig, samples: int, world_size: int) -> BatchPlan:
    """Return the plan that splits the global batch into micro-batches of ranks."""
    same: dict[str, Any] = {name: getattr(config, name) for name in _SAME_IN_PLAN}
    steps = gradient_accumulation_steps(config, world_size)
    return BatchPlan(
        dataset_samples=samples,
        gradient_accumulation_steps=steps,
        world_size=world_size,
        **same,
    )
