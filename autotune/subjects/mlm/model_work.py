"""Work of a model of a known architecture, from its config alone. Pure."""

from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.model_config import config_number
from trainer.formats.train_config import TrainConfig


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
