"""Learning rates of all schedules, and the parameter groups of the optimizer."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer

from tests.trainer.tiny_models import FAMILIES, config_of, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.distributed.optimizer import learning_rate

ROUNDING = 1e-12
"""Error of the few fp64 operations that a learning rate takes."""
WEIGHT_DECAY = 0.05
ADAM_BETA2 = 0.98
ADAM_EPSILON = 1e-6


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
    config = config_of(
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
        pytest.param("constant", 99, 1, id="constant, last step"),
        pytest.param("linear", 25, 0.75, id="linear, a quarter"),
        pytest.param("cosine", 50, 0.5, id="cosine, halfway"),
        pytest.param(
            "cosine", 25, (1 + math.cos(math.pi / 4)) / 2, id="cosine, a quarter"
        ),
        # Warm-up, stable, decay: the last 20 of 100 steps decay with a square root.
        pytest.param("wsd", 79, 1, id="wsd, stable"),
        pytest.param("wsd", 85, 1 - math.sqrt(5 / 20), id="wsd, decaying"),
    ],
)
def test_each_schedule_has_its_shape(schedule, step, rate):
    config = config_of(
        schedule=schedule,
        warmup_steps=0,
        max_steps=100,
        learning_rate=1.0,
        decay_share=0.2,
    )
    assert learning_rate(config, step) == pytest.approx(rate, abs=ROUNDING)


@pytest.fixture(scope="module", params=FAMILIES)
def training(request, patterned_dataset) -> Training:
    """A training with settings of the optimizer that are not defaults."""
    config = config_of(
        request.param,
        adam_beta2=ADAM_BETA2,
        adam_epsilon=ADAM_EPSILON,
        weight_decay=WEIGHT_DECAY,
    )
    return training_of(config, TokenDataset.open(patterned_dataset))


@dataclass(frozen=True, kw_only=True)
class NamesOfGroups:
    """Names of the parameters in both groups of the optimizer."""

    decayed: set[str]
    others: set[str]


@pytest.fixture(scope="module")
def names_of_groups(training) -> NamesOfGroups:
    names = {
        id(parameter): name
        for name, parameter in training.module.model.named_parameters()
    }
    decayed_group, other_group = training.optimizer.param_groups
    return NamesOfGroups(
        decayed={names[id(parameter)] for parameter in decayed_group["params"]},
        others={names[id(parameter)] for parameter in other_group["params"]},
    )


def test_decayed_parameters_are_those_of_transformers(training, names_of_groups):
    model = training.module.model
    all_names = {name for name, _ in model.named_parameters()}
    # Without the second names of tied weights, which transformers lists too.
    expected = set(Trainer.get_decay_parameter_names(None, model)) & all_names
    assert names_of_groups.decayed == expected
    assert names_of_groups.others == all_names - expected


def test_norm_weights_are_not_decayed(training, names_of_groups):
    norm_weights = {
        f"{name}.weight"
        for name, module in training.module.model.named_modules()
        if isinstance(module, nn.LayerNorm)
    }
    assert norm_weights
    assert norm_weights <= names_of_groups.others


def test_groups_have_configured_settings(training):
    groups = training.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [WEIGHT_DECAY, 0.0]
    default_beta1 = 0.9
    for group in groups:
        assert group["betas"] == (default_beta1, ADAM_BETA2)
        assert group["eps"] == ADAM_EPSILON


def test_optimizer_is_fused(training):
    assert all(group["fused"] for group in training.optimizer.param_groups)
