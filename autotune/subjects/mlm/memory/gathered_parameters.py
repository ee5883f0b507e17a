"""Parameters that fsdp2 gathers, from the model's config. Pure."""

from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.train_config import TrainConfig

_FP32_BYTES = 4
"""Bytes of an fp32 number."""


def largest_gather_bytes(train: TrainConfig, parameters: int) -> int:
    """Return the bytes of the most parameters that fsdp2 gathers at once, in fp32.

    It gathers the parameters of one layer, or all those outside of the layers.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters.
    """
    shape = encoder_shape(train)
    outside_layers = parameters - shape.layer_weights
    return _FP32_BYTES * max(shape.weights_per_layer, outside_layers)
