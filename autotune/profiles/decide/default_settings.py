"""Settings of a profile that follow from its model or device. Pure."""

from typing import Literal

from trainer.formats.batch_split import Layout
from trainer.formats.families import FAMILIES
from trainer.formats.train_config import ModelSettings, Precision


def default_layout(model: ModelSettings) -> Layout:
    """Return ``packed`` if the trainer packs sequences of this architecture.

    Of other architectures it cannot prevent cross-document attention, so they are
    ``padded``.
    """
    return "packed" if model.config["model_type"] in FAMILIES else "padded"


def default_precision(device: Literal["cpu", "cuda"]) -> Precision:
    """Return the default matmul precision of a device."""
    return "bf16" if device == "cuda" else "fp32"
