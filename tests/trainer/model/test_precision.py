"""Weights that are cast once per step, held against fp32 and against autocast, which casts them in every layer."""

import itertools

import pytest
import torch
from torch.nn import functional

from tests.trainer import oracles
from trainer.config.train_config import TrainConfig
from trainer.model import masked_lm
from trainer.model.packing import prove_copies

CASES = [
    *itertools.product((*oracles.FAMILIES, "esm", "eurobert"), [("selective", "padded"), ("full", "packed")]),
    *itertools.product(("bert", "albert"), [("none", "packed")]), ("mpnet", ("none", "padded")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "way"), CASES)
def test_losses_and_gradient_are_as_near_to_fp32_as_autocasts(family, way, dataset, monkeypatch):
    def learned(*, copies=True, **changes):
        """Loss of each token, and the gradient."""
        monkeypatch.setattr(masked_lm, "prove_copies", prove_copies if copies else lambda _: "for comparison")
        config = oracles.config_of(family, activation_checkpointing=way[0], layout=way[1], **changes)
        training, batches = oracles.training_of(config, dataset), oracles.micro_batches(dataset, config)
        assert (training.module.copies is not None) == (copies and config.precision == "bf16")
        with torch.no_grad():
            logits_KV, labels_K = training.module._predict(batches[0])
        losses_K = functional.cross_entropy(logits_KV.float(), labels_K, reduction="none")
        return {"losses": losses_K}, oracles.gradients_of(training, batches)[1]

    exact, plain, found = learned(), learned(precision="bf16", copies=False), learned(precision="bf16")
    for one, under_autocast, with_copies in zip(exact, plain, found, strict=True):
        near, limit = (oracles.relative_distance(one, other) for other in (with_copies, under_autocast))
        assert 0 < near <= 1.5 * limit
    parts = learned(precision="bf16", micro_batch_size=2)
    assert oracles.relative_distance(found[1], parts[1]) < 2 * limit
    if family in oracles.FAMILIES:
        far = oracles.relative_distance(exact[1], learned(precision="bf16", residual_dtype="bf16")[1])
        assert near != far < 3 * limit


def _losses(config: TrainConfig, dataset) -> list[float]:
    training = oracles.training_of(config, dataset)
    batches = oracles.micro_batches(dataset, config, steps=300)
    return [float(training.step.run([batch], 3e-3).loss) for batch in batches]


@pytest.mark.slow
def test_three_hundred_steps_end_with_the_loss_of_fp32(dataset):
    exact, found = (_losses(oracles.config_of(max_grad_norm=1.0, precision=one), dataset) for one in ("fp32", "bf16"))
    assert sum(found[-20:]) == pytest.approx(sum(exact[-20:]), rel=0.01)
    assert sum(found[-20:]) < 0.8 * sum(found[:20])


def test_one_matmul_gives_queries_keys_and_values_and_names_stay(dataset):
    plain, training = (
        oracles.training_of(oracles.config_of(precision=precision), dataset) for precision in ("fp32", "bf16")
    )
    assert training.model.state_dict().keys() == plain.model.state_dict().keys()
    assert all(parameter.dtype == torch.float32 for parameter in training.module.parameters())
    first, last = (layer.attention.self for layer in training.model.bert.encoder.layer)
    assert (first.query.compute_weight.shape, last.key.compute_weight.shape) == ((96, 32), (64, 32))
    training.step.run(oracles.micro_batches(dataset, oracles.config_of()), 1e-2)
    expected = torch.cat([one.weight for one in (first.query, first.key, first.value)]).bfloat16()
    assert torch.equal(first.query.compute_weight, expected)
    assert not first.query.results
