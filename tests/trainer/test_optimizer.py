import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer

from tests.trainer.oracles import config_of, training_of
from trainer.dataset import TokenDataset
from trainer.optimizer import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@given(
    schedule=st.sampled_from(SCHEDULES),
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


def test_each_schedule_has_its_shape():
    def halfway(schedule: str, step: int) -> float:
        config = config_of(schedule=schedule, warmup_steps=0, max_steps=100, learning_rate=1.0, decay_share=0.2)
        return learning_rate(config, step)

    assert halfway("constant", 99) == 1
    assert halfway("linear", 25) == pytest.approx(0.75)
    assert halfway("cosine", 50) == pytest.approx(0.5)
    assert halfway("cosine", 25) == pytest.approx(0.853, abs=1e-3)
    assert halfway("wsd", 79) == 1
    assert halfway("wsd", 85) == pytest.approx(0.5)


def test_weight_decay_falls_on_what_transformers_lets_decay(patterned_dataset):
    for family in ("bert", "roberta", "modernbert"):
        config = config_of(family)
        training = training_of(config, TokenDataset.open(patterned_dataset))
        names = {id(parameter): name for name, parameter in training.model.named_parameters()}
        decayed, plain = (
            {names[id(parameter)] for parameter in group["params"]} for group in training.optimizer.param_groups
        )
        expected = set(Trainer.get_decay_parameter_names(None, training.model)) & set(names.values())
        assert decayed == expected
        assert decayed | plain == set(names.values())
        assert [group["weight_decay"] for group in training.optimizer.param_groups] == [config.weight_decay, 0.0]
        norms = [module for module in training.model.modules() if isinstance(module, nn.LayerNorm)]
        assert {names[id(norm.weight)] for norm in norms} <= plain


def test_the_optimizer_is_fused_with_the_configured_moments(patterned_dataset):
    config = config_of(adam_beta2=0.98, adam_epsilon=1e-6)
    training = training_of(config, TokenDataset.open(patterned_dataset))
    assert all(group["fused"] for group in training.optimizer.param_groups)
    assert training.optimizer.param_groups[0]["betas"] == (0.9, 0.98)
    assert training.optimizer.param_groups[0]["eps"] == 1e-6
