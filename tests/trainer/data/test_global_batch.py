import pytest

from tests.trainer.oracles import config_of, micro_batches
from trainer.data.global_batch import sequence_statistics, with_batch_in_sequences


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_sequence_statistics_match_training_batches(layout, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    (batch,) = micro_batches(dataset, config)
    sequences = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    statistics = sequence_statistics(config, dataset)
    assert statistics.mean_non_padding_tokens == pytest.approx(
        batch.non_padding_tokens / sequences
    )
    assert statistics.mean_samples == pytest.approx(len(batch.starts_N) / sequences)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("setting", "mean_name"),
    [
        ("global_batch_tokens", "mean_non_padding_tokens"),
        ("global_batch_samples", "mean_samples"),
    ],
)
def test_global_batch_is_converted_to_sequences(layout, setting, mean_name, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    mean = getattr(sequence_statistics(config, dataset), mean_name)
    with_setting = config.model_copy(update={setting: round(20 * mean)})
    converted = with_batch_in_sequences(with_setting, dataset)
    assert converted.global_batch_size == 20


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_global_batch_in_sequences_is_unchanged(layout, dataset):
    config = config_of(
        layout=layout, micro_batch_size=400, global_batch_size=400, max_epochs=1
    )
    assert with_batch_in_sequences(config, dataset) is config
