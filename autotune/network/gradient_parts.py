"""Gradients of a model in the order in which they become ready, from its config."""

from autotune.evidence.network import GradientPart
from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.train_config import TrainConfig

_PARTS_PER_LAYER = 4
"""Equal parts in which the gradients of a layer are assumed to become ready."""


def gradient_parts(train: TrainConfig, parameters: int) -> tuple[GradientPart, ...]:
    """Return the gradients of a model in the order in which they become ready.

    Those of the layers become ready one after the other. All others come last and at
    once, as most of them are those of embeddings.

    Args:
        train: Settings with the model's config.
        parameters: Number of all parameters. As the parts of layers are equal, the
            gradients may have fewer elements, by less than the number of these parts.
    """
    shape = encoder_shape(train)
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


EVEN_PARTS = 32
"""Parts in which the gradients of a model with unknown layers are assumed to become
ready."""


def even_gradient_parts(elements: int) -> tuple[GradientPart, ...]:
    """Return gradients that become ready evenly during backward.

    It is for models whose layers are not known.

    Args:
        elements: Number of elements of all gradients.
    """
    return tuple(
        GradientPart(
            elements=max(1, elements // EVEN_PARTS), ready_share=number / EVEN_PARTS
        )
        for number in range(1, EVEN_PARTS + 1)
    )
