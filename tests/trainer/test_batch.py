import pytest

from tests.trainer.oracles import config_of, micro_batches
from trainer.batch import in_rows, mean_row
from trainer.dataset import TokenDataset


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_global_batch_in_tokens_or_samples_becomes_the_rows_that_hold_it(layout, patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(layout=layout, global_batch_rows=3)
    tokens, samples = mean_row(config, dataset)
    by_tokens = in_rows(config.model_copy(update={"global_batch_tokens": round(20 * tokens)}), dataset)
    by_samples = in_rows(config.model_copy(update={"global_batch_samples": round(20 * samples)}), dataset)
    assert by_tokens.global_batch_rows == by_samples.global_batch_rows == 20
    assert in_rows(config, dataset) is config


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_rows_mean_is_that_of_what_is_trained_on(layout, patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(layout=layout, micro_batch_rows=400, global_batch_rows=400, max_epochs=1)
    (batch,) = micro_batches(dataset, config)
    rows = len((batch.starts_N // batch.ids_BS.shape[1]).unique())
    tokens, samples = mean_row(config, dataset)
    assert tokens == pytest.approx(batch.real_tokens / rows)
    assert samples == pytest.approx(len(batch.starts_N) / rows)
