"""Sizes of an encoder's layers, from the model's config alone."""

from dataclasses import dataclass

from trainer.formats.families import FAMILIES, LayerLayout
from trainer.formats.model_config import (
    HIDDEN_SIZE,
    LAYERS,
    config_count,
    config_number,
)
from trainer.formats.train_config import TrainConfig

_GLOBAL_EVERY = 3
"""Default of ModernBERT: every third layer, from the first one, attends to the whole
document."""
_LOCAL_ATTENTION_TOKENS = 128
"""Default of ModernBERT: tokens in the window of the other layers, both sides
together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """Sizes of an encoder's layers, with defaults for those that its config lacks."""

    layout: LayerLayout | None
    """Layout of the layers; None if it is not known, and taken for BERT's."""
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    layers: int
    """Number of layers."""
    reaches: tuple[int | None, ...]
    """Tokens on each side to which a layer attends, for every layer; None for the whole
    document."""

    @property
    def weights_per_layer(self) -> int:
        """Elements of the matrices of one layer."""
        attention_weights = 4 * self.hidden_size**2  # query, key, value and output
        # ModernBERT's MLP has a gate beside the two matrices of BERT's.
        mlp_matrices = 3 if self.layout == "modernbert" else 2
        mlp_weights = mlp_matrices * self.hidden_size * self.intermediate_size
        return attention_weights + mlp_weights

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.layers * self.weights_per_layer

    @property
    def weights_per_token(self) -> int:
        """Elements of the layers' matrices that every token is multiplied with.

        ``trainer.matmul_weights`` counts them on a built model.
        """
        return self.layer_weights - self.masked_only_weights

    @property
    def can_have_sparse_last_layer(self) -> bool:
        """True if the trainer can compute the last layer for masked tokens only.

        It cannot if the last layer's attention has a window.
        """
        return self.layout is not None and self.reaches[-1] is None

    @property
    def masked_only_weights(self) -> int:
        """Elements of the last layer that only masked tokens are multiplied with.

        Keys and values are computed for every token; 0 if the last layer cannot be
        sparse.
        """
        if not self.can_have_sparse_last_layer:
            return 0
        key_and_value_weights = 2 * self.hidden_size**2
        return self.weights_per_layer - key_and_value_weights


def encoder_shape(train: TrainConfig) -> EncoderShape:
    """Return the sizes in a model's config."""
    layout = FAMILIES.get(train.model.config["model_type"])
    hidden_size = config_count(train, "hidden_size", HIDDEN_SIZE)
    layers = config_count(train, "num_hidden_layers", LAYERS)
    if layout == "modernbert":
        reaches = _reaches_of_modernbert(train, layers)
    else:
        # Every layer attends to whole documents.
        reaches = (None,) * layers
    return EncoderShape(
        layout=layout,
        hidden_size=hidden_size,
        intermediate_size=int(
            config_number(train, "intermediate_size", 4 * hidden_size)
        ),
        layers=layers,
        reaches=reaches,
    )


def _reaches_of_modernbert(train: TrainConfig, layers: int) -> tuple[int | None, ...]:
    """Return ``EncoderShape.reaches`` of a ModernBERT with this number of layers."""
    window_tokens = config_number(train, "local_attention", _LOCAL_ATTENTION_TOKENS)
    reach = int(window_tokens) // 2
    kinds = train.model.config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(reach if kind == "sliding_attention" else None for kind in kinds)
    global_every = config_count(train, "global_attn_every_n_layers", _GLOBAL_EVERY)
    return tuple(reach if number % global_every else None for number in range(layers))
