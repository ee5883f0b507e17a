"""Configs of small models of any architecture of transformers."""

from transformers import PretrainedConfig

from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import ModelSettings
from trainer.model.encoder_config import build_config

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
_SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
}
_OWN_SIZES = {"electra": {"embedding_size": 64}, "squeezebert": {"embedding_size": 64}}
"""Sizes of an architecture that must match those of ``_SMALL``."""


def small_config(model_type: str, **changes: object) -> PretrainedConfig:
    """Return the transformers config of a small model, with changes of its shape."""
    own_sizes = _OWN_SIZES.get(model_type, {})
    shape = {"model_type": model_type} | _SMALL | own_sizes | changes
    return build_config(
        ModelSettings(name="m", config=shape),
        vocab_size=100,
        special_ids=IDS,
        seq_length_tokens=64,
    )
