import math

import pytest
import torch

from tests.conftest import write_dataset
from tests.trainer.oracles import config_of, training_of
from trainer.config import EvaluationSettings
from trainer.dataset import TokenDataset
from trainer.evaluate import evaluate
from trainer.parallel import join_ranks


@pytest.fixture
def dataset(tmp_path) -> TokenDataset:
    samples = [[5 + (start + step) % 60 for step in range(10 + start % 30)] for start in range(90)]
    return TokenDataset.open(write_dataset(tmp_path / "d", samples, vocab_size=128, validation=samples[:50]))


def _evaluated(dataset: TokenDataset, **changes):
    config = config_of(**changes)
    training = training_of(config, dataset)
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    return training, evaluate(training.module, validation, config, join_ranks(config, environment={}), step=7)


def test_every_layout_and_micro_batch_finds_the_same_loss_and_accuracy(dataset):
    _, padded = _evaluated(dataset, layout="padded")
    assert padded.rows == 50
    assert padded.step == 7
    for changes in ({"layout": "packed"}, {"layout": "bucketed"}, {"layout": "padded", "micro_batch_rows": 3}):
        _, found = _evaluated(dataset, **changes)
        assert found.loss == pytest.approx(padded.loss, rel=1e-6)
        assert found.masked_accuracy == pytest.approx(padded.masked_accuracy)
        assert found.predicted_tokens == padded.predicted_tokens


def test_it_is_the_same_again_and_leaves_the_model_in_training_without_gradients(dataset):
    training, found = _evaluated(dataset)
    _, again = _evaluated(dataset)
    assert (again.loss, again.masked_accuracy) == (found.loss, found.masked_accuracy)
    assert training.module.training
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.loss == pytest.approx(math.log(128), rel=0.1)  # as of words that are all as likely


def test_a_compiled_model_is_evaluated_without_compiling_more(dataset):
    from trainer.build import GraphCounter

    torch._dynamo.reset()
    counter = GraphCounter()
    counter.stepped()
    _, plain = _evaluated(dataset)
    _, found = _evaluated(dataset, compile_layers=True)
    assert counter.recompilations == 0
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 4])
def test_no_sample_is_missed_where_lanes_end_one_by_one(micro_batch_rows, tmp_path):
    samples = [[5 + (start + step) % 60 for step in range(4 + start % 50)] for start in range(4200)]
    dataset = TokenDataset.open(write_dataset(tmp_path / "d", samples[:8], vocab_size=128, validation=samples))
    few = EvaluationSettings(max_rows=100_000)
    _, whole = _evaluated(dataset, evaluation=few, micro_batch_rows=64)
    _, found = _evaluated(dataset, evaluation=few, micro_batch_rows=micro_batch_rows)
    assert (found.rows, found.predicted_tokens) == (whole.rows, whole.predicted_tokens)


def test_no_more_rows_than_asked_for_are_looked_at(dataset):
    _, found = _evaluated(dataset, layout="padded", evaluation=EvaluationSettings(max_rows=20))
    assert found.rows == 20
