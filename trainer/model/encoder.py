"""Encoders with fresh weights, built from transformers' own modules."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from trainer.config.tables import nearest
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.errors import BadConfig
from trainer.model.attention import dropout_key
from trainer.model.families import FAMILIES
from trainer.model.varlen import VARLEN_NAME, attend_within_documents

VOCAB_MULTIPLE = 64
"""Multiple to which the embedding is padded, for whole tiles of Tensor Cores; the extra
ids never occur."""

_POSITIONS_START_AFTER_PAD = {
    "camembert",
    "data2vec-text",
    "esm",
    "luke",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Model types that count positions from pad_token_id + 1, so that a sequence of S
tokens needs S + pad_token_id + 1 positions."""


def window_tokens(config: PretrainedConfig) -> int | None:
    """Return the reach of sliding-window layers to either side, in tokens.

    Returns:
        The reach, or None if there are no such layers.
    """
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or "sliding_attention" not in layer_types:
        return None
    return int(config.sliding_window)


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


def build_config(
    settings: ModelSettings,
    *,
    vocab_size: int,
    special_ids: SpecialIds,
    seq_length_tokens: int,
    attention_dropout: float | None = None,
) -> PretrainedConfig:
    """Return the transformers config of a model for a dataset.

    Args:
        settings: Shape of the model.
        vocab_size: Number of ids of the dataset.
        special_ids: Special ids of the dataset.
        seq_length_tokens: Positions of a sequence.
        attention_dropout: Attention dropout; None leaves that of the shape.

    Raises:
        BadConfig: If transformers has no masked-LM encoder of this shape, or the
            encoder has too few positions or no attention dropout.
    """
    config = _config_of_shape(settings, vocab_size, special_ids)
    _check_encoder(config)
    _check_positions(config, seq_length_tokens, special_ids.pad)
    if attention_dropout is not None:
        _set_attention_dropout(config, attention_dropout)
    return config


def _config_of_shape(
    settings: ModelSettings, vocab_size: int, special_ids: SpecialIds
) -> PretrainedConfig:
    shape = dict(settings.config) | dict.fromkeys(settings.null_keys)
    model_type = shape.pop("model_type")
    _check_model_type(model_type)
    try:
        return AutoConfig.for_model(
            model_type,
            **shape,
            vocab_size=math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            pad_token_id=special_ids.pad,
            bos_token_id=special_ids.cls,
            eos_token_id=special_ids.sep,
            cls_token_id=special_ids.cls,
            sep_token_id=special_ids.sep,
            mask_token_id=special_ids.mask,
        )
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise BadConfig(
            f"transformers rejects the config of {settings.name!r}: {error}",
            next_step="Correct the config.",
        ) from error


def _check_model_type(model_type: str) -> None:
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return
    match = nearest(model_type, sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES))
    next_step = "Choose an encoder such as bert, roberta or modernbert."
    if match:
        next_step = f"Did you mean {match!r}?"
    raise BadConfig(
        f"transformers has no masked-LM model of type {model_type!r}",
        next_step=next_step,
    )


def _check_encoder(config: PretrainedConfig) -> None:
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    if is_seq2seq or getattr(config, "is_decoder", False):
        raise BadConfig(
            f"{config.model_type!r} is not an encoder",
            next_step="Choose an encoder such as bert or modernbert.",
        )


def _check_positions(
    config: PretrainedConfig, seq_length_tokens: int, pad_id: int
) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return  # relative positions have no limit
    usable = positions
    if config.model_type in _POSITIONS_START_AFTER_PAD:
        usable -= pad_id + 1
    if seq_length_tokens > usable:
        raise BadConfig(
            f"sequence length {seq_length_tokens} exceeds the {usable} positions of"
            f" this {config.model_type}",
            next_step=(
                f"Use --seq-length {usable} or less, or raise max_position_embeddings"
                " in the model's config."
            ),
        )


def _set_attention_dropout(config: PretrainedConfig, attention_dropout: float) -> None:
    key = dropout_key(config)
    if key is None:
        raise BadConfig(
            f"train.attention_dropout cannot be used with {config.model_type!r}, which"
            " has no such setting",
            next_step=(
                "Remove train.attention_dropout, and set dropout in the model's config."
            ),
        )
    setattr(config, key, attention_dropout)


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
