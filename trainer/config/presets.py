"""Model shapes by name or file.

A shape is a transformers config without the vocabulary, which depends on the dataset.

``bert-120m`` is the 12 x 768 shape of the paper's public code (arXiv 2509.05258); its
350 M shape is not public, and ``bert-350m`` is BERT-large's (Devlin et al. 2018). The
ModernBERT shapes are those of Warner et al. 2024 (arXiv 2412.13663), table 4.
"""

import re
from pathlib import Path
from typing import Any

from trainer.config.tables import nearest, parse_table, read_json
from trainer.config.train_config import ModelSettings
from trainer.errors import BadConfig

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
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
)


def _shape(family: dict[str, Any], *sizes: int) -> dict[str, Any]:
    return family | dict(zip(_SIZES, sizes, strict=True))


PRESETS: dict[str, dict[str, Any]] = {
    "bert-mini": _shape(_BERT, 4, 256, 4, 1024),  # small enough for a laptop's CPU
    "bert-small": _shape(_BERT, 6, 512, 8, 2048),  # slow on a CPU
    "bert-120m": _shape(_BERT, 12, 768, 12, 3072),
    "bert-350m": _shape(_BERT, 24, 1024, 16, 4096),
    "modernbert-base": _shape(_MODERNBERT, 22, 768, 12, 1152),
    "modernbert-large": _shape(_MODERNBERT, 28, 1024, 16, 2624),
}

# Set by the dataset, specific to a saved copy, or naming custom code.
_NOT_SHAPE = {
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


def model_settings(name: str) -> ModelSettings:
    """Return the settings of a preset or a transformers ``config.json``.

    Raises:
        BadConfig: If it is neither.
    """
    if name in PRESETS:
        return ModelSettings(name=name, config=PRESETS[name])
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        match = nearest(name, list(PRESETS))
        hint = f"Did you mean {match!r}? " if match else ""
        next_step = (
            f"{hint}Built-in models: {', '.join(PRESETS)}; or pass the config.json of a"
            " masked-LM model."
        )
        raise BadConfig(f"unknown model {name!r}", next_step=next_step)
    raw = read_json(path, max_bytes=2**20)
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise BadConfig(
            f"{path} is not a transformers config: no model_type",
            next_step="Pass a config.json.",
        )
    if "auto_map" in raw:
        next_step = (
            "Remove auto_map if transformers itself has this architecture; otherwise"
            " choose another model."
        )
        raise BadConfig(
            f"{path} requires custom code (auto_map), which is not supported",
            next_step=next_step,
        )
    shape = {
        key: value
        for key, value in raw.items()
        if key not in _NOT_SHAPE and not key.startswith("_")
    }
    given = path.parent.resolve().name if path.name == "config.json" else path.stem
    settings = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", given).strip("-._")[:128] or "model",
        "config": {key: value for key, value in shape.items() if value is not None},
        # TOML has no null, and a null may differ from the type's default.
        "null_keys": sorted(key for key, value in shape.items() if value is None),
    }
    return parse_table(ModelSettings, settings, where=str(path))
