"""Conversion of a global batch in tokens or samples to sequences."""

import pytest

from tests.trainer.tiny_models import config_of, micro_batches
from trainer.data.global_batch import with_batch_in_sequences
from trainer.data.sequence_statistics import sequence_statistics

DATASET_SAMPLES = 400
SEQUENCES = 20
"""Global batch in sequences that the other units should give."""


@pytest.fixture(params=["padded", "packed"])
def config(request):
    """A configuration whose only batch holds the whole dataset."""
    return config_of(
        layout=request.param,
        micro_batch_size=DATASET_SAMPLES,
        global_batch_size=DATASET_SAMPLES,
        max_epochs=1,
    )


def test_sequence_statistics_match_training_batches(config, dataset):
    assert len(dataset) == DATASET_SAMPLES
    (batch,) = micro_batches(dataset, config)
    # Packed samples fill fewer sequences than the batch has; the others are empty.
    width = batch.ids_BS.shape[1]
    filled_sequences = len((batch.starts_N // width).unique())
    statistics = sequence_statistics(config, dataset)
    assert statistics.mean_non_padding_tokens == pytest.approx(
        batch.non_padding_tokens / filled_sequences
    )
    assert statistics.mean_samples == pytest.approx(
        len(batch.starts_N) / filled_sequences
    )


def test_global_batch_in_tokens_is_converted(config, dataset):
    statistics = sequence_statistics(config, dataset)
    tokens = round(SEQUENCES * statistics.mean_non_padding_tokens)
    in_tokens = config.model_copy(update={"global_batch_tokens": tokens})
    converted = with_batch_in_sequences(in_tokens, dataset)
    assert converted.global_batch_size == SEQUENCES


def test_global_batch_in_samples_is_converted(config, dataset):
    statistics = sequence_statistics(config, dataset)
    samples = round(SEQUENCES * statistics.mean_samples)
    in_samples = config.model_copy(update={"global_batch_samples": samples})
    converted = with_batch_in_sequences(in_samples, dataset)
    assert converted.global_batch_size == SEQUENCES


def test_global_batch_in_sequences_is_unchanged(config, dataset):
    assert with_batch_in_sequences(config, dataset) is config
