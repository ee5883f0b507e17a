"""Size of the global batch in sequences, from the configuration and the dataset.

No torch here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan, lay_out
from trainer.data.dataset import TokenDataset
from trainer.data.segments import Segments

_STATISTICS_SAMPLES = 16_384
"""Samples, in whole blocks of every lane, from which the mean content of a sequence is
estimated."""
_FULLEST_SEQUENCES = 32
"""Sequences in the micro-batch for which ``max_documents`` holds."""
_FULLEST_SIGMAS = 6.0
"""Standard deviations above the mean up to which a micro-batch is planned for."""


def with_batch_in_sequences(config: TrainConfig, dataset: TokenDataset) -> TrainConfig:
    """Return the configuration with its global batch in sequences.

    A batch in tokens or samples is divided by their mean number per sequence, estimated
    from a part of the dataset.
    """
    if config.global_batch_tokens is not None:
        statistics = sequence_statistics(config, dataset)
        sequences = config.global_batch_tokens / statistics.mean_non_padding_tokens
    elif config.global_batch_samples is not None:
        statistics = sequence_statistics(config, dataset)
        sequences = config.global_batch_samples / statistics.mean_samples
    else:
        return config
    return config.model_copy(update={"global_batch_size": max(1, round(sequences))})


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStatistics:
    """Content of a dataset's sequences."""

    mean_non_padding_tokens: float
    """Mean number of tokens per sequence, special tokens included."""
    mean_samples: float
    """Mean number of samples per sequence."""
    max_documents: float
    """Samples per sequence in the fullest micro-batches of 32 sequences: six standard
    deviations above the mean."""


def sequence_statistics(
    config: TrainConfig, dataset: TokenDataset
) -> SequenceStatistics:
    """Return statistics of sequences, from a part of the dataset."""
    samples_per_sequence: list[np.ndarray] = []
    tokens = 0
    samples = 0
    for segments in _first_blocks(config, dataset):
        samples_per_sequence.append(np.bincount(segments.sequences))
        tokens += int(np.sum(segments.tokens))
        tokens += SPECIAL_TOKENS_PER_SAMPLE * len(segments)
        samples += len(segments)
        if samples >= _STATISTICS_SAMPLES:
            break
    counts = np.concatenate(samples_per_sequence) if samples else np.zeros(1)
    mean_samples = float(counts.mean())
    # The mean over n sequences varies by 1 / sqrt(n) of one sequence's variation.
    spread = _FULLEST_SIGMAS * float(counts.std()) / _FULLEST_SEQUENCES**0.5
    return SequenceStatistics(
        mean_non_padding_tokens=tokens / len(counts),
        mean_samples=mean_samples,
        max_documents=max(1.0, mean_samples + spread),
    )


def _first_blocks(config: TrainConfig, dataset: TokenDataset) -> Iterator[Segments]:
    """Yield the blocks of the first epoch: the first of every lane, and so on."""
    plan = make_plan(config, len(dataset), world_size=1)
    for block in range(plan.blocks_per_epoch):
        for lane in range(plan.lanes):
            yield lay_out(plan, lane, block, dataset)


def make_plan(config: TrainConfig, samples: int, world_size: int) -> BatchPlan:
    """Return the plan that splits the global batch into micro-batches of ranks."""
    return BatchPlan(
        seed=config.seed,
        dataset_samples=samples,
        seq_length_tokens=config.seq_length_tokens,
        layout=config.layout,
        global_batch_size=config.global_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps(config, world_size),
        world_size=world_size,
        max_epochs=config.max_epochs,
    )
