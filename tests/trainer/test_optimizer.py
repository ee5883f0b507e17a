import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer

from tests.trainer.oracles import FAMILIES, config_of, training_of
from trainer.optimizer import learning_rate


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    final=st.floats(0, 1),
    share=st.floats(0.01, 1),
)
def test_the_learning_rate_rises_to_its_peak_and_falls_without_leaving_bounds(schedule, warmup, steps, final, share):
    config = config_of(
        schedule=schedule, warmup_steps=warmup, max_steps=steps, learning_rate=1.0, final_learning_rate_share=final,
        decay_share=share,
    )  # fmt: skip
    rates = [learning_rate(config, step) for step in range(steps)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    up, down = rates[:warmup], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert warmup >= steps or max(rates) == pytest.approx(1.0)
    if schedule != "constant" and warmup < steps:
        assert learning_rate(config, steps) == pytest.approx(final)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("constant", 99, 1), ("linear", 25, 0.75), ("cosine", 50, 0.5), ("cosine", 25, 0.8536), ("wsd", 79, 1),
        ("wsd", 85, 0.5),
    ],
)  # fmt: skip
def test_each_schedule_has_its_shape(schedule, step, rate):
    config = config_of(schedule=schedule, warmup_steps=0, max_steps=100, learning_rate=1.0, decay_share=0.2)
    assert learning_rate(config, step) == pytest.approx(rate, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_falls_on_what_transformers_lets_decay_by_a_fused_optimizer(family, dataset):
    config = config_of(family, adam_beta2=0.98, adam_epsilon=1e-6)
    training = training_of(config, dataset)
    groups = training.optimizer.param_groups
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    decayed, plain = ({names[id(parameter)] for parameter in group["params"]} for group in groups)
    assert decayed == set(Trainer.get_decay_parameter_names(None, training.model)) & set(names.values())
    assert decayed | plain == set(names.values())
    assert [group["weight_decay"] for group in groups] == [config.weight_decay, 0.0]
    norms = [module for module in training.model.modules() if isinstance(module, nn.LayerNorm)]
    assert {names[id(norm.weight)] for norm in norms} <= plain
    assert [(group["fused"], group["betas"], group["eps"]) for group in groups] == [(True, (0.9, 0.98), 1e-6)] * 2
