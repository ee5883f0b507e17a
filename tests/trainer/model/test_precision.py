"""Weights that are cast once per step, held against fp32 and against autocast, which casts them in every layer."""

import pytest
import torch

from tests.trainer import oracles
from trainer.config.train_config import ParallelSettings, TrainConfig

PLAIN = ParallelSettings(strategy="fsdp2")
"""On a single rank, autocast without working copies."""


@pytest.mark.parametrize(("again", "layout"), [("none", "packed"), ("selective", "padded"), ("full", "packed")])
@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_loss_and_gradient_are_as_near_to_fp32_as_autocasts(family, again, layout, dataset):
    def learned(**changes):
        config = oracles.config_of(family, activation_checkpointing=again, layout=layout, **changes)
        return oracles.learned(config, dataset)

    exact, plain = learned(), learned(precision="bf16", parallel=PLAIN)
    found, narrow = learned(precision="bf16"), learned(precision="bf16", residual_dtype="bf16")
    assert 0 < abs(found[0] - exact[0]) <= 1.5 * abs(plain[0] - exact[0])
    near, limit, far = (oracles.relative_distance(exact[1], one[1]) for one in (found, plain, narrow))
    assert 0 < near <= 1.5 * limit
    assert near != far < 3 * limit
    oracles.check_alike(learned(precision="bf16", micro_batch_size=2), found, loss=1e-3, gradient=2 * limit)


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
    first, last = (layer.attention.self for layer in training.model.bert.encoder.layer)
    assert (first.query.compute_weight.shape, last.key.compute_weight.shape) == ((96, 32), (64, 32))
    training.step.run(oracles.micro_batches(dataset, oracles.config_of()), 1e-2)
    expected = torch.cat([one.weight for one in (first.query, first.key, first.value)]).bfloat16()
    assert torch.equal(first.query.compute_weight, expected)
    assert not first.query.results
