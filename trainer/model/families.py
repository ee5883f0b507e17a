"""Built-in architectures: the paths of their encoder, layers and head. No torch here.

Their encoders pass keyword arguments on to attention functions, use a 4-D mask unchanged, and take positions from
``position_ids`` alone; tests check that documents do not affect each other. Other architectures train with one sample
per sequence and a dense MLM head.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Parts of a family of architectures."""

    encoder: str
    """Attribute of transformers' masked-LM model that holds the encoder."""
    layers: str
    """Path from the encoder to the list of its layers."""
    head: tuple[str, ...]
    """Attributes that turn hidden states into logits, in this order."""
    layer: Literal["bert", "modernbert"]
    positions_after_pad: bool = False
    """True if position ids start at the padding id plus one."""


_ROBERTA = Family(encoder="roberta", layers="encoder.layer", head=("lm_head",), layer="bert", positions_after_pad=True)

FAMILIES: dict[str, Family] = {
    "bert": Family(encoder="bert", layers="encoder.layer", head=("cls",), layer="bert"),
    "camembert": _ROBERTA,
    "modernbert": Family(encoder="model", layers="layers", head=("head", "decoder"), layer="modernbert"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""Families by transformers' model type."""
