"""Sizes of a model from which the FLOPs of its training steps follow."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from trainer.formats.families import FAMILIES
from trainer.model.encoder import model_head, model_layers
from trainer.model.encoder_config import window_tokens
from trainer.model.flops import ModelWork


def model_work(model: PreTrainedModel) -> ModelWork:
    """Return the sizes from which the FLOPs of a model's training steps follow.

    A token costs a multiplication and an addition for each element of the linear
    weights that it is multiplied with. Only these elements are counted, as embeddings
    are looked up.

    Args:
        model: Model whose weights are not sharded yet.
    """
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["full_attention"] * config.num_hidden_layers

    # The sparse MLM head is applied to the tokens to predict only. So is most of the
    # last layer, in the families that support a sparse one, unless its attention has a
    # window.
    weights_per_predicted_token = _linear_weights(model_head(model))
    last_layer_narrow = (
        FAMILIES.get(config.model_type) is not None
        and layer_types[-1] == "full_attention"
    )
    if last_layer_narrow:
        # Keys and values of the last layer are needed for every token. They take two
        # square matrices of the hidden size.
        key_and_value_weights = 2 * config.hidden_size**2
        weights_per_predicted_token += (
            _linear_weights(model_layers(model)[-1:]) - key_and_value_weights
        )
    window = window_tokens(config)
    return ModelWork(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_per_token=_linear_weights([model]) - weights_per_predicted_token,
        weights_per_predicted_token=weights_per_predicted_token,
        attention_width=config.hidden_size,
        reaches=tuple(
            window if layer_type == "sliding_attention" else None
            for layer_type in layer_types
        ),
        last_layer_narrow=last_layer_narrow,
    )


def _linear_weights(parts: Sequence[nn.Module]) -> int:
    """Return the number of elements of all linear weights in the modules."""
    weights = 0
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
    return weights
