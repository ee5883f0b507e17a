"""Cost of an architecture with known layers from its config: FLOPs, and gradients in the order of backward. Pure."""

from autotune.network.values import GradientPart
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.model.flops import ModelWork

HIDDEN_SIZE, LAYERS = 768, 12
"""Defaults for configs that leave them out: BERT's, and those of most encoders."""
_NARROW_PARTS = 10 / 12
"""Share of a layer that a sparse last layer computes for masked tokens only: all but
keys and values."""
_VOCAB_MULTIPLE = 64
"""Multiple to which the rows of the embedding table are padded, for whole tiles."""
_PARTS_PER_LAYER = 4
_MOST = 2**20
"""Exclusive upper bound of sizes and counts in a model's config."""
_GLOBAL_EVERY, _LOCAL_ATTENTION = 3, 128
"""Defaults of ModernBERT, for configs that leave them out."""


def expected_model_work(
    train: TrainConfig, vocab_size: int, parameters: int
) -> ModelWork | None:
    """Return the matmul and attention work of a model; None for other architectures."""
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    hidden, layers, of_layer = _shape(train)
    table = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    reaches = _reaches(train, layers) if layout == "modernbert" else (None,) * layers
    narrow = reaches[-1] is None
    # All of the last layer but keys and values.
    predicted_only = of_layer - 2 * hidden**2 if narrow else 0
    return ModelWork(
        parameters=parameters,
        weights_per_token=layers * of_layer - predicted_only,
        weights_per_predicted_token=hidden**2 + hidden * table + predicted_only,
        attention_width=hidden,
        reaches=reaches,
        last_layer_narrow=narrow,
    )


def estimate_vocab_size(train: TrainConfig, parameters: int) -> int | None:
    """Return the embedding rows to within 1 or 2 %, from the parameters that the rest leaves; None if unknown."""
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    hidden, layers, of_layer = _shape(train)
    beside = layers * of_layer + hidden**2
    if layout == "bert":
        biases_and_norms = 9 * hidden + int(
            config_number(train, "intermediate_size", 4 * hidden)
        )
        beside += layers * biases_and_norms + hidden * int(
            config_number(train, "max_position_embeddings", 512)
        )
    return max(1, (parameters - beside) // (hidden + 1))


def gradient_parts(train: TrainConfig, parameters: int) -> tuple[GradientPart, ...]:
    """Return the gradients layer after layer, then all others at once, as those of embeddings are ready last."""
    _, layers, of_layer = _shape(train)
    in_layers = min(parameters, layers * of_layer)
    parts = layers * _PARTS_PER_LAYER
    each = max(1, in_layers // parts)
    found = (
        GradientPart(elements=each, ready_share=number / parts)
        for number in range(1, parts + 1)
    )
    return (
        *found,
        GradientPart(elements=max(1, parameters - in_layers), ready_share=1.0),
    )


def largest_gather_bytes(train: TrainConfig, parameters: int) -> int:
    """Return the most bytes that fsdp2 gathers at once in fp32: the embedding table, or a layer."""
    _, layers, of_layer = _shape(train)
    return 4 * max(of_layer, parameters - layers * of_layer)


def _reaches(train: TrainConfig, layers: int) -> tuple[int | None, ...]:
    every = config_count(train, "global_attn_every_n_layers", _GLOBAL_EVERY)
    window = int(config_number(train, "local_attention", _LOCAL_ATTENTION)) // 2
    kinds = train.model.config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if number % every else None for number in range(layers))


def attention_dropout(train: TrainConfig) -> float:
    """Return the attention dropout in effect, 0 to 1."""
    if train.attention_dropout is not None:
        return train.attention_dropout
    is_modern = train.model.config["model_type"] == "modernbert"
    name, default = (
        ("attention_dropout", 0.0)
        if is_modern
        else ("attention_probs_dropout_prob", 0.1)
    )
    return float(config_number(train, name, default))


def config_number(train: TrainConfig, key: str, default: float) -> float:
    """Return a number of the model's config.

    The default if it is missing or not plausible.
    """
    value = train.model.config.get(key)
    return (
        value
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < _MOST
        else default
    )


def config_count(train: TrainConfig, key: str, default: int) -> int:
    """Return a count of the model's config that is at least 1.

    The default if it is missing, not plausible or 0.
    """
    return int(config_number(train, key, default)) or default


def _shape(train: TrainConfig) -> tuple[int, int, int]:
    """Return a model's hidden size, its number of layers, and the weights of one layer's matrices."""
    hidden = config_count(train, "hidden_size", HIDDEN_SIZE)
    gated = 3 if train.model.config["model_type"] == "modernbert" else 2
    of_layer = 4 * hidden**2 + gated * hidden * config_number(
        train, "intermediate_size", 4 * hidden
    )
    return hidden, config_count(train, "num_hidden_layers", LAYERS), int(of_layer)


def position_share(train: TrainConfig, parameters: int | None) -> float:
    """Return the share of a step's matmuls that grows with all positions, padding included.

    The rest (sparse head, ten of the last layer's twelve parts) grows with the
    positions to predict. Counted in multiply-adds with weights, without attention's own
    matmuls. Without ``parameters`` the share is 1.
    """
    if (
        parameters is None
        or train.mlm_head == "dense"
        or FAMILIES.get(train.model.config["model_type"]) is None
    ):
        return 1.0
    hidden, layers, of_layer = _shape(train)
    body = layers * of_layer
    embedded = max(0.0, parameters - body)  # mostly the embedding table
    narrow = _NARROW_PARTS * of_layer if train.last_layer == "sparse" else 0.0
    predicted = train.masking_probability * (embedded + hidden**2 + narrow)
    return (body - narrow) / (body - narrow + predicted)
