"""Work of a model of a known architecture, from its config alone. Pure.

``trainer.matmul_weights`` counts it on a built model.
"""

import math

from autotune.base.encoder_shape import encoder_shape
from autotune.base.model_config import config_number
from trainer.formats.train_config import TrainConfig
from trainer.model.flops import ModelWork

_VOCAB_MULTIPLE = 64
"""Multiple to which the trainer pads the embedding table, for whole tiles."""


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
    shape = encoder_shape(train)
    if shape.layout is None:
        return None
    padded_vocab_size = math.ceil(vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    mlm_head_weights = shape.hidden_size**2 + shape.hidden_size * padded_vocab_size
    return ModelWork(
        parameters=parameters,
        weights_per_token=shape.layer_weights - shape.masked_only_weights,
        weights_per_predicted_token=mlm_head_weights + shape.masked_only_weights,
        attention_width=shape.hidden_size,
        reaches=shape.reaches,
        last_layer_narrow=shape.can_have_sparse_last_layer,
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
    shape = encoder_shape(train)
    if shape.layout is None:
        return None
    hidden_size = shape.hidden_size
    other_parameters = shape.layer_weights + hidden_size**2
    if shape.layout == "bert":
        # Nine vectors have the hidden size: the biases of query, key, value, the
        # attention's output and the MLP's output, and weight and bias of two norms.
        biases_and_norms = 9 * hidden_size + shape.intermediate_size
        positions = int(config_number(train, "max_position_embeddings", 512))
        other_parameters += shape.layers * biases_and_norms + hidden_size * positions
    # Each token id has a vector in the embedding and a bias in the head.
    return max(1, (parameters - other_parameters) // (hidden_size + 1))


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
    shape = encoder_shape(train)
    if shape.layout is None:
        return 1.0
    # Mostly the embedding table, which is also the last matrix of the MLM head.
    embedding_weights = max(0, parameters - shape.layer_weights)
    masked_only_weights = 0
    if train.last_layer == "sparse":
        masked_only_weights = shape.masked_only_weights
    # Multiply-adds for each position, on average.
    predicted_work = train.masking_probability * (
        embedding_weights + shape.hidden_size**2 + masked_only_weights
    )
    common_work = shape.layer_weights - masked_only_weights
    return common_work / (common_work + predicted_work)
