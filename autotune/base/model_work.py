"""Work of a model of a known architecture, from its config alone. Pure.

The work is FLOPs of a step, sizes of matrices, and gradients in the order in which the
backward pass finishes them. ``trainer.matmul_weights`` counts the first two on a built
model.
"""

import math
from dataclasses import dataclass

from autotune.network.values import GradientPart
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.model.flops import ModelWork

HIDDEN_SIZE = 768
"""Default for configs that leave it out: BERT's, and that of most encoders."""
LAYERS = 12
"""Default number of layers for configs that leave it out: BERT's."""
_FP32_BYTES = 4
"""Bytes of an fp32 number."""
_PREDICTED_ONLY_SHARE = 10 / 12
"""Share of a layer that a sparse last layer computes for masked tokens only: all but
keys and values. In units of a matrix of the hidden size, attention has 4, two of them
for keys and values, and an MLP of four times the hidden size has 8."""
_VOCAB_MULTIPLE = 64
"""Multiple to which the trainer pads the embedding table, for whole tiles."""
_PARTS_PER_LAYER = 4
"""Equal parts in which the gradients of a layer are assumed to become ready."""
_SIZE_LIMIT = 2**20
"""Size or count in a model's config from which it is not plausible."""
_GLOBAL_EVERY = 3
"""Default of ModernBERT: every third layer, from the first one, attends to the whole
document."""
_LOCAL_ATTENTION_TOKENS = 128
"""Default of ModernBERT: tokens in the window of the other layers, both sides
together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncoderShape:
    """Sizes of an encoder's layers."""

    hidden_size: int
    layers: int
    """Number of layers."""
    weights_per_layer: int
    """Elements of the matrices of one layer."""

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.layers * self.weights_per_layer


def _shape(train: TrainConfig) -> _EncoderShape:
    """Return the sizes in a model's config, with defaults for those that it lacks."""
    hidden_size = config_count(train, "hidden_size", HIDDEN_SIZE)
    intermediate_size = config_number(train, "intermediate_size", 4 * hidden_size)
    # ModernBERT's MLP has a gate beside the two matrices of BERT's.
    mlp_matrices = 3 if train.model.config["model_type"] == "modernbert" else 2
    attention_weights = 4 * hidden_size**2  # query, key, value and output
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
    """Return the work that ``trainer.matmul_weights`` would count on the built model.

    Args:
        train: Settings with the model's config.
        vocab_size: Number of token ids, without padding of the embedding table.
        parameters: Number of all parameters.

    Returns:
        The work, or None if the architecture is not known.
    """
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    shape = _shape(train)
    if layout == "modernbert":
        reaches = _reaches_of_modernbert(train, shape.layers)
    else:
        # Every layer attends to whole documents.
        reaches = (None,) * shape.layers
    # The last layer is sparse unless its attention has a window.
    has_sparse_last_layer = reaches[-1] is None
    predicted_only = 0
    if has_sparse_last_layer:
        keys_and_values = 2 * shape.hidden_size**2
        predicted_only = shape.weights_per_layer - keys_and_values
    padded_vocab_size = math.ceil(vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
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
    """Return the number of vectors in the embedding table, 2 % off at most.

    It follows from the parameters outside of the layers and the MLM head.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters.

    Returns:
        The number of vectors, or None if the architecture is not known.
    """
    layout = FAMILIES.get(train.model.config["model_type"])
    if layout is None:
        return None
    shape = _shape(train)
    hidden_size = shape.hidden_size
    other_parameters = shape.layer_weights + hidden_size**2
    if layout == "bert":
        intermediate_size = config_number(train, "intermediate_size", 4 * hidden_size)
        # Nine vectors have the hidden size: the biases of query, key, value, the
        # attention's output and the MLP's output, and weight and bias of two norms.
        biases_and_norms = 9 * hidden_size + int(intermediate_size)
        positions = int(config_number(train, "max_position_embeddings", 512))
        other_parameters += shape.layers * biases_and_norms + hidden_size * positions
    # Each token id has a vector in the embedding and a bias in the head.
    return max(1, (parameters - other_parameters) // (hidden_size + 1))


def gradient_parts(train: TrainConfig, parameters: int) -> tuple[GradientPart, ...]:
    """Return the gradients of a model in the order in which they become ready.

    Those of the layers become ready one after the other. All others come last and at
    once, as most of them are those of embeddings.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters. As the parts of layers are equal, the
            gradients may have fewer elements, by less than the number of these parts.
    """
    shape = _shape(train)
    parameters_in_layers = min(parameters, shape.layer_weights)
    part_count = shape.layers * _PARTS_PER_LAYER
    elements = max(1, parameters_in_layers // part_count)
    parts_of_layers = [
        GradientPart(elements=elements, ready_share=number / part_count)
        for number in range(1, part_count + 1)
    ]
    others = GradientPart(
        elements=max(1, parameters - parameters_in_layers), ready_share=1.0
    )
    return (*parts_of_layers, others)


def largest_gather_bytes(train: TrainConfig, parameters: int) -> int:
    """Return the bytes of the most parameters that fsdp2 gathers at once, in fp32.

    It gathers the parameters of one layer, or all those outside of the layers.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters.
    """
    shape = _shape(train)
    outside_layers = parameters - shape.layer_weights
    return _FP32_BYTES * max(shape.weights_per_layer, outside_layers)


def _reaches_of_modernbert(train: TrainConfig, layers: int) -> tuple[int | None, ...]:
    """Return ``ModelWork.reaches`` of a ModernBERT with this number of layers."""
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
    """Return the share of a step's matmuls that all positions take part in.

    Padding is among these positions. Only the positions to predict take part in the
    other matmuls: those of a sparse MLM head, and most of a sparse last layer. The
    share is one of multiply-adds with weights; attention's own matmuls are left out.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters; None if it is not known.

    Returns:
        The share; 1 without ``parameters``, and if the architecture is not known.
    """
    if parameters is None or train.mlm_head == "dense":
        return 1.0
    if FAMILIES.get(train.model.config["model_type"]) is None:
        return 1.0
    shape = _shape(train)
    # Mostly the embedding table, which is also the last matrix of the MLM head.
    embedding_weights = max(0.0, parameters - shape.layer_weights)
    predicted_only = 0.0
    if train.last_layer == "sparse":
        predicted_only = _PREDICTED_ONLY_SHARE * shape.weights_per_layer
    # Multiply-adds for each position, on average.
    predicted_work = train.masking_probability * (
        embedding_weights + shape.hidden_size**2 + predicted_only
    )
    common_work = shape.layer_weights - predicted_only
    return common_work / (common_work + predicted_work)
