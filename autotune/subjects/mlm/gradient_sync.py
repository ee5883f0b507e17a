"""Gradient synchronisation of the bundled trainer: its trial, and the global batch."""

import contextlib
from pathlib import Path
from typing import ClassVar

from autotune.trials.values import JobName, TrialRequest
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.formats.manifest import read_manifest
from trainer.formats.train_config import TrainConfig


class GradientSyncRequest(TrialRequest):
    """Request to train all ranks on cached batches of the dataset."""

    job: ClassVar[JobName] = "gradient_sync"

    config: TrainConfig
    """Trainer settings, with the gradient synchronisation to try."""
    steps: int
    synchronise: bool
    """True if gradients are synchronised; False skips only that (DDP and ZeRO-1)."""
    round: int
    nodes: int
    ranks_per_node: int


def with_global_batch(config: TrainConfig, data: Path) -> TrainConfig:
    """Return settings with the global batch in sequences, for a dataset."""
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        return with_batch_in_sequences(config, dataset)


def tokens_of_epoch(data: Path) -> int:
    """Return the tokens of a dataset, special ones included."""
    train = read_manifest(data).train
    tokens = sum(shard.tokens for shard in train.shards)
    return tokens + SPECIAL_TOKENS_PER_SAMPLE * train.samples
