"""The global batch that baselines share: equally many non-padding tokens."""

from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.data.sequence_statistics import sequence_statistics
from trainer.formats.train_config import TRIMMED_LAYOUTS, TrainConfig


def global_batch_tokens(tuned: TrainConfig, dataset: TokenDataset) -> int:
    """Return the average number of non-padding tokens in the tuned global batch."""
    if tuned.global_batch_tokens:
        return tuned.global_batch_tokens
    sequences = with_batch_in_sequences(tuned, dataset).global_batch_size
    mean_tokens = sequence_statistics(tuned, dataset).mean_non_padding_tokens
    return max(1, round(sequences * mean_tokens))


def non_padding_share(config: TrainConfig, dataset: TokenDataset) -> float | None:
    """Return the average share of non-padding tokens in the sequences of a recipe.

    Args:
        config: Configuration of the recipe.
        dataset: Dataset of the training.

    Returns:
        The share, 0 to 1; None if sequences are trimmed, so that windows differ in it.
    """
    if config.layout in TRIMMED_LAYOUTS:
        return None
    sequences = sequence_statistics(config, dataset)
    return sequences.mean_non_padding_tokens / config.seq_length_tokens
