"""Untuned settings of the bundled trainer: those of torch and transformers.

Only settings that affect speed change. Model, dataset, sequence length, device and the
non-padding tokens of the global batch stay the same. Everything here is pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.evidence.baseline import UNTUNED, SettingDifference
from trainer.formats.families import FAMILIES
from trainer.formats.train_config import (
    DataSettings,
    ParallelSettings,
    Tag,
    TrainConfig,
    tagged,
)

PADDED = "padded"
"""Name of the recipe that pads samples to the full length."""
PADDED_WORKERS = 8
"""DataLoader workers per rank of the recipe that pads samples, as the paper's trainer
has."""

_DEFAULT_MICRO_BATCH_SIZE = 8
"""Default of ``per_device_train_batch_size`` in transformers."""
_DEFAULT_WORKERS = 0
"""Default of ``dataloader_num_workers`` in transformers."""

_SPEED_SETTINGS = tagged(TrainConfig, Tag.SPEED)
"""Names of settings that affect the speed of a step."""
_LOADER_SETTINGS = tagged(DataSettings, Tag.LOADER)
"""Names of settings of data loading, all of which affect speed."""
_PLAIN_STEP = {
    "precision": "fp32",
    "residual_dtype": "fp32",
    "float8": "none",
    "tf32": False,
    "mlm_head": "dense",
    "fused_cross_entropy": False,
    "fused_norms": False,
    "gelu_epilogues": False,
    "last_layer": "dense",
    "attention": "auto",
    "attention_dropout": None,
    "activation_checkpointing": "none",
    "compile": False,
}
"""Settings of a step that both recipes share: defaults of torch and transformers.
Attention is SDPA, which ``auto`` selects in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Named training configuration to compare."""

    name: str
    """Name, unique in a comparison."""
    config: TrainConfig
    """All settings of the training."""
    because: Mapping[str, str]
    """Reasons for settings that are not the recipe's own choice, by their dotted
    names."""


def untuned(tuned: TrainConfig, global_batch_tokens: int) -> Recipe:
    """Return the defaults of transformers' Trainer as settings of the bundled trainer.

    Each micro-batch is padded to its longest sample.

    Args:
        tuned: Configuration of the tuned settings.
        global_batch_tokens: Non-padding tokens of the global batch.
    """
    config = _plain(
        tuned,
        global_batch_tokens,
        layout="dynamic",
        micro_batch_size=_DEFAULT_MICRO_BATCH_SIZE,
        num_workers=_DEFAULT_WORKERS,
    )
    return Recipe(name=UNTUNED, config=config, because={})


def padded(
    tuned: TrainConfig, global_batch_tokens: int, max_workers: int, limit: str
) -> Recipe:
    """Return settings that pad samples to the full length, as the paper's trainer does.

    They have no attention dropout. The micro-batch has the tuned size, which the
    comparison halves until it fits.

    Args:
        tuned: Configuration of the tuned settings.
        global_batch_tokens: Non-padding tokens of the global batch.
        max_workers: Most DataLoader workers of a rank on this machine.
        limit: Reason for ``max_workers``.
    """
    workers = min(PADDED_WORKERS, max_workers)
    config = _plain(
        tuned,
        global_batch_tokens,
        layout="padded",
        micro_batch_size=tuned.micro_batch_size,
        num_workers=workers,
    )
    because = {}
    if workers < PADDED_WORKERS:
        because["data.num_workers"] = (
            f"{PADDED_WORKERS} exceed the limit of this machine: {limit}"
        )
    model_type = tuned.model.config["model_type"]
    if model_type in FAMILIES:
        config = config.model_copy(update={"attention_dropout": 0.0})
    else:
        because["attention_dropout"] = (
            f"the model's own: this setting of {model_type} is not known"
        )
    return Recipe(name=PADDED, config=config, because=because)


def _plain(
    tuned: TrainConfig,
    global_batch_tokens: int,
    *,
    layout: str,
    micro_batch_size: int,
    num_workers: int,
) -> TrainConfig:
    """Return the tuned configuration with defaults for all settings of speed.

    Args:
        tuned: Configuration of the tuned settings.
        global_batch_tokens: Non-padding tokens of the global batch.
        layout: Layout of sequences.
        micro_batch_size: Sequences of a micro-batch.
        num_workers: DataLoader workers of a rank.
    """
    loading = {
        name: DataSettings.model_fields[name].default for name in _LOADER_SETTINGS
    }
    # DDP's own default, unlike this trainer's.
    parallel = ParallelSettings(
        timeout_s=tuned.parallel.timeout_s, gradient_as_bucket_view=False
    )
    changes = {
        **_PLAIN_STEP,
        "layout": layout,
        "micro_batch_size": micro_batch_size,
        "global_batch_tokens": global_batch_tokens,
        "global_batch_samples": None,
        "data": tuned.data.model_copy(update=loading | {"num_workers": num_workers}),
        "parallel": parallel,
    }
    return tuned.model_copy(update=changes)


def differences(
    recipe: Recipe, tuned: TrainConfig, local_ranks: int
) -> list[SettingDifference]:
    """Return a recipe's differences from the tuned settings that affect speed.

    A setting with a reason is included even if it equals the tuned one. With one rank,
    settings of gradient synchronisation are left out.
    """
    tuned_values = _speed_values(tuned, local_ranks)
    recipe_values = _speed_values(recipe.config, local_ranks)
    return [
        SettingDifference(
            key=key,
            theirs=value,
            tuned=tuned_values[key],
            reason=recipe.because.get(key),
        )
        for key, value in recipe_values.items()
        if value != tuned_values[key] or key in recipe.because
    ]


def _speed_values(config: TrainConfig, local_ranks: int) -> dict[str, Any]:
    """Return the settings that affect speed, by their dotted names."""
    values = {name: getattr(config, name) for name in _SPEED_SETTINGS}
    if config.device == "cpu":
        del values["tf32"]  # has no effect on CPUs
    for name in _LOADER_SETTINGS:
        values[f"data.{name}"] = getattr(config.data, name)
    if local_ranks > 1:
        for name in sorted(ParallelSettings.model_fields.keys() - {"timeout_s"}):
            values[f"parallel.{name}"] = getattr(config.parallel, name)
    return values
