"""Configs of encoders in transformers, for a shape and a dataset."""

import math

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from trainer.formats.errors import BadConfig
from trainer.formats.manifest import SpecialIds
from trainer.formats.tables import nearest
from trainer.formats.train_config import ModelSettings
from trainer.model.attention import dropout_key

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
