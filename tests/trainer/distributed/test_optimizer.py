import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer

from tests.trainer import oracles
from trainer.build import Training
from trainer.distributed.optimizer import learning_rate

ROUNDING = 1e-12
"""Error of the few fp64 operations that a learning rate takes."""


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup_steps=st.integers(0, 50),
    max_steps=st.integers(1, 200),
    final_share=st.floats(0, 1),
    decay_share=st.floats(0.01, 1),
)
def test_learning_rate_rises_then_falls(
    schedule, warmup_steps, max_steps, final_share, decay_share
):
    config = oracles.config_of(
        schedule=schedule,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        learning_rate=1.0,
        final_learning_rate_share=final_share,
        decay_share=decay_share,
    )
    rates = [learning_rate(config, step) for step in range(max_steps)]
    assert all(0 < rate <= 1 + ROUNDING for rate in rates)
    rising = rates[:warmup_steps]
    falling = rates[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    # A run that ends within its warm-up reaches neither the peak nor the decay.
    if warmup_steps < max_steps:
        assert max(rates) == pytest.approx(1.0)
        if schedule != "constant":
            assert learning_rate(config, max_steps) == pytest.approx(final_share)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        pytest.param("constant", 99, 1, id="constant"),
        pytest.param("linear", 25, 0.75, id="linear"),
        pytest.param("cosine", 50, 0.5, id="cosine, halfway"),
        pytest.param(
            "cosine", 25, (1 + math.cos(math.pi / 4)) / 2, id="cosine, a quarter"
        ),
        # The decay begins at step 80 of 100.
        pytest.param("wsd", 79, 1, id="wsd, stable"),
        pytest.param("wsd", 85, 1 - math.sqrt(5 / 20), id="wsd, decaying"),
    ],
)
def test_each_schedule_has_its_shape(schedule, step, rate):
    config = oracles.config_of(
        schedule=schedule,
        warmup_steps=0,
        max_steps=100,
        learning_rate=1.0,
        decay_share=0.2,
    )
    assert learning_rate(config, step) == pytest.approx(rate, abs=ROUNDING)


def names_of_groups(training: Training) -> tuple[set[str], set[str]]:
    """Return the parameters that the optimizer decays, and those that it does not."""
    names = {
        id(parameter): name
        for name, parameter in training.module.model.named_parameters()
    }
    decayed_group, other_group = training.optimizer.param_groups
    decayed = {names[id(parameter)] for parameter in decayed_group["params"]}
    others = {names[id(parameter)] for parameter in other_group["params"]}
    return decayed, others


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_decayed_parameters_are_those_of_transformers(family, dataset):
    training = oracles.training_of(oracles.config_of(family), dataset)
    model = training.module.model
    decayed, others = names_of_groups(training)
    all_names = {name for name, _ in model.named_parameters()}
    # Without the second names of tied weights, which transformers lists too.
    expected = set(Trainer.get_decay_parameter_names(None, model)) & all_names
    assert decayed == expected
    assert others == all_names - expected


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_norm_weights_are_not_decayed(family, dataset):
    training = oracles.training_of(oracles.config_of(family), dataset)
    _, others = names_of_groups(training)
    norm_weights = {
        f"{name}.weight"
        for name, module in training.module.model.named_modules()
        if isinstance(module, nn.LayerNorm)
    }
    assert norm_weights
    assert norm_weights <= others


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_groups_have_configured_settings(family, dataset):
    config = oracles.config_of(
        family, adam_beta2=0.98, adam_epsilon=1e-6, weight_decay=0.05
    )
    groups = oracles.training_of(config, dataset).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    for group in groups:
        assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-6)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_optimizer_is_fused(family, dataset):
    groups = oracles.training_of(oracles.config_of(family), dataset).optimizer
    assert all(group["fused"] for group in groups.param_groups)
