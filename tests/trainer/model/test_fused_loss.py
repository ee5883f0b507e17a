"""The loss from hidden states, as Liger Kernel computes it on a GPU."""

import pytest
import torch
from torch.nn import functional

from tests.trainer.gradients import assert_gradients_agree, loss_and_gradients
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.formats.train_config import TrainConfig
from trainer.model import masked_lm
from trainer.model.loss import cross_entropy

GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Relative distance of gradients whose sums are in another order: in bf16 a little more
than one rounding, which is 2**-8."""


@pytest.fixture(params=["bert", "modernbert", "distilbert"])
def family(request) -> str:
    return request.param


@pytest.fixture(params=["fp32", "bf16"])
def config(request, family) -> TrainConfig:
    return config_of(family, precision=request.param, layout="padded")


@pytest.fixture
def training(config, dataset) -> Training:
    return training_of(config, dataset)


@pytest.fixture
def batches(config, dataset):
    return micro_batches(dataset, config)


def _fuse_loss(training: Training) -> None:
    """Let a training compute its loss from hidden states, without Liger Kernel."""

    def fused_loss(hidden_KD, weight_VD, labels_K, bias_V):
        dtypes = {tensor.dtype for tensor in (hidden_KD, weight_VD, bias_V)}
        assert dtypes == {training.module._dtype}
        return cross_entropy(functional.linear(hidden_KD, weight_VD, bias_V), labels_K)

    training.module.fused_loss = fused_loss


def test_fused_loss_learns_as_head_and_loss_do(config, training, batches):
    expected = loss_and_gradients(training, batches)
    _fuse_loss(training)
    assert_gradients_agree(
        expected,
        loss_and_gradients(training, batches),
        loss=1e-5,
        gradient=GRADIENT_TOLERANCE[config.precision],
    )


@torch.no_grad()
def test_evaluates_in_chunks(training, batches, monkeypatch):
    expected_loss, expected_hits = training.module.evaluate(batches[0])
    # A number that does not divide that of the positions: the last chunk is smaller.
    monkeypatch.setattr(masked_lm, "EVALUATION_CHUNK_POSITIONS", 7)
    _fuse_loss(training)
    loss, hits = training.module.evaluate(batches[0])
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert int(hits) == int(expected_hits)
