import pytest

from tests.trainer.oracles import config_of, micro_batches
from trainer.data.global_batch import sequence_statistics, with_batch_in_sequences

DATASET_SAMPLES = 400


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
    # Packed, they are fewer than samples; the others of the batch are empty.
    sequences = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    statistics = sequence_statistics(config, dataset)
    assert statistics.mean_non_padding_tokens == pytest.approx(
        batch.non_padding_tokens / sequences
    )
    assert statistics.mean_samples == pytest.approx(len(batch.starts_N) / sequences)


@pytest.mark.parametrize(
    ("setting", "mean_name"),
    [
        ("global_batch_tokens", "mean_non_padding_tokens"),
        ("global_batch_samples", "mean_samples"),
    ],
    ids=["in tokens", "in samples"],
)
def test_global_batch_is_converted_to_sequences(config, setting, mean_name, dataset):
    sequences = 20
    mean_per_sequence = getattr(sequence_statistics(config, dataset), mean_name)
    batch = round(sequences * mean_per_sequence)
    with_setting = config.model_copy(update={setting: batch})
    converted = with_batch_in_sequences(with_setting, dataset)
    assert converted.global_batch_size == sequences


def test_global_batch_in_sequences_is_unchanged(config, dataset):
    assert with_batch_in_sequences(config, dataset) is config
