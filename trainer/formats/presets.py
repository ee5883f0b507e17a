"""Model shapes, by name or from a file.

A shape is a transformers config without the vocabulary, which depends on the dataset.

``bert-120m`` is the 12 x 768 shape of the paper's public code (arXiv 2509.05258); its
350 M shape is not public, and ``bert-350m`` is BERT-large's (Devlin et al. 2018). The
ModernBERT shapes are those of Warner et al. 2024 (arXiv 2412.13663), table 4.
"""

import re
from pathlib import Path
from typing import Any

from trainer.formats.errors import BadConfig
from trainer.formats.tables import nearest, parse_table, read_json, read_toml
from trainer.formats.train_config import ModelSettings

# Without attention dropout, as in the paper's trainer and newer encoders: varlen
# attention has none.
_BERT: dict[str, Any] = {
    "model_type": "bert",
    "max_position_embeddings": 512,
    "attention_probs_dropout_prob": 0.0,
}
_MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "max_position_embeddings": 8192,
}


def _shape(
    family: dict[str, Any],
    *,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
) -> dict[str, Any]:
    """Return a shape, from its sizes and the keys that a family of models shares."""
    return family | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Small enough for a laptop's CPU.
    "bert-mini": _shape(_BERT, layers=4, hidden=256, heads=4, intermediate=1024),
    # Slow on a CPU.
    "bert-small": _shape(_BERT, layers=6, hidden=512, heads=8, intermediate=2048),
    "bert-120m": _shape(_BERT, layers=12, hidden=768, heads=12, intermediate=3072),
    "bert-350m": _shape(_BERT, layers=24, hidden=1024, heads=16, intermediate=4096),
    "modernbert-base": _shape(
        _MODERNBERT, layers=22, hidden=768, heads=12, intermediate=1152
    ),
    "modernbert-large": _shape(
        _MODERNBERT, layers=28, hidden=1024, heads=16, intermediate=2624
    ),
}
"""Shapes of the built-in models, by name."""

_KEYS_BESIDE_SHAPE = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "cls_token_id",
    "dtype",
    "eos_token_id",
    "mask_token_id",
    "pad_token_id",
    "quantization_config",
    "sep_token_id",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "vocab_size",
}
"""Keys of a transformers config that are no part of a shape: the dataset sets them,
they are specific to a saved copy, or they name custom code."""


def model_settings(name: str) -> ModelSettings:
    """Return the settings of a preset, a transformers ``config.json`` or a profile.

    Raises:
        BadConfig: If it is none of them.
    """
    if name in PRESETS:
        return ModelSettings(name=name, config=PRESETS[name])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".toml":
        return _model_of_profile(path)
    if path.suffix != ".json":
        raise _unknown_model(name)
    shape = _read_shape(path)
    settings = {
        "name": _model_name(path),
        "config": {key: value for key, value in shape.items() if value is not None},
        # TOML has no null, and a null may differ from the type's default.
        "null_keys": sorted(key for key, value in shape.items() if value is None),
    }
    return parse_table(ModelSettings, settings, where=str(path))


def _model_of_profile(path: Path) -> ModelSettings:
    """Return the model that a profile was tuned for.

    Raises:
        BadConfig: If the file is no profile.
    """
    train = read_toml(path, if_missing="Pass an existing profile.").get("train")
    model = train.get("model") if isinstance(train, dict) else None
    if model is None:
        raise BadConfig(
            f"{path} names no model: it has no [train.model] table",
            next_step="Pass a profile of the bundled trainer, or a config.json.",
        )
    return parse_table(ModelSettings, model, where=f"{path}: train.model")


def _unknown_model(name: str) -> BadConfig:
    """Return the error for a name that is neither a preset nor a file."""
    next_step = (
        f"Built-in models: {', '.join(PRESETS)}; or pass the config.json of a masked-LM"
        " model, or a profile of it."
    )
    match = nearest(name, list(PRESETS))
    if match is not None:
        next_step = f"Did you mean {match!r}? {next_step}"
    return BadConfig(f"unknown model {name!r}", next_step=next_step)


def _read_shape(path: Path) -> dict[str, Any]:
    """Read the shape in a transformers config.

    Raises:
        BadConfig: If the file is no such config, or requires custom code.
    """
    config = read_json(path, max_bytes=2**20)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadConfig(
            f"{path} is not a transformers config: no model_type",
            next_step="Pass a config.json.",
        )
    if "auto_map" in config:
        raise BadConfig(
            f"{path} requires custom code (auto_map), which is not supported",
            next_step=(
                "Remove auto_map if transformers itself has this architecture;"
                " otherwise choose another model."
            ),
        )
    return {
        key: value
        for key, value in config.items()
        if key not in _KEYS_BESIDE_SHAPE and not key.startswith("_")
    }


def _model_name(path: Path) -> str:
    """Return the name of the model in a file, with the characters of file names."""
    name = path.stem
    if path.name == "config.json":
        name = path.parent.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:128] or "model"
