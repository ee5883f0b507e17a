"""What of a model's products every place of a row costs, and what only places to predict do. Pure.

A masked head computes places to predict, and so do ten of the last layer's twelve parts; padding costs neither. Counted
in multiply-adds with weights; attention's own products are left out.
"""

from trainer.config import TrainConfig
from trainer.families import FAMILIES

HIDDEN_SIZE, LAYERS = 768, 12
"""Where a config leaves them out: BERT's, and those of most encoders."""
_NARROW_PARTS = 10 / 12
"""Of a layer, that only its result needs: queries, output and MLP, but neither keys nor values."""


def of_model(train: TrainConfig, key: str, default: float) -> float:
    """A number of the model's config."""
    value = train.model.config.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def layer_weights(train: TrainConfig) -> float:
    """Of one layer's matrices."""
    hidden = of_model(train, "hidden_size", HIDDEN_SIZE)
    inner = of_model(train, "intermediate_size", 4 * hidden)
    gated = 3 if train.model.config["model_type"] == "modernbert" else 2
    return 4 * hidden**2 + gated * hidden * inner


def place_share(train: TrainConfig, parameters: int | None) -> float:
    """Part of a step's products that grows with all places, padding included; the rest grows with places to predict.

    Args:
        train: With the model's config.
        parameters: Of the model; without them nothing is known of its vocabulary, and all counts.
    """
    if parameters is None or train.head == "dense" or train.model.config["model_type"] not in FAMILIES:
        return 1.0
    hidden, layers = of_model(train, "hidden_size", HIDDEN_SIZE), of_model(train, "num_hidden_layers", LAYERS)
    body = layers * layer_weights(train)
    embedded = max(0.0, parameters - body)  # of which the table of embeddings is by far the most
    narrow = _NARROW_PARTS * layer_weights(train) if train.last_layer == "predicted" else 0.0
    predicted = train.masking_probability * (embedded + hidden**2 + narrow)
    return (body - narrow) / (body - narrow + predicted)
