from torch import nn
from transformers import Trainer

from tests.trainer.oracles import config_of, training_of
from trainer.dataset import TokenDataset


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
