"""Encoders of transformers' own modules, with fresh weights, and their parts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.formats.errors import BadConfig
from trainer.formats.families import FAMILIES
from trainer.model.varlen import VARLEN_NAME, attend_within_documents


def build_model(
    config: PretrainedConfig, device: torch.device, implementation: str = "sdpa"
) -> PreTrainedModel:
    """Return a model for training, with fresh weights in fp32.

    Args:
        config: Config of the model.
        device: Device of the weights.
        implementation: Attention function that layers use, by its name in transformers.

    Raises:
        BadConfig: If sizes in the config do not match.
    """
    AttentionInterface.register(VARLEN_NAME, attend_within_documents)
    model = fresh_model(config, device)
    model.train()
    # The loss depends on all parameters of models with BERT's or ModernBERT's layout.
    if device.type != "meta" and FAMILIES.get(config.model_type) is None:
        _freeze_unused_parameters(model, device)
    if implementation != "sdpa":
        # Not with ``set_attn_implementation``, which checks the model again: the caller
        # has verified that it takes this function.
        model.config._attn_implementation = implementation
    return model


def _freeze_unused_parameters(model: PreTrainedModel, device: torch.device) -> None:
    """Freeze parameters that the loss does not depend on, such as ESM's contact head.

    DDP would wait for their gradients.
    """
    ids_BS = torch.arange(16, device=device).reshape(2, 8) % model.config.vocab_size
    logits_BSV = model(input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)).logits
    logits_BSV.float().sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad(set_to_none=True)


def fresh_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return transformers' model with fresh weights in fp32, none of them frozen.

    Raises:
        BadConfig: If sizes in the config do not match.
    """
    try:
        with torch.device(device):
            return _model_with_sdpa_or_eager(config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadConfig(
            f"transformers cannot build the model: {error}",
            next_step="Correct the sizes in the config.",
        ) from error


def _model_with_sdpa_or_eager(config: PretrainedConfig) -> PreTrainedModel:
    try:
        return _model_with_attention(config, "sdpa")
    except ValueError as error:
        # transformers' error for an architecture without SDPA.
        if "scaled_dot_product_attention" not in str(error):
            raise
        return _model_with_attention(config, "eager")


def _model_with_attention(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForMaskedLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model


def model_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the layers of the encoder.

    Returns:
        The layers; empty if they are not a list of transformers' own kind of layer.
    """
    for module in model.base_model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in module):
            return list(module)
    return ()


def model_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model after its encoder, which make the logits."""
    return [part for part in model.children() if part is not model.base_model]


def head_inputs(
    model: PreTrainedModel, position_K: torch.Tensor
) -> AbstractContextManager[Any]:
    """Return a context in which the head gets only some hidden states.

    Shapes: K positions given to the head, T of all flattened sequences, D hidden.

    Args:
        model: The model.
        position_K: Positions of these states in the flattened sequences, int64.
    """

    def select(_: nn.Module, __: object, output: Any) -> Any:
        hidden_TD = output.last_hidden_state.flatten(0, 1)
        output.last_hidden_state = hidden_TD.index_select(0, position_K).unsqueeze(0)
        return output

    return model.base_model.register_forward_hook(select)
