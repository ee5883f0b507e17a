"""Numbers of a model's config, which a user may have written by hand.

Configs leave out what is the default of their architecture, and may hold anything.
"""

from trainer.formats.train_config import TrainConfig

HIDDEN_SIZE = 768
"""Default for configs that leave it out: BERT's, and that of most encoders."""
LAYERS = 12
"""Default number of layers for configs that leave it out: BERT's."""
_SIZE_LIMIT = 2**20
"""Size or count in a model's config from which it is not plausible."""


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


def attention_dropout(train: TrainConfig) -> float:
    """Return the attention dropout in effect, 0 to 1."""
    if train.attention_dropout is not None:
        return train.attention_dropout
    if train.model.config["model_type"] == "modernbert":
        return float(config_number(train, "attention_dropout", 0.0))
    return float(config_number(train, "attention_probs_dropout_prob", 0.1))
