import pytest
import torch
from torch.nn import functional

from tests.trainer import oracles
from trainer.build import Training
from trainer.model import masked_lm
from trainer.model.loss import cross_entropy


def _fuse_loss(training: Training) -> None:
    """Let a training compute its loss from hidden states, as Liger Kernel does."""

    def fused_loss(hidden_KD, weight_VD, labels_K, bias_V):
        dtypes = {tensor.dtype for tensor in (hidden_KD, weight_VD, bias_V)}
        assert dtypes == {training.module._dtype}
        return cross_entropy(functional.linear(hidden_KD, weight_VD, bias_V), labels_K)

    training.module.fused_loss = fused_loss


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
class TestFusedLoss:
    def test_learns_as_head_and_loss_do(self, family, dtype, dataset):
        config = oracles.config_of(family, precision=dtype, layout="padded")
        batches = oracles.micro_batches(dataset, config)
        training = oracles.training_of(config, dataset)
        expected = oracles.gradients_of(training, batches)
        _fuse_loss(training)
        oracles.check_alike(
            expected,
            oracles.gradients_of(training, batches),
            loss=1e-5,
            gradient=1e-5 if dtype == "fp32" else 5e-3,
        )

    def test_evaluates_in_chunks(self, family, dtype, dataset, monkeypatch):
        config = oracles.config_of(family, precision=dtype, layout="padded")
        batches = oracles.micro_batches(dataset, config)
        training = oracles.training_of(config, dataset)
        with torch.no_grad():
            expected_loss, expected_hits = training.module.evaluate(batches[0])
        monkeypatch.setattr(masked_lm, "EVALUATION_CHUNK_POSITIONS", 7)
        _fuse_loss(training)
        with torch.no_grad():
            loss, hits = training.module.evaluate(batches[0])
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
        assert int(hits) == int(expected_hits)
