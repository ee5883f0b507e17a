"""Compiled layers compute the same as others, and are compiled only once."""

import functools

import pytest
import torch

from tests.trainer.gradients import (
    FP32_ROUNDING,
    assert_gradients_agree,
    loss_and_gradients,
    loss_and_gradients_of_first_step,
)
from tests.trainer.masked_attention import choose_varlen
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.data.micro_batch import MicroBatch
from trainer.formats.train_config import TrainConfig
from trainer.graph_counter import WARM_UP_STEPS, GraphCounter

LEARNING_RATE = 1e-4
"""Any rate, as only the shapes of the steps matter."""


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile graphs of forward and backward, but run them without machine code.

    To generate machine code takes a minute for each family of models.
    """
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


def _check_compiled(config: TrainConfig, dataset: TokenDataset) -> None:
    """Assert that compiled layers learn the same, and are compiled once."""
    torch.compiler.reset()  # other tests have compiled layers of the same code
    compiled_config = config.model_copy(update={"compile": True})
    compiled = training_of(compiled_config, dataset)
    batches = micro_batches(dataset, compiled_config, steps=8)
    # This also compares the names of parameters, as layers are compiled in place. The
    # compiler adds up numbers in another order in every layer.
    assert_gradients_agree(
        loss_and_gradients(compiled, batches[:1]),
        loss_and_gradients_of_first_step(config, dataset),
        loss=10 * FP32_ROUNDING,
        gradient=100 * FP32_ROUNDING,
    )
    _check_compiled_once(compiled, batches)


def _check_compiled_once(compiled: Training, batches: list[MicroBatch]) -> None:
    """Assert that steps on micro-batches of the same shape compile nothing again.

    It must not matter how many documents and tokens to predict they have.
    """
    counter = GraphCounter()
    for batch in batches:
        compiled.step.run([batch], LEARNING_RATE)
        counter.stepped()
    assert counter.recompilations == 0
    # The micro-batches do differ in their numbers of tokens to predict; in those of
    # documents even after the steps in which layers may be compiled.
    assert len({batch.predicted_tokens for batch in batches}) > 1
    later_batches = batches[WARM_UP_STEPS:]
    document_counts = {len(batch.starts_N) for batch in (batches[0], *later_batches)}
    assert len(document_counts) > 1


@pytest.mark.slow
def test_machine_code_computes_the_same(dataset):
    _check_compiled(config_of(), dataset)


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(
    ("family", "activation_checkpointing"),
    [
        ("bert", "none"),
        ("modernbert", "none"),
        ("bert", "selective"),
        ("bert", "full"),
        ("esm", "full"),
    ],
)
def test_layers_compile_once_and_compute_the_same(
    family, activation_checkpointing, dataset
):
    _check_compiled(
        config_of(family, activation_checkpointing=activation_checkpointing),
        dataset,
    )


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "varlen"),
        ("modernbert", "varlen"),
        ("eurobert", "varlen"),
        ("bert", "fa4"),
        ("modernbert", "fa4"),
    ],
)
def test_compiled_layers_take_all_numbers_of_documents(
    family, kind, dataset, monkeypatch
):
    expected = loss_and_gradients_of_first_step(config_of(family), dataset)
    choose_varlen(monkeypatch, kind)
    assert_gradients_agree(
        loss_and_gradients_of_first_step(config_of(family), dataset), expected
    )
    _check_compiled(config_of(family), dataset)
