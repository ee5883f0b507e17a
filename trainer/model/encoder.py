"""Encoders with fresh weights, built from transformers' own modules."""

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
from transformers.modeling_layers import GradientCheckpointingLayer as _Layer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from trainer.config.tables import nearest
from trainer.config.train_config import ModelSettings
from trainer.data.dataset import SpecialIds
from trainer.errors import BadConfig
from trainer.model.attention import VARLEN_NAME, attend_within_documents, dropout_key
from trainer.model.families import FAMILIES

VOCAB_MULTIPLE = 64
"""Multiple to which the embedding is padded, for whole tiles of Tensor Cores; the extra
ids never occur."""

# These count positions from pad_token_id + 1, so a sequence of S tokens needs S +
# pad_token_id + 1 positions.
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


def window_tokens(config: PretrainedConfig) -> int | None:
    """Return the reach of sliding-window layers to either side, in tokens.

    None without such layers.
    """
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return int(config.sliding_window) if slides else None


def model_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the layers of the encoder.

    Empty if they are not a list of transformers' own kind of layer.
    """
    lists = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList)
    ]
    return next(
        (
            list(one)
            for one in lists
            if one and all(isinstance(part, _Layer) for part in one)
        ),
        (),
    )


def model_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model after its encoder, which turn hidden states into logits."""
    return [part for part in model.children() if part is not model.base_model]


def head_inputs(
    model: PreTrainedModel, position_K: torch.Tensor | None
) -> AbstractContextManager[Any]:
    """Return a context in which the head gets only the hidden states of ``position_K``, flattened, int64; None: all."""

    def select(_: nn.Module, __: object, output: Any) -> Any:
        if position_K is not None:
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, position_K)
            output.last_hidden_state = hidden.unsqueeze(0)
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
    """Return the transformers config of a shape for a dataset.

    ``attention_dropout`` replaces the shape's own.

    Raise ``BadConfig`` if transformers has no such masked-LM encoder, or it lacks the
    positions or that dropout.
    """
    shape = dict(settings.config) | dict.fromkeys(settings.null_keys)
    model_type = shape.pop("model_type")
    if model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        match = nearest(model_type, sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES))
        next_step = (
            f"Did you mean {match!r}?"
            if match
            else "Choose an encoder such as bert, roberta or modernbert."
        )
        raise BadConfig(
            f"transformers has no masked-LM model of type {model_type!r}",
            next_step=next_step,
        )
    try:
        config = AutoConfig.for_model(
            model_type,
            **shape,
            vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            pad_token_id=special_ids.pad,
            bos_token_id=special_ids.cls,
            eos_token_id=special_ids.sep,
            cls_token_id=special_ids.cls,
            sep_token_id=special_ids.sep,
            mask_token_id=special_ids.mask,
        )
    except (TypeError, ValueError, StrictDataclassError) as error:
        what = f"transformers rejects the config of {settings.name!r}: {error}"
        raise BadConfig(what, next_step="Correct the config.") from error
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "is_decoder", False
    ):
        raise BadConfig(
            f"{model_type!r} is not an encoder",
            next_step="Choose an encoder such as bert or modernbert.",
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:  # relative positions have no limit
        usable = positions - (
            special_ids.pad + 1 if model_type in _POSITIONS_START_AFTER_PAD else 0
        )
        if seq_length_tokens > usable:
            what = (
                f"sequence length {seq_length_tokens} exceeds the {usable} positions of"
                f" this {model_type}"
            )
            next_step = (
                f"Use --seq-length {usable} or less, or raise max_position_embeddings"
                " in the model's config."
            )
            raise BadConfig(what, next_step=next_step)
    if attention_dropout is not None:
        key = dropout_key(config)
        if key is None:
            what = (
                f"train.attention_dropout cannot be used with {model_type!r}, which has"
                " no such setting"
            )
            next_step = (
                "Remove train.attention_dropout, and set dropout in the model's config."
            )
            raise BadConfig(what, next_step=next_step)
        setattr(config, key, attention_dropout)
    return config


def build_model(
    config: PretrainedConfig, device: torch.device, implementation: str = "sdpa"
) -> PreTrainedModel:
    """Return a model with fresh weights in fp32, in training mode.

    Raises:
        BadConfig: If its sizes do not match.
    """
    AttentionInterface.register(VARLEN_NAME, attend_within_documents)
    model = fresh_model(config, device)
    model.train()
    if device.type != "meta" and FAMILIES.get(config.model_type) is None:
        # Parameters that the loss does not depend on, such as ESM's contact head, are
        # frozen: DDP would wait for them.
        ids_BS = torch.arange(16, device=device).reshape(2, 8) % config.vocab_size
        model(
            input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS)
        ).logits.float().sum().backward()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.grad is not None)
        model.zero_grad(set_to_none=True)
    if implementation != "sdpa":
        model.config._attn_implementation = implementation
    return model


def fresh_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Return transformers' model with fresh weights in fp32.

    Raises:
        BadConfig: If its sizes do not match.
    """
    model: PreTrainedModel
    try:
        with torch.device(device):
            try:
                model = AutoModelForMaskedLM.from_config(
                    config, attn_implementation="sdpa", dtype=torch.float32
                )
            except ValueError as error:
                # transformers' error for an architecture without SDPA, which uses eager
                # attention.
                if "scaled_dot_product_attention" not in str(error):
                    raise
                model = AutoModelForMaskedLM.from_config(
                    config, attn_implementation="eager", dtype=torch.float32
                )
    # Sizes that do not match.
    except (TypeError, ValueError, ZeroDivisionError) as error:
        what = f"transformers cannot build the model: {error}"
        raise BadConfig(what, next_step="Correct the sizes in the config.") from error
    return model
