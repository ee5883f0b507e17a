"""Evaluations of a model on the validation split of a dataset."""

import math

import pytest
import torch

from testbed.datasets import write_dataset
from tests.trainer.gradients import FP32_ROUNDING
from tests.trainer.tiny_models import config_of, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.evaluate import evaluate
from trainer.formats.run_record import EvaluationRow
from trainer.formats.train_config import EvaluationSettings, TrainConfig
from trainer.graph_counter import GraphCounter
from trainer.runtime.ranks import join_ranks

VOCAB_SIZE = 128
VALIDATION_SAMPLES = 50
STEP = 7
"""Any number of finished steps: the evaluation does not depend on it."""


def _samples(count: int, *, shortest: int, longest: int) -> list[list[int]]:
    """Return samples of all lengths in turn, in which each token is one above the last.

    The first 5 tokens of the vocabulary are special ones.
    """
    lengths = longest - shortest + 1
    return [
        [5 + (start + step) % 60 for step in range(shortest + start % lengths)]
        for start in range(count)
    ]


@pytest.fixture
def dataset_with_validation(tmp_path) -> TokenDataset:
    samples = _samples(90, shortest=10, longest=39)
    directory = write_dataset(
        tmp_path / "d",
        samples,
        vocab_size=VOCAB_SIZE,
        validation=samples[:VALIDATION_SAMPLES],
    )
    return TokenDataset.open(directory)


def _evaluate(dataset: TokenDataset, **changes) -> EvaluationRow:
    """Evaluate an untrained model on the validation split of a dataset."""
    config = config_of(**changes)
    return _evaluate_training(training_of(config, dataset), dataset, config)


def _evaluate_training(
    training: Training, dataset: TokenDataset, config: TrainConfig
) -> EvaluationRow:
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    ranks = join_ranks(config, environment={})
    return evaluate(training.module, validation, config, ranks, step=STEP)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layout": "packed"}, id="packed"),
        pytest.param({"layout": "bucketed"}, id="bucketed"),
        pytest.param(
            {"layout": "padded", "micro_batch_size": 3}, id="small micro-batches"
        ),
    ],
)
def test_loss_is_independent_of_layout(dataset_with_validation, changes):
    padded = _evaluate(dataset_with_validation, layout="padded")
    assert padded.rows == VALIDATION_SAMPLES
    other = _evaluate(dataset_with_validation, **changes)
    # Layouts add up the same numbers in another order.
    assert other.loss == pytest.approx(padded.loss, rel=FP32_ROUNDING)
    assert other.masked_accuracy == pytest.approx(padded.masked_accuracy)
    assert other.predicted_tokens == padded.predicted_tokens


def test_row_names_the_step(dataset_with_validation):
    assert _evaluate(dataset_with_validation).step == STEP


def test_evaluates_at_most_max_sequences(dataset_with_validation):
    row = _evaluate(
        dataset_with_validation,
        layout="padded",
        evaluation=EvaluationSettings(max_sequences=20),
    )
    assert row.rows == 20


def test_evaluation_is_repeatable(dataset_with_validation):
    row = _evaluate(dataset_with_validation)
    again = _evaluate(dataset_with_validation)
    assert (again.loss, again.masked_accuracy) == (row.loss, row.masked_accuracy)


def test_untrained_model_predicts_all_tokens_alike(dataset_with_validation):
    row = _evaluate(dataset_with_validation)
    # If all tokens are equally likely, the loss is log(vocabulary). Initial weights are
    # small, but not zero, and add a few percent.
    assert row.loss == pytest.approx(math.log(VOCAB_SIZE), rel=0.1)


def test_perplexity_is_exponential_of_loss(dataset_with_validation):
    row = _evaluate(dataset_with_validation)
    assert row.perplexity == pytest.approx(math.exp(row.loss))


def test_row_of_diverged_model_can_be_read_again(dataset_with_validation):
    config = config_of()
    training = training_of(config, dataset_with_validation)
    with torch.no_grad():
        next(training.module.parameters()).fill_(math.nan)
    row = _evaluate_training(training, dataset_with_validation, config)
    assert (row.loss, row.perplexity) == (None, None)
    assert EvaluationRow.model_validate_json(row.model_dump_json()) == row


def test_evaluation_leaves_the_model_in_training_mode(dataset_with_validation):
    config = config_of()
    training = training_of(config, dataset_with_validation)
    _evaluate_training(training, dataset_with_validation, config)
    assert training.module.training
    assert all(parameter.grad is None for parameter in training.module.parameters())


def test_evaluation_of_a_compiled_model_compiles_nothing(dataset_with_validation):
    # Other tests have compiled layers of the same code, which would not be compiled
    # again.
    torch.compiler.reset()
    counter = GraphCounter()
    counter.stepped()  # it counts the graphs that are compiled after this
    eager = _evaluate(dataset_with_validation)
    compiled = _evaluate(dataset_with_validation, compile=True)
    assert counter.recompilations == 0
    assert compiled.loss == pytest.approx(eager.loss, rel=FP32_ROUNDING)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_misses_no_sample_at_the_end_of_lanes(micro_batch_size, tmp_path):
    # Lanes are equal parts of an epoch, each packed separately. So many samples give
    # each lane several sequences, and lanes end one by one.
    samples = _samples(4200, shortest=4, longest=53)
    dataset = TokenDataset.open(
        write_dataset(
            tmp_path / "d", samples[:8], vocab_size=VOCAB_SIZE, validation=samples
        )
    )
    all_sequences = EvaluationSettings(max_sequences=100_000)
    expected = _evaluate(dataset, evaluation=all_sequences, micro_batch_size=64)
    row = _evaluate(
        dataset, evaluation=all_sequences, micro_batch_size=micro_batch_size
    )
    assert row.rows == expected.rows
    assert row.predicted_tokens == expected.predicted_tokens
