"""Architectures whose parts this project knows: where the encoder, its layers and its head are. No torch here.

Their encoders hand keyword arguments down to attention functions, take a 4-D mask as it is, and know a token's place by
``position_ids`` alone; a test moves one document and sees its neighbours unmoved. Others train with padded rows and a
head on all places.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of architecture."""

    encoder: str
    """Attribute of transformers' masked-LM model."""
    layers: str
    """Path from there to the list of layers."""
    head: tuple[str, ...]
    """Attributes that turn hidden states into logits, one after the other."""
    layer: Literal["bert", "modernbert"]
    """How a layer is built."""
    positions_after_pad: bool = False
    """Whether positions count from the padding id plus one."""


_ROBERTA = Family(encoder="roberta", layers="encoder.layer", head=("lm_head",), layer="bert", positions_after_pad=True)

FAMILIES: dict[str, Family] = {
    "bert": Family(encoder="bert", layers="encoder.layer", head=("cls",), layer="bert"),
    "camembert": _ROBERTA,
    "modernbert": Family(encoder="model", layers="layers", head=("head", "decoder"), layer="modernbert"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""By transformers' model type."""
