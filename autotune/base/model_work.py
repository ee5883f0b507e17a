"""Cost of an architecture with known layers, from its config. Pure.

FLOPs of a step, sizes of matrices, and gradients in the order in which the backward
pass finishes them.
"""

from dataclasses import dataclass

from autotune.network.values import GradientPart
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.model.flops import ModelWork

HIDDEN_SIZE = 768
"""Default for configs that leave it out: BERT's, and that of most encoders."""
LAYERS = 12
"""Default number of layers, as ``HIDDEN_SIZE``."""
_PREDICTED_ONLY_SHARE = 10 / 12
"""Share of a layer that a sparse last layer computes for masked tokens only: all but
keys and values."""
_VOCAB_MULTIPLE = 64
"""Multiple to which the embedding table is padded, for whole tiles."""
_PARTS_PER_LAYER = 4
"""Parts in which the gradients of a layer become ready."""
_SIZE_LIMIT = 2**20
"""Exclusive upper bound of sizes and counts in a model's config."""
_GLOBAL_EVERY = 3
"""Default of ModernBERT: every third layer attends to the whole document."""
_LOCAL_ATTENTION_TOKENS = 128
"""Default of ModernBERT: window of the other layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncoderShape:
    """Sizes of an encoder's layers."""

    hidden_size: int
    layers: int
    weights_per_layer: int
    """Elements of the matrices of one layer."""

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.layers * self.weights_per_layer


def _shape(train: TrainConfig) -> _EncoderShape:
    hidden_size = config_count(train, "hidden_size", HIDDEN_SIZE)
    intermediate_size = config_number(train, "intermediate_size", 4 * hidden_size)
    # ModernBERT's MLP has a gate beside the two matrices of BERT's.
    mlp_matrices = 3 if train.model.config["model_type"] == "modernbert" else 2
    attention_weights = 4 * hidden_size**2
    return _EncoderShape(
        hidden_size=hidden_size,
        layers=config_count(train, "num_hidden_layers", LAYERS),
        weights_per_layer=int(
            attention_weights + mlp_matrices * hidden_size * intermediate_size
        ),
    )


def expected_model_work(
    train: TrainConfig, vocab_size: int, parameters: int
) -> ModelWork | None:
    """Return the matmul and attention work of a model; None for other architectures."""
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    shape = _shape(train)
    reaches: tuple[int | None, ...] = (None,) * shape.layers
    if layout == "modernbert":
        reaches = _reaches(train, shape.layers)
    has_sparse_last_layer = reaches[-1] is None
    predicted_only = 0
    if has_sparse_last_layer:
        keys_and_values = 2 * shape.hidden_size**2
        predicted_only = shape.weights_per_layer - keys_and_values
    padded_vocab_size = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    mlm_head = shape.hidden_size**2 + shape.hidden_size * padded_vocab_size
    return ModelWork(
        parameters=parameters,
        weights_per_token=shape.layer_weights - predicted_only,
        weights_per_predicted_token=mlm_head + predicted_only,
        attention_width=shape.hidden_size,
        reaches=reaches,
        last_layer_narrow=has_sparse_last_layer,
    )


def estimate_vocab_size(train: TrainConfig, parameters: int) -> int | None:
    """Return the size of the embedding table, to within 1 or 2 %.

    Estimated as the parameters that the layers and the head leave.

    Returns:
        The number of ids, or None for other architectures.
    """
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    shape = _shape(train)
    hidden_size = shape.hidden_size
    other_parameters = shape.layer_weights + hidden_size**2
    if layout == "bert":
        intermediate_size = config_number(train, "intermediate_size", 4 * hidden_size)
        biases_and_norms = 9 * hidden_size + int(intermediate_size)
        positions = int(config_number(train, "max_position_embeddings", 512))
        other_parameters += shape.layers * biases_and_norms + hidden_size * positions
    # An id has a vector in the embedding and a bias in the head.
    return max(1, (parameters - other_parameters) // (hidden_size + 1))


def gradient_parts(train: TrainConfig, parameters: int) -> tuple[GradientPart, ...]:
    """Return the gradients in the order of the backward pass.

    Those of the layers become ready one after the other; all others come at once, as
    those of embeddings are ready last.
    """
    shape = _shape(train)
    in_layers = min(parameters, shape.layer_weights)
    parts = shape.layers * _PARTS_PER_LAYER
    elements = max(1, in_layers // parts)
    in_order = [
        GradientPart(elements=elements, ready_share=number / parts)
        for number in range(1, parts + 1)
    ]
    last = GradientPart(elements=max(1, parameters - in_layers), ready_share=1.0)
    return (*in_order, last)


def largest_gather_bytes(train: TrainConfig, parameters: int) -> int:
    """Return the most bytes that fsdp2 gathers at once, in fp32.

    They are the embedding table's, or a layer's.
    """
    shape = _shape(train)
    embedding = parameters - shape.layer_weights
    return 4 * max(shape.weights_per_layer, embedding)


def _reaches(train: TrainConfig, layers: int) -> tuple[int | None, ...]:
    """Return the reach of each layer of ModernBERT, as ``ModelWork.reaches``."""
    window_tokens = config_number(train, "local_attention", _LOCAL_ATTENTION_TOKENS)
    reach = int(window_tokens) // 2
    kinds = train.model.config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(reach if kind == "sliding_attention" else None for kind in kinds)
    global_every = config_count(train, "global_attn_every_n_layers", _GLOBAL_EVERY)
    return tuple(reach if number % global_every else None for number in range(layers))


def attention_dropout(train: TrainConfig) -> float:
    """Return the attention dropout in effect, 0 to 1."""
    if train.attention_dropout is not None:
        return train.attention_dropout
    if train.model.config["model_type"] == "modernbert":
        return float(config_number(train, "attention_dropout", 0.0))
    return float(config_number(train, "attention_probs_dropout_prob", 0.1))


def config_number(train: TrainConfig, key: str, default: float) -> float:
    """Return a number of the model's config.

    Returns:
        The number, or the default if it is missing or not plausible.
    """
    value = train.model.config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return default
    return value if 0 <= value < _SIZE_LIMIT else default


def config_count(train: TrainConfig, key: str, default: int) -> int:
    """Return a count of the model's config that is at least 1.

    Returns:
        The count, or the default if it is missing, not plausible or 0.
    """
    return int(config_number(train, key, default)) or default


def position_share(train: TrainConfig, parameters: int | None) -> float:
    """Return the share of a step's matmuls that grows with all positions.

    Padding included. The rest (sparse head, ten of the last layer's twelve parts) grows
    with the positions to predict. Counted in multiply-adds with weights, without
    attention's own matmuls.

    Returns:
        The share; 1 without ``parameters``, and for other architectures.
    """
    if parameters is None or train.mlm_head == "dense":
        return 1.0
    if FAMILIES.get(train.model.config["model_type"]) is None:
        return 1.0
    shape = _shape(train)
    in_layers = shape.layer_weights
    embedding = max(0.0, parameters - in_layers)  # mostly the embedding table
    predicted_only = 0.0
    if train.last_layer == "sparse":
        predicted_only = _PREDICTED_ONLY_SHARE * shape.weights_per_layer
    at_predicted = train.masking_probability * (
        embedding + shape.hidden_size**2 + predicted_only
    )
    at_all = in_layers - predicted_only
    return at_all / (at_all + at_predicted)
