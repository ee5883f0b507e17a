"""Statistics of a dataset's sequences, from a part of the dataset. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.data.array_types import Int64
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, lay_out, make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.segments import Segments
from trainer.formats.train_config import TrainConfig

_STATISTICS_SAMPLES = 16_384
"""Fewest samples from which statistics are computed, unless the dataset has fewer;
whole blocks are read."""
_MICRO_BATCH_SEQUENCES = 32
"""Sequences of the micro-batches to which ``max_mean_samples`` applies."""
_SIGMAS_ABOVE_MEAN = 6.0
"""Standard deviations by which ``max_mean_samples`` exceeds the mean: one micro-batch
in a billion is fuller, if their means are normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStatistics:
    """Content of a dataset's sequences."""

    mean_non_padding_tokens: float
    """Mean number of tokens per sequence, special tokens included."""
    mean_samples: float
    """Mean number of samples per sequence."""
    max_mean_samples: float
    """Mean number of samples per sequence that micro-batches of 32 sequences hardly
    ever exceed; at least 1."""


def sequence_statistics(
    config: TrainConfig, dataset: TokenDataset
) -> SequenceStatistics:
    """Return statistics of the sequences that a configuration makes of a dataset.

    They are those of its first blocks. Without samples, all are 0 but
    ``max_mean_samples``.
    """
    samples_per_sequence: list[Int64] = []
    tokens = 0
    samples = 0
    for segments in _first_blocks(config, dataset):
        samples_per_sequence.append(np.bincount(segments.sequences))
        tokens += int(np.sum(segments.tokens))
        tokens += SPECIAL_TOKENS_PER_SAMPLE * len(segments)
        samples += len(segments)
        if samples >= _STATISTICS_SAMPLES:
            break
    if not samples:
        samples_per_sequence = [np.zeros(1, dtype=np.int64)]
    counts = np.concatenate(samples_per_sequence)
    mean_samples = float(counts.mean())
    # The standard deviation of a mean over n sequences is 1 / sqrt(n) of that of a
    # single sequence.
    excess = _SIGMAS_ABOVE_MEAN * float(counts.std()) / _MICRO_BATCH_SEQUENCES**0.5
    return SequenceStatistics(
        mean_non_padding_tokens=tokens / len(counts),
        mean_samples=mean_samples,
        max_mean_samples=max(1.0, mean_samples + excess),
    )


def _first_blocks(config: TrainConfig, dataset: TokenDataset) -> Iterator[Segments]:
    """Yield the blocks of the first epoch: the first of every lane, and so on."""
    plan = make_plan(config, len(dataset), world_size=1)
    for block in range(plan.blocks_per_epoch):
        for lane in range(plan.lanes):
            yield lay_out(plan, lane, block, dataset)
