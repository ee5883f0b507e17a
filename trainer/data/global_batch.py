"""Size of the global batch in sequences, from the configuration and the dataset.

No torch here.
"""

from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import sequence_statistics
from trainer.formats.train_config import TrainConfig


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
